"""Weak types: every move keeps them, alone and in a tree, on one mesh and across orders of devices, traced or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax import redistribute
from reshard.jax.running import weaken
from tests.jax.oracle import assert_exact, mesh_of

SIZES = {"x": 4, "y": 2}
VALUES = np.full((8, 8), 2.0, np.float32)


def weak(spec: P) -> jax.Array:
    x = jax.device_put(jnp.full((8, 8), 2.0), NamedSharding(mesh_of(SIZES), spec))
    assert x.weak_type
    return x


@pytest.mark.fast(1, slow=2)
@pytest.mark.parametrize("order", [range(8), range(7, -1, -1)], ids=["same order", "another order"])
@pytest.mark.parametrize(
    ("before", "after"), [(P("x", "y"), P(None, ("y", "x"))), (P("x"), P("y")), (P("x"), P()), (P(), P("x"))], ids=str
)
def test_moves_keep_weak_types(before: P, after: P, order: range) -> None:
    source, target = NamedSharding(mesh_of(SIZES), before), NamedSharding(mesh_of(SIZES, order=order), after)
    moved = redistribute(weak(before), target)
    assert moved.weak_type and (moved + jnp.int8(1)).dtype == jnp.float32
    assert_exact(moved, target, VALUES)
    if order == range(8):
        for given in (source, None):
            moved = jax.jit(lambda x, s=given: redistribute(x, target, source=s))(weak(before))
            assert moved.weak_type
            assert_exact(moved, target, VALUES)


def test_a_strong_type_stays_strong() -> None:
    target = NamedSharding(mesh_of(SIZES), P("y"))
    assert not redistribute(jax.device_put(VALUES, NamedSharding(mesh_of(SIZES), P("x"))), target).weak_type


def test_weakening_changes_the_type_alone() -> None:
    y = jax.jit(weaken)(jnp.arange(5, dtype=jnp.int32))
    assert y.weak_type and y.dtype == jnp.int32 and np.array_equal(y, np.arange(5))
