"""HDF5: datasets of one file, by h5py.

    dataset                              pieces
    contiguous                           one raw piece, at its offset in the file
    chunked, no filters                  a raw piece a chunk, but for those that the shape clips in an inner dim
    chunked, gzip, shuffle, ...          coded: h5py decodes a chunk whole
    big-endian, compact, virtual         coded by h5py, in runs of rows

A dataset may lie in another file, in parts of others (virtual), or in chunks whose filter is a library to be loaded by
its number. Files outside the folder are refused, and so is any filter that HDF5 has not built in: nothing that a file
says makes code run. Links to other files are not followed.

HDF5 knows no element types of machine learning: bfloat16 and such are opaque bytes there, and the attribute
"reshard.dtype", which `create_hdf5` writes, says what they are. Without it they are no numbers, and left out.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.errors import ChecksumError, FileError, LayoutError, ReshardError, quoted, shortened
from reshard.plans.stored import NO_FILE, Box, Checkpoint, ChunkGrid, Stored, StoredFile, StoredPiece
from reshard.runtime.on_files.formats.metadata_files import box_text, file_error, open_regular, resolve_inside
from reshard.runtime.on_files.formats.new_arrays import BoxToRead, NewArray, RequestCounts
from reshard.runtime.on_files.formats.zarr import MOST_LISTED, place_uncoded
from reshard.types import dtypes

ENDINGS = (".h5", ".hdf5", ".hdf", ".he5", ".nc")

_DTYPE = "reshard.dtype"
_BUILT_IN = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
_RUN = 1 << 20  # Bytes of rows that are read in one piece where h5py has to turn them into elements.


def read_hdf5(path: str) -> Checkpoint:
    """The datasets of a file that hold numbers, from its metadata; a folder stands for the only such file in it."""
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(ENDINGS))
        if len(names) != 1:
            raise file_error(path, f"has {len(names)} HDF5 files; give the path of one")
        path = os.path.join(path, names[0])
    with open_regular(path) as opened:
        files = [opened.identity]
    tensors: dict[str, Stored] = {}
    with _OpenedHdf5(path) as file:
        library = file.library
        found: list[tuple[str, Any]] = []

        def keep_item(name: str, item: Any) -> None:
            found.append((name, item))

        file.data.visititems_links(keep_item)
        file.data.visititems(keep_item)
        for name, item in found:
            if isinstance(item, library.ExternalLink):
                # Only checked: what is in another file is not of this checkpoint.
                resolve_inside(os.path.dirname(os.path.abspath(path)), item.filename, path)
            if isinstance(item, library.Dataset):
                stored = _place_dataset(library, path, name, item, files)
                if stored is not None:
                    tensors[name] = stored
    return Checkpoint(path, "hdf5", tuple(files), tensors)


def create_hdf5(path: str, tensors: Mapping[str, NewArray]) -> None:
    """Makes a file with datasets that are all allocated, so that raw pieces can be written by offset."""
    with _OpenedHdf5(path, "w") as file:
        library = file.library
        for name, new in tensors.items():
            settings = library.h5p.create(library.h5p.DATASET_CREATE)
            if new.codec not in (None, "gzip"):
                raise file_error(path, f"cannot have the codec {quoted(new.codec)}; HDF5 has 'gzip'", tensor=name)
            if new.chunks is not None and new.shape:
                settings.set_chunk(new.chunks)
            if new.codec == "gzip":
                settings.set_shuffle()
                settings.set_deflate(1)
            else:
                # Space for all elements now, and no fill values in it.
                settings.set_alloc_time(library.h5d.ALLOC_TIME_EARLY)
                settings.set_fill_time(library.h5d.FILL_TIME_NEVER)
            settings_of_links = library.h5p.create(library.h5p.LINK_CREATE)
            settings_of_links.set_create_intermediate_group(True)
            known = np.dtype(_dtype_in_file(new.dtype))
            space = library.h5s.create_simple(new.shape) if new.shape else library.h5s.create(library.h5s.SCALAR)
            made = library.h5d.create(
                file.data.id,
                name.encode(),
                library.h5t.py_create(known, logical=True),
                space,
                settings,
                settings_of_links,
            )
            data = library.Dataset(made)
            if known.kind == "V":
                data.attrs[_DTYPE] = new.dtype
            for key, value in (new.attributes or {}).items():
                data.attrs[key] = value


def read_hdf5_attributes(path: str, name: str) -> dict[str, Any]:
    """The attributes of a dataset that are numbers or text, as JSON would have them."""
    found: dict[str, Any] = {}
    with _OpenedHdf5(path) as file:
        for key, value in file.data[name].attrs.items():
            plain: Any = value.tolist() if hasattr(value, "tolist") else value
            # Those with which HDF5 binds datasets together hold references.
            if isinstance(plain, str | int | float | bool) and key != _DTYPE:
                found[key] = plain
    return found


class Hdf5Driver:
    """Reads and writes boxes of datasets. HDF5 does one thing at a time, and one process writes a file."""

    def __init__(self, path: str, *, fill: bool) -> None:
        self._path, self._fill = path, fill
        self._lock = threading.Lock()
        self._file: _OpenedHdf5 | None = None
        self._writes = False
        self._bytes = self._requests = 0

    def start_boxes(self, parts: Sequence[BoxToRead]) -> Callable[[], None]:
        """What fills arrays with the elements of boxes: HDF5 does nothing beside it."""
        return functools.partial(self._read_boxes, parts)

    def _read_boxes(self, parts: Sequence[BoxToRead]) -> None:
        for stored, box, out in parts:
            with self._lock:
                try:
                    self._read_box(self._open_file(writes=False)[stored.name], box, out)
                except Exception as error:  # h5py raises OSError, KeyError, RuntimeError and others.
                    raise self._explain_failure(error, stored, box, "read") from None
                chunks = stored.chunks or tuple(max(1, size) for size in stored.shape)
                counts = [-(-size // chunk) for size, chunk in zip(stored.shape, chunks, strict=True)]
                along = [range(a // chunk, -(-b // chunk)) for (a, b), chunk in zip(box, chunks, strict=True)]
                for at in itertools.product(*along):
                    number = functools.reduce(
                        lambda so_far, each: so_far * each[0] + each[1], zip(counts, at, strict=True), 0
                    )
                    self._bytes += stored.pieces[number].nbytes
                    self._requests += 1

    def _read_box(self, data: Any, box: Box, out: NDArray[Any]) -> None:
        # In this machine's order; then bits are copied, whatever elements `out` calls them.
        native = data.dtype if data.dtype.kind == "V" else data.dtype.newbyteorder("=")
        part = out.view(native)
        where = tuple(slice(start, stop) for start, stop in box)
        # Straight to where they go, if they lie one behind another there: no array of the whole box beside it.
        if box and part.size and part.flags.c_contiguous:
            data.read_direct(part, where)
        else:
            part[...] = data[where]

    def write_box(self, stored: Stored, box: Box, data: NDArray[Any]) -> None:
        """Writes the elements of a box."""
        with self._lock:
            try:
                dataset = self._open_file(writes=True)[stored.name]
                dataset[tuple(slice(start, stop) for start, stop in box)] = data.view(_dtype_in_file(stored.dtype))
            except Exception as error:
                raise self._explain_failure(error, stored, box, "written") from None

    def read_counts(self) -> RequestCounts:
        """Bytes of the chunks that were read, each one request."""
        return RequestCounts(self._bytes, self._requests)

    def close(self) -> None:
        """Closes the file, and brings what was written to it."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open_file(self, *, writes: bool) -> Any:
        # HDF5 opens no file twice in different ways.
        if self._file is not None and writes and not self._writes:
            self._file.close()
            self._file = None
        if self._file is None:
            self._file, self._writes = _OpenedHdf5(self._path, "r+" if writes else "r"), writes
        return self._file.data

    def _explain_failure(self, error: Exception, stored: Stored, box: Box, verb: str) -> FileError:
        if isinstance(error, FileError):
            return error
        text = shortened(" ".join(str(error).split()), 600)
        kind = ChecksumError if "hecksum" in text else FileError
        return file_error(
            self._path,
            f"elements {box_text(box)} cannot be {verb} ({text}); restore the file",
            tensor=stored.name,
            kind=kind,
        )


