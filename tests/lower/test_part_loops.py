"""Steps in parts that share a loop: which do, and that what they move arrives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from reshard.lower import lower_plan
from reshard.lower.to_shard_map.parts import joined, loops
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.cost import StepMode
from reshard.types import Layout
from tests.lower.to_shard_map.on_xla import MESH, check_on_xla, stacked

PLANS = [
    # Kinds and layouts, then the steps of each loop.
    (["permute", "f32[{y}{x}8, 3, 5]", "all_gather", "f32[{y}32, 3, 5]"], "f32[{x}{y}8, 3, 5]", [2]),
    (["slice", "f32[{x}{y}8, 3, 5]", "permute", "f32[{y}{x}8, 3, 5]"], "f32[{x}16, 3, 5]", [2]),
    (
        ["slice", "f32[{x}{y}8, 3, 5]", "permute", "f32[{y}{x}8, 3, 5]", "all_gather", "f32[{y}32, 3, 5]"],
        "f32[{x}16, 3, 5]",
        [3],
    ),
    # Parts of the exchange are rows, those of the gather columns.
    (["all_to_all", "f32[32, {x}2]", "all_gather", "f32[32, 8]"], "f32[{x}8, 8]", [1, 1]),
    # In two parts and in four.
    (["permute", "f32[{y}{x}8, 3, 5]", "all_gather/4", "f32[{y}32, 3, 5]"], "f32[{x}{y}8, 3, 5]", [1, 1]),
    # At once in between.
    (
        ["slice", "f32[{x}{y}8, 3, 5]", "permute/1", "f32[{y}{x}8, 3, 5]", "all_gather", "f32[{y}32, 3, 5]"],
        "f32[{x}16, 3, 5]",
        [1] * 3,
    ),
]


def planned(steps: list[str], source: str) -> Plan:
    """The plan of some steps, in two parts each unless they say how many."""
    moves: list[StepSpec] = []
    for name, result in zip(steps[::2], steps[1::2], strict=True):
        kind, _, parts = name.partition("/")
        moves.append(StepSpec(kind, Layout.parse(result, MESH), StepMode(parts=int(parts or 2))))
    return chain(Layout.parse(source, MESH), moves[-1].result, moves)


@pytest.mark.parametrize(("steps", "source", "sizes"), PLANS)
def test_steps_share_a_loop_where_their_parts_are_the_same(steps: list[str], source: str, sizes: list[int]):
    plan = planned(steps, source)
    program = lower_plan(plan)
    assert [len(loop) for loop in loops(plan.steps)] == sizes
    assert [len(run) for run in joined(program.instructions)] == sizes
    run, _ = stacked(program, MESH.axes)
    text = jax.jit(run).lower(jnp.zeros((MESH.size, *program.tile_shape))).as_text()
    assert text.count("stablehlo.while") == sum(step.mode.parts > 1 for step in plan.steps) - sum(
        size - 1 for size in sizes
    )
    check_on_xla(plan)
