"""`reshard calibrate`: the latencies and bandwidths of MPI ranks, measured and written as a network."""

from __future__ import annotations

from pathlib import Path

from reshard.cli.arguments import Options
from reshard.errors import ReshardError
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
    try:
        Path(options.output).write_text(f"{network.to_json()}\n", encoding="utf-8")
    except OSError as error:
        raise ReshardError(f"cannot write {options.output}: {error.strerror}") from None
    return 0
