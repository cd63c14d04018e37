"""Fragments in the place of chains: what comes and goes, what nobody uses then, and faults that the check refuses."""

from dataclasses import replace
from itertools import pairwise

import pytest

from reshard.errors import NotationError, SpliceError
from reshard.hlo import integrity
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Use, remove_uncalled, remove_unused
from tests.hlo.splices import NAMES, recorded, splice, spliced_changes


def spliced(name):
    """The recorded module with all of its splices."""
    module = recorded(name)
    proto = module.decoded()
    return module, proto, spliced_changes(proto, *module.splices)


def kinds(proto):
    return sorted(one.opcode for one in proto.instructions() if one.opcode.startswith(("all-", "collective-")))


@pytest.mark.parametrize("name", NAMES)
def test_the_gathers_go_and_the_fragments_come(name):
    module, proto, changes = spliced(name)
    gathers = kinds(module.decoded()).count("all-gather")
    fragments = [kind for one in module.splices for kind in kinds(ModuleProto.decode(one.fragment))]
    assert fragments and gathers
    left = kinds(proto)
    assert [kind for kind in left if kind != "all-gather"] == sorted(fragments)
    assert left.count("all-gather") == (1 if name.startswith("train") else 0)  # The one of the weights is needed.
    integrity.check_splices(old := module.decoded(), ModuleProto.decode(proto.encode(), old), changes)


def test_a_fusion_takes_the_tile_instead_of_the_slice():
    module, proto, _ = spliced("train_cpu")
    (change,) = module.splices
    (use,) = change.uses
    before = module.decoded().entry.named(use.path[0])
    after = proto.entry.named(use.path[0])
    inner = proto.computation(after.called[0])
    assert not any(one.opcode == "dynamic-slice" for one in inner.instructions)
    assert len(after.operands) == len(inner.parameters) <= len(before.operands)
    assert after.shape == before.shape


def test_a_fusion_that_only_slices_is_gone():
    module, proto, _ = spliced("train_v5p")
    (change,) = module.splices
    (use,) = change.uses
    assert module.decoded().entry.named(use.path[0])
    assert use.path[0] not in {one.name for one in proto.entry.instructions}


def test_the_schedule_has_the_fragment_before_its_use():
    _, proto, changes = spliced("scan_v5p")
    assert proto.schedule is not None
    for change in changes:
        region = proto.computation_named(change.splice.region)
        ids = proto.schedule[region.id]
        assert sorted(ids) == sorted(one.id for one in region.instructions)
    assert set(proto.schedule) <= {one.id for one in proto.computations}


@pytest.mark.parametrize("order", [1, -1])
def test_the_fragment_stands_before_all_its_uses(order):
    """Two values of the region are replaced, in whatever order they are listed."""
    module = recorded("train_cpu")
    old = module.decoded()
    shape = ModuleProto.decode(module.splices[0].fragment).entry.root.shape
    uses = []
    for number in range(2):  # The second pair stands before the first.
        value = with_copy(old, old.entry.named(module.splices[0].sources[0]))
        value.name, value.shape = f"value{number}", shape
        user = with_copy(old, value, "custom-call")
        user.name, user.shape = f"user{number}", shape
        user.message.set_number(65, 1)
        uses.append(Use((), value.name))
    data = old.encode()
    proto = ModuleProto.decode(data)
    changes = spliced_changes(proto, replace(module.splices[0], uses=tuple(uses[::order])))
    check(ModuleProto.decode(data), proto.encode(), changes)
    assert proto.entry.named("user0").operands == proto.entry.named("user1").operands


def test_a_value_of_the_region_itself_is_replaced():
    module = recorded("train_cpu")
    proto = module.decoded()
    gather = next(one for one in proto.entry.instructions if one.opcode == "all-gather")
    change = replace(module.splices[0], uses=(Use((), gather.name),))
    with pytest.raises(SpliceError, match="another shape or layout"):
        splice(proto, change)


