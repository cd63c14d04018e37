"""Sums over devices, against numpy's sums of marked tiles, and faults that must be seen."""

import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.checks.equivalence import Traced
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import Points, Untraceable, unravel_places
from reshard.doctor.dataflow.sums import is_sum, list_summands, same_sums, summed_digits

HEAD = """HloModule m, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%most (x: f32[], y: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %y.1 = f32[] parameter(1)
  ROOT %s.1 = f32[] maximum(%x.1, %y.1)
}

%first (x: f32[], y: f32[]) -> f32[] {
  %x.2 = f32[] parameter(0)
  %y.2 = f32[] parameter(1)
  ROOT %s.2 = f32[] add(%x.2, %x.2)
}

ENTRY %main {
  %p = f32[8,4]{1,0} parameter(0)
  %i = s32[] partition-id()
  %two = s32[] constant(2)
  %at = s32[] multiply(%i, %two)
  %zero = s32[] constant(0)
"""
SLICED = (
    "%s = f32[8,4]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum",
    "ROOT %d = f32[2,4]{1,0} dynamic-slice(%s, %at, %zero), dynamic_slice_sizes={2,4}",
)
SCATTERED = ("ROOT %d = f32[2,4]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%sum",)
IN_TWO_ROUNDS = (
    "%a = f32[4,4]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%sum",
    "ROOT %d = f32[2,4]{1,0} reduce-scatter(%a), channel_id=2, replica_groups={{0,1},{2,3}}, dimensions={0}, "
    "to_apply=%sum",
)
CLASSES = np.arange(4)


def traced(lines):
    return Traced(hlo.parse(HEAD + "".join(f"  {line}\n" for line in lines) + "}\n"), 4)


def sums(lines, dims=(2, 4)):
    module = traced(lines)
    region = module.region("main")
    count = int(np.prod(dims))
    points = Points(np.repeat(np.arange(4), count), unravel_places(np.tile(np.arange(count), 4), dims))
    root = HloValue(region, region.computation.root.name)
    return list_summands(module.maps, module.numbering, root, HloValue(region, "p"), points)


@pytest.mark.parametrize("lines", [SLICED, SCATTERED, IN_TWO_ROUNDS], ids=["sliced", "scattered", "two rounds"])
def test_what_is_added_up(lines):
    tiles = np.random.default_rng(0).integers(0, 1000, (4, 32))
    added = sums(lines)
    expected = tiles.sum(axis=0).reshape(4, 8)  # Two rows of four columns on each device.
    np.testing.assert_array_equal(tiles[added.device, added.place].sum(axis=1).reshape(4, 8), expected)


def test_the_same_sum():
    one, other = sums(SLICED), sums(SCATTERED)
    assert same_sums(one, other, CLASSES, "f32") and same_sums(one, other, CLASSES, "s32")


def test_floats_are_added_up_in_the_same_order():
    reordered = [SCATTERED[0].replace("[1,4]<=[4]", "{{1,0,2,3}}")]
    assert not same_sums(sums(SLICED), sums(IN_TWO_ROUNDS), CLASSES, "f32")
    assert same_sums(sums(SLICED), sums(IN_TWO_ROUNDS), CLASSES, "s32")
    assert not same_sums(sums(SLICED), sums(reordered), CLASSES, "f32")


@pytest.mark.parametrize(
    ("was", "is_now", "dims"),
    [("dimensions={0}", "dimensions={1}", (8, 1)), ("[1,4]<=[4]", "{{1,0,2,3}}", (2, 4))],
    ids=["dim", "ranks"],
)
def test_other_sums_are_seen(was, is_now, dims):
    (line,) = SCATTERED
    line = line.replace(was, is_now).replace("f32[2,4]", f"f32[{dims[0]},{dims[1]}]")
    assert not same_sums(sums(SLICED), sums([line], dims), CLASSES, "s32")


def test_equal_tiles_are_as_good():
    """Devices 0 and 2 have equal tiles, and so have 1 and 3: the sum of 0 and 1 is that of 2 and 3."""
    lines = ("ROOT %s = f32[8,4]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum",)
    swapped = (
        "%o = f32[8,4]{1,0} collective-permute(%p), channel_id=2, source_target_pairs={{0,2},{2,0},{1,3},{3,1}}",
        lines[0].replace("all-reduce(%p)", "all-reduce(%o)"),
    )
    one, other = sums(lines, (8, 4)), sums(swapped, (8, 4))
    assert same_sums(one, other, np.array([0, 1, 0, 1]), "f32") and not same_sums(one, other, CLASSES, "f32")


@pytest.mark.parametrize("called", ["most", "first"])
def test_another_operation_is_not_a_sum(called):
    lines = [line.replace("%sum", f"%{called}") for line in SCATTERED]
    module = traced(lines)
    assert not is_sum(module.flow, HloValue(module.region("main"), "d"))
    with pytest.raises(Untraceable, match="come from d"):
        sums(lines)


def test_a_conversion_before_the_sum_is_refused():
    lines = ("%n = bf16[8,4]{1,0} convert(%p)", "%w = f32[8,4]{1,0} convert(%n)", SCATTERED[0].replace("%p", "%w"))
    with pytest.raises(Untraceable, match="converted"):
        sums(lines)


def test_a_conversion_after_the_sum_is_another_result():
    lines = ("%n = bf16[2,4]{1,0} convert(%s)", "ROOT %w = f32[2,4]{1,0} convert(%n)")
    rounded = (SCATTERED[0].replace("ROOT %d", "%s"), *lines)
    assert not same_sums(sums(SLICED), sums(rounded), CLASSES, "f32")


@pytest.mark.parametrize(
    ("groups", "digits"),
    [("[1,4]<=[4]", [(1, 4)]), ("{{0,2},{1,3}}", [(2, 2)]), ("{{1,0},{3,2}}", [(1, 2)]), ("{{0,3},{1,2}}", None)],
)
def test_digits_of_groups(groups, digits):
    line = f"ROOT %s = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%sum"
    module = traced([line])
    value = HloValue(module.region("main"), "s")
    if digits is None:
        with pytest.raises(Untraceable):
            summed_digits(module.maps, value)
    else:
        assert summed_digits(module.maps, value) == digits
