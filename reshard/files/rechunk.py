"""`reshard.files.rechunk`: the arrays of a store in other chunks, within memory, by a plan that is printed before."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from reshard.errors import BudgetError, FileError, did_you_mean, name_arguments, quoted
from reshard.files.open import open as open_checkpoint
from reshard.plans.rechunk_plan import ArrayRechunk, RechunkPlan, RechunkTask
from reshard.plans.stored import Checkpoint
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.commit import OneProcess, Processes, raise_together, sync_files, sync_folder
from reshard.runtime.on_files.drivers import check_missing, create_stored, describe_stored_array, open_driver
from reshard.runtime.on_files.formats.hdf5 import read_hdf5
from reshard.runtime.on_files.formats.npy import read_npy
from reshard.runtime.on_files.formats.zarr import MOST_LISTED, read_zarr
from reshard.runtime.on_files.rechunking import BoxReader, BoxWriter, run_array
from reshard.runtime.on_files.stored_boxes import StoredReader, StoredWriter, create_npy, find_read_unit, needs_driver
from reshard.synth.options import read_budget
from reshard.synth.rechunking import plan_rechunking
from reshard.types import dtypes
from reshard.types.units import shape_text

Chunks = Sequence[int] | Mapping[str, Any]
"""Sizes for each dim; or by names of dims; or either of them by names of arrays. -1 is all of a dim."""

StoreFormat = Literal["zarr", "zarr2", "hdf5", "npy"]

_CODED = 2
"""What a coded chunk takes beside its place in the window, in chunks: its bytes as stored, and as decoded."""


T = TypeVar("T")

_PATIENCE = 7 * 24 * 3600.0
"""Seconds for which ranks wait for each other."""

_RUNS = (1 << 22, 1 << 16, 1 << 14, 1 << 12)
"""Bytes of raw elements that plans count as read together: in runs of less than a page, more is read than is wanted."""

_BATCH = 8 << 20
"""Bytes of chunks that a thread asks a library for at once: more saves no time."""


@dataclass(frozen=True)
class _NewStore:
    """What is to be made: the plan of each array, how it is cut and coded, and what is written whole of it."""

    plan: RechunkPlan
    arrays: Mapping[str, Any]
    units: Mapping[str, tuple[int, ...]]
    raw: frozenset[str]


def plan_rechunk(
    source: str | PathLike[str] | Checkpoint,
    *,
    chunks: Chunks,
    memory: int | str,
    processes: int = 1,
    format: StoreFormat | None = None,
    shards: Chunks | None = None,
    codec: str | None = "same",
) -> RechunkPlan:
    """What `rechunk` would do, from metadata alone: bytes read and written, passes, memory at the peak, seconds.

    The arguments are those of `rechunk`. Raises `BudgetError` if a chunk does not fit in `memory`.
    """
    ckpt = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    return _plan_store(ckpt, chunks, memory, processes, format or _find_format(ckpt), shards, codec).plan


@name_arguments
def rechunk(
    source: str | PathLike[str] | Checkpoint,
    target: str | PathLike[str],
    *,
    chunks: Chunks,
    memory: int | str,
    comm: Any = None,
    format: StoreFormat | None = None,
    shards: Chunks | None = None,
    codec: str | None = "same",
    missing: Literal["refuse", "fill"] = "refuse",
) -> RechunkPlan:
    """Writes the arrays of a store to `target` in other chunks, and returns the plan by which it did.

    `chunks` are the new ones: a size for each dim, or sizes by names of dims, for every array that has these; or
    either of them by names of arrays, whose others keep theirs. -1 is all of a dim. `memory` (bytes, or text such as
    "2GiB") is what windows, blocks and coded chunks take at most, in each process; beside it there is what Python and
    its libraries take. `format` is "zarr" (version 3), "zarr2", "hdf5" or "npy", by default that of the source.
    `shards` are files of several chunks, for zarr 3: each is written whole, by one process. `codec` is None, "zstd",
    "gzip" or "blosc". Fill values, attributes and names of dims are kept where formats have them. A chunk of zarr that
    is not there is an error, or with `missing="fill"` the fill value.

    With `comm` all its ranks call it, on one file system: each has `memory`, they share windows or blocks, and raise
    together.

    The target appears under its name when all of it is written; until then it is built beside. Raises `FileError` if
    there is something at `target` already, and `BudgetError` if a chunk does not fit in `memory`.
    """
    processes: Processes = OneProcess()
    if comm is not None:
        # Ranks wait for each other while one reads a block: however long that is, it is no fault.
        processes = import_module("reshard.mpi.files").RankProcesses(comm, _PATIENCE)
    path: str = os.path.abspath(os.path.join(target))
    folder, name = os.path.split(path)
    built = os.path.join(folder, f".{name}-{processes.gather(os.urandom(4).hex())[0]}.part")

    def prepare() -> tuple[Checkpoint, StoreFormat, _NewStore]:
        # Everything that can be refused is, before anything is made.
        ckpt = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        kind = format or _find_format(ckpt)
        store = _plan_store(ckpt, chunks, memory, processes.size, kind, shards, codec)
        if os.path.lexists(path):
            raise FileError(f"{quoted(path)} is there already; remove it, or give another target")
        coded = [name for name in store.arrays if name not in store.raw and ckpt[name].shape]
        if kind == "hdf5" and processes.size > 1 and coded:
            raise FileError(
                f"{quoted(path)}: one process writes chunks of HDF5 that are compressed, or more than {MOST_LISTED:,}, "
                f"as those of {quoted(coded[0])} are; give codec=None or larger chunks, take zarr, or leave comm= out"
            )
        check_missing(ckpt, list(store.arrays), missing)
        return ckpt, kind, store

    def make() -> None:
        # One process makes the store; the others look at it after that.
        if processes.rank == 0 and kind == "npy":
            create_npy(built, store.arrays)
        elif processes.rank == 0:
            # A zarr store that is one array has no name for it, which HDF5 wants.
            named = {name or ("data" if kind == "hdf5" else ""): new for name, new in store.arrays.items()}
            create_stored(built, kind, named, _read_group_attributes(ckpt))

    def look() -> Checkpoint:
        # All of them before one writes: half a file of another would be taken for a fault.
        readers: dict[str, Callable[[str], Checkpoint]] = {"npy": read_npy, "hdf5": read_hdf5}
        return readers.get(kind, read_zarr)(built)

    together = partial(_do_together, processes, path)
    try:
        ckpt, kind, store = together(prepare)
        together(make)
        made = together(look)
        _fill_store(ckpt, made, kind, store, processes, comm, missing)
        # All have written all that is theirs. It is on disk before it has its name.
        together(lambda: sync_files(Path(built), processes))
        together(lambda: os.rename(built, path) if processes.rank == 0 else None)
        if processes.rank == 0:
            sync_folder(Path(folder))
    finally:
        # What is there still is of a run that failed.
        if processes.rank == 0 and os.path.isdir(built):
            shutil.rmtree(built, ignore_errors=True)
        elif processes.rank == 0 and os.path.lexists(built):
            os.unlink(built)
    return store.plan


def _do_together(processes: Processes, path: str, do: Callable[[], T]) -> T:
    """What `do` returns, once all processes have done it; all raise the error of any."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = do()
    except OSError as failed:
        error = FileError(f"{quoted(path)} cannot be written ({failed.strerror or failed})")
    except Exception as failed:  # Whatever it is, the others must not go on without this process.
        error = failed
    raise_together(processes, error)
    return cast("T", result)


