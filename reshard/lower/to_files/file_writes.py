"""Which process writes which elements of a tile: each element once, and as many bytes in all processes as can be.

    f32[{x}4, 8] on <x=2, y=2>, each device a process of its own

    devices 0 and 1 hold rows 0-3        process 0 writes rows 0-1, process 1 rows 2-3
    devices 2 and 3 hold rows 4-7        process 2 writes rows 4-5, process 3 rows 6-7

Who holds the same tile shares it in runs of the file, one each. A tile of less than `LEAST` bytes a holder has fewer
writers, of its holders those that have least to write so far. A coded chunk has one writer, which holds all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard.errors import LayoutError, quoted
from reshard.geometry.blocks import Block, cut_range
from reshard.geometry.holders import Tile, tile_of
from reshard.lower.to_files.file_reads import FileRead, list_file_reads
from reshard.plans.stored import Box, Stored, StoredPiece
from reshard.types import dtypes
from reshard.types.layout import Layout

LEAST = 1 << 20
"""Bytes of a tile that a writer has at least, where several hold it."""

ProcessOf = Mapping[int, int] | None
"""The process of each device; None: one process has all."""


class FileWrite(NamedTuple):
    """What a process writes of a piece: blocks of its devices' tiles; `src` of a block counts elements of the piece."""

    name: str
    piece: StoredPiece
    blocks: tuple[tuple[int, Block], ...]


def list_file_writes(
    tensors: Mapping[str, Stored], layouts: Mapping[str, Layout], process_of: ProcessOf, process: int
) -> list[FileWrite]:
    """What a process writes, in the order of files; the same assignment in every process.

    >>> from reshard.types.mesh import Mesh
    >>> stored = Stored("w", "int8", (4 << 20,), (StoredPiece(((0, 4 << 20),), 0, 80, 4 << 20),))
    >>> layout = Layout.parse("s8[{x}2097152]", Mesh(x=2, y=2))
    >>> [write.blocks for write in list_file_writes({"w": stored}, {"w": layout}, {d: d for d in range(4)}, 3)]
    [((3, Block(src=3145728, dst=1048576, axes=(Axis(extent=1048576, src=1, dst=1),))),)]
    """
    loads: defaultdict[int, int] = defaultdict(int)
    holders_of: dict[Layout, dict[Tile, dict[int, int]]] = {}
    writes: list[FileWrite] = []
    for name, stored in tensors.items():
        layout = layouts[name]
        if layout not in holders_of:
            # For each tile the processes that hold it, and the first device of each that does.
            holders: dict[Tile, dict[int, int]] = {}
            for device in layout.mesh.devices:
                owner = 0 if process_of is None else process_of[device]
                holders.setdefault(tile_of(layout, device), {}).setdefault(owner, device)
            holders_of[layout] = holders
        if stored.pieces and not stored.pieces[0].raw:
            listed: list[tuple[int, int, Sequence[FileRead]]] = []
            for devices in holders_of[layout].values():
                reads = list_file_reads(stored, layout, next(iter(devices.values())))
                listed += ((owner, device, reads) for owner, device in devices.items())
            writes += _list_chunk_writes(stored, listed, loads, process)
            continue
        for devices in holders_of[layout].values():
            writers = _choose_writers(stored, layout, devices, loads)
            if process in writers:
                reads = list_file_reads(stored, layout, devices[process])
                writes += _share_blocks(name, reads, devices[process], writers.index(process), len(writers))
    writes.sort(key=lambda each: (each.piece.file, each.piece.offset, each.name, min(b.src for _, b in each.blocks)))
    return writes


def _choose_writers(
    stored: Stored, layout: Layout, devices: Mapping[int, int], loads: defaultdict[int, int]
) -> Sequence[int]:
    """The processes that write a tile, of those that hold it; adds to their loads."""
    elements = math.prod(layout.tile_shape_of(next(iter(devices.values()))))
    nbytes = dtypes.nbytes(elements, stored.dtype)
    number = min(len(devices), max(1, nbytes // LEAST))
    writers = (
        sorted(devices) if number == len(devices) else sorted(devices, key=lambda each: (loads[each], each))[:number]
    )
    # All processes count alike, and so choose alike.
    for writer in writers:
        loads[writer] += nbytes // number
    return writers


def _share_blocks(name: str, reads: Sequence[FileRead], device: int, number: int, of: int) -> list[FileWrite]:
    """The share of one of several writers of a tile: of all its elements, in the order of the file."""
    total = sum(block.elements for read in reads for block in read.blocks)
    low, high, at = total * number // of, total * (number + 1) // of, 0
    writes: list[FileWrite] = []
    for piece, blocks in reads:
        mine: list[tuple[int, Block]] = []
        # In the order of the file, so that each share is as few runs as can be.
        for block in sorted(blocks):
            begin, end = max(low - at, 0), min(high - at, block.elements)
            mine += ((device, part) for part in (cut_range(block, begin, end) if begin < end else ()))
            at += block.elements
        if mine:
            writes.append(FileWrite(name, piece, tuple(mine)))
    return writes


def _list_chunk_writes(
    stored: Stored, holders: Sequence[tuple[int, int, Sequence[FileRead]]], loads: defaultdict[int, int], process: int
) -> list[FileWrite]:
    """The chunks that a process writes whole; raises `LayoutError` where no process holds one."""
    has: defaultdict[Box, defaultdict[int, list[tuple[int, Block]]]] = defaultdict(lambda: defaultdict(list))
    pieces: dict[Box, StoredPiece] = {}
    for owner, device, reads in holders:
        for piece, blocks in reads:
            pieces[piece.box] = piece
            has[piece.box][owner] += ((device, block) for block in blocks)
    writes: list[FileWrite] = []
    for box, piece in sorted(pieces.items()):
        elements = math.prod(stop - start for start, stop in box)
        whole = [each for each, of in has[box].items() if sum(block.elements for _, block in of) == elements]
        if not whole:
            raise LayoutError(f"no process holds all elements {box} of {quoted(stored.name)}; give chunks= of tiles")
        # Whoever has least to write so far.
        writer = min(whole, key=lambda each: (loads[each], each))
        loads[writer] += dtypes.nbytes(elements, stored.dtype)
        if writer == process:
            writes.append(FileWrite(stored.name, piece, tuple(has[box][writer])))
    return writes


def has_whole_chunks(stored: Stored, layout: Layout, process_of: ProcessOf) -> bool:
    """Whether of every chunk some process holds all."""
    try:
        list_file_writes({stored.name: stored}, {stored.name: layout}, process_of, -1)
    except LayoutError:
        return False
    return True


def count_run_bytes(layout: Layout) -> int:
    """Bytes of the shortest run that a tile is made of in a file of the array in C order.

    >>> from reshard.types.mesh import Mesh
    >>> [count_run_bytes(Layout.parse(text, Mesh(x=2))) for text in ("f32[{x}3, 8]", "f32[6, {x}4]", "f32[2{x}2, 8]")]
    [96, 16, 64]
    """
    elements = 1
    for dim in reversed(layout.dims):
        if any(digit.axis is not None for digit in dim.digits):
            if dim.pieces is not None:  # Runs of any length, of which some are short: as they are in the mean.
                return dtypes.nbytes(elements * dim.size // max(1, len(dim.pieces.lengths)), layout.dtype)
            # Its last local digit is what lies together.
            last = dim.digits[-1]
            return dtypes.nbytes(elements * (1 if last.axis is not None else last.radix), layout.dtype)
        elements *= dim.size
    return dtypes.nbytes(elements, layout.dtype)