class _OpenedHdf5:
    """An open file, `data`, and the library that has opened it."""

    def __init__(self, path: str, mode: str = "r") -> None:
        self._path = path
        try:
            self.library: Any = import_module("h5py")
        except ImportError as error:
            raise FileError(
                f"{quoted(path)} is read by h5py, which cannot be imported ({error}); pip install h5py"
            ) from None
        try:
            # Chunks are read whole, and so not cached.
            self.data: Any = self.library.File(path, mode, rdcc_nbytes=0)
        except Exception as error:
            text = shortened(" ".join(str(error).split()), 600)
            raise file_error(path, f"cannot be opened as HDF5 ({text}); restore the file") from None

    def close(self) -> None:
        self.data.close()

    def __enter__(self) -> _OpenedHdf5:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.data.close()
        except Exception as failed:  # What was broken may not let itself be closed, either.
            error = error or failed
        # h5py raises OSError, KeyError, RuntimeError, SystemError and others for a file that is damaged inside.
        if isinstance(error, Exception) and not isinstance(error, ReshardError):
            text = shortened(" ".join(str(error).split()), 600)
            raise file_error(self._path, f"cannot be read as HDF5 ({text}); restore the file") from None


def _place_dataset(library: Any, path: str, name: str, data: Any, files: list[StoredFile]) -> Stored | None:
    """A dataset as a tensor, None if it holds no numbers; adds the files that it lies in to `files`."""
    try:
        kind = data.attrs.get(_DTYPE) if data.dtype.kind == "V" and data.dtype.names is None else data.dtype
        if kind is None or (not isinstance(kind, str) and kind.kind not in "biufc") or data.shape is None:
            return None
        dtype = dtypes.canonical(kind)
        if dtypes.bits(dtype) != 8 * data.dtype.itemsize:
            raise LayoutError(f"its elements take {data.dtype.itemsize} B, and those of {dtype} do not")
        shape = tuple(int(size) for size in data.shape)
        creation = data.id.get_create_plist()
        _check_filters(path, name, creation)
        # Numbers of odd sizes or orders look like numpy's to who asks for their dtype; the types must be the same.
        exact = library.h5t.py_create(np.dtype(data.dtype), logical=True) == data.id.get_type()
        raw = bool(exact) and data.dtype.str[0] != ">" and creation.get_nfilters() == 0
        if data.external:
            return _place_external(path, name, data, dtype, raw, files)
        if data.is_virtual:
            _check_virtual(path, name, data, set())
        elif data.chunks is not None:
            return _place_hdf5_chunks(name, data, dtype, raw)
        nbytes = dtypes.nbytes(math.prod(shape), dtype)
        offset = data.id.get_offset()
        whole: Box = tuple((0, size) for size in shape)
        # HDF5 gives space to a dataset when it is first written, and the fill value until then.
        if nbytes and not data.is_virtual and not data.id.get_storage_size():
            return Stored(name, dtype, shape, (StoredPiece(whole, NO_FILE, 0, 0, raw=False),))
        if raw and offset is not None and not data.is_virtual:
            if offset + nbytes > files[0].size:
                raise file_error(
                    path,
                    f"{nbytes} B are to lie there, but the file ends at byte {files[0].size}",
                    tensor=name,
                    offset=offset,
                )
            return Stored(name, dtype, shape, (StoredPiece(whole, 0, offset, nbytes),))
        if not shape:
            return Stored(name, dtype, shape, (StoredPiece((), NO_FILE, 0, nbytes, raw=False),))
        # h5py reads any rows: several readers can share them.
        row = dtypes.nbytes(math.prod(shape[1:]), dtype)
        chunks = (max(1, min(shape[0], _RUN // max(1, row))), *(max(1, size) for size in shape[1:]))
        return Stored(name, dtype, shape, ChunkGrid(shape, chunks, chunks[0] * row), chunks)
    except FileError:
        raise
    except Exception as error:  # h5py raises OSError, RuntimeError and others; LayoutError: an unknown dtype.
        text = shortened(" ".join(str(error).split()), 600)
        raise file_error(path, f"its metadata cannot be read ({text}); restore the file", tensor=name) from None


def _place_hdf5_chunks(name: str, data: Any, dtype: str, raw: bool) -> Stored:
    """A chunked dataset; chunks that were never written are missing, and stand for the fill value in HDF5."""
    shape, chunks = tuple(map(int, data.shape)), tuple(map(int, data.chunks))
    grid = ChunkGrid(shape, chunks, dtypes.nbytes(math.prod(chunks), dtype))
    places: dict[int, tuple[int, int, bool]] = {}
    records: list[Any] = []
    # In one walk; asking for them by number walks anew for each.
    data.id.chunk_iter(records.append)
    for record in records:
        number = 0
        for start, chunk, count in zip(record.chunk_offset, chunks, grid.counts, strict=True):
            number = number * count + start // chunk
        places[number] = (int(record.byte_offset), int(record.size), raw and int(record.size) == grid.nbytes)
    if len(grid) > MOST_LISTED:
        sizes = {number: nbytes for number, (_, nbytes, _) in places.items()}
        return Stored(name, dtype, shape, ChunkGrid(shape, chunks, grid.nbytes, sizes), chunks)
    pieces: list[StoredPiece] = []
    for number, piece in enumerate(grid):
        if number not in places:
            pieces.append(StoredPiece(piece.box, NO_FILE, 0, 0, raw=False))
            continue
        offset, nbytes, plain = places[number]
        pieces.append(
            place_uncoded(piece.box, chunks, dtype, 0, offset)
            if plain
            else StoredPiece(piece.box, 0, offset, nbytes, raw=False)
        )
    return Stored(name, dtype, shape, tuple(pieces), chunks)


def _place_external(path: str, name: str, data: Any, dtype: str, raw: bool, files: list[StoredFile]) -> Stored:
    """A dataset whose bytes lie in another file, beside this one."""
    nbytes = dtypes.nbytes(math.prod(data.shape), dtype)
    beside = [resolve_inside(os.path.dirname(os.path.abspath(path)), other, path) for other, _, _ in data.external]
    # In several files the rows may be cut anywhere, and no box is what one of them has.
    if len(beside) != 1 or not raw:
        raise file_error(path, f"lies in {len(beside)} external files; copy it into the file itself", tensor=name)
    ((_, offset, _),) = data.external
    with open_regular(beside[0]) as opened:
        if offset + nbytes > opened.size:
            raise file_error(
                beside[0],
                f"{nbytes} B are to lie there, but it ends at byte {opened.size}; restore it",
                tensor=name,
                offset=offset,
            )
        files.append(opened.identity)
    whole = tuple((0, int(size)) for size in data.shape)
    return Stored(name, dtype, tuple(map(int, data.shape)), (StoredPiece(whole, len(files) - 1, offset, nbytes),))


def _check_filters(path: str, name: str, creation: Any) -> None:
    """Refuses filters that HDF5 would look for as a library and load."""
    numbers = [int(creation.get_filter(at)[0]) for at in range(creation.get_nfilters())]
    foreign = [number for number in numbers if number not in _BUILT_IN]
    if foreign:
        raise file_error(
            path, f"its filter {foreign[0]} is a plugin, and none is loaded; write it again with gzip", tensor=name
        )


def _check_virtual(path: str, name: str, data: Any, seen: set[tuple[str, str]]) -> None:
    """Refuses virtual datasets of which a part lies outside the folder, is not there, or goes through a plugin."""
    if (os.path.realpath(path), name) in seen:
        raise file_error(path, "is virtual, and a part of itself; copy it into one file", tensor=name)
    seen = seen | {(os.path.realpath(path), name)}
    for source in data.virtual_sources():
        # A pattern of names goes on for as many files as there are.
        if "%" in source.file_name:
            raise file_error(path, "is virtual, with numbered sources; copy it into one file", tensor=name)
        other = path
        if source.file_name != ".":
            other = resolve_inside(os.path.dirname(os.path.abspath(path)), source.file_name, path)
            with open_regular(other):  # A source that is not there would be read as the fill value.
                pass
        with _OpenedHdf5(other) as file:
            part = file.data.get(source.dset_name)
            if not isinstance(part, file.library.Dataset):
                raise file_error(other, "is not there, and a virtual dataset has it as a part", tensor=source.dset_name)
            _check_filters(other, source.dset_name, part.id.get_create_plist())
            if part.external:
                raise file_error(other, "lies in external files; copy it into one file", tensor=source.dset_name)
            if part.is_virtual:
                _check_virtual(other, source.dset_name.lstrip("/"), part, seen)


def _dtype_in_file(dtype: str) -> str:
    """What HDF5 has of a dtype: its own number, or opaque bytes.

    >>> _dtype_in_file("float32"), _dtype_in_file("bfloat16")
    ('float32', 'V2')
    """
    plain = dtype.startswith(("int", "uint", "bool", "complex")) or dtype in ("float16", "float32", "float64")
    return dtype if plain else f"V{dtypes.bits(dtype) // 8}"
