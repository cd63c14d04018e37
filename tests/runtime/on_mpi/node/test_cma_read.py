"""Tiles read through the kernel: all ranks' tiles in this process, straight and through the buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from reshard.lower.to_mpi import devices_by_id
from reshard.runtime import Account
from reshard.runtime.on_mpi import direct_moves as module
from reshard.runtime.on_mpi.copies.strided_copy import view_as_words
from reshard.runtime.on_mpi.direct_moves import plan_direct, read_remote_tiles
from reshard.runtime.on_mpi.node.arena import Pool
from reshard.runtime.on_mpi.node.cma import RemoteMemory
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.oracle import PADDING, tiles_of

MEMORY = RemoteMemory(MPI.COMM_SELF)
pytestmark = pytest.mark.skipif(not MEMORY.works, reason="this kernel does not let a process read its own memory")


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


@given(pairs(), st.booleans(), st.sampled_from("CF"))
@settings(max_examples=60)
def test_every_result_is_filled(pair: tuple[Layout, Layout], buffered: bool, order: str):
    read_all(*pair, buffered, order)


@pytest.mark.parametrize("buffered", [True, False])
def test_results_of_other_strides_are_filled_by_the_same_move(buffered: bool):
    mesh = Mesh(x=2)
    source, target = Layout.parse("s64[{x}5, 6]", mesh), Layout.parse("s64[10, {x}3]", mesh)
    for order in "CF":
        read_all(source, target, buffered, order)


@pytest.mark.parametrize("scratch", [64, 1000])
def test_short_runs_go_through_a_buffer_of_bounded_size(scratch: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SCRATCH", scratch)
    monkeypatch.setattr(module, "STRAIGHT", 64)
    mesh = Mesh(x=3)
    source, target = Layout.parse("s64[{x}5, 9]", mesh), Layout.parse("s64[15, {x}3]", mesh)
    assert 0 < read_all(source, target, True) <= scratch
    assert read_all(source, target, False) == 0
    assert read_all(Layout.parse("s64[{x}5, 9]", mesh), Layout.parse("s64[15, 9]", mesh), True) == 0, "long runs do not"
