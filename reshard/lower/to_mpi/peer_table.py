"""Peers of a rank, and what it has in common with the tile of each, as columns of numbers.

    f32[{x}1, 4] -> f32[4, {x}1] on x=4, rank 1 fetches

    peer     0  1  2  3
    src      1  1  1  1     where its blocks begin in the peer's tile
    dst      0  1  2  3     and in this rank's
    shape    0  0  0  0     its blocks from there on: one block of one element

A rank of a job of thousands has as many peers, most of which lie alike in its tile. So what two pieces of a dim share
is walked once for all that lie alike (`geometry.overlap.Alike`), the dims are multiplied column by column, and the
blocks of a peer are made when they are asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.blocks import Axis, Block, Factor, list_strides, scale_blocks
from reshard.geometry.holders import TileHolders
from reshard.geometry.overlap import list_alike
from reshard.lower.to_mpi.tile_blocks import Blocks, End, multiply_factors, pack_block
from reshard.types.layout import Layout
from reshard.types.whole import check_deadline

Column = NDArray[np.int64]


def _shift_blocks(blocks: Sequence[Block], src: int, dst: int) -> Blocks:
    return tuple([Block(at + src, to + dst, axes) for at, to, axes in blocks])


def pack_shape(shape: Blocks, end: End) -> Blocks:
    """The blocks of a shape, whose tile is at that end, as those between the tile and a message."""
    at = itertools.accumulate([block.elements for block in shape], initial=0)
    return tuple([pack_block(block, end, n) for block, n in zip(shape, at, strict=False)])


@dataclass(frozen=True, eq=False)
class PeerTable(Mapping[int, Blocks]):
    """By peer, blocks between its tile and this rank's: a row a peer, with blocks of a shape that rows share."""

    peers: Column
    src: Column
    dst: Column
    kinds: Column
    shapes: Sequence[Blocks]

    @classmethod
    def of_blocks(cls, blocks: Iterable[tuple[int, Sequence[Block]]]) -> PeerTable:
        """The table of peers and their blocks; peers without blocks are left out.

        >>> table = PeerTable.of_blocks([(3, [Block(5, 7, ())]), (4, [Block(0, 0, ())]), (6, [])])
        >>> table.peers.tolist(), table.src.tolist(), table.kinds.tolist(), table.shapes
        ([3, 4], [5, 0], [0, 0], ((Block(src=0, dst=0, axes=()),),))
        """
        kinds: dict[Blocks, int] = {}
        rows = [(peer, each[0], each) for peer, each in blocks if each]
        numbers = [kinds.setdefault(_shift_blocks(each, -at.src, -at.dst), len(kinds)) for _, at, each in rows]
        listed = [[peer, at.src, at.dst, kind] for (peer, at, _), kind in zip(rows, numbers, strict=True)]
        columns: Column = np.array(listed, np.int64).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3], tuple(kinds))

    def __getitem__(self, peer: int) -> Blocks:
        """The blocks of a peer."""
        rows = np.flatnonzero(self.peers == peer)
        if not rows.size:
            raise KeyError(peer)
        return self.blocks_of_row(int(rows[0]))

    def __iter__(self) -> Iterator[int]:
        """The peers, in the order of the rows."""
        return iter(self.peers.tolist())

    def __len__(self) -> int:
        """How many peers there are."""
        return len(self.peers)

    def blocks_of_row(self, row: int) -> Blocks:
        """The blocks of the peer in a row."""
        return _shift_blocks(self.shapes[int(self.kinds[row])], int(self.src[row]), int(self.dst[row]))

    @cached_property
    def elements(self) -> Column:
        """The elements of every row."""
        return np.array([sum([block.elements for block in shape]) for shape in self.shapes], np.int64)[self.kinds]

    def select_rows(self, rows: NDArray[np.bool_] | Column | slice) -> PeerTable:
        """The rows of these numbers, or those that a mask has."""
        return PeerTable(self.peers[rows], self.src[rows], self.dst[rows], self.kinds[rows], self.shapes)

    def begin_after(self, rank: int) -> PeerTable:
        """The rows from this rank's on: each rank goes on with the next one, so that not all read from rank 0 first."""
        return self.select_rows(np.lexsort((self.peers, self.peers < rank)))

    def rename_peers(self, names: Sequence[int] | Mapping[int, int]) -> PeerTable:
        """The table with other numbers for its peers."""
        peers = np.array([names[peer] for peer in self.peers.tolist()], np.int64)
        return PeerTable(peers, self.src, self.dst, self.kinds, self.shapes)

    def place_packed(self, end: End, members: Column, starts: Column, *, joins: bool) -> Iterator[tuple[int, Block]]:
        """The copies between the tile at that end and the memory of some members, where what belongs to each peer is
        packed from a start on: each with the member whose memory it is.

        If it `joins`, rows at equal distances in both are one copy: a tile for which that is done has to be C-ordered.

        >>> slab = PeerTable.of_blocks([(peer, [Block(4 * peer, 9, (Axis(2, 1, 1),))]) for peer in range(3)])
        >>> list(slab.place_packed("src", np.array([5, 5, 5]), np.array([0, 2, 4]), joins=True))
        [(5, Block(src=0, dst=0, axes=(Axis(extent=3, src=4, dst=2), Axis(extent=2, src=1, dst=1))))]
        """
        order = np.lexsort((starts, members))
        tile, memory, of = (self.src if end == "src" else self.dst)[order], starts[order], members[order]
        kinds = self.kinds[order]
        steps = np.stack([np.diff(tile), np.diff(memory)])
        alike = (np.diff(kinds) == 0) & (np.diff(of) == 0) & (steps > 0).all(axis=0) & joins
        turns = ~alike | np.append(True, (np.diff(steps, axis=1) != 0).any(axis=0))[: len(alike)]
        firsts = [0] if len(order) else []
        for at in np.flatnonzero(turns).tolist():
            # A row goes on from the one before it: at the distance of these two, from the third one on.
            if not alike[at] or at != firsts[-1]:
                firsts.append(at + 1)
        packed = [pack_shape(shape, end) for shape in self.shapes]
        for first, after in itertools.pairwise([*firsts, len(order)]):
            rows = (Axis(after - first, *steps[:, first].tolist()),) if after - first > 1 else ()
            for at, to, axes in packed[int(kinds[first])]:
                yield int(of[first]), Block(int(tile[first]) + at, int(memory[first]) + to, (*rows, *axes))


