"""Elements followed back to the leaves of a chain, and the sums that they are part of."""

import numpy as np
import pytest

from reshard import hlo
from reshard.doctor.dataflow.flow import HloValue, Numbering
from reshard.doctor.dataflow.index_maps import Untraceable
from reshard.doctor.dataflow.trace import NOWHERE, Tracer, is_sum, same_sums, summed_digits, trace_summands
from reshard.doctor.equivalence import Traced
from tests.doctor.fragments import GATHER, OFFSET, SLICE, ZERO, Analysis, text
from tests.doctor.tracing import everywhere, follow_to_start, program


def test_through_fusions():
    lines = program("%g = f32[24,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
                    "ROOT %r = f32[4,2]{1,0} fusion(%at, %g), kind=kLoop, calls=%inner")  # fmt: skip
    inner = """%inner {
  %b = f32[24,4]{1,0} parameter(1)
  %a = s32[] parameter(0)
  %z = s32[] constant(0)
  %d = f32[2,4]{1,0} dynamic-slice(%b, %a, %z), dynamic_slice_sizes={2,4}
  ROOT %t = f32[4,2]{1,0} transpose(%d), dimensions={1,0}
}

ENTRY"""
    got, want = follow_to_start(lines.replace("ENTRY", inner), "r")
    np.testing.assert_array_equal(got, want)


def tracer_of(*lines):
    analysis = Analysis(text(*lines))
    return analysis, Tracer(analysis.maps, Numbering(analysis.flow), frozenset())


def test_padding_comes_from_nowhere():
    analysis, tracer = tracer_of("%z = f32[] constant(0)", "ROOT %w = f32[3,8]{1,0} pad(%p, %z), padding=0_1x0_0")
    origins = tracer(analysis.value("w"), everywhere(4, (3, 8)))
    np.testing.assert_array_equal(origins.leaf.reshape(4, 3, 8)[:, 2] == NOWHERE, True)
    assert (origins.leaf.reshape(4, 3, 8)[:, :2] != NOWHERE).all()


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("p", 0),
        ("g", 3 * 16),  # three of four tiles
        ("d", 3 * 4),  # two columns of three tiles
        ("twice", 3 * 4),  # the same elements again
    ],
)
def test_elements_that_arrive_from_other_devices(name, elements):
    twice = "%twice = f32[8,4]{1,0} concatenate(%d, %d), dimensions={1}"
    analysis, tracer = tracer_of(*OFFSET, ZERO, GATHER, SLICE, twice, "ROOT %r = f32[8,4]{1,0} add(%twice, %twice)")
    assert tracer.arriving([analysis.value(name)]) == elements


CALLED = "".join(
    f"%{name} {{\n  %x{at} = f32[] parameter(0)\n  %y{at} = f32[] parameter(1)\n  ROOT %s{at} = f32[] {line}\n}}\n\n"
    for at, (name, line) in enumerate({
        "sum": "add(%x0, %y0)", "most": "maximum(%x1, %y1)", "first": "add(%x2, %x2)",
    }.items())
)  # fmt: skip
HEAD = f"""HloModule m, num_partitions=4

{CALLED}ENTRY %main {{
  %p = f32[8,4]{{1,0}} parameter(0)
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
    root, leaf = HloValue(region, region.computation.root.name), HloValue(region, "p")
    return trace_summands(module.maps, module.numbering, root, leaf, everywhere(4, dims))


@pytest.mark.parametrize("lines", [SLICED, SCATTERED, IN_TWO_ROUNDS], ids=["sliced", "scattered", "two rounds"])
def test_what_is_added_up(lines):
    tiles = np.random.default_rng(0).integers(0, 1000, (4, 32))
    added = sums(lines)
    expected = tiles.sum(axis=0).reshape(4, 8)  # Two rows of four columns on each device.
    np.testing.assert_array_equal(tiles[added.device, added.place].sum(axis=1).reshape(4, 8), expected)


def test_floats_are_added_up_in_the_same_order():
    reordered = [SCATTERED[0].replace("[1,4]<=[4]", "{{1,0,2,3}}")]
    assert not same_sums(sums(SLICED), sums(IN_TWO_ROUNDS), CLASSES, "f32")
    assert same_sums(sums(SLICED), sums(IN_TWO_ROUNDS), CLASSES, "s32")
    assert not same_sums(sums(SLICED), sums(reordered), CLASSES, "f32")


def test_floats_are_added_up_in_the_same_rounds():
    """(0 + 1) + (2 + 3) has the summands in order, and other bits than one sum; those of another such sum are equal."""
    by_pairs = (
        SLICED[0].replace("%s =", "%t =").replace("[1,4]<=[4]", "{{0,1},{2,3}}"),
        SLICED[0].replace("(%p)", "(%t)").replace("[1,4]<=[4]", "{{0,2},{1,3}}"),
        SLICED[1],
    )
    assert same_sums(sums(SLICED), sums(by_pairs), CLASSES, "s32")
    assert not same_sums(sums(SLICED), sums(by_pairs), CLASSES, "f32")
    assert same_sums(sums(SLICED), sums(by_pairs), CLASSES, "f32", any_order=True)
    across = [line.replace("{{0,1},{2,3}}", "{{0,2},{1,3}}", 1) for line in by_pairs[:1]]
    across.append(by_pairs[1].replace("{{0,2},{1,3}}", "{{0,1},{2,3}}"))
    assert same_sums(sums(by_pairs), sums(by_pairs), CLASSES, "f32")
    assert not same_sums(sums(by_pairs), sums([*across, SLICED[1]]), CLASSES, "f32")


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
