"""Arrays in files: one folder per array.

layout.json              the layout in our notation, the axes and device ids of its mesh, and the name of the save
tile-<seat>-<save>.npy   the tile of each seat (`lower.to_mpi.seats`), padding included, and a line behind it that says
                         which tile it is

A save never touches the files of an earlier one. Every rank writes its tile under the name of the new save and syncs
it to disk; then rank 0 replaces layout.json, in one step, and only then removes the tiles of the earlier save. So a
folder holds one whole array at any time: the earlier one if a save fails or is killed, else the new one.

Tiles that do not fit layout.json are refused before any is read: missing, truncated, swapped, of another save, shape
or dtype.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
from functools import lru_cache
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import LayoutError, quoted, shortened
from reshard.lower.to_mpi import Fetches, list_fetches
from reshard.mpi.tile_checks import RAW, element_dtype
from reshard.runtime.on_files.commit import create_synced_file, sync_folder
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, pair_views, view_as_words
from reshard.runtime.on_mpi.global_array import scatter_tiles
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.types import Layout, Mesh
from reshard.types.input_files import read_input
from reshard.types.json_fields import Fields

_FORMAT = 2
_LONGEST_MARK = 200
_MOST_TILES = 1 << 20
_MOST_BYTES = 1 << 26  # Of layout.json, which may list the ids of millions of devices.
_NAME = "[A-Za-z0-9]{1,64}"

Folder = str | PathLike[str]


class _TileHeader(NamedTuple):
    """The header of a .npy file, the size that the file has without its mark, and the mark."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    mark: bytes


def make_folder(path: Folder) -> None:
    """Creates the folder, unless it exists. Raises `LayoutError` if that is not possible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise LayoutError(f"cannot make the folder {quoted(path)}: {shortened(str(error))}") from None


def save_tiles(call: Call, path: Folder, layout: Layout, seat: int | None, tile: NDArray[Any]) -> None:
    """Saves an array; all ranks call it with the tiles of their seats, and the folder is there."""
    # The name of the save, which rank 0 chooses for all.
    number = Layout.tiled(Mesh(rank=call.team.size), (1,), "uint64", [[]])
    chosen, received = np.array([secrets.randbits(64)], np.uint64), np.zeros(1, np.uint64)
    scatter_tiles(call, number, chosen, 0, received)
    name = f"{int(received[0]):016x}"
    if seat is not None:
        write_tile(path, seat, tile, name)
    call.team.settle(call.watch)
    if call.team.rank == 0:
        publish_folder(path, layout, name)


def write_tile(path: Folder, seat: int, tile: NDArray[Any], name: str) -> None:
    """Writes the tile of a seat, of the save called `name`, which nobody sees before `publish_folder`."""
    written = _path_of_tile(path, seat, name)
    with create_synced_file(written) as file:
        np.save(file, tile, allow_pickle=False)
        file.write(_mark_of_save(seat, name))
    sync_folder(written.parent)  # Before layout.json names it.


def publish_folder(path: Folder, layout: Layout, name: str) -> None:
    """Makes a save whose tiles have all been written the folder's array, and removes the files of others."""
    ids = None if layout.mesh.device_ids is None else list(layout.mesh.device_ids)
    mesh = {"mesh": dict(layout.mesh.axes), "device_ids": ids}
    text = json.dumps({"format": _FORMAT, "layout": str(layout), **mesh, "save": name}, indent=2)
    beside = Path(path) / f"layout-{name}.json"
    with create_synced_file(beside) as file:
        file.write(text.encode())
    beside.replace(Path(path) / "layout.json")
    sync_folder(Path(path))
    for old in (*Path(path).glob("tile-*.npy"), *Path(path).glob("layout-*.json")):
        if not old.name.endswith(f"-{name}.npy"):
            with contextlib.suppress(OSError):  # Remains of an earlier save do no harm.
                old.unlink()


