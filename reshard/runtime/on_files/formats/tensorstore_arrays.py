"""Chunks that tensorstore decodes and encodes: those of zarr folders and of Orbax's key-value stores.

`key_value_store` says where the values are: files of a folder, or a database (OCDBT) in a few files. Elements go
straight into the array that is to be filled; a chunk that is not there is an error, unless its fill value is meant.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from reshard.errors import ChecksumError, FileError, quoted, shortened
from reshard.plans.stored import Box, Stored
from reshard.runtime.on_files.formats.metadata_files import box_text
from reshard.runtime.on_files.formats.new_arrays import BoxToRead, NewArray, RequestCounts
from reshard.types import dtypes

_CACHED = 1 << 24
_COUNTED = "/tensorstore/kvstore/file/"
_METADATA = {"zarr3": "zarr.json", "zarr": ".zarray"}


def import_tensorstore() -> Any:
    """The library; raises `FileError` where it is not installed."""
    try:
        import tensorstore
    except ImportError as error:
        raise FileError(
            f"these chunks are decoded by tensorstore, which cannot be imported ({error}); "
            "pip install tensorstore ml_dtypes"
        ) from None
    return tensorstore


def make_context(library: Any) -> Any:
    """What is kept and waited for.

    No decoded chunk is cached, since each is read once; nodes of a database are, since every chunk asks for them. Files
    are not synced one by one: who writes a store syncs it when it is whole, before it gets its name.
    """
    return library.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#nodes": {"total_bytes_limit": _CACHED},
            "file_io_sync": False,
            # Files of chunks have one writer each; processes that write one database take turns at its manifest.
            "file_io_locking": {"mode": "none"},
            "file_io_locking#manifest": {"mode": "os"},
        }
    )


def locate_store(path: str, *, database: bool) -> dict[str, Any]:
    """tensorstore's name of the values below a path: those of a database, or files."""
    folder = {"driver": "file", "path": path.rstrip("/") + "/"}
    if database:
        folder["file_io_locking"] = "file_io_locking#manifest"
    return {"driver": "ocdbt", "base": folder, "cache_pool": "cache_pool#nodes"} if database else folder


def create_zarr(path: str, tensors: Mapping[str, NewArray], version: int, *, database: bool = False) -> None:
    """Makes arrays of zarr 2 or 3 below a path, without chunks, in folders or in a database."""
    library = import_tensorstore()
    context = make_context(library)
    for name, new in tensors.items():
        kept = locate_store(path, database=database)
        kept["path"] = kept.get("path", "") + (f"{name}/" if name else "")
        metadata = _spell_version_3(new) if version == 3 else _spell_version_2(new)
        spec = {"driver": "zarr3" if version == 3 else "zarr", "kvstore": kept, "metadata": metadata}
        try:
            library.open(spec, create=True, open=False, context=context).result()
        except Exception as error:
            text = shortened(" ".join(str(error).split()), 600)
            raise FileError(f"{quoted(path)}, tensor {quoted(name)}: it cannot be made ({text})") from None


def _spell_version_3(new: NewArray) -> dict[str, Any]:
    """`zarr.json` of a new array."""
    chunks = new.chunks or tuple(max(1, size) for size in new.shape)
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    # Single bytes have no order.
    if dtypes.bits(new.dtype) == 8:
        codecs = [{"name": "bytes"}]
    settings: dict[str, dict[str, Any]] = {
        "zstd": {"level": 1, "checksum": True},
        "gzip": {"level": 1},
        "blosc": {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": dtypes.bits(new.dtype) // 8},
    }
    if new.codec is not None:
        if new.codec == "blosc":
            settings["blosc"]["blocksize"] = 0
        # The library judges a codec that is not known here.
        codecs.append({"name": new.codec, "configuration": settings.get(new.codec, {})})
    if new.shards is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inside = {"chunk_shape": list(chunks), "codecs": codecs, "index_codecs": index, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": inside}]
    metadata: dict[str, Any] = {
        "shape": list(new.shape),
        "data_type": new.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(new.shards or chunks)}},
        "codecs": codecs,
    }
    extra = {"fill_value": new.fill, "attributes": new.attributes, "dimension_names": new.dimension_names}
    return metadata | {key: value for key, value in extra.items() if value is not None}


def _spell_version_2(new: NewArray) -> dict[str, Any]:
    """`.zarray` of a new array."""
    if new.shards is not None:
        raise FileError("zarr 2 has no shards; leave them out, or take zarr 3")
    codecs = {None: None, "zstd": {"id": "zstd", "level": 1}, "gzip": {"id": "gzip", "level": 1}}
    codecs["zlib"] = {"id": "zlib", "level": 1}
    codecs["blosc"] = {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 0}
    # Version 2 has numpy's codes; of what numpy lacks, tensorstore takes the name.
    plain = re.fullmatch("(bool|int|uint|float|complex)(8|16|32|64|128)?", new.dtype)
    size = dtypes.bits(new.dtype) // 8
    code = new.dtype if plain is None else f"{'|' if size == 1 else '<'}{new.dtype[0]}{size}"
    return {
        "shape": list(new.shape),
        "chunks": list(new.chunks or (max(1, size) for size in new.shape)),
        "dtype": code,
        "compressor": codecs.get(new.codec, {"id": new.codec}),
        "fill_value": new.fill,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }


