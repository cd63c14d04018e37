"""Places of hand-written and recorded modules: what belongs together, what is moved, and what it costs."""

from collections import Counter
from pathlib import Path

import pytest

import reshard as rs
from reshard import hlo
from reshard.doctor import Known, examine
from reshard.errors import NotationError
from tests.doctor.fragments import (
    DATA,
    GATHER,
    HLO_DATA,
    OFFSET,
    RECORDED,
    RESHARD,
    SLICE,
    ZERO,
    layouts,
    only,
    text,
)


def test_a_gather_that_is_sliced_again():
    place = only(examine(text(*RESHARD)))
    assert (place.kind, place.does, place.times) == ("reshard", "all_gather", 1)
    assert (place.received_bytes, place.needed_bytes, place.exact) == (192, 48, True)
    assert layouts(place) == [("f32[{d0}2, 8]", "f32[8, {d0}2]")]
    assert place.rebuilds == "whole" and place.rebuilds_whole and str(place.largest.dims) == "(8, 8)"
    assert [step.kind for step in place.plans[0].steps] == ["all_to_all"]
    assert (place.planned_bytes, place.saved_bytes, place.wasted_bytes) == (48, 144, 144)
    # Live at once: the source (64 B), the gathered array (256 B), the result (64 B). The plan needs 64 B of scratch.
    assert (place.peak_bytes, place.temp_bytes, place.planned_peak_bytes, place.saved_temp_bytes) == (
        384,
        256,
        192,
        192,
    )


def test_a_gather_that_is_needed():
    place = only(examine(text(GATHER, "ROOT %r = f32[8,8]{1,0} add(%g, %g)")))
    assert (place.received_bytes, place.needed_bytes, place.exact, place.rebuilds) == (192, 192, True, "")
    assert (place.wasted_bytes, place.saved_bytes, place.temp_bytes) == (0, 0, 0)


def test_pieces_of_an_all_to_all_are_one_place():
    pieces = [f"%s{i} = f32[2,2]{{1,0}} slice(%p), slice={{[0:2], [{2 * i}:{2 * i + 2}]}}" for i in range(4)]
    parts = ", ".join(f"%s{i}" for i in range(4))
    shapes = ", ".join(["f32[2,2]{1,0}"] * 4)
    got = [f"%g{i} = f32[2,2]{{1,0}} get-tuple-element(%t), index={i}" for i in range(4)]
    swap = f"%t = ({shapes}) all-to-all({parts}), channel_id=1, replica_groups={{{{0,1,2,3}}}}"
    joined = f"%j = f32[8,2]{{1,0}} concatenate({', '.join(f'%g{i}' for i in range(4))}), dimensions={{0}}"
    place = only(examine(text(*pieces, swap, *got, joined, "ROOT %r = f32[8,2]{1,0} add(%j, %j)")))
    assert (place.does, place.received_bytes, place.needed_bytes, place.rebuilds) == ("all_to_all", 48, 48, "")
    assert layouts(place) == [("f32[{d0}2, 8]", "f32[8, {d0}2]")]


def test_a_chain_of_collectives_is_one_place_and_arithmetic_ends_it():
    first = "%a = f32[4,8]{1,0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
    second = "%b = f32[8,8]{1,0} all-gather(%MID), channel_id=2, replica_groups={{0,2},{1,3}}, dimensions={0}"
    copy, add = "%c = f32[4,8]{0,1} copy(%a)", "%c = f32[4,8]{1,0} add(%a, %a)"
    moved = examine(text(first, copy, second.replace("MID", "c"), "ROOT %r = f32[8,8]{1,0} add(%b, %b)"))
    assert only(moved).does == "2 all_gather"
    assert layouts(only(moved)) == [("f32[{d0}2, 8]", "f32[8, 8]")]
    computed = examine(text(first, add, second.replace("MID", "c"), "ROOT %r = f32[8,8]{1,0} add(%b, %b)"))
    assert [place.does for place in computed.places] == ["all_gather", "all_gather"]


def test_a_value_used_on_the_way_ends_a_place():
    moved = "%m = f32[8,8]{1,0} collective-permute(%g), channel_id=2, source_target_pairs={{0,1},{1,0}}"
    used = examine(text(GATHER, moved, "ROOT %r = f32[8,8]{1,0} add(%g, %m)"))
    assert Counter(place.does for place in used.places) == {"all_gather": 1, "permute": 1}
    unused = examine(text(GATHER, moved, "ROOT %r = f32[8,8]{1,0} add(%m, %m)"))
    assert only(unused).does == "all_gather, permute"


