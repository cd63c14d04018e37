"""Trees within a budget on TPU executables without the hardware: what the compiler needs for each batch, beside all
else that lives meanwhile, is the budget, within what a single plan's peak is off there. Skipped without libtpu.
"""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import BudgetError
from reshard.jax import tree_budget
from reshard.synth.options import PlanOptions
from tests.jax.test_redistribute_tpu import SLACK, mesh_of

pytest.importorskip("libtpu", reason="ahead-of-time compiles for TPU need libtpu: pip install 'jax[tpu]'")

MESH = rs.Mesh(x=4, y=2)
LAYER = {
    "wq": ("bf16[{x}512, {y}1024]", "bf16[2048, {y}1024]", P("x", "y"), P(None, "y")),
    "wo": ("bf16[{x}512, {y}1024]", "bf16[{y}1024, 2048]", P("x", "y"), P("y")),
    "up": ("bf16[{x}512, {y}4096]", "bf16[2048, {y}{x}1024]", P("x", "y"), P(None, ("y", "x"))),
    "norm": ("bf16[{x}512]", "bf16[2048]", P("x"), P()),
}


def tree_of(layers: int) -> tuple[dict[str, tuple[rs.Layout, rs.Layout]], dict[str, tuple[P, P]]]:
    layouts: dict[str, tuple[rs.Layout, rs.Layout]] = {}
    specs: dict[str, tuple[P, P]] = {}
    for layer in range(layers):
        for name, (source, target, before, after) in LAYER.items():
            layouts[f"{layer}.{name}"] = (rs.Layout.parse(source, MESH), rs.Layout.parse(target, MESH))
            specs[f"{layer}.{name}"] = (before, after)
    return layouts, specs


@pytest.mark.slow
def test_each_program_and_what_lives_beside_it() -> None:
    layouts, specs = tree_of(1)
    with pytest.raises(BudgetError) as raised:
        tree_budget.bounded_tree(layouts, PlanOptions(1), tree_budget.OWN)
    budget = int(1.2 * raised.value.smallest)
    tree = tree_budget.bounded_tree(layouts, PlanOptions(budget), tree_budget.OWN)
    mesh = mesh_of("v5p:2x2x2", {"x": 4, "y": 2})
    live = sum(source.tile_bytes for source, _ in layouts.values())
    most = 0
    for batch in tree.batches:
        ends = [tuple(NamedSharding(mesh, specs[name][side]) for name in batch.names) for side in (0, 1)]
        program = tree_budget._batch_program(batch.plans, *ends)
        shapes = [jax.ShapeDtypeStruct(plan.source.shape, plan.source.dtype) for plan in batch.plans]
        memory = program.lower(*shapes).compile().memory_analysis()
        assert memory is not None
        sources, targets = (sum(math.prod(x.tile_shape) * 2 for x in side) for side in zip(*_ends(batch), strict=True))
        needed = memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
        most = max(most, live - sources + memory.argument_size_in_bytes + needed)
        live += targets
    assert 0.7 * budget < most <= SLACK * budget


def _ends(batch: rs.plans.plan.Batch) -> list[tuple[rs.Layout, rs.Layout]]:
    return [(plan.source, plan.target) for plan in batch.plans]
