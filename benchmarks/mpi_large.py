"""An array of 5 GiB on two ranks, of which each sends more than 2^31 bytes to the other, in every way that it can go.

    reshard run -n 2 benchmarks/mpi_large.py plain [GiB]         # or windows, or messages

It needs little more than twice the array's size in memory. Every element is checked.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

from reshard.mpi import DistArray, redistribute
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout, Mesh

PART = 1 << 16
_STEPS = np.arange(PART, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_WORDS = np.empty_like(_STEPS)  # Used again and again: fresh pages would take most of the time.


def values(start: int, stop: int) -> np.ndarray:
    """A byte for every global index, such that neighbours and multiples of 2^31 differ: good until the next call."""
    np.add(_STEPS, np.uint64(start * 0x9E3779B97F4A7C15 % 2**64), out=_WORDS)
    return (_WORDS.view(np.uint8)[7::8] if sys.byteorder == "little" else _WORDS.view(np.uint8)[::8])[: stop - start]


def fill(tile: np.ndarray, first: int) -> None:
    for at in range(0, tile.size, PART):
        tile[at : at + PART] = values(first + at, first + min(at + PART, tile.size))


def wrong(tile: np.ndarray, first: int) -> int:
    parts = range(0, tile.size, PART)
    return sum(
        int((tile[at : at + PART] != values(first + at, first + min(at + PART, tile.size))).sum()) for at in parts
    )


def main(way: str, gib: float) -> None:
    comm = MPI.COMM_WORLD
    size = int(gib * 2**30) // 2 * 2
    source = Layout.parse(f"u8[{{x}}{size // 2}]", Mesh(x=2))
    target = Layout(Mesh({"x": 2}, device_ids=[1, 0]), source.dims, source.dtype)
    here, there = comm.rank * size // 2, (1 - comm.rank) * size // 2
    team_of(comm, nodes=2 if way == "messages" else 1)
    array = DistArray.empty(source, comm) if way == "windows" else None
    tile = np.empty(size // 2, np.uint8) if array is None else array.tile
    fill(tile, here)
    comm.Barrier()
    start = time.perf_counter()
    if array is None:
        result = redistribute(tile, source, target, comm, limit=300)
    else:
        result = array.redistribute(target, limit=300).tile
    seconds = time.perf_counter() - start
    bad = comm.allreduce(wrong(result, there))
    if comm.rank == 0:
        print(f"{way}: {size} elements, {bad} wrong, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 5)
