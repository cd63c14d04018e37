"""Tiles written into files: which files there are, what is in front of their elements, and the spans of one process.

lay_out_safetensors     names, dtypes and shapes -> files, headers, and where each tensor lies
hold_tiles_to_write     copies of what this process writes, in buffers that the next save takes again
write_tiles             blocks of tiles as spans, neighbours of a file in one call
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from reshard.errors import FileError, quoted
from reshard.geometry.blocks import Block
from reshard.lower.to_files.file_writes import FileWrite
from reshard.plans.stored import Stored, StoredPiece
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.commit import NewFile
from reshard.runtime.on_files.formats.safetensors import DTYPES, INDEX, SAVE_ID
from reshard.types import dtypes

Array = NDArray[Any]

SHORT_NAMES = {dtype: str(short) for short, dtype in DTYPES.items()}
"""What safetensors calls dtypes."""

_MOST_BYTES = 1 << 28
"""Bytes that are gathered for one call; Linux writes less than 2 GiB in one."""


class NewCheckpoint(NamedTuple):
    """What a save is to write: files, the tensors in them, and the bytes that are no elements, as (file, offset,
    bytes). The file `last` is renamed last."""

    files: tuple[NewFile, ...]
    tensors: Mapping[str, Stored]
    heads: tuple[tuple[int, int, bytes], ...]
    last: int


def lay_out_safetensors(
    arrays: Mapping[str, tuple[str, tuple[int, ...]]], most: int, save: str, alone: str | None = None
) -> NewCheckpoint:
    """Files of at most `most` bytes of elements (a tensor is in one file) with an index, or the one file `alone`.

    >>> new = lay_out_safetensors({"a": ("float32", (4,)), "b": ("int8", (3,))}, 8, "5d")
    >>> [file.name for file in new.files]
    ['model-00001-of-00002-5d.safetensors', 'model-00002-of-00002-5d.safetensors', 'model.safetensors.index.json']
    """
    for name, (dtype, _) in arrays.items():
        if dtype not in SHORT_NAMES:
            raise FileError(f"tensor {quoted(name)} is {dtype}, which safetensors cannot store; cast it, or take zarr")
    # Larger elements first: then every tensor begins at a multiple of its elements' size.
    shards: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in arrays.items():
        size = dtypes.nbytes(math.prod(shape), dtype)
        if shards[-1] and filled + size > most and alone is None:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files: list[NewFile] = []
    tensors: dict[str, Stored] = {}
    heads: list[tuple[int, int, bytes]] = []
    # A header's length depends on the offsets that it tells, and these count from its end: so it is written first.
    for number, names in enumerate(shards):
        header: dict[str, Any] = {"__metadata__": {"format": "pt", SAVE_ID: save}}
        at = 0
        names.sort(key=lambda name: -dtypes.bits(arrays[name][0]))
        for name in names:
            dtype, shape = arrays[name]
            end = at + dtypes.nbytes(math.prod(shape), dtype)
            header[name] = {"dtype": SHORT_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        # Elements begin at a multiple of 8, as the format's own library has it.
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        for name in names:
            dtype, shape = arrays[name]
            begin, end = header[name]["data_offsets"]
            piece = StoredPiece(tuple((0, size) for size in shape), number, start + begin, end - begin)
            tensors[name] = Stored(name, dtype, shape, (piece,))
        heads.append((number, 0, len(text).to_bytes(8, "little") + text))
        parts = (0, *(start + header[name]["data_offsets"][0] for name in names))
        file = alone or f"model-{number + 1:05d}-of-{len(shards):05d}-{save}.safetensors"
        files.append(NewFile(file, start + at, parts))
    tensors = {name: tensors[name] for name in arrays}
    # Where there is one file, its renaming is the commit.
    if alone is not None:
        return NewCheckpoint(tuple(files), tensors, tuple(heads), 0)
    total = sum(stored.nbytes for stored in tensors.values())
    home_of = {name: files[stored.pieces[0].file].name for name, stored in tensors.items()}
    index = json.dumps({"metadata": {"total_size": total, SAVE_ID: save}, "weight_map": home_of}, indent=1).encode()
    heads.append((len(files), 0, index))
    files.append(NewFile(f"model{INDEX}", len(index)))
    return NewCheckpoint(tuple(files), tensors, tuple(heads), len(files) - 1)


class PieceWrite(NamedTuple):
    """What this process writes of a piece: blocks of tiles, each with the elements that it has of its tile, in its
    extents and in any order in memory."""

    name: str
    piece: StoredPiece
    dtype: str
    parts: tuple[tuple[Block, Array], ...]

    def assemble(self) -> Array:
        """The whole piece as one array, where this process has all of it."""
        box = np.empty([stop - start for start, stop in self.piece.box], numpy_dtype(self.dtype))
        flat = box.reshape(-1)
        for block, data in self.parts:
            strides = tuple(axis.src * box.itemsize for axis in block.axes)
            as_strided(flat[block.src :], block.extents, strides)[...] = data
        return box


def list_piece_writes(
    writes: Iterable[FileWrite], tensors: Mapping[str, Stored], tiles: Mapping[str, Mapping[int, Array]]
) -> list[PieceWrite]:
    """What writes take of this process's tiles, which are padded; without copies, if tiles are C-ordered."""
    flat: dict[tuple[str, int], Array] = {}
    pieces: list[PieceWrite] = []
    for write in writes:
        parts: list[tuple[Block, Array]] = []
        for device, block in write.blocks:
            at = (write.name, device)
            # Tiles are flat for blocks, and most are so in memory.
            if at not in flat:
                flat[at] = np.ascontiguousarray(tiles[write.name][device]).reshape(-1)
            tile = flat[at]
            strides = tuple(axis.dst * tile.itemsize for axis in block.axes)
            parts.append((block, as_strided(tile[block.dst :], block.extents, strides, writeable=False)))
        pieces.append(PieceWrite(write.name, write.piece, tensors[write.name].dtype, tuple(parts)))
    return pieces


