"""Starts ranks that run a topic of `tests.mpi`, and reports which of its cases failed, and on which ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.mpi.launch import command, end, environment, find

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
"""Ranks that take longer are ended, and the test fails."""


_OUTLIVING = ["/bin/sh", "-c", 'trap "" USR1; "$@"; exit 0', "sh"]
"""A shell as a rank's parent. MPICH's mpiexec sends SIGUSR1 to the ranks that are left, and ends them if it sees
that one was killed, even if told not to.
"""


def start(
    arguments: Sequence[str], ranks: int, cleanup: bool = True, inside: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts ranks; without `cleanup` the others go on after one has died. `inside` is a command that runs mpiexec."""
    first, count, number, *rest = command(ranks, arguments)
    flags = [] if cleanup else _no_cleanup()
    rest = [*flags, count, number, *([] if cleanup else _OUTLIVING), *rest]
    env = {**environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*inside, first, *rest], cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def _no_cleanup() -> list[str]:
    version = subprocess.run(
        [find(), "--version"], capture_output=True, text=True, env=environment(), check=True
    ).stdout
    return ["-disable-auto-cleanup"] if "HYDRA" in version else ["--enable-recovery"]


def output(started: subprocess.Popen[str], seconds: float = SECONDS) -> str:
    """The output of the ranks until they end, or are ended because they take too long."""
    try:
        return started.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        end(started)
        return f"the ranks took longer than {seconds} s, and were ended\n{started.communicate()[0]}"
    finally:
        end(started)


def check(topic: str, ranks: int, folder: Path, inside: Sequence[str] = ()) -> None:
    """Runs a topic, and asserts that each of its cases passes on every rank."""
    check_all([topic], ranks, folder, inside)


def check_all(topics: Sequence[str], ranks: int, folder: Path, inside: Sequence[str] = ()) -> None:
    """Runs topics one after another in one job, and asserts that each of their cases passes on every rank."""
    report = folder / "report.jsonl"
    started = start(["-m", "tests.mpi.worker", str(report), *topics], ranks, inside=inside)
    text = output(started)
    done = read(report)
    last = list(done)[-1] if done else "none"
    assert started.returncode == 0, f"exit status {started.returncode}, last case begun: {last}\n{text}"
    wrong = [f"{name}\n{error}" for name, error in done.items() if error]
    assert done
    assert not wrong, f"{len(wrong)} of {len(done)} cases\n" + "\n".join(wrong[:6]) + text


def read(report: Path) -> Mapping[str, str]:
    """The error of each case, empty if it passed; a case that was begun and did not end says so."""
    outcomes: dict[str, str] = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        case, text = json.loads(line)
        outcomes[case] = text
    return outcomes
