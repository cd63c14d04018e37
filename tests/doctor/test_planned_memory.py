"""The memory of programs without what plans make dead."""

from reshard.doctor import examine
from tests.doctor.batched import FFT, HEAD
from tests.doctor.fragments import GATHER, RESHARD, SLICE, text
from tests.doctor.test_proposals import REDUCE, SCATTERED


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


def test_a_program_in_which_nothing_is_replaced():
    before, after = peaks(GATHER, "ROOT %r = f32[8,8]{1,0} add(%g, %g)")
    assert before == after
