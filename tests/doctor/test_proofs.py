"""What was proved of a chain holds for equal ones: with other names, channels and lines, and nothing else."""

import pytest

from reshard import hlo
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.equivalence import Traced
from tests.doctor.test_equivalence import HEAD, NEW, OLD


def signature(text, name, leaf="p"):
    traced = Traced(hlo.parse(HEAD + text), 4, spliced=True)
    region = traced.flow.regions[0]
    return traced.signature(HloValue(region, name), HloValue(region, leaf))


def inside(text):
    """The signature of the slice inside the fusion."""
    traced = Traced(hlo.parse(HEAD + text), 4)
    region = traced.flow.regions[0]
    scope = traced.flow.inner(region, region.computation.root)
    return traced.signature(HloValue(scope, "d"), HloValue(region, "p"))


def test_names_and_channels_are_left_out():
    assert inside(OLD) == inside(OLD.replace("%g", "%h").replace("channel_id=1", "channel_id=3")) is not None
    assert signature(NEW, "z") == signature(NEW.replace("%x", "%w").replace("channel_id=2", "channel_id=5"), "z")


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("constant(2)", "constant(1)"),
        ("[1,4]<=[4]", "{{0,1,3,2}}"),
        ("f32[8,8]{1,0} all-gather", "f32[8,8]{0,1} all-gather"),
        ("multiply(%i, %two)", "add(%i, %two)"),
        ("  %g = f32[8,8]{1,0} all-gather(%p)",
         "  %c = f32[2,8]{1,0} reverse(%p), dimensions={0}\n  %g = f32[8,8]{1,0} all-gather(%c)"),
    ],
    ids=["offset", "groups", "layout", "offset's operation", "further move"],
)  # fmt: skip
def test_everything_else_is_told_apart(was, is_now):
    assert was in OLD
    assert inside(OLD.replace(was, is_now)) not in (None, inside(OLD))


@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("all-gather(%p)", "all-gather(%q)"),
        ("all-gather(%p)", "all-gather(%n)"),
        ("multiply(%i, %two)", "multiply(%i, %data)"),
    ],
    ids=["other data", "arithmetic", "offset of data"],
)
def test_what_is_made_of_other_things_has_none(was, is_now):
    more = "  %q = f32[2,8]{1,0} parameter(1)\n  %data = u32[] parameter(2)\n  %n = f32[2,8]{1,0} negate(%p)\n"
    assert inside(more + OLD.replace(was, is_now)) is None
