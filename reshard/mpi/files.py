"""Arrays in files: a folder with the layout as `layout.json` and every rank's tile as `tile-<rank>.npy`."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import LayoutError
from reshard.lower.to_mpi import fetches
from reshard.mpi.tiles import RAW, kind
from reshard.runtime.on_mpi.strided_copy import copy, raw
from reshard.runtime.on_mpi.wire.chunks import copies
from reshard.types import Layout, Mesh

_FORMAT = 1


def make(path: str | PathLike[str]) -> None:
    """Makes the folder."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayoutError(f"cannot make the folder {str(path)!r}: {error}") from None


def write(path: str | PathLike[str], layout: Layout, rank: int, tile: NDArray[Any]) -> None:
    """Writes a rank's tile, and as rank 0 the layout."""
    np.save(_tile(path, rank), tile, allow_pickle=False)
    if rank == 0:
        ids = None if layout.mesh.device_ids is None else list(layout.mesh.device_ids)
        head = {"format": _FORMAT, "layout": str(layout), "mesh": dict(layout.mesh.axes), "device_ids": ids}
        _head(path).write_text(json.dumps(head, indent=2))


def checked(path: str | PathLike[str], layout: Layout) -> np.dtype[Any]:
    """The saved dtype; raises `LayoutError` if nothing is saved there, or not the array of this layout."""
    saved = _saved(path)
    if saved.shape != layout.shape or saved.dtype != layout.dtype:
        raise LayoutError(f"{str(path)!r} holds {saved}, of another shape or dtype than {layout}")
    if saved != layout and (saved.partial or layout.partial):
        raise LayoutError(f"{str(path)!r} holds {saved}, {layout} is asked for: reading finishes no sums")
    # A dtype that has a name is not read from the file: numpy writes bfloat16 as two bytes of anything.
    return kind(layout, _dtype(path) if layout.dtype in RAW else None)


def read(path: str | PathLike[str], layout: Layout, rank: int, tile: NDArray[Any]) -> None:
    """Fills a rank's tile, out of those parts of the files that have its elements."""
    saved = _saved(path)
    for fetch in fetches(saved, layout, rank, lambda one, other: False):
        blocks = [block for block in fetch.blocks if block.elements]
        given = np.load(_tile(path, fetch.rank), mmap_mode="r", allow_pickle=False) if blocks else tile
        for block in blocks:
            for source, where in copies(block, saved.tile_shape, layout.tile_shape):
                copy(where.of(raw(tile)), source.of(raw(given)))


def _saved(path: str | PathLike[str]) -> Layout:
    try:
        head = json.loads(_head(path).read_text())
        return Layout.parse(head["layout"], Mesh(head["mesh"], device_ids=head["device_ids"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"{str(path)!r} is no array that was saved ({type(error).__name__}: {error})") from None


def _dtype(path: str | PathLike[str]) -> np.dtype[Any]:
    with _tile(path, 0).open("rb") as file:
        np.lib.format.read_magic(file)
        return np.lib.format.read_array_header_1_0(file)[2]


def _head(path: str | PathLike[str]) -> Path:
    return Path(path) / "layout.json"


def _tile(path: str | PathLike[str], rank: int) -> Path:
    return Path(path) / f"tile-{rank}.npy"
