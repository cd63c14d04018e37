"""Trees: a target for each leaf, views of leaves, `reshard_pytree`, and processes that disagree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax import Target, redistribute, reshard_pytree
from tests.jax.crossing.cases import mesh
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


HERE, THERE = mesh(range(4), fsdp=4), mesh([4, 5, 6, 7], rep=2, tp=2)
SPLIT = {"view": "l (three h) d -> l h d", "three": 3}
QKV = filled((2, 24, 8))


def fused() -> dict[str, Any]:
    qkv = jax.device_put(QKV, NamedSharding(HERE, P(None, "fsdp")))
    return {"layers": {"q": qkv, "k": qkv, "v": qkv}, "norm": jax.device_put(filled((8,)), NamedSharding(HERE, P()))}


def targets(mesh: Any, axis: str, dtype: Any = None) -> dict[str, Any]:
    split = NamedSharding(mesh, P(None, axis))
    parts = {name: Target(split, take={"three": at}, dtype=dtype, **SPLIT) for at, name in enumerate("qkv")}
    return {"layers": parts, "norm": Target(NamedSharding(mesh, P()))}


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize(("where", "axis"), [(HERE, "fsdp"), (THERE, "tp")], ids=["here", "there"])
@pytest.mark.parametrize("options", [{}, {"budget": "1MiB"}, {"donate": True}, {"budget": "1MiB", "donate": True}])
@pytest.mark.parametrize("move", [redistribute, reshard_pytree])
def test_fused_weights_are_split(move: Any, where: Any, axis: str, options: dict[str, Any]) -> None:
    tree = fused()
    moved = move(tree, targets(where, axis), **options)
    for at, name in enumerate("qkv"):
        assert_exact(moved["layers"][name], NamedSharding(where, P(None, axis)), QKV[:, 8 * at : 8 * at + 8])
    assert_exact(moved["norm"], NamedSharding(where, P()), filled((8,)))
    assert tree["layers"]["q"].is_deleted() == ("donate" in options)


def test_parts_are_joined_and_cast() -> None:
    """Gate and up on the trainer, one array on the server, in bfloat16."""
    gate, up = filled((8, 8)), filled((8, 8)) + 100
    rows, target = NamedSharding(HERE, P("fsdp")), NamedSharding(THERE, P("tp"))
    fuse = {"view": "h d -> (two h) d", "two": 2, "dtype": jnp.bfloat16}
    empty = jax.device_put(np.zeros((16, 8), jnp.bfloat16), target)
    first = redistribute(jax.device_put(gate, rows), Target(target, into={"two": 0}, out=empty, **fuse))
    both = redistribute(jax.device_put(up, rows), Target(target, into={"two": 1}, out=first, **fuse))
    assert_exact(both, target, np.concatenate([gate, up]).astype(jnp.bfloat16))


def test_a_donated_array_that_stays_is_not_deleted() -> None:
    x = jax.device_put(filled((8, 8)), NamedSharding(HERE, P("fsdp")))
    moved = redistribute([x, x], [x.sharding, NamedSharding(THERE, P("tp"))], donate=True)
    assert np.array_equal(moved[0], filled((8, 8))) and np.array_equal(moved[1], filled((8, 8)))
