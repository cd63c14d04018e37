"""Budgets as the compiler counts: what is compiled for a move keeps to its budget, on 8 CPU devices and on v5p."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
import reshard.jax
from reshard.errors import BudgetError, PlanError
from reshard.jax import compiled_forms, redistribute
from reshard.jax.request import ReshardRequest, plan_request
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import on_jax
from reshard.synth.options import PlanOptions
from reshard.types import Layout
from tests.jax.oracle import AUTO, EXPLICIT, assert_exact, executed, filled, mesh_of, on
from tests.layouts import contiguous_layouts

SIZES = {"x": 4, "y": 2}
WIDE = (256, 512)


def compiled_peak(before: NamedSharding, after: NamedSharding, shape: tuple[int, ...], dtype: str, budget: int) -> int:
    """What a program of the move alone needs: XLA:CPU leaves the temporaries out of its own peak."""
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=before)
    move = jax.jit(lambda v: redistribute(v, after, source=before, budget=budget), out_shardings=after)
    memory = move.lower(x).compile().memory_analysis()
    if before.mesh.devices.flat[0].platform != "cpu":
        return memory.peak_memory_in_bytes
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return needed - memory.alias_size_in_bytes


def ends_of(before: P, after: P, kind: AxisType = AUTO) -> tuple[NamedSharding, NamedSharding]:
    mesh = mesh_of(SIZES, kind)
    return NamedSharding(mesh, before), NamedSharding(mesh, after)


@pytest.mark.fast(1, slow=0)
@pytest.mark.parametrize("seed", range(3))
def test_random_moves_keep_to_their_budgets_as_compiled(seed: int):
    """Or are refused, with a budget that they keep to."""
    choose, refused = random.Random(seed), 0
    mesh = mesh_of(SIZES)
    for _ in range(3):
        shape, dtype = choose.choice([(384, 192), (64, 48, 64)]), choose.choice(["float32", "bfloat16"])
        layouts = choose.sample(list(contiguous_layouts(rs.Mesh(SIZES), shape, dtype)), 2)
        before, after = (on(mesh, layout) for layout in layouts)
        budget = int(choose.uniform(1.02, 1.5) * sum(layout.tile_bytes for layout in layouts))
        values = filled(shape, dtype)
        try:
            moved = redistribute(jax.device_put(values, before), after, budget=budget)
        except BudgetError as error:
            refused, budget = refused + 1, error.smallest
            moved = redistribute(jax.device_put(values, before), after, budget=budget)
        assert_exact(moved, after, values)
        assert compiled_peak(before, after, shape, dtype, budget) <= budget, layouts
    assert refused < 3


def test_a_program_of_the_planner_that_needs_more_gives_way():
    """XLA:CPU stages an all-to-all twice: 1.9 times source and target, of which the plan knows 1.5."""
    before, after = ends_of(P(("x", "y")), P(None, ("x", "y")))
    tiles = 2 * math.prod(WIDE) * 4 // 8
    budget = tiles * 8 // 5
    planned = rs.plan(*(Layout.from_jax(end, WIDE, "float32") for end in (before, after)), budget=budget)
    assert [step.kind for step in planned.steps] == ["all_to_all"] and planned.peak_bytes <= budget
    asked = compiled_forms.compile_form(planned, compiled_forms.MoveEnds(before, after))
    assert asked.peak_bytes > budget and asked.ends_bytes == tiles
    assert compiled_peak(before, after, WIDE, "float32", budget) <= budget
    assert_exact(redistribute(jax.device_put(filled(WIDE), before), after, budget=budget), after, filled(WIDE))


@pytest.mark.fast(1)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_the_smallest_budget_of_a_refusal_works_as_compiled(kind: AxisType):
    before, after = ends_of(P("x", "y"), P(None, ("y", "x")), kind)
    x = jax.device_put(filled(WIDE), before)
    with pytest.raises(BudgetError, match="as they are laid out in memory") as refused:
        redistribute(x, after, budget=1000)
    smallest = refused.value.smallest
    assert compiled_peak(before, after, WIDE, "float32", smallest) <= smallest
    assert_exact(redistribute(x, after, budget=smallest), after, filled(WIDE))


def test_what_was_asked_about_is_what_runs(monkeypatch: pytest.MonkeyPatch):
    """A concrete array moves by the program that was compiled to ask: it is not compiled again."""
    before, after = ends_of(P("y", "x"), P(None, ("y", "x")))
    x, compilations = jax.device_put(filled((256, 640)), before), []

    def count(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    asked = list[int]()
    original = compiled_forms.compile_form
    monkeypatch.setattr(compiled_forms, "compile_form", lambda *given: (asked.append(1), original(*given))[1])
    redistribute(x, after, budget="1MiB")
    assert len(compilations) == len(asked) >= 1
    redistribute(x, after, budget="1MiB")
    assert len(compilations) == len(asked)


def test_on_an_abstract_mesh_the_model_decides():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    before, after = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P(None, ("x", "y")))
    plan = plan_request(ReshardRequest(after, before, PlanOptions(140_000)), WIDE, "float32")
    assert plan == rs.plan(plan.source, plan.target, budget=140_000)


@pytest.mark.slow
def test_inside_traces_and_the_pass():
    """The caller may be tracing, under a mesh, in vmap or with the pass on, which sees no form that is only asked
    about."""
    before, after = ends_of(P(("x", "y")), P(None, ("x", "y")))
    shape, values = (256, 576), filled((256, 576))
    x = jax.device_put(values, before)
    with reshard.jax.enabled() as log, jax.set_mesh(mesh_of(SIZES)):
        moved = jax.jit(lambda v: redistribute(v + 0, after, source=before, budget=250_000))(x)
    assert_exact(moved, after, values)
    assert len([report for report in log.reports if report.places]) <= 1
    known = jax.jit(lambda v: redistribute(v, after, budget=250_000), in_shardings=before)  # The partitioner asks.
    assert_exact(known(x), after, values)
    stacked = jax.vmap(lambda v: redistribute(v, after, source=before, budget=600_000))(np.stack([values] * 2))
    assert stacked.shape == (2, *shape)


@pytest.mark.slow
def test_devices_in_another_order():
    before, _ = ends_of(P("x", "y"), P())
    after = NamedSharding(mesh_of(SIZES, order=range(7, -1, -1)), P(None, "x"))
    x = jax.device_put(filled(WIDE), before)
    with pytest.raises(BudgetError) as refused:
        redistribute(x, after, budget=1000)
    assert_exact(redistribute(x, after, budget=refused.value.smallest), after, filled(WIDE))


# ---- prefer="measured" -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_fastest_form_as_measured_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch):
    """Here the clock says that it is an exchange in few large messages."""
    before, after = ends_of(P(("x", "y")), P(None, ("x", "y")))
    shape, timed = (512, 640), list[int]()

    def time_forms(forms: Any, ends: Any) -> list[float]:
        timed.append(len(forms))
        return [1.0 if form.steps[0].kind == "exchange" and form.launches == 7 else 2.0 for form in forms]

    monkeypatch.setattr(compiled_forms, "_time_forms", time_forms)
    move = jax.jit(lambda v: redistribute(v, after, source=before, prefer="measured"), in_shardings=before)
    x = jax.device_put(filled(shape), before)
    program = move.lower(x).compile()
    assert {kind: count for (kind, _), count in executed(program).items()} == {"permute": 7}
    assert_exact(redistribute(x, after, prefer="measured"), after, filled(shape))
    assert len(timed) == 1 and timed[0] > 5


@pytest.mark.fast(1)
@pytest.mark.parametrize("budget", [None, "200KiB"])
def test_measured_moves_are_exact_and_within_the_budget(budget: str | None):
    before, after = ends_of(P("x", "y"), P(None, ("y", "x")))
    values = filled((256, 768))
    moved = redistribute(jax.device_put(values, before), after, prefer="measured", budget=budget, donate=True)
    assert_exact(moved, after, values)
    plan = plan_request(
        ReshardRequest(after, before, PlanOptions.read(budget, prefer="measured", preferences=("measured",))),
        values.shape,
        "float32",
    )
    if budget is not None:
        assert compiled_forms.compile_form(plan, compiled_forms.MoveEnds(before, after, True)).peak_bytes <= 200 << 10


def test_what_may_be_preferred():
    """The pass is asked for other things, and measures none of its plans."""
    before, after = ends_of(P("x"), P("y"))
    with pytest.raises(PlanError, match="prefer='bytes' is none of 'measured'"):
        redistribute(jax.device_put(filled(WIDE), before), after, prefer="bytes")
    with pytest.raises(PlanError, match="prefer='measured' is none of 'bytes'"):
        reshard.jax.enable(prefer="measured")


@pytest.mark.slow
def test_views_and_casts_keep_to_their_budgets_as_compiled():
    """Or are refused; also where they fill a part of an array that is there."""
    before, after = ends_of(P(("x", "y")), P(None, ("x", "y")))
    values = filled((256, 384))
    x, out = jax.device_put(values, before), jax.device_put(np.zeros((256, 768), "float32"), after)
    for options, right in (
        ({"dtype": "bfloat16"}, values.astype("bfloat16")),
        ({"view": "a b -> b a"}, values.T),
        ({"into": {1: slice(384, 768)}, "out": out}, np.concatenate([np.zeros_like(values), values], 1)),
    ):
        with pytest.raises(BudgetError) as refused:
            redistribute(x, after, budget=1000, **options)
        smallest = refused.value.smallest
        assert_exact(redistribute(x, after, budget=smallest, **options), after, right)
        move = jax.jit(partial(redistribute, sharding=after, source=before, budget=smallest, **options))
        memory = move.lower(x).compile().memory_analysis()
        needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert needed - memory.alias_size_in_bytes <= smallest + ("out" in options) * out.nbytes // 8


def test_sums_keep_to_their_budgets():
    mesh = mesh_of(SIZES, EXPLICIT)
    source, target = NamedSharding(mesh, P(unreduced={"x"})), NamedSharding(mesh, P("x"))
    parts = jax.device_put(filled((256, 256)), NamedSharding(mesh, P()))
    x = jax.jit(lambda v: redistribute(v, source))(parts)
    moved = redistribute(x, target, budget="2MiB")
    assert_exact(moved, target, filled((256, 256)))


@pytest.mark.parametrize(
    ("before", "after", "chunk"),
    [
        # What a device keeps is in pieces, too, of which the last is shorter.
        ("f32[{x}64, {y}384]", "f32[256, {y}{x}96]", 960),
        ("f32[{x}10, 24]", "f32[40, {y}{x}3]", 21),
    ],
)
def test_messages_in_unlike_pieces_are_exact(before: str, after: str, chunk: int):
    mesh, ends = mesh_of(SIZES), [Layout.parse(text, rs.Mesh(SIZES)) for text in (before, after)]
    plan = chain(*ends, [StepSpec("exchange", ends[1], StepMode(chunk=chunk))])
    move = jax.jit(partial(on_jax.apply_plan, plan, mesh), out_shardings=on(mesh, ends[1]))
    values = filled(ends[0].shape)
    assert_exact(move(jax.device_put(values, on(mesh, ends[0]))), on(mesh, ends[1]), values)
