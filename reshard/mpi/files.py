"""Arrays in files: one folder per array.

layout.json              the layout in our notation, the axes and device ids of its mesh, and the name of the save
tile-<seat>-<save>.npy   the tile of each seat (`lower.to_mpi.seats`), padding included, and a line behind it that says
                         which tile it is
reshard.json             the checksums of these files, as of every save

`runtime.on_files.save_targets` writes them and makes them the folder's array, in one step, when layout.json takes its
place; `runtime.on_files.formats.npy` reads layout.json and the tiles' headers, and refuses tiles that do not fit it:
missing, truncated, swapped, of another save, shape or dtype.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.errors import FileError, LayoutError, NamedErrors, quoted, shortened
from reshard.geometry.blocks import Axis, Block
from reshard.lower.to_mpi import Fetches, list_fetches, seat_of
from reshard.mpi.tile_checks import RAW, check_given_tile, check_nothing, element_dtype, with_ranks_as_ids
from reshard.plans.stored import StoredFile, StoredPiece
from reshard.runtime.on_files.commit import NewFile, Processes, remove_remains
from reshard.runtime.on_files.formats.metadata_files import open_regular
from reshard.runtime.on_files.formats.npy import (
    NpyHeader,
    mark_of_tile,
    read_npy_header,
    read_saved_layout,
    read_tile_file,
)
from reshard.runtime.on_files.save_targets import RawTarget
from reshard.runtime.on_files.sidecar import SIDECAR
from reshard.runtime.on_files.writing import NewCheckpoint, PieceWrite
from reshard.runtime.on_mpi.collective import check_communicator, collective, gather_texts
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, pair_views, view_as_words
from reshard.runtime.on_mpi.prepare import check_seats
from reshard.types import Layout

# Ranks as the processes of a save: what each holds of an array, and how all tell each other that they are done.


class RankProcesses:
    """The ranks of a communicator; each wait for the others ends after `limit` seconds."""

    def __init__(self, comm: MPI.Intracomm, limit: float) -> None:
        self.comm, self._limit = check_communicator(comm), limit
        self.rank, self.size = comm.rank, comm.size

    def gather(self, mine: str) -> list[str]:
        """What each rank gives."""
        # A call of its own each time: between two of them a rank may write for minutes, and moves may be made.
        with collective(self.comm, self._limit, lambda _: None, lambda _: "save") as (team, watch, _):
            return gather_texts(team, watch, mine)


def tiles_of_rank(
    name: str, leaf: Any, layout: Layout | None, processes: Processes
) -> tuple[Layout, dict[int, NDArray[Any]], dict[int, int]]:
    """An array whose devices are ranks: its layout with ranks as ids, this rank's tile, and the process of each device.

    `leaf` is the rank's tile, None where it has none, or a `DistArray`.
    """
    if hasattr(leaf, "comm"):  # A DistArray has a tile without elements where it has none.
        own: Layout = leaf.layout
        layout, leaf = own, leaf.tile if seat_of(own.mesh, processes.rank, processes.size) is not None else None
    if layout is None:
        raise FileError(f"tensor {quoted(name)} has no layout; give layouts={{name: Layout}} with comm=")
    check_seats(layout, layout, processes.size)
    seat = seat_of(layout.mesh, processes.rank, processes.size)
    tiles: dict[int, NDArray[Any]] = {}
    with NamedErrors(f"tensor {quoted(name)}"):
        if seat is None:
            check_nothing(leaf, "tile", layout, processes.rank)
        else:
            tiles[processes.rank] = check_given_tile(leaf, layout, seat)
    # Ids become ranks: the processes of a save are numbered by these, whatever meshes call them.
    layout = with_ranks_as_ids(layout, processes.size)
    return layout, tiles, {rank: rank for rank in layout.mesh.devices}


Folder = str | PathLike[str]


class SavedTiles(NamedTuple):
    """What one seat's rank reads of a saved array: its dtype, and blocks of files whose headers have been read."""

    dtype: np.dtype[Any]
    parts: tuple[tuple[StoredFile, NpyHeader, Sequence[Block]], ...]


