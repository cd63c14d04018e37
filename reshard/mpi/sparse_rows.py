"""Sparse matrices by rows: scipy's CSR, jax's BCSR and BCOO, as three arrays that one plan moves.

    rows 0 and 2 of a rank      counts of nonzeros   2, 1           in the layout of the rows
    [[0, 5, 6], [7, 0, 0]]      columns              1, 2, 0        in that of the nonzeros, each with its row
                                values               5, 6, 7        in the same

No rank knows how many nonzeros the others have, so the ranks tell each other, for all neighbouring rows that one rank
has before the move and one after it. The layouts of the nonzeros follow, and the rest is the move of a tree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from reshard.errors import LayoutError, TileError, quoted, shortened
from reshard.lower.to_mpi import devices_by_id, seat_of
from reshard.runtime.numpy_tiles import with_padding
from reshard.types import Layout
from reshard.types.dims import number_piece, tabulate_pieces
from reshard.types.layout import checked_rows, lay_nonzeros
from reshard.types.pieces import Pieces, read_table

Array = NDArray[Any]


def is_sparse(tile: Any) -> bool:
    """Whether a tile is a sparse matrix of any kind, also one that does not move by rows."""
    by_rows = hasattr(tile, "indices") and (hasattr(tile, "indptr") or hasattr(tile, "nse"))
    return not isinstance(tile, np.ndarray) and (by_rows or hasattr(tile, "tocsr"))


class SparseRows(NamedTuple):
    """A rank's rows of a sparse matrix, the class of which they are, and whether that says the row of each nonzero."""

    kind: type[Any]
    indptr: Array
    columns: Array
    values: Array
    width: int
    by_coordinates: bool

    @classmethod
    def read(cls, matrix: Any, shape: tuple[int, ...]) -> Self:
        """Reads a matrix of this shape; raises `TileError` for one of another kind or shape, or of wrong offsets."""
        kind: type[Any] = type(matrix)  # pyright: ignore[reportUnknownVariableType]
        name = getattr(matrix, "format", kind.__name__.lower())
        if name in ("csc", "bsr") or not hasattr(matrix, "indices"):
            raise TileError(
                f"the tile is a {kind.__name__}, whose rows do not lie one after the other: give tile.tocsr()"
            )
        given = tuple(getattr(matrix, "shape", ()))
        if given != shape:
            raise TileError(
                f"the tile is a {kind.__name__} of shape {quoted(given)}, but this rank has {shape[0]} rows of "
                f"{shape[1]}; give them, without padding (0 rows where it has none)"
            )
        if getattr(matrix, "n_batch", 0) or getattr(matrix, "n_dense", 0):
            raise TileError(
                f"the tile is a {kind.__name__} with batch or dense dims; give one of rows and columns alone"
            )
        try:
            columns, values = np.asarray(matrix.indices), np.asarray(matrix.data)
            if hasattr(matrix, "indptr"):
                indptr = np.asarray(matrix.indptr)
            else:  # Coordinates in any order of columns; what is past the last row is padding.
                rows = columns[:, 0]
                indptr = np.searchsorted(rows, np.arange(shape[0] + 1))
                if np.any(rows[1:] < rows[:-1]):
                    raise TileError(f"the rows of the {kind.__name__} are not in order: give tile.sort_indices()")
                columns = columns[:, 1]
        except (TypeError, ValueError, IndexError) as error:
            raise TileError(
                f"the tile is a {kind.__name__} that numpy cannot take ({shortened(str(error))}): give one of the host"
            ) from None
        wrong = indptr.shape != (shape[0] + 1,) or indptr.dtype.kind not in "iu" or columns.dtype.kind not in "iu"
        if wrong or indptr[0] or np.any(indptr[1:] < indptr[:-1]) or indptr[-1] > min(len(columns), len(values)):
            raise TileError(
                f"the {kind.__name__} has {len(columns)} columns, {len(values)} values and offsets {quoted(indptr)}: "
                f"give {shape[0] + 1} offsets that ascend from 0 to at most the number of nonzeros"
            )
        nonzeros = int(indptr[-1])
        return cls(kind, indptr, columns[:nonzeros], values[:nonzeros], shape[1], not hasattr(matrix, "indptr"))

    def list_tiles(self, layouts: dict[str, Layout], device: int | None) -> dict[str, Array | None]:
        """What moves from a device: the nonzeros of each row, their columns and their values, with room for padding."""
        tiles = {"counts": np.diff(self.indptr), "columns": self.columns, "values": self.values}
        for name in ("counts", "columns"):
            tiles[name] = tiles[name].astype(layouts[name].dtype)
        if device is None:
            return dict.fromkeys(tiles)
        return {name: with_padding(layouts[name], device, tile) for name, tile in tiles.items()}

    def rebuild(self, moved: dict[str, Array | None]) -> Any:
        """A matrix of the same kind of the arrays after the move; of no rows where there are none."""
        own = {"counts": self.indptr, "columns": self.columns, "values": self.values}
        here = [tile if (tile := moved[name]) is not None else array[:0] for name, array in own.items()]
        counts, columns, values = here
        shape = len(counts), self.width
        try:
            if self.by_coordinates:
                rows = np.repeat(np.arange(shape[0], dtype=columns.dtype), counts)
                return self.kind((values, np.stack([rows, columns], 1)), shape=shape)
            indptr = np.concatenate([np.zeros(1, columns.dtype), np.cumsum(counts, dtype=columns.dtype)])
            return self.kind((values, columns, indptr), shape=shape)
        except Exception as error:  # The caller's class.
            raise TileError(f"{self.kind.__name__} takes no rows that moved: {error}") from None


