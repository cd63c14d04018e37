"""Figures of contiguous pieces in closed form, against a count over all devices."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

import pytest

from reshard.geometry import exchange_stats
from reshard.geometry import exchange_stats as module
from reshard.geometry.exchange_stats import contiguous_stats, dim_groups
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

MESH = Mesh(x=4, y=3, z=2)
ORDERS = [order for n in range(1, 4) for order in permutations("xyz", n)]


def tiled(size: int, order: tuple[str, ...], mesh: Mesh = MESH) -> Layout:
    return Layout.tiled(mesh, (size,), "f32", [[mesh.sub_axis(axis) for axis in order]])


@pytest.mark.parametrize("size", [1, 5, 23, 24, 25, 61, 97])
def test_all_orders_of_axes(size: int):
    for one, other in product(ORDERS, ORDERS):
        (group,) = dim_groups(tiled(size, one), tiled(size, other))
        assert contiguous_stats(group) == exchange_stats._counted(group), f"{one} -> {other}"


def test_sub_axes_that_cut_each_other():
    mesh = Mesh(x=24)
    texts = (
        "f32[{x:(1)4}25/97]",
        "f32[{x:(4)6}17/97]",
        "f32[{x:(2)12}9/97]",
        "f32[{x}5/97]",
        "f32[{x:(4)6}{x:(1)4}5/97]",
    )
    for source, target in product(texts, texts):
        (group,) = dim_groups(Layout.parse(source, mesh), Layout.parse(target, mesh))
        assert contiguous_stats(group) == exchange_stats._counted(group), f"{source} -> {target}"


def test_too_many_devices_that_hold_what_they_need_are_counted_instead(monkeypatch: pytest.MonkeyPatch):
    pair = tiled(97, ("x", "y")), tiled(97, ("x",))
    (group,) = dim_groups(*pair)
    assert contiguous_stats(group) is not None
    monkeypatch.setattr(module, "_MOST", 3)
    assert contiguous_stats(group) is None


def test_a_transpose_of_a_million_devices():
    """Device (x, y) holds piece 1000 x + y and needs piece 1000 y + x: those with x = y keep theirs."""
    mesh, size = Mesh(x=1000, y=1000), 3_999_989
    source, target = tiled(size, ("x", "y"), mesh), tiled(size, ("y", "x"), mesh)
    assert exchange_stats.rounds(source, target) == 1
    assert exchange_stats.fewest_received(source, target) == exchange_stats.largest_message(source, target) == 4
    (group,) = dim_groups(source, target)
    stats = contiguous_stats(group)
    assert stats is not None
    assert {tile.needed for tile in stats.tiles} == {0, 1, 4}
    assert prod(mesh.axes.values()) == group.size
