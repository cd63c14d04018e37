"""`rs.redistribute`: who holds the array makes the move; what type checkers know of it is in `tests/type_cases.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from mpi4py import MPI

import reshard as rs
from reshard.errors import PlanError, ReshardError
from reshard.runtime import Account

ROWS, COLUMNS = (rs.Layout.parse(text, "x=4,y=2") for text in ("f32[{x}4, 8]", "f32[16, {x}2]"))
ARRAY = np.arange(128, dtype="float32").reshape(16, 8)


def test_arrays_of_jax_and_trees_of_them():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    x = jax.device_put(ARRAY, NamedSharding(mesh, PartitionSpec("x")))
    for target in (PartitionSpec(None, "x"), NamedSharding(mesh, PartitionSpec(None, "x")), COLUMNS, str(COLUMNS)):
        moved = rs.redistribute(x, target, budget="1MiB")
        assert rs.as_layout(moved) == COLUMNS and np.array_equal(moved, ARRAY)
    with pytest.raises(PlanError, match="leave source out"):
        rs.redistribute(x, PartitionSpec(), source=PartitionSpec("y"))
    tree = rs.redistribute({"w": [x, x]}, {"w": PartitionSpec()}, donate=False)
    assert tree["w"][1].is_fully_replicated
    traced = jax.jit(lambda v: rs.redistribute(v, NamedSharding(mesh, PartitionSpec()), source=x.sharding))(x)
    assert traced.is_fully_replicated and np.array_equal(traced, ARRAY)


def test_tiles_of_one_rank_and_of_all_devices():
    alone = [rs.Layout.parse(text, "x=1") for text in ("f32[{x}16, 8]", "f32[16, {x}8]")]
    tile = rs.redistribute(ARRAY, alone[1], source=alone[0], comm=MPI.COMM_SELF, budget="1MiB")
    assert np.array_equal(tile, ARRAY)
    array = rs.mpi.DistArray(alone[0], ARRAY, MPI.COMM_SELF)
    assert rs.redistribute(array, "f32[16, {x}8]").layout == alone[1]
    account = Account("float32")
    moved = rs.redistribute(ROWS.tiles(ARRAY), "P(None, 'x')", source=ROWS, network="h100", memory=account)
    assert (
        np.array_equal(COLUMNS.assemble(moved), ARRAY)
        and account.received_bytes == rs.plan(ROWS, COLUMNS, network="h100").received_bytes
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rs.redistribute(ARRAY, COLUMNS), "nothing says where it is; give a jax.Array, a DistArray"),
        (lambda: rs.redistribute(COLUMNS, ARRAY), "is a Layout, of which"),
        (lambda: rs.redistribute({"w": ARRAY}, COLUMNS, source=ROWS), "nothing says where it is"),
        (lambda: rs.redistribute(ROWS.tiles(ARRAY), COLUMNS), "of the layout source=: give it"),
        (lambda: rs.redistribute(ARRAY, COLUMNS, comm=MPI.COMM_SELF), "of the layout source=: give it"),
        (lambda: rs.redistribute(rs.mpi.DistArray(ROWS, None, None), COLUMNS), "communicator"),
        (lambda: rs.redistribute(ROWS.tiles(ARRAY), COLUMNS, source=ROWS, bugdet=3), "no argument 'bugdet'"),
        (lambda: rs.redistribute(ARRAY), "missing 1 required positional argument: 'target'"),
    ],
)
def test_what_nothing_can_move_is_refused(call, message):
    with pytest.raises(ReshardError, match=message):
        call()


def test_a_dist_array_has_source_and_communicator():
    alone = rs.Layout.parse("f32[{x}16, 8]", "x=1")
    with pytest.raises(PlanError, match="leave out source= and comm="):
        rs.redistribute(rs.mpi.DistArray(alone, ARRAY, MPI.COMM_SELF), alone, comm=MPI.COMM_SELF)


@pytest.mark.sweep
def test_mypy_knows_what_comes_back_as_pyright_does(tmp_path: Path):
    """`make types` has pyright read the same cases in every run."""
    pytest.importorskip("mypy")
    root = Path(__file__).resolve().parent.parent
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, "tests/type_cases.py"]
    environment = {**os.environ, "MYPYPATH": str(root)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert not ran.returncode, ran.stdout + ran.stderr
