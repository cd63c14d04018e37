"""Reductions on three ranks against numpy's, see `tests.mpi.modules`; and which MPI can do by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

from reshard.lower.to_mpi import Reduce
from reshard.lower.to_mpi.blocks import whole_tile
from reshard.runtime.on_mpi.wire.reduction import _is_straight, _operation


@pytest.mark.slow
def test_operations_and_dtypes(tmp_path: Path):
    running.check("modules.reduction", 3, tmp_path)


@pytest.mark.slow
def test_dtypes_that_cannot_be_combined(tmp_path: Path):
    running.check("mistakes.sums", 3, tmp_path)


def test_the_dtypes_that_mpi_knows():
    assert _operation(np.dtype("f4"), "mean") == (MPI.FLOAT, MPI.SUM)
    assert _operation(np.dtype("?"), "max")[1] == MPI.LOR
    assert _operation(np.dtype("?"), "product")[1] == MPI.LAND
    half, combine = _operation(np.dtype("f2"), "sum")
    assert half.Get_size() == 2
    assert combine.Is_commutative()
    assert combine not in (MPI.SUM, MPI.MAX, MPI.MIN, MPI.PROD)


@pytest.mark.parametrize(
    ("scatter", "packed", "placed", "source", "target", "cap", "straight"),
    [
        (False, False, False, "C", "C", 12, True),
        (False, False, False, "F", "C", 12, True),  # it is first copied into the target
        (True, False, False, "F", "C", 12, False),  # but a share is smaller than the source
        (True, False, False, "C", "C", 12, True),
        (False, False, False, "C", "F", 12, False),
        (False, False, False, "C", "C", 11, False),
        (True, True, False, "C", "C", 12, False),
        (True, False, True, "C", "C", 12, False),
    ],
)
def test_when_nothing_is_packed(
    scatter: bool, packed: bool, placed: bool, source: str, target: str, cap: int, straight: bool
):
    step = Reduce((0, 1), "sum", scatter, ((whole_tile((3, 4)),),), packed, placed)
    tiles = [np.zeros((3, 4), order=order) for order in (source, target)]
    assert _is_straight(step, cap, *tiles) == straight
