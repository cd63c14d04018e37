"""Trees on numpy: tiles in and out, what is refused, and a fault that the oracle sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import reshard as rs
from reshard.errors import TileError
from reshard.lower.program import join_launches
from reshard.runtime import Account, measure, on_numpy
from tests.oracle import source_tiles
from tests.trees import check_tree, llama

MESH = rs.Mesh(x=4, y=2)
TREE = rs.plan_tree(llama(MESH))
TILES = {name: source_tiles(plan) for name, plan in TREE.plans.items()}


def test_the_weights_of_a_model():
    account = check_tree(TREE)
    assert account.received_bytes == TREE.received_bytes == TREE.lower_bound_bytes


def test_the_given_tiles_are_not_written_to():
    kept = {name: {device: tile.copy() for device, tile in by.items()} for name, by in TILES.items()}
    rs.simulate(rs.plan_tree(llama(MESH), donate=True), TILES)
    for name, by in TILES.items():
        for device, tile in by.items():
            np.testing.assert_array_equal(tile, kept[name][device])


def test_tiles_without_padding():
    ends = tuple(rs.Layout.parse(text, MESH) for text in ("s32[{x}3/10]", "s32[{y}{x}2/10]"))
    tree = rs.plan_tree({"a": ends, "b": ends})
    tiles = {device: np.arange(10, dtype="int32")[device // 2 * 3 :][:3] for device in range(8)}
    moved = rs.simulate(tree, {"a": tiles, "b": tiles}, padded=False)
    assert [moved["b"][device].tolist() for device in (0, 1, 2)] == [[0, 1], [8, 9], [2, 3]]


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (None, "tiles are a NoneType"),
        ({}, "tiles are given for 0 arrays"),
        (TILES | {"more": {}}, "'more'"),
        (TILES | {"norm": {}}, "norm: tiles are given for 0 devices"),
        (TILES | {"norm": {d: t.astype("int64") for d, t in TILES["norm"].items()}}, "norm: device 0's tile .* int64"),
        (TILES | {"norm": {d: t[1:] for d, t in TILES["norm"].items()}}, "norm: "),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tiles: object, message: str):
    with pytest.raises(TileError, match=message):
        rs.simulate(TREE, tiles)


def test_measure_sees_a_tree_as_one_call():
    with measure() as measured:
        rs.simulate(TREE, TILES)
    assert len(measured.calls) == 1
    assert measured.received_bytes == TREE.received_bytes


def test_a_batch_packed_in_the_wrong_order_is_seen(monkeypatch: pytest.MonkeyPatch):
    def turned(programs):
        joint = join_launches(programs)
        return [replace(step, receive=step.receive[::-1]) if getattr(step, "receive", ()) else step for step in joint]

    ends = [tuple(rs.Layout.parse(t, MESH) for t in (f"s32[{{x}}{n}]", f"s32[{4 * n}]")) for n in (2, 3)]
    tree = rs.plan_tree(ends)
    check_tree(tree)
    monkeypatch.setattr(on_numpy, "join_launches", turned)
    with pytest.raises((AssertionError, ValueError)):
        check_tree(tree)


def test_bytes_of_several_dtypes_are_counted_together():
    ends = {n: tuple(rs.Layout.parse(t, MESH) for t in (f"{n}[{{x}}4]", f"{n}[16]")) for n in ("s8", "s16", "s64")}
    tree = rs.plan_tree(ends)
    account = Account("uint8")
    rs.simulate(tree, {name: source_tiles(plan) for name, plan in tree.plans.items()}, account)
    assert account.received_bytes == tree.received_bytes == 12 * (1 + 2 + 8)
    assert account.launches == 3
