"""`reshard run` passes the script and its arguments on to mpiexec."""

import pytest

from reshard import mpi


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
