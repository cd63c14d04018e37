"""Large copies that go past the caches: what is written is not read first, and what is read is read in order.

    numpy    all rows of one copy, or a part of them, then those of the next: each reads every fourth run of the tile
    here     a row of each copy, then the next row of each: together they read the tile from its beginning to its end

Prefetchers follow memory that is read in order, not runs with gaps, and numpy walks along the target alone. Copies that
do not lie at multiples of 16 bytes, those that transpose, and those onto their own source remain numpy's.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from reshard.runtime.on_mpi.copies.strided_copy import LINE, Array, copy

LARGE = 4 << 20
"""Bytes of a rank's copies from which they go past the caches: of fewer, much may still be there."""

SHORT = 2 << 10
"""Bytes of a run below which its gaps are read, too, so that the tile is read in order."""

_UNEVEN = 512  # Bytes of a run at least if its target does not begin and end at cache lines.
_NEAR = 16 << 10  # Bytes of a run from which its gaps cost little.
_OF_ROW = 4  # They are if at least so large a part of each row, here a fourth, is copied.
_PART = 1 << 20  # Bytes of a step, about: messages are looked after between steps.
_LEAST = 128 << 10  # Bytes that a step has at least, on average: each takes a microsecond or two beside its copy.


class _RunAxis(NamedTuple):
    """Equal parts of a copy, and the bytes from one to the next in the source and in the target."""

    extent: int
    source: int
    target: int


class _CopyRuns(NamedTuple):
    """Runs of `run` bytes, and the axes along which they repeat, innermost last.

    `by_source` says which side has the shorter runs.
    """

    run: int
    axes: tuple[_RunAxis, ...]
    by_source: bool

    @property
    def row(self) -> int:
        """Bytes from one run to the next, on the side with the shorter runs."""
        return abs(self.axes[-1][1 if self.by_source else 2]) if self.axes else 0


class _Start(NamedTuple):
    """The addresses of the first runs of a copy."""

    source: int
    target: int


def stream_steps(views: Sequence[tuple[Array, Array]], least: int | None = None) -> list[Callable[[], object]] | None:
    """The copies of raw (target, source) views as functions; None if they are for numpy.

    `least` are the bytes of all copies together from which it is worth it, by default `LARGE`. The functions keep the
    arrays alive.

    >>> import numpy as np
    >>> one, other = np.arange(1 << 20), np.zeros(1 << 20, int)
    >>> for step in stream_steps([(other, one)]) or [partial(np.copyto, other, one)]:
    ...     step()
    >>> np.array_equal(one, other)
    True
    """
    nbytes = sum(target.nbytes for target, _ in views)
    streaming = kernel() if nbytes >= (LARGE if least is None else least) else None
    if streaming is None:
        return None
    alike = _alike(views)
    if alike is None:
        return None
    groups = [(runs, rows) for runs, starts in alike.items() for rows in _interleaved(runs, starts)]
    if nbytes < _LEAST * sum(math.prod(axis.extent for axis in runs.axes[:-2]) for runs, _ in groups):
        return None
    tables = (table for runs, rows in groups for table in _tables(runs, _with_gaps(runs, rows)))
    return [partial(_copy, streaming, table, views) for table in tables]


def _alike(views: Sequence[tuple[Array, Array]]) -> dict[_CopyRuns, list[_Start]] | None:
    """The copies by their runs; None if one of them is for numpy."""
    alike: dict[_CopyRuns, list[_Start]] = {}
    for target, source in views:
        runs = None if np.may_share_memory(target, source) else _runs(target, source)
        if runs is None:
            return None
        alike.setdefault(runs, []).append(_Start(source.ctypes.data, target.ctypes.data))
    return alike


def copy_all(views: Sequence[tuple[Array, Array]]) -> None:
    """Makes the copies of raw (target, source) views."""
    steps = stream_steps(views)
    if steps is None:
        for view in views:
            copy(*view)
        return
    for step in steps:
        step()


def _copy(kernel: Kernel, table: bytes, _: object) -> None:
    kernel(table)


