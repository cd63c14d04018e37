"""What ranks of a node share: segments, blocks in them, synchronization, tiles in windows."""

from __future__ import annotations

import mmap
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.errors import RankError
from reshard.runtime.on_mpi.collective import prepare_together
from reshard.runtime.on_mpi.node import arena as arena_module
from reshard.runtime.on_mpi.node.arena import (
    HUGE,
    KINDS,
    LOG,
    PAGE,
    ROOMY,
    SHARED,
    Arena,
    Heap,
    Pool,
    round_to_line,
    share_segment,
)
from reshard.runtime.on_mpi.node.node_sync import WORDS, NodeSync, sync_bytes
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.window_tiles import NOWHERE, Posted, locate_tile, new_tile, post_tile
from reshard.types import Layout, Mesh
from tests.mpi import running

# ---- Segments: memory that all ranks map, allocated before use, or none on all of them. See `tests.mpi.sharing`


linux = pytest.mark.skipif(sys.platform != "linux", reason="files of a process's own are Linux's")


def ranks(size: int, call: Callable[[int, arena_module.Gather], np.ndarray | None]) -> list[np.ndarray | None]:
    """Calls it on `size` threads, which stand for ranks of one process."""
    barrier, posted = threading.Barrier(size), [[]] * size
    results: list[np.ndarray | None] = [None] * size

    def rank(me: int) -> None:
        def gather(words: Sequence[int]) -> list[list[int]]:
            posted[me] = list(words)
            barrier.wait(60)
            every = list(posted)
            barrier.wait(60)
            return every

        results[me] = call(me, gather)

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use the one of all."""
    monkeypatch.setattr(arena_module, "FOLDER", str(tmp_path))


def left() -> tuple[int, list[str]]:
    """How many files that ranks share are open, and their names."""
    shared = ("/memfd:", arena_module.FOLDER)
    return sum(target.startswith(shared) for target in _open_files()), os.listdir(arena_module.FOLDER)


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The one that listed them.
            yield os.readlink(f"/proc/self/fd/{number}")


@linux
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [PAGE, 9 << 20])
def test_all_ranks_map_one_file(kind: int, nbytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arena_module, "KINDS", (kind,))
    before = left()
    memory = ranks(3, lambda me, gather: share_segment(3, me, nbytes, gather))
    for me, mine in enumerate(memory):
        assert mine is not None and mine.size == 3 * nbytes and not mine[me * nbytes : (me + 1) * nbytes].any()
        mine[me * nbytes :][: nbytes // 2] = me + 1
    assert all(mine is not None and np.array_equal(mine, memory[0]) for mine in memory)
    assert left() == before, "open files or names are left"


@linux
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [0, 1])
def test_if_one_rank_has_no_room_none_has_the_memory(kind: int, odd: int, monkeypatch: pytest.MonkeyPatch):
    allocate, before = arena_module._allocate_blocks, left()

    def refused(file: int, start: int, nbytes: int) -> None:
        if start == odd * PAGE:
            raise OSError(28, "no space left on device")
        allocate(file, start, nbytes)

    monkeypatch.setattr(arena_module, "KINDS", (kind,))
    monkeypatch.setattr(arena_module, "_allocate_blocks", refused)
    assert ranks(2, lambda me, gather: share_segment(2, me, PAGE, gather)) == [None, None]
    assert left() == before


@linux
def test_a_file_that_another_rank_cannot_open_is_replaced_by_one_with_a_name(monkeypatch: pytest.MonkeyPatch):
    opened, kinds = arena_module._open_file, []

    def elsewhere(site: arena_module._Site) -> int | None:
        kinds.append(site.kind)
        return None if site.kind == KINDS[0] else opened(site)

    monkeypatch.setattr(arena_module, "_open_file", elsewhere)
    one, other = ranks(2, lambda me, gather: share_segment(2, me, PAGE, gather))
    assert one is not None and other is not None
    one[-1] = 5
    assert other[-1] == 5
    assert kinds == list(KINDS)


@linux
def test_another_file_of_the_same_name_is_not_taken(tmp_path: Path):
    file, site = arena_module._create_file(KINDS[1], PAGE)
    assert file is not None
    again = arena_module._open_file(site)
    assert again is not None
    os.close(again)
    os.rename(site.path, tmp_path / "first")  # Or its number would be used again.
    Path(site.path).write_bytes(bytes(PAGE))
    assert arena_module._open_file(site) is None
    assert arena_module._open_file(site._replace(number=1)) is None
    os.close(file)


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """The kernel refuses larger files to this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@linux
def test_what_the_kernel_refuses_is_none():
    with limited(PAGE):
        assert share_segment(1, 0, PAGE, alone) is not None
        assert share_segment(1, 0, 2 * PAGE, alone) is None
    assert share_segment(1, 0, 2 * PAGE, alone) is not None
    assert share_segment(1, 0, 1 << 50, alone) is None, "more than the machine's memory"
    assert share_segment(1, 0, 1 << 62, alone) is None


