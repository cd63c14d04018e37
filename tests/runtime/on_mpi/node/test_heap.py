"""The heap against a list of bytes: blocks never overlap, and freed neighbours become one hole."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node.arena import ROOMY, SHARED, Heap, rounded

PAGE = 4096


def holes(owner: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """The free runs (bytes, chunk, start) of chunks, given the block that each line of 64 bytes belongs to."""
    runs = []
    for chunk, lines in owner.items():
        start = 0
        for at in range(len(lines) + 1):
            if at == len(lines) or lines[at]:
                if at > start:
                    runs.append((64 * (at - start), chunk, 64 * start))
                start = at + 1
    return sorted(runs)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_take_the_smallest_hole_and_do_not_overlap(seed: int):
    choose, heap, owner = random.Random(seed), Heap(), {}
    live: dict[tuple[int, int], int] = {}
    for number, capacity in enumerate((PAGE, 3 * PAGE, 2 * PAGE)):
        heap.add(number, capacity)
        owner[number] = [0] * (capacity // 64)
    for turn in range(1, 800):
        assert heap._holes == holes(owner)
        if live and choose.random() < 0.45:
            block = choose.choice(list(live))
            size, value = live.pop(block), 0
            heap.free(block)
        else:
            size = choose.choice([1, 64, 65, 500, 1000, 4000, 5000, 3 * PAGE])
            best = next((hole for hole in holes(owner) if hole[0] >= rounded(size)), None)
            assert heap.has_room(size) == (best is not None)
            block, value = heap.take(size), turn
            assert block == (best and best[1:])
            if block is None:
                continue
            live[block] = size
        first = block[1] // 64
        lines = owner[block[0]]
        assert len({bool(each) for each in lines[first : first + rounded(size) // 64]} | {bool(value)}) == 2
        lines[first : first + rounded(size) // 64] = [value] * (rounded(size) // 64)
        assert heap.unused() == [chunk for chunk, lines in owner.items() if not any(lines)]


def test_small_blocks_do_not_keep_large_chunks_alive():
    heap = Heap()
    heap.add(0, SHARED)
    heap.add(1, ROOMY * SHARED)
    assert heap.take(64) == (0, 0)
    assert heap.take(SHARED - PAGE) == (0, PAGE // PAGE * 64)
    assert heap.take(SHARED - PAGE) is None, "less than a quarter of the large chunk"
    assert heap.take(SHARED) == (1, 0)


def test_a_chunk_without_blocks_can_go():
    heap = Heap()
    heap.add(0, PAGE)
    heap.add(1, PAGE)
    block = heap.take(PAGE)
    assert block == (0, 0) and heap.unused() == [1]
    heap.free(block)
    assert heap.unused() == [0, 1]
    heap.remove(0)
    assert heap.take(10) == (1, 0)
