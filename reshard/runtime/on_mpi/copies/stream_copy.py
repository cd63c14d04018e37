"""Large copies that go past the caches: what is written is not read first, and tiles are walked in order.

    numpy    all rows of one copy, or a part of them, then those of the next: each reads every fourth run of the tile
    here     a row of the tile, run by run, whichever copy it belongs to, then the next row

    tile     a a a a b b b c c c c a a a a b b b c c c c     copies a, b and c: boxes of rows and columns
    lines    |         |         |         |         |       most runs end within one: what follows completes it

Prefetchers follow memory that is read in order, not runs with gaps, and numpy walks along the target alone. The loop
is a small extension in C (`_stream.c`), which is built where the package is installed if a compiler is there: Python
has no store that goes past the caches. It merges the runs of all copies by their places in one tile, the one that all
of them read or write, so unrelated blocks, of any bytes at any place, take no longer than equal ones. Without it, numpy
makes all copies, as it does those of very short runs, such as transpositions, and those onto their own source.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.blocks import Axis, Block, fuse_axes, split_run
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view

try:
    from ._stream import copy_boxes, is_non_temporal
except ImportError:  # There was no compiler where this was installed.
    copy_boxes, is_non_temporal = None, False

SWITCH = "RESHARD_MPI_STREAM"
"""Environment variable: 0 leaves all copies to numpy."""

LARGE = 4 << 20
"""Bytes of a rank's copies from which they go past the caches: of fewer, much may still be there."""

SHORT = 2 << 10
"""Bytes of a run below which its gaps are read, too, so that the tile is read in order."""

_SHORTEST = 128  # Bytes of a run, on average, from which the extension is faster than numpy.
_ROW = 16 << 10  # Bytes of a row at least: looking for the boxes of the next one takes a twentieth of its copy.
_PART = 1 << 20  # Bytes of a step, about: messages are looked after between steps.
_LEAST = 16 << 10  # Bytes that a box has at least, on average: each takes ten microseconds beside its copy.

_HEAD, _BOX = 5, 9  # The numbers of a table's head, and of a box: see `_stream.c`.

CopyBoxes = Callable[[NDArray[np.int64], int], object]


def find_kernel() -> CopyBoxes | None:
    """The function of the extension; None if it was not built, or if it is turned off."""
    return None if os.environ.get(SWITCH) == "0" else copy_boxes


def describe_copies() -> str:
    """How this process makes large copies between tiles: past the caches, or by numpy, and why.

    >>> describe_copies().split(":")[0] in ("past the caches", "in rows", "numpy")
    True
    """
    if find_kernel() is not None:
        return "past the caches: by non-temporal stores" if is_non_temporal else "in rows: by memcpy"
    if copy_boxes is None:
        return "numpy: the C extension was not built when reshard was installed, which takes a C compiler"
    return f"numpy: {SWITCH} is 0"


class _Box(NamedTuple):
    """Loops of `axes`, in bytes, around runs of `run` bytes, from the address `source` to `target`."""

    source: int
    target: int
    run: int
    axes: Sequence[Axis]


