"""Targets that are partial where the source is not: steps, bytes at the bound, and what they mean."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError
from reshard.geometry.refine import refine
from reshard.types import Layout, Mesh
from tests.layouts import MESHES, SIZES, contiguous_layouts, random_layout
from tests.oracle import check

MESH = Mesh(x=4, y=2)


def planned(source: str, target: str, mesh: Mesh = MESH, **options) -> rs.Plan:
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)
    check(plan)
    return plan


def kinds(plan: rs.Plan) -> list[str]:
    return [step.kind for step in plan.steps]


@pytest.mark.parametrize(
    ("source", "target", "expected", "received"),
    [
        # Nothing is received where the devices of a group have each element among them.
        ("f32[16]", "f32[16] + sum{x}", ["split_sum"], 0),
        ("f32[{x}4]", "f32[16] + sum{x}", ["split_sum"], 0),
        ("f32[{x}4]", "f32[{y}8] + sum{x}", ["split_sum"], 0),
        ("f32[{x}4, 8]", "f32[16, {y}4] + max{x}", ["split_sum"], 0),
        ("f32[16] + sum{x}", "f32[16] + sum{x}{y}", ["split_sum"], 0),
        ("f32[{x}3/10]", "f32[10] + min{x}", ["split_sum"], 0),
        ("f32[]", "f32[] + sum{x}{y}", ["split_sum"], 0),
        # Two devices share what one would gather.
        ("f32[{x}4, 8]", "f32[16, 8] + sum{y}", ["slice", "all_gather", "split_sum"], 3 * 4 * 8 * 4 // 2),
        ("f32[{x}4, 8]", "f32[16, 8] + sum{x:(2)2}{y}", ["slice", "all_gather", "split_sum"], 64),
        # Another sum first; each of its halves is reduced by one of the devices along y.
        ("f32[16] + sum{x}", "f32[16] + sum{y}", ["slice", "all_reduce", "split_sum"], 48),
        ("f32[16] + sum{x}", "f32[16] + max{x}", ["reduce_scatter", "split_sum"], 48),
        ("f32[16] + mean{x}", "f32[16] + sum{x}", ["reduce_scatter", "split_sum"], 48),
    ],
)
def test_routes(source: str, target: str, expected: list[str], received: int):
    plan = planned(source, target)
    assert kinds(plan) == expected
    assert plan.received_bytes == plan.lower_bound_bytes == received


def test_the_table_in_the_docstring():
    plan = planned("f32[{x}4, 8]", "f32[16, 8] + sum{x:(2)2}{y}")
    results = ["f32[{x}{y}2, 8]", "f32[2{x:(2)2}{y}2, 8]", "f32[16, 8] + sum{x:(2)2}{y}"]
    assert [str(step.result) for step in plan.steps] == results
    assert [step.received_bytes for step in plan.steps] == [0, 64, 0]


def partial_targets(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    """Every contiguous layout, partial along every set of the axes that it does not use."""
    targets: list[Layout] = []
    for bare in contiguous_layouts(mesh, shape):
        used = {axis.axis for axis in bare.held}
        free = [mesh.sub_axis(name) for name, size in mesh.axes.items() if name not in used and size > 1]
        for chosen in product((False, True), repeat=len(free)):
            partial = tuple(axis for axis, take in zip(free, chosen, strict=True) if take)
            if partial:
                targets.append(Layout(mesh, bare.dims, "float32", "sum", partial))
    return targets


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [(Mesh(x=2, y=2), (8,)), (Mesh(x=4, y=2), (16,)), (Mesh(x=2, y=3), (12,)), (Mesh(x=2, y=2), (4, 8))],
    ids=str,
)
def test_every_start_on_a_small_mesh_is_right_and_at_the_bound(mesh: Mesh, shape: tuple[int, ...]):
    """Even arrays whose tiles every axis divides: no start receives more than any plan must, or needs larger tiles."""
    for source in contiguous_layouts(mesh, shape):
        for target in partial_targets(mesh, shape):
            plan = rs.plan(source, target)
            check(plan)
            least = max(source.tile_bytes, target.tile_bytes)
            assert all(step.result.tile_bytes <= least for step in plan.steps), str(plan)
            assert plan.lower_bound_bytes <= plan.received_bytes, str(plan)
            whole = rs.plan(source, Layout(mesh, target.dims, "float32"))
            assert plan.received_bytes <= whole.received_bytes, str(plan)
            if refine(source, target) is not None and not crosses(source, target):
                assert plan.received_bytes == plan.lower_bound_bytes, str(plan)


def crosses(source: Layout, target: Layout) -> bool:
    """Whether an axis that becomes partial holds a digit that another axis comes to hold, while others are gathered.

    Its devices then have shares of different sizes, which no layout describes.
    """
    starts = {axis.axis for axis in target.partial}
    before, after = ({axis.axis for axis in layout.held} for layout in (source, target))
    return bool(starts & (before - after)) and bool((before - after - starts) | (before & after))


def random_start(choose: random.Random, dtype: str) -> tuple[Layout, Layout]:
    """A random pair whose target is partial and has an identity; the source may be partial, too."""
    while True:
        mesh = choose.choice(MESHES)
        same = [m for m in MESHES if set(m.devices) == set(mesh.devices)]
        other = mesh if choose.randint(0, 4) else choose.choice(same)
        shape = [choose.choice(SIZES) for _ in range(choose.randint(0, 3))]
        source = random_layout(choose, mesh, shape, dtype, bool(choose.randint(0, 1)))
        target = random_layout(choose, other, shape, dtype, True)
        if target.partial and "mean" not in (target.reduction, source.reduction):
            return source, target


@given(st.integers(0, 1 << 32), st.sampled_from(["int64", "float64"]))
@settings(max_examples=150)
def test_any_start(seed: int, dtype: str):
    """Uneven, over sub-axes, after another reduction, on other meshes, in any order of devices."""
    source, target = random_start(random.Random(seed), dtype)
    plan = rs.plan(source, target)
    check(plan)
    assert plan.received_bytes >= plan.lower_bound_bytes
    assert plan.to_json() == rs.Plan.from_json(plan.to_json()).to_json()


@given(st.integers(0, 1 << 32), st.booleans(), st.integers(0, 3))
@settings(max_examples=60)
def test_any_start_within_a_budget(seed: int, donate: bool, spare: int):
    """The memory theorem: budgets from the peak down to the smallest that works are kept."""
    source, target = random_start(random.Random(seed), "int64")
    peak = rs.plan(source, target, donate=donate).peak_bytes
    try:
        plan = rs.plan(source, target, budget=peak * spare // 3, donate=donate)
    except rs.errors.BudgetError as error:
        plan = rs.plan(source, target, budget=error.smallest, donate=donate)
        assert plan.peak_bytes <= error.smallest
    check(plan)


@pytest.mark.parametrize("network", ["tpu-v5p", "h100"])
def test_starts_on_a_network(network: str):
    for source, target in (("f32[{x}4, 8]", "f32[16, 8] + sum{y}"), ("f32[{x}4]", "f32[{y}8] + sum{x}")):
        plan = planned(source, target, network=network)
        assert plan.steps[-1].kind == "split_sum" and plan.steps[-1].seconds == 0


def test_summands_stay_where_they_are_or_are_summed_on_other_devices():
    """Between devices in different orders, a sum is finished and started again."""
    source = Layout.parse("f32[16] + sum{x}", Mesh(x=4))
    target = Layout.parse("f32[16] + sum{x}", Mesh({"x": 4}, device_ids=[0, 3, 1, 2]))
    plan = rs.plan(source, target)
    check(plan)
    assert kinds(plan)[-1] == "split_sum"


@pytest.mark.parametrize("source", ["f32[16]", "f32[{x}4]", "f32[16] + sum{x}", "f32[16] + mean{y}"])
def test_a_mean_is_never_started(source: str):
    with pytest.raises(PlanError, match=r"mean as it is, so nothing can fill .* give a target that is a sum"):
        planned(source, "f32[16] + mean{x}")