@linux
def test_memory_is_allocated_before_it_is_touched():
    file = os.memfd_create("test")
    for huge in (False, True):
        nbytes = 3 * arena_module.HUGE + 5 * PAGE if huge else 5 * PAGE
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arena_module, "WORTHWHILE", PAGE if huge else 1 << 40)
            assert arena_module._allocate_segment(file, 2 * nbytes, nbytes, nbytes) is not None
        assert os.fstat(file).st_blocks * 512 >= nbytes
        os.ftruncate(file, 0)
    os.close(file)


@linux
@pytest.mark.parametrize("slow", [False, True])
def test_huge_pages_that_take_long_are_given_up(slow: bool, monkeypatch: pytest.MonkeyPatch):
    """No more are requested after one that took longer than all are worth; the memory is there in either case."""
    asked: list[int] = []

    def collapse(memory: np.ndarray) -> None:
        asked.append(memory.size)
        if slow:
            monkeypatch.setattr(arena_module.time, "thread_time", lambda: 1e9)

    monkeypatch.setattr(arena_module, "collapse_pages", collapse)
    monkeypatch.setattr(arena_module.time, "thread_time", lambda: 0.0)
    file, nbytes = os.memfd_create("test"), 8 * arena_module.HUGE
    memory = arena_module._allocate_segment(file, nbytes, 0, nbytes)
    assert memory is not None and asked == [arena_module.HUGE] * (1 if slow else 8)
    assert os.fstat(file).st_blocks * 512 >= nbytes
    os.close(file)


def test_a_system_without_a_call_for_it_writes_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    arena_module._allocate_blocks(file, PAGE, 3 * PAGE)
    assert os.fstat(file).st_size == 4 * PAGE
    os.close(file)