def test_a_permute_that_is_not_between_layouts_is_a_shift():
    ring = "%m = f32[2,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    place = only(examine(text(ring, "ROOT %r = f32[2,8]{1,0} add(%m, %m)")))
    assert (place.kind, place.received_bytes, place.needed_bytes, place.exact, place.plans) == (
        "shift",
        64,
        64,
        False,
        (),
    )


def test_a_permute_between_two_orders_of_the_axes():
    swap = "%m = f32[2,8]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}"
    place = only(examine(text(swap, "ROOT %r = f32[2,8]{1,0} add(%m, %m)")))
    assert layouts(place) == [("f32[{d0}, {d1}, 2, 8]", "f32[{d1}, {d0}, 2, 8]")]
    assert (place.kind, place.needed_bytes, place.exact) == ("reshard", 64, True)


def test_a_halo_is_one_place():
    lines = [
        "%top = f32[1,8]{1,0} slice(%p), slice={[0:1], [0:8]}",
        "%low = f32[1,8]{1,0} slice(%p), slice={[1:2], [0:8]}",
        "%up = f32[1,8]{1,0} collective-permute(%top), channel_id=1, source_target_pairs={{1,0},{2,1},{3,2}}",
        "%down = f32[1,8]{1,0} collective-permute(%low), channel_id=2, source_target_pairs={{0,1},{1,2},{2,3}}",
        "%all = f32[4,8]{1,0} concatenate(%down, %p, %up), dimensions={0}",
        "ROOT %r = f32[4,8]{1,0} add(%all, %all)",
    ]
    place = only(examine(text(*lines)))
    assert (place.kind, place.does, place.received_bytes, place.needed_bytes) == ("shift", "2 permute", 64, 64)