class SharedTiles(NamedTuple):
    """The tiles of one layout that a tile of another one shares elements with: for each dim the numbers of their
    pieces, and the columns of a `PeerTable`.
    """

    numbers: tuple[Column, ...]
    src: Column
    dst: Column
    kinds: Column
    shapes: Sequence[Blocks]

    def tabulate(self, peers: Column, rows: Column | slice = slice(None)) -> PeerTable:
        """The table of peers that have the tiles in these rows."""
        return PeerTable(peers, self.src[rows], self.dst[rows], self.kinds[rows], self.shapes)


@lru_cache(maxsize=8)
def share_tiles(source: Layout, target: Layout, tile: Sequence[int], *, given: bool) -> SharedTiles:
    """The source tiles that a target tile shares elements with; or, `given`, the target tiles of a source tile.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> shared = share_tiles(rows, columns, (0, 1), given=False)
    >>> [column.tolist() for column in shared.numbers], shared.src.tolist(), shared.dst.tolist()
    ([[0, 1], [0, 0]], [2, 2], [0, 4])
    """
    dims: list[
        Column
    ] = []  # Of each dim: the numbers of the pieces, where their parts begin, and of which kind they are.
    factors: list[list[Factor]] = []
    strides = list_strides(source.tile_shape), list_strides(target.tile_shape)
    # A tile has the coordinates of its summand behind its pieces.
    for before, after, number, *steps in zip(source.dims, target.dims, tile, *strides, strict=False):
        kinds: dict[Factor, int] = {}
        parts: list[Column] = [np.empty((4, 0), np.int64)]
        for alike in list_alike(before, after, number, given=given):
            first = alike.blocks[0]
            kind = kinds.setdefault(_shift_blocks(alike.blocks, -first.src, -first.dst), len(kinds))
            part = np.array([[alike.number], [first.src * steps[0]], [first.dst * steps[1]], [kind]], np.int64)
            for count, apart, src, dst in alike.repeats:
                step = np.array([[apart], [src * steps[0]], [dst * steps[1]], [0]], np.int64)
                part = (part[:, :, None] + step[:, :, None] * np.arange(count)).reshape(4, -1)
            parts.append(part)
        dims.append(np.concatenate(parts, axis=1))
        factors.append([scale_blocks(blocks, *steps) for blocks in kinds])
    sizes = [dim.shape[1] for dim in dims]
    index = np.indices(sizes).reshape(len(sizes), math.prod(sizes))
    columns = [dim[:, at] for dim, at in zip(dims, index, strict=True)]
    none = np.zeros(math.prod(sizes), np.int64)
    shape_of = none
    for dim, column in zip(factors, columns, strict=True):
        shape_of = shape_of * len(dim) + column[3]
    found, shape_of = np.unique(shape_of, return_inverse=True)
    src, dst = (sum([column[at] for column in columns], none) for at in (1, 2))
    shapes: list[Blocks] = []
    for code in found.tolist():
        check_deadline()
        kind, product = int(code), list[Factor]()
        for of in reversed(factors):
            kind, at = divmod(kind, len(of))
            product.insert(0, of[at])
        shapes.append(tuple(multiply_factors(product)))
    return SharedTiles(tuple([column[0] for column in columns]), src, dst, shape_of, shapes)


def list_positions(of: TileHolders, numbers: Sequence[Column], summand: Sequence[int] = ()) -> Column:
    """The positions that hold the tiles of these numbers, a row each; -1 where a tile has fewer holders than another.

    >>> from reshard.types.mesh import Mesh
    >>> list_positions(TileHolders(Layout.parse("f32[{x}3/10]", Mesh(x=4, y=2))), [np.array([2, 0])]).tolist()
    [[4, 5], [0, 1]]
    """
    if of.offsets is None:
        tiles = zip(*[column.tolist() for column in numbers], strict=True) if numbers else [()]
        rows = [of.of((*tile, *summand)) for tile in tiles]
        columns = [*itertools.zip_longest(*rows, fillvalue=-1)]
        return np.array(columns, np.int64).reshape(len(columns), len(rows)).T
    first = np.zeros(1, np.int64)
    for at, column in zip(of.offsets, (*numbers, *(np.array(number) for number in summand)), strict=True):
        first = first + (at.step * column if isinstance(at, range) else np.asarray(at, np.int64)[column])
    return first[:, None] + np.asarray(of.free, np.int64)
