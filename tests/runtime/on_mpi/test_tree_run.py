"""What a rank runs of a tree; on several ranks, the topics of `tests.mpi.trees` run it."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import numpy as np
from mpi4py import MPI

import reshard as rs
from reshard.mpi import redistribute
from reshard.runtime.on_mpi.run_plan import RankPlan, ViewPlan, steps_of

MESH = rs.Mesh(x=2)


def test_plans_with_a_view_or_a_cast_run_on_flat_tiles() -> None:
    wide, narrow = (rs.Layout.parse(text, MESH) for text in ("f32[{x}2]", "bf16[4]"))
    assert isinstance(steps_of(rs.plan(rs.Move(wide, narrow, cast=True)), 0, 2), ViewPlan)
    assert isinstance(steps_of(rs.plan(wide, rs.Layout.parse("f32[4]", MESH)), 1, 2), RankPlan)
    assert isinstance(steps_of(rs.plan(wide, rs.Layout.parse("f32[4]", MESH)), 5, 8), RankPlan)


@pytest.mark.parametrize("dtype", ["M8[s]", "uint64", [("a", "i4"), ("b", "f4")]])
def test_equal_moves_of_elements_without_a_name_keep_their_dtypes(dtype: object) -> None:
    source, target = rs.Layout.parse("u64[4{x}1]", rs.Mesh(x=1)), rs.Layout.parse("u64[4]", rs.Mesh(y=1))
    words = np.arange(4, dtype="u8")
    moved = redistribute({"a": words.view(dtype), "b": words}, source, target, MPI.COMM_SELF)
    assert moved["a"].dtype == np.dtype(dtype) and np.array_equal(moved["a"].view("u8"), words)
    assert moved["b"].dtype == np.uint64
