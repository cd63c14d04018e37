"""`reshard.files.save` and `start`: tiles into files, each element once, all of them or none.

    what is given                                    who has which tile
    {name: array}                                    this process has all of it
    {name: {device: tile}}, {name: Layout}           this process has all devices
    {name: tile}, {name: Layout}, comm=              the device ids of layouts are ranks; DistArrays bring their own
    {name: jax.Array}                                shardings say it; processes are those of jax.distributed

All of these become layouts, the tiles of this process by device, and the processes that save together
(`commit.Processes`); from there on all saves are one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import AgreementError, FileError, LayoutError, name_arguments, quoted, shortened
from reshard.lower.to_files.file_writes import LEAST, count_run_bytes, has_whole_chunks, list_file_writes
from reshard.plans.stored import Stored
from reshard.runtime.numpy_tiles import as_array, in_native_order, with_padding
from reshard.runtime.on_files.commit import OneProcess, Processes, raise_together, remove_remains
from reshard.runtime.on_files.formats.new_arrays import NewArray
from reshard.runtime.on_files.save_targets import STORES, RawTarget, SaveTarget, StoreTarget
from reshard.runtime.on_files.sidecar import SIDECAR
from reshard.runtime.on_files.writing import (
    PieceWrite,
    give_back_memory,
    hold_piece_writes,
    lay_out_safetensors,
    list_piece_writes,
)
from reshard.synth.reading import ReadOptions, choose_as_read
from reshard.types.dtypes import canonical
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.move import Move
from reshard.types.units import parse_bytes

Array = NDArray[Any]
Tree = Mapping[str, Any]

PATIENCE = 600.0
"""Seconds that a process waits for the others: some have more to write, or slower disks."""

# Endings of what is not written are formats that are refused below.
_FORMAT_OF = {".zarr": "zarr", ".h5": "hdf5", ".hdf5": "hdf5", ".pt": "pt", ".pth": "pth", ".npz": "npz", ".npy": "npy"}

SHORT_RUN = 64 << 10
"""Bytes of a run below which ranks exchange what they hold before they write."""


class HeldArrays(NamedTuple):
    """What is saved: layouts by name, this process's tiles by name and device, and who else saves."""

    layouts: dict[str, Layout]
    tiles: dict[str, dict[int, Array]]
    processes: Processes
    process_of: dict[int, int] | None


@name_arguments
def save(
    path: str | PathLike[str],
    tree: Tree,
    layouts: Any = None,
    *,
    comm: Any = None,
    format: str | None = None,
    shards: int | str = "4GiB",
    chunks: Mapping[str, Sequence[int]] | None = None,
    codec: str | None = None,
    limit: float = PATIENCE,
) -> None:
    """Writes a tree of arrays as a checkpoint; all processes that hold some of it call it together.

    A checkpoint that is at `path` already is replaced in one step, once the new one is on disk, and is whole after a
    save that fails or is killed. Every process raises what one of them meets, such as a full disk.

    - `layouts` are those of tiles, by the names of `tree`, or one for all. Arrays that one process holds need none.
    - `format` is "safetensors": a folder with files of at most `shards` bytes and an index, or one file, if the path
      ends in `.safetensors`; "zarr" (version 3), "zarr2", "orbax", "orbax3" (folders), or "hdf5" (a file). Without it,
      a path that ends in `.zarr` is zarr, and one in `.h5` or `.hdf5` HDF5.
    - `chunks` are the shapes of chunks, by name, of formats that have any: by default the tiles of the layout. `codec`
      is None, "zstd" or "gzip", as the format has it.
    - `limit` is how many seconds a process waits for the others.

    >>> import tempfile, reshard as rs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rs.files.save(folder, {"w": np.arange(6.0).reshape(2, 3)})
    ...     print(rs.files.open(folder)["w"].shape)
    (2, 3)
    """
    options = _Options(format, shards, chunks or {}, codec)
    _begin_save(path, tree, layouts, comm, options, limit, hold=False).wait()


