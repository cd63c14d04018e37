"""Large copies that go past the caches: what is written is not read first, and what is read is read in order.

    numpy    all rows of one copy, or a part of them, then those of the next: each reads every fourth run of the tile
    here     a row of each copy, then the next row of each: together they read the tile from its beginning to its end

Prefetchers follow memory that is read in order, not runs with gaps, and numpy walks along the target alone. Copies that
do not lie at multiples of 16 bytes, those that transpose, and those onto their own source remain numpy's.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from reshard.runtime.on_mpi.stream_kernel import WORD, Kernel, kernel
from reshard.runtime.on_mpi.strided_copy import LINE, Array, copy

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