def test_a_reduction_is_a_place_of_its_own():
    sum_ = "%sum {\n  %x = f32[] parameter(0)\n  %y = f32[] parameter(1)\n  ROOT %z = f32[] add(%x, %y)\n}\n"
    lines = [
        "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum",
        "ROOT %g = f32[8,8]{1,0} all-gather(%s), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}",
    ]
    by_kind = {place.kind: place for place in examine(text(*lines, before=sum_)).places}
    assert by_kind.keys() == {"reduction", "reshard"}
    assert (by_kind["reduction"].received_bytes, by_kind["reduction"].needed_bytes) == (96, 96)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("jit(f)/shard_map/all_gather", "manual"),
        ("jit(f)/shard_map/while/body/ppermute", "manual"),
        ("jit(f)/shard_map/dot_general", "reshard"),  # of the partitioner, for the axes that are not manual
        ("jit(f)/all_gather", "reshard"),
    ],
)
def test_collectives_of_the_users_shard_map_are_manual(name, kind):
    gather = f'{GATHER}, metadata={{op_name="{name}"}}'
    place = only(examine(text(*OFFSET, ZERO, gather, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")))
    assert (place.kind, place.replaced) == (kind, True)


LOOP = """%body {
  %c = (s32[], f32[2,8]{1,0}, u32[]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %p = f32[2,8]{1,0} get-tuple-element(%c), index=1
  %at = u32[] get-tuple-element(%c), index=2
  %zero = u32[] constant(0)
  %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  %d = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}
  %t = f32[2,8]{1,0} bitcast(%d)
  %q = f32[2,8]{1,0} add(%t, %t)
  ROOT %tuple = (s32[], f32[2,8]{1,0}, u32[]) tuple(%next, %q, %at)
}

%check {
  %c = (s32[], f32[2,8]{1,0}, u32[]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%n, %five), direction=LT
}
"""


def test_a_loop_with_an_offset_from_outside():
    lines = [
        *OFFSET,
        "%start = s32[] constant(0)",
        "%carried = (s32[], f32[2,8]{1,0}, u32[]) tuple(%start, %p, %at)",
        "%w = (s32[], f32[2,8]{1,0}, u32[]) while(%carried), condition=%check, body=%body",
        "ROOT %r = f32[2,8]{1,0} get-tuple-element(%w), index=1",
    ]
    place = only(examine(text(*lines, before=LOOP)))
    assert (place.computation, place.times, place.exact) == ("body", 5, True)
    assert (place.received_bytes, place.needed_bytes, place.wasted_bytes, place.saved_bytes) == (192, 48, 720, 720)


def test_all_branches_are_shown_and_the_costliest_counts():
    branches = "".join(
        f"%{name} {{\n  %p = f32[2,8]{{1,0}} parameter(0)\n  {line}\n}}\n\n"
        for name, line in {
            "costly": "ROOT " + GATHER,
            "cheap": "%h = f32[4,8]{1,0} all-gather(%p), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}\n"
            "  %z = f32[] constant(0)\n  ROOT %g = f32[8,8]{1,0} pad(%h, %z), padding=0_4x0_0",
        }.items()
    )
    lines = [
        "%w = pred[] parameter(1)",
        "ROOT %r = f32[8,8]{1,0} conditional(%w, %p, %p), true_computation=%costly, false_computation=%cheap",
    ]
    report = examine(text(*lines, before=branches))
    assert sorted(place.received_bytes for place in report.places) == [64, 192]
    assert report.received_bytes == 192


def test_a_table_of_offsets_that_is_not_in_the_text():
    table = ["%id = u32[] partition-id()", "%table = s32[4]{0} constant({0, 2, 4, 6})",
             "%row = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}", "%at = s32[] bitcast(%row)",
             "%zero = s32[] constant(0)"]  # fmt: skip
    whole = text(*table, GATHER, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)")
    assert only(examine(whole)).needed_bytes == 48
    place = only(examine(whole.replace("{0, 2, 4, 6}", "{...}")))
    # A device gets some tile of 64 B. Which one is unknown, so it needs at most 64 B, and there is no plan.
    assert (place.received_bytes, place.needed_bytes, place.exact, place.plans) == (192, 64, False, ())
    assert place.rebuilds_whole and layouts(place) == [("None", "None")]


def test_an_array_that_all_devices_have_already():
    cut = ["%own = f32[2,2]{1,0} dynamic-slice(%p, %zero, %at), dynamic_slice_sizes={2,2}",
           "%g = f32[2,8]{1,0} all-gather(%own), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}"]  # fmt: skip
    place = only(examine(text(*OFFSET, ZERO, *cut, "ROOT %r = f32[2,8]{1,0} add(%g, %g)")))
    assert (place.received_bytes, place.needed_bytes, place.exact, place.planned_bytes) == (48, 0, True, 0)
    assert layouts(place) == [("f32[2, 8]", "f32[2, 8]")]


def test_an_array_that_is_whole_before_is_not_rebuilt():
    lines = ["%own = f32[2,2]{1,0} dynamic-slice(%p, %zero, %at), dynamic_slice_sizes={2,2}",
             "%g = f32[2,8]{1,0} all-gather(%own), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}",
             "%d = f32[2,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={2,2}"]  # fmt: skip
    place = only(examine(text(*OFFSET, ZERO, *lines, "ROOT %r = f32[2,2]{1,0} add(%d, %d)")))
    assert (place.needed_bytes, place.rebuilds, place.largest.elements) == (0, "", 16)


@pytest.mark.parametrize(
    "top",
    [
        "%top = f32[2,8]{1,0} slice(%g), slice={[0:2], [0:8]}",
        "%top = f32[2,8]{1,0} dynamic-slice(%g, %zero, %zero), dynamic_slice_sizes={2,8}",
    ],
)
def test_rows_of_one_device_are_needed_by_the_others(top):
    """Rows 0 and 1 are on device 0: not every device has them already."""
    place = only(examine(text(ZERO, GATHER, top, "ROOT %r = f32[2,8]{1,0} add(%top, %top)")))
    assert (place.received_bytes, place.needed_bytes, place.exact, place.plans) == (192, 64, False, ())


def test_a_pattern_that_is_not_a_numeral():
    """A device keeps its first row and column and gets the rest from the device before it: no layouts say that."""
    lines = [
        "%m = f32[2,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
        "%left = f32[2,1]{1,0} slice(%p), slice={[0:2], [0:1]}",
        "%above = f32[1,7]{1,0} slice(%p), slice={[0:1], [1:8]}",
        "%inner = f32[1,7]{1,0} slice(%m), slice={[1:2], [1:8]}",
        "%right = f32[2,7]{1,0} concatenate(%above, %inner), dimensions={0}",
        "%s = f32[2,8]{1,0} concatenate(%left, %right), dimensions={1}",
        "ROOT %r = f32[2,8]{1,0} add(%s, %s)",
    ]
    place = only(examine(text(*lines)))
    assert (place.kind, place.received_bytes, place.needed_bytes, place.exact) == ("shift", 64, 28, False)


def test_a_collective_in_a_computation_of_a_custom_call():
    inner = f"%inner {{\n  %p = f32[2,8]{{1,0}} parameter(0)\n  ROOT {GATHER}\n}}\n"
    call = 'ROOT %r = f32[8,8]{1,0} custom-call(%p), custom_call_target="host", called_computations={%inner}'
    place = only(examine(text(call, before=inner)))
    assert (place.does, place.received_bytes, place.moves) == ("all_gather", 192, ())


def test_padding_is_not_needed():
    """10 rows in 4 tiles of 3; a device needs 3 of 12 columns, and the last tile has only 1 of them."""
    lines = [
        "%three = f32[3,10]{1,0} parameter(1)",
        "%id = u32[] partition-id()",
        "%n = u32[] constant(3)",
        "%at = u32[] multiply(%id, %n)",
        ZERO,
        "%g = f32[12,10]{1,0} all-gather(%three), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
        "%ten = f32[10,10]{1,0} slice(%g), slice={[0:10], [0:10]}",
        "%none = f32[] constant(0)",
        "%wide = f32[10,12]{1,0} pad(%ten, %none), padding=0_0x0_2",
        "%d = f32[10,3]{1,0} dynamic-slice(%wide, %zero, %at), dynamic_slice_sizes={10,3}",
        "ROOT %r = f32[10,3]{1,0} add(%d, %d)",
    ]
    place = only(examine(text(*lines)))
    assert (place.received_bytes, place.needed_bytes, place.exact) == (360, 4 * 7 * 3, False)
    mesh = rs.Mesh(a=4)
    source, target = (rs.Layout.parse(layout, mesh) for layout in ("f32[{a}3/10, 10]", "f32[10, {a}3/10]"))
    named = only(examine(text(*lines), known=[Known("train.py:7", source, target)]))
    assert (named.needed_bytes, named.exact, named.where.file, named.where.line) == (84, True, "train.py", 7)
    assert layouts(named) == [("f32[{a}3/10, 10]", "f32[10, {a}3/10]")]
    assert [plan.received_bytes for plan in named.plans] == [84]


def test_the_most_wasteful_places_come_first():
    small = "%h = f32[8,8]{1,0} all-gather(%p), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}"
    lines = [
        *OFFSET,
        ZERO,
        small,
        "%k = f32[8,8]{1,0} add(%h, %h)",
        GATHER,
        SLICE,
        "ROOT %r = f32[8,2]{1,0} add(%d, %d)",
    ]
    report = examine(text(*lines))
    assert [place.wasted_bytes for place in report.places] == [144, 0]
    assert (report.wasted_bytes, report.saved_bytes, len(report.rebuilt)) == (144, 144, 1)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_collective_is_in_exactly_one_place(path):
    module = hlo.parse(path.read_text())
    collectives = hlo.collectives(module, every_branch=True)
    report = examine(path.read_text())
    assert Counter(one.name for place in report.places for one in place.collectives) == Counter(
        o.name for o in collectives
    )
    assert report.traffic == hlo.traffic(module)
    for place in report.places:
        assert 0 <= place.needed_bytes <= place.received_bytes


@pytest.mark.parametrize("path", sorted(DATA.glob("*.hlo")), ids=lambda path: path.stem)
def test_a_recorded_program(path):
    """jax-ml/jax#21562 at 512 x 512 x 256, as XLA compiles it for CPU and for TPU: the layouts are the same."""
    place = examine(path.read_text()).places[0]
    tile = 512 * 512 * 256 * 4 // 8
    assert (place.received_bytes, place.needed_bytes, place.exact) == (7 * tile, tile * 7 // 8, True)
    assert place.rebuilds == "whole" and place.largest.elements == 512 * 512 * 256
    assert [step.kind for plan in place.plans for step in plan.steps] == ["all_to_all"]
    assert (Path(place.where.file).name, place.where.line) == ("train.py", 17)
    axes = {"x": "d0", "y": "d1"} if "0.10" in path.stem else {"x": "x", "y": "y"}
    expected = ("f32[{y}256, 512, {x}64]", "f32[512, {x}{y}64, 256]")
    assert layouts(place) == [
        tuple(w.replace("{x}", f"{{{axes['x']}}}").replace("{y}", f"{{{axes['y']}}}") for w in expected)
    ]


def test_a_collective_that_overlaps_with_computation():
    """TPU v5e: the collective is repeated in three fusions, each of which has its result in a tuple."""
    report = examine((HLO_DATA / "overlap_v5e_0.12.0.1.hlo").read_text())
    assert Counter(place.does for place in report.places) == {"all_gather": 2, "all_reduce": 1}
    assert sorted(layouts(place)[0] for place in report.places if place.moves) == [
        ("bf16[2048, {d0}1024]", "bf16[2048, 4096]"),
        ("bf16[{d0}1024, 2048]", "bf16[4096, 2048]"),
    ]


def test_receives_between_slices_are_counted_but_not_traced():
    report = examine((HLO_DATA / "gather_v5p-2slices_0.12.0.1.hlo").read_text())
    assert all(not place.exact and not place.plans for place in report.places)


@pytest.mark.parametrize("given", ["", "module @m {}", "HloModule m\n\nENTRY %main {\n  %p = f32[2] parameter(0)\n"])
def test_text_that_is_not_a_module_is_refused(given):
    with pytest.raises(NotationError, match="HLO"):
        examine(given)
