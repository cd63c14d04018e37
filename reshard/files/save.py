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
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import AgreementError, FileError, LayoutError, quoted, shortened
from reshard.lower.to_files.file_writes import list_file_writes
from reshard.runtime.numpy_tiles import as_array, in_native_order, with_padding
from reshard.runtime.on_files.commit import (
    OneProcess,
    PartFiles,
    Processes,
    commit_files,
    new_save_id,
    raise_together,
    remove_remains,
)
from reshard.runtime.on_files.sidecar import SIDECAR
from reshard.runtime.on_files.writing import (
    hold_tile_blocks,
    lay_out_safetensors,
    list_tile_blocks,
    write_tile_blocks,
)
from reshard.types.dtypes import canonical
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.units import parse_bytes

Array = NDArray[Any]
Tree = Mapping[str, Any]

PATIENCE = 600.0
"""Seconds that a process waits for the others: some have more to write, or slower disks."""


class HeldArrays(NamedTuple):
    """What is saved: layouts by name, this process's tiles by name and device, and who else saves."""

    layouts: dict[str, Layout]
    tiles: dict[str, dict[int, Array]]
    processes: Processes
    process_of: dict[int, int] | None


def save(
    path: str | PathLike[str],
    tree: Tree,
    layouts: Any = None,
    *,
    comm: Any = None,
    format: str = "safetensors",
    shards: int | str = "4GiB",
    as_layouts: Mapping[str, Layout] | None = None,
    limit: float = PATIENCE,
) -> None:
    """Writes a tree of arrays as a checkpoint; all processes that hold some of it call it together.

    A checkpoint that is at `path` already is replaced in one step, once the new one is on disk, and is whole after a
    save that fails or is killed. Every process raises what one of them meets, such as a full disk.

    - `layouts` are those of tiles, by the names of `tree`, or one for all. Arrays that one process holds need none.
    - `format` is "safetensors": a folder with files of at most `shards` bytes and an index, or one file, if the path
      ends in `.safetensors`.
    - `as_layouts` are the layouts to save in, by name: their dtype is that of the file.
    - `limit` is how many seconds a process waits for the others.

    >>> import tempfile, reshard as rs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rs.files.save(folder, {"w": np.arange(6.0).reshape(2, 3)})
    ...     print(rs.files.open(folder)["w"].shape)
    (2, 3)
    """
    _begin_save(path, tree, layouts, comm, format, shards, as_layouts, limit, hold=False).wait()


def start(
    path: str | PathLike[str],
    tree: Tree,
    layouts: Any = None,
    *,
    comm: Any = None,
    format: str = "safetensors",
    shards: int | str = "4GiB",
    as_layouts: Mapping[str, Layout] | None = None,
    limit: float = PATIENCE,
) -> PendingSave:
    """Begins a `save`: returns once what this process writes has been copied, so that the arrays may be changed.

    A thread writes meanwhile. `wait()`, which all processes call, ends the save: before that the checkpoint that was
    there stays. The memory of the copies is kept for the next save.
    """
    return _begin_save(path, tree, layouts, comm, format, shards, as_layouts, limit, hold=True)


@dataclass
class PendingSave:
    """A save that has begun; `wait` ends it."""

    _write: Callable[[], None]
    _commit: Callable[[Exception | None], None]
    _thread: threading.Thread | None = None
    _error: Exception | None = None
    _ended: bool = field(default=False)

    def run_behind(self) -> PendingSave:
        """Writes in a thread."""
        self._thread = threading.Thread(target=self._write_all, name="reshard save", daemon=True)
        self._thread.start()
        return self

    @property
    def done(self) -> bool:
        """Whether this process has written all that it writes, so that `wait` waits for others alone."""
        return self._ended or (self._thread is not None and not self._thread.is_alive())

    def wait(self) -> None:
        """Makes the save the checkpoint that is there, or raises `FileError` on all processes and leaves the old one.

        All processes call it; a second call does nothing.
        """
        if self._ended:
            return
        self._ended = True
        if self._thread is None:
            self._write_all()
        else:
            self._thread.join()
        self._commit(self._error)

    def _write_all(self) -> None:
        try:
            self._write()
        except Exception as error:  # All processes hear of it when they wait.
            self._error = error


class _Request(NamedTuple):
    """What a save is to do, as one process reads its arguments; `text` must be the same on all."""

    held: HeldArrays
    kinds: dict[str, tuple[str, tuple[int, ...]]]
    """The dtype in the file, and the shape."""
    folder: Path
    alone: str | None
    """The name of the only file, where the path is that of a file."""
    sidecar: Path
    most: int
    text: str


