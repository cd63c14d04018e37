"""Sub-axes released: what remains of a layout's digits, and what the devices along them have together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.refine import Factor, release_digits
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import layouts


@pytest.mark.parametrize(
    ("text", "factors", "wanted"),
    [
        ("f32[{x}{y}2]", [(2, 4)], "f32[4{y}2]"),
        ("f32[{x}{y}2]", [(4, 2)], "f32[2{x:(2)2}{y}2]"),
        ("f32[{x}{y}2]", [(2, 2)], "f32[{x:(1)2}2{y}2]"),
        ("f32[{x}{y}2]", [(1, 8)], "f32[16]"),
        ("f32[{x}4] + sum{y}", [(2, 4)], "f32[16] + sum{y}"),
        ("f32[{x}3/10, {y}]", [(2, 4), (1, 2)], "f32[10, 2]"),
        ("f32[{x}4]", [(1, 2)], "f32[{x}4]"),
        ("f32[16]", [(2, 4)], "f32[16]"),
    ],
)
def test_by_hand(text: str, factors: list[tuple[int, int]], wanted: str):
    layout = Layout.parse(text, Mesh(x=4, y=2))
    assert str(release_digits(layout, [Factor(*each) for each in factors])) == wanted


def test_a_factor_that_does_not_nest_with_a_holder_releases_all_of_its_digit():
    """On x=6, positions 0 and 1 differ along x:(3)2, and 2 and 3 also along x:(1)2."""
    layout = Layout.parse("f32[{x:(1)2}3]", Mesh(x=6))
    assert str(release_digits(layout, [Factor(1, 2)])) == "f32[6]"


@settings(max_examples=100)
@given(layouts(), st.data())
def test_a_group_has_no_more_than_its_released_tile(layout: Layout, data: st.DataObject):
    mesh = layout.mesh
    axes = data.draw(st.lists(st.sampled_from(sorted(mesh.axes) or ["none"]), unique=True))
    factors = [Factor(mesh.stride(mesh.sub_axis(a)), mesh.axes[a]) for a in axes if a in mesh.axes]
    whole = release_digits(layout, factors)
    for device in mesh.devices:
        own, shared = meaning(layout, device), meaning(whole, device)
        for size, some, more in zip(layout.shape, own, shared, strict=True):
            assert {i for i in some if i < size} <= set(more)
