"""Drivers: who reads and writes the pieces of a checkpoint that only the library of their format can.

    driver = open_driver(ckpt)                   one for a checkpoint that is read, or written
    driver.read_box(stored, box, out)            a box of whole chunks, clipped at the end of the tensor
    driver.write_box(stored, box, data)          the same, of whole shards where there are shards
    driver.read_counts()                         bytes and requests that the library made

Raw pieces need none: they are read by offset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from reshard.errors import FileError, MissingTensorError, quoted
from reshard.runtime.on_files.formats.metadata_files import box_text
from reshard.runtime.on_files.formats.orbax import read_orbax_tree
from reshard.runtime.on_files.formats.tensorstore_arrays import RequestCounts, TensorStoreDriver, locate_store
from reshard.types.stored import Box, Checkpoint, ChunkGrid, Stored
from reshard.types.units import listed

Missing = Literal["refuse", "fill"]


class Driver(Protocol):
    """What reads and writes the coded pieces of one checkpoint; threads may share it."""

    def read_box(self, stored: Stored, box: Box, out: NDArray[Any]) -> None:
        """Fills `out` with the elements of a box of whole chunks."""

    def write_box(self, stored: Stored, box: Box, data: NDArray[Any]) -> None:
        """Writes the elements of a box of whole chunks (whole shards, where there are any)."""

    def read_counts(self) -> RequestCounts:
        """What the library has read since the driver was opened."""
        ...

    def close(self) -> None:
        """Lets go of open files."""


def open_driver(ckpt: Checkpoint, missing: Missing = "refuse") -> Driver:
    """The driver of a checkpoint's format; raises `FileError` for formats that have none, all of whose pieces are raw.

    With `missing="fill"` chunks that are not there are read as the fill value.
    """
    fill = missing == "fill"
    if ckpt.format == "zarr":
        return TensorStoreDriver(ckpt.path, locate_store(ckpt.path, database=False), fill=fill)
    if ckpt.format == "orbax":
        _, database, filled = read_orbax_tree(ckpt.path)
        return TensorStoreDriver(ckpt.path, locate_store(ckpt.path, database=database), fill=fill or filled)
    raise FileError(f"{quoted(ckpt.path)} is in the format {ckpt.format}, whose pieces are read by their offsets")


def check_missing(ckpt: Checkpoint, names: Iterable[str], missing: Missing = "refuse") -> None:
    """Raises one `MissingTensorError` for all chunks of these tensors that are missing and not to be filled."""
    if missing == "fill":
        return
    faults: list[str] = []
    for name in names:
        stored = ckpt[name]
        if isinstance(stored.pieces, ChunkGrid):
            sizes = stored.pieces.sizes
            if sizes is None or len(sizes) == len(stored.pieces):
                continue
            absent = [stored.pieces[next(at for at in range(len(stored.pieces)) if at not in sizes)]]
            count = len(stored.pieces) - len(sizes)
        else:
            # A tensor without elements has a piece of 0 bytes, too, and nothing is missing there.
            absent = [piece for piece in stored.pieces if not piece.nbytes and all(a < b for a, b in piece.box)]
            count = len(absent)
        if count:
            faults.append(f"{quoted(name)} ({count} of {len(stored.pieces)}, the first {box_text(absent[0].box)})")
    if faults:
        raise MissingTensorError(
            f"{quoted(ckpt.path)} has no data for chunks of {listed(faults)}; restore the files, or give "
            "missing='fill' if their fill value is meant"
        )
