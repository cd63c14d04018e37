"""The package `reshard.mpi`: its names are loaded late, and stay the functions that they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    assert callable(first) and getattr(reshard.mpi, name) is vars(reshard.mpi)[name] is first
    assert name in dir(reshard.mpi)


def test_a_name_that_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match=r"module 'reshard\.mpi' has no attribute 'nothing'"):
        _ = reshard.mpi.nothing


def test_without_mpi4py_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import reshard.mpi; reshard.mpi.DistArray"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: reshard.mpi.DistArray needs mpi4py and an MPI: pip install 'reshard[mpi]'" in run.stderr


def test_without_an_mpi_library_it_says_which_wheel_brings_one(tmp_path: Path) -> None:
    code = "import reshard.mpi; reshard.mpi.DistArray"
    environment = {**os.environ, "MPI4PY_LIBMPI": str(tmp_path / "none.so")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "needs an MPI, and mpi4py finds none on this machine: pip install 'reshard[mpich]'" in run.stderr


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
    pytest.importorskip("mpi4py")
    script = tmp_path / "move.py"
    script.write_text(ON_ANOTHER_SYSTEM.format(platform=platform, early=early, late=late), encoding="utf-8")
    assert reshard.mpi.launch(2, [str(script)], timeout=600) == 0
