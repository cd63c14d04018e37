import pytest

from reshard import hlo
from reshard.doctor.chain_reader import ChainReader, Unfit
from reshard.doctor.chains import list_chains
from reshard.doctor.checks.equivalence import Traced
from reshard.doctor.infer_layouts import Pick
from reshard.hlo.splice import Use
from tests.hlo.splices import NAMES, recorded

HEAD = """HloModule m, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main {
  %p = f32[2,8]{1,0} parameter(0)
  %i = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%i, %two)
  %zero = u32[] constant(0)
"""
GATHER = "  %g = f32[8,8]{1,0} all-gather(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n"
SLICE = "  %d = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}\n"


def replacements(text, devices=4, from_sums=True):
    """The replacements of each chain, or the reason why there are none."""
    module = hlo.parse(text)
    traced = Traced(module, devices)
    finder = ChainReader(traced.flow, traced.maps, traced.numbering, None)
    results = []
    for chain in list_chains(traced.flow, traced.maps, hlo.collectives(module, every_branch=True), from_sums=from_sums):
        try:
            results.append(finder.replacements(chain))
        except Unfit as why:
            results.append(str(why))
    return results


def module(*lines):
    return HEAD + "".join(lines) + "}"


def test_a_gather_that_is_sliced():
    (((one,),)) = replacements(module(GATHER, SLICE, "  ROOT %r = f32[8,2]{1,0} negate(%d)\n"))
    assert one.source == "p" and one.uses == (Use((), "d"),)
    assert one.before.dims == (2, 8) and one.after.dims == (8, 2)
    assert str(one.move.source) == "f32[{d0}2, 8]" and str(one.move.target) == "f32[8, {d0}2]"
    assert one.move.places == ((2, 8), (4, 2), (2, 1))


def test_places_say_how_the_tile_lies():
    """The tile is transposed before it is gathered: its rows are the columns of the result."""
    (((one,),)) = replacements(
        module(
            "  %t = f32[8,2]{0,1} transpose(%p), dimensions={1,0}\n",
            "  %g = f32[8,8]{0,1} all-gather(%t), channel_id=1, replica_groups=[1,4]<=[4], dimensions={1}\n",
            "  %u = f32[8,8]{1,0} transpose(%g), dimensions={1,0}\n",
            "  %d = f32[8,2]{1,0} dynamic-slice(%u, %zero, %at), dynamic_slice_sizes={8,2}\n",
            "  ROOT %r = f32[8,2]{1,0} negate(%d)\n",
        )
    )
    assert one.source == "t" and one.before.layout == "0,1"
    radices = [radix for radix, _ in one.move.places]
    strides = [stride for _, stride in one.move.places]
    assert radices == [2, 4, 2] and strides == [1, 4, 2]


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_programs(name):
    module = recorded(name)
    everything = [one for each in replacements(module.text, 8) if not isinstance(each, str) for one in each]
    for change in module.splices:
        assert any(one.source == change.source and one.uses == change.uses for one in everything)


def test_two_uses_of_one_slice_are_one_replacement():
    text = module(GATHER, SLICE, "  %n = f32[8,2]{1,0} negate(%d)\n  ROOT %r = f32[8,2]{1,0} add(%d, %n)\n")
    (((one,),)) = replacements(text)
    assert one.uses == (Use((), "d"),)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            (
                "  %g = f32[8]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum\n",
                "  ROOT %r = f32[8]{0} negate(%g)\n",
            ),
            "not the sum of one array",
        ),
        (
            (
                "  %b = bf16[2,8]{1,0} convert(%p)\n",
                "  %g = bf16[8,8]{1,0} all-gather(%b), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n",
                "  %w = f16[8,8]{1,0} convert(%g)\n",
                "  %d = f16[8,2]{1,0} dynamic-slice(%w, %zero, %at), dynamic_slice_sizes={8,2}\n",
                "  ROOT %r = f16[8,2]{1,0} negate(%d)\n",
            ),
            "it converts bf16 to f16",
        ),
        (
            (
                "  %q = f32[2,8]{1,0} parameter(1)\n",
                GATHER,
                "  %h = f32[8,8]{1,0} all-gather(%q), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}\n",
                "  %c = f32[16,8]{1,0} concatenate(%g, %h), dimensions={0}\n",
                "  %d = f32[16,2]{1,0} dynamic-slice(%c, %zero, %at), dynamic_slice_sizes={16,2}\n",
                "  ROOT %r = f32[16,2]{1,0} negate(%d)\n",
            ),
            "joins 2 arrays",
        ),
    ],
    ids=["reduction", "conversion", "two arrays"],
)
def test_what_cannot_be_replaced_says_why(lines, why):
    (reason,) = replacements(module(*lines))
    assert why in reason


def test_a_conversion_that_loses_nothing():
    (((one,),)) = replacements(
        module(
            "  %b = bf16[2,8]{1,0} negate(%p)\n",
            "  %w = f32[2,8]{1,0} convert(%b)\n",
            "  %g = f32[8,8]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n",
            "  %s = f32[8,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={8,2}\n",
            "  ROOT %r = f32[8,2]{1,0} negate(%s)\n",
        )
    )
    assert one.source == "b" and one.after.dtype == "f32" and str(one.move.source) == "bf16[{d0}2, 8]"


