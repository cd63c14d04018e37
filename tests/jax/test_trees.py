"""`reshard_pytree`: targets as others give them, one budget for all leaves, donation, and processes that disagree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import AgreementError, BudgetError, LayoutError, MeshError, PlanError
from reshard.jax import reshard_pytree
from reshard.jax.trees import agree, bounded_tree, xla_peak_bytes
from reshard.types.manifest import Manifest
from tests.jax import worker
from tests.jax.oracle import assert_exact, filled, mesh_of

SIZES = {"x": 4, "y": 2}
SHAPES = {"a": (8, 8), "b": (16, 8), "c": (8, 24)}


def on(*entries: Any) -> NamedSharding:
    return NamedSharding(mesh_of(SIZES), P(*entries))


def tree_of(sharding: NamedSharding) -> dict[str, Any]:
    layers = [{"w": jax.device_put(filled(shape), sharding)} for shape in SHAPES.values()]
    return {"layers": layers, "norm": jax.device_put(filled((8,)), on())}


def checked(moved: dict[str, Any], sharding: NamedSharding) -> None:
    for layer, shape in zip(moved["layers"], SHAPES.values(), strict=True):
        assert_exact(layer["w"], sharding, filled(shape))
    assert_exact(moved["norm"], on(), filled((8,)))


@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_targets_are_shardings_or_arrays_that_have_them(budget: str | None) -> None:
    rows, columns = on("x"), on(None, "x")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree_of(columns))
    checked(reshard_pytree(tree_of(rows), tree_of(columns), budget=budget), columns)
    checked(reshard_pytree(tree_of(rows), like, budget=budget), columns)
    one = {"layers": columns, "norm": on()}
    checked(reshard_pytree(tree_of(rows), one, budget=budget), columns)


def test_a_budget_is_for_all_leaves_together() -> None:
    rows, columns = on("x"), on(None, "x")
    tree = tree_of(rows)
    tiles = sum(2 * np.prod(shape) * 4 // 4 for shape in SHAPES.values()) + 2 * 32
    floor = int(tiles) - 32  # the norm stays where it is
    checked(reshard_pytree(tree, {"layers": columns, "norm": on()}, budget=floor), columns)
    with pytest.raises(BudgetError, match=f"the smallest that works is {floor} B"):
        reshard_pytree(tree, {"layers": columns, "norm": on()}, budget=floor - 1)


def test_donated_sources_are_freed() -> None:
    tree = {name: jax.device_put(filled(shape), on("x")) for name, shape in SHAPES.items()}
    moved = reshard_pytree(tree, on(None, "x"), donate=True, budget="1MiB")
    assert all(x.is_deleted() for x in tree.values())
    for name, shape in SHAPES.items():
        assert_exact(moved[name], on(None, "x"), filled(shape))


def test_the_peak_on_xla_counts_results_from_the_start() -> None:
    mesh = rs.Mesh(SIZES)
    ends = tuple(rs.Layout.parse(text, mesh) for text in ("f32[8, 64] + sum{x}", "f32[{y}4, {x}16]"))
    tree = rs.plan_tree({"a": ends})
    assert xla_peak_bytes(tree) == tree.peak_bytes + tree.plans["a"].target.tile_bytes * (
        len(tree.plans["a"].steps) > 1
    )
    assert xla_peak_bytes(bounded_tree({"a": ends}, xla_peak_bytes(tree), None, False)) <= xla_peak_bytes(tree)


@pytest.mark.parametrize(
    ("leaf", "target", "error"),
    [
        (np.zeros((8, 8)), on("x"), LayoutError),
        (jax.random.split(jax.random.key(0), 8), on("x"), LayoutError),
        (filled((6, 8)), on("x"), LayoutError),
        (filled((8, 8)), 7, LayoutError),
    ],
)
def test_what_cannot_keep_to_a_budget_is_refused(leaf: Any, target: Any, error: type[Exception]) -> None:
    given = leaf if leaf.shape == (8, 8) and leaf.dtype == float else jax.device_put(leaf, on())
    with pytest.raises(error):
        reshard_pytree({"a": given}, {"a": target}, budget="1MiB")


def test_other_devices_keep_to_no_budget() -> None:
    other = NamedSharding(mesh_of({"k": 4}), P("k"))
    with pytest.raises(MeshError, match="leave budget out"):
        reshard_pytree({"a": jax.device_put(filled((8, 8)), on("x"))}, other, budget="1MiB")


def test_another_structure_is_refused() -> None:
    with pytest.raises((LayoutError, PlanError)):
        reshard_pytree({"a": jax.device_put(filled((8, 8)), on("x"))}, {"b": on()}, budget="1MiB")


def test_a_process_alone_agrees_with_itself() -> None:
    agree(lambda: Manifest(()), lambda: "")
    with pytest.raises(AgreementError, match="process 0: ValueError: no"):
        agree(lambda: (_ for _ in ()).throw(ValueError("no")), lambda: "")


@pytest.mark.slow
def test_processes_that_disagree() -> None:
    worker.check(["disagree"], devices=4, processes=2)
