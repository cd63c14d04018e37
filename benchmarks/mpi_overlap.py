"""How much of a move is hidden behind work, or of the work behind the move: `start`, work, `wait` on two ranks.

    reshard run -n 2 benchmarks/mpi_overlap.py [--seed N] [--nodes 2] [--repeats 7] [--work numpy|python]

Rank 0 works, pinned to the first core. The second core is the free one: the threads that make the moves of both ranks
share it with rank 1, which only waits. Both take the machine for one with a core more than ranks. Work of about the
length of the move, of a third of it, and of three times as much, in

    work     numpy on arrays in the cache, or a loop of Python, which holds the interpreter's lock
    move     start, and wait at once
    both     start, work, wait
    control  start, wait, work: nothing is hidden, so what it shows is what the machine adds

Hidden is (work + move - both) / the shorter of work and move: medians of one run, in turns, of rank 0. Layouts are
drawn by a seed that is printed; with `--nodes 2` the ranks are on two pretended nodes, and elements go in messages.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import handles
from reshard.runtime.on_mpi.team import team_of
from reshard.types import Layout

CACHED = np.full(8 << 10, 1.5)


def work_in_numpy(units: int) -> None:
    for _ in range(0 if MPI.COMM_WORLD.rank else units):
        np.sqrt(CACHED, out=CACHED)


def work_in_python(units: int) -> None:
    total = 0
    for number in range(0 if MPI.COMM_WORLD.rank else units * 100):
        total += number * number


def pin_threads() -> tuple[int, int]:
    """Puts this thread on the first core if it works, and all others on the second one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("give each rank the same two cores: mpiexec must not bind ranks to one")
    second = cores[1]
    first = second if MPI.COMM_WORLD.rank else cores[0]
    os.sched_setaffinity(0, {first})
    make = handles.StartedMove._make_beside

    def make_on_second(move: handles.StartedMove) -> None:
        os.sched_setaffinity(0, {second})  # Of this thread alone.
        make(move)

    handles.StartedMove._make_beside = make_on_second
    handles.CORES = MPI.COMM_WORLD.size + 1
    return cores[0], second


def draw_layouts(choose: random.Random, mebibytes: int) -> tuple[Layout, Layout]:
    """Two different ways to split an array of three dims over two ranks, of about so many MiB a rank."""
    sizes = [choose.choice([1, 2, 4]) * 32 + choose.choice([0, 0, 8]) for _ in range(2)]
    shape = [*sizes, max(2, 2 * (mebibytes << 20) // 8 // sizes[0] // sizes[1] // 2 * 2)]
    choose.shuffle(shape)
    before, after = choose.sample(range(3), 2)
    mesh = rs.Mesh(x=2)
    dims = [[["x"] if dim == at else [] for dim in range(3)] for at in (before, after)]
    return tuple(Layout.from_spec(mesh, shape, "float64", spec) for spec in dims)  # type: ignore[return-value]


def sleep_until(request: MPI.Request) -> None:
    """Waits without the core, on which threads still move: MPI itself would spin."""
    while not request.Test():
        time.sleep(20e-6)


def measure(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each call on rank 0; they are made in turns."""
    comm, times = MPI.COMM_WORLD, {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            sleep_until(comm.Ibarrier())
            start = time.perf_counter()
            call()
            taken = np.array([time.perf_counter() - start])
            sleep_until(comm.Ibcast(taken))
            times[name].append(float(taken[0]))
        if not repeat:
            times = {name: [] for name in calls}
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--seed", type=int)
    read.add_argument("--nodes", type=int, default=1)
    read.add_argument("--repeats", type=int, default=7)
    read.add_argument("--work", choices=["numpy", "python"], default="numpy")
    read.add_argument("--sizes", type=int, nargs="*", default=[2, 8, 32])
    asked, comm = read.parse_args(), MPI.COMM_WORLD
    seed = comm.bcast(asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6))
    cores, choose = pin_threads(), random.Random(seed)
    team_of(comm, nodes=asked.nodes)
    work = work_in_numpy if asked.work == "numpy" else work_in_python
    if comm.rank == 0:
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        print(
            f"seed {seed}, {MPI.get_vendor()[0]}, {asked.nodes} nodes, {asked.work}, cores {cores}, threads {threads}"
        )
        print("| move | MiB | result | work ms | move ms | both ms | control ms | hidden | control |", flush=True)
        print("|---|---|---|---|---|---|---|---|---|")
    shares: list[list[float]] = []
    for size in asked.sizes:
        source, target = draw_layouts(choose, size)
        tile, kept = np.ones(source.tile_shape), np.ones(target.tile_shape)
        with rs.mpi.prepare(source, target, comm) as handle:
            for into in (None, kept):
                shares += measure_overlap(handle, tile, into, work, asked.repeats)
    for name, each in zip(("hidden", "control"), zip(*shares, strict=True), strict=True):
        if comm.rank == 0:
            low = sum(share < 0.6 for share in each)
            print(
                f"{name}: median {statistics.median(each):.2f}, least {min(each):.2f}, {low} of {len(each)} below 0.6"
            )


def measure_overlap(
    handle: handles.MoveHandle, tile: np.ndarray, into: np.ndarray | None, work: Callable[[int], None], repeats: int
) -> list[list[float]]:
    """The shares that are hidden beside work of three lengths, and those of the control; rank 0 prints them."""

    def move() -> None:
        handle.start(tile, out=into).wait()

    def both(units: int) -> None:
        begun = handle.start(tile, out=into)
        work(units)
        begun.wait()

    def apart(units: int) -> None:
        move()
        work(units)

    shares: list[list[float]] = []
    unit = measure({"work": partial(work, 200), "move": move}, 3)
    for factor in (1 / 3, 1, 3):
        units = max(1, int(200 * factor * unit["move"] / unit["work"]))
        found = measure(
            {
                "work": partial(work, units),
                "move": move,
                "both": partial(both, units),
                "control": partial(apart, units),
            },
            repeats,
        )
        shorter = min(found["work"], found["move"])
        shares.append([(found["work"] + found["move"] - found[name]) / shorter for name in ("both", "control")])
        if MPI.COMM_WORLD.rank == 0:
            times = " | ".join(f"{seconds * 1e3:.2f}" for seconds in found.values())
            result, mebibytes = "new" if into is None else "out", tile.nbytes / 2**20
            print(
                f"| {handle.source} -> {handle.target} | {mebibytes:.1f} | {result} | {times} "
                f"| {shares[-1][0]:.2f} | {shares[-1][1]:.2f} |",
                flush=True,
            )
    return shares


if __name__ == "__main__":
    main()
