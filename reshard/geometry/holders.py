"""Which positions of a mesh hold a tile, from its digits: no list of all tiles is made.

    mesh <x=4, y=2>, f32[{x}3/10]     piece 2 of the dim is x=2: position 4, plus 0 or 1 along y, which holds nothing

Every held digit adds its value times its stride to the position; the sub-axes that hold nothing take every value. So
the holders of a tile are found in the time that it takes to write them down, on a million devices, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from reshard.geometry.overlap import piece
from reshard.types.dims import Dim, numbers_along
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, is_chain


class TileHolders:
    """The positions that hold each tile of a layout.

    With `any_summand`, positions along partial sub-axes count as copies: what they hold is the same piece.

    >>> layout = Layout.parse("f32[{x}3/10]", Mesh(x=4, y=2))
    >>> TileHolders(layout).of((2,)), TileHolders(layout).copies
    ((4, 5), 2)
    """

    def __init__(self, layout: Layout, *, any_summand: bool = False) -> None:
        mesh = layout.mesh
        keys = [_held_factors(mesh, dim) for dim in layout.dims]
        if not any_summand:
            keys += [[(mesh.stride(axis), axis.size)] for axis in layout.partial]
        held = sorted((stride, stride * size) for key in keys for stride, size in key if size > 1)
        ends = [1, *(end for span in held for end in span), mesh.size]
        self._listed = None if is_chain(ends) else _list_tiles(mesh, keys)
        self._offsets = [_position_offsets(key) for key in keys]
        self._free = _free_positions(held, mesh.size) if self._listed is None else ()
        self.copies = len(self._free) if self._listed is None else max(map(len, self._listed.values()))
        """The most positions that hold the same tile."""

    def of(self, tile: Sequence[int]) -> tuple[int, ...]:
        """The positions that hold the tile of these numbers, ascending: those of its pieces, then its summand's."""
        if self._listed is not None:
            return self._listed[tuple(tile)]
        first = 0
        for offsets, number in zip(self._offsets, tile, strict=True):
            first += offsets[number]
        return (first,) if len(self._free) == 1 else tuple([first + at for at in self._free])


@lru_cache(maxsize=64)
def holders(layout: Layout, *, any_summand: bool = False) -> TileHolders:
    """`TileHolders`, cached."""
    return TileHolders(layout, any_summand=any_summand)


def home_tile(layout: Layout, position: int) -> tuple[int, ...]:
    """The tile that a position holds: the number of its piece in each dim, then its coordinates along partial sub-axes.

    >>> home_tile(Layout.parse("f32[{x}3/10] + sum{y}", Mesh(x=4, y=2)), 5)
    (2, 1)
    """
    pieces = (piece(dim, layout.mesh, position) for dim in layout.dims)
    return (*pieces, *layout.mesh.coordinates(position, layout.partial))


def _held_factors(mesh: Mesh, dim: Dim) -> list[tuple[int, int]]:
    """The (stride, size) of the held digits of a dim, major first."""
    return [(mesh.stride(axis), radix) for radix, axis in dim.digits if axis is not None]


def _position_offsets(factors: Iterable[tuple[int, int]]) -> list[int]:
    """What each number along some factors adds to the position."""
    offsets = [0]
    for stride, size in factors:
        offsets = [at + stride * value for at in offsets for value in range(size)]
    return offsets


def _free_positions(held: Sequence[tuple[int, int]], size: int) -> tuple[int, ...]:
    """The positions at coordinate 0 along all held spans, ascending: those between two spans take every value."""
    offsets, above = [0], size
    for low, high in reversed(held):
        offsets = [at + more for at in offsets for more in range(0, above, high)]
        above = low
    return tuple([at + more for at in offsets for more in range(above)])


def _list_tiles(mesh: Mesh, keys: Sequence[Sequence[tuple[int, int]]]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The same from all positions one by one, for sub-axes whose strides do not divide each other."""
    columns = [numbers_along(mesh.size, key) if key else [0] * mesh.size for key in keys]
    tiles: dict[tuple[int, ...], list[int]] = {}
    for position, tile in enumerate(zip(*columns, strict=True)):
        tiles.setdefault(tile, []).append(position)
    return {tile: tuple(positions) for tile, positions in tiles.items()}
