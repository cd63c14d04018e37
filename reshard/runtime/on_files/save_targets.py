"""What a save writes to: files that we lay out ourselves, or a store that a library makes.

    RawTarget      safetensors: every process writes spans at offsets that are known before
    StoreTarget    zarr, Orbax: whole chunks, by the library; HDF5: raw data at offsets, coded chunks by one process

Both are made by all processes together, written to by each in a thread of its own, and committed by all together.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from reshard.errors import FileError, quoted
from reshard.plans.stored import NO_FILE, Checkpoint, ChunkGrid, Stored
from reshard.runtime.on_files.commit import (
    NewFile,
    PartFiles,
    Processes,
    commit_files,
    create_synced_file,
    publish_files,
    raise_together,
    replace_folder,
    sync_files,
    write_fully,
)
from reshard.runtime.on_files.drivers import create_stored, open_driver
from reshard.runtime.on_files.formats.new_arrays import NewArray
from reshard.runtime.on_files.sidecar import (
    BLOCK,
    SIDECAR,
    ChunkSums,
    FileSums,
    SavedSums,
    list_blocks,
    list_piece_rows,
    sum_chunks,
    write_sums,
)
from reshard.runtime.on_files.writing import NewCheckpoint, PieceWrite, write_piece_runs
from reshard.types import dtypes

STORES = ("zarr", "zarr2", "orbax", "orbax3", "hdf5")
"""Formats that a library writes."""

_METADATA = (
    "zarr.json",
    ".zarray",
    ".zgroup",
    ".zattrs",
    ".zmetadata",
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "_sharding",
)


class SaveTarget(Protocol):
    """Where a save goes: `tensors` say in which pieces each array is written."""

    @property
    def tensors(self) -> Mapping[str, Stored]: ...
    def write(self, pieces: Sequence[PieceWrite]) -> None: ...
    def commit(self, error: Exception | None) -> None: ...


class RawTarget:
    """Files whose bytes are known before: the first process writes what is no element."""

    def __init__(self, folder: Path, save: str, new: NewCheckpoint, sidecar: Path, processes: Processes) -> None:
        self.tensors = new.tensors
        self._new, self._sidecar, self._processes = new, sidecar, processes
        self._parts = PartFiles(folder, save, new.files, new.last)

    def write(self, pieces: Sequence[PieceWrite]) -> None:
        """Writes this process's pieces; raises `FileError`."""
        for file, offset, head in self._new.heads if self._processes.rank == 0 else ():
            self._parts.write(file, offset, [memoryview(head)])
        write_piece_runs(pieces, self._parts.write)

    def commit(self, error: Exception | None) -> None:
        """Ends the save on all processes."""
        commit_files(self._parts, self._sidecar, self._processes, error)


