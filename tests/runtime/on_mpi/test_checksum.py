"""Checksums: equal in all layouts, and different once anything is swapped."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.lower.to_mpi import ranks
from reshard.runtime.on_mpi.checksum import checksum
from tests.layouts import random_pair
from tests.oracle import tiles_of


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