def save_tiles(
    comm: MPI.Intracomm, path: Folder, layout: Layout, seat: int | None, tile: NDArray[Any], limit: float
) -> None:
    """Saves an array; all ranks call it with the tiles of their seats, and the folder is there."""
    processes, folder = RankProcesses(comm, limit), Path(path)
    if processes.rank == 0:
        remove_remains(folder, folder / SIDECAR, None, ())
    tile, head = np.ascontiguousarray(tile).reshape(tile.shape), io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tile))
    # The name of the save is that of rank 0, which may have no tile: then it knows no dtype without a name.
    size = 0 if seat is None else len(head.getvalue()) + tile.nbytes
    given = [json.loads(each) for each in processes.gather(json.dumps([secrets.token_hex(8), size]))]
    save, size = str(given[0][0]), max(int(size) for _, size in given)
    ids = None if layout.mesh.device_ids is None else list(layout.mesh.device_ids)
    mesh = {"mesh": dict(layout.mesh.axes), "device_ids": ids}
    text = json.dumps({"format": 2, "layout": str(layout), **mesh, "save": save}, indent=2).encode()
    marks = [mark_of_tile(seat, save) for seat in range(layout.mesh.size)]
    files = [NewFile(f"tile-{at}-{save}.npy", size + len(mark)) for at, mark in enumerate(marks)]
    heads = ((len(files), 0, text),)
    new = NewCheckpoint((*files, NewFile("layout.json", len(text))), {}, heads, len(files))
    pieces: list[PieceWrite] = []
    if seat is not None:
        # As bytes: elements may be of a dtype without a name.
        parts: list[tuple[Block, NDArray[Any]]] = []
        at = 0
        for data in (head.getvalue(), tile.reshape(-1).view(np.uint8), marks[seat]):
            part = np.frombuffer(data, np.uint8)
            parts.append((Block(at, 0, (Axis(part.size, 1, 1),)), part))
            at += part.size
        pieces.append(PieceWrite("", StoredPiece(((0, at),), seat, 0, at), "uint8", tuple(parts)))
    target = RawTarget(folder, save, new, folder / SIDECAR, processes)
    error: Exception | None = None
    try:
        target.write(pieces)
    except Exception as caught:  # All ranks raise it together.
        error = caught
    target.commit(error)
    # Tiles that no sidecar lists, as versions without one have saved them.
    for old in folder.glob("tile-*.npy") if processes.rank == 0 else ():
        if not old.name.endswith(f"-{save}.npy"):
            with contextlib.suppress(OSError):
                old.unlink()


def find_saved(path: Folder, layout: Layout, seat: int | None) -> SavedTiles:
    """What a seat's rank reads, which is nothing without a seat. Raises `LayoutError` unless an array of this shape and
    dtype is saved, with every tile of which something is read.
    """
    try:
        saved, name, _ = read_saved_layout(os.fspath(path))
        if saved.shape != layout.shape or saved.dtype != layout.dtype:
            raise LayoutError(f"{quoted(path)} holds {saved}, of another shape or dtype than {layout}")
        if saved != layout and (saved.partial or layout.partial):
            raise LayoutError(
                f"{quoted(path)} holds {saved}, which cannot be read as {layout}: reading finishes no sums"
            )
        # Only nameless dtypes are read from the file: there numpy has bfloat16 as plain 2-byte elements, for example.
        first = None
        if layout.dtype in RAW:
            with open_regular(os.path.join(path, f"tile-0-{name}.npy")) as file:
                first = read_npy_header(file, "").dtype
        dtype = element_dtype(layout, first)
        parts = [
            (*read_tile_file(path, at, name, saved, dtype), blocks)
            for at, blocks in (() if seat is None else _fetches_of_files(saved, layout, seat).items())
        ]
    except (FileError, TypeError) as error:
        raise LayoutError(f"{quoted(path)} is not a saved array: {shortened(str(error), 400)}") from None
    return SavedTiles(dtype, tuple(parts))


def read_saved_tile(saved: SavedTiles, tile: NDArray[Any]) -> None:
    """Fills the tile of a seat; only the parts of the files that have its elements are read."""
    for file, header, blocks in saved.parts:
        order = "F" if header.in_fortran else "C"
        stored = np.memmap(file.path, header.dtype, "r", header.start, header.shape, order)
        for pair in pair_views(blocks, view_as_words(tile), view_as_words(stored)):
            copy_view(*pair)


@lru_cache(maxsize=16)
def _fetches_of_files(saved: Layout, layout: Layout, seat: int) -> Fetches:
    """What a seat's rank reads from each tile that has elements for it."""
    return list_fetches(saved, layout, seat)