class SharedRows(NamedTuple):
    """Neighbouring rows that one piece has before a move and one after it: how many, and which pieces."""

    lengths: Array
    source: Array
    target: Array
    order: Array
    """All of them, those of the first source piece first."""
    bounds: Array
    """Where each source piece starts in that order."""

    def of_rank(self, layout: Layout, rank: int, size: int) -> Array:
        """Those that a rank has before the move, in order."""
        seat = seat_of(layout.mesh, rank, size)
        if seat is None:
            return self.order[:0]
        number = number_piece(layout.dims[0], layout.mesh, layout.mesh.position(devices_by_id(layout.mesh)[seat]))
        return self.order[self.bounds[number] : self.bounds[number + 1]]


@lru_cache(maxsize=8)
def share_rows(source: Layout, target: Layout) -> SharedRows:
    """The rows that two layouts of a matrix share."""
    if source.shape != target.shape:
        raise LayoutError(f"source {source} has global shape {source.shape}, target {target} has {target.shape}")
    tables = [tabulate_pieces(checked_rows(layout)) for layout in (source, target)]
    starts = [np.asarray(table.starts, np.int64) for table in tables]
    cuts = np.union1d(*starts)
    before, after = (
        np.asarray(table.numbers, np.int64)[np.searchsorted(start, cuts, side="right") - 1]
        for table, start in zip(tables, starts, strict=True)
    )
    order = np.argsort(before, kind="stable")
    bounds = np.searchsorted(before[order], np.arange(tables[0].count + 1))
    return SharedRows(np.diff(cuts, append=source.shape[0]), before, after, order, bounds)


def count_nonzeros(rows: SparseRows, own: Array, shared: SharedRows) -> bytes:
    """What a rank tells the others: the bytes of its indices, and the nonzeros of all that it shares."""
    ends = np.concatenate([[0], np.cumsum(shared.lengths[own])]).astype(np.int64)
    itemsize = max(rows.indptr.itemsize, rows.columns.itemsize)
    return np.concatenate([[itemsize], np.diff(rows.indptr[ends])]).astype(np.int64).tobytes()


def lay_arrays(source: Layout, target: Layout, shared: SharedRows, told: list[bytes]) -> list[dict[str, Layout]]:
    """The layouts of the three arrays before and after the move, from what all ranks told."""
    nonzeros, itemsize = np.zeros(len(shared.lengths), np.int64), 4
    for rank, content in enumerate(told):
        counts = np.frombuffer(content, np.int64)
        itemsize = max(itemsize, int(counts[0]))
        nonzeros[shared.of_rank(source, rank, len(told))] = counts[1:]
    index = f"int{8 * itemsize}"
    # Rows without nonzeros are left out, and neighbours of one piece are one run: by the million, for `Pieces` as well.
    held = np.flatnonzero(nonzeros)
    offsets = np.append(0, np.cumsum(nonzeros[held]))
    ends: list[dict[str, Layout]] = []
    for layout, numbers in ((source, shared.source), (target, shared.target)):
        count = tabulate_pieces(layout.dims[0]).count
        own = numbers[held]
        last = np.flatnonzero(np.append(own[1:] != own[:-1], [True] * bool(len(own))))
        lengths = np.diff(np.append(0, offsets[last + 1]))
        values = lay_nonzeros(layout, Pieces(read_table(lengths, "lengths"), read_table(own[last], "pieces"), count))
        columns = Layout(values.mesh, values.dims, index)
        ends.append({"counts": Layout(layout.mesh, layout.dims[:1], index), "columns": columns, "values": values})
    return ends
