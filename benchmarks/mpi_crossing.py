"""Moves between two sets of ranks on one node: time over a plain copy of the bytes that cross.

    python benchmarks/mpi_crossing.py                       # 4 -> 2, 2 -> 6 and 3 -> 5 ranks
    python benchmarks/mpi_crossing.py --repeats 15 --sets 4-2

In one run, ways take turns, buffers are warm, and a figure is the time, from the first rank's start to the last one's
end, over that of `memcpy`: every receiving rank copies as many bytes as it receives, at once. The lowest times and, in
brackets, the medians: where ranks share cores, a wait for one of them may take as long as the copies. Every way's
result is checked once.

    numpy     by hand: the tiles lie in an MPI window, every receiver copies its boxes out of them by one assignment
              each, and a barrier ends the move

    rows, rows        both sides split dim 0: a receiver's rows lie with one or two holders
    rows, columns     every receiver has a strided part of every holder's tile
    replicated        all holders have the whole array, and share what is asked of them
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reshard.mpi import launch
from reshard.types import Layout, Mesh

SETS = ["4-2", "2-6", "3-5"]
Run = Callable[[], Any]


def problems(senders: int, receivers: int, side: int) -> dict[str, tuple[Layout, Layout]]:
    """Moves of a square of float64 from the first ranks to the ranks after them."""
    one, other = Mesh(x=senders), Mesh({"y": receivers}, device_ids=range(senders, senders + receivers))

    def ends(before: list[list[str]], after: list[list[str]]) -> tuple[Layout, Layout]:
        shape = (side, side)
        return Layout.from_spec(one, shape, "f64", before), Layout.from_spec(other, shape, "f64", after)

    return {
        "rows, rows": ends([["x"]], [["y"]]),
        "rows, columns": ends([["x"]], [[], ["y"]]),
        "replicated": ends([], [["y"]]),
    }


def filled(layout: Layout, rank: int, size: int) -> np.ndarray | None:
    """The tile of the array of its own global indices."""
    from reshard.lower.to_mpi import seat_of
    from reshard.runtime.on_mpi.global_array import global_indices

    seat = seat_of(layout.mesh, rank, size)
    if seat is None:
        return None
    rows, columns = (global_indices(layout, dim, seat) for dim in range(2))
    return (rows[:, None] * layout.shape[1] + columns[None, :]).astype(layout.dtype)


Span = tuple[int, int]


def spans(layout: Layout, device: int) -> list[Span]:
    """The rows and the columns of a device's tile, in layouts that split one dim or none."""
    extents = zip(layout.shape, layout.tile_shape, strict=True)
    first = layout.mesh.devices.index(device)
    return [(0, all_) if own == all_ else (first * own, (first + 1) * own) for all_, own in extents]


def boxes(source: Layout, target: Layout, rank: int) -> list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """What a receiver copies: (holder, box of its tile, box of the result). Holders of the whole share its rows."""
    listed: list[tuple[int, tuple[slice, ...], tuple[slice, ...]]] = []
    here = spans(target, rank) if rank in target.mesh.devices else []
    for number, holder in enumerate(source.mesh.devices if here else ()):
        there = spans(source, holder)
        box = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(here, there, strict=True)]
        if source.tile_shape == source.shape:
            (low, high), of = box[0], source.mesh.size
            box[0] = low + (high - low) * number // of, low + (high - low) * (number + 1) // of
        if all(low < high for low, high in box):
            mine, theirs = (
                tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, end, strict=True))
                for end in (here, there)
            )
            listed.append((holder, theirs, mine))
    return listed


