"""Routes over idle axes: never slower, within budgets, right, and said to exceed the lower bound."""

from __future__ import annotations

import random

import pytest

import reshard as rs
from reshard.plans.plan import StepSpec
from reshard.synth import cost
from reshard.synth.network import PRESETS, Network
from reshard.synth.routes import Pair, list_routes
from reshard.types import Layout, Mesh
from tests.oracle import check


def parsed(mesh: Mesh, *texts: str) -> list[Layout]:
    return [Layout.parse(text, mesh) for text in texts]


def test_a_gather_over_a_slow_axis_goes_through_the_fast_ones():
    mesh = Mesh(dcn=2, x=8, y=8)
    source, target = parsed(mesh, "f32[{dcn}16777216]", "f32[33554432]")
    plan = rs.plan(source, target, network="tpu-v5p")
    alone = rs.plan(source, target)
    links = PRESETS["tpu-v5p"].links(mesh)
    direct = sum(cost.predict_seconds(s.spec, s.operand, links) for s in alone.steps)
    assert 0.0107 < direct < 0.0108 and (plan.seconds or 1.0) < 0.001
    assert plan.idle_axes == ("x", "y") and plan.received_bytes > plan.lower_bound_bytes
    assert "; over the idle axes x and y" in str(plan)
    assert plan.to_dict()["idle_axes"] == ["x", "y"]
    assert rs.Plan.from_json(plan.to_json()) == plan
    assert alone.idle_axes == () and "idle_axes" not in alone.to_dict() and alone.received_bytes == 1 << 26


def test_sums_over_a_slow_axis_are_finished_on_slices():
    source, target = parsed(Mesh(dcn=2, x=8), "f32[65536, 64] + sum{dcn}", "f32[65536, 64]")
    plan = rs.plan(source, target, network="tpu-v5p")
    assert [step.kind for step in plan.steps] == ["slice", "all_reduce", "all_gather"]


@pytest.mark.parametrize("source", ["f32[{x:(1)2}8]", "f32[{x}4]"])
def test_sub_axes_that_nothing_uses_are_idle(source: str):
    mesh = Mesh(x=4, y=4)
    plan = rs.plan(*parsed(mesh, source, "f32[16]"), network=Network.uniform(0, 1))
    assert plan.idle_axes in ((), ("y",), ("x:(2)2", "y"), ("x:(2)2",))


NETWORKS = (
    Network.of({"a": (1e-5, 1e9), "b": (1e-6, 1e11), "c": (1e-6, 1e11)}),
    Network.of({"a": (1e-9, 1e10), "b": (1e-9, 1e11, "ring"), "c": (1e-9, 1e12, "line")}),
    PRESETS["tpu-v5p"],
)


def over_few_axes(choose: random.Random, mesh: Mesh, partial: bool) -> Layout:
    """A layout that uses one axis, or none: it holds a digit, or is summed over."""
    axis = choose.choice([None, *(mesh.sub_axis(name) for name in mesh.axes)])
    held = [] if axis is None else [axis]
    if partial and held and choose.random() < 0.4:
        return Layout.tiled(mesh, (24, 48), "int32", [[], []], held, "sum")
    return Layout.tiled(mesh, (24, 48), "int32", choose.choice([[held, []], [[], held]]))


@pytest.mark.parametrize("network", NETWORKS, ids=("switches", "rings", "torus"))
def test_plans_are_never_slower_than_without_idle_axes(network: Network):
    choose = random.Random(network.name)
    over = 0
    for _ in range(8):
        mesh = Mesh(a=choose.choice([2, 3]), b=choose.choice([2, 4]), c=2)
        source, target = over_few_axes(choose, mesh, True), over_few_axes(choose, mesh, False)
        links = network.links(mesh)
        routes = list(list_routes(Pair(source, target), links))
        known: cost.Known = {}
        without = cost.route_seconds(cost.keep_fastest(routes, source, links, known)[0], source, links, known)
        plan = rs.plan(source, target, network=network)
        assert (plan.seconds or 0.0) <= without * (1 + 1e-9)
        check(plan)
        assert rs.prove(plan)
        over += bool(plan.idle_axes)
        within = rs.plan(source, target, network=network, budget=plan.peak_bytes)
        assert within.peak_bytes <= plan.peak_bytes and (within.seconds or 0.0) <= (plan.seconds or 0.0) * (1 + 1e-9)
    assert over or network is PRESETS["tpu-v5p"]


def test_an_axis_without_room_is_passed_over():
    """No dim has room for y of 3, and half of x of 6 is worth it: all of dcn's sums would take twice as long."""
    mesh = Mesh(dcn=2, x=6, y=3)
    plan = rs.plan("f32[16, 256, 512] + sum{dcn}", "f32[16, 256, 512]", mesh=mesh, network="tpu-v5p")
    assert [step.kind for step in plan.steps] == ["slice", "all_reduce", "all_gather"]
    assert plan.steps[0].result.tile_bytes == plan.source.tile_bytes // 2
    alone = StepSpec("all_reduce", plan.target)
    assert (plan.seconds or 0) < 0.55 * cost.predict_seconds(alone, plan.source, PRESETS["tpu-v5p"].links(mesh))


def test_arrays_without_elements_need_no_idle_axes():
    plan = rs.plan("f32[0, 16] + sum{x}", "f32[0, 16]", mesh=Mesh(x=2, y=4), network="tpu-v5p")
    assert plan.received_bytes == 0 and "slice" not in [step.kind for step in plan.steps]
