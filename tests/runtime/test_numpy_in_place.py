"""Steps in parts that overwrite their operand: the elements, and the memory that the plan promises."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import StepError
from reshard.lower import lower_plan
from reshard.lower.program import InParts
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.split_steps import part_regions, possible_counts
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import on_numpy
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.oracle import check

MESHES = (Mesh(x=4, y=2), Mesh(x=3, y=2), Mesh(x=5))


def in_place(plan: rs.Plan, number: int) -> rs.Plan | None:
    """The plan with all its steps in place, in parts whose counts are chosen by `number`; None if one cannot be."""
    specs: list[StepSpec] = []
    for step in plan.steps:
        possible = possible_counts(step.operand, step.result)
        if not possible:
            return None
        mode = StepMode(parts=possible[number % len(possible)], in_place=True)
        specs.append(StepSpec(step.kind, step.result, mode))
    try:
        return chain(plan.source, plan.target, specs, donate=True)
    except StepError:
        return None


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_swaps_in_every_number_of_parts(mesh: Mesh):
    """An axis moves between any two of three dims, with and without slots to rearrange."""
    size = 2 * mesh.axes["x"]
    rows = [tuple("{x}2" if dim == at else str(size) for dim in range(3)) for at in range(3)]
    ends = [Layout.parse(f"f32[{', '.join(dims)}]", mesh) for dims in rows]
    seen = Counter[tuple[bool, bool]]()
    for source, target in itertools.permutations(ends, 2):
        for number in range(len(possible_counts(source, target))):
            plan = in_place(rs.plan(source, target, donate=True), number)
            assert plan is not None
            check(plan)
            (step,) = lower_plan(plan).instructions
            assert isinstance(step, InParts)
            where = part_regions(source.tile_shape, step.take, target.tile_shape, step.put)
            seen[where.before > 1, where.after > 1] += 1
    assert len(seen) >= 3


@settings(max_examples=100)
@given(pairs("float32"), st.integers(0, 5))
def test_random_plans_in_place(pair: tuple[Layout, Layout], number: int):
    plan = in_place(rs.plan(*pair, donate=True), number)
    if plan is not None:
        check(plan)


def test_memory_is_a_tile_and_two_parts():
    source, target = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16, 2]", "f32[16, {x}4, 2]"))
    plan = chain(source, target, [StepSpec("all_to_all", target, StepMode(parts=4, in_place=True))], donate=True)
    whole, part = source.tile_bytes, source.tile_bytes // 4
    packed = plan.steps[0].cost.scratch - 2 * part
    assert plan.peak_bytes == check(plan).peak_bytes == whole + 2 * part + packed


@pytest.mark.parametrize("fault", [lambda stops: stops[:-1], lambda stops: stops[1:], lambda stops: ()])
def test_slots_that_stay_behind_are_seen(fault: object, monkeypatch: pytest.MonkeyPatch):
    """A part that is read where another was written before, or slots that are not brought together."""
    source, target = (Layout.parse(text, Mesh(x=4)) for text in ("f32[16, 3, {x}1]", "f32[{x}4, 3, 4]"))
    plan = chain(source, target, [StepSpec("all_to_all", target, StepMode(parts=4, in_place=True))], donate=True)
    check(plan)
    stops = on_numpy.transposing_stops
    monkeypatch.setattr(on_numpy, "transposing_stops", lambda *slots: fault(stops(*slots)))  # pyright: ignore
    with pytest.raises(AssertionError):
        check(plan)


def test_refusals():
    mesh = Mesh(x=4, y=2)
    for kind, before, after, why in (
        ("all_gather", "f32[{x}4, 16]", "f32[16, 16]", "equally large"),
        ("permute", "f32[{x}3/11, 4]", "f32[{x}3/11, 4]", "even"),
    ):
        source, target = Layout.parse(before, mesh), Layout.parse(after, mesh)
        with pytest.raises(StepError, match=why):
            chain(source, target, [StepSpec(kind, target, StepMode(parts=2, in_place=True))], donate=True)
    source, target = Layout.parse("f32[{x}{y}2, 4]", mesh), Layout.parse("f32[{y}{x}2, 4]", mesh)
    with pytest.raises(rs.errors.PlanError, match="donate"):
        chain(source, target, [StepSpec("permute", target, StepMode(parts=2, in_place=True))])
