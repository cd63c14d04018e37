"""Memory mapped a second time for huge pages: the same bytes if that is possible, None if it is not."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node import huge_pages

HUGE = 2 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux makes huge pages on request")


def shared(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def mapped() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * mmap.PAGESIZE


@linux
@pytest.mark.parametrize("skipped", [0, 4096, 3 * 4096])
def test_the_second_mapping_is_the_same_memory_at_an_aligned_address(skipped: int):
    whole = shared(huge_pages.WORTHWHILE + 5 * HUGE + 4096)
    memory = whole[skipped:]
    mapping = huge_pages.map_again(memory)
    assert mapping is not None
    assert mapping.memory.size == memory.size and not np.may_share_memory(mapping.memory, memory)
    assert (mapping.start - skipped) % HUGE == 0
    huge_pages.populate(mapping)
    assert not memory.any()
    steps = np.arange(0, memory.size, 4096)
    memory[steps] = steps // 4096 % 251
    assert np.array_equal(mapping.memory[steps], steps // 4096 % 251)
    mapping.memory[-1] = 7
    assert memory[-1] == 7
    mapping.unmap()
    assert memory[-1] == 7


@linux
@pytest.mark.parametrize("skipped", [0, HUGE // 2])
def test_unmapping_leaves_no_address_space_behind(skipped: int):
    memory = shared(huge_pages.WORTHWHILE + skipped)[skipped:]
    before = mapped()
    for _ in range(20):
        mapping = huge_pages.map_again(memory)
        assert mapping is not None
        assert mapped() - before < memory.size + HUGE
        mapping.unmap()
    assert mapped() - before < HUGE


@pytest.mark.parametrize("size", [4096, huge_pages.WORTHWHILE - 1])
def test_small_memory_is_not_mapped_again(size: int):
    assert huge_pages.map_again(shared(size)) is None


def test_private_memory_is_not_mapped_again():
    assert huge_pages.map_again(np.zeros(2 * huge_pages.WORTHWHILE, np.uint8)) is None


def test_memory_that_starts_inside_a_page_is_not_mapped_again():
    assert huge_pages.map_again(shared(2 * huge_pages.WORTHWHILE)[64:]) is None


def test_huge_pages_can_be_disabled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_MPI_HUGE_PAGES", "0")
    assert huge_pages.map_again(shared(2 * huge_pages.WORTHWHILE)) is None
