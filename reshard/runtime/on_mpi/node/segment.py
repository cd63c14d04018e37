"""Memory that all ranks of a node map: a file without a name, allocated before anybody touches it.

Touching shared memory that the system cannot provide is a bus error, which ends the process: MPI's own windows fill
`/dev/shm`, of which a container has 64 MiB by default, and find out too late. So every rank allocates its part first
(`posix_fallocate`), and if that fails on one of them, none uses the memory:

    rank 0       creates a file, empty            posts where it is and which it is
    all          open it, and see if it is that   post whether it is
    all          allocate and map their part      post whether that worked
    rank 0       removes the file's name          the file goes with the last rank that has mapped it

Ranks allocate their own parts, so that pages lie in the memory next to their core. A file of a process's own
(`memfd_create`) has no size limit but the machine's memory; it is opened through `/proc`, which ranks in containers of
their own may not do. They share a file in `/dev/shm`, whose name is gone before it takes any memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.runtime.on_mpi.node import huge_pages
from reshard.runtime.on_mpi.strided_copy import Array

PAGE = mmap.PAGESIZE

Gather = Callable[[Sequence[int]], list[list[int]]]
"""Waits for the ranks of a node; returns the words that each of them gives, equally many."""

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
"""Where files with a name are made."""

_UNNAMED, _NAMED = 1, 2
KINDS = (_UNNAMED, _NAMED)
"""The kinds of files that are tried, in this order."""

_WORD = 2**62 - 1  # The bits of a word that are safe to post.


class _Site(NamedTuple):
    """Where a file is, as words to post, and which one it is: a file of the same name elsewhere is another."""

    kind: int = 0
    place: int = 0
    number: int = 0
    device: int = 0
    inode: int = 0

    @property
    def path(self) -> str:
        """The path at which all ranks open the file."""
        if self.kind == _UNNAMED:
            return f"/proc/{self.place}/fd/{self.number}"
        return os.path.join(FOLDER, f"reshard-{self.number:016x}")


def segment(size: int, me: int, nbytes: int, gather: Gather, members: Sequence[int] | None = None) -> Array | None:
    """Zeroed memory with `nbytes` (whole pages) for each of `size` ranks, in their order, or None on all of them.

    If `members` are given, only they have memory; the parts of the others are addresses that nobody may touch.

    Collective among the ranks of a node. It is None if there is no room, or if the ranks cannot open each other's
    files. The memory lives as long as any array on it.
    """
    count, mine = (size, nbytes) if members is None else (len(members), nbytes if me in members else 0)
    for kind in KINDS:
        file = _shared(kind, me, count * nbytes, gather)
        if file is not None:
            try:
                memory = _allocated(file, size * nbytes, me * nbytes, mine)
            finally:
                os.close(file)
            return memory if all(words[0] for words in gather([memory is not None])) else None
    return None


def _shared(kind: int, me: int, nbytes: int, gather: Gather) -> int | None:
    """A new file that all ranks have opened, or None on all of them."""
    file, mine = _created(kind, nbytes) if me == 0 else (None, _Site())
    with ExitStack() as undo:
        if mine.kind == _NAMED:
            undo.callback(os.unlink, mine.path)
        site = _Site(*gather(mine)[0])
        if me != 0 and site.kind:
            file = _opened(site)
        with ExitStack() as unless_all:
            if file is not None:
                unless_all.callback(os.close, file)
            if site.kind and all(words[0] for words in gather([file is not None])):
                unless_all.pop_all()
                return file
    return None


def _created(kind: int, nbytes: int) -> tuple[int | None, _Site]:
    """A new file and its site; none if the system cannot make one, or lacks the memory."""
    if nbytes > _available():
        return None, _Site()
    number = secrets.randbits(60)
    try:
        if kind == _NAMED:
            file = os.open(_Site(_NAMED, 0, number).path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        elif hasattr(os, "memfd_create"):
            file = number = os.memfd_create("reshard")
        else:
            return None, _Site()
        status = os.fstat(file)
    except OSError:
        return None, _Site()
    return file, _Site(kind, os.getpid(), number, status.st_dev & _WORD, status.st_ino & _WORD)


def _opened(site: _Site) -> int | None:
    """The file at a site; None if it cannot be opened, or if another one is there."""
    try:
        file = os.open(site.path, os.O_RDWR)
    except OSError:
        return None
    status = os.fstat(file)
    if (status.st_dev & _WORD, status.st_ino & _WORD) == (site.device, site.inode):
        return file
    os.close(file)
    return None


def _allocated(file: int, size: int, start: int, nbytes: int) -> Array | None:
    """A file of `size` bytes, mapped, of which `nbytes` from `start` are allocated; None if there is no room."""
    try:
        os.ftruncate(file, size)  # Takes no memory, and changes nothing if another rank has been here.
        memory = _mapped(file, size)
        if huge_pages.wanted(nbytes) and memory.ctypes.data % huge_pages.HUGE == 0:
            first, last = -(-start // huge_pages.HUGE), (start + nbytes) // huge_pages.HUGE
            for number in range(first, last):
                _allocate(file, number * huge_pages.HUGE, PAGE)
            huge_pages.collapse(memory[first * huge_pages.HUGE : max(first, last) * huge_pages.HUGE])
        if nbytes:
            _allocate(file, start, nbytes)
    except (OSError, ValueError, OverflowError):
        return None
    return memory


def _allocate(file: int, start: int, nbytes: int) -> None:
    """Allocates memory for these bytes of a new file, or raises `OSError`; what has some already is kept."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, nbytes)
        return
    for at in range(start, start + nbytes, PAGE):
        os.pwrite(file, bytes(PAGE), at)


def _mapped(file: int, size: int) -> Array:
    memory = huge_pages.aligned(file, size)
    return np.frombuffer(mmap.mmap(file, size), np.uint8) if memory is None else memory


def _available() -> int:
    """Bytes of memory that this machine can give without taking them from another process, as far as it tells."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 2**62
