"""Large copies that go past the caches: what is written is not read first, and what is read is read in order.

    numpy    all rows of one copy, or a part of them, then those of the next: each reads every fourth run of the tile
    here     a row of each copy, then the next row of each: together they read the tile from its beginning to its end

Prefetchers follow memory that is read in order, not runs with gaps, and numpy walks along the target alone. The loop
is a small extension in C (`_stream.c`), which is built where the package is installed if a compiler is there: Python
has no store that goes past the caches. Without it, numpy makes all copies. Copies that do not lie at multiples of 16
bytes, those that transpose, and those onto their own source are numpy's in any case.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from reshard.geometry.blocks import Axis, Block, fuse_axes
from reshard.runtime.on_mpi.copies.strided_copy import LINE, Array, copy_view

try:
    from . import _stream
except ImportError:  # There was no compiler where this was installed.
    _stream = None

SWITCH = "RESHARD_MPI_STREAM"
"""Environment variable: 0 leaves all copies to numpy."""

LARGE = 4 << 20
"""Bytes of a rank's copies from which they go past the caches: of fewer, much may still be there."""

SHORT = 2 << 10
"""Bytes of a run below which its gaps are read, too, so that the tile is read in order."""

_WORD = 16  # Bytes that one store moves: runs, and where they start, are multiples of it.
_UNEVEN = 512  # Bytes of a run at least if its target does not begin and end at cache lines.
_NEAR = 16 << 10  # Bytes of a run from which its gaps cost little.
_OF_ROW = 4  # They are read if at least so large a part of each row, here a fourth, is copied.
_PART = 1 << 20  # Bytes of a step, about: messages are looked after between steps.
_LEAST = 128 << 10  # Bytes that a step has at least, on average: each takes a microsecond or two beside its copy.

CopyRuns = Callable[[bytes, int, int], object]


def find_kernel() -> CopyRuns | None:
    """The function of the extension; None if it was not built, or if it is turned off."""
    return None if _stream is None or os.environ.get(SWITCH) == "0" else _stream.copy_runs


def describe_copies() -> str:
    """How this process makes large copies between tiles: past the caches, or by numpy, and why.

    >>> describe_copies().split(":")[0] in ("past the caches", "in rows", "numpy")
    True
    """
    if find_kernel() is not None and _stream is not None:
        return "past the caches: by non-temporal stores" if _stream.NON_TEMPORAL else "in rows: by memcpy"
    if _stream is None:
        return "numpy: the C extension was not built when reshard was installed, which takes a C compiler"
    return f"numpy: {SWITCH} is 0"


class _Nest(NamedTuple):
    """Loops of `axes`, in bytes, around runs of `run` bytes; `by_source` says which side has the shorter runs."""

    run: int
    axes: tuple[Axis, ...]
    by_source: bool


class _Start(NamedTuple):
    """The addresses of the first runs of a copy; a target of 0 is a gap, which is read and not copied."""

    source: int
    target: int


