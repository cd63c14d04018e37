"""Elements that a rank names by their global indices, dim by dim: which ranks have them, and where in their tiles.

    f32[{x}(3,5,0,2), 4] on <x=4>: a rank picks rows 9, 2, 3 and 2

    index     2     3     9
    owner     0     1     3
    there     2     0     1      where it lies in the owner's tile
    here      1     2     0      where it goes; row 3 is a copy of row 1

A box is what its dims pick, each with each. So rows, halos and any others are found in time and memory that grow with
the indices alone, whatever the number of ranks. Neighbours in a tile are a slice, others a column: a list of rows is
no list of blocks, of which there would be one for every row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.holders import holders
from reshard.geometry.overlap import dim_levels
from reshard.lower.to_mpi.fetches import choose_givers, seats_at
from reshard.lower.to_mpi.peer_table import Column, list_positions
from reshard.lower.to_mpi.seats import ranks_of_seats
from reshard.types.layout import Dim, Layout

Along = slice | Column
"""Indices along a dim of a tile: neighbours as a slice."""

Box = tuple[Along, ...]


class PickedBox(NamedTuple):
    """What a rank picks out of the tile of one owner: where it goes, and where it lies there."""

    owner: int
    here: Box
    there: Box

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(map(measure_along, self.here))


class Picks(NamedTuple):
    """All that a rank picks, owner by owner, and for each dim what it picks again: (where it goes, where it is)."""

    boxes: Sequence[PickedBox]
    again: Sequence[tuple[Column, Column]]


def pick_boxes(layout: Layout, indices: Sequence[Column], rank: int, nodes: Sequence[int]) -> Picks:
    """Who gives a rank the elements at these global indices: itself, else a holder on its node, else any of them.

    >>> from reshard.types.mesh import Mesh
    >>> layout = Layout.parse("f32[{x}(3,5,0,2)]", Mesh(x=4))
    >>> boxes, again = pick_boxes(layout, [np.array([9, 2, 3, 2])], 1, (0,) * 4)
    >>> [(box.owner, box.here, box.there) for box in boxes]
    [(0, (slice(1, 2, None),), (slice(2, 3, None),)), (1, (slice(2, 3, None),), (slice(0, 1, None),)), \
(3, (slice(0, 1, None),), (slice(1, 2, None),))]
    >>> [column.tolist() for column in again[0]]
    [[3], [1]]
    """
    pieces: list[list[int]] = []
    parts: list[list[tuple[Along, Along]]] = []
    again: list[tuple[Column, Column]] = []
    for dim, index in zip(layout.dims, indices, strict=True):
        if (np.diff(index) > 0).all():  # Most are, and are known to be unique.
            picked, first = index, np.arange(len(index))
            again.append((first[:0], first[:0]))
        else:
            picked, first, of = np.unique(index, return_index=True, return_inverse=True)
            copies = np.flatnonzero(first[of] != np.arange(len(index)))
            again.append((copies, first[of][copies]))
        numbers, locals_ = locate_indices(dim, picked)
        order = np.argsort(numbers, kind="stable")
        ends = np.flatnonzero(np.diff(numbers[order])) + 1
        groups = np.split(order, ends) if len(order) else []
        pieces.append([int(numbers[group[0]]) for group in groups])
        parts.append([(join_neighbours(first[group]), join_neighbours(locals_[group])) for group in groups])
    tiles = [np.array(column, np.int64) for column in zip(*itertools.product(*pieces), strict=True)]
    none: Column = np.empty((0, 1), np.int64)
    held_by = seats_at(layout.mesh, list_positions(holders(layout), tiles)) if tiles or not parts else none
    if layout.mesh.size != len(nodes):  # Else seats are ranks.
        ranks = np.array(ranks_of_seats(layout.mesh, len(nodes)))
        held_by = np.where(held_by < 0, -1, ranks[held_by])
    owners = choose_givers(held_by, rank, nodes).tolist()
    boxes = [
        PickedBox(owner, tuple([here for here, _ in box]), tuple([there for _, there in box]))
        for owner, box in zip(owners, itertools.product(*parts), strict=True)
    ]
    return Picks(boxes, again)


def locate_indices(dim: Dim, index: Column) -> tuple[Column, Column]:
    """The piece of each global index of a dim, and where it lies there.

    >>> from reshard.types.mesh import Mesh
    >>> layouts = (Layout.parse(text, Mesh(x=2)) for text in ("f32[2{x}2/7]", "f32[{x}(1@0,4@1,2@0)]"))
    >>> [[column.tolist() for column in locate_indices(layout.dims[0], np.arange(7))] for layout in layouts]
    [[[0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 2, 3, 2]], [[0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 2, 3, 1, 2]]]
    """
    if dim.pieces is not None:
        starts = np.asarray(dim.pieces.starts, np.int64)
        run = np.searchsorted(starts, index, side="right") - 1
        numbers, places = (np.asarray(column, np.int64)[run] for column in (dim.pieces.numbers, dim.pieces.locals))
        return numbers, places + index - starts[run]
    numbers, locals_ = np.zeros_like(index), np.zeros_like(index)
    for radix, held, block, share in dim_levels(dim):
        value = index // block % radix * share
        if held:
            numbers += value
        else:
            locals_ += value
    return numbers, locals_


def join_neighbours(index: Column) -> Along:
    """The same indices, as a slice if each is one above the last."""
    count = len(index)
    if count and index[-1] - index[0] == count - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[0]) + count)
    return index


def measure_along(along: Along) -> int:
    """How many indices there are along a dim."""
    return along.stop - along.start if isinstance(along, slice) else len(along)


# A request, as an owner gets it: what it is to send, box by box of its own tile.
#
#     2 dims     rows 4, 7, 5 of columns 0:8        3, 4, 7, 5, -1, 0, 8


def write_request(there: Box) -> NDArray[np.int64]:
    """A request for a box as numbers: -1 and the ends of a slice, or how many indices follow.

    >>> write_request((np.array([4, 7, 5]), slice(0, 8))).tolist()
    [3, 4, 7, 5, -1, 0, 8]
    """
    words = [np.empty(0, np.int64)]
    for along in there:
        if isinstance(along, slice):
            words.append(np.array([-1, along.start, along.stop]))
        else:
            words.append(np.concatenate([[len(along)], along]))
    return np.concatenate(words).astype(np.int64)


def read_request(words: NDArray[np.int64]) -> Box:
    """The box of a request.

    >>> read_request(np.array([3, 4, 7, 5, -1, 0, 8]))
    (array([4, 7, 5]), slice(0, 8, None))
    """
    there: list[Along] = []
    while len(words):
        count = int(words[0])
        there.append(slice(int(words[1]), int(words[2])) if count < 0 else words[1 : 1 + count])
        words = words[3 if count < 0 else 1 + count :]
    return tuple(there)
