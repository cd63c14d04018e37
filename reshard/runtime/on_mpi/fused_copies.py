"""Copies between equally spaced memory fused into one strided copy: what a small move costs is its number of copies.

Rows to columns on 4 ranks is one copy on each: the parts of the ranks lie at one distance in the segment that they
share, and what each gives lies at one distance in the result.

    from rank 0    start 0       to 0     extents (8, 32)
    from rank 1    start 4096    to 2048  extents (8, 32)      ->    start 0 to 0, extents (4, 8, 32)
    ...
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import NamedTuple


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
