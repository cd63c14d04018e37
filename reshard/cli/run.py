"""`reshard run`: a script on MPI ranks, as root and on fewer cores than ranks too."""

from __future__ import annotations

from reshard.cli.arguments import Options
from reshard.mpi import launch


def run(options: Options) -> int:
    """Starts the ranks, and waits for them; the exit code is that of mpiexec."""
    return launch(options.ranks or 0, options.arguments)