def _runs(target: Array, source: Array) -> _CopyRuns | None:
    """A copy as runs that are contiguous on both sides; None if it is for numpy."""
    axes = [_RunAxis(*axis) for axis in zip(target.shape, source.strides, target.strides, strict=True) if axis[0] != 1]
    by_source = _contiguous(axes, 1, target.itemsize) <= _contiguous(axes, 2, target.itemsize)
    axes.sort(key=lambda axis: -abs(axis[1 if by_source else 2]))
    run = target.itemsize
    while axes and axes[-1].source == axes[-1].target == run:
        run *= axes.pop().extent
    places = [source.ctypes.data, target.ctypes.data, run, *(n for axis in axes for n in axis[1:])]
    lines = [target.ctypes.data, run, *(axis.target for axis in axes)]
    if any(n % WORD for n in places) or (run < _UNEVEN and any(n % LINE for n in lines)) or run == 0:
        return None
    return _CopyRuns(run, tuple(_joined(axes)), by_source)


def _contiguous(axes: Sequence[_RunAxis], side: int, itemsize: int) -> int:
    """Bytes of a run on one side."""
    for axis in sorted(axes, key=lambda axis: abs(axis[side])):
        if axis[side] != itemsize:
            break
        itemsize *= axis.extent
    return itemsize


