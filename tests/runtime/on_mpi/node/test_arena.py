"""The arena: which memory is used again, when, and what happens without room. Ranks are in `tests.mpi.sharing`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import RankError
from reshard.runtime.on_mpi.node import arena as module
from reshard.runtime.on_mpi.node.arena import LOG, Arena, Heap

PAGE = 4096
LARGE = 32 << 20
U1 = np.dtype("u1")


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):
    running.check("sharing.arenas", 3, tmp_path)


def alone(words: Sequence[int]) -> list[list[int]]:
    return [list(words)]


@pytest.fixture
def arena() -> Arena:
    return Arena(1, 0, np.zeros((1, LOG), np.int64))


def take(arena: Arena, nbytes: int) -> int:
    """What a call does: a sync, then a block."""
    arena.update([arena.log()])
    return arena.take(nbytes, alone)


def test_memory_is_used_again_when_its_last_array_is_gone(arena: Arena):
    place = take(arena, 100)
    tile = arena.hold(place, (5, 5), np.dtype("i4"))
    part = tile[1:, 2]
    del tile
    assert take(arena, 100) != place
    del part
    assert take(arena, 100) == place


def test_a_release_counts_from_the_next_sync_on(arena: Arena):
    place = take(arena, 100)
    arena.release(place)
    assert arena.take(100, alone) != place
    assert take(arena, 100) == place


def test_one_rank_that_has_not_released_it_keeps_a_block():
    logs = np.zeros((2, LOG), np.int64)
    ranks = [Arena(2, me, logs) for me in range(2)]
    for rank in ranks:
        rank._memory[0] = np.zeros(2 * PAGE, np.uint8)
        rank._homes[0] = (0, 1)
        rank._heaps[0, 1] = Heap()
        rank._heaps[0, 1].add(0, PAGE)
    places = {rank.take(PAGE, alone) for rank in ranks}
    assert len(places) == 1
    place = places.pop()
    ranks[0].release(place)
    for logged in ([1, 0], [1, 1]):
        if logged[1]:
            ranks[1].release(place)
        assert [rank.log() for rank in ranks] == logged
        for rank in ranks:
            rank.update(logged)
            assert rank._heaps[0, 1].unused() == ([0] if logged[1] else [])


def test_more_releases_than_the_log_takes_come_later(arena: Arena):
    places = [take(arena, 64) for _ in range(LOG + 1)]
    for place in places:
        arena.release(place)
    logged = [arena.log() for _ in range(4)]
    assert logged == [LOG // 2, LOG, LOG + 1, LOG + 1]


def test_the_log_is_a_ring(arena: Arena):
    first = take(arena, 64)
    for _ in range(3 * LOG):
        arena.release(first)
        assert take(arena, 64) == first


def test_arrays_share_few_segments(arena: Arena):
    places = {take(arena, 1000) for _ in range(5000)}
    assert len(places) == 5000
    assert len(arena._memory) < 12
    assert sum(memory.size for memory in arena._memory.values()) < 4 * 5000 * 1024


def test_blocks_do_not_overlap_and_keep_what_is_written(arena: Arena):
    tiles = [arena.hold(take(arena, 4 * n), (n,), np.dtype("i4")) for n in range(300)]
    for number, tile in enumerate(tiles):
        tile[...] = number
    assert all((tile == number).all() for number, tile in enumerate(tiles))
    assert all(arena.place_of(tile) % 64 == 0 for tile in tiles), "a cache line of two arrays"


def test_a_tile_is_known_by_its_address(arena: Arena):
    place = take(arena, 400)
    tile = arena.hold(place, (10, 10), np.dtype("f4"))
    tile[...] = np.arange(100).reshape(10, 10)
    assert arena.place_of(tile) == arena.place_of(tile[:5]) == place
    assert arena.place_of(tile[1:]) == place + 40
    assert np.array_equal(arena.tile(0, place + 40, (9, 10), np.dtype("f4")), tile[1:])
    assert arena.place_of(tile[:, 1:]) == arena.place_of(np.zeros(4)) == 0
    other = Arena(1, 0, np.zeros((1, LOG), np.int64))
    assert other.place_of(tile) == 0
    take(other, 100)
    assert other.place_of(tile) == 0


def test_an_empty_tile_has_a_place(arena: Arena):
    place = take(arena, 0)
    assert place > 0
    assert arena.hold(place, (0, 3), np.dtype("f8")).shape == (0, 3)


def test_unused_large_segments_are_dropped_the_oldest_first(arena: Arena):
    places = [take(arena, LARGE) for _ in range(3)]
    for place in places:
        arena.release(place)
    new = take(arena, 3 * LARGE)
    arena.release(new)
    assert len(arena._memory) == 4, "together the unused ones have no more than the new one"
    take(arena, 3 * LARGE + 1)
    assert arena.tile(0, new, (1,), U1).size == 1
    with pytest.raises(RankError, match="memory 0 of the node has been freed"):
        arena.tile(0, places[0], (1,), U1)


def test_a_dropped_segment_lives_as_long_as_an_array_on_it(arena: Arena):
    place = take(arena, LARGE)
    tile = arena.tile(0, place, (LARGE,), U1)
    arena.release(place)
    for more in range(1, 4):
        arena.release(take(arena, 2 * LARGE + more * (4 << 20)))
    assert 0 not in arena._memory
    tile[...] = 3
    assert tile.sum() == 3 * LARGE


def test_without_room_there_is_no_place_and_few_more_tries(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    tries: list[int] = []

    def refused(self: Arena, capacity: int, gather: object, home: tuple[int, ...]) -> bool:
        tries.append(capacity)
        return capacity <= PAGE and add(self, capacity, alone, home)

    add = Arena._add
    monkeypatch.setattr(Arena, "_add", refused)
    assert take(arena, 10 * PAGE) == 0
    assert tries == [module._FIRST, 10 * PAGE], "a segment to share, then one that is just large enough"
    assert [take(arena, 10 * PAGE) for _ in range(module._PATIENCE)] == [0] * module._PATIENCE
    assert len(tries) == 2
    assert take(arena, PAGE) > 0, "a smaller block may have room"
    assert take(arena, 10 * PAGE) == 0
    assert len(tries) > 4


def test_before_it_gives_up_unused_memory_goes(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    arena.release(take(arena, LARGE))
    arena.update([arena.log()])
    add = Arena._add

    def tight(self: Arena, capacity: int, gather: module.Gather, home: tuple[int, ...]) -> bool:
        return not self._memory and add(self, capacity, gather, home)

    monkeypatch.setattr(Arena, "_add", tight)
    assert arena.take(LARGE + PAGE, alone) > 0


def test_ranks_that_are_no_members_release_nothing():
    logs = np.zeros((3, LOG), np.int64)
    ranks = [Arena(3, me, logs) for me in range(3)]
    for rank in ranks:
        rank._memory[0], rank._homes[0] = np.zeros(3 * PAGE, np.uint8), (0, 2)
        rank._heaps[0, 2] = Heap()
        rank._heaps[0, 2].add(0, PAGE)
    (place,) = {rank.take(PAGE, alone, (0, 2)) for rank in ranks}
    for me in (0, 2):
        ranks[me].release(place)
        logged = [rank.log() for rank in ranks]
        for rank in ranks:
            rank.update(logged)
            assert rank._heaps[0, 2].unused() == ([0] if me == 2 else [])
