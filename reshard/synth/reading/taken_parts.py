"""The part of a stored tensor that moves take of it: a box, outside of which nothing is read.

    stored f32[4096, 1024], chunks of 1024 rows      take={0: slice(1500, 2500)}     box [1024:3072, 0:1024]
    the same in one raw piece                                                        box [1500:2500, 0:1024]

Planning is of the box, as if it were a tensor of its own: moves take the same elements of it, or all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.geometry.blocks import list_strides
from reshard.plans.stored import Box, ChunkGrid, Stored, StoredPiece
from reshard.synth.reading.as_read import list_units
from reshard.synth.reading.packs import is_raw
from reshard.types import dtypes
from reshard.types.move import Move
from reshard.types.view import View, Window


class TakenPart(NamedTuple):
    """A box of a stored tensor, that box as a tensor, and the moves from it."""

    box: Box
    stored: Stored
    moves: Mapping[str, Move]


def find_taken_part(stored: Stored, moves: Mapping[str, Move], read_size: int) -> TakenPart | None:
    """The box that all moves together take of a stored tensor, None where that is all of it.

    Of raw elements, a dim behind others is cut only if what is left out takes longer than a read for each row of them.

    >>> from reshard.types import Layout, Mesh
    >>> stored = Stored("w", "float32", (24, 8), (StoredPiece(((0, 24), (0, 8)), 0, 80, 768),))
    >>> move = Move(stored.as_stored, Layout.parse("f32[{x}4, 8]", Mesh(x=2)), take={0: slice(8, 16)})
    >>> part = find_taken_part(stored, {"q": move}, 1 << 20)
    >>> part.box, part.stored.shape, part.stored.pieces[0].offset, str(part.moves["q"].view)
    (((8, 16), (0, 8)), (8, 8), 336, 'd0 d1 -> d0 d1')
    """
    if not any(move.view.taken for move in moves.values()):
        return None
    raw = is_raw(stored)
    if not raw and stored.chunks is None:
        return None
    box = tuple(
        _find_taken_range(dim, size, unit, moves)
        for dim, (size, unit) in enumerate(zip(stored.shape, list_units(stored), strict=True))
    )
    whole = tuple((0, size) for size in stored.shape)
    if raw:
        # The dims that are cut are those whose neighbours lie furthest apart, as many as it pays to cut.
        far = stored.pieces[0].strides if len(stored.pieces) else None
        order = sorted(range(len(box)), key=lambda at: -far[at] if far else at)
        cut = [tuple(box[at] if at in order[:count] else whole[at] for at in order) for count in range(len(box) + 1)]
        least = min(
            cut, key=lambda each: _count_cost(each, [stored.shape[at] for at in order], stored.dtype, read_size)
        )
        box = tuple(least[order.index(at)] for at in range(len(box)))
    if box == whole or not all(start < stop for start, stop in box):
        return None
    part = _cut_raw(stored, box) if raw else _cut_chunks(stored, box)
    return TakenPart(box, part, {name: _move_from_box(move, box, part) for name, move in moves.items()})


def _find_taken_range(dim: int, size: int, unit: int, moves: Mapping[str, Move]) -> tuple[int, int]:
    """The range of a dim that moves take, in whole units of it; all of it where one takes other than a range."""
    low, high = size, 0
    below: set[int] = set()
    for move in moves.values():
        atoms = [move.view.atoms[at] for at in move.view.source[dim]]
        if not atoms or atoms[0].taken is None:
            return 0, size
        # What the major atom leaves out lies before or behind what it takes.
        step, start = size // max(1, atoms[0].source_size), atoms[0].taken.start
        below.add(step)
        low, high = min(low, start * step), max(high, (start + atoms[0].size) * step)
    low, high = low // unit * unit, min(size, -(-high // unit) * unit)
    # Each move's own steps, of which the box has whole ones.
    return (low, high) if not any(low % step or high % step for step in below) else (0, size)


def _count_cost(box: Box, shape: Sequence[int], dtype: str, read_size: int) -> int:
    """The bytes of a box, and those that take as long as the reads of its rows; its dims are in the file's order."""
    extents = [stop - start for start, stop in box]
    last = max((at for at, size in enumerate(shape) if extents[at] < size), default=0)
    return dtypes.nbytes(math.prod(extents), dtype) + math.prod(extents[:last]) * read_size


def _move_from_box(move: Move, box: Box, part: Stored) -> Move:
    """The move from the part of its source that is in the box."""
    atoms = list(move.view.atoms)
    for dim, (start, stop), size in zip(move.view.source, box, move.source.shape, strict=True):
        if stop - start == size:
            continue
        atom = atoms[dim[0]]
        step = size // atom.source_size
        taken = Window((0 if atom.taken is None else atom.taken.start) - start // step, (stop - start) // step)
        atoms[dim[0]] = atom._replace(taken=None if taken == (0, atom.size) else taken)
    view = View(tuple(atoms), move.view.source, move.view.target)
    return Move(part.as_stored, move.target, view, cast=move.cast)


def _cut_raw(stored: Stored, box: Box) -> Stored:
    """The part of raw pieces that is in a box, as pieces of a tensor of its shape."""
    size = dtypes.bits(stored.dtype) // 8
    pieces: list[StoredPiece] = []
    for piece in stored.pieces:
        inside = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, box, strict=True)]
        if not all(start < stop for start, stop in inside):
            continue
        extents = [stop - start for start, stop in piece.box]
        strides = piece.strides or list_strides(extents)
        first = sum((a - b) * step for (a, _), (b, _), step in zip(inside, piece.box, strides, strict=True))
        # What is planned is bytes that are read, and not those from the first to the last of them.
        nbytes = math.prod(stop - start for start, stop in inside) * size
        moved = tuple((start - low, stop - low) for (start, stop), (low, _) in zip(inside, box, strict=True))
        pieces.append(StoredPiece(moved, piece.file, piece.offset + first * size, nbytes, strides=tuple(strides)))
    return replace(stored, shape=tuple(stop - start for start, stop in box), pieces=tuple(pieces), chunks=None)


def _cut_chunks(stored: Stored, box: Box) -> Stored:
    """The chunks in a box of whole ones, as those of a tensor of its shape."""
    chunks, shape = stored.chunks or stored.shape, tuple(stop - start for start, stop in box)
    grid, every = ChunkGrid(shape, chunks, 0), ChunkGrid(stored.shape, chunks, 0)
    numbers: list[int] = []
    for piece in grid:
        number = 0
        for (at, _), (low, _), chunk, count in zip(piece.box, box, chunks, every.counts, strict=True):
            number = number * count + (at + low) // chunk
        numbers.append(number)
    pieces = stored.pieces
    if not isinstance(pieces, ChunkGrid):
        moved = tuple(pieces[number]._replace(box=each.box) for each, number in zip(grid, numbers, strict=True))
        return replace(stored, shape=shape, pieces=moved)
    sizes = None
    if pieces.sizes is not None:
        sizes = {at: pieces.sizes[number] for at, number in enumerate(numbers) if number in pieces.sizes}
    return replace(stored, shape=shape, pieces=ChunkGrid(shape, chunks, pieces.nbytes, sizes))
