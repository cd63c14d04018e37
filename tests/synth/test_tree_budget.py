"""Trees within a budget: only what must be is cut, and a budget without room for batches is met array by array."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import BudgetError
from tests.trees import check_tree, llama

MESH = rs.Mesh(x=4, y=2)


def test_only_arrays_that_do_not_fit_are_cut():
    moves = llama(MESH)
    floor = sum(plan.source.tile_bytes + plan.target.tile_bytes for plan in rs.plan_tree(moves).plans.values())
    tree = rs.plan_tree(moves, budget=floor + 1024)
    assert tree.peak_bytes <= floor + 1024
    cut = [name for name, plan in tree.plans.items() if plan.launches > 2]
    assert cut
    assert not any("norm" in name for name in cut)
    check_tree(tree)


def test_a_larger_budget_takes_fewer_launches():
    moves = llama(MESH)
    free = rs.plan_tree(moves)
    floor = sum(plan.source.tile_bytes + plan.target.tile_bytes for plan in free.plans.values())
    budgets = [floor, floor + 2048, floor + 8192, free.peak_bytes]
    launches = [rs.plan_tree(moves, budget=budget).launches for budget in budgets]
    assert launches == sorted(launches, reverse=True)
    assert launches[-1] == free.launches


def test_the_floor_is_that_of_all_arrays_together():
    rows, columns = (rs.Layout.parse(text, MESH) for text in ("f32[{x}4, 16]", "f32[16, {x}4]"))
    with pytest.raises(BudgetError) as refused:
        rs.plan_tree({"a": (rows, columns), "b": (rows, columns)}, budget=600)
    assert refused.value.smallest == 4 * 256
    assert rs.plan(rows, columns, budget=600).peak_bytes <= 600
