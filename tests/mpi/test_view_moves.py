"""`reshard.mpi.move` on one rank and on several; see `tests.mpi.views`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from mpi4py import MPI

import reshard as rs
from reshard.errors import LayoutError, TileError
from reshard.mpi import move


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 6])
def test_random_moves(ranks: int, tmp_path: Path):
    running.check("views.moves", ranks, tmp_path)


@pytest.mark.slow
def test_casts_and_mistakes(tmp_path: Path):
    running.check("views.casts", 2, tmp_path)


def test_one_rank():
    mesh = rs.Mesh(x=1)
    fused, part = rs.Layout.parse("s64[6]", mesh), rs.Layout.parse("s64[3]", mesh)
    odd = rs.Move(fused, part, view="(h two) -> h", take={"two": 1}, two=2)
    assert move(np.arange(6), odd, MPI.COMM_SELF).tolist() == [1, 3, 5]
    out = np.zeros(6, "i8")
    back = rs.Move(part, fused, view="h -> (h two)", into={"two": 0}, two=2)
    assert move(np.array([7, 8, 9]), back, MPI.COMM_SELF, out=out) is out
    assert out.tolist() == [7, 0, 8, 0, 9, 0]
    with pytest.raises(TileError, match="C-ordered"):
        move(np.array([7, 8, 9]), back, MPI.COMM_SELF, out=np.zeros(12, "i8")[::2])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            rs.Layout.parse("s64[6]", rs.Mesh(x=1)),
            r"the source is the layout s64\[6\], and no target is given; give Move\(",
        ),
        (None, "the source is None, not a Layout or a Move"),
    ],
)
def test_what_is_not_a_move_is_refused(given: Any, text: str):
    with pytest.raises(LayoutError, match=text):
        move(np.arange(6), given, MPI.COMM_SELF)
