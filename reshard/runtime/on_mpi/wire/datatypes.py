"""MPI datatypes of messages that do not lie in one run: MPI then packs and unpacks while it sends.

Where the budget leaves no room for a buffer, and for long runs on MPICH, which takes them one by one: on four and
eight ranks runs of 256 KiB take 1.3 to 1.5 times a plain copy, and 2.5 to 3.7 if packed before; runs of 16 KiB 1.9 to
2.1, and 2.1 to 2.7; but short ones 4 to 11. Open MPI is as fast as packing before sending while all ranks have a
core, and was seen to be slower when they share them, whatever the runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mpi4py import MPI

from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.wire.chunks import Chunk, Place

TAKES_RUNS = "MPICH" in MPI.Get_library_version()
"""Whether this MPI had better take long runs one by one than have them packed."""

LONG = 16 << 10
"""Bytes of such a run."""


class Datatypes:
    """The types of the messages of one side of a move, made once for tiles of the same strides."""

    def __init__(self) -> None:
        self._strides: tuple[int, ...] = ()
        self._made: dict[int, MPI.Datatype] = {}
        self._long: dict[int, bool] = {}

    def long(self, number: int, chunk: Chunk, tile: Array) -> bool:
        """Whether MPI had better be given the message as it lies in the tile than packed."""
        if not TAKES_RUNS or chunk.padded:
            return False
        self._for(tile)
        if number not in self._long:
            places = [where for piece in chunk.pieces for _, where in piece.parts]
            runs = sum(math.prod(where.extents) * tile.itemsize // _run(where, tile)[0] for where in places)
            self._long[number] = chunk.elements * tile.itemsize >= LONG * runs
        return self._long[number]

    def _for(self, tile: Array) -> None:
        if tile.strides != self._strides:
            self.free()
            self._strides = tile.strides

    def of(self, number: int, chunk: Chunk, tile: Array) -> MPI.Datatype:
        """The type of the side's message of this number, relative to a tile's lowest address."""
        self._for(tile)
        if number not in self._made:
            self._made[number] = _message(chunk, tile).Commit()
        return self._made[number]

    def free(self) -> None:
        """Gives all types back."""
        for made in self._made.values():
            made.Free()
        self._made, self._long = {}, {}

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self.free()


@dataclass(frozen=True)
class Side:
    """The messages that a rank sends, or those that it receives, and their datatypes."""

    chunks: tuple[Chunk, ...]
    types: Datatypes = field(default_factory=Datatypes, compare=False)


def memory_of(tile: Array) -> MPI.memory:
    """All memory of a tile, from its lowest address up."""
    reach = [(extent - 1) * abs(stride) for extent, stride in zip(tile.shape, tile.strides, strict=True)]
    address: int = tile.__array_interface__["data"][0]
    lowest = address - _below(tile)
    return MPI.memory.fromaddress(lowest, sum(reach) + tile.itemsize, readonly=not tile.flags.writeable)


def _below(tile: Array) -> int:
    """Bytes from a tile's lowest address to its first element."""
    return sum((n - 1) * -stride for n, stride in zip(tile.shape, tile.strides, strict=True) if stride < 0)


def _message(chunk: Chunk, tile: Array) -> MPI.Datatype:
    places = [where for piece in chunk.pieces for _, where in piece.parts]
    start = _below(tile)
    offsets = [start + sum(at * by for at, by in zip(where.start, tile.strides, strict=True)) for where in places]
    types = [_place(where, tile) for where in places]
    made = MPI.Datatype.Create_struct([1] * len(types), offsets, types)
    for each in types:
        each.Free()
    return made


def _place(where: Place, tile: Array) -> MPI.Datatype:
    """A run of bytes, repeated along the axes from the innermost out."""
    run, axes = _run(where, tile)
    made = MPI.BYTE.Create_contiguous(run)
    for extent, stride in reversed(axes):
        inner, made = made, made.Create_hvector(extent, 1, stride)
        inner.Free()
    return made


def _run(where: Place, tile: Array) -> tuple[int, list[tuple[int, int]]]:
    """The bytes of a place's runs, and the (extent, stride) of the axes along which they lie."""
    axes = [(n, tile.strides[dim] * step) for n, (dim, step) in zip(where.extents, where.steps, strict=True)]
    run = tile.itemsize
    while axes and (axes[-1][1] == run or axes[-1][0] == 1):
        run *= axes.pop()[0]
    return run, axes
