"""Thousands of random moves on six ranks, each checked element by element, with an eye on memory.

    reshard run -n 6 benchmarks/mpi_soak.py [moves]

Layouts are of all kinds, in all ways, on one node, on two and with every rank alone. The same moves come again in
every round, so that what is remembered of them (plans, buffers, windows) is there after the first. Memory is what the
kernel says that a rank has, and what all ranks share.
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
from tests.mpi.cases import MESHES
from tests.mpi.moving import any_options, check_move

ROUNDS = 7


def resident() -> int:
    """Bytes of this process, pages of shared windows included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def shared() -> int:
    """Bytes of shared memory of all processes of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


def main(moves: int) -> None:
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


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
