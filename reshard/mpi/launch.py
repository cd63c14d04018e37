"""Starts ranks by the MPI of this Python's environment, set up to run as root and with more ranks than cores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from reshard.errors import RankError, name_arguments, quoted
from reshard.types.whole import read_items, whole

SETTINGS: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",  # On machines without UCX's devices it would print an error for every shared window.
}
"""Settings that Open MPI needs; the user's environment overrides them. MPICH needs none."""

FOLDER = "RESHARD_RUN_FOLDER"
"""The variable of a rank's environment that names the folder in which the ranks of a run on this machine meet."""

_RANK_VARIABLES = ("PMI_", "PMIX_", "HYDI_", "OMPI_COMM_", "MPIEXEC_")
_PATIENCE = 10  # Seconds that mpiexec has to end its ranks after a SIGTERM.


@name_arguments
def launch(ranks: int, arguments: Sequence[str | Path], timeout: float | None = None) -> int:
    """Runs a script as `python -m mpi4py` does, on a number of ranks, and returns mpiexec's exit status.

        reshard.mpi.launch(4, ["script.py", "--steps", "10"])
        reshard.mpi.launch(4, ["-m", "package.module"])

    An exception on one rank ends all of them; one that several ranks share is shown once. Raises `RankError` without a
    script or an mpiexec, or if the ranks take longer than `timeout` seconds.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
    ...     _ = script.write("from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2")
    ...     script.flush()
    ...     launch(2, [script.name])
    0
    """
    given = read_items(arguments)
    if given is None or not all(isinstance(each, str | Path) for each in given):
        raise RankError(f"arguments {quoted(arguments)}: give a list, such as ['script.py', '--steps', '10']")
    words = [str(each) for each in given]
    if words in ([], ["-m"]):
        raise RankError("nothing to run: give a script, or -m and a module, with its arguments")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):  # pyright: ignore
        raise RankError(f"timeout {quoted(timeout)}: give seconds, a number above 0, or None to wait for the end")
    line = command(ranks, words)
    if find_spec("mpi4py") is None:
        raise RankError("ranks need mpi4py: pip install mpi4py, and mpich with it if this machine has no MPI")
    script = Path(words[0])
    if not words[0].startswith("-") and not (script.is_file() or (script / "__main__.py").is_file()):
        # A pipe could be read by one rank only, and a device such as /dev/zero has no end.
        raise RankError(f"there is no script {quoted(words[0])}; give the path of one, or -m and a module")
    with (
        tempfile.TemporaryDirectory(prefix="reshard-run-") as folder,
        subprocess.Popen(line, env={**environment(), FOLDER: folder}) as started,
    ):
        try:
            return started.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RankError(
                f"{ranks} ranks of {' '.join(words)} took longer than {timeout:g} s and were ended"
            ) from None
        finally:
            end(started)


def end(started: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ends an mpiexec that is still running, together with its ranks."""
    if started.poll() is not None:
        return
    started.terminate()  # A kill would leave the ranks behind.
    try:
        started.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        started.kill()


def command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command line that starts the ranks. Raises `RankError` for fewer than one rank, or without an mpiexec.

    >>> command(2, ["-m", "package.module", "--fast"])[1:3]
    ['-n', '2']
    """
    if whole(ranks, 1) is None:
        raise RankError(f"{quoted(ranks)} ranks: give a whole number from 1 up")
    return [find(), "-n", str(ranks), sys.executable, "-m", "reshard.mpi.rank", *arguments]


def environment() -> dict[str, str]:
    """This process's environment plus `SETTINGS` and faster copies, without the variables that only ranks have."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    # `rep movsb` writes cache lines without reading them first: with it from 600 bytes on instead of 4096, strided
    # copies with runs between these sizes take two thirds of the time, on x86 processors that do it fast.
    processors = Path("/proc/cpuinfo")
    fast = processors.exists() and " fsrm" in processors.read_text()
    copies = {"GLIBC_TUNABLES": "glibc.cpu.x86_rep_movsb_threshold=600"} if fast else {}
    return {**SETTINGS, **copies, **own}


def find() -> str:
    """The path of the mpiexec beside this Python, where the wheels of MPI install it, else of the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise RankError("no mpiexec was found next to this Python or on the PATH; pip install mpich brings one")
    return mpiexec
