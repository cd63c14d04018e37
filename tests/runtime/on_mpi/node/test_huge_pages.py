"""Memory mapped a second time for huge pages: the same bytes, where it can be done, and nothing where it cannot."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node import huge_pages

HUGE = 2 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked of Linux")


def shared(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def mapped() -> int:
    """Bytes of address space that this process has."""
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * mmap.PAGESIZE


@linux
@pytest.mark.parametrize("skipped", [0, 4096, 3 * 4096])
def test_it_is_the_same_memory_where_its_place_in_the_file_asks(skipped: int):
    whole = shared(huge_pages.WORTHWHILE + 5 * HUGE + 4096)
    memory = whole[skipped:]
    found = huge_pages.map_again(memory)
    assert found is not None
    assert found.memory.size == memory.size and not np.may_share_memory(found.memory, memory)
    assert (found.start - skipped) % HUGE == 0
    huge_pages.populate(found)
    assert not memory.any()
    steps = np.arange(0, memory.size, 4096)
    memory[steps] = steps // 4096 % 251
    assert np.array_equal(found.memory[steps], steps // 4096 % 251)
    found.memory[-1] = 7
    assert memory[-1] == 7
    found.unmap()
    assert memory[-1] == 7


@linux
@pytest.mark.parametrize("skipped", [0, HUGE // 2])
def test_nothing_is_left_mapped_around_it(skipped: int):
    memory = shared(huge_pages.WORTHWHILE + skipped)[skipped:]
    before = mapped()
    for _ in range(20):
        found = huge_pages.map_again(memory)
        assert found is not None
        assert mapped() - before < memory.size + HUGE
        found.unmap()
    assert mapped() - before < HUGE


@pytest.mark.parametrize("size", [4096, huge_pages.WORTHWHILE - 1])
def test_little_memory_stays_as_it_is(size: int):
    assert huge_pages.map_again(shared(size)) is None


def test_private_memory_stays_as_it_is():
    assert huge_pages.map_again(np.zeros(2 * huge_pages.WORTHWHILE, np.uint8)) is None


def test_memory_that_begins_inside_a_page_stays_as_it_is():
    assert huge_pages.map_again(shared(2 * huge_pages.WORTHWHILE)[64:]) is None


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_MPI_HUGE_PAGES", "0")
    assert huge_pages.map_again(shared(2 * huge_pages.WORTHWHILE)) is None
