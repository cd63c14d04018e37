"""`reshard run`: a script on MPI ranks, also as root and on fewer cores than ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from reshard.cli.options import Command, Options

_EXAMPLES = """\
examples:
  reshard run -n 4 script.py
  reshard run -n 8 script.py --option of the script
  reshard run -n 2 -m package.module
"""


@dataclass(frozen=True)
class RunOptions(Options):
    """The options of `reshard run`."""

    ranks: int
    module: list[str] | None
    arguments: list[str]

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the number of ranks, and the script or the module with its own arguments."""
        parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks")
        what = "a module instead of a script, and its arguments"
        parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help=what)
        what = "it, and its arguments"
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=what)


def run_script(options: RunOptions) -> int:
    """Starts the ranks, waits for them, and returns the exit code of mpiexec."""
    from reshard.mpi import launch

    return launch(options.ranks, options.arguments if options.module is None else ["-m", *options.module])


COMMAND = Command("run", "run a Python script on MPI ranks", _EXAMPLES, RunOptions, run_script)