def list_stream_steps(
    views: Sequence[tuple[Array, Array]], least: int | None = None
) -> list[Callable[[], object]] | None:
    """The copies of raw (target, source) views as functions; None if they are for numpy.

    `least` are the bytes of all copies together from which it is worth it, by default `LARGE`. The functions keep the
    arrays alive.

    >>> import numpy as np
    >>> one, other = np.arange(1 << 20), np.zeros(1 << 20, int)
    >>> for step in list_stream_steps([(other, one)]) or [partial(np.copyto, other, one)]:
    ...     step()
    >>> np.array_equal(one, other)
    True
    """
    nbytes = sum(target.nbytes for target, _ in views)
    kernel = find_kernel() if nbytes >= (LARGE if least is None else least) else None
    if kernel is None:
        return None
    alike: dict[_Nest, list[_Start]] = {}
    for target, source in views:
        nest = None if np.may_share_memory(target, source) else _find_nest(target, source)
        if nest is None:
            return None
        alike.setdefault(nest, []).append(_Start(source.ctypes.data, target.ctypes.data))
    groups = [(nest, rows) for nest, starts in alike.items() for rows in _group_rows(nest, starts)]
    if nbytes < _LEAST * len(groups):
        return None
    steps: list[Callable[[], object]] = []
    for nest, starts in groups:
        rows = _add_gaps(nest, starts)
        numbers = [nest.run, len(nest.axes), len(rows), *(n for axis in nest.axes for n in axis)]
        table = struct.pack(f"{len(numbers) + 2 * len(rows)}q", *numbers, *(n for start in rows for n in start))
        # A step is of whole runs if some fit into it, and else of whole cache lines of one run of each copy.
        unit = nest.run if nest.run * len(rows) <= _PART else LINE
        size, step = Block(0, 0, nest.axes).elements * nest.run, max(1, _PART // len(rows) // unit) * unit
        steps += [partial(_run_step, kernel, table, at, min(at + step, size), views) for at in range(0, size, step)]
    return steps


def copy_views(views: Sequence[tuple[Array, Array]]) -> None:
    """Makes the copies of raw (target, source) views."""
    steps = list_stream_steps(views)
    if steps is None:
        for view in views:
            copy_view(*view)
        return
    for step in steps:
        step()


def _run_step(kernel: CopyRuns, table: bytes, low: int, high: int, _: object) -> None:
    """Runs a part of a table; the last argument keeps its arrays alive."""
    kernel(table, low, high)


def _find_nest(target: Array, source: Array) -> _Nest | None:
    """A copy as runs that are contiguous on both sides; None if it is for numpy."""
    axes = [Axis(*axis) for axis in zip(target.shape, source.strides, target.strides, strict=True) if axis[0] != 1]
    by_source = _count_contiguous(axes, 1, target.itemsize) <= _count_contiguous(axes, 2, target.itemsize)
    # Rows follow the memory of the side whose runs are shorter, where it matters most to prefetchers.
    axes.sort(key=lambda axis: -abs(axis[1 if by_source else 2]))
    run = target.itemsize
    while axes and axes[-1].src == axes[-1].dst == run:
        run *= axes.pop().extent
    places = [source.ctypes.data, target.ctypes.data, run, *(n for axis in axes for n in axis[1:])]
    lines = [target.ctypes.data, run, *(axis.dst for axis in axes)]
    if any(n % _WORD for n in places) or (run < _UNEVEN and any(n % LINE for n in lines)) or run == 0:
        return None
    return _Nest(run, fuse_axes(Block(0, 0, tuple(axes))).axes, by_source)


def _count_contiguous(axes: Sequence[Axis], side: int, itemsize: int) -> int:
    """Bytes of a run on one side."""
    for axis in sorted(axes, key=lambda axis: abs(axis[side])):
        if axis[side] != itemsize:
            break
        itemsize *= axis.extent
    return itemsize


def _row_bytes(nest: _Nest) -> int:
    """Bytes from one run to the next, on the side with the shorter runs."""
    return abs(nest.axes[-1][1 if nest.by_source else 2]) if nest.axes else 0


def _group_rows(nest: _Nest, starts: Sequence[_Start]) -> Iterator[list[_Start]]:
    """The copies that go row by row together, because they fill each other's gaps."""
    side, row = 0 if nest.by_source else 1, _row_bytes(nest) if nest.run < _NEAR else 0
    together: list[_Start] = []
    for start in sorted(starts, key=lambda each: (each[side], each[1 - side])):
        if together and start[side] - together[0][side] >= row:
            yield together
            together = []
        together.append(start)
    if together:
        yield together


def _add_gaps(nest: _Nest, starts: Sequence[_Start]) -> list[_Start]:
    """The same copies, and as gaps what they leave out of short rows of the source, if that is little."""
    row, run = _row_bytes(nest), nest.run
    if not nest.by_source or run >= SHORT or _OF_ROW * run * len(starts) < row:
        return list(starts)
    ends = [*(start.source for start in starts[1:]), starts[0].source + row]
    gaps = (range(start.source + run, end, run) for start, end in zip(starts, ends, strict=True))
    return [each for start, gap in zip(starts, gaps, strict=True) for each in (start, *(_Start(at, 0) for at in gap))]
