"""Requests: the way that all ranks choose alike, the room for buffers, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.errors import BudgetError, PlanError, TileError
from reshard.runtime.on_mpi.prepare import Request, TilePlan, prepare_tile, read_options
from reshard.runtime.on_mpi.team import Facts
from reshard.types import Layout, Mesh

MESH = Mesh(x=4)


def layouts(before: str, after: str, mesh: Mesh = MESH) -> tuple[Layout, Layout]:
    return Layout.parse(before, mesh), Layout.parse(after, mesh)


def asked(
    source: Layout, target: Layout, budget: object = None, into: bool = False, shared: bool = False, **options: Any
) -> Request:
    return Request.of_tile(source, target, read_options(budget, **options), into, shared)


def ready(request: Request, facts: Facts, rank: int = 0, tile: np.ndarray | None = None) -> TilePlan:
    team = cast(Any, SimpleNamespace(size=len(facts.nodes), rank=rank, facts=facts))
    if tile is None:
        tile = np.zeros(request.source.tile_shape, request.source.dtype)
    return prepare_tile(team, request, tile)


ONE_NODE = Facts((0, 0, 0, 0), False)
READS = Facts((0, 0, 0, 0), True)
TWO_NODES = Facts((0, 0, 1, 1), True)
APART = Facts((0, 1, 2, 3), True)

SHORT = layouts("f32[{x}4, 16]", "f32[16, {x}4]")
LONG = layouts("f32[{x}4, 16, 16384]", "f32[16, {x}4, 16384]")
"""In runs of 256 KiB."""

SUM = layouts("f32[16, 16] + sum{x}", "f32[{x}4, 16]")


def test_networks_of_one_name_are_two_requests():
    texts = [str(asked(*SHORT, network=rs.Network.of({"x": (0, bandwidth)}, "lab"))) for bandwidth in (1, 2)]
    assert texts[0] != texts[1] and "bandwidth=2.0" in texts[1]
    assert str(asked(*SHORT, network="h100")).endswith("network=h100")


@pytest.mark.parametrize(
    ("pair", "facts", "options", "way", "otherwise"),
    [
        (SHORT, ONE_NODE, {}, "stage", "stage"),
        (SHORT, READS, {}, "stage", "stage"),
        (LONG, READS, {}, "read", "stage"),
        (LONG, ONE_NODE, {}, "stage", "stage"),
        (LONG, READS, {"shared": True}, "pull", "stage"),
        (LONG, APART, {}, "pull", "plan"),
        (LONG, TWO_NODES, {}, "read", "plan"),
        (SUM, ONE_NODE, {}, "plan", "plan"),
        (SHORT, ONE_NODE, {"budget": 2 * 256}, "plan", "plan"),
    ],
)
def test_the_way_of_a_request(pair: tuple[Layout, Layout], facts: Facts, options: dict, way: str, otherwise: str):
    request = asked(*pair, **options)
    everyone = [ready(request, facts, rank) for rank in range(4)]
    assert {(each.transport, each.otherwise) for each in everyone} == {(way, otherwise)}
    assert [each.device for each in everyone] == [0, 1, 2, 3]
    assert len({(each.push, each.buffered, each.spare) for each in everyone}) == 1


def test_without_room_to_stage_a_message_between_nodes_the_plan_is_run():
    tight = asked(*SHORT, budget=2 * 256)
    assert ready(tight, TWO_NODES).direct is None
    assert ready(tight, ONE_NODE).direct is not None


@pytest.mark.parametrize("pair", [SHORT, LONG])
@pytest.mark.parametrize("facts", [ONE_NODE, TWO_NODES, APART])
@pytest.mark.parametrize("careful", [False, True])
def test_buffers_stay_within_the_plan(pair: tuple[Layout, Layout], facts: Facts, careful: bool):
    source, target = pair
    request = asked(source, target, into=careful)
    for rank in range(4):
        mine = ready(request, facts, rank)
        assert mine.direct is not None
        messages = mine.direct.messages
        used = source.tile_bytes if "stage" in (mine.transport, mine.otherwise) else 0
        staged = messages.staging * 4 * (1 if messages.held else 2)
        received = rs.plan(source, target).received_bytes if messages.held else 0
        assert staged + received + used <= mine.spare or messages.staging == 0
        assert not messages.held or careful


def test_a_donated_tile_is_overwritten_only_under_a_budget_below_two_tiles():
    source, target = layouts("f32[{x}4, 16]", "f32[16, {x}4]")
    two = source.tile_bytes + target.tile_bytes
    assert ready(asked(source, target, donate=True), ONE_NODE).transport == "stage"
    assert ready(asked(source, target, two, donate=True), ONE_NODE).transport == "plan"
    tight = asked(source, target, two - 1, donate=True)
    assert ready(tight, ONE_NODE).transport == "overwrite"
    with pytest.raises(TileError, match="not C-ordered or not writeable"):
        ready(tight, ONE_NODE, tile=np.zeros((4, 16), "f4", order="F"))
    with pytest.raises(BudgetError, match="smallest that works is 512 B"):
        ready(asked(source, target, two - 1), ONE_NODE)
    with pytest.raises(BudgetError, match="smallest that works is 512 B"):
        ready(asked(source, target, two - 1, donate=True, into=True), ONE_NODE)


def test_a_growing_tile_cannot_be_overwritten():
    source, target = layouts("f32[{x}4, 16]", "f32[16, 16]")
    with pytest.raises(BudgetError):
        ready(asked(source, target, target.tile_bytes, donate=True), ONE_NODE)


def test_devices_are_ranks():
    request = asked(*layouts("f32[{x}2]", "f32[4]", Mesh({"x": 2}, device_ids=[3, 9])))
    text = (
        r"on <x=2> \(devices 3, 9\): not every device is one of the 4 ranks of the communicator; device ids are ranks"
    )
    with pytest.raises(PlanError, match=text):
        ready(request, ONE_NODE)
    assert ready(request, Facts((0, 0), False), 1).device == 9
    assert [ready(request, Facts((0,) * 10, False), rank).device for rank in (0, 3, 9)] == [0, 3, 9]


def test_a_request_as_text():
    source, target = layouts("f32[{x}4, 16]", "f32[16, {x}4]")
    plain = "f32[{x}4, 16] -> f32[16, {x}4] on Mesh({'x': 4})"
    assert str(asked(source, target)) == plain
    request = asked(source, target, 600, True, True, network="shm-mpi", donate=True)
    assert str(request) == f"{plain}, budget=600, network=shm-mpi, donate=True"
    assert (request.careful, asked(source, target, into=True).careful) == (False, True)
    turned = Layout(Mesh({"x": 4}, device_ids=[1, 2, 3, 0]), target.dims, target.dtype)
    assert str(asked(source, turned)).endswith("on Mesh({'x': 4}) and Mesh({'x': 4}, device_ids=[1, 2, 3, 0])")


def test_tiles_without_room_to_stage_are_read_if_their_runs_are_not_too_short():
    one, other = Mesh(x=2), Mesh({"y": 2}, device_ids=[2, 3])
    for side, way in ((1024, "read"), (256, "plan")):
        ends = (
            Layout.parse(f"f64[{{x}}{side // 2}, {side}]", one),
            Layout.parse(f"f64[{side}, {{y}}{side // 2}]", other),
        )
        assert ready(asked(*ends, into=True), READS).transport == way
        assert ready(asked(*ends, into=True), ONE_NODE).transport == "plan"
