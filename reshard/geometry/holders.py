"""Tiles, and who holds them: the tile of a device, the devices of a tile, what devices keep and what they lack.

    mesh <x=4, y=2>, f32[{x}3/10]     piece 2 of the dim is x=2: position 4, plus 0 or 1 along y, which holds nothing

Every held digit adds its value times its stride to the position; the sub-axes that hold nothing take every value. So
the holders of a tile are found in the time that it takes to write them down, on a million devices, too.

What all devices have is a list with one number a position, made dim by dim: a million of them take seconds.

    f32[{x}2] on <x=2>, devices 0 and 1   ->   f32[{d}1] on <d=4>, devices 0 to 3

    device                      0    1    2    3
    elements of target tile     1    1    1    1
    of these in source tile     1    0    -    -     device 1 holds 2-3 and needs 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from reshard.errors import MeshError
from reshard.geometry.overlap import contiguous_extent, fullest_piece, piece_extents, shared_elements
from reshard.geometry.remesh import disjoint
from reshard.geometry.view_layouts import count_shared, pick_numbers
from reshard.types.dims import number_piece, numbers_along
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, is_chain
from reshard.types.view import View
from reshard.types.whole import MOST_DEVICES

Tile = tuple[int, ...]
"""A tile: the number of its piece in each dim, then the coordinates along the partial sub-axes."""


def tile_of(layout: Layout, device: int) -> Tile:
    """The tile that a device holds.

    >>> from reshard.types.mesh import Mesh
    >>> tile_of(Layout.parse("f32[{x}3/10] + sum{y}", Mesh(x=4, y=2)), 5)
    (2, 1)
    """
    return home_tile(layout, layout.mesh.position(device))


def home_tile(layout: Layout, position: int) -> Tile:
    """The tile that the device at a position holds."""
    pieces = [number_piece(dim, layout.mesh, position) for dim in layout.dims]
    return (*pieces, *layout.mesh.coordinates(position, layout.partial))


def tiles(layout: Layout) -> dict[int, Tile]:
    """The tile that each device holds, in the order of the mesh."""
    return dict(_list_tiles(layout.mesh, tile_factors(layout)))


def _list_tiles(mesh: Mesh, factors: TileFactors) -> Iterator[tuple[int, Tile]]:
    columns = _number_pieces(mesh, factors)
    return zip(mesh.devices, zip(*columns, strict=True) if columns else itertools.repeat((), mesh.size), strict=True)


def piece_columns(layout: Layout) -> Sequence[Sequence[int]]:
    """For each dim, the number of the piece at each position of the mesh; `MeshError` for a mesh too large to list."""
    return _number_pieces(layout.mesh, tile_factors(layout)[: len(layout.dims)])


@lru_cache(maxsize=16)
def _number_pieces(mesh: Mesh, factors: TileFactors) -> Sequence[Sequence[int]]:
    if mesh.size > MOST_DEVICES:
        raise MeshError(f"mesh {mesh} has {mesh.size} devices, too many to list; at most {MOST_DEVICES} are")
    return [numbers_along(mesh.size, each) for each in factors]


TileFactors = tuple[tuple[tuple[int, int], ...], ...]
"""The (stride, size) of held digits, major first, for each dim, and then for each partial sub-axis: which device has
which tile, whatever the sizes of the tiles."""


def tile_factors(layout: Layout) -> TileFactors:
    """What decides which device has which tile: layouts of many shapes have the same."""
    stride = layout.mesh.stride
    dims = [tuple([(stride(axis), radix) for radix, axis in dim.digits if axis is not None]) for dim in layout.dims]
    return (*dims, *(((stride(axis), axis.size),) for axis in layout.partial))


class TileHolders:
    """The positions that hold each tile of a layout; `copies` is the most that hold the same one.

    With `any_summand`, positions along partial sub-axes count as copies: what they hold is the same piece. A position
    is the sum of the `offsets` of a tile's numbers and one of `free`; `offsets` are None where no such sums exist.

    >>> from reshard.types.mesh import Mesh
    >>> layout = Layout.parse("f32[{x}3/10]", Mesh(x=4, y=2))
    >>> TileHolders(layout).of((2,)), TileHolders(layout).copies
    ((4, 5), 2)
    """

    def __init__(self, layout: Layout, *, any_summand: bool = False) -> None:
        mesh, keys = layout.mesh, tile_factors(layout)
        if any_summand:
            keys = keys[: len(layout.dims)]
        held = sorted((stride, stride * size) for key in keys for stride, size in key if size > 1)
        self._listed: dict[Tile, tuple[int, ...]] = {}
        self.offsets: list[Sequence[int]] | None = None
        self.free: tuple[int, ...] = ()
        if not is_chain([1, *(end for span in held for end in span), mesh.size]):
            # The strides do not divide each other, so that no position is a sum: all of them are listed.
            columns = [numbers_along(mesh.size, key) for key in keys]
            listed: dict[Tile, list[int]] = {}
            for position, tile in enumerate(zip(*columns, strict=True)):
                listed.setdefault(tile, []).append(position)
            self._listed = {tile: tuple(positions) for tile, positions in listed.items()}
            self.copies = max(map(len, listed.values()))
            return
        self.offsets = []
        for key in keys:
            # Where one axis holds a dim nothing is listed: a rank of thousands asks for the few tiles that it meets.
            (first, count), *rest = key or ((1, 1),)
            offsets: Sequence[int] = range(0, first * count, first)
            for stride, size in rest:
                offsets = [at + stride * value for at in offsets for value in range(size)]
            self.offsets.append(offsets)
        # The positions at coordinate 0 along all held spans: those between two spans take every value.
        free, above = [0], mesh.size
        for low, high in reversed(held):
            free = [at + more for at in free for more in range(0, above, high)]
            above = low
        self.free = tuple([at + more for at in free for more in range(above)])
        self.copies = len(self.free)

    def of(self, tile: Sequence[int]) -> tuple[int, ...]:
        """The positions that hold the tile of these numbers, ascending: those of its pieces, then its summand's."""
        if self.offsets is None:
            return self._listed[tuple(tile)]
        first = 0
        for offsets, number in zip(self.offsets, tile, strict=True):
            first += offsets[number]
        return (first,) if len(self.free) == 1 else tuple([first + at for at in self.free])


