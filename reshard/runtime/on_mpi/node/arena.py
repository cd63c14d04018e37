"""The arena of a node: memory for tiles that every rank of the node can read and write, in a few large segments.

A block lies at the same place on every rank, each in its own part of the segment. Releasing is local: a rank releases
its block when the last array on it dies, at any time. Acquiring is collective: each rank logs its releases, and posts
at each sync how long its log is; a block that all ranks have released by then is free. All ranks of a node see the same
lengths, so they choose the same free block, or allocate another segment together.

    sync n       rank 0 has logged {block 0}     rank 1 has logged {}          block 0 is still in use on rank 1
    sync n + 1   rank 0 has logged {block 0}     rank 1 has logged {block 0}   block 0 is free for the next `take`

Arrays on some ranks only have blocks in segments of their own, in which the other ranks have no memory: they take part
in `take`, so that all ranks agree on what is where, and nothing else.

If the node has no more room, `take` says so on all ranks, and their tiles stay in private memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import secrets
import sys
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import RankError
from reshard.runtime.on_mpi.copies.strided_copy import Array

LOG = 512
"""Entries of a rank's log. It is a ring: at each sync a rank adds at most half of it, while others read the rest."""

_FIRST = 64 << 10  # Bytes that each rank has in the first segment; the next ones are as large as all before them.
_PATIENCE = 64  # After a refusal, this many blocks that need more room are refused without another try.
_BITS = 40  # A place is 1 plus the number of the segment, then this many bits for the byte at which the block starts.


Members = tuple[int, ...]
"""The ranks of the node, by their numbers there, that have memory in a segment."""


