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
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.commit import NewFile
from reshard.runtime.on_files.formats.safetensors import DTYPES, INDEX, SAVE_ID
from reshard.types import dtypes
from reshard.types.stored import Stored, StoredPiece

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
    if alone is not None:
        return NewCheckpoint(tuple(files), tensors, tuple(heads), 0)
    total = sum(stored.nbytes for stored in tensors.values())
    home_of = {name: files[stored.pieces[0].file].name for name, stored in tensors.items()}
    index = json.dumps({"metadata": {"total_size": total, SAVE_ID: save}, "weight_map": home_of}, indent=1).encode()
    heads.append((len(files), 0, index))
    files.append(NewFile(f"model{INDEX}", len(index)))
    return NewCheckpoint(tuple(files), tensors, tuple(heads), len(files) - 1)


class TileBlock(NamedTuple):
    """A block of a tile that this process writes: `data` has its extents, whatever its strides in memory are."""

    piece: StoredPiece
    block: Block
    data: Array
    dtype: str


def list_tile_blocks(
    writes: Iterable[FileWrite], tensors: Mapping[str, Stored], tiles: Mapping[str, Mapping[int, Array]]
) -> list[TileBlock]:
    """What writes take of this process's tiles, which are padded; without copies, if tiles are C-ordered."""
    flat: dict[tuple[str, int], Array] = {}
    blocks: list[TileBlock] = []
    for write in writes:
        for device, block in write.blocks:
            at = (write.name, device)
            if at not in flat:
                flat[at] = np.ascontiguousarray(tiles[write.name][device]).reshape(-1)
            tile = flat[at]
            strides = tuple(axis.dst * tile.itemsize for axis in block.axes)
            data = as_strided(tile[block.dst :], block.extents, strides, writeable=False)
            blocks.append(TileBlock(write.piece, block, data, tensors[write.name].dtype))
    return blocks


_idle: list[Array] = []
"""The buffer of the last save, for the next one: fresh memory costs several times what a copy does."""


def hold_tile_blocks(blocks: Sequence[TileBlock]) -> tuple[list[TileBlock], Callable[[], None]]:
    """Copies of blocks, so that tiles may be changed while these are written; and what gives their memory back."""
    needed = sum(-(-each.data.nbytes // 64) * 64 for each in blocks)
    buffer = _idle.pop() if _idle else np.empty(0, np.uint8)
    if buffer.nbytes < needed:
        buffer = np.empty(needed, np.uint8)
    held: list[TileBlock] = []
    at = 0
    for each in blocks:
        copy = buffer[at : at + each.data.nbytes].view(each.data.dtype).reshape(each.data.shape)
        np.copyto(copy, each.data)
        held.append(each._replace(data=copy))
        at += -(-each.data.nbytes // 64) * 64

    def give_back() -> None:
        if not _idle:
            _idle.append(buffer)

    return held, give_back


def write_tile_blocks(blocks: Iterable[TileBlock], write: Callable[[int, int, Sequence[memoryview]], None]) -> None:
    """Writes blocks through `write(file, offset, buffers)`: what follows each other in a file goes in one call."""
    file, start, end = -1, 0, 0
    buffers: list[memoryview] = []
    for to, offset, buffer in (run for each in blocks for run in _list_file_runs(each)):
        if buffers and ((to, offset) != (file, end) or end - start + buffer.nbytes > _MOST_BYTES):
            write(file, start, buffers)
            buffers = []
        if not buffers:
            file, start, end = to, offset, offset
        buffers.append(buffer)
        end += buffer.nbytes
    if buffers:
        write(file, start, buffers)


def _list_file_runs(each: TileBlock) -> Iterator[tuple[int, int, memoryview]]:
    """The runs of a block in its file, in order: (file, offset, bytes)."""
    wanted = numpy_dtype(each.dtype).newbyteorder("<")
    axes = each.block.axes
    # The last axes that are C-ordered in the file are one run of it.
    below, inner = 1, len(axes)
    while inner and axes[inner - 1].extent in (1, axes[inner - 1].extent) and axes[inner - 1].src == below:
        below *= axes[inner - 1].extent
        inner -= 1
    size = wanted.itemsize
    for index in np.ndindex(*(axis.extent for axis in axes[:inner])):
        at = each.block.src + sum(number * axis.src for number, axis in zip(index, axes[:inner], strict=True))
        rows = each.data[index]
        # A few MiB at a time: what is cast or not C-ordered is copied on the way.
        plain = rows if rows.dtype == wanted and rows.flags.c_contiguous else rows.astype(wanted, order="C")
        if plain.nbytes:
            yield each.piece.file, each.piece.offset + at * size, memoryview(plain.reshape(-1).view(np.uint8))
