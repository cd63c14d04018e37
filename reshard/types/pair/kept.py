"""What devices of two sets keep, and how much there is of every tile: lists over positions, one number a device.

    f32[{x}2] on <x=2>, devices 0 and 1   ->   f32[{d}1] on <d=4>, devices 0 to 3

    device                      0    1    2    3
    elements of target tile     1    1    1    1
    of these in source tile     1    0    -    -     device 1 holds 2-3 and needs 1

A list is made dim by dim for all devices at once, so that a million of them take seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import mul
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.pair.device_sets import disjoint
from reshard.types.pair.message import piece_columns
from reshard.types.pair.overlap import contiguous, piece_extents
from reshard.types.pair.shared import shared_elements


@lru_cache(maxsize=64)
def sizes(layout: Layout) -> Sequence[int]:
    """The elements of the tile at each position, without padding.

    >>> from reshard.types.mesh import Mesh
    >>> sizes(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    [6, 6, 4, 4]
    """
    extents = ((piece_extents(dim), column) for dim, column in zip(layout.dims, piece_columns(layout), strict=True))
    return _product(([of[number] for number in column] for of, column in extents), layout.mesh.size)


@lru_cache(maxsize=64)
def kept(source: Layout, target: Layout) -> Mapping[int, int]:
    """The elements of its target tile that each device holds already; only devices that hold some are listed.

    >>> from reshard.types.mesh import Mesh
    >>> dict(kept(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[{d}1]", Mesh(d=4))))
    {0: 1}
    """
    if disjoint(source.mesh, target.mesh):
        return {}
    devices = _in_both(source, target)
    columns = zip(source.dims, target.dims, _columns(source, devices), _columns(target, devices), strict=True)
    counts = _product((_shared(*each) for each in columns), len(devices))
    return {device: count for device, count in zip(devices, counts, strict=True) if count}


class Overlaps(NamedTuple):
    """How many target pieces each source piece of a dim overlaps, the other way round, and the largest share of two."""

    of_source: Sequence[int]
    of_target: Sequence[int]
    largest: int


@lru_cache(maxsize=64)
def overlaps(source: Dim, target: Dim) -> Overlaps:
    """Which pieces of a dim share elements, counted.

    >>> from reshard.types.mesh import Mesh
    >>> (one,), (other,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3/5]", "f32[{y}2/5]"))
    >>> overlaps(one, other)
    Overlaps(of_source=[2, 2], of_target=[1, 2, 1], largest=2)
    """
    a, b = contiguous(source), contiguous(target)
    if a is not None and b is not None and source.size:
        largest = _largest(a, b, source.size)
        return Overlaps(_overlapped(source, a, b), _overlapped(target, b, a), largest)
    shared = shared_elements(source, target)
    back = shared_elements(target, source)
    most = max((count for by in shared for count in by.values()), default=0)
    return Overlaps([len(by) for by in back], [len(by) for by in shared], most)


def _overlapped(dim: Dim, own: int, other: int) -> list[int]:
    """How many pieces of `other` indices each piece of a dim of `own` indices overlaps."""
    size = dim.size
    full = min(dim.padded // own, size // own)
    counts = [(start + own - 1) // other - start // other + 1 for start in range(0, full * own, own)]
    if full < dim.padded // own:
        rest = (size - 1) // other - full * own // other + 1 if size > full * own else 0
        counts += [rest, *[0] * (dim.padded // own - full - 1)]
    return counts


def _largest(a: int, b: int, size: int) -> int:
    """The most indices that a piece of `a` and one of `b` share."""
    most, at = 0, 0
    while at < size and most < min(a, b, size):
        end = min(at - at % a + a, at - at % b + b, size)
        most, at = max(most, end - at), end
    return most


def _in_both(source: Layout, target: Layout) -> Sequence[int]:
    """The devices of both layouts."""
    one, other = source.mesh, target.mesh
    if one.device_ids is None and other.device_ids is None:
        return range(min(one.size, other.size))
    here = frozenset(one.devices)
    return [device for device in other.devices if device in here]


def _columns(layout: Layout, devices: Sequence[int]) -> Iterator[Sequence[int]]:
    """For each dim, the piece of each of these devices."""
    if layout.mesh.device_ids is None and isinstance(devices, range):
        return (column[: len(devices)] for column in piece_columns(layout))
    places = [layout.mesh.position(device) for device in devices]
    return ([column[at] for at in places] for column in piece_columns(layout))


def _shared(source: Dim, target: Dim, held: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """The elements that each of these pieces of the source shares with the piece of the target beside it."""
    a, b, size = contiguous(source), contiguous(target), source.size
    pairs = zip(held, wanted, strict=True)
    if a is not None and b is not None:
        return [max(0, min(p * a + a, q * b + b, size) - max(p * a, q * b)) for p, q in pairs]
    shared = shared_elements(source, target)
    return [shared[q].get(p, 0) for p, q in pairs]


def _product(columns: Iterable[list[int]], length: int) -> list[int]:
    """The products of numbers that stand beside each other."""
    return reduce(lambda one, other: [*map(mul, one, other)], columns, [1] * length)
