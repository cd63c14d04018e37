"""Drivers: who reads and writes the pieces of a checkpoint that only the library of their format can.

    driver = open_driver(ckpt)                               one for a checkpoint that is read, or written
    wait = driver.start_boxes([(stored, box, out), ...])     boxes of whole chunks, clipped at the end of the tensor
    driver.write_box(stored, box, data)                      one box, of whole shards where there are shards
    driver.read_counts()                                     bytes and requests that the library made

Raw pieces need none: they are read by offset.

    create_stored(path, "zarr", {"t2m": NewArray("float32", (8760, 721), (24, 721), codec="zstd")})

makes arrays without elements, for `write_box`: "zarr" (version 3), "zarr2", "orbax" (a database of zarr 2 arrays, as
Orbax writes by default), "orbax3" and "hdf5". Several processes may write the boxes of all but "hdf5".
`describe_stored_array` says what a stored array is as a new one, with the attributes that tell people what it means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from reshard.errors import FileError, MissingTensorError, quoted
from reshard.plans.stored import Box, Checkpoint, ChunkGrid, Stored
from reshard.runtime.on_files.formats.hdf5 import Hdf5Driver, create_hdf5, read_hdf5, read_hdf5_attributes
from reshard.runtime.on_files.formats.metadata_files import box_text
from reshard.runtime.on_files.formats.new_arrays import BoxToRead, NewArray, RequestCounts
from reshard.runtime.on_files.formats.orbax import create_orbax, read_orbax, read_orbax_tree
from reshard.runtime.on_files.formats.tensorstore_arrays import TensorStoreDriver, create_zarr, locate_store
from reshard.runtime.on_files.formats.zarr import describe_zarr, read_zarr, write_zarr_attributes, write_zarr_group
from reshard.types.units import listed

Missing = Literal["refuse", "fill"]


class Driver(Protocol):
    """What reads and writes the coded pieces of one checkpoint; threads may share it."""

    def start_boxes(self, parts: Sequence[BoxToRead]) -> Callable[[], None]:
        """Begins to fill arrays with the elements of boxes of whole chunks, side by side where the library can.

        What it returns waits for all of them, and raises what went wrong; nobody writes to the arrays any more then.
        """
        ...

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
    if ckpt.format == "hdf5":
        return Hdf5Driver(ckpt.path, fill=fill)
    raise FileError(f"{quoted(ckpt.path)} is in the format {ckpt.format}, whose pieces are read by their offsets")


def create_stored(
    path: str, format: str, tensors: Mapping[str, NewArray], attributes: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Makes arrays in a new store; `attributes` are those of the whole store, where it is a group of zarr.

    One process calls it, before any writes. Raises `FileError` for what the format cannot have.
    """
    try:
        # HDF5 is one file, the others are folders.
        if format == "hdf5":
            create_hdf5(path, tensors)
            return read_hdf5(path)
        os.makedirs(path, exist_ok=True)
        if format in ("orbax", "orbax3"):
            create_orbax(path, tensors, 3 if format == "orbax3" else 2)
            return read_orbax(path)
        if format not in ("zarr", "zarr2"):
            raise FileError(
                f"arrays of the format {quoted(format)} cannot be made; give zarr, zarr2, orbax, orbax3 or hdf5"
            )
        version = 3 if format == "zarr" else 2
        create_zarr(path, tensors, version)
        # Every folder above an array is a group, or others would not find the array.
        above = {"/".join(name.split("/")[:depth]) for name in tensors for depth in range(name.count("/") + 1)}
        for group in above - tensors.keys():
            write_zarr_group(os.path.join(path, group), version, attributes if not group else None)
        for name, new in tensors.items() if version == 2 else ():
            write_zarr_attributes(os.path.join(path, name), new)
        return read_zarr(path)
    except OSError as error:
        raise FileError(f"{quoted(path)} cannot be made ({error.strerror})") from None


def describe_stored_array(ckpt: Checkpoint, name: str) -> NewArray:
    """A stored array as a new one: chunks, shards, codec, fill value, attributes and names of dims."""
    stored = ckpt[name]
    if ckpt.format == "zarr":
        return describe_zarr(os.path.join(ckpt.path, name), stored)
    attributes = read_hdf5_attributes(ckpt.path, name) if ckpt.format == "hdf5" else None
    return NewArray(stored.dtype, stored.shape, stored.chunks, attributes=attributes)


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