class CopyTable:
    """Some copies as the extension takes them: boxes, and how they fall into rows of the tile along which they walk.

    Copies are raw (target, source) views; `groups` has as many of them for each pair of tiles, and `bases` where these
    tiles lie. Made once, it serves tiles at any other addresses, too. Without groups, places are addresses.
    """

    def __init__(
        self,
        views: Sequence[tuple[Array, Array]],
        by_source: bool | None = None,
        groups: Sequence[int] = (),
        bases: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.nbytes = sum(target.nbytes for target, _ in views)
        group = np.repeat(np.arange(len(groups)), groups) if groups else np.zeros(len(views), np.int64)
        starts = np.array(bases or [(0, 0)], np.int64)[group].tolist()
        boxes: list[_Box] = []
        used: list[int] = []
        for at, ((target, source), (from_source, from_target)) in enumerate(zip(views, starts, strict=True)):
            if target.size:
                boxes.append(_find_box(target, source, from_source, from_target))
                used.append(at)
        self._group = group[used]
        if by_source is None:
            # Along the side whose runs are shorter, where it matters most to prefetchers.
            runs = [sum(_count_runs(box, side) for box in boxes) for side in (1, 2)]
            by_source = runs[0] >= runs[1]
        self._side, side = (0, 1) if by_source else (1, 2)
        strides = sorted({abs(axis[side]) for box in boxes for axis in box.axes})
        row = next((stride for stride in strides if stride >= _ROW), strides[-1] if strides else 0)
        numbers: list[int] = []
        loops: list[int] = []
        runs = 0
        for box in boxes:
            axes = fuse_axes(Block(0, 0, tuple(sorted(box.axes, key=lambda axis: -abs(axis[side]))))).axes
            outer = [axis.extent for axis in axes if abs(axis[side]) >= row]
            first = len(loops) // 4
            ends = first, first + len(outer), first + len(axes)
            place = box.source if by_source else box.target
            numbers += [box.source, box.target, box.run, 0, *ends, math.prod(outer), place // max(1, row)]
            loops += [number for axis in axes for number in (*axis, 0)]
            runs += math.prod(axis.extent for axis in axes)
        self._worth = self.nbytes >= max(_LEAST * len(boxes), _SHORTEST * runs)
        head = [len(boxes), len(loops) // 4, by_source, row, 0]
        self._numbers = np.array([*head, *numbers, *loops, *[0] * len(boxes)], np.int64)

    def list_steps(
        self, bases: Sequence[tuple[int, int]], alive: object, whole: bool = False
    ) -> list[Callable[[], object]] | None:
        """The copies as functions, between pairs of tiles at these (source, target) addresses, which are kept `alive`;
        as a single one if `whole`. None if numpy is faster.
        """
        kernel = find_kernel()
        if kernel is None or not self._worth:
            return None
        table = self._numbers.copy()
        boxes = table[_HEAD : _HEAD + _BOX * len(self._group)].reshape(-1, _BOX)
        boxes[:, :2] += np.array(bases, np.int64)[self._group]
        table[_HEAD - 1] = bases[0][self._side]
        # Each copies the next part.
        part = max(1, self.nbytes) if whole else _PART
        return [lambda _=alive: kernel(table, part)] * -(-self.nbytes // part)


def list_stream_steps(
    views: Sequence[tuple[Array, Array]], least: int | None = None
) -> list[Callable[[], object]] | None:
    """The copies of raw (target, source) views as functions; None if they are for numpy.

    `least` are the bytes of all copies together from which it is worth it, by default `LARGE`. The functions keep the
    arrays alive.

    >>> import numpy as np
    >>> one, other = np.arange(1 << 20), np.zeros(1 << 20, int)
    >>> for step in list_stream_steps([(other, one)]) or [lambda: np.copyto(other, one)]:
    ...     step()
    >>> np.array_equal(one, other)
    True
    """
    if find_kernel() is None or sum(target.nbytes for target, _ in views) < (LARGE if least is None else least):
        return None
    if any(np.may_share_memory(*pair) for pair in views):
        return None
    return CopyTable(views).list_steps([(0, 0)], views, whole=True)


def copy_views(views: Sequence[tuple[Array, Array]]) -> None:
    """Makes the copies of raw (target, source) views."""
    steps = list_stream_steps(views)
    if steps is None:
        for view in views:
            copy_view(*view)
        return
    for step in steps:
        step()


def _find_box(target: Array, source: Array, from_source: int, from_target: int) -> _Box:
    """A copy as runs that are contiguous on both sides, with its places from these addresses on."""
    axes = [Axis(*axis) for axis in zip(target.shape, source.strides, target.strides, strict=True) if axis[0] != 1]
    outer, run = split_run(sorted(axes, key=lambda axis: -abs(axis.dst)), target.itemsize)
    return _Box(source.ctypes.data - from_source, target.ctypes.data - from_target, run, outer)


def _count_runs(box: _Box, side: int) -> int:
    """The runs of a copy on one side, where they may be longer than on both together."""
    run, count = box.run, math.prod(axis.extent for axis in box.axes)
    for axis in sorted(box.axes, key=lambda axis: abs(axis[side])):
        if axis[side] != run:
            break
        run, count = run * axis.extent, count // axis.extent
    return count
