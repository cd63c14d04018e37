"""Windows: shared by the ranks of a node (`tests.mpi.modules`), and which one is used again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import RankError
from reshard.runtime.on_mpi.node import windows as module
from reshard.runtime.on_mpi.node.windows import Windows

PAGE = 4096


def test_three_ranks(tmp_path: Path):
    running.check("modules.windows", 3, tmp_path)


@pytest.fixture
def pool() -> Windows:
    return Windows(MPI.COMM_SELF)


def take(pool: Windows, nbytes: int, *others: list[int]) -> module.Window:
    return pool.take(nbytes, [pool.words(), *others])


def test_a_window_is_used_again_when_its_last_array_is_gone(pool: Windows):
    window = take(pool, 100)
    tile = pool.hold(window, (5, 5), np.dtype("i4"))
    part = tile[1:, 2]
    del tile
    assert take(pool, 100) is not window
    del part
    assert take(pool, 100) is window


def test_one_rank_that_has_not_released_it_keeps_a_window(pool: Windows):
    window = take(pool, 100)
    pool.release(window)
    assert take(pool, 100, [0]) is not window
    pool.release(window)
    assert take(pool, 100, [1 << window.slot]) is window


def test_words_that_call_a_window_free_are_used_once(pool: Windows):
    window = take(pool, 100)
    pool.release(window)
    posted = [pool.words()]
    assert pool.take(100, posted) is window
    pool.release(window)
    assert pool.take(100, posted) is not window, "the words are those of before"


@pytest.mark.parametrize(("capacity", "nbytes", "again"), [(8, 8, True), (8, 2, True), (8, 1, False), (8, 9, False)])
def test_a_window_serves_arrays_of_a_quarter_of_it_and_more(pool: Windows, capacity: int, nbytes: int, again: bool):
    window = take(pool, capacity * PAGE)
    pool.release(window)
    assert (take(pool, nbytes * PAGE) is window) == again


def test_the_smallest_window_that_fits_is_taken(pool: Windows):
    made = [take(pool, pages * PAGE) for pages in (4, 2, 3)]
    for window in made:
        pool.release(window)
    assert take(pool, 2 * PAGE) is made[1]
    assert take(pool, 2 * PAGE) is made[2]


def test_unused_windows_are_dropped_the_oldest_first(pool: Windows):
    made = [take(pool, pages * PAGE) for pages in (10, 10, 10)]
    for window in made:
        pool.release(window)
    new = take(pool, 100 * PAGE)
    assert [pool.has(window) for window in made] == [True, True, True], "together less than twice the new one"
    pool.release(new)
    larger = take(pool, 101 * PAGE)
    assert not pool.has(made[0])
    assert pool.has(larger)
    pool.release(larger)
    take(pool, 102 * PAGE)
    assert pool.has(larger)
    assert not any(pool.has(window) for window in (*made, new))
    with pytest.raises(RankError, match="has been freed"):
        pool[new.slot]


def test_a_tile_is_known_by_its_address(pool: Windows):
    window = take(pool, 400)
    tile = pool.hold(window, (10, 10), np.dtype("f4"))
    assert pool.under(tile) is window
    assert pool.under(tile[:5]) is window
    assert pool.under(tile[1:]) is None
    assert pool.under(tile.T) is None
    assert pool.under(tile[:0]) is None
    assert not Windows(MPI.COMM_SELF).has(window)


def test_there_are_so_many_slots_and_no_more(pool: Windows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "WORDS", 9)
    monkeypatch.setattr(module, "_BITS", 3)
    for _ in range(3):
        take(pool, 1)
    with pytest.raises(RankError, match="3 arrays are alive in shared windows; delete some"):
        take(pool, 1)


def test_released_slots_are_bits_of_words(pool: Windows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_BITS", 3)
    made = [take(pool, 1) for _ in range(7)]
    for slot in (0, 4, 6):
        pool.release(made[slot])
    assert pool.words() == [0b001, 0b010, 0b001]
