"""Dims that use different device coordinates, and the coordinates that their groups have."""

from __future__ import annotations

from reshard.geometry.exchange_stats import dim_groups
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh


def _pair(source: str, target: str, mesh: Mesh) -> tuple[Layout, Layout]:
    return Layout.parse(source, mesh), Layout.parse(target, mesh)


def test_groups_share_no_coordinates():
    source, target = _pair("f32[{x}3/10, {y}5, 7]", "f32[10, 10, 7]", Mesh(x=4, y=2))
    groups = dim_groups(source, target)
    assert [group.factors for group in groups] == [((2, 4),), ((1, 2),), ()]
    assert [group.size for group in groups] == [4, 2, 1]
    # The transpose uses both axes in both dims: one group.
    (together,) = dim_groups(*_pair("f32[{x}3/10, {y}5]", "f32[{y}5, {x}3/10]", Mesh(x=4, y=2)))
    assert together.factors == ((2, 4), (1, 2))


def test_a_group_has_one_device_for_each_coordinate():
    mesh = Mesh(x=4, y=3, z=2)
    (first, second) = dim_groups(*_pair("f32[{x}3/10, {z}5]", "f32[10, 10]", mesh))
    assert first.pieces(first.before, mesh) == [[0, 1, 2, 3]]
    assert second.pieces(second.before, mesh) == [[0, 1]]
