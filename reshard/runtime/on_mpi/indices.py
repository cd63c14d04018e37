"""Which global indices the tile of a seat holds: of a rank, where every rank has a tile (`lower.to_mpi.seats`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.blocks import Block
from reshard.geometry.overlap import list_runs, piece, shares
from reshard.lower.to_mpi import devices_by_id
from reshard.types import Digit, Dim, Layout


def index_ranges(layout: Layout, seat: int) -> tuple[tuple[range, ...], ...]:
    """For each dim, the ranges of global indices that the tile of a seat holds, in the tile's order, without padding.

    >>> from reshard.types import Mesh
    >>> index_ranges(Layout.parse("f32[2{x}2, {y}2]", Mesh(x=4, y=2)), 3)
    ((range(2, 4), range(10, 12)), (range(2, 4),))
    """
    return tuple(
        tuple(range(run.dst, run.dst + run.elements) for run in _runs_of_dim(layout, dim, seat))
        for dim in range(len(layout.shape))
    )


def global_indices(layout: Layout, dim: int, seat: int) -> NDArray[np.int64]:
    """The global index of every local index of a dim; padding gets the index 0, so that it can be used as an index.

    >>> from reshard.types import Mesh
    >>> global_indices(Layout.parse("f32[{x}3/8]", Mesh(x=3)), 0, 2)
    array([6, 7, 0])
    """
    index = np.zeros(layout.tile_shape[dim], np.int64)
    for run in _runs_of_dim(layout, dim, seat):
        index[run.src : run.src + run.elements] = np.arange(run.dst, run.dst + run.elements)
    return index


def padding_indices(layout: Layout, seat: int) -> tuple[NDArray[np.intp], ...]:
    """For each dim, the local indices of the tile of a seat that hold no element.

    >>> from reshard.types import Mesh
    >>> padding_indices(Layout.parse("f32[{x}3/8]", Mesh(x=3)), 2)
    (array([2]),)
    """
    unused: list[NDArray[np.intp]] = []
    for dim, extent in enumerate(layout.tile_shape):
        held = np.zeros(extent, bool)
        for run in _runs_of_dim(layout, dim, seat):
            held[run.src : run.src + run.elements] = True
        unused.append(np.flatnonzero(~held))
    return tuple(unused)


def clear_padding(layout: Layout, seat: int, tile: NDArray[Any]) -> None:
    """Writes zeros to the padding of a seat's tile."""
    for dim, local in enumerate(padding_indices(layout, seat)):
        if local.size:
            tile[(slice(None),) * dim + (local,)] = np.zeros((), tile.dtype)


def _runs_of_dim(layout: Layout, dim: int, seat: int) -> list[Block]:
    """The runs from local indices (`src`) to global ones (`dst`): the dim's shares with an undivided dim."""
    numeral = layout.dims[dim]
    whole = Dim((Digit(numeral.size, None),), numeral.size)
    position = layout.mesh.position(devices_by_id(layout.mesh)[seat])
    return list_runs(shares(numeral, whole)[0].get(piece(numeral, layout.mesh, position), ()))
