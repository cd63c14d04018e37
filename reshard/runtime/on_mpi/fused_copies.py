"""Copies between equally spaced memory fused into one strided copy: what a small move costs is its number of copies.

Rows to columns on 4 ranks is one copy on each: the parts of the ranks lie at one distance in the segment that they
share, and what each gives lies at one distance in the result.

    from rank 0    start 0       to 0     extents (8, 32)
    from rank 1    start 4096    to 2048  extents (8, 32)      ->    start 0 to 0, extents (4, 8, 32)
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from reshard.runtime.on_mpi.direct import Direct
from reshard.runtime.on_mpi.wire.chunks import Region
from reshard.types import Layout

_LONG = 512  # Bytes from which a run does not gain from being one element, see `strided_copy`.


class ByteCopy(NamedTuple):
    """A strided copy: bytes from the start of either memory, and the extents and byte strides of its axes."""

    source: int
    target: int
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


def fused(copies: Iterable[ByteCopy]) -> list[ByteCopy]:
    """The same copies as few ones, of more axes.

    >>> one = ByteCopy(0, 0, (8,), (8,), (16,))
    >>> fused([one, one._replace(source=512, target=8)])
    [ByteCopy(source=0, target=0, extents=(2, 8), source_strides=(512, 8), target_strides=(8, 16))]
    """
    before = sorted(copies, key=lambda each: (each[2:], each[1], each[0]))
    after = [joined for _, alike in groupby(before, lambda each: each[2:]) for joined in _runs(list(alike))]
    return after if len(after) == len(before) else fused(after)


def tile_copies(
    move: Direct, source: Layout, target: Layout, rank: int, itemsize: int, starts: Sequence[int]
) -> list[ByteCopy]:
    """What a rank copies in a move inside one node to its tile, out of memory in which the tiles of all ranks lie, its
    own too, at `starts`.
    """
    before, after = (_strides(end.tile_shape, itemsize) for end in (source, target))
    pairs = [(rank, pair) for pair in move.own]
    pairs += [(other, pair) for other, those in move.pulls for pair in those]
    return fused(
        ByteCopy(
            starts[other] + _at(region, before),
            _at(into, after),
            into.extents,
            tuple(before[dim] * step for dim, step in region.steps),
            tuple(after[dim] * step for dim, step in into.steps),
        )
        for other, (region, into) in pairs
    )


def wide(copy: ByteCopy, itemsize: int) -> tuple[ByteCopy, int]:
    """The same copy of fewer elements, those that are together on both sides as one, and the bytes of each.

    >>> wide(ByteCopy(0, 0, (3, 8), (64, 8), (128, 8)), 8)
    (ByteCopy(source=0, target=0, extents=(3,), source_strides=(64,), target_strides=(128,)), 64)
    """
    start, into, extents, before, after = copy
    while extents and before[-1] == after[-1] == itemsize and extents[-1] * itemsize < _LONG:
        itemsize *= extents[-1]
        extents, before, after = extents[:-1], before[:-1], after[:-1]
    return ByteCopy(start, into, extents, before, after), itemsize


def strides_like(copy: ByteCopy, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """The byte strides at which what a copy reads lies like a C-ordered result of this shape, which it fills; None if
    no strides say that.

    >>> strides_like(ByteCopy(0, 0, (2, 3), (96, 8), (8, 16)), (3, 2), 8)
    (8, 96)
    >>> strides_like(ByteCopy(0, 0, (2, 3), (8, 16), (24, 8)), (6,), 8) is None
    True
    """
    axes = sorted(zip(copy.target_strides, copy.extents, copy.source_strides, strict=True))
    axes = [axis for axis in axes if axis[1] != 1]
    strides: list[int] = []
    for extent, step in reversed(list(zip(shape, _strides(shape, itemsize), strict=True))):
        length = 1
        stride = axes[0][2] if axes else itemsize
        while length < extent:
            if not axes or axes[0][0] != step * length or axes[0][2] != stride * length:
                return None
            length *= axes.pop(0)[1]
        if length != extent:
            return None
        strides.append(stride)
    return None if axes else tuple(reversed(strides))


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The byte strides of a C-ordered tile."""
    strides: list[int] = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def _at(region: Region, strides: tuple[int, ...]) -> int:
    """The byte of a C-ordered tile at which a region starts."""
    return sum(at * stride for at, stride in zip(region.start, strides, strict=True))


def _runs(alike: list[ByteCopy]) -> list[ByteCopy]:
    """Copies that differ in their starts alone, those at one distance from each other as one."""
    runs: list[list[ByteCopy]] = [[alike[0]]]
    for one, other in pairwise(alike):
        run = runs[-1]
        if len(run) == 1 or _distance(run[0], run[1]) == _distance(one, other):
            run.append(other)
        else:
            runs.append([other])
    return [_joined(run) for run in runs]


def _distance(one: ByteCopy, other: ByteCopy) -> tuple[int, int]:
    return other.source - one.source, other.target - one.target


def _joined(run: list[ByteCopy]) -> ByteCopy:
    first = run[0]
    if len(run) == 1:
        return first
    source, target = _distance(*run[:2])
    return ByteCopy(
        first.source,
        first.target,
        (len(run), *first.extents),
        (source, *first.source_strides),
        (target, *first.target_strides),
    )
