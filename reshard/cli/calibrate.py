"""`reshard calibrate`: the latencies and bandwidths of MPI ranks, measured and written as a network."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from reshard.cli.options import Command, Options

_EXAMPLES = """\
examples:
  reshard calibrate -n 4 -o network.json
  mpiexec -n 64 reshard calibrate -o network.json
  reshard plan --network ./network.json ...
"""


@dataclass(frozen=True)
class CalibrateOptions(Options):
    """The options of `reshard calibrate`."""

    ranks: int | None
    output: str | None
    name: str

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the number of ranks, and the file and the name of the network."""
        what = "how many ranks to start (default: those that run it)"
        parser.add_argument("-n", "--ranks", type=int, metavar="N", help=what)
        what = "where the network is written (default: stdout)"
        parser.add_argument("-o", "--output", metavar="FILE", help=what)
        what = "the network's name (default calibrated)"
        parser.add_argument("--name", default="calibrated", metavar="NAME", help=what)


def run_calibrate(options: CalibrateOptions) -> int:
    """Measures on `--ranks` ranks that it starts, or on those that run it already; rank 0 writes the network."""
    from reshard.mpi import launch

    if options.ranks is None:
        return _measure_network(options)
    output = [] if options.output is None else ["-o", options.output]
    return launch(options.ranks, ["-m", "reshard", "calibrate", "--name", options.name, *output])


def _measure_network(options: CalibrateOptions) -> int:
    from reshard.cli.programs import write_output
    from reshard.mpi import calibrate, world

    comm = world()
    network = calibrate(comm, options.name)
    if comm.rank:
        return 0
    write_output("-" if options.output is None else options.output, f"{network.to_json()}\n")
    return 0


COMMAND = Command(
    "calibrate",
    "measure the latencies and bandwidths of MPI ranks, as a network to plan for",
    _EXAMPLES,
    CalibrateOptions,
    run_calibrate,
)
