"""The commands that start MPI ranks: `reshard run` for a script, `reshard calibrate` to measure their network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.cli.option_groups import Command, argument
from reshard.errors import RankError

_RUN_EXAMPLES = """\
examples:
  reshard run -n 4 script.py
  reshard run -n 8 script.py --option of the script
  reshard run -n 2 -m package.module
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `reshard run`."""

    ranks: int = argument("-n", "-np", "--ranks", type=int, required=True, metavar="N", help="how many ranks")
    module: Sequence[str] | None = argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="a module instead of a script, and its arguments",
    )
    arguments: Sequence[str] = argument(
        "arguments", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="it, and its arguments"
    )


def run_script(options: RunOptions) -> int:
    """Starts the ranks, waits for them, and returns the exit code of mpiexec."""
    from reshard.mpi import launch

    return launch(options.ranks, options.arguments if options.module is None else ["-m", *options.module])


_CALIBRATE_EXAMPLES = """\
examples:
  reshard calibrate -n 4 -o network.json
  mpiexec -n 64 reshard calibrate -o network.json
  reshard plan --network ./network.json ...
  reshard calibrate --jax x=4,y=2
"""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of `reshard calibrate`."""

    ranks: int | None = argument(
        "-n", "-np", "--ranks", type=int, metavar="N", help="how many ranks to start (default: those that run it)"
    )
    output: str | None = argument(
        "-o", "--output", metavar="FILE", help="where the network is written (default: stdout)"
    )
    name: str = argument("--name", default="calibrated", metavar="NAME", help="the network's name (default calibrated)")
    jax: str | None = argument(
        "--jax", metavar="MESH", help="measure the devices of JAX, as this mesh, and their speed"
    )


def run_calibrate(options: CalibrateOptions) -> int:
    """Measures the devices of JAX, or on `--ranks` ranks that it starts, or on those that run it already, and keeps
    that for calls that name no network; rank 0 writes it."""
    from reshard.cli.programs import write_output
    from reshard.runtime.platform_network import find_calibration_folder

    kept = f"kept in {find_calibration_folder()} as well: calls without network= use it"
    if options.jax is not None:
        from reshard.jax.layout_choice.calibration import calibrate

        measured = calibrate(options.jax, options.name)
        write_output("-" if options.output is None else options.output, f"{measured.network.to_json()}\n")
        print(kept, file=sys.stderr)
        return 0
    from reshard.mpi import launch

    if options.ranks is not None:
        output = [] if options.output is None else ["-o", options.output]
        return launch(options.ranks, ["-m", "reshard", "calibrate", "--name", options.name, *output])
    try:
        from reshard.mpi import calibrate, world  # These load MPI, which a process that starts ranks must not.
    except ImportError as error:
        raise RankError(str(error)) from None

    comm = world()
    network = calibrate(comm, options.name)
    if comm.rank == 0:
        write_output("-" if options.output is None else options.output, f"{network.to_json()}\n")
        print(kept, file=sys.stderr)
    return 0


COMMANDS = (
    Command("run", "run a Python script on MPI ranks", _RUN_EXAMPLES, RunOptions, run_script),
    Command(
        "calibrate",
        "measure latencies and bandwidths, which calls that name no network plan for",
        _CALIBRATE_EXAMPLES,
        CalibrateOptions,
        run_calibrate,
    ),
)
