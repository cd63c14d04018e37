"""Messages cut from blocks: what each one holds, and where that lies in a tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple

from reshard.lower.exchange import Span
from reshard.lower.to_mpi import Block
from reshard.lower.to_mpi.blocks import cut, inside
from reshard.runtime.on_mpi.strided_copy import Array, copy, view


class Place(NamedTuple):
    """A strided part of a tile: its first local index, and (dim, step) axes with their extents."""

    start: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    extents: tuple[int, ...]

    def of(self, tile: Array) -> Array:
        """The part as a view of the tile."""
        return view(tile, self.start, self.steps, self.extents)

    def part(self, spans: Sequence[Span]) -> Place:
        """The place of these (start, extent) spans of the axes."""
        start = list(self.start)
        for (dim, step), (low, _) in zip(self.steps, spans, strict=True):
            start[dim] += low * step
        return Place(tuple(start), self.steps, tuple(extent for _, extent in spans))


class Piece(NamedTuple):
    """Elements `at`, ... of a message, an array of these extents, and which part of it is where in a tile.

    Several parts, or none, where some of the elements are padding, which is sent along but lies in no tile.
    """

    at: int
    extents: tuple[int, ...]
    parts: tuple[tuple[tuple[slice | EllipsisType, ...], Place], ...]
    padded: bool

    def of(self, buffer: Array) -> Array:
        """The piece as a view of the message."""
        return buffer[self.at : self.at + math.prod(self.extents)].reshape(self.extents)


class Chunk(NamedTuple):
    """One message: the rank at its other end, and its pieces, one after another."""

    peer: int
    elements: int
    pieces: tuple[Piece, ...]

    @property
    def padded(self) -> bool:
        """Whether some of it lies in no tile."""
        return any(piece.padded for piece in self.pieces)

    def direct(self, tile: Array) -> Array | None:
        """The memory of the tile that the message is, if it lies there whole and in one run."""
        if len(self.pieces) != 1 or self.pieces[0].padded:
            return None
        found = self.pieces[0].parts[0][1].of(tile)
        return found.reshape(-1) if found.flags.c_contiguous else None

    def pack(self, tile: Array, buffer: Array) -> None:
        """Copies the pieces out of the tile, with zeros for padding."""
        for piece in self.pieces:
            whole = piece.of(buffer)
            if piece.padded:
                whole[...] = 0
            for where, place in piece.parts:
                copy(whole[where], place.of(tile))

    def unpack(self, tile: Array, buffer: Array) -> None:
        """Copies the pieces into the tile, all but padding."""
        for piece in self.pieces:
            whole = piece.of(buffer)
            for where, place in piece.parts:
                copy(place.of(tile), whole[where])


def chunks(peer: int, blocks: Sequence[Block], cap: int, end: str, shape: Sequence[int]) -> Iterator[Chunk]:
    """Blocks as messages of at most `cap` elements, as many blocks or as much of one in each as fit.

    `end` says which end of the blocks is the tile of this shape: "src" or "dst".
    """
    pieces: list[Piece] = []
    total = 0
    for block in itertools.chain.from_iterable(cut(whole, cap) for whole in blocks):
        if pieces and total + block.elements > cap:
            yield Chunk(peer, total, tuple(pieces))
            pieces, total = [], 0
        pieces.append(_piece(block, total, end, shape))
        total += block.elements
    if pieces:
        yield Chunk(peer, total, tuple(pieces))


def _piece(block: Block, at: int, end: str, shape: Sequence[int]) -> Piece:
    parts = tuple(
        ((*(slice(low, low + extent) for low, extent in spans), ...), place(block.part(spans), end))
        for spans in inside(block, end, shape)
    )
    elements = sum(math.prod(where.extents) for _, where in parts)
    return Piece(at, block.extents, parts, elements != block.elements)


def copies(block: Block, before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[Place, Place]]:
    """The block's copies from tile to tile, all but padding."""
    for spans in inside(block, "src", before):
        held = block.part(spans)
        for wanted in inside(held, "dst", after):
            part = held.part(wanted)
            yield place(part, "src"), place(part, "dst")


def place(block: Block, end: str) -> Place:
    """One end of a block, "src" or "dst"."""
    source = end == "src"
    steps = tuple((axis.dim, axis.src if source else axis.dst) for axis in block.axes)
    return Place(block.src if source else block.dst, steps, block.extents)
