"""Thousands of random moves and schedules, each checked element by element, with an eye on memory and on waits.

    reshard run -n 6 benchmarks/mpi_soak.py layouts [count]
    reshard run -n 4 benchmarks/mpi_soak.py strides [count] [first seed]
    reshard run -n 4 benchmarks/mpi_soak.py pieces [count] [first seed]
    reshard run -n 3 benchmarks/mpi_soak.py schedules [count] [first seed]

`layouts`: layouts of all kinds, in all ways, on one node, on two and with every rank alone. The same moves come again
in every round, so that what is remembered of them (plans, buffers, windows) is there after the first. Memory is what
the kernel says that a rank has, and what all ranks share. `strides`: tiles in any memory, between guard pages
(`tests.mpi.strides`). `pieces`: arrays in pieces of any size (`tests.mpi.pieces`). `schedules`: moves that begin, calls
and waits in any order (`tests.mpi.schedules`); the longest wait is from when the last rank has come to an operation to
when all are done, and how much of that a rank had a core: on a busy machine the rest goes to others. Planning is work:
where an operation is long, the schedule is made again, and the shortest of three times of each is what counts.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reshard.runtime.on_mpi.team import team_of
from tests.layouts import SIZES, random_layout
from tests.mpi import schedules, strides
from tests.mpi.cases import MESHES
from tests.mpi.moving import any_options, check_move
from tests.mpi.pieces import check_seed
from tests.mpi.schedules import run_schedule, split_communicator, times_after_arrival
from tests.mpi.strides import run_move

CHECKS = {"strides": run_move, "pieces": check_seed}

ROUNDS = 7
AT_ONCE = 25
"""Moves, or schedules, on one communicator."""

LONG = 0.1
"""Seconds beyond the work that no operation may take."""


def resident() -> int:
    """Bytes of this process, pages of shared windows included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def shared() -> int:
    """Bytes of shared memory of all processes of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def soak_layouts(moves: int) -> None:
    comm = MPI.COMM_WORLD
    start, wrong = time.perf_counter(), 0
    kinds = [nodes for nodes in (1, 2, comm.size) if nodes <= comm.size]
    for number in range(ROUNDS * len(kinds)):
        nodes = kinds[number // ROUNDS]
        team = team_of(comm, nodes=nodes if number % ROUNDS == 0 else None)
        choose = random.Random(nodes)
        for _ in range(moves // (ROUNDS * len(kinds))):
            mesh = choose.choice(MESHES[comm.size])
            shape = [choose.choice(SIZES) for _ in range(choose.randint(0, 3))]
            partial = choose.random() < 0.2
            source, target = random_layout(choose, mesh, shape, "int32", partial), random_layout(choose, mesh, shape)
            try:
                check_move(comm, team, source, target, any_options(choose, source, target))
            except Exception as error:
                wrong += 1
                print(f"rank {comm.rank}: {source} -> {target} {type(error).__name__}: {error}", flush=True)
        most, bad, windows = comm.allreduce(resident(), MPI.MAX), comm.allreduce(wrong), shared()
        if comm.rank == 0:
            done = (number + 1) * (moves // (ROUNDS * len(kinds)))
            seconds = time.perf_counter() - start
            memory = f"{most / 2**20:.1f} MiB a rank at most, {windows / 2**20:.1f} MiB shared"
            print(f"{nodes} nodes, {done} moves, {bad} wrong, {memory}, {seconds:.0f} s", flush=True)


def _find_longest(comm: MPI.Intracomm, times: list[tuple[float, float]]) -> tuple[float, ...]:
    return tuple(comm.allreduce(max(each), MPI.MAX) for each in zip(*times, strict=True))


def soak_seeds(kind: str, count: int, first: int) -> None:
    """Moves, or schedules, by seed: in turn on one node, on two of different sizes, and with every rank alone."""
    schedules.LIMIT = strides.LIMIT = 600.0  # Others may have the machine for a while.
    comm, wrong, longest, slow = MPI.COMM_WORLD, 0, (0.0, 0.0), 0
    start, kinds = time.perf_counter(), (1, min(2, comm.size), comm.size)
    for block in range(first, first + count, AT_ONCE):
        nodes = kinds[block // AT_ONCE % 3]
        comms: list[MPI.Intracomm] = []
        for seed in range(block, min(block + AT_ONCE, first + count)):
            if not comms:
                world = comm.Dup()
                comms = [world, *split_communicator(world)]
                for each in comms:
                    team_of(each, nodes=min(nodes, each.size))
            error = ""
            try:
                if kind in CHECKS:
                    CHECKS[kind](world, team_of(world), seed, nodes)
                else:
                    times = times_after_arrival(comms, run_schedule(comms, seed).spans)
            except Exception as caught:
                error = str(caught)
                print(f"rank {comm.rank}, {nodes} nodes: {error}", flush=True)
            if failed := any(comm.allgather(error)):
                wrong += 1
            if failed and kind == "schedules":  # Ranks may be at different places: they go on with other communicators.
                comms = []
            elif kind == "schedules":
                for _ in range(2):
                    if _find_longest(comm, times)[1] <= LONG:
                        break
                    again = times_after_arrival(comms, run_schedule(comms, seed).spans)
                    times = [(min(a[0], b[0]), min(a[1], b[1])) for a, b in zip(times, again, strict=True)]
                most = _find_longest(comm, times)
                longest, slow = tuple(map(max, zip(longest, most, strict=True))), slow + (most[1] > LONG)
                if most[1] > LONG and comm.rank == 0:
                    print(f"schedule {seed}, {nodes} nodes: {most[0]:.3f} s, {most[1]:.3f} s with a core", flush=True)
        for each in comms:
            each.Free()
        done, seconds = min(block + AT_ONCE - first, count), time.perf_counter() - start
        if comm.rank == 0 and (done == count or block // AT_ONCE % 10 == 9):
            waits = (
                f", longest {longest[0]:.3f} s, {longest[1]:.3f} with a core, {slow} above {LONG}"
                if kind == "schedules"
                else ""
            )
            print(f"{done} {kind} on {comm.size} ranks, {wrong} wrong{waits}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    kind, *numbers = sys.argv[1:] or ["layouts"]
    count, first = (int(each) for each in [*numbers, *("2000", "0")[len(numbers) :]])
    if kind == "layouts":
        soak_layouts(count)
    else:
        soak_seeds(kind, count, first)
