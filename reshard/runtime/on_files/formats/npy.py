"""Arrays of numpy: a .npy file, a folder of them, and the folder that `DistArray.save` writes, with a tile a file.

    w.npy        a header (dtype, C or Fortran order, shape) and the elements
    layout.json  of a folder of tiles: the layout that they have; tile-<seat>-<save>.npy is the tile of each device

Tiles of a layout are boxes where pieces are intervals, and several boxes where they are dealt in rounds; padding of a
tile is skipped. Of replicas one is read. No array of Python objects is: these are pickles.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import ReshardError, quoted, shortened
from reshard.geometry.holders import tiles
from reshard.geometry.overlap import piece_runs
from reshard.lower.to_mpi.seats import seats_by_position
from reshard.plans.stored import Box, Checkpoint, Stored, StoredFile, StoredPiece
from reshard.runtime.on_files.formats.metadata_files import (
    OpenedFile,
    check_cover,
    file_error,
    find_chunks,
    measure_span,
    open_regular,
    read_metadata,
    read_side_by_side,
    resolve_inside,
)
from reshard.types import Layout, Mesh, dtypes
from reshard.types.json_fields import Fields
from reshard.types.whole import MOST, whole

_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 14
_MOST_PIECES = 1 << 16
_SAVE = "[A-Za-z0-9]{1,64}"


class NpyHeader(NamedTuple):
    """What the header of a .npy file says, and where the elements begin."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    in_fortran: bool
    start: int

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each dim."""
        strides: list[int] = []
        below = 1
        for size in self.shape if self.in_fortran else self.shape[::-1]:
            strides.append(strides[-1] * max(1, below) if strides else 1)
            below = size
        return tuple(strides if self.in_fortran else strides[::-1])


def read_npy(path: str) -> Checkpoint:
    """What .npy files hold, by their headers: named as the files are, or as the folder of tiles is."""
    if not os.path.isdir(path):
        stored, identity = _read_array(path, 0)
        return Checkpoint(path, "npy", (identity,), {stored.name: stored})
    if os.path.lexists(os.path.join(path, "layout.json")):
        return _read_tiles(path)
    names = sorted(name for name in os.listdir(path) if name.endswith(".npy") and not name.startswith("."))
    numbered = [*enumerate(names)]
    found = [*read_side_by_side(lambda each: _read_array(resolve_inside(path, each[1], path), each[0]), numbered)]
    return Checkpoint(path, "npy", tuple(file for _, file in found), {stored.name: stored for stored, _ in found})


def _read_array(path: str, number: int) -> tuple[Stored, StoredFile]:
    """The array of a file of its own."""
    name = os.path.basename(path).removesuffix(".npy")
    with open_regular(path) as file:
        header = read_npy_header(file, name)
        try:
            dtype = dtypes.canonical(header.dtype)
        except ReshardError:
            # numpy saves bfloat16 as 2 bytes without a name.
            cure = "save bfloat16 and the like as safetensors" if header.dtype.kind == "V" else "save it as numbers"
            raise file_error(
                path, f"elements of {header.dtype} are no numbers that have a name; {cure}", tensor=name
            ) from None
        stored = Stored(
            name,
            dtype,
            header.shape,
            _list_pieces(header, number, [(tuple((0, n) for n in header.shape), (0,) * len(header.shape))]),
        )
        end = header.start + stored.nbytes
        # `numpy.load` takes what lies behind in silence, and so the remains of a longer array.
        if file.size != end:
            raise file_error(
                path, f"its elements end here, but the file has {file.size} B; copy it again", tensor=name, offset=end
            )
        return stored, file.identity


def read_npy_header(file: OpenedFile, tensor: str) -> NpyHeader:
    """The header of a .npy file, of which numpy is the judge; raises `FileError` for one that it does not read."""
    head = file.read(0, min(12, file.size))
    # Version 3 has names of fields beyond ASCII, and so nothing that layouts know.
    width = {b"\1\0": 2, b"\2\0": 4}.get(head[6:8], 0)
    if head[:6] != _MAGIC or not width or len(head) < 8 + width:
        raise file_error(
            file.path, f"begins with {quoted(head[:8])}: no .npy of version 1 or 2; save it again", offset=0
        )
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > min(_MOST_HEADER, file.size - 8 - width):
        raise file_error(file.path, f"its header has {length} B of {file.size}; save it again", tensor=tensor, offset=8)
    content = io.BytesIO(file.read(8, width + length))
    reader = np.lib.format.read_array_header_1_0 if width == 2 else np.lib.format.read_array_header_2_0
    try:
        # What numpy warns of is a header that it had to guess at.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shape, in_fortran, dtype = reader(content, max_header_size=_MOST_HEADER)
            sizes = [whole(size) if type(size) is int else None for size in shape]
            if None in sizes or math.prod(size for size in shape if size) * max(1, dtype.itemsize) > MOST:
                raise ValueError(f"shape {quoted(shape)}")
    except Exception as error:  # numpy reads a header as Python's own text, and whatever that raises leaves it.
        text = shortened(f"{type(error).__name__}: {error}")
        raise file_error(
            file.path, f"its header is not one ({text}); save it again", tensor=tensor, offset=10
        ) from None
    # numpy would read these two, objects by unpickling them, which runs what a stranger wrote.
    if dtype.hasobject:
        raise file_error(
            file.path,
            "its elements are Python objects, which only a pickle holds; save it as numbers",
            tensor=tensor,
            offset=10,
        )
    if dtype.newbyteorder("<") != dtype:
        raise file_error(
            file.path,
            f"its elements are {dtype}, big-endian; save it with array.astype(array.dtype.newbyteorder('<'))",
            tensor=tensor,
            offset=10,
        )
    return NpyHeader(shape, dtype, in_fortran, 8 + width + length)


def _list_pieces(header: NpyHeader, file: int, boxes: Sequence[tuple[Box, tuple[int, ...]]]) -> tuple[StoredPiece, ...]:
    """The pieces of a file whose array has these boxes of a tensor, each from a place in the array on."""
    pieces: list[StoredPiece] = []
    for box, starts in boxes:
        extents, strides, item = [stop - start for start, stop in box], header.strides, header.dtype.itemsize
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        # From the first element to the end of the last: padding between them is inside, padding behind is not.
        span, spaced = measure_span(extents, strides)
        pieces.append(StoredPiece(box, file, header.start + first * item, span * item, strides=spaced))
    return tuple(pieces)


def _read_tiles(path: str) -> Checkpoint:
    """The array of `DistArray.save`, called as its folder is."""
    layout, save, identity = read_saved_layout(path)
    name = os.path.basename(path)
    if layout.partial:
        raise file_error(
            path, f"holds {layout}, and reading finishes no sums; load it with DistArray.load", tensor=name
        )
    if dtypes.bits(layout.dtype) < 8:
        raise file_error(path, f"holds {layout}, whose elements are less than a byte; save them as int8", tensor=name)
    files: list[StoredFile] = []
    pieces: list[StoredPiece] = []
    read: set[tuple[int, ...]] = set()
    for seat, tile in zip(seats_by_position(layout.mesh), tiles(layout).values(), strict=True):
        if tile in read:  # A replica.
            continue
        read.add(tile)
        shared = [piece_runs(dim)[number] for dim, number in zip(layout.dims, tile, strict=True)]
        if math.prod(map(len, shared)) + len(pieces) > _MOST_PIECES:
            raise file_error(
                path, f"holds {layout}, more than {_MOST_PIECES} boxes; load it with DistArray.load", tensor=name
            )
        boxes = [
            (tuple((at, at + extent) for at, _, extent in runs), tuple(start for _, start, _ in runs))
            for runs in itertools.product(*shared)
        ]
        file, header = read_tile_file(path, seat, save, layout)
        pieces += _list_pieces(header, len(files), boxes)
        files.append(file)
    # A tensor without elements has one piece without bytes, in every format.
    if not pieces:
        pieces = [StoredPiece(tuple((0, size) for size in layout.shape), 0, 0, 0)]
    # C order, in which a regular grid is known.
    pieces.sort(key=lambda piece: piece.box)
    stored = Stored(name, layout.dtype, layout.shape, tuple(pieces), find_chunks(layout.shape, pieces))
    check_cover(path, stored)
    return Checkpoint(path, "npy", (*files, identity), {name: stored})


def mark_of_tile(seat: int, save: str) -> bytes:
    """The line behind the elements of a tile."""
    return f"\ntile {seat} of save {save}\n".encode()


def read_tile_file(
    folder: str | os.PathLike[str], seat: int, save: str, layout: Layout, dtype: np.dtype[Any] | None = None
) -> tuple[StoredFile, NpyHeader]:
    """One tile, by its header and its mark; of a `dtype`, where elements have one that layouts have no name for."""
    tensor = os.path.basename(folder)
    path, mark = os.path.join(folder, f"tile-{seat}-{save}.npy"), mark_of_tile(seat, save)
    with open_regular(path) as file:
        header = read_npy_header(file, tensor)
        # numpy has bfloat16 as elements of 2 bytes without a name.
        size, found = max(1, dtypes.bits(layout.dtype) // 8), header.dtype
        known = found == dtype if dtype is not None else found.name == layout.dtype
        if not known and (found.kind, found.itemsize) != ("V", size):
            raise file_error(
                path, f"has elements of {found}, not of {dtype or layout.dtype}; restore it", tensor=tensor, offset=10
            )
        if header.shape != layout.tile_shape:
            raise file_error(
                path,
                f"has shape {header.shape}, and tiles of {layout} have {layout.tile_shape}; restore it",
                tensor=tensor,
                offset=10,
            )
        end = header.start + math.prod(header.shape) * size
        if file.size != end + len(mark):
            raise file_error(
                path,
                f"the file has {file.size} B instead of {end + len(mark)}; restore it",
                tensor=tensor,
                offset=min(end, file.size),
            )
        found = file.read(end, len(mark))
        if found != mark:
            raise file_error(
                path, f"is not {mark.decode().strip()}, but {quoted(found)}; restore it", tensor=tensor, offset=end
            )
        return file.identity, header


def read_saved_layout(folder: str) -> tuple[Layout, str, StoredFile]:
    """What layout.json says: the layout of the tiles and the name of their save."""
    path = os.path.join(folder, "layout.json")
    content, identity = read_metadata(path)
    try:
        head = Fields.read(content.decode(), "a layout", "save the array again")
        if head.get("format", int) != 2:
            raise head.error(f"format is {quoted(head.get('format', int))}, and this version reads format 2")
        ids = None if head.get("device_ids", list, type(None)) is None else head.listed("device_ids", int)
        layout = Layout.parse(head.get("layout", str), Mesh(head.object("mesh"), device_ids=ids))
        save = head.get("save", str)
        if layout.mesh.size > 1 << 20 or not re.fullmatch(_SAVE, save):  # It becomes part of the names of files.
            raise head.error(
                f"the mesh has {layout.mesh.size} devices, or the save {quoted(save)} is not letters and digits"
            )
        return layout, save, identity
    except (UnicodeDecodeError, ReshardError) as error:
        raise file_error(path, f"does not describe a layout of tiles: {shortened(str(error))}") from None
