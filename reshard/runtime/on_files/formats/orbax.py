"""Orbax: a tree of arrays, each a zarr array, in a key-value store (OCDBT) or in one folder an array.

    state/_METADATA                   the tree: names, and whether arrays are of zarr 2 (the default) or 3
    state/manifest.ocdbt, d/, ocdbt.process_0/d/      a database: "params.w/.zarray", "params.w/0.1" -> values
    state/params.w/.zarray, 0.1       or, without a database, files

A name is the path of a leaf in the tree, joined by dots. `_CHECKPOINT_METADATA` has the time of the commit: null in a
save that was not finished, whose folder is also called `...orbax-checkpoint-tmp`. Savers may leave out chunks that hold
nothing but the fill value; `_METADATA` says so, and only there a missing chunk is data.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from reshard.errors import FileError, PlanError, quoted, shortened
from reshard.plans.stored import Checkpoint, ChunkGrid, Stored
from reshard.runtime.on_files.formats.metadata_files import file_error, read_metadata
from reshard.runtime.on_files.formats.new_arrays import NewArray
from reshard.runtime.on_files.formats.tensorstore_arrays import (
    create_zarr,
    import_tensorstore,
    locate_store,
    make_context,
)
from reshard.runtime.on_files.formats.zarr import (
    ZarrHeader,
    list_folder_files,
    number_inner,
    parse_zarr_header,
    read_zarr,
)
from reshard.runtime.on_files.sidecar import SIDECAR
from reshard.types.json_fields import Fields
from reshard.types.units import listed

MANIFEST = "manifest.ocdbt"
TREE = "_METADATA"
ITEM = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"

_UNFINISHED = ".orbax-checkpoint-tmp"
_NO_ARRAYS = ("None", "Dict", "List", "Tuple", "NamedTuple", "string")


def read_orbax(path: str) -> Checkpoint:
    """The arrays of a checkpoint, or of the only item of one; raises `FileError` for a save that was not finished."""
    _check_finished(path)
    if not os.path.lexists(os.path.join(path, TREE)):
        items = sorted(name for name in os.listdir(path) if os.path.isfile(os.path.join(path, name, TREE)))
        if items[1:]:
            raise file_error(path, f"has the items {listed(items)}; give the path of one of them")
        if not items:
            raise file_error(path, f"has no {TREE}: it was not finished, or has several steps; give the folder of one")
        return read_orbax(os.path.join(path, items[0]))
    names, database, filled = read_orbax_tree(path)
    if not database:
        stored = read_zarr(path)
        return Checkpoint(path, "orbax", stored.files, _take_named(path, names, stored.tensors))
    files = tuple(file for at, file in sorted(list_folder_files(path).items()) if at != SIDECAR)
    arrays, keys = _read_database(path)
    tensors: dict[str, Stored] = {}
    for name, header in _take_named(path, names, arrays).items():
        held = header.number_keys(keys[name])
        grid = ChunkGrid(header.shape, header.chunks, header.chunk_bytes)
        # Which inner chunks a shard has is in its index, inside the value; reading finds one that is missing there.
        if not filled and len(held) < len(ChunkGrid(header.shape, header.file_chunks, 0)):
            inner = ChunkGrid(header.file_chunks, header.chunks, 0)
            there = {number_inner(header, shard, at) for shard in held for at in range(len(inner))} - {-1}
            sizes = {at: header.chunk_bytes for at in there}
            grid = ChunkGrid(header.shape, header.chunks, header.chunk_bytes, sizes)
        tensors[name] = Stored(name, header.dtype, header.shape, grid, header.chunks)
    return Checkpoint(path, "orbax", files, tensors)


def read_orbax_tree(path: str) -> tuple[Sequence[str], bool, bool]:
    """The names in `_METADATA`, whether a database has the values, and whether what it lacks is the fill value."""
    where = os.path.join(path, TREE)
    text, _ = read_metadata(where)
    try:
        fields = Fields.read(text, "the tree of an Orbax checkpoint", "save it again")
        names: list[str] = []
        for at, entry in fields.object("tree_metadata").items():
            leaf = Fields.of(entry, fields.what, quoted(at), fields.cure)
            value = Fields.of(leaf.object("value_metadata"), fields.what, quoted(at), fields.cure)
            keys = [key.data.get("key") for key in leaf.objects("key_metadata", "key")]
            name = ".".join(str(key) for key in keys)
            # A name becomes a part of paths.
            parts = PurePosixPath(name)
            if not keys or not name.strip(".") or parts.is_absolute() or ".." in parts.parts or "\0" in name:
                raise leaf.error(f"its name is {quoted(name)}, which is none of an array in the folder")
            if value.get("value_type", str) not in _NO_ARRAYS:
                names.append(name)
        database = fields.get("use_ocdbt", bool, type(None), default=None)
        filled = not fields.get("store_array_data_equal_to_fill_value", bool, default=False)
    except PlanError as error:
        raise FileError(f"{quoted(where)}: {error}") from None
    # Without a manifest tensorstore sees an empty database, not a broken one.
    there = os.path.isfile(os.path.join(path, MANIFEST))
    if database and not there:
        raise file_error(
            os.path.join(path, MANIFEST), "is not there, so the database of the arrays is lost; restore it"
        )
    return names, there if database is None else database, filled


def create_orbax(path: str, tensors: Mapping[str, NewArray], version: int) -> None:
    """Makes a checkpoint of arrays of zarr 2 or 3 in a database, without elements; dots in names part the tree."""
    os.makedirs(path, exist_ok=True)
    # Orbax codes whatever it writes.
    coded = {name: replace(new, codec=new.codec or "zstd") for name, new in tensors.items()}
    create_zarr(path, coded, version, database=True)
    entries: dict[str, Any] = {}
    for name, new in tensors.items():
        keys = name.split(".")
        if not all(keys):
            raise file_error(path, "has a dot at an end or two in a row; Orbax parts names at dots", tensor=name)
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            # Orbax restores a jax.Array only with a sharding; from this, it makes whatever is asked for.
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": list(new.shards or new.chunks or new.shape),
            },
        }
    tree: dict[str, Any] = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": version == 3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    # A save is whole when its folder gets its name; Orbax asks for the time of that.
    now = time.time_ns()
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    item: dict[str, Any] = {
        "item_handlers": handler,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    for name, said in ((TREE, tree), (ITEM, item)):
        with open(os.path.join(path, name), "w", encoding="utf-8") as file:
            json.dump(said, file)


def _check_finished(path: str) -> None:
    cure = "it was not finished; give a whole checkpoint"
    if any(_UNFINISHED in part for part in (*PurePosixPath(os.path.realpath(path)).parts, *os.listdir(path))):
        raise file_error(path, f"is a save in progress, by the name {_UNFINISHED} in it: {cure}")
    item = os.path.join(path, ITEM)
    committed = os.path.lexists(os.path.join(path, COMMITTED))
    if os.path.lexists(item):
        text, _ = read_metadata(item)
        try:
            when = Fields.read(text, "the metadata of an Orbax checkpoint", cure).data.get("commit_timestamp_nsecs", 0)
        except PlanError as error:
            raise FileError(f"{quoted(item)}: {error}") from None
        # Savers write null first, and the time once all arrays are on disk; 0 stands for savers without the field.
        if when is None or (when == 0 and not committed):
            raise file_error(item, f"has no time of a commit: {cure}")
    # Each item of a step that was committed by a file has one too, and the step has one if they do.
    above = os.path.dirname(os.path.abspath(path))
    others = [above] if os.path.lexists(os.path.join(above, ITEM)) else []
    others += [os.path.join(path, name) for name in os.listdir(path)]
    if not committed and any(os.path.lexists(os.path.join(other, COMMITTED)) for other in others):
        raise file_error(os.path.join(path, COMMITTED), f"is missing, and there is one beside it: {cure}")


def _take_named(path: str, names: Sequence[str], arrays: Mapping[str, Any]) -> dict[str, Any]:
    absent = [quoted(name) for name in names if name not in arrays]
    if absent:
        more = f" and {len(absent) - 5} others" if len(absent) > 5 else ""
        raise file_error(path, f"its {TREE} names {listed(absent[:5])}{more}, and no array is there; restore the files")
    return {name: arrays[name] for name in names if arrays[name] is not None}


def _read_database(path: str) -> tuple[dict[str, ZarrHeader | None], dict[str, list[str]]]:
    """The metadata of each array of a database, and the keys of each, below its name."""
    library = import_tensorstore()
    try:
        store = library.KvStore.open(locate_store(path, database=True), context=make_context(library)).result()
        found = [key.decode("utf-8", "surrogateescape") for key in store.list().result()]
        named = [key for key in found if key.endswith(("/.zarray", "/zarr.json"))]
        texts = [waiting.result() for waiting in [store.read(key) for key in named]]
    except Exception as error:  # tensorstore raises ValueError, RuntimeError and others, by what its files do.
        text = shortened(" ".join(str(error).split()), 600)
        raise FileError(f"{quoted(path)}: its database cannot be read ({text}); restore the files") from None
    headers: dict[str, ZarrHeader | None] = {}
    for key, text in zip(named, texts, strict=True):
        headers[key.rpartition("/")[0]] = parse_zarr_header(text.value, f"{path}, key {key}")
    # A key belongs to the longest name above it.
    keys: dict[str, list[str]] = {name: [] for name in headers}
    for key in found:
        name = key
        while name and name not in keys:
            name = name.rpartition("/")[0]
        if name:
            keys[name].append(key[len(name) + 1 :])
    return headers, keys