def test_what_does_not_fit_is_refused():
    module = recorded("train_cpu")
    (change,) = module.splices
    with pytest.raises(NotationError, match="no instruction named"):
        splice(module.decoded(), replace(change, sources=("nothing",)))
    with pytest.raises(NotationError, match="no computation named"):
        splice(module.decoded(), replace(change, region="nothing"))
    with pytest.raises(SpliceError, match="takes another shape or layout"):
        other = next(one.name for one in module.decoded().entry.instructions if one.opcode == "all-gather")
        splice(module.decoded(), replace(change, sources=(other,)))
    with pytest.raises(SpliceError, match="only one has a schedule"):
        splice(module.decoded(), replace(change, fragment=recorded("train_v5p").splices[0].fragment))


def test_a_computation_with_two_callers_is_not_changed():
    module = recorded("train_cpu")
    proto = module.decoded()
    (change,) = module.splices
    caller = proto.entry.named(change.uses[0].path[0])
    twin = caller.copy()
    twin.id = proto.entry.new_ids(1)[0]
    twin.name = "twin"
    proto.entry.instructions.insert(proto.entry.instructions.index(caller) + 1, twin)
    with pytest.raises(SpliceError, match="other instructions call the same computation"):
        splice(proto, change)


def remove_dead(proto):
    """Both removals, as after a splice into the entry that opened these computations."""
    remove_unused(proto, proto.entry, {one.id for one in proto.computations if one.is_opened})
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
def test_what_is_used_stays_and_an_unused_copy_goes(name):
    module = recorded(name)
    proto = module.decoded()
    remove_dead(proto)
    assert proto.encode() == module.module
    proto = module.decoded()
    with_copy(proto, proto.entry.instructions[0])
    assert proto.encode() != module.module
    remove_dead(proto)
    assert proto.encode() == module.module


def test_what_may_have_an_effect_stays():
    proto = recorded("train_cpu").decoded()
    with_copy(proto, proto.entry.instructions[0], "custom-call").message.set_number(65, 1)
    remove_dead(proto)
    assert proto.entry.named("unused")


def test_control_edges_go_around_what_is_gone():
    proto = recorded("train_v5p").decoded()
    entry = proto.entry
    first, last = entry.instructions[0], entry.root
    made = with_copy(proto, entry.instructions[1])
    made.control, last.control = [first.id], [made.id]
    remove_dead(proto)
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
    remove_dead(proto)
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
    remove_dead(proto)
    assert not called & {one.id for one in proto.computations}
    assert not called & set(proto.schedule)


LITERAL, SIZES, OPCODE = 8, 20, 2


def check(old, data, changes):
    integrity.check_splices(old, ModuleProto.decode(data, like=old), changes)


@pytest.fixture(params=NAMES)
def case(request):
    return spliced(request.param)


def refused(case):
    module, proto, changes = case
    with pytest.raises(SpliceError) as error:
        check(module.decoded(), proto.encode(), changes)
    return str(error.value)


def added(case):
    """The instructions that came with fragments."""
    _, proto, changes = case
    ids = {number for change in changes for number in change.linked.instructions.values()}
    splices = [one.splice for one in changes]
    sources = {proto.computation_named(one.region).named(name).id for one in splices for name in one.sources}
    return [one for one in proto.instructions() if one.id in ids - sources]


def collectives(case):
    return [one for one in added(case) if one.opcode.startswith(("all-", "collective-"))]


def kept(case):
    ids = {one.id for one in added(case)}
    return [one for one in case[1].instructions() if one.id not in ids]


@pytest.mark.parametrize("channel", [0, 1, 77])
def test_another_channel(case, channel):
    one = next(one for one in collectives(case) if one.channel)
    if channel == one.channel:
        channel += 100
    one.channel = channel
    assert "channel" in refused(case)


@pytest.mark.parametrize("fault", ["a slice off by one", "a bitcast for a copy of layouts"])
def test_another_instruction_than_was_compiled(case, fault):
    one = next(one for one in added(case) if one.opcode in ("copy", "bitcast", "transpose"))
    if fault == "a slice off by one":
        one.message.set_numbers(SIZES, [1, 2, 3])
    else:
        one.message.set_data(OPCODE, b"reverse")
    assert "differs from the instruction" in refused(case)


def test_a_lost_operand(case):
    several = (one for one in kept(case) if len(one.operands) > 1)
    one = next((one for one in several if one.opcode not in ("fusion", "call")), None)
    if one is None:
        assert case[0] in (recorded("train_cpu"), recorded("train_v5p"))
        return
    one.operands = one.operands[:-1]
    assert "other operands" in refused(case)