@lru_cache(maxsize=64)
def holders(layout: Layout, *, any_summand: bool = False) -> TileHolders:
    """`TileHolders`, cached."""
    return TileHolders(layout, any_summand=any_summand)


def holders_of(layout: Layout) -> Mapping[Tile, list[int]]:
    """The devices that hold each tile, tiles in the order of their first holder."""
    return list_holders(layout.mesh, tile_factors(layout))


@lru_cache(maxsize=64)
def list_holders(mesh: Mesh, factors: TileFactors) -> Mapping[Tile, list[int]]:
    """`holders_of`, for what decides it: a thousand arrays of their own shapes are listed once."""
    listed: dict[Tile, list[int]] = {}
    for device, tile in _list_tiles(mesh, factors):
        listed.setdefault(tile, []).append(device)
    return listed


def count_copies(layout: Layout) -> int:
    """How many devices have the same tile."""
    return layout.mesh.size // math.prod(axis.size for axis in layout.held)


def fullest_tile(layout: Layout) -> int:
    """The elements of the fullest tile."""
    return math.prod(fullest_piece(dim) for dim in layout.dims)


def multiply_by_piece(layout: Layout, by_piece: Sequence[Sequence[int]]) -> list[int]:
    """For each position, the product over dims of what its piece has.

    >>> from reshard.types.mesh import Mesh
    >>> multiply_by_piece(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)), [[3, 2], [1, 10]])
    [3, 30, 2, 20]
    """
    # Most dims have pieces that are alike, so that most lists are short work.
    alike = [len(set(each)) == 1 for each in by_piece]
    counts = [math.prod(each[0] for each, same in zip(by_piece, alike, strict=True) if same)] * layout.mesh.size
    for each, column, same in zip(by_piece, piece_columns(layout), alike, strict=True):
        counts = counts if same else [*map(mul, counts, [each[number] for number in column])]
    return counts


