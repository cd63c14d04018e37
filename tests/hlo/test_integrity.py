"""Faults planted in spliced modules: XLA would run most of them, and wrongly; our own check refuses all."""

import pytest

from reshard.errors import SpliceError
from reshard.hlo import integrity, wire
from reshard.hlo.proto import ModuleProto
from tests.hlo.splices import NAMES, recorded, splice

GROUPS, LITERAL, SIZES, SHAPE, DIMENSIONS, OPCODE, ALIASES, PAIRS = 93, 8, 20, 3, 14, 2, 8, 52


def check(old, data, changes):
    integrity.check_splices(old, ModuleProto.decode(data, like=old), changes)


@pytest.fixture(params=NAMES)
def case(request):
    module = recorded(request.param)
    proto = module.decoded()
    changes = [integrity.Change(one, splice(proto, one)) for one in module.splices]
    return module, proto, changes


def refused(case):
    module, proto, changes = case
    with pytest.raises(SpliceError) as error:
        check(module.decoded(), proto.encode(), changes)
    return str(error.value)


def added(case):
    """The instructions that came with fragments."""
    _, proto, changes = case
    ids = {number for change in changes for number in change.linked.instructions.values()}
    sources = {proto.computation_named(one.splice.region).named(one.splice.source).id for one in changes}
    return [one for one in proto.instructions() if one.id in ids - sources]


def collectives(case):
    return [one for one in added(case) if one.opcode.startswith(("all-", "collective-"))]


def kept(case):
    ids = {one.id for one in added(case)}
    return [one for one in case[1].instructions() if one.id not in ids]


def test_what_the_splicer_makes_is_accepted(case):
    module, proto, changes = case
    check(module.decoded(), proto.encode(), changes)


def test_no_splice_no_change(case):
    module, _, _ = case
    check(module.decoded(), module.module, [])


@pytest.mark.parametrize("channel", [0, 1, 77])
def test_another_channel(case, channel):
    one = next(one for one in collectives(case) if one.channel)
    if channel == one.channel:
        channel += 100
    one.channel = channel
    assert "channel" in refused(case)


def test_other_groups(case):
    one = collectives(case)[-1]
    for field in one.message.fields:
        if field.number in (GROUPS, PAIRS):
            one.message.set_data(field.number, field.value[:-1] + bytes([field.value[-1] ^ 1]))
            break
    else:
        one.message.set_data(GROUPS, b"\x12\x00")
    assert "differs from the instruction" in refused(case)


def test_a_slice_off_by_one(case):
    one = next(one for one in added(case) if one.opcode in ("slice", "dynamic-slice", "copy", "transpose", "bitcast"))
    one.message.set_numbers(SIZES, [1, 2, 3])
    assert "differs from the instruction" in refused(case)


def test_a_copy_of_another_dtype(case):
    one = next(one for one in added(case) if one.opcode in ("copy", "bitcast"))
    shape = wire.decode_message(one.shape)
    shape.set_number(2, 16)
    one.message.set_data(SHAPE, wire.encode_message(shape))
    assert refused(case)


def test_a_bitcast_for_a_copy_of_layouts(case):
    one = next(one for one in added(case) if one.opcode in ("copy", "bitcast", "transpose"))
    one.message.set_data(OPCODE, b"reverse")
    assert "differs from the instruction" in refused(case)


def test_swapped_operands(case):
    one = next((one for one in kept(case) if len(set(one.operands)) > 1 and one.opcode not in ("fusion",)), None)
    if one is None:
        one = next(one for one in kept(case) if len(set(one.operands)) > 1)
    one.operands = list(reversed(one.operands))
    assert refused(case)


@pytest.fixture(params=["scan_cpu", "scan_v5p"])
def with_constants(request):
    module = recorded(request.param)
    proto = module.decoded()
    return module, proto, [integrity.Change(one, splice(proto, one)) for one in module.splices]


def test_an_elided_constant(with_constants):
    case = with_constants
    one = next(one for one in kept(case) if one.opcode == "constant")
    one.message.remove(LITERAL)
    assert "it has changed" in refused(case)