def _joined(axes: Sequence[_RunAxis]) -> list[_RunAxis]:
    """The same axes, those as one that continue each other on both sides."""
    joined: list[_RunAxis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if last and (last.source, last.target) == (axis.extent * axis.source, axis.extent * axis.target):
            joined[-1] = _RunAxis(last.extent * axis.extent, *axis[1:])
        else:
            joined.append(axis)
    return joined


def _interleaved(runs: _CopyRuns, starts: Sequence[_Start]) -> Iterator[list[_Start]]:
    """The copies that go row by row together, because they fill each other's gaps."""
    row = runs.row if runs.run < _NEAR else 0
    together: list[_Start] = []
    for start in sorted(starts, key=lambda each: each if runs.by_source else each[::-1]):
        if together and _between(together[0], start, runs.by_source) >= row:
            yield together
            together = []
        together.append(start)
    if together:
        yield together


def _with_gaps(runs: _CopyRuns, starts: Sequence[_Start]) -> list[_Start]:
    """The same copies, and as gaps what they leave out of short rows of the source, if that is little."""
    row, run = runs.row, runs.run
    if not runs.by_source or run >= SHORT or _OF_ROW * run * len(starts) < row:
        return list(starts)
    ends = [*(start.source for start in starts[1:]), starts[0].source + row]
    gaps = (range(start.source + run, end, run) for start, end in zip(starts, ends, strict=True))
    return [each for start, gap in zip(starts, gaps, strict=True) for each in (start, *(_Start(at, 0) for at in gap))]


def _between(one: _Start, other: _Start, by_source: bool) -> int:
    return other.source - one.source if by_source else other.target - one.target


def _tables(runs: _CopyRuns, starts: Sequence[_Start]) -> Iterator[bytes]:
    """What the kernel takes, step by step: parts of the outer axis, or of the row of one of its indices."""
    if runs.run > _PART:
        yield from _tables_of_long(runs, starts)
        return
    *lead, outer, row = (_RunAxis(1, 0, 0), _RunAxis(1, 0, 0), *runs.axes)
    rows = max(1, min(row.extent, _PART // (runs.run * len(starts))))
    outers = max(1, _PART // (row.extent * runs.run * len(starts))) if rows == row.extent else 1
    for at in itertools.product(*(range(axis.extent) for axis in lead)):
        for up, down in itertools.product(range(0, outer.extent, outers), range(0, row.extent, rows)):
            source, target = (
                up * outer[side] + down * row[side] + sum(n * axis[side] for n, axis in zip(at, lead, strict=True))
                for side in (1, 2)
            )
            sizes = min(outers, outer.extent - up), min(rows, row.extent - down), len(starts), runs.run
            places = (n for start in starts for n in (start.source + source, start.target and start.target + target))
            yield struct.pack(f"{8 + 2 * len(starts)}q", *sizes, *outer[1:], *row[1:], *places)


def _tables_of_long(runs: _CopyRuns, starts: Sequence[_Start]) -> Iterator[bytes]:
    """The same of runs that are longer than a step."""
    whole, rest = divmod(runs.run, _PART)
    yield from _tables(runs._replace(run=_PART, axes=(*runs.axes, _RunAxis(whole, _PART, _PART))), starts)
    if rest:
        after = [_Start(source + whole * _PART, target and target + whole * _PART) for source, target in starts]
        yield from _tables(runs._replace(run=rest), after)


# A strided copy in machine code, which does what numpy's cannot: its stores go past the caches.
#
# A processor reads a cache line before it writes to a part of it, a third of a copy's traffic, unless the store is
# non-temporal. Python has no such store, so these are the instructions for x86-64 on Linux; elsewhere there are none.


SWITCH = "RESHARD_MPI_STREAM"
"""Environment variable: 0 leaves all copies to numpy."""

WORD = 16
"""Bytes that one instruction moves: runs, and where they start, are multiples of it."""

Kernel = Callable[[bytes], object]
"""Copies what a table of 64-bit numbers says: `run` bytes for each of `pairs`, for each of `rows`, for each of `outer`.

    outer, rows, pairs, run
    the bytes from one of `outer` to the next, in the source and in the target; the same of `rows`
    where the first run starts, in the source and in the target, for each of `pairs`: where the target is 0, the run is
    a gap, of which the cache lines are fetched and nothing is copied

What it has written is visible to other processors before whatever is written afterwards (`sfence`).
"""

_CODE = """
    f30f1efa                endbr64
    53                      push     rbx
    55                      push     rbp
    4154                    push     r12
    4c8b07                  mov      r8, [rdi]
    4531d2                  xor      r10d, r10d
    4531db                  xor      r11d, r11d
    4c8b4f08        outer:  mov      r9, [rdi+8]
    4c89d0                  mov      rax, r10
    4c89da                  mov      rdx, r11
    488b6f10        row:    mov      rbp, [rdi+16]
    488d5f40                lea      rbx, [rdi+64]
    488b33          pair:   mov      rsi, [rbx]
    4c8b6308                mov      r12, [rbx+8]
    4801c6                  add      rsi, rax
    488b4f18                mov      rcx, [rdi+24]
    4d85e4                  test     r12, r12
    0f849a000000            jz       gap
    4901d4                  add      r12, rdx
    4883e940                sub      rcx, 64
    723c                    jb       tail
    f30f6f06        line:   movdqu   xmm0, [rsi]
    f30f6f4e10              movdqu   xmm1, [rsi+16]
    f30f6f5620              movdqu   xmm2, [rsi+32]
    f30f6f5e30              movdqu   xmm3, [rsi+48]
    66410fe70424            movntdq  [r12], xmm0
    66410fe74c2410          movntdq  [r12+16], xmm1
    66410fe7542420          movntdq  [r12+32], xmm2
    66410fe75c2430          movntdq  [r12+48], xmm3
    4883c640                add      rsi, 64
    4983c440                add      r12, 64
    4883e940                sub      rcx, 64
    73c4                    jae      line
    4883c140        tail:   add      rcx, 64
    7418                    jz       next
    f30f6f06        few:    movdqu   xmm0, [rsi]
    66410fe70424            movntdq  [r12], xmm0
    4883c610                add      rsi, 16
    4983c410                add      r12, 16
    4883e910                sub      rcx, 16
    75e8                    jnz      few
    4883c310        next:   add      rbx, 16
    48ffcd                  dec      rbp
    0f8579ffffff            jnz      pair
    48034730                add      rax, [rdi+48]
    48035738                add      rdx, [rdi+56]
    49ffc9                  dec      r9
    0f8560ffffff            jnz      row
    4c035720                add      r10, [rdi+32]
    4c035f28                add      r11, [rdi+40]
    49ffc8                  dec      r8
    0f8545ffffff            jnz      outer
    0faef8                  sfence
    415c                    pop      r12
    5d                      pop      rbp
    5b                      pop      rbx
    c3                      ret
    0f1806          gap:    prefetchnta [rsi]
    4883c640                add      rsi, 64
    4883e940                sub      rcx, 64
    77f3                    ja       gap
    ebba                    jmp      next
"""

_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC


@lru_cache(maxsize=1)
def kernel() -> Kernel | None:
    """The function; None on other systems and processors, if the kernel allows no new code, or if it is turned off."""
    here = sys.platform == "linux" and platform.machine() == "x86_64" and struct.calcsize("P") == struct.calcsize("q")
    if not here or os.environ.get(SWITCH) == "0":
        return None
    code = bytes.fromhex("".join(line.split()[0] for line in _CODE.strip().splitlines()))
    try:
        memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(code)
        page = np.frombuffer(memory, np.uint8)
        start: int = page.ctypes.data
        protect = ctypes.CDLL(None).mprotect
    except (OSError, AttributeError):
        return None
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(start, mmap.PAGESIZE, _EXECUTE) != 0:
        return None
    return partial(_call, ctypes.CFUNCTYPE(None, ctypes.c_char_p)(start), page)


def _call(function: Kernel, _: Array, table: bytes) -> None:
    """Calls the function, whose code is the array."""
    function(table)
