"""A message of an exchange: the elements that one device sends to another, and who asks for which of them.

    f32[{x}2, 6] -> f32[4, {x}3] on <x=2>, from device 1 to device 0

    dim 0    rows 0-1 of the sender's tile are rows 2-3 of the receiver's    Block(0, 6, (Axis(2, 6, 3),))
    dim 1    columns 0-2 of it are columns 0-2                               Block(0, 0, (Axis(3, 1, 1),))
    both     the product of the two                                          Block(0, 6, (Axis(2, 6, 3), Axis(3, 1, 1)))

What two tiles share is a product of factors, each of which is what their pieces of some dims share: one dim, or several
that a view ties together. A factor of ten blocks and another of ten are a hundred blocks, which are listed only where
they are read.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.blocks import Block, cut_range, multiply_blocks, scale_block
from reshard.geometry.overlap import piece, piece_extents, shares
from reshard.types.dims import numbers_along
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import SubAxis
from reshard.types.whole import check_deadline

Factor = tuple[Block, ...]
"""What two pieces of some dims share: blocks without common elements."""

Product = tuple[Factor, ...]
"""A block of each factor, in every combination."""

Shape = tuple[tuple[tuple[int, ...], int], ...]
"""The blocks that make up one message: their extents, and how many have these."""

Tile = tuple[int, ...]
"""A tile of the source: the number of its piece in each dim, then the coordinates along the partial sub-axes."""


class Message(NamedTuple):
    """What one device sends to another: products of factors; a sender that is the receiver copies."""

    sender: int
    receiver: int
    products: tuple[Product, ...]

    @property
    def elements(self) -> int:
        """True elements in the message, without padding."""
        return sum(map(count_elements, self.products))

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks that make up the message."""
        for product in self.products:
            yield from map(multiply_blocks, itertools.product(*product))

    @property
    def is_run(self) -> bool:
        """Whether the message can be sent and received where it lies."""
        single = len(self.products) == 1 and all(len(factor) == 1 for factor in self.products[0])
        return single and next(self.blocks).is_run

    @property
    def shape(self) -> Shape:
        """The blocks by their extents."""
        shapes: Counter[tuple[int, ...]] = Counter()
        for each in itertools.chain.from_iterable(itertools.product(*product) for product in self.products):
            shapes[tuple([axis.extent for block in each for axis in block.axes])] += 1
        return tuple(sorted(shapes.items()))


def count_elements(product: Product) -> int:
    """The elements of a product of factors.

    >>> from reshard.geometry.blocks import Axis
    >>> rows, columns = Block(0, 0, (Axis(3, 4, 1),)), [Block(0, 0, (Axis(2, 1, 1),)), Block(5, 2, (Axis(1, 1, 1),))]
    >>> count_elements(((rows,), tuple(columns)))
    9
    """
    return math.prod([sum([block.elements for block in factor]) for factor in product])


def cut_product(product: Product, low: int, high: int) -> tuple[Product, ...]:
    """The elements number `low` to `high` of a product of factors, in row-major order, as products.

    Elements 3 to 8 of 3 x 4 are the last of row 0 and the whole of row 1:

    >>> from reshard.geometry.blocks import Axis
    >>> product = (Block(0, 0, (Axis(3, 4, 4),)),), (Block(0, 0, (Axis(4, 1, 1),)),)
    >>> [[[(each.src, each.elements) for each in factor] for factor in part] for part in cut_product(product, 3, 8)]
    [[[(0, 1)], [(3, 1)]], [[(4, 1)], [(0, 4)]]]
    """
    return tuple(_cut_product(product, low, high))


