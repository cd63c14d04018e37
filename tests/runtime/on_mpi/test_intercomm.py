"""Inter-communicators: moves between their groups in both directions, and one error on all ranks of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import PlanError
from reshard.runtime.on_mpi.team import MergedGroups
from reshard.types import Layout, Mesh

SWEEP = (pytest.param(ranks, marks=pytest.mark.sweep) for ranks in (2, 6, 8))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4, *SWEEP])
def test_groups(ranks: int, tmp_path: Path) -> None:
    running.check("crossing.groups", ranks, tmp_path)


def test_layouts_count_the_ranks_of_their_group() -> None:
    groups = MergedGroups(None, (range(3), range(3, 5)), 0)  # type: ignore
    layout = Layout.parse("f32[{x}2]", Mesh({"x": 2}, device_ids=[1, 0]))
    assert groups.seated(layout, 0) == layout
    assert groups.seated(layout, 1).mesh == Mesh({"x": 2}, device_ids=[4, 3])
    with pytest.raises(PlanError, match="its group of the inter-communicator has 2 ranks"):
        groups.seated(Layout.parse("f32[{x}2]", Mesh({"x": 2}, device_ids=[0, 2])), 1)
