"""Arrays on one rank, indices of tiles, checksums and measured links."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

import reshard as rs
from reshard.lower.to_mpi import devices_by_id
from reshard.mpi.measurements import _ranks_in_pairs, measure_link
from reshard.runtime.on_mpi import global_array as checksum_module
from reshard.runtime.on_mpi.global_array import (
    clear_padding,
    global_indices,
    index_ranges,
    sum_tile,
)
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import layouts, random_pair
from tests.oracle import PADDING, tiles_of
from tests.owners import Owned
from tests.view_oracle import cut, random_case

MESH = Mesh(x=2, y=2)


@given(layouts())
@settings(max_examples=150)
def test_ranges_indices_and_padding_are_those_of_the_meaning(layout: Layout):
    for rank, device in enumerate(devices_by_id(layout.mesh)):
        along = meaning(layout, device)
        for dim, (size, wanted) in enumerate(zip(layout.shape, along, strict=True)):
            real = np.array([at < size for at in wanted], bool)
            assert [at for run in index_ranges(layout, rank)[dim] for at in run] == [at for at in wanted if at < size]
            assert np.array_equal(np.asarray(wanted)[real], global_indices(layout, dim, rank))


def test_indices_of_pieces_are_those_of_their_owners() -> None:
    choose = random.Random(4)
    for _ in range(60):
        owned = Owned.random(choose, Mesh(x=2, y=3), (choose.choice([1, 7, 30]), choose.choice([1, 5])))
        for rank, device in enumerate(devices_by_id(owned.layout.mesh)):
            for dim, wanted in enumerate(owned.indices(device)):
                assert np.array_equal(global_indices(owned.layout, dim, rank), wanted)
                ranges = index_ranges(owned.layout, rank)[dim]
                assert [at for run in ranges for at in run] == wanted.tolist()


@given(layouts())
@settings(max_examples=60)
def test_padding_is_cleared_and_nothing_else(layout: Layout):
    for rank, device in enumerate(devices_by_id(layout.mesh)):
        wanted = tiles_of(layout)[device]
        tile = wanted.copy()
        clear_padding(layout, rank, tile)
        assert np.array_equal(tile, np.where(wanted == PADDING, 0, wanted))


# ---- Checksums: equal in all layouts, and different once anything is swapped


def whole(layout: rs.Layout, tiles: dict[int, np.ndarray]) -> int:
    devices = devices_by_id(layout.mesh)
    return sum(sum_tile(layout, rank, tiles[device]) for rank, device in enumerate(devices)) % 2**64


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
    tiles, devices = cut(layout, array), devices_by_id(layout.mesh)
    sums = (sum_tile(layout, rank, tiles[d].astype("int32"), move.view, after=after) for rank, d in enumerate(devices))
    return sum(sums) % 2**64


def test_large_tiles_are_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = rs.Layout.parse("f32[7, 5, 3]", rs.Mesh(x=1))
    tile = np.arange(105, dtype="float32").reshape(7, 5, 3)
    at_once = sum_tile(layout, 0, tile)
    monkeypatch.setattr(checksum_module, "_AT_ONCE", 31)
    assert sum_tile(layout, 0, tile) == at_once


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float64", "complex128"])
def test_elements_of_any_size(dtype: str) -> None:
    layout = rs.Layout.parse("u8[{x}2]", rs.Mesh(x=2))
    assert sum_tile(layout, 0, np.array([0, 1], dtype)) != sum_tile(layout, 0, np.array([1, 0], dtype))


# ---- Measured links: only between pairs that exist, and of plausible size. See `tests.mpi.calls`


def test_a_single_rank_measures_messages_to_itself():
    team = Team(MPI.COMM_SELF, None, 5)
    watch = Watch(team, 5)
    alone = measure_link(team, watch, True)
    assert alone is not None
    assert 0 < alone.latency < 1
    assert measure_link(team, watch, False) is None


@pytest.mark.parametrize(("shift", "near", "ranks"), [(1, True, [0, 2]), (1, False, [1, 3]), (2, False, [0, 1, 2, 3])])
def test_which_ranks_have_a_peer_at_a_distance(shift: int, near: bool, ranks: list[int]):
    nodes = (0, 0, 1, 1)
    team = cast(Any, SimpleNamespace(size=4, near=lambda one, other: nodes[one] == nodes[other]))
    assert _ranks_in_pairs(team, shift, near) == ranks
