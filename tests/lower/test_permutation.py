"""The pairs of permutes: everybody sends once and receives once, and what arrives is what the target means."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from reshard.errors import PlanError
from reshard.lower.program import permute_pairs
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning

M42 = Mesh(x=4, y=2)


def right(source: Layout, target: Layout) -> tuple[tuple[int, int], ...]:
    """The pairs, checked by meaning."""
    pairs = permute_pairs(source, target)
    devices = sorted(source.mesh.devices)
    assert sorted(sender for sender, _ in pairs) == sorted(receiver for _, receiver in pairs) == devices
    for sender, receiver in pairs:
        assert meaning(source, sender) == meaning(target, receiver)
    return pairs


def test_the_axes_of_a_dim_trade_places():
    """Device 2 x + y holds piece 2 x + y before, and needs piece 4 y + x."""
    pairs = right(Layout.parse("f32[{x}{y}2]", M42), Layout.parse("f32[{y}{x}2]", M42))
    assert {to: sender for sender, to in pairs} == {2 * x + y: 4 * y + x for x in range(4) for y in range(2)}


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        (Mesh(x=3, y=5), "f32[{x}{y}1]", "f32[{y}{x}1]"),
        (Mesh(x=3, y=5), "f32[{x}2, {y}2]", "f32[{x}2, {y}2]"),
        (Mesh(x=3, y=3), "f32[{x}2, {y}2]", "f32[{y}2, {x}2]"),
        (Mesh(x=2, y=2), "f32[{x}3]", "f32[{y}3]"),  # replicated along the other axis
        (Mesh(x=2, y=2), "f32[{x}3/5]", "f32[{y}3/5]"),  # padded
        (Mesh(x=2, y=2, z=3), "f32[{x}{z}2, {y}3]", "f32[{z}{y}2, {x}3]"),
    ],
)
def test_tiles_go_to_those_who_need_them(mesh: Mesh, source: str, target: str):
    right(Layout.parse(source, mesh), Layout.parse(target, mesh))


def test_summands_stay_summands():
    """Two devices hold the same piece of different summands: they must not be taken for each other."""
    source, target = (Layout.parse(f"f32[{{{axis}}}2] + sum{{z}}", Mesh(x=2, y=2, z=2)) for axis in "xy")
    pairs = right(source, target)
    z = source.mesh.sub_axis("z")
    assert all(source.mesh.coordinate(a, z) == source.mesh.coordinate(b, z) for a, b in pairs)


def test_devices_in_another_order():
    choose = random.Random(1)
    for order in choose.sample(list(permutations(range(6))), 20):
        source = Layout.parse("f32[{x}{y}1]", Mesh(x=2, y=3))
        target = Layout.parse("f32[{x}{y}1]", Mesh({"x": 2, "y": 3}, device_ids=order))
        right(source, target)


def test_a_device_keeps_its_own_tile_where_it_can():
    """Replicas along y: four devices need what they hold, though others hold it too."""
    reordered = Mesh({"x": 2, "y": 4}, device_ids=[0, 1, 2, 7, 4, 5, 6, 3])
    pairs = right(Layout.parse("f32[{x}1]", Mesh(x=2, y=4)), Layout.parse("f32[{x}1]", reordered))
    assert {(d, d) for d in (0, 1, 2, 4, 5, 6)} <= set(pairs)
    assert {(3, 7), (7, 3)} <= set(pairs)


def test_no_permutation():
    with pytest.raises(PlanError, match="no device is left that holds what device"):
        permute_pairs(Layout.parse("f32[{x}3/10]", Mesh(x=4)), Layout.parse("f32[{x:(1)2}5]", Mesh(x=4)))
