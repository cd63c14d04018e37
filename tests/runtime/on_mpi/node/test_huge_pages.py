"""Memory mapped for huge pages: at an aligned address, shared with the file, and unmapped when nobody uses it."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node import arena
from reshard.runtime.on_mpi.node.arena import HUGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux makes huge pages on request")


def file_of(nbytes: int) -> int:
    file = os.memfd_create("test")
    os.posix_fallocate(file, 0, nbytes)
    return file


@pytest.fixture(params=[4096, HUGE, 3 * HUGE + 4096])
def file(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    made = file_of(request.param)
    yield made, request.param
    os.close(made)


def mapped() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * mmap.PAGESIZE


def test_a_mapping_is_the_memory_of_the_file_at_an_aligned_address(file: tuple[int, int]):
    number, nbytes = file
    memory, other = arena.aligned(number, nbytes), np.frombuffer(mmap.mmap(number, nbytes), np.uint8)
    assert memory is not None
    assert memory.shape == (nbytes,) and memory.dtype == np.uint8 and memory.flags.writeable
    assert memory.ctypes.data % HUGE == 0
    arena.collapse(memory[: nbytes // HUGE * HUGE])
    assert not other.any()
    steps = np.arange(0, nbytes, 4096)
    memory[steps] = steps // 4096 % 251
    assert np.array_equal(other[steps], steps // 4096 % 251)
    other[-1] = 7
    assert memory[-1] == 7


def test_a_mapping_lives_as_long_as_an_array_on_it_and_no_longer(file: tuple[int, int]):
    number, nbytes = file
    before = mapped()
    for _ in range(20):
        memory = arena.aligned(number, nbytes)
        assert memory is not None
        part = memory[-10:].view(np.uint16).reshape(5, 1)
        del memory
        part[-1] = 7
        assert nbytes <= mapped() - before < nbytes + HUGE
        del part
    assert mapped() - before < HUGE


def test_what_is_no_file_is_not_mapped():
    before = mapped()
    assert arena.aligned(-1, 4096) is None
    assert mapped() - before < HUGE


def test_large_memory_has_huge_pages_unless_the_user_turns_them_off(monkeypatch: pytest.MonkeyPatch):
    assert arena.wanted(arena.WORTHWHILE)
    assert not arena.wanted(arena.WORTHWHILE - 1)
    monkeypatch.setenv("RESHARD_MPI_HUGE_PAGES", "0")
    assert not arena.wanted(arena.WORTHWHILE)
