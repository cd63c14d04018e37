"""In the fast tier, one job of each size runs all of these topics: starting ranks takes longer than what they do.

The slow tier runs each in a job of its own, in the tests of the module that it is about.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from tests.mpi import running

TOPICS = {
    2: ["calls.moves", "measuring.together", "sharing.many", "views.casts", "on_gpus.dtypes"],
    3: [
        *(f"modules.{name}" for name in ("cma", "exchange", "in_place", "node_sync", "reduction")),
        *("sharing.arenas", "sharing.segments", "calls.global_arrays", "crossing.groups"),
        *("trees.across_sampled", "trees.shared", "again.creations", "again.mistakes", "again.endings"),
    ],
    4: ["calls.plans", "cases.moves_sampled", "cases.streamed", "by_node.joined", "again.moves"],
}


@pytest.mark.parametrize("ranks", TOPICS)
def test_topics_one_after_another(ranks: int, tmp_path: Path):
    running.check_all(TOPICS[ranks], ranks, tmp_path)
