"""Starting ranks, knowing which one this is, and what `import reshard.mpi` needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard.mpi
from reshard.cli.rank_commands import CalibrateOptions, RunOptions
from reshard.cli.rank_commands import run_calibrate as calibrate
from reshard.cli.rank_commands import run_script as run_command
from reshard.errors import RankError
from reshard.mpi import launch, rank
from reshard.mpi.launch import SETTINGS, command, environment, find
from reshard.synth import Network
from tests.test_docs import blocks

# ---- Starting ranks, and the commands that start them; refusals need no MPI


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    line = [find(), "-n", "3", sys.executable, "-m", "reshard.mpi.rank", "a.py", "b"]
    assert command(3, ["a.py", "b"]) == line
    with pytest.raises(RankError, match="0 ranks"):
        command(0, ["a.py"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RankError, match="no mpiexec"):
        find()
    (tmp_path / "mpiexec").touch()
    assert find() == str(tmp_path / "mpiexec")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ("script.py", {}, "arguments 'script.py': give a list"),
        (None, {}, "arguments None: give a list"),
        ([], {}, "nothing to run"),
        ([Path("none.py")], {}, "there is no script 'none.py'"),
        (["-c", "pass"], {"timeout": "1s"}, "timeout '1s': give seconds"),
        (["-c", "pass"], {"timeout": float("nan")}, "timeout nan: give seconds"),
    ],
)
def test_what_cannot_be_started(arguments, options, message):
    with pytest.raises(RankError, match=message):
        launch(2, arguments, **options)


def test_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMPI_MCA_osc", "mine")
    monkeypatch.setenv("PMI_RANK", "1")
    started = environment()
    assert started["OMPI_MCA_osc"] == "mine"
    assert "PMI_RANK" not in started
    assert SETTINGS.keys() <= started.keys()


def test_ranks_are_started_and_ended(tmp_path: Path):
    script = tmp_path / "script.py"
    touch = "open(f'{sys.argv[1]}-{MPI.COMM_WORLD.rank}-of-{MPI.COMM_WORLD.size}', 'w')"
    script.write_text(f"import sys\nfrom mpi4py import MPI\n{touch}\n")
    assert run_command(RunOptions(ranks=3, module=None, arguments=[str(script), str(tmp_path / "rank")])) == 0
    assert {path.name for path in tmp_path.glob("rank-*")} == {f"rank-{rank}-of-3" for rank in range(3)}
    script.write_text("from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    raise SystemExit(3)\n")
    assert launch(2, [str(script)]) != 0
    script.write_text("import time\nfrom mpi4py import MPI\ntime.sleep(600)\n")
    with pytest.raises(RankError, match="took longer than 2 s"):
        launch(2, [str(script)], timeout=2)


def test_calibrate_writes_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RESHARD_CACHE", str(tmp_path))
    path = tmp_path / "network.json"
    assert calibrate(CalibrateOptions(ranks=2, name="here", output=str(path))) == 0
    network = Network.load(str(path))
    assert network.name == "here"
    assert json.loads(path.read_text())["inner"]["bandwidth"] > 1e6
    [kept] = tmp_path.glob("*-2-ranks-1-nodes.json")
    assert json.loads(kept.read_text()) == {"network": json.loads(path.read_text()), "speed": None}


# ---- What a person sees of a run on ranks: nothing when all is well, and one traceback of an error that ranks share


SHARED = "from mpi4py import MPI\n\ndef f():\n    raise ValueError('the sizes do not fit')\n\nf()\n"


EACH = "from mpi4py import MPI\nimport time\ntime.sleep(MPI.COMM_WORLD.rank)\nprint(1 / 0)\n"


def run(script: Path, text: str, ranks: int = 4) -> subprocess.CompletedProcess[str]:
    """What `reshard run` prints of a script."""
    script.write_text(text, encoding="utf-8")
    line = [sys.executable, "-m", "reshard", "run", "-n", str(ranks), str(script)]
    return subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, env=environment())


def test_silence_when_all_is_well(tmp_path: Path):
    ran = run(tmp_path / "fine.py", "from mpi4py import MPI\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(("text", "error", "line"), [(SHARED, "ValueError: the sizes", 4), (EACH, "ZeroDivision", 4)])
def test_one_traceback_that_begins_in_the_script(tmp_path: Path, text: str, error: str, line: int):
    ran = run(tmp_path / "wrong.py", text)
    assert ran.returncode != 0
    assert ran.stderr.count("Traceback") == 1 and ran.stderr.count(error) == 1
    assert f'File "{tmp_path / "wrong.py"}", line {line}' in ran.stderr and "runpy" not in ran.stderr


def test_lines_of_several_ranks_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Unbuffered, Python would write each of a line's words by itself."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    text = "from mpi4py import MPI\nfor _ in range(100): print(*[MPI.COMM_WORLD.rank] * 12)\n"
    lines = run(tmp_path / "lines.py", text).stdout.splitlines()
    assert sorted(lines) == sorted(" ".join([str(rank)] * 12) for rank in range(4) for _ in range(100))


def test_different_errors_are_all_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(rank.FOLDER, str(tmp_path))
    for error in (ValueError("one"), ValueError("two"), KeyError("one"), ValueError("one")):
        rank.show_error(type(error), error, None)
    assert capsys.readouterr().err.splitlines() == ["ValueError: one", "ValueError: two", "KeyError: 'one'"]


def test_without_a_folder_each_rank_shows_its_own(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv(rank.FOLDER, raising=False)
    for _ in range(2):
        rank.show_error(ValueError, ValueError("one"), None)
    assert capsys.readouterr().err.splitlines() == ["ValueError: one"] * 2


# ---- The package `reshard.mpi`: its names are loaded late, and stay the functions that they are


def test_starting_ranks_does_not_make_this_process_one() -> None:
    code = "import sys, reshard.mpi; reshard.mpi.launch; print('mpi4py' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["DistArray", "calibrate", "redistribute", "relabelled", "world", "launch"])
def test_a_name_is_the_same_object_each_time(name: str) -> None:
    """Importing a module sets an attribute of its package: it must not replace a function."""
    first = getattr(reshard.mpi, name)
    __import__("reshard.mpi.distarray")
    assert callable(first) and getattr(reshard.mpi, name) is vars(reshard.mpi)[name] is first
    assert name in dir(reshard.mpi)


def test_a_name_that_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match=r"module 'reshard\.mpi' has no attribute 'nothing'"):
        _ = reshard.mpi.nothing


def test_without_mpi4py_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import reshard.mpi; reshard.mpi.DistArray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: reshard.mpi.DistArray needs mpi4py and an MPI: pip install mpi4py" in run.stderr


def test_without_an_mpi_library_it_says_which_wheel_brings_one(tmp_path: Path) -> None:
    code = "import reshard.mpi; reshard.mpi.DistArray"
    environment = {**os.environ, "MPI4PY_LIBMPI": str(tmp_path / "none.so")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "needs an MPI, and mpi4py finds none on this machine: pip install mpich" in run.stderr


MACOS = "for name in ('memfd_create', 'posix_fallocate', 'sched_yield', 'sched_getaffinity'): delattr(os, name)\n"


WINDOWS = MACOS + "del os.pwrite, os.posix_fadvise\nsegment.FOLDER = '/nowhere/tmp'\n"


ON_ANOTHER_SYSTEM = """
import ctypes, os, shutil, subprocess, sys, tempfile, threading
import numpy as np
from mpi4py import MPI
{early}sys.platform = {platform!r}
import reshard as rs
from reshard.runtime.on_mpi.node import arena as segment
{late}import reshard.mpi
mesh = rs.Mesh(x=2)
rows, columns = (rs.Layout.parse(text, mesh) for text in ("f64[{{x}}32, 64]", "f64[64, {{x}}32]"))
whole, rank = np.arange(64.0 * 64).reshape(64, 64), MPI.COMM_WORLD.rank
tile = reshard.mpi.redistribute(whole[32 * rank : 32 * rank + 32].copy(), rows, columns, MPI.COMM_WORLD)
assert np.array_equal(tile, whole[:, 32 * rank : 32 * rank + 32])
"""


@pytest.mark.fast(1)
@pytest.mark.parametrize(("platform", "early", "late"), [("darwin", MACOS, ""), ("win32", "", WINDOWS)])
def test_what_only_linux_has_is_not_needed(tmp_path: Path, platform: str, early: str, late: str) -> None:
    """The functions and files of Linux are taken away; the ranks move their tiles all the same."""
    script = tmp_path / "move.py"
    script.write_text(ON_ANOTHER_SYSTEM.format(platform=platform, early=early, late=late), encoding="utf-8")
    assert reshard.mpi.launch(2, [str(script)], timeout=600) == 0


# ---- Pages that are pasted on one rank are right on several


DOCS = Path(__file__).resolve().parents[2] / "docs"
RANKS = {"how-to/fft-pencils": 4, "how-to/halos": 3, "how-to/csr-rows": 3, "explanation/mpi": 3, "reference/mpi": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "ranks"), RANKS.items(), ids=RANKS)
def test_a_page_is_right_on_several_ranks(page: str, ranks: int, tmp_path: Path):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    if "scipy" in text:
        pytest.importorskip("scipy")
    # What ranks print would be mixed up in one stream.
    apart = f"import sys\nfrom mpi4py import MPI\nsys.stdout = open(f'{tmp_path}/{{MPI.COMM_WORLD.rank}}', 'w')\n"
    ran = run(tmp_path / "page.py", apart + "\n".join(block.text for block in blocks(text, "python")), ranks)
    assert ran.returncode == 0, ran.stderr
    shown = [(tmp_path / str(rank)).read_text() for rank in range(ranks)]
    assert shown[0].startswith(blocks(text, "text")[0].text) and "False" not in "".join(shown)
