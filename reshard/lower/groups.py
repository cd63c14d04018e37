"""Replica groups and block numbers, from the device strides that a step moves."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.types.dims import numbers_along
from reshard.types.mesh import Mesh

Groups = tuple[tuple[int, ...], ...]
"""Device ids, group by group, each in the order that numbers its blocks."""

Factors = Sequence[tuple[int, int]]
"""(stride, size) factors of the device positions, major to minor."""


def coordinate(position: int, stride: int, size: int) -> int:
    """The coordinate of the device at a position along one factor of the positions.

    >>> [coordinate(position, 2, 4) for position in range(8)]
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    return position // stride % size


def groups_along(mesh: Mesh, factors: Factors) -> Groups:
    """The groups of devices that differ only along these factors, members counted major to minor.

    >>> groups_along(Mesh(x=4, y=2), [(2, 4)])
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    offsets = [0]
    for stride, size in factors:
        offsets = [at + stride * value for at in offsets for value in range(size)]
    # The positions with coordinate 0 along all factors, ascending: between two factors, every value occurs.
    firsts, span = [0], mesh.size
    for stride, size in sorted(factors, reverse=True):
        firsts = [first + at for first in firsts for at in range(0, span, stride * size)]
        span = stride
    ids, firsts = mesh.devices, [first + at for first in firsts for at in range(span)]
    return tuple(tuple([ids[first + offset] for offset in offsets]) for first in firsts)


def block_numbers(mesh: Mesh, factors: Factors) -> dict[int, int]:
    """The block of each device: its coordinates along these factors as one number, major to minor.

    >>> block_numbers(Mesh(x=2, y=3), [(1, 3), (3, 2)])
    {0: 0, 1: 2, 2: 4, 3: 1, 4: 3, 5: 5}
    """
    return dict(zip(mesh.devices, numbers_along(mesh.size, factors), strict=True))
