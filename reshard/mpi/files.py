"""Arrays in files: one folder per array.

layout.json       the layout in our notation, the axes and device ids of its mesh
tile-<rank>.npy   each rank's tile, padding included
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import LayoutError
from reshard.lower.to_mpi import fetches
from reshard.mpi.tiles import RAW, element_dtype
from reshard.runtime.on_mpi.strided_copy import copy, raw
from reshard.runtime.on_mpi.wire.chunks import copies
from reshard.types import Layout, Mesh

_FORMAT = 1


def make_folder(path: str | PathLike[str]) -> None:
    """Creates the folder, unless it exists. Raises `LayoutError` if that is not possible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise LayoutError(f"cannot make the folder {str(path)!r}: {error}") from None


def write(path: str | PathLike[str], layout: Layout, rank: int, tile: NDArray[Any]) -> None:
    """Writes this rank's tile; rank 0 writes the layout, too."""
    np.save(_tile(path, rank), tile, allow_pickle=False)
    if rank == 0:
        ids = None if layout.mesh.device_ids is None else list(layout.mesh.device_ids)
        head = {"format": _FORMAT, "layout": str(layout), "mesh": dict(layout.mesh.axes), "device_ids": ids}
        _head(path).write_text(json.dumps(head, indent=2))


def check_saved(path: str | PathLike[str], layout: Layout) -> np.dtype[Any]:
    """The dtype of the saved elements. Raises `LayoutError` unless an array of this shape and dtype is saved."""
    saved = _saved(path)
    if saved.shape != layout.shape or saved.dtype != layout.dtype:
        raise LayoutError(f"{str(path)!r} holds {saved}, of another shape or dtype than {layout}")
    if saved != layout and (saved.partial or layout.partial):
        raise LayoutError(f"{str(path)!r} holds {saved}, which cannot be read as {layout}: reading finishes no sums")
    # Only nameless dtypes are read from the file: there numpy has bfloat16 as plain 2-byte elements, for example.
    return element_dtype(layout, _dtype(path) if layout.dtype in RAW else None)


def read(path: str | PathLike[str], layout: Layout, rank: int, tile: NDArray[Any]) -> None:
    """Fills this rank's tile; only the parts of the files that have its elements are read."""
    saved = _saved(path)
    for fetch in fetches(saved, layout, rank, lambda one, other: False):
        blocks = [block for block in fetch.blocks if block.elements]
        stored = np.load(_tile(path, fetch.rank), mmap_mode="r", allow_pickle=False) if blocks else tile
        for block in blocks:
            for source, where in copies(block, saved.tile_shape, layout.tile_shape):
                copy(where.of(raw(tile)), source.of(raw(stored)))


def _saved(path: str | PathLike[str]) -> Layout:
    try:
        head = json.loads(_head(path).read_text())
        return Layout.parse(head["layout"], Mesh(head["mesh"], device_ids=head["device_ids"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"{str(path)!r} is not a saved array ({type(error).__name__}: {error})") from None


def _dtype(path: str | PathLike[str]) -> np.dtype[Any]:
    with _tile(path, 0).open("rb") as file:
        np.lib.format.read_magic(file)
        return np.lib.format.read_array_header_1_0(file)[2]


def _head(path: str | PathLike[str]) -> Path:
    return Path(path) / "layout.json"


def _tile(path: str | PathLike[str], rank: int) -> Path:
    return Path(path) / f"tile-{rank}.npy"