def by_hand(source: Layout, target: Layout, comm: Any, tile: np.ndarray | None, out: np.ndarray) -> Run:
    """The move as numpy and MPI's own window make it."""
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(0 if tile is None else tile.nbytes, 8, comm=comm)
    tiles = [np.frombuffer(window.Shared_query(rank)[0], "f8") for rank in source.mesh.devices]
    held = {rank: each.reshape(source.tile_shape) for rank, each in zip(source.mesh.devices, tiles, strict=True)}
    if tile is not None:
        held[comm.rank][...] = tile
    comm.Barrier()
    views = [(out[mine], held[holder][theirs]) for holder, theirs, mine in boxes(source, target, comm.rank)]

    def run() -> None:
        for into, box in views:
            into[...] = box
        comm.Barrier()

    return run


def ways(source: Layout, target: Layout, comm: Any) -> list[tuple[str, Run, Callable[[], np.ndarray | None]]]:
    """(name, what is timed, its result)."""
    from reshard.mpi import DistArray, redistribute

    tile, wanted = filled(source, comm.rank, comm.size), filled(target, comm.rank, comm.size)
    given = np.zeros(0) if wanted is None else wanted
    other, out = np.empty_like(given), None if wanted is None else np.zeros_like(wanted)
    array, result = DistArray.empty(source, comm), DistArray.empty(target, comm)
    numpys = np.zeros_like(given)
    if tile is not None:
        array.tile[...] = tile
    last: list[Any] = [None]

    def new() -> None:
        last[0] = None
        last[0] = redistribute(tile, source, target, comm)

    return [
        ("memcpy", lambda: np.copyto(other, given), lambda: wanted),
        ("numpy", by_hand(source, target, comm, tile, numpys), lambda: None if wanted is None else numpys),
        ("DistArray", lambda: array.redistribute(target, out=result), lambda: result.tile if result.has_tile else None),
        ("plain, new", new, lambda: last[0]),
        ("plain, out", lambda: redistribute(tile, source, target, comm, out=out), lambda: out),
    ]


def measure(source: Layout, target: Layout, comm: Any, repeats: int) -> dict[str, list[float]]:
    """The seconds of every way, in turns."""
    wanted = filled(target, comm.rank, comm.size)
    listed = ways(source, target, comm)
    for name, run, result in listed:
        run()
        made = result()
        if (made is None) != (wanted is None) or not (made is None or wanted is None or np.array_equal(made, wanted)):
            raise AssertionError(f"{name} is wrong on rank {comm.rank}")
    times: dict[str, list[float]] = {name: [] for name, *_ in listed}
    for _ in range(repeats):
        for name, run, _ in listed:
            comm.Barrier()
            start = time.perf_counter()
            run()
            spans = comm.allgather((start, time.perf_counter()))  # One clock: the ranks are on one machine.
            times[name].append(max(end for _, end in spans) - min(begin for begin, _ in spans))
    return times


def rank_main(options: argparse.Namespace) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    senders, receivers = (int(count) for count in options.on_a_rank.split("-"))
    if comm.rank == 0:
        print(f"{' '.join(MPI.Get_library_version().split()[:3]).rstrip(',')}, {senders} -> {receivers} ranks")
    for name, (source, target) in problems(senders, receivers, options.side).items():
        seconds = measure(source, target, comm, options.repeats)
        copy = seconds.pop("memcpy")
        if comm.rank == 0:
            of = [(way, min(took) / min(copy), median(took) / median(copy)) for way, took in seconds.items()]
            ratios = ", ".join(f"{way} {low:.2f} ({middle:.2f})" for way, low, middle in of)
            print(f"  {name}: memcpy {min(copy) * 1e3:.1f} ms; {ratios}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=SETS, help="ranks that send and that receive, such as 4-2")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--side", type=int, default=3840, help="rows and columns of the array; 3840 is 113 MB")
    parser.add_argument("--on-a-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        rank_main(options)
        return 0
    rest = [f"--repeats={options.repeats}", f"--side={options.side}"]
    return max(launch(sum(map(int, s.split("-"))), [__file__, *rest, f"--on-a-rank={s}"]) for s in options.sets)


if __name__ == "__main__":
    sys.exit(main())