def start(
    path: str | PathLike[str],
    tree: Tree,
    layouts: Any = None,
    *,
    comm: Any = None,
    format: str | None = None,
    shards: int | str = "4GiB",
    chunks: Mapping[str, Sequence[int]] | None = None,
    codec: str | None = None,
    limit: float = PATIENCE,
) -> PendingSave:
    """Begins a `save`: returns once what this process writes has been copied, so that the arrays may be changed.

    A thread writes meanwhile. `wait()`, which all processes call, ends the save: before that the checkpoint that was
    there stays. The memory of the copies is kept for the next save.
    """
    options = _Options(format, shards, chunks or {}, codec)
    return _begin_save(path, tree, layouts, comm, options, limit, hold=True)


class PendingSave:
    """A save that has begun; `wait` ends it."""

    def __init__(self, target: SaveTarget, pieces: Sequence[PieceWrite], memory: Array | None) -> None:
        self._target, self._pieces, self._memory = target, pieces, memory
        self._error: Exception | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._write_all, name="reshard save", daemon=True)
        # A save that nobody else works beside needs no thread.
        if memory is not None:
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this process has written all that it writes, so that `wait` waits for others alone."""
        return self._ended or (self._memory is not None and not self._thread.is_alive())

    def wait(self) -> None:
        """Makes the save the checkpoint that is there, or raises `FileError` on all processes and leaves the old one.

        All processes call it; a second call does nothing.
        """
        if self._ended:
            return
        self._ended = True
        if self._memory is None:
            self._write_all()
        else:
            self._thread.join()
            give_back_memory(self._memory)
        self._pieces = ()
        self._target.commit(self._error)

    def _write_all(self) -> None:
        try:
            self._target.write(self._pieces)
        except Exception as error:  # All processes hear of it when they wait.
            self._error = error


class _Options(NamedTuple):
    """What a caller asks for beside path, arrays and processes."""

    format: str | None
    shards: int | str
    chunks: Mapping[str, Sequence[int]]
    codec: str | None


class _Request(NamedTuple):
    """What a save is to do, as one process reads its arguments; `text` must be the same on all."""

    held: HeldArrays
    target: Path
    is_file: bool
    arrays: dict[str, NewArray]
    """What is made of each array: dtype, shape and chunks."""
    most: int
    text: str


def _read_request(path: str | PathLike[str], held: HeldArrays, options: _Options) -> _Request:
    """The arguments of a save, checked."""
    format, shards, chunks, codec = options
    target = Path(os.path.abspath(path))
    unknown = [name for name in chunks if name not in held.layouts]
    if unknown:
        raise FileError(f"chunks name {quoted(unknown)}, which the tree has not")
    if format != "safetensors" and format not in STORES:
        raise FileError(f"format {quoted(format)} cannot be written; give safetensors or one of {', '.join(STORES)}")
    if format == "safetensors" and (chunks or codec):
        raise FileError("safetensors has neither chunks nor codecs; leave them out, or save to zarr")
    arrays: dict[str, NewArray] = {}
    for name, layout in held.layouts.items():
        cut = tuple(chunks[name]) if name in chunks else layout.tile_shape
        if len(cut) != len(layout.shape) or not all(type(size) is int and size > 0 for size in cut if name in chunks):
            raise FileError(f"chunks of {quoted(name)} are {quoted(cut)}; give {len(layout.shape)} sizes of at least 1")
        # HDF5 without chunks is one run of elements, which several processes can write.
        plain = format == "hdf5" and codec is None and name not in chunks
        arrays[name] = NewArray(layout.dtype, layout.shape, None if plain or not all(cut) else cut, codec=codec)
    is_file = format == "hdf5" or (format == "safetensors" and target.name.endswith(".safetensors"))
    most = shards if isinstance(shards, int) else parse_bytes(shards)
    described = [(name, str(layout), repr(layout.mesh), str(arrays[name])) for name, layout in held.layouts.items()]
    return _Request(held, target, is_file, arrays, most, json.dumps([str(target), format, most, described]))


def _begin_save(
    path: str | PathLike[str], tree: Tree, layouts: Any, comm: Any, options: _Options, limit: float, hold: bool
) -> PendingSave:
    """What `save` and `start` have in common: all processes agree, and this one knows what it writes."""
    options = options._replace(format=options.format or _FORMAT_OF.get(Path(str(path)).suffix, "safetensors"))
    processes = find_processes(tree, comm, limit)
    request: _Request | None = None
    error: Exception | None = None
    try:
        request = _read_request(path, hold_arrays(tree, layouts, comm, processes), options)
        in_store = options.format in STORES
        folder = request.target.parent if request.is_file or in_store else request.target
        beside = f"{request.target.name}.{SIDECAR}" if request.is_file or in_store else SIDECAR
        # Before the others open files there: they wait for this one below.
        if processes.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            remove_remains(folder, folder / beside, None, ())
    except OSError as caught:
        error = FileError(f"cannot save to {quoted(path)}: {caught.strerror or caught}; give another path")
    except Exception as caught:  # The others wait: whatever it is, all raise it.
        error = caught
    raise_together(processes, error)
    assert request is not None
    held, target = request.held, request.target
    # Who asks for the same thing gives the same digest; the id of the save is the first process's.
    digest = hashlib.sha256(request.text.encode()).hexdigest()
    gathered = [json.loads(each) for each in processes.gather(json.dumps([digest, secrets.token_hex(8)]))]
    other = next((rank for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]), None)
    if other is not None:
        raise AgreementError(
            f"processes 0 and {other} save different things, so nothing is saved: names, layouts, dtypes, path and "
            f"format must be alike; process {processes.rank} asks for {shortened(request.text)}"
        )
    # Names of files carry it, so that no save writes to what another one has.
    save_id: str = gathered[0][1]
    to: SaveTarget
    if options.format in STORES:
        to = StoreTarget(target, options.format, request.arrays, save_id, processes)
    else:
        kinds = {name: (new.dtype, new.shape) for name, new in request.arrays.items()}
        alone = target.name if request.is_file else None
        new = lay_out_safetensors(kinds, request.most, save_id, alone)
        folder = target.parent if alone else target
        sidecar = folder / (f"{alone}.{SIDECAR}" if alone else SIDECAR)
        to = RawTarget(folder, save_id, new, sidecar, processes)
    try:
        held = _move_to_written(held, to.tensors, hold)
        writes = list_file_writes(to.tensors, held.layouts, held.process_of, processes.rank)
        pieces = list_piece_writes(writes, to.tensors, held.tiles)
        return PendingSave(to, *(hold_piece_writes(pieces) if hold else (pieces, None)))
    except Exception as caught:
        # The others may have gone on: they hear of it where the save ends, and its parts go.
        to.commit(caught)
        raise


def _move_to_written(held: HeldArrays, tensors: Mapping[str, Stored], hold: bool) -> HeldArrays:
    """Arrays in layouts that can be written: where no process has whole chunks, or runs in a file are short.

    What is written behind the caller's work moves only where it must.
    """
    if held.process_of is None:
        return held
    comm = getattr(held.processes, "comm", None)
    moved: dict[str, Layout] = {}
    for name, layout in held.layouts.items():
        stored = tensors[name]
        if stored.pieces and not stored.pieces[0].raw:
            must = not has_whole_chunks(stored, layout, held.process_of)
        else:
            must = not hold and comm is not None and stored.nbytes > LEAST and count_run_bytes(layout) < SHORT_RUN
        if must:
            move = Move(stored.as_stored, layout)
            moved[name] = choose_as_read(stored, move, held.process_of, ReadOptions())
    # A layout that cannot be bettered stays.
    moved = {name: to for name, to in moved.items() if to != held.layouts[name]}
    if not moved:
        return held
    if comm is None:
        raise FileError(
            f"no process holds whole chunks of {quoted(sorted(moved))}; give chunks= that tiles are made of, or put "
            f"the arrays on a sharding whose tiles are"
        )
    # In one tree, so that small arrays share their launches.
    rank = held.processes.rank
    tiles, before = {name: held.tiles[name].get(rank) for name in moved}, {name: held.layouts[name] for name in moved}
    arrived = import_module("reshard.mpi").redistribute(tiles, before, moved, comm)
    here = {name: {} if tile is None else {rank: tile} for name, tile in arrived.items()}
    return held._replace(layouts=held.layouts | moved, tiles=held.tiles | here)


def find_processes(tree: Tree, comm: Any, limit: float) -> Processes:
    """The processes that save a tree together."""
    leaf: Any = next(iter(flatten_held_arrays(tree).values()), None)
    if comm is None and hasattr(leaf, "comm"):
        comm = leaf.comm
    if comm is not None:
        return import_module("reshard.mpi.files").RankProcesses(comm, limit)
    if hasattr(leaf, "addressable_shards"):
        return import_module("reshard.jax.agreement").JaxProcesses(limit)
    return OneProcess()


def flatten_held_arrays(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, names joined by dots; dicts whose keys are devices are leaves.

    >>> flatten_held_arrays({"a": {"b": 1, "c": {0: 2}}})
    {'a.b': 1, 'a.c': {0: 2}}
    """
    leaves: dict[str, Any] = {}
    if not isinstance(tree, Mapping):
        raise FileError(f"the tree is {quoted(tree)}; give a dict of arrays by name")
    for name, value in cast("Mapping[Any, Any]", tree).items():
        # Keys that are devices are met one level further down.
        if type(name) is not str:
            raise FileError(f"the tree has the name {quoted(name)}; names are text")
        if isinstance(value, Mapping) and value and all(type(key) is str for key in cast("Mapping[Any, Any]", value)):
            leaves |= flatten_held_arrays(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def hold_arrays(tree: Tree, layouts: Any, comm: Any, processes: Processes) -> HeldArrays:
    """A tree as layouts and tiles; raises `FileError` or `LayoutError` for what does not fit."""
    leaves = flatten_held_arrays(tree)
    given = {name: layouts for name in leaves} if isinstance(layouts, Layout) else flatten_held_arrays(layouts or {})
    unknown = [name for name in given if name not in leaves]
    if unknown:
        raise FileError(f"layouts name {quoted(unknown)}, which the tree has not")
    held = HeldArrays({}, {}, processes, None if processes.size == 1 else {})
    for name, leaf in leaves.items():
        # What an array says itself comes before what is given beside it.
        layout = given.get(name)
        if hasattr(leaf, "addressable_shards"):
            layout, tiles, process_of = import_module("reshard.jax.saving").tiles_of_array(leaf)
        elif comm is not None or hasattr(leaf, "comm"):
            layout, tiles, process_of = import_module("reshard.mpi.files").tiles_of_rank(name, leaf, layout, processes)
        else:
            layout, tiles, process_of = _tiles_of_leaf(name, leaf, layout)
        if layout.partial:
            raise LayoutError(f"tensor {quoted(name)} is {layout}, a sum; finish it before it is saved")
        held.layouts[name] = layout
        held.tiles[name] = {device: with_padding(layout, device, tile) for device, tile in tiles.items()}
        if held.process_of is not None:
            held.process_of.update(process_of)
    return held


def _tiles_of_leaf(name: str, leaf: Any, layout: Layout | None) -> tuple[Layout, dict[int, Array], dict[int, int]]:
    """Tiles of one process: a dict by device with its layout, or a whole array."""
    if not isinstance(leaf, Mapping):
        array = in_native_order(np.asarray(leaf))
        whole = Layout.tiled(Mesh(), array.shape, canonical(array.dtype), [[] for _ in array.shape])
        if layout is not None and (layout.shape, layout.dtype) != (whole.shape, whole.dtype):
            raise LayoutError(f"tensor {quoted(name)} is {whole}, and its layout {layout}")
        return whole, {0: array}, {}
    if layout is None:
        raise FileError(f"tensor {quoted(name)} is tiles by device without a layout; give layouts={{name: Layout}}")
    given = cast("Mapping[int, Any]", leaf)
    missing = [device for device in layout.mesh.devices if device not in given]
    if missing:
        raise FileError(f"tensor {quoted(name)} has no tile for devices {missing[:8]} of {layout} on {layout.mesh}")
    tiles: dict[int, Array] = {}
    for device in layout.mesh.devices:
        tile = in_native_order(as_array(device, given[device], layout.tile_shape, layout.tile_shape_of(device)))
        if tile.shape not in (layout.tile_shape, layout.tile_shape_of(device)) or canonical(tile.dtype) != layout.dtype:
            raise LayoutError(
                f"tensor {quoted(name)}: device {device}'s tile is {tile.dtype} of shape {tile.shape}, and {layout} "
                f"has {layout.dtype} tiles of {layout.tile_shape}"
            )
        tiles[device] = tile
    return layout, tiles, {}