@pytest.mark.parametrize("name", ["scan_cpu", "scan_v5p"])
def test_a_result_of_another_fragment(name):
    """Of two fragments in one loop, each stands for its own value only."""
    _, _, changes = case = spliced(name)
    first, second = changes[1:]
    results = [
        each.linked.instructions[ModuleProto.decode(each.splice.fragment).entry.root_id] for each in (first, second)
    ]
    (user,) = (one for one in kept(case) if results[1] in one.operands)
    user.operands = [results[0] if one == results[1] else one for one in user.operands]
    assert "other operands" in refused(case)


@pytest.mark.parametrize("name", ["scan_cpu", "scan_v5p"])
def test_a_channel_of_another_fragment(name):
    _, _, changes = case = spliced(name)
    first, second = (each.linked.channels for each in changes[1:])
    ours = set(second.values())
    second.update(zip(second, first.values(), strict=True))
    for one in collectives(case):
        if one.channel in ours:
            one.channel = next(iter(first.values()))
    assert "channel" in refused(case)


def test_swapped_operands(case):
    several = [one for one in kept(case) if len(set(one.operands)) > 1]
    one = next((one for one in several if one.opcode != "fusion"), several[0])
    one.operands = list(reversed(one.operands))
    assert refused(case)


@pytest.mark.parametrize("name", ["scan_cpu", "scan_v5p"])
@pytest.mark.parametrize("fault", ["elided", "minus zero that became zero"])
def test_another_constant(name, fault):
    case = spliced(name)
    one = next(one for one in kept(case) if one.opcode == "constant")
    literal = one.message.data(LITERAL)
    if fault == "elided":
        one.message.remove(LITERAL)
    else:
        one.message.set_data(LITERAL, literal[:-1] + bytes([literal[-1] ^ 0x80]))
    assert "it has changed" in refused(case)


def test_a_dropped_control_edge(case):
    """A control edge of the old module, between instructions that stay, must stay as well."""
    module, _, _ = case
    old = module.decoded()
    entry = old.computation_named(module.splices[0].region)
    first, last = entry.instructions[0], entry.instructions[-1]
    last.control = [first.id]
    data = old.encode()
    proto = ModuleProto.decode(data)
    changes = spliced_changes(proto, *module.splices)
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
    changes = spliced_changes(proto, *module.splices)
    left = proto.computation_named(region).by_id(last.id)
    assert first.id in left.control
    check(ModuleProto.decode(data), proto.encode(), changes)
    left.control = []
    with pytest.raises(SpliceError, match="control predecessor"):
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


def test_computations_out_of_order(case):
    _, proto, _ = case
    proto.computations.reverse()
    assert "does not stand before" in refused(case)


@pytest.mark.parametrize("name", ["train_v5p", "scan_v5p"])
def test_a_schedule_against_a_control_edge(name):
    """Two neighbours of the schedule that no operand puts in order."""
    module = recorded(name)
    old = module.decoded()
    assert old.schedule is not None
    added = {number for each in spliced(name)[2] for number in each.linked.instructions.values()}
    ids, by_id = old.schedule[old.entry.id], {one.id: one for one in old.entry.instructions}
    left = {one.id for one in spliced(name)[1].entry.instructions} - added
    at = next(n for n, (a, b) in enumerate(pairwise(ids)) if {a, b} <= left and a not in by_id[b].operands)
    by_id[ids[at + 1]].control = [ids[at]]
    data = old.encode()
    proto = ModuleProto.decode(data)
    changes = spliced_changes(proto, *module.splices)
    check(ModuleProto.decode(data), proto.encode(), changes)
    now = proto.schedule[proto.entry.id]
    one, other = now.index(ids[at]), now.index(ids[at + 1])
    now[one], now[other] = now[other], now[one]
    with pytest.raises(SpliceError, match="scheduled before what it needs"):
        check(ModuleProto.decode(data), proto.encode(), changes)


@pytest.mark.parametrize("name", ["train_v5p", "scan_v5p"])
@pytest.mark.parametrize("fault", ["lost", "short", "order", "region"])
def test_a_broken_schedule(name, fault):
    """Compiling a TPU module without its schedule ends the process."""
    module, proto, changes = spliced(name)
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
