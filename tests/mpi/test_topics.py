"""The topics of ranks, joined into jobs: starting ranks takes longer than what most of them do.

The fast tier runs a sample of every kind on 2, 3 and 4 ranks; the slow tier runs what that leaves out. A report names
the topic and the case that failed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from tests.mpi import running

FAST = {
    2: ["calls.moves", "measuring.together", "sharing.many", "views.casts", "on_gpus.dtypes", "on_gpus.refused"],
    3: [
        *(f"modules.{name}" for name in ("cma", "exchange", "in_place", "node_sync", "reduction")),
        *("sharing.arenas", "sharing.segments", "calls.global_arrays", "crossing.groups"),
        *(
            "trees.across_sampled",
            "trees.shared",
            "trees.shared_ends",
            "views.updates",
            "again.creations",
            "again.mistakes",
            "again.endings",
        ),
        *("again.begun", "schedules.sampled", "gathering.sampled"),
    ],
    4: [
        "calls.plans",
        "ragged.arrays_sampled",
        "cases.moves_sampled",
        "cases.streamed",
        "pieces.sampled",
        "sparse.moves",
        "sparse.mistakes",
        "by_node.joined",
        "again.moves",
        "again.sums",
        "neighbours.sampled",
        "neighbours.late",
        "strides.sampled",
        "trees.own_readers",
        "loading.few_loads",
        "loading.bad_files",
        "loading.odd_requests",
        "saving.formats",
        "saving.columns",
        "saving.failures",
    ],
}


@pytest.mark.parametrize("ranks", FAST)
def test_topics_one_after_another(ranks: int, tmp_path: Path):
    running.check_all(FAST[ranks], ranks, tmp_path)


MISTAKES = ("planning", "arguments", "threads", "sums", "meetings", "skipped", "no_memory")
TREES_OF_FOUR = ("moves_through_views", "moves_passed_on", "few_messages", "moves")
CROSSINGS = ("moves_sampled", "relays", "mistakes", "groups")
DAMAGES = ("bad_checkpoints.bad_files", "damaged.damages") if find_spec("zarr") else ()  # With Open MPI there is none.
SLOW = [
    (1, ["cases.moves", "on_gpus.moves", "arrays.making", "arrays.functions", "arrays.unpadded", "arrays.saving"]),
    (2, ["on_gpus.moves", "again.moves", "ragged.arrays", "sparse.of_jax"]),
    (
        3,
        ["cases.moves", "calls.measurements", "calls.teams", "calls.moves", *(f"mistakes.{name}" for name in MISTAKES)],
    ),
    (
        3,
        [
            *("crossing.arrays", "crossing.plans", "crossing.mistakes", "trees.faults", "again.sums"),
            *(f"arrays.{name}" for name in ("relabelling", "making", "functions", "unpadded", "saving")),
        ],
    ),
    (4, ["on_gpus.moves", *(f"trees.{name}" for name in TREES_OF_FOUR), "arrays.calibration"]),
    (
        4,
        [
            *(f"crossing.{name}" for name in CROSSINGS),
            *("loading.random_loads", "loading.owners", *DAMAGES),
        ],
    ),
    (
        4,
        [
            *("gathering.rows", "gathering.halos", "gathering.mistakes", "neighbours.mistakes", "neighbours.races"),
            *("failing.disagreement", "failing.arrays_disagree", "mistakes.groups"),
        ],
    ),
    (6, ["cases.moves_sampled", "pieces.sampled", "views.updates", "by_node.joined"]),
    (8, ["neighbours.sampled", "cases.dtypes"]),
]
ALONE = [("failure", 4), ("untouched", 4), ("stuck", 4)]
"""Calls after which ranks are late, or gone."""

SHARING = [("communicators", 3), ("very_many_communicators", 2), ("finalized", 2), ("full", 4), ("very_many", 3)]
"""What fills the memory of the machine, or frees communicators."""

CROSSING = [
    pytest.param("crossing", topic, ranks, marks=pytest.mark.sweep)
    for topic in ("moves", "plans", "arrays", "relays", "groups")
    for ranks in (2, 3, 4, 6, 8)
    if (topic, ranks) != ("relays", 2)
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "topics"), SLOW, ids=[f"{ranks}-{topics[0]}" for ranks, topics in SLOW])
def test_slow_topics_one_after_another(ranks: int, topics: list[str], tmp_path: Path):
    running.check_all(topics, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "topic", "ranks"),
    [
        *(("failing", *each) for each in ALONE),
        *(("sharing", *each) for each in SHARING),
        pytest.param("sharing", "every_full", 4, marks=pytest.mark.sweep),
        *(pytest.param("cases", "moves", ranks, marks=pytest.mark.sweep) for ranks in (2, 4, 6, 8)),
        *CROSSING,
    ],
)
def test_topics_that_need_ranks_of_their_own(module: str, topic: str, ranks: int, tmp_path: Path):
    running.check(f"{module}.{topic}", ranks, tmp_path)


TREES = ["trees.across", "trees.own_readers", "trees.moves_through_views", "trees.shared_ends", "trees.groups"]
"""All of them in `make sweep`; before, each on two nodes or on one for every rank."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "ranks", "topics"),
    [
        (2, 4, [*TREES[::2], "trees.moves", "sparse.moves"]),
        (4, 4, [TREES[0], *TREES[1::2]]),
        (3, 6, ["trees.across", "trees.models"]),
        (2, 5, ["trees.groups"]),
        pytest.param(3, 3, ["trees.across"], marks=pytest.mark.sweep),
        *(pytest.param(nodes, 4, TREES, marks=pytest.mark.sweep) for nodes in (2, 4)),
    ],
)
def test_trees_on_pretended_nodes(
    nodes: int, ranks: int, topics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RESHARD_MPI_NODES", str(nodes))
    running.check_all(topics, ranks, tmp_path)
