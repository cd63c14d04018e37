"""Global arrays scattered from one rank and gathered on one, see `tests.mpi.calls`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.global_array import _gathered, _scattered, on_one_device
from reshard.types import Layout, Mesh

MESH = Mesh(x=2, y=2)
LAYOUT = Layout.parse("f32[{x}4, 6]", MESH)


@pytest.mark.slow
def test_there_and_back(tmp_path: Path):
    running.check("calls.global_arrays", 3, tmp_path)


def test_the_layout_on_one_device_is_that_of_the_whole_array():
    whole = on_one_device(Layout.parse("bf16[{x}5/9, 2{y}2/7]", MESH))
    assert (whole.shape, whole.tile_shape, whole.dtype, whole.mesh.size) == ((9, 7), (9, 7), "bfloat16", 1)


def test_a_root_sends_each_tile_and_is_sent_each_element_once():
    sent = _scattered(LAYOUT, 1, 4, 1, 4)
    assert [(chunk.peer, chunk.elements) for chunk in sent.sends.chunks] == [(0, 24), (2, 24), (3, 24)]
    assert not sent.receives.chunks
    assert [chunk.peer for chunk in _scattered(LAYOUT, 2, 4, 1, 4).receives.chunks] == [1]
    collected = _gathered(LAYOUT, 1, 4, 1, 4)
    assert sum(chunk.elements for chunk in collected.receives.chunks) == 24, "its own half is there already"
    senders = {rank for rank in range(4) if _gathered(LAYOUT, rank, 4, 1, 4).sends.chunks}
    assert senders == {chunk.peer for chunk in collected.receives.chunks}


def test_every_rank_takes_its_part_of_its_own_array():
    for rank in range(4):
        mine = _scattered(LAYOUT, rank, 4, None, 4)
        assert not mine.sends.chunks
        assert not mine.receives.chunks
        assert mine.local
