"""Checksums: equal in all layouts, and different once anything is swapped."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.lower.to_mpi import ranks
from reshard.runtime.on_mpi import global_array as checksum_module
from reshard.runtime.on_mpi.global_array import checksum
from tests.layouts import random_pair
from tests.oracle import tiles_of
from tests.view_oracle import cut, random_case


def whole(layout: rs.Layout, tiles: dict[int, np.ndarray]) -> int:
    devices = ranks(layout.mesh)
    return sum(checksum(layout, rank, tiles[device]) for rank, device in enumerate(devices)) % 2**64


def test_a_sum_does_not_depend_on_the_layout() -> None:
    choose = random.Random(2)
    for _ in range(60):
        source, target = random_pair(choose, "int32")
        sums = [
            whole(layout, {device: tile.astype("int32") for device, tile in tiles_of(layout).items()})
            for layout in (source, target)
        ]
        assert sums[0] == sums[1], (str(source), str(target))


def test_a_sum_is_the_same_on_both_sides_of_a_view() -> None:
    """Parts taken and filled too: what the rest of the target holds adds nothing; an element out of place does."""
    choose = random.Random(3)
    for _ in range(60):
        case = random_case(choose, "int32")
        move = case.move
        array = np.array(choose.sample(range(1 << 20), int(np.prod(move.source.shape))), "int32")
        array = array.reshape(move.source.shape)
        moved = case.reference(array).astype("int32")
        before = _viewed(move, move.source, array, after=False)
        assert before == _viewed(move, move.target, moved, after=True), move
        kept = case.reference(np.full_like(array, -1)) != -1
        moved[kept] += 1
        assert before == _viewed(move, move.target, moved, after=True), move
        rows = np.argwhere(~kept)
        if len(rows) > 1:
            first, last = tuple(rows[0]), tuple(rows[-1])
            moved[first], moved[last] = moved[last], moved[first]
            assert before != _viewed(move, move.target, moved, after=True), move


def _viewed(move: rs.Move, layout: rs.Layout, array: np.ndarray, after: bool) -> int:
    tiles, devices = cut(layout, array), ranks(layout.mesh)
    sums = (checksum(layout, rank, tiles[d].astype("int32"), move.view, after=after) for rank, d in enumerate(devices))
    return sum(sums) % 2**64


def test_large_tiles_are_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = rs.Layout.parse("f32[7, 5, 3]", rs.Mesh(x=1))
    tile = np.arange(105, dtype="float32").reshape(7, 5, 3)
    at_once = checksum(layout, 0, tile)
    monkeypatch.setattr(checksum_module, "_AT_ONCE", 31)
    assert checksum(layout, 0, tile) == at_once


def test_swapped_elements_change_it() -> None:
    layout = rs.Layout.parse("s32[{x}4, 4]", rs.Mesh(x=2))
    tiles = {device: tile.astype("int32") for device, tile in tiles_of(layout).items()}
    before = whole(layout, tiles)
    tiles[0][0, :2] = tiles[0][0, 1::-1]
    assert whole(layout, tiles) != before


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float64", "complex128"])
def test_elements_of_any_size(dtype: str) -> None:
    layout = rs.Layout.parse("u8[{x}2]", rs.Mesh(x=2))
    assert checksum(layout, 0, np.array([0, 1], dtype)) != checksum(layout, 0, np.array([1, 0], dtype))