def _fill_store(
    ckpt: Checkpoint,
    made: Checkpoint,
    kind: StoreFormat,
    store: _NewStore,
    processes: Processes,
    comm: Any,
    missing: Literal["refuse", "fill"],
) -> None:
    """Fills the arrays of a new store, one after the other."""
    reading = open_driver(ckpt, missing) if any(needs_driver(ckpt[name]) for name in store.arrays) else None
    writing = None if kind == "npy" else open_driver(made)
    # Processes of a machine share its cores.
    threads = max(2 if processes.size == 1 else 1, min(8, (os.cpu_count() or 1) // processes.size))
    try:
        with ThreadPoolExecutor(threads) as pool:
            for name, plan in store.plan.arrays.items():
                stored, new = ckpt[name], store.arrays[name]
                driver = reading if needs_driver(stored) else None
                batches = _count_batches(plan, threads)
                reader: BoxReader = StoredReader(ckpt, stored, driver, batches[0], pool)
                # An array alone may be called otherwise there: in a .npy file as the file is.
                into = made[name if name in made else next(iter(made))]
                base = os.path.join(made.path, name, "c" if kind == "zarr" else "", "")
                raw = base if name in store.raw and kind in ("zarr", "zarr2") else ""
                writer: BoxWriter = StoredWriter(
                    made,
                    into,
                    None if name in store.raw else writing,
                    store.units[name],
                    batches[1],
                    pool,
                    raw,
                    "/" if kind == "zarr" else ".",
                )
                shared: Any = None
                if plan.dealt >= 0:
                    joined = import_module("reshard.mpi.rechunking").SharedWindow
                    shared = reader = writer = joined(comm, _PATIENCE, processes, plan, reader, writer)
                run_array(plan, numpy_dtype(new.dtype), reader, writer, f"{made.path}.spill", processes)
                if shared is not None:
                    shared.finish()
    finally:
        for each in (reading, writing):
            if each is not None:
                each.close()


def _plan_store(
    ckpt: Checkpoint,
    chunks: Chunks,
    memory: int | str,
    processes: int,
    kind: StoreFormat,
    shards: Chunks | None,
    codec: str | None,
) -> _NewStore:
    """The plan of each array, and what is made of it."""
    if kind not in ("zarr", "zarr2", "hdf5", "npy"):
        raise FileError(f"format {quoted(kind)}: give 'zarr', 'zarr2', 'hdf5' or 'npy'")
    limit = read_budget(memory, "memory")
    if limit is None:
        raise FileError("memory None: give bytes, or text such as '2GiB'")
    old = {name: describe_stored_array(ckpt, name) for name in ckpt}
    dims = {name: each.dimension_names for name, each in old.items()}
    new_chunks = _read_chunks(ckpt, dims, chunks, "chunks")
    new_shards = {} if shards is None else _read_chunks(ckpt, dims, shards, "shards")
    arrays: dict[str, Any] = {}
    plans: dict[str, ArrayRechunk] = {}
    units: dict[str, tuple[int, ...]] = {}
    raw: set[str] = set()
    for name, each in old.items():
        stored, itemsize = ckpt[name], dtypes.nbytes(1, each.dtype)
        # An array that `chunks` does not name keeps its chunks; one that has none becomes a single chunk.
        cut = new_chunks.get(name) or each.chunks or tuple(max(1, size) for size in each.shape)
        shard = new_shards.get(name)
        if shard is not None and any(outer % inner for outer, inner in zip(shard, cut, strict=True)):
            raise FileError(f"shards {quoted(shard)} of {quoted(name)} are not whole chunks of {cut}; give multiples")
        new_codec = each.codec if codec == "same" else codec
        if kind == "hdf5" and new_codec is not None:
            new_codec = "gzip"  # The one that every HDF5 has.
        arrays[name] = replace(each, chunks=cut, shards=shard, codec=new_codec)
        unit = shard or cut
        if kind == "npy":
            unit = find_read_unit(replace(stored, pieces=(), chunks=None), itemsize, min(1 << 16, limit // 8))
        # Raw pieces are read straight into place, and so are those of .npy written.
        coded = needs_driver(stored)
        # Of more chunks of HDF5 no list says where they lie.
        count = math.prod(-(-size // chunk) for size, chunk in zip(each.shape, cut, strict=True))
        plain = shard is None and new_codec is None and each.shape and (kind != "hdf5" or count <= MOST_LISTED)
        if kind == "npy" or plain:
            raw.add(name)
        units[name] = unit
        # Any part of raw elements can be read: of those in long runs first, in shorter ones if that moves fewer bytes.
        fits: list[ArrayRechunk] = []
        refused: BudgetError | None = None
        read_units = [find_read_unit(stored, itemsize, min(least, limit // 8)) for least in _RUNS]
        for read_unit in dict.fromkeys(read_units):
            read_buffer = _CODED * math.prod(read_unit) * itemsize if coded else 0
            write_buffer = 0 if name in raw else _CODED * math.prod(unit) * itemsize
            task = RechunkTask(stored.shape, read_unit, unit, itemsize, limit, processes, read_buffer, write_buffer)
            try:
                fits.append(plan_rechunking(task))
            except BudgetError as error:
                refused = error
        if refused is not None and not fits:
            raise refused
        plans[name] = min(fits, key=lambda plan: plan.priced_bytes)
    return _NewStore(RechunkPlan(plans), arrays, units, frozenset(raw))


def _read_chunks(
    ckpt: Checkpoint, dims: Mapping[str, Sequence[str | None] | None], given: object, what: str
) -> dict[str, tuple[int, ...]]:
    """The chunk sizes asked for, by array; arrays that `chunks` does not name are left out."""
    table = cast("Mapping[Any, Any]", given) if isinstance(given, Mapping) else None
    if table is None:
        count = len(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else -1
        asked: dict[str, object] = {name: given for name in ckpt if len(ckpt[name].shape) == count}
        if not asked:
            shapes = ", ".join(shape_text(ckpt[name].shape) for name in list(ckpt)[:3])
            raise FileError(f"{what} {quoted(cast('object', given))}: no array has so many dims (there are {shapes})")
    # By names of dims, which xarray's arrays of coordinates share: only the values tell one from the other.
    elif all(isinstance(size, int) for size in table.values()):
        named = {dim for names in dims.values() for dim in names or () if dim is not None}
        unknown = [dim for dim in table if dim not in named]
        if unknown:
            # Formats without names of dims, and those of arrays that have none.
            known = f"name one of {', '.join(sorted(named))}" if named else "no dim has a name: give a size for each"
            cure = did_you_mean(unknown[0], named) or f"; {known}"
            raise FileError(f"{what} name the dim {quoted(unknown[0])}, which no array has{cure}")
        asked = {name: given for name, names in dims.items() if set(names or ()) & set(table)}
    # By names of arrays: their values are sizes themselves.
    else:
        unknown = [name for name in table if name not in ckpt]
        if unknown:
            raise FileError(f"{what} name {quoted(unknown[0])}, which is no array{did_you_mean(unknown[0], ckpt)}")
        asked = dict(table)
    return {name: _read_asked_chunks(ckpt, name, dims[name], sizes, what) for name, sizes in asked.items()}


def _read_asked_chunks(
    ckpt: Checkpoint, name: str, dims: Sequence[str | None] | None, given: object, what: str
) -> tuple[int, ...]:
    stored = ckpt[name]
    sizes: list[Any] = list(stored.chunks or stored.shape)
    if isinstance(given, Mapping):
        for dim, size in cast("Mapping[Any, Any]", given).items():
            if dims is not None and dim in dims:
                sizes[dims.index(dim)] = size
    else:
        sizes = list(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else []
    if len(sizes) != len(stored.shape) or any(type(size) is not int or (size < 1 and size != -1) for size in sizes):
        raise FileError(
            f"{what} {quoted(cast('object', given))} of {quoted(name)}: give a size of at least 1, or -1 for all, for "
            f"each of the dims of {shape_text(stored.shape)}"
        )
    return tuple(
        max(1, whole if size == -1 else min(size, whole)) for size, whole in zip(sizes, stored.shape, strict=True)
    )


def _find_format(ckpt: Checkpoint) -> StoreFormat:
    """The format that a store of new chunks has unless another is asked for."""
    if ckpt.format == "hdf5":
        return "hdf5"
    # Stores of zarr stay of their version, since readers of version 2 alone are still about.
    version_2 = any(os.path.basename(file.path) == ".zarray" for file in ckpt.files)
    return "zarr2" if ckpt.format == "zarr" and version_2 else "zarr"


def _read_group_attributes(ckpt: Checkpoint) -> dict[str, Any] | None:
    """The attributes of a zarr store that is a group, as xarray's datasets have them."""
    for name in ("zarr.json", ".zattrs"):
        path = os.path.join(ckpt.path, name)
        if ckpt.format == "zarr" and "" not in ckpt and os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                said: Any = json.load(file)
            return said.get("attributes") if name == "zarr.json" else said
    return None


def _count_batches(plan: ArrayRechunk, threads: int) -> tuple[int, int]:
    """Chunks that a thread has decoded, or encoded, at once: as many as the plan leaves memory for."""
    # The plan counts one chunk at a time; what it leaves of the memory lets several be on their way.
    task = plan.task
    free = task.memory - plan.peak_bytes
    if plan.dealt >= 0:
        free //= 2  # The other half lets ranks exchange several chunks at a time.
    free += max(task.read_buffer, task.write_buffer)
    counts = [
        max(1, min(64, _BATCH // each, free // (threads * each))) if each else 1
        for each in (task.read_buffer, task.write_buffer)
    ]
    return counts[0], counts[1]
