"""Reading memory through the kernel: that of other processes (`tests.mpi.modules`), and that of this one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from reshard.errors import RankError
from reshard.lower.to_mpi import devices_by_id
from reshard.runtime import Account
from reshard.runtime.on_mpi import direct_moves
from reshard.runtime.on_mpi.copies.strided_copy import view_as_words
from reshard.runtime.on_mpi.direct_moves import (
    plan_direct,
    read_remote_tiles,
)
from reshard.runtime.on_mpi.node import cma
from reshard.runtime.on_mpi.node.arena import Pool
from reshard.runtime.on_mpi.node.cma import RemoteMemory
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.oracle import PADDING, tiles_of

MEMORY = RemoteMemory(MPI.COMM_SELF)
can_read = pytest.mark.skipif(not MEMORY.works, reason="this kernel does not let a process read its own memory")


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):
    running.check("modules.cma", 3, tmp_path)


def runs_of(array: np.ndarray, cuts: list[int]) -> np.ndarray:
    starts = np.cumsum([0, *cuts[:-1]])
    return np.array([[array.ctypes.data + at, n] for at, n in zip(starts, cuts, strict=True)], np.uint64)


CUTS = [1, 700, 5, 94, 200]


@can_read
@pytest.mark.parametrize("vectors", [1024, 3])
@pytest.mark.parametrize(("longest", "scattered"), [(1 << 20, True), (64, True), (7, True), (1 << 20, False)])
def test_runs_are_read_in_order(longest: int, vectors: int, scattered: bool, monkeypatch: pytest.MonkeyPatch):
    """As many local runs as remote ones, or a single one, whatever the kernel takes in one call."""
    monkeypatch.setattr(cma, "_LONGEST", longest)
    monkeypatch.setattr(cma, "_VECTORS", vectors)
    source, into = np.random.default_rng(3).integers(0, 256, 1000).astype("u1"), np.zeros(1000, "u1")
    order = [3, 0, 4, 2, 1]
    remote = runs_of(source, CUTS)[order]
    local = runs_of(into, [CUTS[n] for n in order]) if scattered else runs_of(into, [1000])
    MEMORY.read(0, remote, local)
    starts = np.cumsum([0, *CUTS])
    assert np.array_equal(into, np.concatenate([source[starts[n] : starts[n + 1]] for n in order]))


@can_read
def test_memory_that_is_not_there_is_an_error():
    into = np.zeros(8, "u1")
    with pytest.raises(RankError, match="reading 8 B of process"):
        MEMORY.read(0, np.array([[4096, 8]], np.uint64), runs_of(into, [8]))


def test_elsewhere_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not RemoteMemory(MPI.COMM_SELF).works


# ---- Tiles read that way: all ranks' tiles in this process, straight and through the buffer


def read_all(source: Layout, target: Layout, buffered: bool, order: str = "C") -> int:
    """Every rank's result is what the target means; returns how many elements the buffers had at most."""
    size = source.mesh.size
    # Every member's memory is that of this process.
    remote = SimpleNamespace(read=lambda _, there, here: MEMORY.read(0, there, here))
    team = SimpleNamespace(members=tuple(range(size)), remote_memory=remote)
    tiles = {rank: tiles_of(source)[device].copy() for rank, device in enumerate(devices_by_id(source.mesh))}
    most = 0
    for rank, device in enumerate(devices_by_id(target.mesh)):
        call = cast(Any, SimpleNamespace(team=team, pool=Pool(), memory=Account("int64"), device=device))
        result = np.full(target.tile_shape, PADDING, order=order)
        move = plan_direct(source, target, rank, (0,) * size, 8, 0)
        fill = read_remote_tiles({r: tile.ctypes.data for r, tile in tiles.items()}, buffered)
        for _ in range(2):  # The second time from what the first has worked out.
            result[...] = PADDING
            for step in fill(call, move, view_as_words(tiles[rank]), view_as_words(result)):
                step()
            wanted = tiles_of(target)[device]
            assert np.array_equal(result[wanted != PADDING], wanted[wanted != PADDING])
        most = max(most, call.memory.peak_bytes)
        assert call.memory.live[device] == 0
    return most


@can_read
@given(pairs(), st.booleans(), st.sampled_from("CF"))
@settings(max_examples=60)
def test_every_result_is_filled(pair: tuple[Layout, Layout], buffered: bool, order: str):
    read_all(*pair, buffered, order)


@can_read
@pytest.mark.parametrize("buffered", [True, False])
def test_results_of_other_strides_are_filled_by_the_same_move(buffered: bool):
    mesh = Mesh(x=2)
    source, target = Layout.parse("s64[{x}5, 6]", mesh), Layout.parse("s64[10, {x}3]", mesh)
    for order in "CF":
        read_all(source, target, buffered, order)


@can_read
@pytest.mark.parametrize("scratch", [64, 1000])
def test_short_runs_go_through_a_buffer_of_bounded_size(scratch: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(direct_moves, "SCRATCH", scratch)
    monkeypatch.setattr(direct_moves, "STRAIGHT", 64)
    mesh = Mesh(x=3)
    source, target = Layout.parse("s64[{x}5, 9]", mesh), Layout.parse("s64[15, {x}3]", mesh)
    assert 0 < read_all(source, target, True) <= scratch
    assert read_all(source, target, False) == 0
    assert read_all(Layout.parse("s64[{x}5, 9]", mesh), Layout.parse("s64[15, 9]", mesh), True) == 0, "long runs do not"
