"""Messages cut from blocks: what each message holds, and where its elements lie in a tile.

    Region         a strided part of a tile
    MessagePiece   one block of a message, and the regions of the tile that it covers
    Chunk          one message: a peer and its pieces

A piece covers one region, unless the tile has padding: padding is sent too, but lies in no region.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import EllipsisType
from typing import NamedTuple

from reshard.lower.exchange_rounds import Span
from reshard.lower.to_mpi import Axis, Block
from reshard.lower.to_mpi.blocks import cut_tile_block, fits_tile, spans_inside
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import Array, make_view
from reshard.types.whole import check_deadline


class Region(NamedTuple):
    """A strided part of a tile: its first local index, and (dim, step) axes with their extents.

    >>> import numpy as np
    >>> Region((1, 0), ((0, 2), (1, 1)), (2, 3)).of(np.arange(12).reshape(4, 3))
    array([[ 3,  4,  5],
           [ 9, 10, 11]])
    """

    start: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]
    extents: tuple[int, ...]

    def of(self, tile: Array) -> Array:
        """The region as a view of a tile."""
        return make_view(tile, self.start, self.steps, self.extents)

    def part(self, spans: Sequence[Span]) -> Region:
        """The part of the region with these (start, extent) spans of its axes."""
        start = list(self.start)
        for (dim, step), (low, _) in zip(self.steps, spans, strict=True):
            start[dim] += low * step
        return Region(tuple(start), self.steps, tuple(extent for _, extent in spans))


class MessagePiece(NamedTuple):
    """An array of these extents, starting at element `at` of a message; `parts` says which of it lies where in a tile.

    There is one part, the whole piece, unless some elements are padding (`padded`): then there are several, or none.
    """

    at: int
    extents: tuple[int, ...]
    parts: tuple[tuple[tuple[slice | EllipsisType, ...], Region], ...]
    padded: bool

    def of(self, buffer: Array) -> Array:
        """The piece as a view of the message's buffer."""
        return buffer[self.at : self.at + math.prod(self.extents)].reshape(self.extents)


class Chunk(NamedTuple):
    """One message: the rank at its other end, and its pieces in order."""

    peer: int
    elements: int
    pieces: tuple[MessagePiece, ...]

    @property
    def padded(self) -> bool:
        """Whether some elements are padding."""
        return any(piece.padded for piece in self.pieces)

    def direct(self, tile: Array) -> Array | None:
        """The message as contiguous memory of the tile, if it lies there in one run; then it needs no staging."""
        if len(self.pieces) != 1 or self.pieces[0].padded:
            return None
        elements = self.pieces[0].parts[0][1].of(tile)
        return elements.reshape(-1) if elements.flags.c_contiguous else None

    def packing(self, tile: Array, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """The copies, as (target, source), of the pieces out of the tile into the message's buffer; writes zeros for
        padding.
        """
        for piece in self.pieces:
            if piece.padded:
                piece.of(buffer)[...] = 0
        return ((whole, part) for part, whole in self.unpacking(tile, buffer))

    def unpacking(self, tile: Array, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """The copies, as (target, source), of the pieces out of the message's buffer into the tile, without padding."""
        for piece in self.pieces:
            whole = piece.of(buffer)
            for index, region in piece.parts:
                yield region.of(tile), whole[index]

    def pack(self, tile: Array, buffer: Array) -> None:
        """Copies the pieces out of the tile into the message's buffer."""
        copy_views(list(self.packing(tile, buffer)))

    def unpack(self, tile: Array, buffer: Array) -> None:
        """Copies the pieces out of the message's buffer into the tile."""
        copy_views(list(self.unpacking(tile, buffer)))


def pack_chunks(peer: int, blocks: Sequence[Block], cap: int, end: str, shape: Sequence[int]) -> Iterator[Chunk]:
    """Packs blocks into messages of at most `cap` elements; a block that is larger is cut.

    `end` says which end of the blocks is the tile of this shape: "src" or "dst".

    >>> from reshard.lower.to_mpi import Axis
    >>> [chunk.elements for chunk in pack_chunks(1, [Block((0,), (0,), (Axis(0, 7, 1, 1),))], 3, "src", (7,))]
    [3, 3, 1]
    """
    pieces: list[MessagePiece] = []
    total = 0
    for block in itertools.chain.from_iterable(cut_tile_block(whole, cap) for whole in blocks):
        check_deadline()
        elements = _form_of_axes(block.axes).elements
        if pieces and total + elements > cap:
            yield Chunk(peer, total, tuple(pieces))
            pieces, total = [], 0
        pieces.append(_piece_of_block(block, total, end, shape))
        total += elements
    if pieces:
        yield Chunk(peer, total, tuple(pieces))


def _piece_of_block(block: Block, at: int, end: str, shape: Sequence[int]) -> MessagePiece:
    form = _form_of_axes(block.axes)
    if form.elements and fits_tile(block, end, shape):
        return MessagePiece(at, form.extents, ((form.whole, region_of_block(block, end)),), False)
    parts = tuple(
        ((*(slice(low, low + extent) for low, extent in spans), ...), region_of_block(block.part(spans), end))
        for spans in spans_inside(block, end, shape)
    )
    elements = sum(math.prod(part.extents) for _, part in parts)
    return MessagePiece(at, block.extents, parts, elements != block.elements)


def pairs_of_block(block: Block, before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[Region, Region]]:
    """The copies that a block makes between tiles of these shapes, without padding: (region before, region after)."""
    check_deadline()
    if _form_of_axes(block.axes).elements and fits_tile(block, "src", before) and fits_tile(block, "dst", after):
        yield region_of_block(block, "src"), region_of_block(block, "dst")
        return
    for spans in spans_inside(block, "src", before):
        held = block.part(spans)
        for wanted in spans_inside(held, "dst", after):
            part = held.part(wanted)
            yield region_of_block(part, "src"), region_of_block(part, "dst")


class _Form(NamedTuple):
    """What blocks of the same axes have in common, and share in memory: a rank has thousands of them."""

    elements: int
    extents: tuple[int, ...]
    src: tuple[tuple[int, int], ...]
    dst: tuple[tuple[int, int], ...]
    whole: tuple[slice | EllipsisType, ...]


@lru_cache(maxsize=1024)
def _form_of_axes(axes: tuple[Axis, ...]) -> _Form:
    extents = tuple(axis.extent for axis in axes)
    src, dst = tuple((axis.dim, axis.src) for axis in axes), tuple((axis.dim, axis.dst) for axis in axes)
    return _Form(math.prod(extents), extents, src, dst, (*(slice(0, extent) for extent in extents), ...))


def region_of_block(block: Block, end: str) -> Region:
    """The region at one end of a block, "src" or "dst"."""
    form = _form_of_axes(block.axes)
    return Region(block.src, form.src, form.extents) if end == "src" else Region(block.dst, form.dst, form.extents)
