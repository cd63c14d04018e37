"""The figures of a rank's schedule, on meshes that no test could start."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.errors import PlanError
from reshard.mpi import schedule_figures
from reshard.types import Layout, Mesh

MESH = Mesh(x=8)
ROWS, COLUMNS = Layout.parse("f32[{x}2, 16, 8192]", MESH), Layout.parse("f32[16, {x}2, 8192]", MESH)
"""In runs that are long enough to be read by the ranks of a node, so that all goes straight."""


@pytest.mark.parametrize(
    ("nodes", "messages"), [(None, 7), (8, 7), (4, 6), (2, 4), ([0, 0, 0, 1, 1, 2, 2, 2], 5), (1, 0)]
)
def test_messages_go_to_the_ranks_of_other_nodes(nodes: int | list[int] | None, messages: int) -> None:
    figures = schedule_figures(ROWS, COLUMNS, rank=2, nodes=nodes)
    assert (figures.sends, figures.receives) == (messages, messages)
    assert figures.seconds > 0 and figures.bytes > 0


def test_a_rank_among_thousands_needs_little_memory() -> None:
    mesh = Mesh(x=64, y=64)
    pencils = Layout.parse("f32[{x}64, {y}64, 4096]", mesh), Layout.parse("f32[{x}64, 4096, {y}64]", mesh)
    figures = schedule_figures(*pencils, rank=1234)
    assert (figures.sends, figures.receives) == (63, 63)
    assert figures.bytes < 1 << 20
    assert schedule_figures(*pencils, rank=1234, nodes=64).bytes < 1 << 20


@pytest.mark.slow
def test_a_slab_on_thousand_ranks_takes_one_message_a_node_in_place_of_one_a_rank() -> None:
    mesh = Mesh(x=1024)
    slabs = Layout.parse("f32[{x}1, 1024, 16]", mesh), Layout.parse("f32[1024, {x}1, 16]", mesh)
    assert schedule_figures(*slabs, rank=1).sends == 1023
    carried = [schedule_figures(*slabs, rank=rank, nodes=16)[2:] for rank in (1, 63)]
    assert carried == [(1, 1), (0, 0)]  # 15 nodes in 4 groups of ranks: 60 messages, on 64 ranks
    assert schedule_figures(*slabs, rank=1, nodes=16, budget=2 * slabs[0].tile_bytes).sends == 1023


def test_reductions_and_other_devices() -> None:
    summed = Layout.parse("f32[64] + sum{x}", MESH)
    assert schedule_figures(summed, Layout.parse("f32[{x}8]", MESH))[2:] == (0, 0)
    there = Layout.parse("f32[{z}32]", Mesh({"z": 2}, device_ids=[8, 9]))
    assert schedule_figures(Layout.parse("f32[{x}8]", MESH), there, rank=3)[2:] == (1, 0)
    assert schedule_figures(Layout.parse("f32[{x}8]", MESH), there, rank=9)[2:] == (0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 8}, "rank 8: .* has ranks 0 to 7"),
        ({"nodes": 3}, "nodes 3: 8 ranks are not spread evenly over that many"),
        ({"nodes": [0, 1]}, "give the node of each of the 8 ranks"),
    ],
)
def test_what_the_layouts_do_not_have(options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        schedule_figures(ROWS, COLUMNS, **options)
