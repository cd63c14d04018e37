"""Every pair of the placements that a transfer library for weights takes, and what such libraries refuse.

Two meshes a side, 4 x 2 and 2 x 4, each with one dim sharded along one axis or replicated: 14 placements a side, 196
pairs. The rival sends what each receiver needs from one holder of each tile, receivers taking holders in turn.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

import reshard as rs
from tests import oracle

SHAPE = (16, 8, 8)
MESHES = ({"x": 4, "y": 2}, {"x": 2, "y": 4})
PLACEMENTS = [None, *product("xy", range(3))]


def _placed(axes: dict[str, int], first: int, placement: tuple[str, int] | None) -> rs.Layout:
    mesh = rs.Mesh(axes, device_ids=range(first, first + 8))
    spec = [[] if placement is None or placement[1] != dim else [placement[0]] for dim in range(3)]
    return rs.Layout.from_spec(mesh, SHAPE, "int32", spec)


SIDES = [(axes, placement) for axes in MESHES for placement in PLACEMENTS]


def _rival(source: rs.Layout, target: rs.Layout) -> tuple[int, int]:
    """Elements that the busiest sender and the busiest receiver of the rival move, from tiles full of indices."""
    holders: dict[bytes, list[int]] = {}
    tiles = oracle.tiles_of(source)
    for device, tile in tiles.items():
        holders.setdefault(tile.tobytes(), []).append(device)
    sent, received = Counter(), Counter()
    for number, (device, tile) in enumerate(oracle.tiles_of(target).items()):
        wanted = set(tile.ravel().tolist())
        for devices in holders.values():
            common = len(wanted.intersection(tiles[devices[0]].ravel().tolist()))
            sent[devices[number % len(devices)]] += common
            received[device] += common
    return max(sent.values()), max(received.values())


@pytest.mark.fast(6)
@pytest.mark.parametrize("before", SIDES, ids=lambda side: f"{side[0]['x']}x{side[0]['y']}-{side[1]}")
def test_every_pair_of_placements_loads_nobody_more_than_the_rival(before: tuple[dict[str, int], object]):
    for after in SIDES:
        source, target = _placed(before[0], 0, before[1]), _placed(after[0], 8, after[1])  # type: ignore[arg-type]
        plan = rs.plan(source, target)
        oracle.check(plan)
        sent, received = _rival(source, target)
        assert plan.received_bytes == received * 4 == plan.lower_bound_bytes
        assert max(plan.sent_bytes, plan.received_bytes) <= max(sent, received) * 4
        assert (
            plan.endpoint_bound_bytes <= max(plan.sent_bytes, plan.received_bytes) <= 1.05 * plan.endpoint_bound_bytes
        )


@pytest.mark.parametrize(
    ("source", "target", "first"),
    [
        ("s32[{x}4, 2, {y}4, 8]", "s32[16, {a}1, 8, {b}2]", 8),  # rank above 3, two sharded dims a side
        ("s32[{x}{y}2, 8]", "s32[{b}4, {a}4]", 8),  # two axes in one dim
        ("s32[{x}4/13, 7]", "s32[13, {b}2/7]", 8),  # uneven
        ("s32[{x}4, 8]", "s32[16, {b}2]", 4),  # overlapping
        ("s32[16, 8] + sum{x}", "s32[16, {b}2]", 8),  # partial
        ("s32[2{x}2, 8]", "s32[{b}2{a}, 8]", 8),  # block-cyclic
    ],
)
def test_what_others_refuse_is_moved(source: str, target: str, first: int):
    there = rs.Mesh({"a": 2, "b": 4}, device_ids=range(first, first + 8))
    plan = rs.plan(rs.Layout.parse(source, rs.Mesh(x=4, y=2)), rs.Layout.parse(target, there))
    oracle.check(plan)
    assert plan.received_bytes <= (3 if plan.source.partial else 1.05) * plan.lower_bound_bytes
