"""`reshard_pytree`: targets as others give them, one budget for all leaves, donation, and processes that disagree."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import AgreementError, PlanError
from reshard.jax import reshard_pytree
from reshard.jax.trees import agree
from reshard.plans.manifest import Manifest
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


def test_donated_sources_are_freed() -> None:
    tree = {name: jax.device_put(filled(shape), on("x")) for name, shape in SHAPES.items()}
    moved = reshard_pytree(tree, on(None, "x"), donate=True, budget="1MiB")
    assert all(x.is_deleted() for x in tree.values())
    for name, shape in SHAPES.items():
        assert_exact(moved[name], on(None, "x"), filled(shape))


def test_another_structure_is_refused() -> None:
    with pytest.raises(PlanError, match="only the arrays have a; only the target shardings have b"):
        reshard_pytree({"a": jax.device_put(filled((8, 8)), on("x"))}, {"b": on()}, budget="1MiB")


def test_a_process_alone_agrees_with_itself() -> None:
    agree(lambda: Manifest(()), lambda: "")
    with pytest.raises(AgreementError, match="process 0: ValueError: no"):
        agree(lambda: (_ for _ in ()).throw(ValueError("no")), lambda: "")


@pytest.mark.slow
def test_processes_that_disagree() -> None:
    worker.check(["disagree"], devices=4, processes=2)
