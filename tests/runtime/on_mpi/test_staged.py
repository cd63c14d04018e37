"""Small moves inside a node, on 2 and 4 ranks: every element, and one error on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from tests.mpi import running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topic", "ranks"),
    [("moves", 2), ("moves", 4), ("mistakes", 3), ("endings", 3)],
)
def test_moves_that_are_made_again(topic: str, ranks: int, tmp_path: Path):
    running.check(f"again.{topic}", ranks, tmp_path)