@lru_cache(maxsize=64)
def tile_elements(layout: Layout) -> Sequence[int]:
    """The elements of the tile at each position, without padding."""
    return multiply_by_piece(layout, [piece_extents(dim) for dim in layout.dims])


# What devices keep and lack of their tiles in a move, and what holders must give at least.


@lru_cache(maxsize=64)
def count_kept(source: Layout, target: Layout, view: View | None = None) -> Mapping[int, int]:
    """The elements of its target tile that each device holds already; only devices that hold some are listed.

    >>> from reshard.types.mesh import Mesh
    >>> dict(count_kept(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[{d}1]", Mesh(d=4))))
    {0: 1}
    """
    if disjoint(source.mesh, target.mesh):
        return {}
    if view is not None:
        held, groups = tiles(source), count_shared(source, target, view)
        here = ((device, held[device], tile) for device, tile in tiles(target).items() if device in held)
        both = ((device, math.prod([each.count(s, t) for each in groups])) for device, s, t in here)
        return {device: count for device, count in both if count}
    one, other = source.mesh, target.mesh
    columns = [[*piece_columns(each)] for each in (source, target)]
    if one.device_ids is None and other.device_ids is None:
        devices: Sequence[int] = range(min(one.size, other.size))
        columns = [[column[: len(devices)] for column in side] for side in columns]
    else:
        # The smaller mesh says which devices may be in both: of thousands, often a few dozen.
        few, many = (one, other) if one.size <= other.size else (other, one)
        devices = [device for device in few.devices if device in many.positions]
        for side, mesh in enumerate((one, other)):
            places = [mesh.positions[device] for device in devices]
            columns[side] = [[column[at] for at in places] for column in columns[side]]
    counts = [1] * len(devices)
    for s, t, held, wanted in zip(source.dims, target.dims, columns[0], columns[1], strict=True):
        a, b, size, pairs = contiguous_extent(s), contiguous_extent(t), s.size, zip(held, wanted, strict=True)
        if a is not None and b is not None:
            both = [max(0, min(p * a + a, q * b + b, size) - max(p * a, q * b)) for p, q in pairs]
        else:
            shared = shared_elements(s, t)
            both = [shared[q].get(p, 0) for p, q in pairs]
        counts = [*map(mul, counts, both)]
    return {device: count for device, count in zip(devices, counts, strict=True) if count}


class ByDevice(NamedTuple):
    """A figure of each device of a mesh: `each`, but for those that are `listed`, which may be none, a few or all."""

    each: int
    listed: Mapping[int, int] | None = None

    @property
    def most(self) -> int:
        """The figure of the device that has the most; where all are listed, `each` is 0."""
        return max([self.each, *(self.listed or {}).values()])

    def on(self, devices: Sequence[int]) -> Mapping[int, int]:
        """The figure of each of these devices."""
        return {**dict.fromkeys(devices, self.each), **(self.listed or {})}

    def scaled(self, nbytes: Layout) -> ByDevice:
        """Elements as bytes of a layout's dtype."""
        if self.listed is None:
            return ByDevice(nbytes.nbytes(self.each))
        known = {count: nbytes.nbytes(count) for count in {self.each, *self.listed.values()}}
        return ByDevice(known[self.each], {device: known[count] for device, count in self.listed.items()})


