"""What a call over MPI costs, beside hand-written code for the same bytes, on the MPI of this Python.

    python benchmarks/mpi_calls.py                     # 2 and 4 ranks
    python benchmarks/mpi_calls.py --ranks 4 --repeats 40
    python benchmarks/mpi_calls.py --calls 20          # short batches: on a busy machine, some run undisturbed

Small moves, rows to columns, by bytes of a rank's tile, in microseconds a call: the slowest rank's time for a batch of
calls, over their number. Ways take turns; the figures are the lowest batch and the median one. All ways have warm
buffers, and every result is checked once.

    by hand        one numpy copy into a send buffer, Alltoall, one numpy copy out of the receive buffer: both fixed
    handle         handle(tile, out=out) of `reshard.mpi.prepare`; `new` without out, `begun` by start and wait
    redistribute   reshard.mpi.redistribute(tile, ..., out=out), repeated
    array          DistArray.redistribute, repeated, with out; `new` without

numpy's functions on a DistArray of 8 columns, in microseconds a call: `numpy` on each rank's tile, with an Allreduce
where ranks must add up; `array` the same expression on the array, `dim` its move by `redistribute(0)`.

200 arrays of 16 KiB, in milliseconds: by hand they go in one Alltoall of all; `reshard.mpi.redistribute` takes a dict.
`create` makes 200 arrays, `DistArray.empty`. Overlap: a handle's move of 8 MiB a rank and a product of matrices, one
after the other and begun before it; `hidden` is what that saves, over the shorter of the two.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from reshard import Layout, Mesh
from reshard.mpi import DistArray, launch, prepare, redistribute

Run = Callable[[], object]


def ends(comm: Any, nbytes: int) -> tuple[Layout, Layout]:
    """Rows and columns, of so many bytes on each rank, or a little less."""
    rows = 8 if nbytes >= 512 * comm.size else 1
    columns = comm.size * max(1, nbytes // 8 // rows // comm.size)
    held = ([["x"], []], [[], ["x"]])
    shape = rows * comm.size, columns
    before, after = (Layout.from_spec(Mesh(x=comm.size), shape, "float64", each) for each in held)
    return before, after


def tile_of(layout: Layout, rank: int) -> np.ndarray:
    from reshard.runtime.on_mpi.global_array import global_indices

    rows, columns = (global_indices(layout, dim, rank) for dim in (0, 1))
    return (rows[:, None] * layout.shape[1] + columns).astype(float)


def by_hand(comm: Any, before: list[np.ndarray], after: list[np.ndarray]) -> Run:
    """All arrays in one Alltoall."""
    size, rows, columns = comm.size, before[0].shape[0], after[0].shape[1]
    send, receive = (np.empty((size, len(before), rows, columns)) for _ in range(2))
    gives = [(send[:, at], tile.reshape(rows, size, columns).swapaxes(0, 1)) for at, tile in enumerate(before)]
    takes = [(out.reshape(size, rows, columns), receive[:, at]) for at, out in enumerate(after)]

    def run() -> None:
        for into, view in gives:
            into[...] = view
        comm.Alltoall(send, receive)
        for into, view in takes:
            into[...] = view

    return run


def timed(comm: Any, ways: dict[str, Run], calls: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds a call of every way: the lowest and the median batch."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for _ in range(repeats):
        for name, run in ways.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append(max(comm.allgather(time.perf_counter() - start)) / calls)
    return {name: (min(of), median(of)) for name, of in times.items()}


def small(comm: Any, nbytes: int, repeats: int, calls: int) -> dict[str, tuple[float, float]]:
    source, target = ends(comm, nbytes)
    tile, wanted = tile_of(source, comm.rank), tile_of(target, comm.rank)
    out = np.zeros_like(wanted)
    handle = prepare(source, target, comm)
    array, into = DistArray.empty(source, comm), DistArray.empty(target, comm)
    array.tile[...] = tile
    ways: dict[str, Run] = {
        "by hand": by_hand(comm, [tile], [out]),
        "handle": lambda: handle(tile, out=out),
        "handle, new": lambda: handle(tile),
        "handle, begun": lambda: handle.start(tile, out=out).wait(),
        "redistribute": lambda: redistribute(tile, source, target, comm, out=out),
        "array": lambda: array.redistribute(target, out=into),
        "array, new": lambda: array.redistribute(target),
    }
    for name, run in ways.items():
        for _ in range(3):
            out[...] = into.tile[...] = 0
            result = run()
            result = result.tile if isinstance(result, DistArray) else result
            assert np.array_equal(out if isinstance(result, type(None)) else result, wanted), name
    some = min(2000 // comm.size, (64 << 20) // nbytes) // comm.size
    return timed(comm, ways, calls or max(5, some), repeats)


def functions(comm: Any, nbytes: int, repeats: int, calls: int) -> dict[str, tuple[float, float]]:
    mesh, rows = Mesh(x=comm.size), max(1, nbytes // 64)
    array = DistArray.full(Layout.from_spec([["x"], []], mesh, (rows * comm.size, 8), "float64"), 2.0, comm)
    tile, number, line = array.tile, np.empty(()), np.empty(8)
    wanted = rows * comm.size * 16.0
    assert array.sum() == wanted and array.std() == 0 and (array + array).tile.max() == 4
    ways: dict[str, Run] = {
        "numpy, a + b": lambda: tile + tile,
        "array, a + b": lambda: array + array,
        "numpy, sum": lambda: comm.Allreduce(np.asarray(tile.sum()), number),
        "array, sum": lambda: array.sum(),
        "numpy, sum(0)": lambda: comm.Allreduce(tile.sum(0), line),
        "array, sum(0)": lambda: array.sum(0),
        "array, max": lambda: array.max(),
        "array, mean": lambda: array.mean(),
        "array, dim": lambda: array.redistribute(0),
    }
    return timed(comm, ways, calls or 40, repeats)


def many(comm: Any, repeats: int) -> dict[str, tuple[float, float]]:
    source, target = ends(comm, 16 << 10)
    tiles = {f"a{n}": tile_of(source, comm.rank) + n for n in range(200)}
    outs = {name: np.zeros(target.tile_shape) for name in tiles}
    handed = [np.zeros(target.tile_shape) for _ in tiles]
    ways: dict[str, Run] = {
        "by hand": by_hand(comm, list(tiles.values()), handed),
        "dict": lambda: redistribute(tiles, source, target, comm),
        "dict, out": lambda: redistribute(tiles, source, target, comm, out=outs),
        "create": lambda: [DistArray.empty(source, comm) for _ in tiles],
    }
    ways["by hand"]()
    for moved in (ways["dict"](), ways["dict, out"]()):
        assert all(np.array_equal(one, other) for one, other in zip(moved.values(), handed, strict=True))  # type: ignore
    return timed(comm, ways, 1, repeats)


def overlap(comm: Any, repeats: int) -> dict[str, tuple[float, float]]:
    source, target = ends(comm, 8 << 20)
    tile, out = tile_of(source, comm.rank), np.zeros(target.tile_shape)
    handle, square = prepare(source, target, comm), np.ones((384, 384))

    def compute() -> None:
        for _ in range(2):
            square @ square

    def both() -> None:
        begun = handle.start(tile, out=out)
        compute()
        begun.wait()

    ways: dict[str, Run] = {"move": lambda: handle(tile, out=out), "compute": compute, "begun, compute, wait": both}
    return timed(comm, ways, 5, repeats)


def rank_main(repeats: int, calls: int) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    name = " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")
    lines = [f"{name}, {comm.size} ranks; lowest (median)"]
    for nbytes in (64, 4 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20):
        times = small(comm, nbytes, repeats, calls)
        ratios = ", ".join(f"{way} {of[1] / times['by hand'][1]:.2f}" for way, of in times.items())
        lines.append(f"  {nbytes:7} B, us: {shown(times, 1e6)}; medians over by hand: {ratios}")
    for nbytes in (64, 64 << 10):
        lines.append(f"  {nbytes:7} B, us: {shown(functions(comm, nbytes, repeats, calls), 1e6)}")
    lines.append(f"  200 arrays, ms: {shown(many(comm, max(5, repeats // 4)), 1e3)}")
    times = overlap(comm, max(5, repeats // 4))
    move, compute, both = (low for low, _ in times.values())
    hidden = (move + compute - both) / min(move, compute)
    lines.append(f"  overlap, ms: {shown(times, 1e3)}; hidden {hidden:.0%}")
    if comm.rank == 0:
        print("\n".join(lines), flush=True)


def shown(times: dict[str, tuple[float, float]], unit: float) -> str:
    return ", ".join(f"{way} {low * unit:.1f} ({middle * unit:.1f})" for way, (low, middle) in times.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--calls", type=int, default=0, help="calls of a batch of small moves")
    parser.add_argument("--on-a-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        rank_main(options.repeats, options.calls)
        return 0
    arguments = [__file__, "--repeats", str(options.repeats), "--calls", str(options.calls), "--on-a-rank"]
    return max(launch(n, arguments) for n in options.ranks)


if __name__ == "__main__":
    sys.exit(main())
