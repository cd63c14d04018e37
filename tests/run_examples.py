"""Runs examples one after another on the ranks of one job: starting ranks takes as long as what most of them do.

    reshard run -n 4 -m tests.run_examples NAME ...

Before what an example prints stands a line with its name. One that ends with an error ends the job.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mpi4py import MPI

FOLDER = Path(__file__).resolve().parent.parent / "examples"
HEAD = "==== "


def main(*names: str) -> None:
    sys.path.insert(0, str(FOLDER))  # As where a script is run by its path.
    for name in names:
        if MPI.COMM_WORLD.rank == 0:
            print(f"{HEAD}{name}", flush=True)
        sys.argv = [str(FOLDER / f"{name}.py")]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
        sys.stdout.flush()
        MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