class Arena:
    """The memory that ranks of a node share, as one of them (`me` of `size`) sees it.

    A place is a positive number that says where in its own memory a rank has something; 0 stands for private memory.
    `logs` is shared memory for the logs, `LOG` entries for each rank.
    """

    def __init__(self, size: int, me: int, logs: Array) -> None:
        self._size, self._me, self._logs = size, me, logs
        self._everyone = tuple(range(size))
        self._heaps: dict[Members, Heap] = {}
        self._homes: dict[int, Members] = {}
        self._memory: dict[int, Array] = {}
        self._made = 0
        self._refused = (0, 0)  # The bytes of the last refusal, and how many blocks of that size are yet to be refused.
        self._own: list[tuple[int, int, int]] = []  # (address, segment, bytes) of this rank's parts, sorted
        self._released: deque[int] = deque()
        self._live: dict[int, tuple[weakref.ref[Array], int]] = {}

        def release_dead(ref: weakref.ref[Array], live: Any = self._live, released: Any = self._released) -> None:
            released.append(live.pop(id(ref))[1])  # The last array on a block has died. This keeps no arena alive.

        self._dies = release_dead
        self.logged = 0
        """How long this rank's log is since the beginning."""
        self._read = [0] * size
        self._counts: dict[int, int] = {}

    def log(self) -> int:
        """Logs what this rank has released; returns how long the log is, to be posted."""
        for _ in range(min(len(self._released), LOG // 2)):
            self._logs[self._me, self.logged % LOG] = self._released.popleft()
            self.logged += 1
        return self.logged

    def update(self, logged: Sequence[int]) -> None:
        """Frees what all ranks have released, given the lengths that they posted at one sync."""
        if logged == self._read:
            return
        for member, (start, end) in enumerate(zip(self._read, logged, strict=True)):
            for number in range(start, end):
                place = int(self._logs[member, number % LOG])
                count = self._counts.get(place, 0) + 1
                self._counts[place] = count
                block = _block_at(place)
                if count == len(self._homes[block[0]]):
                    del self._counts[place]
                    self._heap_of(block[0]).free(block)
        self._read = list(logged)

    def take(self, nbytes: int, gather: Gather, members: Members | None = None) -> int:
        """The place of a block of at least `nbytes` on these members, by default all; 0 if the node has no room for it.

        Collective: every rank of the node calls it with the same arguments, after the same syncs.
        """
        home = self._everyone if members is None else members
        heap = self._heaps.setdefault(home, Heap())
        block = heap.take(nbytes)
        if block is None and self._grow(nbytes, gather, home):
            block = heap.take(nbytes)
        return 0 if block is None else _place_of_block(*block)

    def has_room(self, nbytes: int, members: Members | None = None) -> bool:
        """Whether `take` has room for a block, without another segment: the same on every rank of the node."""
        heap = self._heaps.get(self._everyone if members is None else members)
        return heap is not None and heap.has_room(nbytes)

    def _heap_of(self, number: int) -> Heap:
        return self._heaps[self._homes[number]]

    def hold(self, place: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """This rank's tile in a block, which is released when the last array on it dies."""
        number, start = _block_at(place)
        start += self._me * self._heap_of(number).capacities[number]
        nbytes = round_to_line(math.prod(shape) * dtype.itemsize)
        root = np.frombuffer(self._memory[number].data, np.uint8, nbytes, start)  # Views keep this very array alive.
        ref = weakref.ref(root, self._dies)
        self._live[id(ref)] = ref, place
        return np.ndarray(shape, dtype, root)

    def release(self, place: int) -> None:
        """Releases a block on which this rank holds no array."""
        self._released.append(place)

    def tile(self, member: int, place: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """The C-ordered tile that a member has at a place."""
        number, start = _block_at(place)
        if number not in self._memory:
            raise RankError(f"memory {number} of the node has been freed: arrays of different calls were mixed up")
        start += member * self._heap_of(number).capacities[number]
        return self._memory[number][start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(tuple(shape))

    def around(self, place: int) -> tuple[Array, int, int]:
        """The segment of a place: its memory, the byte at which member 0 has the place, and the bytes of each part."""
        number, start = _block_at(place)
        return self._memory[number], start, self._heap_of(number).capacities[number]

    def place_of(self, tile: Array) -> int:
        """The place of a tile of this rank; 0 unless it is C-ordered and lies in the arena."""
        if not self._own or not tile.flags.c_contiguous:
            return 0
        address: int = tile.__array_interface__["data"][0]
        at = bisect_right(self._own, (address, self._made, 0)) - 1
        if at < 0:
            return 0
        start, number, nbytes = self._own[at]
        return _place_of_block(number, address - start) if address < start + nbytes else 0

    def _grow(self, nbytes: int, gather: Gather, home: Members) -> bool:
        """Adds a segment with room for `nbytes` on some members; all ranks have it, or none."""
        size, (refused, left) = round_to_line(nbytes), self._refused
        if left and size >= refused:
            self._refused = (refused, left - 1)
            return False
        # Unused segments go, oldest first, until the rest take no more than two of the largest size.
        unused = self._list_unused()
        room = 2 * max([size, *unused.values()]) - size
        for number in sorted(unused, reverse=True):
            room -= unused[number]
            if room < 0:
                self._drop(number)
        # Small blocks share a segment that is as large as all such segments before it.
        shared = sum(capacity for capacity in self._heaps[home].capacities.values() if capacity <= SHARED)
        wished = size if size >= WORTHWHILE else max(size, _FIRST, min(SHARED, shared))
        if self._add(_round_to_pages(wished), gather, home):
            return True
        for number in self._list_unused():
            self._drop(number)
        if self._add(_round_to_pages(size), gather, home):
            return True
        self._refused = (size, _PATIENCE)
        return False

    def _add(self, capacity: int, gather: Gather, home: Members) -> bool:
        """Adds a segment of this capacity; all ranks have it, or none."""
        # A rank that is alone on its node needs no shared memory.
        alone = self._size == 1
        memory = np.empty(capacity, np.uint8) if alone else share_segment(self._size, self._me, capacity, gather, home)
        if memory is None:
            return False
        number, self._made = self._made, self._made + 1
        self._memory[number], self._homes[number] = memory, home
        self._heaps[home].add(number, capacity)
        if self._me in home:
            start: int = memory.__array_interface__["data"][0] + self._me * capacity
            self._own = sorted([*self._own, (start, number, capacity)])
        return True

    def _list_unused(self) -> dict[int, int]:
        """The capacities of the segments without blocks, by number, oldest first."""
        unused = {number: heap.capacities[number] for heap in self._heaps.values() for number in heap.unused()}
        return dict(sorted(unused.items()))

    def _drop(self, number: int) -> None:
        """Forgets an unused segment; its memory is unmapped when the last array on it dies."""
        self._heap_of(number).remove(number)
        del self._memory[number], self._homes[number]
        self._own = [part for part in self._own if part[1] != number]


def _place_of_block(number: int, start: int) -> int:
    return (number + 1 << _BITS) + start


def _block_at(place: int) -> tuple[int, int]:
    """The number of a segment, and the byte at which a place starts in each rank's part."""
    return (place >> _BITS) - 1, place & (1 << _BITS) - 1


def _round_to_pages(nbytes: int) -> int:
    """Bytes of each rank's part of a segment: whole pages, or huge ones."""
    unit = HUGE if wants_huge_pages(nbytes) else PAGE
    return -(-nbytes // unit) * unit


# Blocks of memory in a few large chunks: which parts are free, and where the next block goes.
#
# This is bookkeeping only. Ranks that take and free the same blocks in the same order get the same answers, so they
# allocate shared memory without a word about it:
#
#     chunk 0, 64 KiB    | a, 4 KiB | b, 8 KiB | free |     take 6 KiB: after b
#                        | a, 4 KiB | free     | free |     b is freed: one hole of 60 KiB


SHARED = 16 << 20
"""Bytes of the largest chunk that any block may share; a larger chunk takes only blocks of a quarter of it or more, so
that small arrays do not keep much memory alive.
"""

ROOMY = 4

_LINE, _PAGE = 64, 4096

Block = tuple[int, int]
"""The number of a chunk, and the byte at which a block starts there."""

_Hole = tuple[int, int, int]
"""Bytes, chunk and start."""


def round_to_line(nbytes: int) -> int:
    """Bytes of the block for `nbytes`: whole cache lines, or pages.

    >>> [round_to_line(nbytes) for nbytes in (0, 65, 5000)]
    [64, 128, 8192]
    """
    unit = _LINE if nbytes < _PAGE else _PAGE
    return max(unit, -(-nbytes // unit) * unit)


class Heap:
    """Chunks, the blocks taken from them, and the holes between.

    >>> heap = Heap()
    >>> heap.add(7, 4096)
    >>> heap.take(100), heap.take(64), heap.take(4096)
    ((7, 0), (7, 128), None)
    """

    def __init__(self) -> None:
        self.capacities: dict[int, int] = {}
        self._blocks: dict[Block, int] = {}
        self._holes: list[_Hole] = []  # Sorted.
        self._starts: dict[Block, int] = {}  # The bytes of the hole that starts there.
        self._ends: dict[Block, int] = {}  # The bytes of the hole that ends there.

    def add(self, chunk: int, capacity: int) -> None:
        """Adds a chunk, all of it free, under a number that has not been used."""
        self.capacities[chunk] = capacity
        self._open(chunk, 0, capacity)

    def remove(self, chunk: int) -> None:
        """Removes a chunk without blocks."""
        self._close(chunk, 0, self.capacities.pop(chunk))

    def unused(self) -> list[int]:
        """The chunks without blocks, oldest first."""
        return [chunk for chunk, capacity in self.capacities.items() if self._starts.get((chunk, 0)) == capacity]

    def take(self, nbytes: int) -> Block | None:
        """A block of `nbytes` in the smallest hole that it may use; None if there is none."""
        size = round_to_line(nbytes)
        smallest = self._hole(size)
        if smallest is None:
            return None
        hole, chunk, start = smallest
        self._close(chunk, start, hole)
        if hole > size:
            self._open(chunk, start + size, hole - size)
        self._blocks[chunk, start] = size
        return chunk, start

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` has a block of `nbytes`.

        >>> Heap().has_room(64)
        False
        """
        return self._hole(round_to_line(nbytes)) is not None

    def _hole(self, size: int) -> _Hole | None:
        most = max(SHARED, ROOMY * size)
        fitting = itertools.islice(self._holes, bisect_left(self._holes, (size, 0, 0)), None)
        return next((hole for hole in fitting if self.capacities[hole[1]] <= most), None)

    def free(self, block: Block) -> None:
        """Frees a block, and joins it with the holes beside it."""
        chunk, start = block
        size = self._blocks.pop(block)
        if (before := self._ends.get(block)) is not None:
            start -= before
            self._close(chunk, start, before)
            size += before
        if (after := self._starts.get((chunk, start + size))) is not None:
            self._close(chunk, start + size, after)
            size += after
        self._open(chunk, start, size)

    def _open(self, chunk: int, start: int, size: int) -> None:
        insort(self._holes, (size, chunk, start))
        self._starts[chunk, start] = self._ends[chunk, start + size] = size

    def _close(self, chunk: int, start: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, chunk, start))]
        del self._starts[chunk, start], self._ends[chunk, start + size]


# Huge pages for the memory that ranks share, on Linux 6.1 and later; elsewhere the memory stays as it is.
#
# Numpy's own arrays get huge pages, shared memory does not: without them, reading and writing takes a tenth to a
# quarter longer, and first use twice as long. The kernel makes huge pages on request (`MADV_COLLAPSE`, whatever the
# system's settings for shared memory), but only for mappings whose address and file offset agree modulo the huge page
# size. So files are mapped at such addresses.


HUGE = 2 << 20
"""Bytes of a huge page on x86 and on 64-bit Arm with pages of 4 KiB; with others the kernel refuses the request."""

WORTHWHILE = 8 << 20
"""Bytes of memory from which huge pages are worth the calls."""

_PATIENT = 2e-3  # Seconds of a core beyond what huge pages are worth after which no more are requested.
_WORTH = 1.4e-3  # Seconds for one: as much in small pages takes that, and one 0.1 ms, or 5 in memory full of files.

_COLLAPSE = 25  # MADV_COLLAPSE
_READ_WRITE = 3  # PROT_READ | PROT_WRITE
_SHARED, _FIXED = 1, 0x10
_RESERVED = 0x4022  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE


class _Mapping:
    """Mapped memory, as numpy's array interface; it is unmapped when the last array on it dies."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start, False), "version": 3}
        weakref.finalize(self, call_libc, "munmap", start, nbytes).atexit = False


def map_aligned(file: int, nbytes: int) -> Array | None:
    """Maps the first `nbytes` of a file, whole pages, to be shared, at a multiple of a huge page's size.

    None if this system or the kernel cannot.
    """
    if sys.platform != "linux":
        return None
    room = nbytes + HUGE
    reserved = call_libc("mmap", None, room, 0, _RESERVED, -1, 0)
    if reserved is None:
        return None
    start = -(-reserved // HUGE) * HUGE
    if call_libc("mmap", start, nbytes, _READ_WRITE, _SHARED | _FIXED, file, 0) != start:
        call_libc("munmap", reserved, room)
        return None
    for low, high in ((reserved, start), (start + nbytes, reserved + room)):
        if high > low:
            call_libc("munmap", low, high - low)
    return np.asarray(_Mapping(start, nbytes))


def wants_huge_pages(nbytes: int) -> bool:
    """Whether memory of this size should have huge pages."""
    return nbytes >= WORTHWHILE and sys.platform == "linux" and os.environ.get("RESHARD_MPI_HUGE_PAGES") != "0"


def collapse_pages(memory: Array) -> None:
    """Requests huge pages for whole ones of a mapping, of which the first page of each has been allocated as zeros.

    If the kernel refuses, nothing changes.
    """
    if memory.size:
        memory[::HUGE] = 0  # The kernel collapses only ranges that have been touched.
        call_libc("madvise", memory.ctypes.data, memory.size, _COLLAPSE)


_ARGUMENTS = {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "malloc_trim": (ctypes.c_size_t,),
}


def call_libc(name: str, *arguments: int | None) -> int | None:
    """Calls a function of the C library; None if it fails or does not exist."""
    function: Any = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        return None
    function.argtypes, function.restype = _ARGUMENTS[name], ctypes.c_size_t
    result: int = function(*arguments)
    return None if result in (2**64 - 1, 2**32 - 1) else result


# Memory that all ranks of a node map: a file without a name, allocated before anybody touches it.
#
# Touching shared memory that the system cannot provide is a bus error, which ends the process: MPI's own windows fill
# `/dev/shm`, of which a container has 64 MiB by default, and find out too late. So every rank allocates its part first
# (`posix_fallocate`), and if that fails on one of them, none uses the memory:
#
#     rank 0       creates a file, empty            posts where it is and which it is
#     all          open it, and see if it is that   post whether it is
#     all          allocate and map their part      post whether that worked
#     rank 0       removes the file's name          the file goes with the last rank that has mapped it
#
# Ranks allocate their own parts, so that pages lie in the memory next to their core. A file of a process's own
# (`memfd_create`) has no size limit but the machine's memory; it is opened through `/proc`, which ranks in containers
# of their own may not do. They share a file in `/dev/shm`, whose name is gone before it takes any memory.


PAGE = mmap.PAGESIZE

Gather = Callable[[Sequence[int]], list[list[int]]]
"""Waits for the ranks of a node; returns the words that each of them gives, equally many."""

FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
"""Where files with a name are made."""

UNNAMED, _NAMED = 1, 2
KINDS = (UNNAMED, _NAMED)
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
        if self.kind == UNNAMED:
            return f"/proc/{self.place}/fd/{self.number}"
        return os.path.join(FOLDER, f"reshard-{self.number:016x}")


def share_segment(
    size: int,
    me: int,
    nbytes: int,
    gather: Gather,
    members: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
) -> Array | None:
    """Zeroed memory with `nbytes` (whole pages) for each of `size` ranks, in their order, or None on all of them.

    If `members` are given, only they have memory; the parts of the others are addresses that nobody may touch.

    Collective among the ranks of a node. It is None if there is no room, or if the ranks cannot open each other's
    files. The memory lives as long as any array on it.
    """
    count, mine = (size, nbytes) if members is None else (len(members), nbytes if me in members else 0)
    for kind in kinds or KINDS:
        file, own = _create_file(kind, count * nbytes) if me == 0 else (None, _Site())
        with ExitStack() as closed, ExitStack() as unnamed:
            if own.kind == _NAMED:
                unnamed.callback(os.unlink, own.path)
            site = _Site(*gather(own)[0])
            if me != 0 and site.kind:
                file = _open_file(site)
            if file is not None:
                closed.callback(os.close, file)
            if not site.kind or not all(words[0] for words in gather([file is not None])) or file is None:
                continue
            unnamed.close()  # All have opened it: its name is gone before it takes any memory.
            memory = _allocate_segment(file, size * nbytes, me * nbytes, mine)
        return memory if all(words[0] for words in gather([memory is not None])) else None
    return None


def _create_file(kind: int, nbytes: int) -> tuple[int | None, _Site]:
    """A new file and its site; none if the system cannot make one, or lacks the memory."""
    with suppress(OSError, ValueError, IndexError):
        # What this machine can give without taking it from another process, as far as it tells.
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:") and nbytes > int(line.split()[1]) << 10:
                return None, _Site()
    if nbytes > 2**62:
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


def _open_file(site: _Site) -> int | None:
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


def _allocate_segment(file: int, size: int, start: int, nbytes: int) -> Array | None:
    """A file of `size` bytes, mapped, of which `nbytes` from `start` are allocated; None if there is no room."""
    try:
        os.ftruncate(file, size)  # Takes no memory, and changes nothing if another rank has been here.
        aligned = map_aligned(file, size)
        memory = np.frombuffer(mmap.mmap(file, size), np.uint8) if aligned is None else aligned
        if wants_huge_pages(nbytes) and memory.ctypes.data % HUGE == 0:
            first, last, begun = -(-start // HUGE), (start + nbytes) // HUGE, time.thread_time()
            for number in range(first, last):
                _allocate_blocks(file, number * HUGE, PAGE)
                collapse_pages(memory[number * HUGE : (number + 1) * HUGE])
                # Where the kernel must make room for each, small pages take less, first use included.
                if time.thread_time() - begun > _PATIENT + (number + 1 - first) * _WORTH:
                    break
        if nbytes:
            _allocate_blocks(file, start, nbytes)
    except (OSError, ValueError, OverflowError):
        return None
    return memory


def _allocate_blocks(file: int, start: int, nbytes: int) -> None:
    """Allocates memory for these bytes of a new file, or raises `OSError`; what has some already is kept."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, nbytes)
        return
    for at in range(start, start + nbytes, PAGE):
        os.pwrite(file, bytes(PAGE), at)


# A pool of buffers to reuse: the first touch of a new page costs as much as copying into it.


Bytes = NDArray[np.uint8]


class Pool:
    """Buffers to take and give back; idle ones are kept as long as all buffers together stay within the limit.

    >>> pool = Pool()
    >>> pool.limit(100)
    >>> first = pool.take(60)
    >>> pool.give(first)
    >>> pool.take(50).base is first.base
    True
    """

    def __init__(self) -> None:
        self._room = 0
        self._used = 0
        self._idle: list[Bytes] = []

    def limit(self, nbytes: int) -> None:
        """Sets how many bytes the pool may keep, buffers in use included."""
        self._room = nbytes
        self._shrink(nbytes)

    def take(self, nbytes: int) -> Bytes:
        """An uninitialized buffer of `nbytes`, of an idle one that is not much larger if there is one."""
        most = min(2 * nbytes, max(nbytes, self._room - self._used))
        best = min((buffer for buffer in self._idle if nbytes <= buffer.size <= most), key=len, default=None)
        if best is None:
            self._shrink(self._room - self._used - nbytes)
            best = np.empty(nbytes, np.uint8)
        self._idle = [buffer for buffer in self._idle if buffer is not best]
        self._used += best.size
        return best[:nbytes]

    def give(self, buffer: NDArray[Any]) -> None:
        """Takes back a buffer from `take`, or any view of it."""
        whole: Any = buffer
        while whole.base is not None:
            whole = whole.base
        self._used -= whole.size
        self._idle.append(whole)

    def _shrink(self, nbytes: int) -> None:
        """Drops idle buffers until they have at most `nbytes` in total; the largest are kept first."""
        kept: list[Bytes] = []
        for buffer in sorted(self._idle, key=len, reverse=True):
            if buffer.size <= nbytes:
                kept.append(buffer)
                nbytes -= buffer.size
        self._idle = kept