def test_minus_zero_that_became_zero(with_constants):
    case = with_constants
    one = next(one for one in kept(case) if one.opcode == "constant")
    literal = one.message.data(LITERAL)
    one.message.set_data(LITERAL, literal[:-1] + bytes([literal[-1] ^ 0x80]))
    assert "it has changed" in refused(case)


def test_a_stale_alias(case):
    case[1].message.set_data(ALIASES, b"\x0a\x02\x08\x01")
    assert "aliases" in refused(case)


def test_a_dropped_control_edge(case):
    """A control edge of the old module, between instructions that stay, must stay as well."""
    module, _, _ = case
    old = module.decoded()
    entry = old.computation_named(module.splices[0].region)
    first, last = entry.instructions[0], entry.instructions[-1]
    last.control = [first.id]
    data = old.encode()
    proto = ModuleProto.decode(data)
    changes = [integrity.Change(one, splice(proto, one)) for one in module.splices]
    check(ModuleProto.decode(data), proto.encode(), changes)
    proto.computation_named(module.splices[0].region).by_id(last.id).control = []
    with pytest.raises(SpliceError, match="control predecessor"):
        check(ModuleProto.decode(data), proto.encode(), changes)


@pytest.mark.fast(2)
def test_a_control_edge_through_what_is_gone(case):
    module, spliced_before, _ = case
    region = module.splices[0].region
    old = module.decoded()
    computation = old.computation_named(region)
    left = {one.id for one in spliced_before.computation_named(region).instructions}
    gone = next(one for one in computation.instructions if one.id not in left)
    first, last = computation.instructions[0], computation.instructions[-1]
    gone.control, last.control = [first.id], [gone.id]
    data = old.encode()
    proto = ModuleProto.decode(data)
    changes = [integrity.Change(one, splice(proto, one)) for one in module.splices]
    assert first.id in proto.computation_named(region).by_id(last.id).control
    check(ModuleProto.decode(data), proto.encode(), changes)


def test_a_dead_parameter(case):
    fusion = next((one for one in kept(case) if one.opcode == "fusion"), None)
    if fusion is None:
        assert case[0] == recorded("train_v5p")  # Its only fusion was the slice.
        return
    fusion.operands = [*fusion.operands, fusion.operands[0]]
    assert refused(case)


def test_an_instruction_too_many(case):
    _, proto, _ = case
    copy = proto.entry.instructions[0].copy()
    copy.id = proto.entry.new_ids(1)[0]
    copy.name = "smuggled"
    proto.entry.instructions.append(copy)
    if proto.schedule is not None:
        proto.schedule[proto.entry.id].append(copy.id)
    assert "smuggled" in refused(case)


def test_a_name_twice(case):
    one, other, *_ = kept(case)
    one.name = other.name
    assert "twice" in refused(case)


def test_an_instruction_missing(case):
    _, proto, _ = case
    one = collectives(case)[0]
    for computation in proto.computations:
        if one in computation.instructions:
            computation.instructions.remove(one)
    assert refused(case)


def test_another_root(case):
    _, proto, _ = case
    proto.entry.root_id = proto.entry.instructions[0].id
    assert refused(case)


def test_computations_out_of_order(case):
    _, proto, _ = case
    proto.computations.reverse()
    assert "does not stand before" in refused(case)


@pytest.mark.parametrize("name", ["train_v5p", "scan_v5p"])
@pytest.mark.parametrize("fault", ["lost", "short", "order", "region"])
def test_a_broken_schedule(name, fault):
    """Compiling a TPU module without its schedule ends the process."""
    module = recorded(name)
    proto = module.decoded()
    changes = [integrity.Change(one, splice(proto, one)) for one in module.splices]
    assert proto.schedule is not None
    ids = proto.schedule[proto.entry.id]
    if fault == "lost":
        proto.message.remove(7)
        proto.schedule = None
    elif fault == "short":
        ids.pop()
    elif fault == "order":
        ids.reverse()
    else:
        del proto.schedule[proto.entry.id]
    with pytest.raises(SpliceError, match="schedule"):
        check(module.decoded(), proto.encode(), changes)
