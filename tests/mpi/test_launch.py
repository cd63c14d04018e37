"""Starting ranks, and the commands that start them; refusals need no MPI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from reshard.cli.calibrate import CalibrateOptions
from reshard.cli.calibrate import run as calibrate
from reshard.cli.run import RunOptions, run
from reshard.errors import RankError
from reshard.mpi import launch
from reshard.mpi.launch import SETTINGS, command, environment, find
from reshard.synth import Network


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
    pytest.importorskip("mpi4py")
    script = tmp_path / "script.py"
    touch = "open(f'{sys.argv[1]}-{MPI.COMM_WORLD.rank}-of-{MPI.COMM_WORLD.size}', 'w')"
    script.write_text(f"import sys\nfrom mpi4py import MPI\n{touch}\n")
    assert run(RunOptions(ranks=3, module=None, arguments=[str(script), str(tmp_path / "rank")])) == 0
    assert {path.name for path in tmp_path.glob("rank-*")} == {f"rank-{rank}-of-3" for rank in range(3)}
    script.write_text("from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    raise SystemExit(3)\n")
    assert launch(2, [str(script)]) != 0
    script.write_text("import time\nfrom mpi4py import MPI\ntime.sleep(600)\n")
    with pytest.raises(RankError, match="took longer than 2 s"):
        launch(2, [str(script)], timeout=2)


def test_calibrate_writes_a_network(tmp_path: Path):
    pytest.importorskip("mpi4py")
    path = tmp_path / "network.json"
    assert calibrate(CalibrateOptions(ranks=2, name="here", output=str(path))) == 0
    network = Network.load(str(path))
    assert network.name == "here"
    assert json.loads(path.read_text())["inner"]["bandwidth"] > 1e6
