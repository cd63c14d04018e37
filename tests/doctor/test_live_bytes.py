"""The buffers live at once: in small modules counted by hand, in recorded ones, with plans, and in one chain."""

import pytest

from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.dataflow.flow import Flow, Numbering
from reshard.doctor.live_bytes import Liveness, add_up_program
from tests.doctor.batched import FFT, HEAD
from tests.doctor.fragments import GATHER, RECORDED, REDUCE, RESHARD, SCATTERED, SLICE, Analysis, text

TILE = 64  # bytes of p = f32[2,8]

CONDITION = """%condition {
  %c = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) parameter(0)
  ROOT %less = pred[] custom-call(%c)
}

"""

BODY = """%body {
  %b = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %v = f32[2,8]{1,0} get-tuple-element(%b), index=1
  %kept = f32[2,8]{1,0} get-tuple-element(%b), index=2
  %wide = f32[20,8]{1,0} custom-call(%v, %kept)
  %new = f32[2,8]{1,0} custom-call(%wide)
  ROOT %next = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%i, %new, %kept)
}

"""


def memory(*lines, before=""):
    return add_up_program(Flow(hlo.parse(text(*lines, before=before))))


def live(of):
    return [(buffer.does, buffer.array.nbytes) for buffer in of.buffers]


def test_the_order_of_the_text_decides():
    """What is used last is let go: the peak is where p, g and d are live, not the sum of all."""
    of = memory(
        "%g = f32[8,8]{1,0} broadcast(%p)",
        "%d = f32[8,2]{1,0} slice(%g), slice={[0:8], [0:2]}",
        "ROOT %r = f32[8,2]{1,0} add(%d, %d)",
    )
    assert [moment.live_bytes for moment in of.timeline] == [64, 64 + 256, 64 + 256 + 64, 64 + 64 + 64]
    assert (of.peak_bytes, live(of)) == (384, [("broadcast", 256), ("argument", 64), ("slice", 64)])


def test_renaming_and_updating_in_place_make_no_buffer():
    tuples = [
        "%g = f32[8,8]{1,0} broadcast(%p)",
        "%b = f32[64]{0} bitcast(%g)",
        "%zero = s32[] constant(0)",
        "%row = f32[4]{0} custom-call(%p)",
        "%u = f32[64]{0} dynamic-update-slice(%b, %row, %zero)",
        "%t = (f32[64]{0}, f32[2,8]{1,0}) tuple(%u, %p)",
        "%again = f32[64]{0} get-tuple-element(%t), index=0",
        "ROOT %r = f32[4]{0} custom-call(%again)",
    ]
    assert memory(*tuples).peak_bytes == TILE + 256 + 16
    assert [moment.live_bytes for moment in memory(*tuples).timeline][-1] == TILE + 256 + 16


def loop(*after):
    """A loop that replaces an array and keeps another, both made before it."""
    return [
        "%zero = s32[] custom-call()",
        "%one = f32[2,8]{1,0} sine(%p)",
        "%two = f32[2,8]{1,0} cosine(%p)",
        "%start = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%zero, %one, %two)",
        "%w = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) while(%start), condition=%condition, body=%body",
        "%out = f32[2,8]{1,0} get-tuple-element(%w), index=1",
        *after,
        "ROOT %r = f32[2,8]{1,0} add(%out, %p)",
    ]


def test_a_loop_holds_what_it_carries_once():
    """Inside: p, the kept array and the counter, then v and wide; outside, v is not counted again."""
    of = memory(*loop(), before=CONDITION + BODY)
    assert of.peak_bytes == TILE + TILE + 4 + TILE + 640
    expected = [("argument", 64), ("carried", 64), ("cosine", 64), ("custom-call", 4), ("custom-call", 640)]
    assert sorted(live(of)) == expected
    assert of.timeline[5].live_bytes == of.peak_bytes and of.timeline[-1].live_bytes == 3 * TILE


def test_an_array_that_the_loop_only_reads_stays_the_callers():
    after = ["%kept = f32[2,8]{1,0} get-tuple-element(%w), index=2", "%more = f32[2,8]{1,0} add(%kept, %two)"]
    of = memory(*loop(*after), before=CONDITION + BODY)
    assert of.peak_bytes == TILE + TILE + 4 + TILE + 640


def test_of_the_branches_the_larger_counts():
    branches = "".join(
        f"%{name} {{\n  %q = f32[2,8]{{1,0}} parameter(0)\n  %x = f32[{rows},8]{{1,0}} custom-call(%q)\n"
        f"  ROOT %y = f32[2,8]{{1,0}} custom-call(%x)\n}}\n\n"
        for name, rows in (("small", 3), ("large", 30))
    )
    lines = ["%w = pred[] parameter(1)", "%a = f32[2,8]{1,0} sine(%p)"]
    lines += ["ROOT %r = f32[2,8]{1,0} conditional(%w, %a, %a), true_computation=%small, false_computation=%large"]
    of = memory(*lines, before=branches)
    assert of.peak_bytes == TILE + 1 + TILE + 960 + TILE
    assert of.buffers[0].array.dims == (30, 8)


def test_what_a_move_makes_is_marked():
    report = examine(text(*RESHARD))
    moved = [(buffer.does, buffer.array.dims) for buffer in report.memory.buffers if buffer.moved]
    assert moved == [("all_gather", (8, 8)), ("all_gather", (8, 2))]
    # Beside these, p and the offset of the slice.
    assert (report.memory.moved_bytes, report.memory.peak_bytes) == (320, 320 + 64 + 4)
    assert [moment.name for moment in report.memory.timeline if moment.moves] == ["g", "d"]
    assert report.to_dict()["memory"]["buffers"][0]["bytes"] == 256


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_buffers_add_up_to_the_peak(file):
    of = examine(file.read_text()).memory
    sizes = [buffer.array.nbytes for buffer in of.buffers]
    assert sum(sizes) == of.peak_bytes == max(moment.live_bytes for moment in of.timeline)
    assert sizes == sorted(sizes, reverse=True) and 0 <= of.moved_bytes <= of.peak_bytes


