"""Holders in closed form against all positions, one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from reshard.geometry.holders import TileHolders, home
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim
from reshard.types.mesh import SubAxis
from tests.layouts import pairs


def assert_listed(layout: Layout) -> None:
    rank, found = len(layout.dims), TileHolders(layout)
    homes = [home(layout, at) for at in range(layout.mesh.size)]
    for tile in dict.fromkeys(homes):
        assert found.of(tile) == tuple(at for at, other in enumerate(homes) if other == tile)
        alike = tuple(at for at, other in enumerate(homes) if other[:rank] == tile[:rank])
        assert TileHolders(layout, any_summand=True).of(tile[:rank]) == alike
    assert found.copies == max(homes.count(tile) for tile in homes)


@given(pairs())
@settings(max_examples=100)
def test_each_tile_is_where_the_coordinates_say(pair: tuple[Layout, Layout]):
    assert_listed(pair[0])


@pytest.mark.parametrize("mesh", [Mesh(x=2, y=3, z=2), Mesh({"x": 6}, device_ids=[5, 0, 3, 1, 4, 2])], ids=repr)
def test_summands_are_tiles_of_their_own(mesh: Mesh):
    assert_listed(Layout.parse("f32[7] + sum{x}", mesh))


def test_sub_axes_whose_strides_do_not_divide_each_other():
    """On x=6, the first of two values and the second of two: positions 3 apart, and 2 times 3 of 1 apart."""
    mesh = Mesh(x=12)
    one, other = SubAxis("x", 1, 2), SubAxis("x", 4, 3)
    assert_listed(Layout(mesh, (Dim((Digit(2, one), Digit(2, None)), 4), Dim((Digit(3, other),), 3)), "float32"))
