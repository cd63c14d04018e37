"""MPI datatypes for messages that are not contiguous in a tile, so that MPI packs and unpacks while it sends.

They are used where the budget leaves no room for a buffer, and on MPICH for long runs, which it sends one by one:

    four and eight ranks, relative to a plain copy    as a datatype    packed before
    runs of 256 KiB                                   1.3 to 1.5       2.5 to 3.7
    runs of 16 KiB                                    1.9 to 2.1       2.1 to 2.7
    short runs                                        4 to 11

On Open MPI, datatypes are as fast as packing first if every rank has a core, and were slower when ranks shared cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.runtime.on_mpi.copies.stream_copy import SHORT
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.wire.chunks import Chunk, Region

_BYTE = np.dtype(np.uint8)

TAKES_RUNS = "MPICH" in MPI.Get_library_version()
"""Whether this MPI sends long runs faster from a datatype than packed."""

LONG = 16 << 10
"""Bytes from which a run counts as long."""


class Datatypes:
    """The datatypes of one direction's messages, cached until a tile of other strides comes."""

    def __init__(self) -> None:
        self._strides: tuple[int, ...] = ()
        self._made: dict[int, MPI.Datatype] = {}
        self._long: dict[int, bool] = {}

    def long(self, number: int, chunk: Chunk, tile: Array) -> bool:
        """Whether a message consists of long runs, which this MPI sends faster from a datatype than packed."""
        if not TAKES_RUNS or chunk.padded:
            return False
        self._for(tile)
        if number not in self._long:
            regions = [region for piece in chunk.pieces for _, region in piece.parts]
            runs = sum(
                math.prod(region.extents) * tile.itemsize // _run_of_region(region, tile)[0] for region in regions
            )
            self._long[number] = chunk.elements * tile.itemsize >= LONG * runs
        return self._long[number]

    def _for(self, tile: Array) -> None:
        if tile.strides != self._strides:
            self.free()
            self._strides = tile.strides

    def of(self, number: int, chunk: Chunk, tile: Array) -> MPI.Datatype:
        """The datatype of message number `number`, relative to the tile's lowest address (see `memory_of`)."""
        self._for(tile)
        if number not in self._made:
            self._made[number] = _type_of_message(chunk, tile).Commit()
        return self._made[number]

    def free(self) -> None:
        """Frees all datatypes."""
        for made in self._made.values():
            made.Free()
        self._made, self._long = {}, {}

    def __del__(self, is_finalized: Callable[[], bool] = MPI.Is_finalized) -> None:
        # A default argument, because at exit this module's globals may be gone before the caches that hold this object.
        if self._made and not is_finalized():
            self.free()


@dataclass(frozen=True)
class Side:
    """One direction of a move: the messages that a rank sends, or those that it receives, and their datatypes."""

    chunks: tuple[Chunk, ...]
    types: Datatypes = field(default_factory=Datatypes, compare=False)

    def unstaged(self, number: int, tile: Array, staging: int) -> list[Any] | None:
        """The specification with which MPI sends message `number` from, or receives it into, the tile itself.

        None if it must be staged, for which there is room for `staging` elements.
        """
        chunk = self.chunks[number]
        memory = chunk.direct(tile)
        if memory is not None:
            return [memory.view(_BYTE), MPI.BYTE]
        # Plans assume C-ordered tiles and may leave no room to stage messages of other tiles: MPI packs those.
        roomless = chunk.elements > staging and not chunk.padded
        if roomless or self.types.long(number, chunk, tile):
            return [memory_of(tile), 1, self.types.of(number, chunk, tile)]
        return None

    def is_short(self, number: int, tile: Array) -> bool:
        """Whether message `number` has short runs in the tile."""
        regions = [region for piece in self.chunks[number].pieces[:1] for _, region in piece.parts[:1]]
        return all(_run_of_region(region, tile)[0] < SHORT for region in regions)

    def packing(self, number: int, tile: Array, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """The copies of message `number` out of the tile into its buffer, see `Chunk`."""
        return self.chunks[number].packing(tile, buffer)

    def unpacking(self, number: int, tile: Array, buffer: Array) -> Iterator[tuple[Array, Array]]:
        """The copies of message `number` out of its buffer into the tile."""
        return self.chunks[number].unpacking(tile, buffer)


def memory_of(tile: Array) -> MPI.memory:
    """All memory of a tile as MPI takes it, from the lowest address, wherever its first element lies."""
    reach = [(extent - 1) * abs(stride) for extent, stride in zip(tile.shape, tile.strides, strict=True)]
    address: int = tile.__array_interface__["data"][0]
    lowest = address - _bytes_below(tile)
    return MPI.memory.fromaddress(lowest, sum(reach) + tile.itemsize, readonly=not tile.flags.writeable)


def _bytes_below(tile: Array) -> int:
    """Bytes from a tile's lowest address to its first element: 0 unless some strides are negative."""
    return sum((n - 1) * -stride for n, stride in zip(tile.shape, tile.strides, strict=True) if stride < 0)


def _type_of_message(chunk: Chunk, tile: Array) -> MPI.Datatype:
    regions = [region for piece in chunk.pieces for _, region in piece.parts]
    start = _bytes_below(tile)
    offsets = [start + sum(at * by for at, by in zip(region.start, tile.strides, strict=True)) for region in regions]
    types = [_type_of_region(region, tile) for region in regions]
    made = MPI.Datatype.Create_struct([1] * len(types), offsets, types)
    for each in types:
        each.Free()
    return made


def _type_of_region(region: Region, tile: Array) -> MPI.Datatype:
    """A run of bytes, repeated along the axes from the innermost to the outermost."""
    run, axes = _run_of_region(region, tile)
    made = MPI.BYTE.Create_contiguous(run)
    for extent, stride in reversed(axes):
        inner, made = made, made.Create_hvector(extent, 1, stride)
        inner.Free()
    return made


def _run_of_region(region: Region, tile: Array) -> tuple[int, list[tuple[int, int]]]:
    """The bytes of a region's contiguous runs, and the (extent, stride) axes along which the runs are repeated."""
    axes = [(n, tile.strides[dim] * step) for n, (dim, step) in zip(region.extents, region.steps, strict=True)]
    run = tile.itemsize
    while axes and (axes[-1][1] == run or axes[-1][0] == 1):
        run *= axes.pop()[0]
    return run, axes
