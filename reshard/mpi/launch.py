"""Starting ranks: the MPI of this Python's environment, set up to run as root and on fewer cores than ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.errors import RankError

SETTINGS: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",  # Without UCX's devices it prints an error at every shared window.
}
"""What Open MPI needs, unless the user's environment says otherwise; MPICH needs nothing."""

_OF_A_RANK = ("PMI_", "PMIX_", "HYDI_", "OMPI_COMM_", "MPIEXEC_")
_PATIENCE = 10  # Seconds for mpiexec to end its ranks, once it is told to.


def launch(ranks: int, arguments: Sequence[str], mpiexec: str | None = None, timeout: float | None = None) -> int:
    """Runs `python -m mpi4py arguments...` on so many ranks, and returns mpiexec's exit status.

    An exception on one rank ends all of them. `arguments` are those of Python: a script and its own, or `-m`
    and a module. Raises `RankError` if there is no mpiexec, or the ranks take longer than `timeout` seconds.
    """
    with subprocess.Popen(command(ranks, arguments, mpiexec), env=environment()) as started:
        try:
            return started.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RankError(f"{ranks} ranks of {' '.join(arguments)} took longer than {timeout:g} s; ended") from None
        finally:
            end(started)


def end(started: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ends an mpiexec that still runs, and its ranks with it."""
    if started.poll() is not None:
        return
    started.terminate()  # Unlike a kill, which would leave the ranks behind.
    try:
        started.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        started.kill()


def command(ranks: int, arguments: Sequence[str], mpiexec: str | None = None) -> list[str]:
    """The command line that starts the ranks; raises `RankError` for fewer than one, or if there is no mpiexec.

    >>> command(2, ["script.py", "--fast"], "mpiexec")[:3]
    ['mpiexec', '-n', '2']
    """
    if ranks < 1:
        raise RankError(f"{ranks} ranks: give a whole number from 1 up")
    return [mpiexec or find(), "-n", str(ranks), sys.executable, "-m", "mpi4py", *arguments]


def environment() -> dict[str, str]:
    """This process's environment with `SETTINGS` and faster copies, without what makes a process a rank already."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
    return {**SETTINGS, **_copying(), **kept}


def _copying() -> dict[str, str]:
    """On x86 processors with fast short `rep movsb`, makes glibc's memcpy use it from 600 bytes on instead of 4096.

    It writes without reading the old lines first: strided copies of runs between these sizes take two thirds.
    """
    processors = Path("/proc/cpuinfo")
    if not processors.exists() or " fsrm" not in processors.read_text():
        return {}
    return {"GLIBC_TUNABLES": "glibc.cpu.x86_rep_movsb_threshold=600"}


def find() -> str:
    """The mpiexec beside this Python, where MPI's wheels put theirs, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise RankError("there is no mpiexec beside this Python or on the path; pip install 'reshard[mpi]' brings one")
    return found
