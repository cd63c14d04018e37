"""Requests: which plan answers a move on each platform, and when two meshes list their devices differently."""

from __future__ import annotations

from typing import Any

import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import PlanError
from reshard.jax import placement
from reshard.jax.request import ReshardRequest, plan_request
from reshard.runtime import xla
from reshard.synth.options import PlanOptions
from tests.jax.oracle import layout_of, mesh_of

SIZES = {"x": 4, "y": 2}


@pytest.mark.fast(1)
@pytest.mark.parametrize("platform", ["tpu", "gpu", "cpu"])
def test_large_moves_are_in_parts_on_accelerators(platform: str, monkeypatch: pytest.MonkeyPatch):
    """With a budget in as few parts as fit as they are compiled, here on CPU devices."""
    monkeypatch.setattr(placement, "platform_of", lambda mesh: platform)
    mesh = mesh_of(SIZES)
    source, target = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, ("y", "x")))
    whole, tiles = 1 << 12, 2 * (4 << 24) // 8

    def parts(budget: int | None, rows: int = whole) -> list[int]:
        plan = plan_request(ReshardRequest(target, source, PlanOptions(budget)), (rows, 1 << 12), "float32")
        return [step.mode.parts for step in plan.steps]

    assert parts(None, rows=1 << 10) == [1]
    if platform == "cpu":
        assert parts(None) == parts(10 << 30) == [1]
        return
    # Blocks leave as they lie in memory, so parts would be copied beside what arrives.
    assert parts(None) == parts(10 << 30) == [1]
    assert parts(tiles + tiles // 4) == [8] and parts(tiles + tiles // 16) == [32]


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_parts_overlap_on_gpus_where_the_budget_allows_it(platform: str, monkeypatch: pytest.MonkeyPatch):
    """As the model says, where there is nothing to compile for."""
    monkeypatch.setattr(placement, "platform_of", lambda mesh: platform)
    monkeypatch.setattr(xla, "OVERLAPPED", 16 << 20)
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    source, target = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, ("y", "x")))
    tiles = 2 * (4 << 24) // 8

    def modes(budget: int | None) -> list[tuple[int, bool]]:
        plan = plan_request(ReshardRequest(target, source, PlanOptions(budget)), (1 << 12, 1 << 12), "float32")
        return [(step.mode.parts, step.mode.overlap) for step in plan.steps]

    gpu = platform == "gpu"
    assert modes(None) == [(1, False)]  # On a GPU a part would be four pieces of the result.
    assert modes(tiles + tiles // 4) == [(16, True) if gpu else (8, False)]
    assert modes(tiles + tiles // 20) == [(64, True) if gpu else (32, False)]


@pytest.mark.parametrize(("platform", "parts"), [("tpu", 16), ("gpu", 8)])
def test_only_a_tpu_has_lanes_to_fill(platform: str, parts: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "platform_of", lambda mesh: platform)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    source, target = NamedSharding(mesh, P(*[None] * 3, "x")), NamedSharding(mesh, P(None, None, "x"))
    budget = 7 * (64 * 64 * 64 * 512 * 2 // 8) // 2
    request = ReshardRequest(target, source, PlanOptions(budget))
    assert [step.mode.parts for step in plan_request(request, (64, 64, 64, 512), "bfloat16").steps] == [parts]


def on(order: list[int], *spec: str) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES, order=order), P(*spec))


FORWARD, BACKWARD = list(range(8)), list(range(7, -1, -1))


def test_on_cpu_the_plan_is_that_of_the_planner() -> None:
    source, target = on(FORWARD, "x", "y"), on(FORWARD, "y")
    for budget in (None, 620):
        plan = plan_request(ReshardRequest(target, source, PlanOptions(budget)), (12, 20), "float32")
        wanted = [layout_of(end, (12, 20), "float32") for end in (source, target)]
        assert plan == rs.plan(*wanted, budget=budget)
    prime = plan_request(ReshardRequest(target, source), (13, 7), "int8")
    assert prime == rs.plan(layout_of(source, (13, 7), "int8"), layout_of(target, (13, 7), "int8"))


def test_on_cpu_large_all_to_alls_are_rounds() -> None:
    """Where nothing else was asked for: 1 MiB goes to the other device of a pair."""
    source, target = on(FORWARD, "y"), NamedSharding(mesh_of(SIZES), P(None, "y"))

    def kinds(rows: int = 1 << 10, **options: Any) -> list[str]:
        request = ReshardRequest(target, source, PlanOptions.read(**options))
        return [step.kind for step in plan_request(request, (rows, 1 << 10), "float32").steps]

    assert kinds() == ["exchange"] and kinds(rows=1 << 9) == ["all_to_all"]
    assert kinds(budget=1 << 30) == kinds(network="tpu-v5p") == ["all_to_all"]


def test_devices_in_another_order_are_planned_by_their_ids() -> None:
    """The same spec on both meshes: by position nothing would move."""
    plan = plan_request(ReshardRequest(on(BACKWARD, "x", "y"), on(FORWARD, "x", "y")), (8, 8), "float32")
    assert plan.received_bytes == 2 * 4 * 4 and plan.target.mesh.device_ids == tuple(BACKWARD)
    same = plan_request(ReshardRequest(on(FORWARD, "x", "y"), on(FORWARD, "x", "y")), (8, 8), "float32")
    assert not same.steps and same.target.mesh.device_ids is None


def test_without_a_source_there_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"the source of the move .* is not known"):
        plan_request(ReshardRequest(on(FORWARD, "x")), (8, 8), "float32")
