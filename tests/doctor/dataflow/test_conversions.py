import pytest

from reshard import hlo
from reshard.doctor.checks.equivalence import Traced
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import Conversion, Unconvertible, find_conversion


def converted(*lines, dtype="bf16"):
    """What becomes of the elements of %p on their way to the root."""
    body = "\n".join(f"  {line}" for line in (f"%p = {dtype}[8]{{0}} parameter(0)", *lines))
    traced = Traced(hlo.parse(f"HloModule m, num_partitions=4\n\nENTRY %main {{\n{body}\n}}\n"), 4)
    region = traced.region("main")
    return find_conversion(traced.maps, HloValue(region, region.computation.root.name), HloValue(region, "p"))


def test_no_conversion():
    assert converted("ROOT %c = bf16[8]{0} copy(%p)") == Conversion("bf16", "bf16", "bf16")


def test_there_and_back_loses_nothing():
    lines = ("%w = f32[8]{0} convert(%p)", "ROOT %n = bf16[8]{0} convert(%w)")
    assert converted(*lines) == Conversion("bf16", "bf16", "bf16")


def test_rounded_on_the_way():
    lines = ("%n = bf16[8]{0} convert(%p)", "%c = bf16[8]{0} copy(%n)", "ROOT %w = f32[8]{0} convert(%c)")
    assert converted(*lines, dtype="f32") == Conversion("f32", "bf16", "f32")


def test_widened_in_the_end():
    assert converted("ROOT %w = s32[8]{0} convert(%p)", dtype="s8") == Conversion("s8", "s8", "s32")


@pytest.mark.parametrize(
    ("dtype", "lines"),
    [
        ("f32", ("%n = bf16[8]{0} convert(%p)", "ROOT %h = f16[8]{0} convert(%n)")),
        ("f64", ("%n = f32[8]{0} convert(%p)", "ROOT %h = bf16[8]{0} convert(%n)")),  # It is rounded twice.
        ("f32", ("%n = s32[8]{0} convert(%p)", "ROOT %w = f32[8]{0} convert(%n)")),
        ("u8", ("ROOT %w = s16[8]{0} convert(%p)",)),
    ],
    ids=["bf16 and f16", "two roundings", "floats and integers", "signs"],
)
def test_what_is_not_one_conversion(dtype, lines):
    with pytest.raises(Unconvertible, match="it converts"):
        converted(*lines, dtype=dtype)


def test_elements_that_go_several_ways():
    lines = (
        "%n = bf16[8]{0} convert(%p)",
        "%w = f32[8]{0} convert(%n)",
        "ROOT %c = f32[16]{0} concatenate(%p, %w), dimensions={0}",
    )
    with pytest.raises(Unconvertible, match="and others not"):
        converted(*lines, dtype="f32")
