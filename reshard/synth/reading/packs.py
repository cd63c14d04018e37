"""Packs: small tensors read as one array, which all devices gather at once and split on their own.

One by one, 65 norms of 8 KiB for 64 readers are 4,160 reads of 128 B, or 65 launches from one owner each. Packed, each
reader has an even share of all of them, which one launch gathers; each device then takes its part of each tensor.

    norms a (8), b (8), c (8)     a a a a a a a a b b b b b b b b c c c c c c c c
    readers 0 .. 3                0 0 0 0 0 0 1 1 1 1 1 1 2 2 2 2 2 2 3 3 3 3 3 3

What is coded, or in several pieces, is read by one reader whole. Then each has a slot of the pack, as long as the
longest needs it, and tensors are dealt to slots, the largest first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.plans.load_plan import PackedPart
from reshard.plans.stored import ChunkGrid, Stored
from reshard.types.dims import Digit, fit_digits
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis


class Pack(NamedTuple):
    """Where tensors are in a pack, the layout in which it is read, and that in which it is gathered."""

    parts: tuple[PackedPart, ...]
    layout: Layout
    gathered: Layout


def is_raw(stored: Stored) -> bool:
    """Whether any part of it can be read alone."""
    return not isinstance(stored.pieces, ChunkGrid) and all(piece.raw for piece in stored.pieces)


def is_flat(stored: Stored) -> bool:
    """Whether any run of its elements, in C order, can be read alone as one run of bytes."""
    pieces = stored.pieces
    return len(pieces) == 1 and pieces[0].raw and pieces[0].strides is None


def pack_tensors(tensors: Sequence[Stored], mesh: Mesh, readers: Sequence[SubAxis], *, whole: bool = False) -> Pack:
    """The pack of some tensors of one dtype, all flat or none, for the readers along these axes of a mesh.

    With `whole`, each is read by one reader, flat or not.

    >>> from reshard.plans.stored import StoredPiece
    >>> pieces = [StoredPiece(((0, size),), 0, at, 4 * size) for size, at in ((3, 80), (5, 92))]
    >>> tensors = [Stored(f"n{at}", "float32", (p.box[0][1],), (p,)) for at, p in enumerate(pieces)]
    >>> mesh = Mesh(x=2, y=2)
    >>> pack = pack_tensors(tensors, mesh, [mesh.sub_axis("x"), mesh.sub_axis("y")])
    >>> [tuple(part) for part in pack.parts], str(pack.layout), str(pack.gathered)
    ([('n0', 0), ('n1', 3)], 'f32[{x}{y}2]', 'f32[8]')
    """
    sizes = [math.prod(each.shape) for each in tensors]
    count = math.prod(axis.size for axis in readers)
    starts = [0] * len(sizes)
    if not whole and all(map(is_flat, tensors)):
        total = 0
        for at, size in enumerate(sizes):
            starts[at], total = total, total + size
        slot = -(-total // count)
    else:
        # The least loaded reader takes the next largest tensor.
        slots = [(0, at) for at in range(count)]
        dealt: list[tuple[int, int]] = [(0, 0)] * len(sizes)
        for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            used, number = heapq.heappop(slots)
            dealt[at] = number, used
            heapq.heappush(slots, (used + sizes[at], number))
        slot = max(used for used, _ in slots)
        starts = [number * slot + used for number, used in dealt]
        total = count * slot
    digits = [*(Digit(axis.size, axis) for axis in readers), Digit(slot, None)]
    dtype = tensors[0].dtype
    layout = Layout(mesh, (fit_digits(digits, total),), dtype)
    parts = tuple(PackedPart(each.name, start) for each, start in zip(tensors, starts, strict=True))
    return Pack(parts, layout, Layout.tiled(mesh, (total,), dtype, [()]))
