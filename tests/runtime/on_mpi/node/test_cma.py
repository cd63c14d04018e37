"""Reading memory through the kernel: that of other processes (`tests.mpi.modules`), and that of this one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import RankError
from reshard.runtime.on_mpi.node import cma
from reshard.runtime.on_mpi.node.cma import RemoteMemory


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):
    running.check("modules.cma", 3, tmp_path)


@pytest.fixture
def memory() -> RemoteMemory:
    memory = RemoteMemory(MPI.COMM_SELF)
    if not memory.works:
        pytest.skip("this kernel does not let a process read its own memory")
    return memory


def runs_of(array: np.ndarray, cuts: list[int]) -> np.ndarray:
    starts = np.cumsum([0, *cuts[:-1]])
    return np.array([[array.ctypes.data + at, n] for at, n in zip(starts, cuts, strict=True)], np.uint64)


CUTS = [1, 700, 5, 94, 200]


@pytest.mark.parametrize("vectors", [1024, 3])
@pytest.mark.parametrize(("longest", "scattered"), [(1 << 20, True), (64, True), (7, True), (1 << 20, False)])
def test_runs_are_read_in_order(
    memory: RemoteMemory, longest: int, vectors: int, scattered: bool, monkeypatch: pytest.MonkeyPatch
):
    """As many local runs as remote ones, or a single one, whatever the kernel takes in one call."""
    monkeypatch.setattr(cma, "_LONGEST", longest)
    monkeypatch.setattr(cma, "_VECTORS", vectors)
    source, into = np.random.default_rng(3).integers(0, 256, 1000).astype("u1"), np.zeros(1000, "u1")
    order = [3, 0, 4, 2, 1]
    remote = runs_of(source, CUTS)[order]
    local = runs_of(into, [CUTS[n] for n in order]) if scattered else runs_of(into, [1000])
    memory.read(0, remote, local)
    starts = np.cumsum([0, *CUTS])
    assert np.array_equal(into, np.concatenate([source[starts[n] : starts[n + 1]] for n in order]))


def test_memory_that_is_not_there_is_an_error(memory: RemoteMemory):
    into = np.zeros(8, "u1")
    with pytest.raises(RankError, match="reading 8 B of process"):
        memory.read(0, np.array([[4096, 8]], np.uint64), runs_of(into, [8]))


def test_elsewhere_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not RemoteMemory(MPI.COMM_SELF).works