class TensorStoreDriver:
    """Reads and writes boxes of whole chunks; threads may share it.

    `fill` reads missing chunks as the fill value. `store` is what `locate_store` gives for the checkpoint's path.
    """

    def __init__(self, path: str, store: Mapping[str, Any], *, fill: bool) -> None:
        self._library = import_tensorstore()
        self._path, self._store, self._fill = path, dict(store), fill
        self._context = make_context(self._library)
        self._opened: dict[str, Any] = {}
        self._values: Any = None
        self._driver = "zarr3"
        self._lock = threading.Lock()
        self._before = self._count_all()

    def start_boxes(self, parts: Sequence[BoxToRead]) -> Callable[[], None]:
        """Begins to read boxes into arrays: a shard's chunks in one request, decoded side by side."""
        self._open_arrays([stored for stored, _, _ in parts])
        batch, reading = self._library.Batch(), list[Any]()
        for stored, box, out in parts:
            store = self._opened[stored.name]
            # Into the caller's memory: no array of the whole box beside it.
            into = self._library.array(out.view(store.dtype.numpy_dtype), copy=False, write=True)
            reading.append(into.write(self._select_box(store, box), batch=batch))
        batch.submit()

        def wait() -> None:
            failed: FileError | None = None
            for (stored, box, _), each in zip(parts, reading, strict=True):
                try:
                    each.result()
                except Exception as error:  # tensorstore raises ValueError, RuntimeError and others, by its files.
                    what = f"elements {box_text(box)} cannot be read"
                    failed = failed or self._explain_failure(error, stored, what)
            if failed is not None:
                raise failed

        return wait

    def write_box(self, stored: Stored, box: Box, data: NDArray[Any]) -> None:
        """Writes the elements of a box; who writes the other chunks may do so at the same time."""
        self._open_arrays([stored])
        store = self._opened[stored.name]
        try:
            self._select_box(store, box).write(data.view(store.dtype.numpy_dtype)).result()
        except Exception as error:
            raise self._explain_failure(error, stored, f"elements {box_text(box)} cannot be written") from None

    def read_counts(self) -> RequestCounts:
        """What tensorstore has read in this process since this driver was made."""
        now = self._count_all()
        return RequestCounts(now.bytes - self._before.bytes, now.requests - self._before.requests)

    def close(self) -> None:
        """Lets go of what was opened."""
        self._opened.clear()

    def _open_arrays(self, tensors: Sequence[Stored]) -> None:
        """Opens arrays that are not open yet: all at once, as on a slow store each request waits."""
        with self._lock:
            new = {stored.name: stored for stored in tensors if stored.name not in self._opened}
            found: dict[str, tuple[str, bytes]] = {}
            opening: dict[str, Any] = {}
            stored = tensors[0]
            try:
                if self._values is None:
                    self._values = self._library.KvStore.open(self._store, context=self._context).result()
                # Arrays of a store are usually of one version, that of the last one.
                for driver in sorted(_METADATA, key=lambda name: name != self._driver):
                    left = [name for name in new if name not in found]
                    reading = [self._values.read(f"{name}/{_METADATA[driver]}".lstrip("/")) for name in left]
                    for name, each in zip(left, reading, strict=True):
                        stored, said = new[name], each.result()
                        if said.state == "value":
                            self._driver, found[name] = driver, (driver, said.value)
                for name in new:
                    stored = new[name]
                    driver, text = found.get(name, (self._driver, b"{}"))
                    spec = {
                        "driver": driver,
                        "kvstore": {**self._store, "path": self._store.get("path", "") + (f"{name}/" if name else "")},
                        "metadata": json.loads(text),
                        "fill_missing_data_reads": self._fill,
                        "store_data_equal_to_fill_value": True,
                    }
                    # They were read just now: on a slow store a second read would cost as much as a chunk.
                    how = {"open": True, "assume_metadata": True, "context": self._context}
                    opening[name] = self._library.open(spec, **how)
                for name, stored in new.items():
                    opened = opening[name].result()
                    if tuple(opened.shape) != stored.shape or opened.dtype.name != stored.dtype:
                        raise FileError(
                            f"{quoted(self._path)}, tensor {quoted(name)}: it is {opened.dtype.name} of shape "
                            f"{tuple(opened.shape)} now, and was {stored.dtype} of shape {stored.shape}; open it again"
                        )
                    self._opened[name] = opened
            except FileError:
                raise
            except Exception as error:
                raise self._explain_failure(error, stored, "its array cannot be opened") from None

    def _select_box(self, store: Any, box: Box) -> Any:
        # tensorstore keeps the indices of a part; those of the memory begin at 0.
        part = store[tuple(slice(start, stop) for start, stop in box)]
        return part[self._library.d[:].translate_to[0]] if box else part

    def _count_all(self) -> RequestCounts:
        metrics = self._library.experimental_collect_matching_metrics(_COUNTED)
        found = {
            each["name"].removeprefix(_COUNTED): sum(v.get("value", 0) for v in each["values"]) for each in metrics
        }
        return RequestCounts(int(found.get("bytes_read", 0)), int(found.get("batch_read", found.get("read", 0))))

    def _explain_failure(self, error: Exception, stored: Stored, what: str) -> FileError:
        text = " ".join(str(error).split())
        # Its errors have no classes for what went wrong, only words.
        kind = ChecksumError if "CRC" in text or "hecksum" in text else FileError
        cure = "; give missing='fill' if the fill value is meant" if "NOT_FOUND" in text else "; restore the files"
        return kind(f"{quoted(self._path)}, tensor {quoted(stored.name)}: {what} ({shortened(text, 600)}){cure}")