@lru_cache(maxsize=1024)
def count_lacked(source: Layout, target: Layout, view: View | None = None) -> ByDevice:
    """The elements of its target tile that each device does not hold already; of a part, those that fill it."""
    own, devices = count_kept(source, target, view), target.mesh.devices
    # A thousand arrays on thousands of devices have few tiles that are not full, and few that are there in part.
    full, listed = fullest_tile(target), dict[int, int]()
    if view is not None:
        full, groups = 0, count_shared(source, target, view)
        sizes = [math.prod([each.total(tile)[0] for each in groups]) for tile in tiles(target).values()]
        listed = dict(zip(devices, sizes, strict=True))
    elif not target.even:
        listed = {device: size for device, size in zip(devices, tile_elements(target), strict=True) if size != full}
    for device, kept in own.items():
        listed[device] = listed.get(device, full) - kept
    return ByDevice(0 if len(listed) == len(devices) else full, listed or None)


@lru_cache(maxsize=1024)
def least_received_across(source: Layout, target: Layout, view: View | None = None) -> int:
    """The elements that the busiest device of the target lacks."""
    if view is None and disjoint(source.mesh, target.mesh):
        return fullest_tile(target)
    return count_lacked(source, target, view).most


def count_taken(source: Layout, target: Layout, view: View | None) -> Sequence[int]:
    """The elements of the tile at each position that the target takes: all of them but through a view."""
    if view is None:
        return tile_elements(source)
    groups = count_shared(source, target, view)
    pieces = ([each.sizes(pick_numbers(tile, each.source)) for each in groups] for tile in tiles(source).values())
    return [math.prod([sum([size for _, size in sizes]) for sizes in of]) for of in pieces]


@lru_cache(maxsize=1024)
def fewest_through(source: Layout, target: Layout, view: View | None = None) -> int:
    """Elements that the busiest device sends or receives in every move: what a tile's holders must send at least once.

    An element of a tile must leave its holders if some device lacks it. The holders share this at best evenly.

    >>> from reshard.types.mesh import Mesh
    >>> fewest_through(Layout.parse("f32[{x}12]", Mesh(x=1)), Layout.parse("f32[{d}4]", Mesh(d=3)))
    8
    """
    received = least_received_across(source, target, view)
    if view is None and disjoint(source.mesh, target.mesh):
        return max(received, -(-fullest_tile(source) // count_copies(source)))
    leaving = list_leaving(source, target, view)
    return max([received, *(-(-elements // len(devices)) for devices, elements in leaving)])


def list_leaving(source: Layout, target: Layout, view: View | None = None) -> Iterator[tuple[Sequence[int], int]]:
    """For each tile of the source, its holders, and the elements of it that some device of the target lacks."""
    own = count_kept(source, target, view)
    stays = own
    if count_copies(target) > 1:
        # What several devices need stays only where all of them hold the same source tile.
        alike = (devices for devices in holders_of(target).values() if all(device in own for device in devices))
        same = (devices for devices in alike if len({tile_of(source, device) for device in devices}) == 1)
        stays = {devices[0]: own[devices[0]] for devices in same}
    sizes = count_taken(source, target, view)
    if count_copies(source) == 1:
        for device, size in zip(source.mesh.devices, sizes, strict=True):
            yield (device,), size - stays.get(device, 0)
        return
    for devices in holders_of(source).values():
        size = sizes[source.mesh.position(devices[0])]
        yield devices, size - sum(stays.get(device, 0) for device in devices)


@lru_cache(maxsize=256)
def pull_limit(operand: Layout, result: Layout, view: View | None = None) -> int:
    """Elements that the busiest device sends or receives at least if each asks holders for all that it lacks."""
    copies, givers, received = count_copies(result), count_copies(operand), least_received_across(operand, result, view)
    if view is None and disjoint(operand.mesh, result.mesh):
        return max(received, -(-copies * fullest_tile(operand) // givers))
    own, sizes, place = count_kept(operand, result, view), count_taken(operand, result, view), operand.mesh.position
    wanted = (
        copies * sizes[place(devices[0])] - sum(own.get(device, 0) for device in devices)
        for devices in holders_of(operand).values()
    )
    return max(received, *(-(-count // givers) for count in wanted))
