import pytest

from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import remove_uncalled, remove_unused
from tests.hlo.splices import NAMES, recorded


def remove_dead(proto, region):
    """Both removals, as after a splice that opened these computations."""
    remove_unused(proto, region, {one.id for one in proto.computations if one.is_opened})
    remove_uncalled(proto)


def with_copy(proto, of, opcode="copy"):
    """Adds an instruction that nobody uses, a copy of `of`."""
    entry = proto.entry
    made = of.copy()
    made.message.set_data(2, opcode.encode())
    made.message.remove(38)
    made.id = entry.new_ids(1)[0]
    made.name = "unused"
    made.operands = [of.id]
    entry.instructions.insert(entry.instructions.index(of) + 1, made)
    if proto.schedule is not None:
        proto.schedule[entry.id].insert(proto.schedule[entry.id].index(of.id) + 1, made.id)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_module_in_which_all_is_used_stays(name):
    module = recorded(name)
    proto = module.decoded()
    remove_dead(proto, proto.entry)
    assert proto.encode() == module.module


@pytest.mark.parametrize("name", NAMES)
def test_an_unused_copy_goes(name):
    module = recorded(name)
    proto = module.decoded()
    with_copy(proto, proto.entry.instructions[0])
    assert proto.encode() != module.module
    remove_dead(proto, proto.entry)
    assert proto.encode() == module.module


def test_what_may_have_an_effect_stays():
    proto = recorded("train_cpu").decoded()
    with_copy(proto, proto.entry.instructions[0], "custom-call").message.set_number(65, 1)
    remove_dead(proto, proto.entry)
    assert proto.entry.named("unused")


def test_a_call_of_foreign_code_without_an_effect_goes():
    module = recorded("train_cpu")
    proto = module.decoded()
    with_copy(proto, proto.entry.instructions[0], "custom-call")
    remove_dead(proto, proto.entry)
    assert proto.encode() == module.module


def test_control_edges_go_around_what_is_gone():
    proto = recorded("train_v5p").decoded()
    entry = proto.entry
    first, last = entry.instructions[0], entry.root
    made = with_copy(proto, entry.instructions[1])
    made.control, last.control = [first.id], [made.id]
    remove_dead(proto, entry)
    assert last.control == [first.id]


def test_a_fusion_loses_parameters_and_their_makers():
    proto = recorded("train_cpu").decoded()
    entry = proto.entry
    fusion = next(one for one in entry.instructions if one.opcode == "fusion" and len(one.operands) > 1)
    inner = proto.computation(fusion.called[0])
    keeps, goes = inner.parameters[0], inner.parameters[1]
    for user in inner.users(goes.id):
        user.operands = [keeps.id if one == goes.id else one for one in user.operands]
    before = len(fusion.operands)
    remove_dead(proto, entry)
    assert len(fusion.operands) == before - 1
    assert [one.parameter for one in inner.parameters] == list(range(before - 1))
    again = ModuleProto.decode(proto.encode())
    shapes = again.computation(inner.id).message.data(4)
    assert shapes is not None and goes.name.encode() not in shapes


def test_computations_that_nobody_calls_go():
    proto = recorded("scan_v5p").decoded()
    assert proto.schedule is not None
    loop = next(one for one in proto.entry.instructions if one.opcode == "while")
    called = set(loop.called)
    proto.entry.root_id = proto.entry.instructions[0].id
    loop.called = []
    remove_dead(proto, proto.entry)
    assert not called & {one.id for one in proto.computations}
    assert not called & set(proto.schedule)
