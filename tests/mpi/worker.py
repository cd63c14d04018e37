"""One rank of a test: runs the cases of some topics; rank 0 writes the outcome of each.

mpiexec -n 4 python -m mpi4py -m tests.mpi.worker <report> <module>.<topic> ...
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TextIO

from mpi4py import MPI

Case = tuple[str, Callable[[], None]]
PATIENCE = 60
"""Seconds that a rank whose case failed waits for the others."""


def main(report: str, *topics: str) -> None:
    comm = MPI.COMM_WORLD
    with open(report if comm.rank == 0 else "/dev/null", "w", encoding="utf-8") as file:
        for topic in topics:
            module, _, name = topic.rpartition(".")
            own = comm if topic == topics[0] else comm.Dup()  # on which no topic before has pretended nodes
            cases: Iterable[Case] = getattr(import_module(f"tests.mpi.{module}"), name)(own)
            run(comm, ((f"{topic}: {case}", call) for case, call in cases), file)


def run(comm: MPI.Intracomm, cases: Iterable[Case], file: TextIO) -> None:
    reports = comm.Dup()  # A rank that fails has left calls of the case unmade: its report must not be taken for one.
    for name, case in cases:
        write(file, name, "begun, not ended")
        text = ""
        try:
            case()
        except Exception:
            text = traceback.format_exc(limit=-4)
        if not meet(reports, PATIENCE if text else None):
            print(f"rank {comm.rank} failed in {name}, and another is still in it\n{text}", flush=True)
            comm.Abort(1)
        wrong = [(rank, text) for rank, text in enumerate(reports.gather(text) or ()) if text]
        write(file, name, "".join(f"rank {rank}: {text}" for rank, text in wrong[:2]))


def meet(comm: MPI.Intracomm, seconds: float | None) -> bool:
    """Whether all ranks come here; a rank that waits without an end is ended by one that does not."""
    barrier = comm.Ibarrier()
    if seconds is None:
        barrier.Wait()
        return True
    end = time.monotonic() + seconds
    while not (there := barrier.Test()) and time.monotonic() < end:
        time.sleep(0.001)
    return there


def write(file: TextIO, name: str, text: str) -> None:
    file.write(json.dumps([name, text]) + "\n")
    file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