def _read_request(
    path: str | PathLike[str],
    held: HeldArrays,
    format: str,
    shards: int | str,
    as_layouts: Mapping[str, Layout] | None,
) -> _Request:
    """The arguments of a save, checked."""
    target = Path(os.path.abspath(path))
    kinds = {name: (layout.dtype, layout.shape) for name, layout in held.layouts.items()}
    for name, layout in (as_layouts or {}).items():
        if name not in kinds or kinds[name][1] != layout.shape:
            found = kinds[name][1] if name in kinds else "not in the tree"
            raise LayoutError(f"as_layouts has {layout} for {quoted(name)}, which is {found}; give one of its shape")
        kinds[name] = layout.dtype, layout.shape
    if format != "safetensors":
        raise FileError(f"format {quoted(format)} cannot be written; give 'safetensors'")
    most = shards if isinstance(shards, int) else parse_bytes(shards)
    alone = target.name if target.name.endswith(".safetensors") else None
    folder = target.parent if alone else target
    sidecar = folder / (f"{alone}.{SIDECAR}" if alone else SIDECAR)
    described = [(name, str(layout), repr(layout.mesh), kinds[name][0]) for name, layout in held.layouts.items()]
    return _Request(held, kinds, folder, alone, sidecar, most, json.dumps([str(target), format, most, described]))


def _begin_save(
    path: str | PathLike[str],
    tree: Tree,
    layouts: Any,
    comm: Any,
    format: str,
    shards: int | str,
    as_layouts: Mapping[str, Layout] | None,
    limit: float,
    hold: bool,
) -> PendingSave:
    """What `save` and `start` have in common: all processes agree, and this one knows what it writes."""
    processes = find_processes(tree, comm, limit)
    request: _Request | None = None
    error: Exception | None = None
    try:
        request = _read_request(path, hold_arrays(tree, layouts, comm, processes), format, shards, as_layouts)
        if processes.rank == 0:
            request.folder.mkdir(parents=True, exist_ok=True)
            remove_remains(request.folder, request.sidecar, None, ())
    except OSError as caught:
        error = FileError(f"cannot save to {quoted(path)}: {caught.strerror or caught}; give another path")
    except Exception as caught:  # The others wait: whatever it is, all raise it.
        error = caught
    raise_together(processes, error)
    assert request is not None
    held = request.held
    # Who asks for the same thing gives the same digest; the id of the save is the first process's.
    digest = hashlib.sha256(request.text.encode()).hexdigest()
    gathered = [json.loads(each) for each in processes.gather(json.dumps([digest, new_save_id()]))]
    other = next((rank for rank, (theirs, _) in enumerate(gathered) if theirs != gathered[0][0]), None)
    if other is not None:
        raise AgreementError(
            f"processes 0 and {other} save different things, so nothing is saved: names, layouts, dtypes, path and "
            f"format must be alike; process {processes.rank} asks for {shortened(request.text)}"
        )
    new = lay_out_safetensors(request.kinds, request.most, gathered[0][1], request.alone)
    writes = list_file_writes(new.tensors, held.layouts, held.process_of, processes.rank)
    blocks = list_tile_blocks(writes, new.tensors, held.tiles)
    parts = PartFiles(request.folder, gathered[0][1], new.files, new.last)
    blocks, give_back = hold_tile_blocks(blocks) if hold else (blocks, lambda: None)

    def write() -> None:
        if processes.rank == 0:
            for file, offset, head in new.heads:
                parts.write(file, offset, [memoryview(head)])
        write_tile_blocks(blocks, parts.write)

    def commit(error: Exception | None) -> None:
        give_back()
        commit_files(parts, request.sidecar, processes, error)

    pending = PendingSave(write, commit)
    return pending.run_behind() if hold else pending


def find_processes(tree: Tree, comm: Any, limit: float) -> Processes:
    """The processes that save a tree together."""
    leaf: Any = next(iter(flatten_tree(tree).values()), None)
    if comm is None and hasattr(leaf, "comm"):
        comm = leaf.comm
    if comm is not None:
        return import_module("reshard.mpi.saving").RankProcesses(comm, limit)
    if hasattr(leaf, "addressable_shards"):
        return import_module("reshard.jax.saving").find_jax_processes(limit)
    return OneProcess()


def flatten_tree(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, names joined by dots; dicts whose keys are devices are leaves.

    >>> flatten_tree({"a": {"b": 1, "c": {0: 2}}})
    {'a.b': 1, 'a.c': {0: 2}}
    """
    leaves: dict[str, Any] = {}
    if not isinstance(tree, Mapping):
        raise FileError(f"the tree is {quoted(tree)}; give a dict of arrays by name")
    for name, value in cast("Mapping[Any, Any]", tree).items():
        if not isinstance(name, str):
            raise FileError(f"the tree has the name {quoted(name)}; names are text")
        if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in cast("Tree", value)):
            leaves |= flatten_tree(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def hold_arrays(tree: Tree, layouts: Any, comm: Any, processes: Processes) -> HeldArrays:
    """A tree as layouts and tiles; raises `FileError` or `LayoutError` for what does not fit."""
    leaves = flatten_tree(tree)
    given = {name: layouts for name in leaves} if isinstance(layouts, Layout) else flatten_tree(layouts or {})
    unknown = [name for name in given if name not in leaves]
    if unknown:
        raise FileError(f"layouts name {quoted(unknown)}, which the tree has not")
    held = HeldArrays({}, {}, processes, None if processes.size == 1 else {})
    for name, leaf in leaves.items():
        layout = given.get(name)
        if hasattr(leaf, "addressable_shards"):
            layout, tiles, process_of = import_module("reshard.jax.saving").tiles_of_array(leaf)
        elif comm is not None or hasattr(leaf, "comm"):
            layout, tiles, process_of = import_module("reshard.mpi.saving").tiles_of_rank(name, leaf, layout, processes)
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