def _cut_product(product: Product, low: int, high: int) -> Iterator[Product]:
    if low >= high:
        return
    if (low, high) == (0, count_elements(product)):
        yield product
        return
    first_factor, rest = product[0], product[1:]
    row = count_elements(rest)
    first, last = -(-low // row), high // row

    def in_row(number: int, low: int, high: int) -> Iterator[Product]:
        if low < high:
            index = _cut_factor(first_factor, number, number + 1)
            yield from ((index, *part) for part in _cut_product(rest, low, high))

    if first > last:  # Both ends cut the same row.
        yield from in_row(last, low - last * row, high - last * row)
        return
    yield from in_row(first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (_cut_factor(first_factor, first, last), *rest)
    yield from in_row(last, 0, high - last * row)


def _cut_factor(factor: Factor, low: int, high: int) -> Factor:
    """The elements number `low` to `high` of some blocks, counted in their order."""
    parts: list[Block] = []
    start = 0
    for block in factor:
        size = block.elements
        if low < start + size and start < high:
            parts += cut_range(block, max(low - start, 0), min(high - start, size))
        start += size
    return tuple(parts)


class SharedDims(NamedTuple):
    """Some dims of both layouts, by number, and what a target piece of these shares with each source piece of them."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    wanted: Callable[[tuple[int, ...]], Mapping[tuple[int, ...], Factor]]


def shared_dims(operand: Layout, result: Layout) -> list[SharedDims]:
    """What the tiles of two layouts of one array share, dim by dim."""
    shared: list[SharedDims] = []
    for at, (s, t) in enumerate(zip(operand.dims, result.dims, strict=True)):
        steps = math.prod(operand.tile_shape[at + 1 :]), math.prod(result.tile_shape[at + 1 :])
        shared.append(SharedDims((at,), (at,), _TableOfShares(flat_shares(s, t, *steps))))
    return shared


class _TableOfShares(NamedTuple):
    """What each piece of a target dim shares, looked up."""

    table: Sequence[Mapping[tuple[int, ...], Factor]]

    def __call__(self, pieces: tuple[int, ...]) -> Mapping[tuple[int, ...], Factor]:
        return self.table[pieces[0]]


@lru_cache(maxsize=256)
def flat_shares(source: Dim, target: Dim, src: int, dst: int) -> tuple[Mapping[tuple[int, ...], Factor], ...]:
    """`overlap.shares` in flat tiles, in which neighbours along the dim are `src` and `dst` apart."""
    return tuple({(p,): scale_blocks(blocks, src, dst) for p, blocks in by.items()} for by in shares(source, target))


def scale_blocks(blocks: Factor, src: int, dst: int) -> Factor:
    """`scale_block` of each.

    >>> from reshard.geometry.blocks import Axis
    >>> scale_blocks((Block(1, 0, (Axis(3, 1, 1),)),), 2, 1)
    (Block(src=2, dst=0, axes=(Axis(extent=3, src=2, dst=1),)),)
    """
    return blocks if src == dst == 1 else tuple([scale_block(block, src, dst) for block in blocks])


def tile_of(layout: Layout, device: int) -> Tile:
    """The tile that a device holds.

    >>> from reshard.types.mesh import Mesh
    >>> tile_of(Layout.parse("f32[{x}, {y}]", Mesh(x=4, y=2)), 5)
    (2, 1)
    """
    position = layout.mesh.position(device)
    pieces = (piece(dim, layout.mesh, position) for dim in layout.dims)
    return (*pieces, *layout.mesh.coordinates(position, layout.partial))


def tiles(layout: Layout) -> dict[int, Tile]:
    """The tile that each device holds, in the order of the mesh.

    >>> from reshard.types.mesh import Mesh
    >>> tiles(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    """
    rows = zip(*piece_columns(layout), *[_numbers_of_axes(layout, [axis]) for axis in layout.partial], strict=True)
    mesh = layout.mesh
    alone = not layout.dims and not layout.partial
    return dict(zip(mesh.devices, itertools.repeat((), mesh.size) if alone else rows, strict=True))


def piece_columns(layout: Layout) -> list[list[int]]:
    """For each dim, the number of the piece at each position of the mesh.

    >>> from reshard.types.mesh import Mesh
    >>> piece_columns(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    held = ([digit.axis for digit in dim.digits if digit.axis is not None] for dim in layout.dims)
    return [_numbers_of_axes(layout, axes) for axes in held]


def _numbers_of_axes(layout: Layout, axes: Sequence[SubAxis]) -> list[int]:
    mesh = layout.mesh
    return numbers_along(mesh.size, [(mesh.stride(axis), axis.size) for axis in axes])


def tile_sizes(layout: Layout) -> Callable[[Tile], int]:
    """A function that says how many elements a tile has, without padding.

    >>> from reshard.types.mesh import Mesh
    >>> size_of = tile_sizes(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    >>> size_of((0, 1)), size_of((1, 1))
    (6, 4)
    """
    extents = [piece_extents(dim) for dim in layout.dims]
    return lambda tile: math.prod([of[number] for of, number in zip(extents, tile, strict=False)])


def list_requests(
    operand: Layout, result: Layout, receivers: Sequence[int], shared: Sequence[SharedDims]
) -> dict[Tile, list[tuple[int, Product]]]:
    """For each source tile, the receivers that need part of it, with what they need.

    Of a partial array, a device needs the summand that it has, and no other.
    """
    listed: dict[Tile, list[tuple[int, Product]]] = {}
    whole = tiles(result) if len(receivers) == result.mesh.size else {d: tile_of(result, d) for d in receivers}
    homes = tiles(operand) if operand.partial else {}
    rank = len(operand.dims)
    dims = [dim for each in shared for dim in each.source]
    in_order = None if dims == list(range(rank)) else [dims.index(dim) for dim in range(rank)]
    # Many devices want the same tile: what it is made of is worked out once.
    made_of: dict[Tile, list[tuple[Tile, Product]]] = {}
    for device in receivers:
        tile = whole[device]
        if tile not in made_of:
            check_deadline()
            wanted = [each.wanted(tuple([tile[at] for at in each.target])).items() for each in shared]
            parts: list[tuple[Tile, Product]] = []
            made_of[tile] = parts
            for owners in itertools.product(*wanted):
                numbers = tuple([number for pieces, _ in owners for number in pieces])
                source = numbers if in_order is None else tuple([numbers[at] for at in in_order])
                parts.append((source, tuple([factor for _, factor in owners])))
        summand = homes.get(device, ())[rank:]
        for source, product in made_of[tile]:
            listed.setdefault(source + summand, []).append((device, product))
    return listed
