"""Views, parts, casts and scales between meshes that list the same devices in another order."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.errors import BudgetError, PlanError
from reshard.jax import Target, redistribute
from tests.jax.crossing.cases import check_views
from tests.jax.oracle import EXPLICIT, assert_exact, filled, mesh_of

X = filled((12, 24))
NEAR = mesh_of({"a": 2, "b": 4})
ORDERS = [(0, 4, 1, 5, 2, 6, 3, 7), (7, 6, 5, 4, 3, 2, 1, 0), (3, 0, 6, 1, 7, 2, 5, 4)]
"""A transposed mesh, a reversed one, and one of no system."""


def put(values: np.ndarray, spec: P, order: tuple[int, ...] | None = None) -> jax.Array:
    mesh = NEAR if order is None else mesh_of({"a": 2, "b": 4}, order=order)
    return jax.device_put(values, NamedSharding(mesh, spec))


def far(order: tuple[int, ...], *spec: object, kind: AxisType = AxisType.Auto) -> NamedSharding:
    return NamedSharding(mesh_of({"u": 4, "v": 2}, kind, order), P(*spec))


@pytest.mark.fast(1)
@pytest.mark.parametrize(("spec", "order"), list(zip([P("a", "b"), P(None, "a"), P("b")], ORDERS, strict=True)))
def test_views_and_parts(spec: P, order: tuple[int, ...]):
    check_views(put(X, spec), far(order, "v", "u"), put(np.full((24, 24), 0.5, "float32"), P("a")))


def test_parts_that_no_device_count_divides():
    """The part that is taken, and the dims on the way, are uneven; both ends are even, as JAX asks."""
    x = put(X, P(None, ("b", "a")), ORDERS[2])
    target = far(ORDERS[1], None, None, "u")
    assert_exact(redistribute(x, target, view="(t h) d -> h t d", take={"h": slice(1, 4)}, t=3), target, _cut(X))


def _cut(values: np.ndarray) -> np.ndarray:
    return values.reshape(3, 4, 24).transpose(1, 0, 2)[1:4]


def test_casts_and_scales():
    """Narrowed by one scale a row, widened by one a block, bit for bit as numpy has it."""
    order = ORDERS[2]
    rows, fp8 = np.arange(1, 13, dtype="float32").reshape(12, 1), jnp.float8_e4m3fn
    target, home = far(order, "v", "u"), NamedSharding(NEAR, P("a", "b"))
    narrow = redistribute(put(X, P("a", "b")), target, dtype=fp8, scale=rows)
    assert_exact(narrow, target, (X / rows).astype(fp8))
    blocks = np.array([[1, 2, 4, 8], [8, 16, 32, 64]], "float32")
    wide = redistribute(narrow, home, dtype="float32", scale=blocks, donate=True)
    assert_exact(wide, home, (X / rows).astype(fp8).astype("float32") * np.repeat(np.repeat(blocks, 6, 0), 6, 1))
    assert narrow.is_deleted()


def test_explicit_axes_inside_set_mesh():
    target = far(ORDERS[0], "v", "u", kind=EXPLICIT)
    with jax.set_mesh(target.mesh):
        moved = redistribute(put(X, P("b")), target, view="a b -> b a", dtype="bfloat16", scale=2.0)
    assert_exact(moved, target, (X.T / 2).astype(jnp.bfloat16))


def test_scalars_and_arrays_without_elements():
    there = far(ORDERS[1])
    assert_exact(redistribute(put(X[:1, :1], P()), there, view="1 1 ->"), there, X[0, 0])
    wide = redistribute(put(X[0, 1].astype(jnp.bfloat16), P()), there, dtype="float32", scale=3.0)
    assert_exact(wide, there, X[0, 1] * np.float32(3))
    assert redistribute(put(X[:0], P()), there, view="a b -> b a").shape == (24, 0)


def test_trees_within_a_budget():
    """Leaves on meshes of several orders; the devices of the tree are numbered by the first of them."""
    leaves = {"p": put(X, P("b"), ORDERS[2]), "q": put(X + 1, P("a")), "r": put(X + 2, P("a", "b"), ORDERS[1])}
    targets = {
        "p": Target(far(ORDERS[1], "u"), view="a b -> b a"),
        "q": far(ORDERS[2], None, "u"),
        "r": Target(far(ORDERS[0], "v", "u"), view="(t h) d -> h d", take={"t": 1}, t=2),
    }
    with pytest.raises(BudgetError) as refused:
        redistribute(leaves, targets, budget=1)
    moved = redistribute(leaves, targets, budget=refused.value.smallest)
    for name, wanted in {"p": X.T, "q": X + 1, "r": (X + 2)[6:]}.items():
        target = targets[name]
        assert_exact(moved[name], target.sharding if isinstance(target, Target) else target, wanted)


@pytest.mark.fast(2)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_any_specs(seed: int):
    choose = random.Random(seed)
    names = ["a", "b"]
    ends: list[tuple[tuple[int, ...], P]] = []
    for axes in (names, ["u", "v"]):
        order = tuple(choose.sample(range(8), 8))
        held = choose.sample([*axes, tuple(choose.sample(axes, 2)), None, None], 2)
        used = [held[0], held[1] if not isinstance(held[0], tuple) and not isinstance(held[1], tuple) else None]
        ends.append((order, P(*used)))
    (first, spec), (second, other) = ends
    values = filled((16, 24))
    x, target = put(values, spec, first), far(second, *other)
    view, sizes = choose.choice(
        [("a b -> b a", {}), ("(t h) d -> (d t) h", {"t": 2}), ("a (d e) -> (e a) d", {"d": 8})]
    )
    wanted = {
        "a b -> b a": values.T,
        "(t h) d -> (d t) h": values.reshape(2, 8, 24).transpose(2, 0, 1).reshape(48, 8),
        "a (d e) -> (e a) d": values.reshape(16, 8, 3).transpose(2, 0, 1).reshape(48, 8),
    }[view]
    assert_exact(redistribute(x, target, view=view, **sizes), target, wanted)


def test_a_trace_has_one_order():
    x = put(X, P("a"))
    move = jax.jit(lambda v: redistribute(v, far(ORDERS[0], "u"), source=x.sharding, view="a b -> b a"))
    with pytest.raises(PlanError, match="in another order"):
        move(x)