_idle: list[Array] = []
"""The buffer of the last save, for the next one: fresh memory costs several times what a copy does."""


def hold_piece_writes(pieces: Sequence[PieceWrite]) -> tuple[list[PieceWrite], Array]:
    """Copies of what is to be written, so that tiles may be changed meanwhile; and their memory, to be given back."""
    line = 64  # Copies begin at lines of the caches.
    needed = sum(-(-data.nbytes // line) * line for each in pieces for _, data in each.parts)
    buffer = _idle.pop() if _idle else np.empty(0, np.uint8)
    if buffer.nbytes < needed:
        buffer = np.empty(needed, np.uint8)
    held: list[PieceWrite] = []
    at = 0
    for each in pieces:
        parts: list[tuple[Block, Array]] = []
        for block, data in each.parts:
            copy = buffer[at : at + data.nbytes].view(data.dtype).reshape(data.shape)
            np.copyto(copy, data)
            parts.append((block, copy))
            at += -(-data.nbytes // line) * line
        held.append(each._replace(parts=tuple(parts)))
    return held, buffer


def give_back_memory(buffer: Array) -> None:
    """Keeps the memory of copies for the next save, the larger one if there is some already."""
    # One buffer: saves follow each other.
    _idle.append(buffer)
    _idle.sort(key=lambda each: each.nbytes)
    del _idle[:-1]


def write_piece_runs(pieces: Iterable[PieceWrite], write: Callable[[int, int, Sequence[memoryview]], None]) -> None:
    """Writes pieces through `write(file, offset, buffers)`: what follows each other in a file goes in one call."""
    file, start, end = -1, 0, 0
    buffers: list[memoryview] = []
    for to, offset, buffer in (run for each in pieces for run in _list_file_runs(each)):
        if buffers and ((to, offset) != (file, end) or end - start + buffer.nbytes > _MOST_BYTES):
            write(file, start, buffers)
            buffers = []
        if not buffers:
            file, start, end = to, offset, offset
        buffers.append(buffer)
        end += buffer.nbytes
    if buffers:
        write(file, start, buffers)


def _list_file_runs(each: PieceWrite) -> Iterator[tuple[int, int, memoryview]]:
    """The runs of a piece's blocks in its file, in their order: (file, offset, bytes)."""
    wanted = numpy_dtype(each.dtype).newbyteorder("<")
    for block, data in each.parts:
        axes = block.axes
        # The last axes that are C-ordered in the file are one run of it.
        below, inner = 1, len(axes)
        while inner and (axes[inner - 1].extent == 1 or axes[inner - 1].src == below):
            below *= axes[inner - 1].extent
            inner -= 1
        for index in np.ndindex(*(axis.extent for axis in axes[:inner])):
            at = block.src + sum(number * axis.src for number, axis in zip(index, axes[:inner], strict=True))
            rows = data[index]
            # What lies otherwise in memory is copied on the way, a run at a time.
            plain = rows if rows.dtype == wanted and rows.flags.c_contiguous else rows.astype(wanted, order="C")
            if plain.nbytes:
                yield (
                    each.piece.file,
                    each.piece.offset + at * wanted.itemsize,
                    memoryview(plain.reshape(-1).view(np.uint8)),
                )
