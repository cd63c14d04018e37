"""The package `reshard.mpi`: its names are loaded late, and stay the functions that they are."""

from __future__ import annotations

import subprocess
import sys

import pytest

import reshard.mpi


def test_starting_ranks_does_not_make_this_process_one() -> None:
    code = "import sys, reshard.mpi; reshard.mpi.launch; print('mpi4py' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["DistArray", "calibrate", "redistribute", "relabelled", "world", "launch"])
def test_a_name_is_the_same_object_each_time(name: str) -> None:
    """Importing a module sets an attribute of its package: it must not replace a function."""
    pytest.importorskip("mpi4py")
    first = getattr(reshard.mpi, name)
    __import__("reshard.mpi.distarray")
    assert callable(first) and getattr(reshard.mpi, name) is first
    assert name in dir(reshard.mpi)


def test_a_name_that_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match=r"module 'reshard\.mpi' has no attribute 'nothing'"):
        _ = reshard.mpi.nothing


def test_without_mpi4py_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import reshard.mpi; reshard.mpi.DistArray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: reshard.mpi.DistArray needs mpi4py and an MPI: pip install 'reshard[mpi]'" in run.stderr