@linux
def test_only_members_allocate_memory(monkeypatch: pytest.MonkeyPatch):
    allocated: list[int] = []
    allocate = arena_module._allocate_blocks

    def counted(file: int, start: int, nbytes: int) -> None:
        allocated.append(start // (2 * PAGE))
        allocate(file, start, nbytes)

    monkeypatch.setattr(arena_module, "_allocate_blocks", counted)
    memory = ranks(4, lambda me, gather: share_segment(4, me, 2 * PAGE, gather, (0, 2)))
    assert sorted(allocated) == [0, 2]
    for me in (0, 2):
        mine = memory[me]
        assert mine is not None
        mine[2 * me * PAGE : 2 * (me + 1) * PAGE] = me + 1
    assert all(mine is not None and mine[0] == 1 and mine[4 * PAGE] == 3 for mine in memory)


# ---- Memory mapped for huge pages: at an aligned address, shared with the file, and unmapped when nobody uses it


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
    memory, other = arena_module.map_aligned(number, nbytes), np.frombuffer(mmap.mmap(number, nbytes), np.uint8)
    assert memory is not None
    assert memory.shape == (nbytes,) and memory.dtype == np.uint8 and memory.flags.writeable
    assert memory.ctypes.data % HUGE == 0
    arena_module.collapse_pages(memory[: nbytes // HUGE * HUGE])
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
        memory = arena_module.map_aligned(number, nbytes)
        assert memory is not None
        part = memory[-10:].view(np.uint16).reshape(5, 1)
        del memory
        part[-1] = 7
        assert nbytes <= mapped() - before < nbytes + HUGE
        del part
    assert mapped() - before < HUGE


def test_what_is_no_file_is_not_mapped():
    before = mapped()
    assert arena_module.map_aligned(-1, 4096) is None
    assert mapped() - before < HUGE


def test_large_memory_has_huge_pages_unless_the_user_turns_them_off(monkeypatch: pytest.MonkeyPatch):
    assert arena_module.wants_huge_pages(arena_module.WORTHWHILE)
    assert not arena_module.wants_huge_pages(arena_module.WORTHWHILE - 1)
    monkeypatch.setenv("RESHARD_MPI_HUGE_PAGES", "0")
    assert not arena_module.wants_huge_pages(arena_module.WORTHWHILE)


# ---- The heap against a list of bytes: blocks never overlap, and freed neighbours become one hole


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
            best = next((hole for hole in holes(owner) if hole[0] >= round_to_line(size)), None)
            assert heap.has_room(size) == (best is not None)
            block, value = heap.take(size), turn
            assert block == (best and best[1:])
            if block is None:
                continue
            live[block] = size
        first = block[1] // 64
        lines = owner[block[0]]
        assert len({bool(each) for each in lines[first : first + round_to_line(size) // 64]} | {bool(value)}) == 2
        lines[first : first + round_to_line(size) // 64] = [value] * (round_to_line(size) // 64)
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


# ---- The arena: which memory is used again, when, and what happens without room. Ranks are in `tests.mpi.sharing`


LARGE = 32 << 20
U1 = np.dtype("u1")


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


@pytest.mark.parametrize(("size", "members"), [(2, (0, 1)), (3, (0, 2))])
def test_a_block_is_free_when_all_ranks_that_have_it_have_released_it(size: int, members: tuple[int, ...]):
    logs = np.zeros((size, LOG), np.int64)
    every = [Arena(size, me, logs) for me in range(size)]
    for rank in every:
        rank._memory[0], rank._homes[0] = np.zeros(size * PAGE, np.uint8), members
        rank._heaps[members] = Heap()
        rank._heaps[members].add(0, PAGE)
    (place,) = {rank.take(PAGE, alone, members) for rank in every}
    for me in members:
        every[me].release(place)
        logged = [rank.log() for rank in every]
        for rank in every:
            rank.update(logged)
            assert rank._heaps[members].unused() == ([0] if me == members[-1] else [])


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
    assert tries == [arena_module._FIRST, 10 * PAGE], "a segment to share, then one that is just large enough"
    assert [take(arena, 10 * PAGE) for _ in range(arena_module._PATIENCE)] == [0] * arena_module._PATIENCE
    assert len(tries) == 2
    assert take(arena, PAGE) > 0, "a smaller block may have room"
    assert take(arena, 10 * PAGE) == 0
    assert len(tries) > 4


def test_before_it_gives_up_unused_memory_goes(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    arena.release(take(arena, LARGE))
    arena.update([arena.log()])
    add = Arena._add

    def tight(self: Arena, capacity: int, gather: arena_module.Gather, home: tuple[int, ...]) -> bool:
        return not self._memory and add(self, capacity, gather, home)

    monkeypatch.setattr(Arena, "_add", tight)
    assert arena.take(LARGE + PAGE, alone) > 0


# ---- The pool of buffers: reuse, the best fit, and never more than the limit


def base(array: np.ndarray) -> np.ndarray:
    while array.base is not None:
        array = array.base
    return array


def test_the_smallest_buffer_that_fits_is_used():
    pool = Pool()
    pool.limit(1000)
    taken = [pool.take(size) for size in (300, 100, 200)]
    for buffer in taken:
        pool.give(buffer)
    assert base(pool.take(150)) is base(taken[2])


def test_a_buffer_of_more_than_twice_the_size_is_spared_if_there_is_no_room():
    pool = Pool()
    pool.limit(300)
    large = pool.take(300)
    pool.give(large)
    small = pool.take(290)
    assert base(small) is base(large)
    pool.give(small)
    pool.limit(100)
    assert pool.take(10).size == 10
    assert base(pool.take(10)) is not base(large)


def test_all_buffers_stay_within_the_limit():
    choose, pool, live = random.Random(7), Pool(), []
    pool.limit(500)
    for _ in range(2000):
        used = sum(base(buffer).size for buffer in live)
        size = choose.randint(0, 120)
        if live and (choose.random() < 0.5 or used + size > 500):
            pool.give(live.pop(choose.randrange(len(live))))
        else:
            live.append(pool.take(size))
            assert live[-1].size == size
            assert len({id(base(buffer)) for buffer in live}) == len(live), "one buffer for two"
        idle = sum(buffer.size for buffer in pool._idle)
        used = sum(base(buffer).size for buffer in live)
        assert used == pool._used
        assert used + idle <= max(500, used)


# ---- Words, arrivals and failures of a node's ranks, see `tests.mpi.modules`


def node_sync_alone() -> NodeSync:
    return NodeSync(1, 0, np.zeros(sync_bytes(1), np.uint8))


def test_all_words_of_a_sync_are_kept_until_the_next_but_one():
    sync = node_sync_alone()
    for number in range(5):
        words = list(range(number, number + WORDS))
        sync.post(words)
        assert sync.complete()
        assert sync.missing() == []
        assert sync.read(0, WORDS) == words


def test_a_text_of_no_words_is_a_failure_too():
    sync = node_sync_alone()
    assert sync.failed() == {}
    sync.fail("")
    assert sync.failed() == {0: ""}
    sync.fail("a longer text")
    assert sync.failed() == {0: "a longer text"}


# ---- Where tiles lie: what a rank posts, and tiles in windows as long as there is room


LAYOUT = Layout.parse("f32[6, 7]", Mesh())


@pytest.fixture
def team() -> Team:
    return Team(MPI.COMM_SELF, None, 5)


@pytest.fixture
def watch(team: Team) -> Watch:
    return Watch(team, 5)


SMALL_SHARED_MEMORY = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "sh"]
"""Runs a command with a /dev/shm of 64 MiB, as containers have it; needs a kernel that lets users do that."""


@pytest.mark.slow
def test_arrays_beyond_the_size_of_shared_memory(tmp_path: Path):
    if subprocess.run([*SMALL_SHARED_MEMORY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a /dev/shm of its own; refusals are tried without it, too")
    running.check("sharing.files_of_a_name", 2, tmp_path, SMALL_SHARED_MEMORY)


def test_a_private_tile_has_an_address_and_no_place(team: Team):
    tile = np.zeros((4, 3))
    assert post_tile(locate_tile(team, tile)) == (0, tile.ctypes.data, 0, 0)
    assert post_tile(locate_tile(team, tile.T)) == (0, 0, 0, 0)


def test_a_tile_is_known_by_its_address(team: Team, watch: Watch):
    one, other = (new_tile(team, watch, LAYOUT, np.dtype("f4")) for _ in range(2))
    assert 0 < one.place < other.place
    assert locate_tile(team, one.tile) == one
    assert locate_tile(team, one.tile[1:]).place == one.place + 7 * 4
    one.tile[...] = np.arange(42).reshape(6, 7)
    assert np.array_equal(team.arena.tile(0, one.place + 7 * 4, (5, 7), np.dtype("f4")), one.tile[1:])
    assert locate_tile(team, one.tile[:, 1:]).place == 0
    assert locate_tile(Team(MPI.COMM_SELF, None, 5), one.tile).place == 0
    posted = post_tile(one, other)
    assert posted == (one.place, one.tile.ctypes.data, other.place, 1)
    prepare_together(team, watch, lambda: one, lambda _: "posted", lambda held: post_tile(held, other))
    assert [Posted(*words[: len(NOWHERE)]) for words in team.posted()] == [Posted(*posted)]
    assert team.plain
    assert team.shared


def test_a_rank_without_a_tile_posts_nowhere(team: Team, watch: Watch):
    prepare_together(team, watch, lambda: None, lambda _: "nothing")
    assert [Posted(*words[: len(NOWHERE)]) for words in team.posted()] == [NOWHERE]
    assert not team.plain
    assert not team.shared


def test_a_tile_is_private_if_the_node_has_no_room(team: Team, watch: Watch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(team.arena, "_add", lambda *_: False)
    private = new_tile(team, watch, LAYOUT, np.dtype("f4"))
    assert private.place == 0
    assert private.tile.shape == (6, 7)
    prepare_together(team, watch, lambda: private, lambda _: "posted", post_tile)
    assert team.plain
    assert not team.shared
