"""`reshard calibrate`: the latencies and bandwidths of MPI ranks, measured and written as a network."""

from __future__ import annotations

from reshard.cli import files
from reshard.cli.arguments import Options
from reshard.mpi import launch


def run(options: Options) -> int:
    """Measures on ranks that it starts, or with no number of them on those that run it; rank 0 writes."""
    if options.ranks is None:
        return _measure(options)
    named = ["--name", options.name, *(["-o", options.output] if options.output else [])]
    return launch(options.ranks, ["-m", "reshard", "calibrate", *named])


def _measure(options: Options) -> int:
    from reshard.mpi import calibrate, world

    comm = world()
    network = calibrate(comm, options.name)
    if comm.rank:
        return 0
    if options.output is None:
        print(network.to_json())
        return 0
    files.write(options.output, f"{network.to_json()}\n")
    return 0
