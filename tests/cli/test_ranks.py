"""`reshard run` and `reshard calibrate` start ranks, or work on those that run them."""

import json
from types import SimpleNamespace

import pytest

from reshard import mpi
from reshard.synth import Link, Network


@pytest.mark.parametrize("script", [["s.py"], ["s.py", "--seed", "1"], ["-m", "package.module", "-n", "5"]])
def test_the_script_keeps_its_own_options(call, monkeypatch, script):
    launched = []

    def launch(ranks, arguments):
        launched.append((ranks, arguments))
        return 7

    monkeypatch.setattr(mpi, "launch", launch)
    assert call("run", "-n", 3, *script).code == 7
    assert launched == [(3, script)]


def test_no_ranks_and_no_script_are_refused(call):
    ran = call("run", "-n", "0", "s.py")
    assert ran.code == 2 and "0 ranks" in ran.err
    assert call("run", "s.py").code == 2


def test_a_script_that_is_not_there_is_refused_before_ranks_start(call):
    ran = call("run", "-n", "2", "nowhere.py")
    assert ran.code == 2 and "there is no script 'nowhere.py'" in ran.err


@pytest.mark.parametrize("output", [[], ["-o", "net.json"]])
def test_it_starts_itself_on_ranks(call, monkeypatch, output):
    launched = []
    monkeypatch.setattr(mpi, "launch", lambda ranks, arguments: launched.append((ranks, arguments)) or 0)
    assert call("calibrate", "-n", 5, "--name", "lab", *output).code == 0
    assert launched == [(5, ["-m", "reshard", "calibrate", "--name", "lab", *output])]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes(call, monkeypatch, tmp_path, rank):
    path = tmp_path / "network.json"
    monkeypatch.setattr(mpi, "world", lambda: SimpleNamespace(rank=rank), raising=False)
    monkeypatch.setattr(mpi, "calibrate", lambda comm, name: Network(name, outer=Link(1e-6, 1e9)), raising=False)
    code, out, err = call("calibrate", "-o", path, "--name", "lab")
    assert (code, out, "kept in" in err and "calls without network= use it" in err) == (0, "", rank == 0)
    assert path.exists() == (rank == 0)
    ran = call("calibrate", "--name", "lab")
    assert ran.code == 0 and bool(ran.out) == (rank == 0)
    if rank == 0:
        assert ran.out == path.read_text()
        assert json.loads(ran.out)["name"] == "lab"
