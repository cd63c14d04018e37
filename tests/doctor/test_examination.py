"""Places of hand-written and recorded modules: what belongs together, what is moved, and what it costs."""

from collections import Counter
from pathlib import Path

import pytest

import reshard as rs
from reshard.doctor import Known, examine
from reshard.errors import NotationError
from tests.doctor.fragments import (
    DATA,
    GATHER,
    HLO_DATA,
    OFFSET,
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
    assert (place.peak_bytes, place.temp_bytes) == (384, 256)
    assert (place.planned_peak_bytes, place.saved_temp_bytes) == (192, 192)


RING = "collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
TOP = "ROOT %r = f32[2,8]{1,0} add(%top, %top)"


@pytest.mark.parametrize(
    ("lines", "kind", "figures"),
    [
        ([GATHER, "ROOT %r = f32[8,8]{1,0} add(%g, %g)"], "reshard", (192, 192, True, 192)),
        ([f"%m = f32[2,8]{{1,0}} {RING}", "ROOT %r = f32[2,8]{1,0} add(%m, %m)"], "shift", (64, 64, False, None)),
        # All devices have the array already.
        ([*OFFSET, ZERO, "%own = f32[2,2]{1,0} dynamic-slice(%p, %zero, %at), dynamic_slice_sizes={2,2}",
          "%g = f32[2,8]{1,0} all-gather(%own), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={1}",
          "ROOT %r = f32[2,8]{1,0} add(%g, %g)"], "reshard", (48, 0, True, 0)),
        # Rows 0 and 1 are on device 0: not every device has them already.
        ([ZERO, GATHER, "%top = f32[2,8]{1,0} slice(%g), slice={[0:2], [0:8]}", TOP],
         "reshard", (192, 64, False, None)),
        ([ZERO, GATHER, "%top = f32[2,8]{1,0} dynamic-slice(%g, %zero, %zero), dynamic_slice_sizes={2,8}", TOP],
         "reshard", (192, 64, False, None)),
        # A device keeps its first row and column and gets the rest from the device before it: no layouts say that.
        ([f"%m = f32[2,8]{{1,0}} {RING}", "%left = f32[2,1]{1,0} slice(%p), slice={[0:2], [0:1]}",
          "%above = f32[1,7]{1,0} slice(%p), slice={[0:1], [1:8]}",
          "%inner = f32[1,7]{1,0} slice(%m), slice={[1:2], [1:8]}",
          "%right = f32[2,7]{1,0} concatenate(%above, %inner), dimensions={0}",
          "%s = f32[2,8]{1,0} concatenate(%left, %right), dimensions={1}", "ROOT %r = f32[2,8]{1,0} add(%s, %s)"],
         "shift", (64, 28, False, 28)),
    ],
    ids=["used whole", "ring", "had already", "rows of one", "the same, sliced at 0", "no numeral"],
)  # fmt: skip
def test_the_figures_of_a_place(lines, kind, figures):
    place = only(examine(text(*lines)))
    assert (place.kind, (place.received_bytes, place.needed_bytes, place.exact, place.planned_bytes)) == (kind, figures)
    assert not place.rebuilds


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


@pytest.mark.parametrize("given", ["", "module @m {}", "HloModule m\n\nENTRY %main {\n  %p = f32[2] parameter(0)\n"])
def test_text_that_is_not_a_module_is_refused(given):
    with pytest.raises(NotationError, match="HLO"):
        examine(given)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ((GATHER, "ROOT %r = f32[8,8]{1,0} add(%g, %lost)"), "r takes lost, which nothing before it makes"),
        ((GATHER.replace("(%p)", "(%g)"), "ROOT %r = f32[8,8]{1,0} add(%g, %g)"), "g takes g"),  # without end
        ((GATHER, "ROOT %p = f32[8,8]{1,0} add(%g, %g)"), "p is made twice"),
        (("%s = f32[] slice()", GATHER), "s, a slice, takes only 0 operands"),
        (("%t = (f32[2,8]) tuple(%p)", "%e = f32[2,8]{1,0} get-tuple-element(%t)", GATHER), "which element"),
        ((GATHER, f"%t = {'(' * 150}f32[2]{')' * 150} tuple(%g)"), "tuples nested more than 100 deep"),
        (
            (GATHER, f"%t = f32[{(1 << 63) - 1},8]{{1,0}} reshape(%g)", "ROOT %r = f32[8,8] add(%t, %t)"),
            "do not fit each",
        ),
    ],
)
def test_a_damaged_text_is_refused_with_what_was_found(damaged, why):
    with pytest.raises(NotationError, match=why):
        examine(text(*damaged))


@pytest.mark.parametrize(
    "damaged",
    [
        ["%i = s32[2,8]{1,0} iota(), iota_dimension=1", "%s = (f32[2,8], s32[2,8]) sort(%p, %i), dimensions={1}"],
        ["%id = u32[] partition-id()", "%t = s32[4]{0} constant({0, 2, 4, 6})",
         "%d = s32[1,1]{1,0} dynamic-slice(%t, %id), dynamic_slice_sizes={1}"],
    ],
    ids=["a sort without its comparator", "a slice with other dims"],
)  # fmt: skip
def test_what_a_damaged_instruction_does_is_not_known(damaged):
    rows = "%e = f32[2,8]{1,0} dynamic-slice(%g, %r, %r), dynamic_slice_sizes={2,8}"
    offset = "%r = s32[] reshape(%d)" if "%d = " in damaged[-1] else "%r = s32[] constant(0)"
    assert (
        only(examine(text(*damaged, offset, GATHER, rows, "ROOT %u = f32[2,8]{1,0} add(%e, %e)"))).received_bytes == 192
    )
