"""Starts ranks that run a topic of `tests.mpi.cases`, and says which of its cases went wrong, and on which ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard.mpi.launch import command, end, environment, find

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
"""After so long the ranks are ended, and the test fails."""


_OUTLIVING = ["/bin/sh", "-c", 'trap "" USR1; "$@"; exit 0', "sh"]
"""A shell as a rank's parent. MPICH's mpiexec sends SIGUSR1 to the ranks that are left, and ends them if it sees
that one was killed, even if told not to.
"""


def start(arguments: Sequence[str], ranks: int, cleanup: bool = True) -> subprocess.Popen[str]:
    """Starts ranks; without `cleanup` those that are left go on after one has died."""
    first, count, number, *rest = command(ranks, arguments)
    flags = [] if cleanup else _no_cleanup()
    rest = [*flags, count, number, *([] if cleanup else _OUTLIVING), *rest]
    env = {**environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([first, *rest], cwd=ROOT, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _no_cleanup() -> list[str]:
    said = subprocess.run([find(), "--version"], capture_output=True, text=True, env=environment(), check=True).stdout
    return ["-disable-auto-cleanup"] if "HYDRA" in said else ["--enable-recovery"]


def output(started: subprocess.Popen[str], seconds: float = SECONDS) -> str:
    """What the ranks print until they end, or are ended because they take too long."""
    try:
        return started.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        end(started)
        return f"the ranks took longer than {seconds} s, and were ended\n{started.communicate()[0]}"
    finally:
        end(started)


def check(topic: str, ranks: int, folder: Path) -> None:
    """Runs a topic, and asserts that every case of it went well on every rank."""
    report = folder / "report.jsonl"
    started = start(["-m", "tests.mpi.worker", topic, str(report)], ranks)
    said = output(started)
    done = read(report)
    last = list(done)[-1] if done else "none"
    assert started.returncode == 0, f"exit status {started.returncode}, last case begun: {last}\n{said}"
    wrong = [f"{name}\n{text}" for name, text in done.items() if text]
    assert done
    assert not wrong, f"{len(wrong)} of {len(done)} cases\n" + "\n".join(wrong[:6]) + said


def read(report: Path) -> Mapping[str, str]:
    """Case by case, what went wrong; of a case that was begun and not ended, that it was not."""
    found: dict[str, str] = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        case, text = json.loads(line)
        found[case] = text
    return found