def peaks(*lines, **options):
    memory = examine(text(*lines, **options)).memory
    return memory.peak_bytes, memory.planned_bytes


def test_a_gathered_array_is_gone():
    """64 B are the argument; then 256 + 64 B of the gather and its slice, or 64 + 64 B of the plan and its copy."""
    assert peaks(*RESHARD) == (64 + 256 + 64 + 4, 64 + 64 + 64)


def test_an_array_that_is_used_elsewhere_stays():
    lines = [*RESHARD[:-1], "%q = f32[8,8]{1,0} add(%g, %g)", "ROOT %t = (f32[8,2]{1,0}, f32[8,8]{1,0}) tuple(%d, %q)"]
    before, after = peaks(*lines)
    assert before == after


def test_a_slice_inside_of_a_fusion():
    body = """%body {
  %whole = f32[8,8]{1,0} parameter(0)
  %from = u32[] parameter(1)
  %none = u32[] constant(0)
  %d = f32[8,2]{1,0} dynamic-slice(%whole, %none, %from), dynamic_slice_sizes={8,2}
  ROOT %t = f32[8,2]{1,0} tanh(%d)
}
"""
    lines = [line for line in RESHARD if line != SLICE][:-1]
    before, after = peaks(*lines, "ROOT %f = f32[8,2]{1,0} fusion(%g, %at), kind=kLoop, calls=%body", before=body)
    assert before - after == 192 + 4 and GATHER in lines  # 256 B gathered and an offset, or 64 B received


def test_a_sum_is_scattered():
    before, after = peaks(*SCATTERED, before=REDUCE)
    assert before - after == 192 + 4  # 256 B summed and an offset, or 64 B scattered


def test_the_whole_result_of_an_operation_on_rows_is_gone():
    memory = examine(HEAD + FFT).memory
    assert memory.saved_bytes > 512


STARTED = GATHER.replace("%g = f32[8,8]{1,0} all-gather", "%s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start")

USE = "ROOT %r = f32[8,8]{1,0} add(%g, %g)"


def chain_memory(*lines, **options):
    """The peak, the temporary bytes and the largest array on the way, of the one chain that there is."""
    analysis = Analysis(text(*lines, **options))
    (chain,) = analysis.chains()
    use = Liveness(analysis.flow, Numbering(analysis.flow)).of(chain)
    return use.peak_bytes, use.temp_bytes, None if use.largest is None else use.largest.dims


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # the source of 64 B and the result of 256 B: nothing beside these two
        ([GATHER, USE], (320, 0, None)),
        # the source, the gathered array, and the result of 64 B
        (RESHARD, (384, 256, (8, 8))),
        # the same, started and awaited apart: the gathered array lives on after its end
        ([line if line != GATHER else f"{STARTED}\n  %g = f32[8,8]{{1,0}} all-gather-done(%s)" for line in RESHARD],
         (384, 256, (8, 8))),
        # two shapes of half the array between them, one after the other: the first is gone when the third is made
        ([GATHER, "%s = f32[4,8]{1,0} slice(%g), slice={[0:4], [0:8]}",
          "%m = f32[4,8]{1,0} collective-permute(%s), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
          "ROOT %r = f32[4,8]{1,0} add(%m, %m)"], (64 + 256 + 128, 256, (8, 8))),
        # a bitcast is a view: it keeps the gathered array alive up to its own last use
        ([GATHER, "%b = f32[64]{0} bitcast(%g)", "%s = f32[16]{0} slice(%b), slice={[0:16]}",
          "%m = f32[16]{0} collective-permute(%s), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}",
          "%n = f32[16]{0} slice(%b), slice={[16:32]}", "%j = f32[32]{0} concatenate(%m, %n), dimensions={0}",
          "ROOT %r = f32[32]{0} add(%j, %j)"], (64 + 256 + 2 * 64, 256, (8, 8))),
    ],
    ids=["result", "gather and slice", "asynchronous", "half of it", "view"],
)  # fmt: skip
def test_what_is_live_at_once(lines, expected):
    assert chain_memory(*lines) == expected


def test_a_fusion_does_not_store_what_is_inside():
    """The gathered array is sliced inside a fusion that computes: it is stored, its slice is not."""
    inside = """%fused {
  %w = f32[8,8]{1,0} parameter(0)
  %o = u32[] parameter(1)
  %z = u32[] constant(0)
  %d = f32[8,2]{1,0} dynamic-slice(%w, %z, %o), dynamic_slice_sizes={8,2}
  ROOT %n = f32[8,2]{1,0} negate(%d)
}

"""
    fusion = "ROOT %f = f32[8,2]{1,0} fusion(%g, %at), kind=kLoop, calls=%fused"
    assert chain_memory(*RESHARD[:3], GATHER, fusion, before=inside) == (64 + 256 + 64, 256, (8, 8))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_bounds_in_recorded_modules(path):
    """No chain holds less than its results, nor less beside them than its largest array on the way."""
    analysis = Analysis(path.read_text())
    numbering = Numbering(analysis.flow)
    liveness = Liveness(analysis.flow, numbering)
    for chain in analysis.chains():
        use = liveness.of(chain)
        results = {numbering.of(value): value.array for value in chain.results}
        assert use.peak_bytes >= max((array.nbytes for array in results.values() if array), default=0)
        assert 0 <= use.temp_bytes <= use.peak_bytes
        if use.largest is not None:
            assert use.peak_bytes >= use.largest.nbytes
