"""Slabs: a large tensor read in parts, each of which is moved before the next but one is read.

A slab is a part of every reader's own run, so that its elements are wanted where those of the whole are (the table of
`plans.load_plan`). A move from it is the move from the tensor, with a view of finer atoms: of the source's first dim,
`p` is the reader, `k` the slab, and `j` what the slab has of a run.

    tensor    bf16[{x}{y}12, 64] -> bf16[{x}24, {y}32]     view  "(p k j) m -> (p k j) m", p=4, k=3, j=4
    slab 1    bf16[{x}{y}1, 4, 64] -> the same             view  "p j m -> (p k j) m", into={k: 1}
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.plans.stored import Box
from reshard.types.dims import Digit, Dim, fit_digits
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import Atom, View, Window

MOST_SLABS = 4096
"""The most slabs of a tensor: each is a move of its own."""


class Slab(NamedTuple):
    """A part of a stored tensor as it is read: the box and the split of its `Reading`, its layout, and the moves."""

    box: Box
    split: int
    layout: Layout
    moves: tuple[Move, ...]


def cut_slabs(layout: Layout, unit: int, moves: Sequence[Move], least: int, apart: bool = True) -> list[Slab] | None:
    """At least so many slabs of a tensor that is read in this layout, cut between multiples of `unit` rows.

    None where its rows cannot be cut so, or where a view does not let them. Unless readers' runs are to lie `apart`, as
    they cannot in a box of a tensor, each slab is rows that follow each other.
    """
    if not layout.shape or not layout.shape[0]:
        return None
    first, *rest = layout.dims
    readers = [digit for digit in first.digits if digit.axis is not None]
    parts, run = math.prod(digit.radix for digit in readers), first.tile
    even = first.padded == first.size and (not first.digits or first.digits[0].axis is not None or not readers)
    if not readers or not even or not apart or first.pieces is not None:
        # No reader has rows of its own, or these end unevenly: slabs are rows in a row, which all readers share.
        rows = max(unit, layout.shape[0] // least // unit * unit)
        starts = range(0, layout.shape[0], rows)
        spans = [(start, min(start + rows, layout.shape[0])) for start in starts]
        parts = 1
    else:
        # Equal slabs, as no more of them than it takes: their number divides the units of a run.
        count = next((n for n in range(least, run // unit + 1) if run % n == 0 and run // n % unit == 0), 0)
        spans = [(at * run // count, (at + 1) * run // count) for at in range(count)]
    if not 1 < len(spans) <= MOST_SLABS:
        return None
    # Each slab has a layout of its own, and a move of each of the tensor's, which fills a part of that one's target.
    slabs: list[Slab] = []
    for low, high in spans:
        box: Box = ((low, high), *((0, size) for size in layout.shape[1:]))
        size = high - low
        # Without runs of their own, readers share each slab anew.
        if parts == 1:
            piece = min(-(-size // (unit * max(1, math.prod(d.radix for d in readers)))) * unit, size)
            head = [fit_digits([*readers, Digit(piece, None)], size)]
        else:
            box = ((0, parts), *box)
            head = [Dim((*readers, Digit(1, None)), parts), Dim((Digit(size, None),), size)]
        of_slab = Layout(layout.mesh, (*head, *rest), layout.dtype)
        cut = [_move_slab(move, of_slab, parts, run if parts > 1 else layout.shape[0], low, high) for move in moves]
        if any(move is None for move in cut):
            return None
        slabs.append(Slab(box, parts, of_slab, tuple(move for move in cut if move is not None)))
    return slabs


def _move_slab(move: Move, layout: Layout, parts: int, run: int, low: int, high: int) -> Move | None:
    """The move of rows `low` to `high` of each of the `parts` of the source's first dim, which have `run` rows each."""
    view, size = move.view, high - low
    if run % size or low % size:
        # Rows that are no digit of an index are a window of the dim, where that is one atom on both sides.
        group = view.source[0]
        atom = view.atoms[group[0]]
        if parts > 1 or len(group) != 1 or atom.taken is not None or atom.into is not None:
            return None
        atoms = list(view.atoms)
        atoms[group[0]] = Atom(atom.name, size, None, Window(low, atom.size))
        return Move(layout, move.target, View(tuple(atoms), view.source, view.target), cast=move.cast)
    # Atoms of the first dim in finer parts, so that each lies above the slab's digit, in it, or below it.
    finer: dict[int, list[int]] = {}
    atoms = list(view.atoms)
    above, below, place = list[int](), list[int](), math.prod(view.atoms[at].source_size for at in view.source[0])
    for at in view.source[0]:
        atom, inner = view.atoms[at], place // view.atoms[at].source_size
        cuts = [cut for cut in (run, size) if inner < cut < place]
        if any(cut % inner or place % cut for cut in cuts) or (cuts and (atom.taken or atom.into)):
            return None
        finer[at] = []
        for high_place, low_place in itertools.pairwise([place, *dict.fromkeys(cuts), inner]):
            radix = high_place // low_place
            part = Atom(f"{atom.name}_{len(finer[at])}", radix, atom.taken, atom.into) if cuts else atom
            number = at if not finer[at] else len(atoms)
            if size <= low_place < run and high_place <= run:
                # A digit of the slab's number: one index of the target, and of what is read none.
                if part.taken is not None:
                    return None
                value, whole = low // low_place % radix, part.into or Window(0, radix)
                part = Atom(part.name, 1, None, Window(whole.start + value, whole.size))
            elif low_place >= run:
                above.append(number)
            else:
                below.append(number)
            if number == at:
                atoms[at] = part
            else:
                atoms.append(part)
            finer[at].append(number)
        place = inner
    head = [tuple(above), tuple(below)] if parts > 1 else [tuple(below)]
    # A slab of all rows has no digit above it.
    if parts == 1 and above:
        return None
    target = tuple(tuple(itertools.chain(*(finer.get(at, [at]) for at in dim))) for dim in view.target)
    return Move(layout, move.target, View(tuple(atoms), (*head, *view.source[1:]), target), cast=move.cast)
