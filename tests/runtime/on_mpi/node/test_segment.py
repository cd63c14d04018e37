"""Segments: memory that all ranks map, allocated before use, or none on all of them. See `tests.mpi.sharing`."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.node import arena
from reshard.runtime.on_mpi.node import arena as module
from reshard.runtime.on_mpi.node.arena import KINDS, PAGE, segment

linux = pytest.mark.skipif(sys.platform != "linux", reason="files of a process's own are Linux's")


@pytest.mark.slow
def test_three_ranks(tmp_path: Path):
    running.check("sharing.segments", 3, tmp_path)


def ranks(size: int, call: Callable[[int, module.Gather], np.ndarray | None]) -> list[np.ndarray | None]:
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
    monkeypatch.setattr(module, "FOLDER", str(tmp_path))


def left() -> tuple[int, list[str]]:
    """How many files that ranks share are open, and their names."""
    shared = ("/memfd:", module.FOLDER)
    return sum(target.startswith(shared) for target in _open_files()), os.listdir(module.FOLDER)


def _open_files() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The one that listed them.
            yield os.readlink(f"/proc/self/fd/{number}")


@linux
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [PAGE, 9 << 20])
def test_all_ranks_map_one_file(kind: int, nbytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KINDS", (kind,))
    before = left()
    memory = ranks(3, lambda me, gather: segment(3, me, nbytes, gather))
    for me, mine in enumerate(memory):
        assert mine is not None and mine.size == 3 * nbytes and not mine[me * nbytes : (me + 1) * nbytes].any()
        mine[me * nbytes :][: nbytes // 2] = me + 1
    assert all(mine is not None and np.array_equal(mine, memory[0]) for mine in memory)
    assert left() == before, "open files or names are left"


@linux
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", [0, 1])
def test_if_one_rank_has_no_room_none_has_the_memory(kind: int, odd: int, monkeypatch: pytest.MonkeyPatch):
    allocate, before = module._allocate, left()

    def refused(file: int, start: int, nbytes: int) -> None:
        if start == odd * PAGE:
            raise OSError(28, "no space left on device")
        allocate(file, start, nbytes)

    monkeypatch.setattr(module, "KINDS", (kind,))
    monkeypatch.setattr(module, "_allocate", refused)
    assert ranks(2, lambda me, gather: segment(2, me, PAGE, gather)) == [None, None]
    assert left() == before


@linux
def test_a_file_that_another_rank_cannot_open_is_replaced_by_one_with_a_name(monkeypatch: pytest.MonkeyPatch):
    opened, kinds = module._opened, []

    def elsewhere(site: module._Site) -> int | None:
        kinds.append(site.kind)
        return None if site.kind == KINDS[0] else opened(site)

    monkeypatch.setattr(module, "_opened", elsewhere)
    one, other = ranks(2, lambda me, gather: segment(2, me, PAGE, gather))
    assert one is not None and other is not None
    one[-1] = 5
    assert other[-1] == 5
    assert kinds == list(KINDS)


@linux
def test_another_file_of_the_same_name_is_not_taken(tmp_path: Path):
    file, site = module._created(KINDS[1], PAGE)
    assert file is not None
    again = module._opened(site)
    assert again is not None
    os.close(again)
    os.rename(site.path, tmp_path / "first")  # Or its number would be used again.
    Path(site.path).write_bytes(bytes(PAGE))
    assert module._opened(site) is None
    assert module._opened(site._replace(number=1)) is None
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
    def alone(words: Sequence[int]) -> list[list[int]]:
        return [list(words)]

    with limited(PAGE):
        assert segment(1, 0, PAGE, alone) is not None
        assert segment(1, 0, 2 * PAGE, alone) is None
    assert segment(1, 0, 2 * PAGE, alone) is not None
    assert segment(1, 0, 1 << 50, alone) is None, "more than the machine's memory"
    assert segment(1, 0, 1 << 62, alone) is None


@linux
def test_memory_is_allocated_before_it_is_touched():
    file = os.memfd_create("test")
    for huge in (False, True):
        nbytes = 3 * arena.HUGE + 5 * PAGE if huge else 5 * PAGE
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arena, "WORTHWHILE", PAGE if huge else 1 << 40)
            assert module._allocated(file, 2 * nbytes, nbytes, nbytes) is not None
        assert os.fstat(file).st_blocks * 512 >= nbytes
        os.ftruncate(file, 0)
    os.close(file)


def test_a_system_without_a_call_for_it_writes_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    module._allocate(file, PAGE, 3 * PAGE)
    assert os.fstat(file).st_size == 4 * PAGE
    os.close(file)


@linux
def test_only_members_allocate_memory(monkeypatch: pytest.MonkeyPatch):
    allocated: list[int] = []
    allocate = module._allocate

    def counted(file: int, start: int, nbytes: int) -> None:
        allocated.append(start // (2 * PAGE))
        allocate(file, start, nbytes)

    monkeypatch.setattr(module, "_allocate", counted)
    memory = ranks(4, lambda me, gather: segment(4, me, 2 * PAGE, gather, (0, 2)))
    assert sorted(allocated) == [0, 2]
    for me in (0, 2):
        mine = memory[me]
        assert mine is not None
        mine[2 * me * PAGE : 2 * (me + 1) * PAGE] = me + 1
    assert all(mine is not None and mine[0] == 1 and mine[4 * PAGE] == 3 for mine in memory)