def check_saved(path: Folder, layout: Layout, seat: int | None) -> np.dtype[Any]:
    """The dtype of the saved elements. Raises `LayoutError` unless an array of this shape and dtype is saved, with
    every tile that the seat's rank reads; it reads nothing without a seat.
    """
    saved, name = _read_layout(path)
    if saved.shape != layout.shape or saved.dtype != layout.dtype:
        raise LayoutError(f"{quoted(path)} holds {saved}, of another shape or dtype than {layout}")
    if saved != layout and (saved.partial or layout.partial):
        raise LayoutError(f"{quoted(path)} holds {saved}, which cannot be read as {layout}: reading finishes no sums")
    # Only nameless dtypes are read from the file: there numpy has bfloat16 as plain 2-byte elements, for example.
    first = _read_header(_path_of_tile(path, 0, name)).dtype if layout.dtype in RAW else None
    dtype = element_dtype(layout, first)
    for rank in () if seat is None else _fetches_of_files(saved, layout, seat):
        file, mark = _path_of_tile(path, rank, name), _mark_of_save(rank, name)
        header, size = _read_header(file), file.stat().st_size
        fits = header.dtype == dtype or (header.dtype.kind == "V" and header.dtype.itemsize == dtype.itemsize)
        if header.shape != saved.tile_shape:
            fault = f"has shape {header.shape}, but tiles of {saved} have {saved.tile_shape}"
        elif not fits:
            fault = f"has elements of {header.dtype}, not of {dtype}"
        elif size < header.size + len(mark):
            fault = f"is cut short at {size} of {header.size + len(mark)} B"
        elif header.mark != mark:
            fault = f"is not {mark.decode().strip()}, but {quoted(header.mark.decode(errors='replace').strip())}"
        else:
            continue
        raise LayoutError(f"the file {quoted(str(file))} {fault}; restore it, or save the array again")
    return dtype


def read_tile(path: Folder, layout: Layout, seat: int, tile: NDArray[Any]) -> None:
    """Fills the tile of a seat; only the parts of the files that have its elements are read."""
    saved, name = _read_layout(path)
    for rank, blocks in _fetches_of_files(saved, layout, seat).items():
        stored = np.load(_path_of_tile(path, rank, name), mmap_mode="r", allow_pickle=False)
        for pair in pair_views(blocks, view_as_words(tile), view_as_words(stored)):
            copy_view(*pair)


@lru_cache(maxsize=16)
def _fetches_of_files(saved: Layout, layout: Layout, seat: int) -> Fetches:
    """What a seat's rank reads from each tile that has elements for it."""
    return list_fetches(saved, layout, seat)


def _read_layout(path: Folder) -> tuple[Layout, str]:
    """What layout.json says: the layout of the array, and the name of its save, a part of the tiles' names."""
    try:
        text = read_input(Path(path) / "layout.json", _MOST_BYTES, regular=True).decode()
        head = Fields.read(text, "a layout", "save the array again")
        if head.get("format", int) != _FORMAT:
            raise head.error(f"format is {quoted(head.get('format', int))}, and this version reads format {_FORMAT}")
        ids = None if head.get("device_ids", list, NoneType) is None else head.listed("device_ids", int)
        layout = Layout.parse(head.get("layout", str), Mesh(head.object("mesh"), device_ids=ids))
        if layout.mesh.size > _MOST_TILES:
            raise head.error(f"mesh has {layout.mesh.size} devices, and no folder holds more than {_MOST_TILES} tiles")
        name = head.get("save", str)
        if not re.fullmatch(_NAME, name):  # It becomes part of the names of files.
            raise head.error(f"save is {quoted(name)}, not letters and digits")
        return layout, name
    except (OSError, TypeError, ValueError) as error:
        text = shortened(f"{type(error).__name__}: {error}")
        raise LayoutError(f"{quoted(path)} is not a saved array: {text}") from None


def _read_header(file: Path) -> _TileHeader:
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        with file.open("rb") as opened:
            version = np.lib.format.read_magic(opened)
            of_version = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = of_version[version](opened)
            end = opened.tell() + math.prod(shape) * dtype.itemsize
            opened.seek(end)
            return _TileHeader(shape, dtype, end, opened.read(_LONGEST_MARK))
    except Exception as error:  # numpy reads a header as Python's own text, and whatever that raises leaves it.
        text = shortened(f"{type(error).__name__}: {error}")
        raise LayoutError(f"the file {quoted(str(file))} is not a tile ({text}); restore it, or save again") from None


def _mark_of_save(rank: int, name: str) -> bytes:
    return f"\ntile {rank} of save {name}\n".encode()


def _path_of_tile(path: Folder, rank: int, name: str) -> Path:
    return Path(path) / f"tile-{rank}-{name}.npy"