def test_the_narrowest_dtype_is_moved_from_before_it_was_widened():
    """CPU sends bf16 as f32; what is used is bf16 again."""
    (((one,),)) = replacements(
        module(
            "  %b = bf16[2,8]{1,0} convert(%p)\n",
            "  %n = bf16[2,8]{1,0} negate(%b)\n",
            "  %w = f32[2,8]{1,0} convert(%n)\n",
            "  %g = f32[8,8]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}\n",
            "  %c = bf16[8,8]{1,0} convert(%g)\n",
            "  %s = bf16[8,2]{1,0} dynamic-slice(%c, %zero, %at), dynamic_slice_sizes={8,2}\n",
            "  %f = f32[8,2]{1,0} convert(%s)\n",
            "  ROOT %r = f32[8,2]{1,0} negate(%f)\n",
        )
    )
    assert one.source == "n" and one.uses == (Use((), "s"),) and str(one.move.source) == "bf16[{d0}2, 8]"


SUM = "  %g = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%sum\n"
COLUMNS = "  %d = f32[2,2]{1,0} dynamic-slice(%g, %zero, %at), dynamic_slice_sizes={2,2}\n"


def test_a_sum_that_is_sliced():
    (((one,),)) = replacements(module(SUM, COLUMNS, "  ROOT %r = f32[2,2]{1,0} negate(%d)\n"))
    assert one.source == "p" and one.uses == (Use((), "d"),) and one.is_summed and one.leaf.name == "g"
    assert str(one.move.source) == "f32[2, 8] + sum{d0}" and str(one.move.target) == "f32[2, {d0}2]"


def test_a_sum_that_is_sliced_and_sent_on():
    """Devices get their columns from others, which have the whole sum as well."""
    shift = "  %m = f32[2,2]{1,0} collective-permute(%d), channel_id=2, source_target_pairs={{0,0},{2,1},{1,2},{3,3}}\n"
    (((one,),)) = replacements(module(SUM, COLUMNS, shift, "  ROOT %r = f32[2,2]{1,0} negate(%m)\n"))
    assert str(one.move.source) == "f32[2, 8] + sum{d0}{d1}" and str(one.move.target) == "f32[2, {d1}{d0}2]"


def test_a_sum_in_groups():
    """Devices 0 and 2 add up, and 1 and 3: only the digit of stride 2 is summed."""
    text = module(
        SUM.replace("[1,4]<=[4]", "{{0,2},{1,3}}"),
        "  %half = u32[] divide(%i, %two)\n  %four = u32[] constant(4)\n  %from = u32[] multiply(%half, %four)\n",
        "  %d = f32[2,4]{1,0} dynamic-slice(%g, %zero, %from), dynamic_slice_sizes={2,4}\n",
        "  ROOT %r = f32[2,4]{1,0} negate(%d)\n",
    )
    (((one,),)) = replacements(text)
    assert str(one.move.source) == "f32[2, 8] + sum{d0}" and str(one.move.target) == "f32[2, {d0}4]"
    assert list(one.move.source.mesh.axes.values()) == [2, 2]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((SUM.replace("[1,4]<=[4]", "{{0,3},{1,2}}"), COLUMNS), "groups"),
        ((SUM.replace("%sum", "%other"), COLUMNS), "not the sum of one array"),
        (
            (
                SUM,
                "  %n = bf16[2,8]{1,0} convert(%g)\n",
                "  %w = f32[2,8]{1,0} convert(%n)\n",
                COLUMNS.replace("%g", "%w").replace("%d", "%e"),
                "  %d = f32[2,2]{1,0} copy(%e)\n",
            ),
            "rounds the sum to bf16",
        ),
    ],
    ids=["groups", "operation", "rounded"],
)
def test_sums_that_cannot_be_replaced_say_why(lines, why):
    (reason,) = replacements(module(*lines, "  ROOT %r = f32[2,2]{1,0} negate(%d)\n"))
    assert why in reason


def test_without_sums_the_reduction_is_a_chain_of_its_own():
    text = module(SUM, COLUMNS, "  ROOT %r = f32[2,2]{1,0} negate(%d)\n")
    assert replacements(text, from_sums=False) == ["nothing uses its results"]


FIRST = "  %e = f32[1,2]{1,0} slice(%g), slice={[0:1], [2:4]}\n  ROOT %r = f32[1,2]{1,0} negate(%e)\n"


def test_a_part_of_one_device():
    """A whole array is gathered for two elements of the first device."""
    (((one,),)) = replacements(module(GATHER, FIRST))
    assert one.source == "p" and one.uses == (Use((), "e"),)
    assert one.pick == Pick(((0, 0), (2, 3)), (0,)) and one.move.places == ((2, 1),)
    assert str(one.move.source) == "f32[{d0}, 2]" and str(one.move.target) == "f32[4, 2]"


def test_a_part_of_one_device_of_each_group():
    """Rows 2 and 3 of what pairs of devices gather: those of devices 1 and 3."""
    gather = GATHER.replace("f32[8,8]", "f32[4,8]").replace("[1,4]<=[4]", "{{0,1},{2,3}}")
    (((one,),)) = replacements(module(gather, FIRST.replace("[0:1]", "[3:4]")))
    assert one.pick == Pick(((1, 1), (2, 3)), (1,))
    assert str(one.move.source) == "f32[{d1}, 2]" and list(one.move.source.mesh.axes.values()) == [2, 2]


@pytest.mark.parametrize(
    "lines",
    [
        ("  %e = f32[2,2]{1,0} slice(%g), slice={[1:3], [2:4]}\n", "  ROOT %r = f32[2,2]{1,0} negate(%e)\n"),
        FIRST.replace("[0:1]", "[1:3]").replace("f32[1,", "f32[2,"),
    ],
    ids=["rows", "more rows"],
)
def test_parts_of_two_devices_are_shifts(lines):
    (((one,),)) = replacements(module(GATHER, *([lines] if isinstance(lines, str) else lines)))
    assert one.move is None and one.shift is not None
