"""What a person sees of a run on ranks: nothing when all is well, and one traceback of an error that ranks share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reshard.mpi import rank
from reshard.mpi.launch import environment

SHARED = "from mpi4py import MPI\n\ndef f():\n    raise ValueError('the sizes do not fit')\n\nf()\n"
EACH = "from mpi4py import MPI\nimport time\ntime.sleep(MPI.COMM_WORLD.rank)\nprint(1 / 0)\n"


def run(script: Path, text: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """What `reshard run` prints of a script."""
    script.write_text(text, encoding="utf-8")
    line = [sys.executable, "-m", "reshard", "run", "-n", str(ranks), str(script)]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, env=environment())


def test_silence_when_all_is_well(tmp_path: Path):
    pytest.importorskip("mpi4py")
    ran = run(tmp_path / "fine.py", "from mpi4py import MPI\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(("text", "error", "line"), [(SHARED, "ValueError: the sizes", 4), (EACH, "ZeroDivision", 4)])
def test_one_traceback_that_begins_in_the_script(tmp_path: Path, text: str, error: str, line: int):
    pytest.importorskip("mpi4py")
    ran = run(tmp_path / "wrong.py", text)
    assert ran.returncode != 0
    assert ran.stderr.count("Traceback") == 1 and ran.stderr.count(error) == 1
    assert f'File "{tmp_path / "wrong.py"}", line {line}' in ran.stderr and "runpy" not in ran.stderr


def test_different_errors_are_all_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(rank.FOLDER, str(tmp_path))
    for error in (ValueError("one"), ValueError("two"), KeyError("one"), ValueError("one")):
        rank.show(type(error), error, None)
    assert capsys.readouterr().err.splitlines() == ["ValueError: one", "ValueError: two", "KeyError: 'one'"]


def test_without_a_folder_each_rank_shows_its_own(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv(rank.FOLDER, raising=False)
    for _ in range(2):
        rank.show(ValueError, ValueError("one"), None)
    assert capsys.readouterr().err.splitlines() == ["ValueError: one"] * 2