class StoreTarget:
    """A store beside the path, made by the first process, which takes the place of what is there."""

    def __init__(
        self, path: Path, format: str, arrays: Mapping[str, NewArray], save: str, processes: Processes
    ) -> None:
        self._path, self._save, self._processes = path, save, processes
        self._part = path.with_name(f".{path.name}-{save}.part")
        made, error = "", None
        try:
            coded = any(new.codec is not None for new in arrays.values())
            if format == "hdf5" and processes.size > 1 and coded:
                raise FileError(
                    "HDF5 has one writer of coded chunks; from several processes leave codec out, or take zarr"
                )
            if processes.rank == 0:
                if path.exists() and path.is_dir() == (format == "hdf5"):
                    raise FileError(f"{quoted(str(path))} is no {format}; give another path, or remove it")
                if path.is_dir() and any(path.iterdir()) and not (path / SIDECAR).is_file():
                    # What others keep in it would be gone.
                    raise FileError(f"{quoted(str(path))} is a folder that no save has made; give another path")
                # Under the name of a part: nobody takes it for a store.
                made = create_stored(str(self._part), format, arrays).to_json()
        except Exception as caught:  # The libraries of formats raise what they like on a full disk.
            error = caught
            self._discard()
        raise_together(processes, error)
        self._ckpt = Checkpoint.from_json(processes.gather(made)[0])
        self._raw = format == "hdf5" and all(each.raw for stored in self._ckpt.values() for each in stored.pieces)
        # Whole shards are written at once, whole chunks where there are none.
        self.tensors: Mapping[str, Stored] = self._ckpt
        if not self._raw:
            self.tensors = {}
            for name, new in arrays.items():
                unit = new.shards or self._ckpt[name].chunks or tuple(max(1, size) for size in new.shape)
                grid = ChunkGrid(new.shape, unit, dtypes.nbytes(math.prod(unit), new.dtype))
                self.tensors[name] = Stored(name, new.dtype, new.shape, grid, unit)
        self._sums: dict[str, dict[int, int]] = {}
        self._driver = None if self._raw else open_driver(self._ckpt)

    def write(self, pieces: Sequence[PieceWrite]) -> None:
        """Writes this process's pieces; raises `FileError`."""
        if self._driver is None:
            self._write_raw(pieces)
            return
        for each in pieces:
            box = each.assemble()
            chunks = self._chunks_of(each.name)
            # Of the elements as they are here: what the library makes of them is checked when they are read.
            sums = sum_chunks(self.tensors[each.name].shape, chunks, each.piece.box, box)
            self._sums.setdefault(each.name, {}).update((number, found) for number, _, found in sums)
            self._driver.write_box(self.tensors[each.name], each.piece.box, box)
        self._driver.close()

    def _write_raw(self, pieces: Sequence[PieceWrite]) -> None:
        try:
            descriptor = os.open(self._part, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_piece_runs(pieces, lambda _, offset, buffers: write_fully(descriptor, offset, buffers))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise FileError(
                f"{quoted(str(self._path))} cannot be written: {error.strerror or error}; what was saved there before "
                f"is as it was; free some space or save elsewhere"
            ) from None

    def _chunks_of(self, name: str) -> tuple[int, ...]:
        return self._ckpt[name].chunks or tuple(max(1, size) for size in self._ckpt[name].shape)

    def commit(self, error: Exception | None) -> None:
        """Ends the save on all processes: their sums go into the sidecar, and the store takes its place."""
        try:
            raise_together(self._processes, error)
            try:
                sync_files(self._part, self._processes)
            except OSError as caught:
                error = FileError(f"{quoted(str(self._path))} cannot be brought to disk: {caught.strerror or caught}")
            raise_together(self._processes, error)
            gathered = [json.loads(each) for each in self._processes.gather(json.dumps(self._sums))]
            if self._processes.rank == 0:
                try:
                    tensors: dict[str, ChunkSums] = {}
                    for name in gathered[0].keys() | {name for each in gathered for name in each}:
                        found = {int(at): value for each in gathered for at, value in each.get(name, {}).items()}
                        values = [found[at] for at in range(len(found))]
                        tensors[name] = ChunkSums(self._chunks_of(name), np.array(values, np.uint32))
                    self._publish(tensors)
                except Exception as caught:
                    error = caught
            raise_together(self._processes, error)
        except BaseException:
            self._discard()
            raise

    def _publish(self, tensors: Mapping[str, ChunkSums]) -> None:
        """Makes the store, which is on disk, what is at the path."""
        if self._part.is_file():
            # One file, as safetensors may be: its sums are those of blocks that end where arrays begin.
            size = self._part.stat().st_size
            edges = {
                at
                for stored in self._ckpt.values()
                for each in stored.pieces
                if each.raw and each.file != NO_FILE
                for row in list_piece_rows(each, dtypes.nbytes(1, stored.dtype))
                for at in row
            }
            parts = PartFiles(self._path.parent, self._save, [NewFile(self._path.name, size, tuple(edges))], 0)
            with self._part.open("rb") as opened:
                for at in range(0, size, BLOCK):
                    parts.sums.add(0, at, opened.read(BLOCK))
            publish_files(parts, self._path.with_name(f"{self._path.name}.{SIDECAR}"), tensors)
            return
        files: dict[str, FileSums] = {}
        for folder, _, names in os.walk(self._part):
            for name in names:
                if name in _METADATA:
                    content = Path(folder, name).read_bytes()
                    starts = list_blocks(len(content), ())
                    found = [zlib.crc32(content[at : at + BLOCK]) for at in starts]
                    here = os.path.relpath(os.path.join(folder, name), self._part)
                    files[here] = FileSums(len(content), starts, np.array(found, np.uint32))
        with create_synced_file(self._part / SIDECAR) as file:
            file.write(write_sums([SavedSums(self._save, files, tensors)]))
        replace_folder(self._part, self._path)

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self._part) if self._part.is_dir() else self._part.unlink(missing_ok=True)
