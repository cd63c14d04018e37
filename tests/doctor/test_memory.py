"""The buffers live at the peak of a program: small modules counted by hand, and recorded ones that add up."""

import pytest

from reshard import hlo
from reshard.doctor import examine
from reshard.doctor.dataflow.flow import Flow
from reshard.doctor.memory import program_memory
from tests.doctor.fragments import RECORDED, RESHARD, text

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
    return program_memory(Flow(hlo.parse(text(*lines, before=before))))


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
    assert sorted(live(of)) == [
        ("argument", 64),
        ("carried", 64),
        ("cosine", 64),
        ("custom-call", 4),
        ("custom-call", 640),
    ]
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
    assert (report.memory.moved_bytes, report.memory.peak_bytes) == (
        320,
        320 + 64 + 4,
    )  # p, and the offset of the slice
    assert [moment.name for moment in report.memory.timeline if moment.moves] == ["g", "d"]
    assert report.to_dict()["memory"]["buffers"][0]["bytes"] == 256


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_buffers_add_up_to_the_peak(file):
    of = examine(file.read_text()).memory
    sizes = [buffer.array.nbytes for buffer in of.buffers]
    assert sum(sizes) == of.peak_bytes == max(moment.live_bytes for moment in of.timeline)
    assert sizes == sorted(sizes, reverse=True) and 0 <= of.moved_bytes <= of.peak_bytes
