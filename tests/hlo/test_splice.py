from dataclasses import replace

import pytest

from reshard import hlo
from reshard.errors import NotationError, SpliceError
from reshard.hlo import integrity
from reshard.hlo.proto import ModuleProto
from reshard.hlo.splice import Splicer, Use
from tests.hlo.splices import NAMES, recorded, splice


def spliced(name):
    """The recorded module with all of its splices."""
    module = recorded(name)
    proto = module.decoded()
    changes = [integrity.Change(one, splice(proto, one)) for one in module.splices]
    return module, proto, changes


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


@pytest.mark.parametrize("name", NAMES)
def test_computations_may_go_once_after_all_splices(name):
    """And fragments, which are decoded once for all modules, stay as they were captured."""
    module, each, _ = spliced(name)
    proto = module.decoded()
    splicer = Splicer(proto)
    changes = [integrity.Change(one, splicer.splice(one)) for one in module.splices]
    splicer.finish()
    assert [one.opcode for one in proto.instructions()] == [one.opcode for one in each.instructions()]
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


def test_nothing_else_changes():
    module, proto, _ = spliced("train_cpu")
    before = {one.name: one for one in module.decoded().entry.instructions}
    for one in proto.entry.instructions:
        if one.name in before and one.opcode != "fusion":
            assert one.operands == before[one.name].operands and one.shape == before[one.name].shape


def test_added_instructions_have_the_line_of_the_chain():
    module, proto, (change,) = spliced("train_cpu")
    ids = set(change.linked.instructions.values()) - {proto.entry.named(module.splices[0].source).id}
    assert {one.metadata for one in proto.instructions() if one.id in ids} == {b"\x12\x04here"}


def test_the_schedule_has_the_fragment_before_its_use():
    _, proto, changes = spliced("scan_v5p")
    assert proto.schedule is not None
    for change in changes:
        region = proto.computation_named(change.splice.region)
        ids = proto.schedule[region.id]
        assert sorted(ids) == sorted(one.id for one in region.instructions)
    assert set(proto.schedule) <= {one.id for one in proto.computations}


def test_the_result_is_a_module_that_reads_the_same():
    """The text of a spliced module is XLA's business; here its order, ids and names are looked at."""
    _, proto, _ = spliced("scan_cpu")
    again = ModuleProto.decode(proto.encode())
    assert [one.name for one in again.instructions()] == [one.name for one in proto.instructions()]


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
        splice(module.decoded(), replace(change, source="nothing"))
    with pytest.raises(NotationError, match="no computation named"):
        splice(module.decoded(), replace(change, region="nothing"))
    with pytest.raises(SpliceError, match="takes another shape or layout"):
        other = next(one.name for one in module.decoded().entry.instructions if one.opcode == "all-gather")
        splice(module.decoded(), replace(change, source=other))
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


def test_the_text_of_the_recorded_modules_has_their_regions():
    for name in NAMES:
        module = recorded(name)
        assert {one.region for one in module.splices} <= set(hlo.parse(module.text).computations)
