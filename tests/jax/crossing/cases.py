"""Pairs of shardings on different sets of the eight virtual devices, and moves by either way that one process has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from reshard.jax import eager, redistribute
from reshard.jax.crossing import across
from tests.jax.oracle import assert_exact, filled, mesh_of, specs

SHAPE = (60, 120)
"""Divisible by every product of the axes below."""
MESHES = [
    ({"a": 4, "b": 2}, range(8), {"t": 4}, range(4, 8)),
    ({"a": 4}, range(4), {"s": 4, "t": 2}, range(8)),
    ({"a": 4}, [0, 2, 4, 6], {"s": 2, "t": 2}, [7, 5, 3, 1]),
    ({"a": 2, "b": 3}, range(6), {"t": 2}, range(6, 8)),
    ({"a": 3}, range(3), {"t": 5}, range(3, 8)),
    ({"a": 2, "b": 2}, [5, 2, 0, 7], {"t": 3}, [7, 1, 5]),
    ({"a": 2, "b": 2}, range(4), {"t": 1}, [6]),
]
"""Sizes and devices of source and target: disjoint, one within the other, in another order, overlapping, one alone."""


def shardings(sizes: dict[str, int], devices: Sequence[int]) -> list[NamedSharding]:
    mesh = mesh_of(sizes, order=list(devices))
    return [NamedSharding(mesh, spec) for spec in specs(sizes, 2)]


def sampled(count: int, seed: int = 0) -> Iterator[tuple[NamedSharding, NamedSharding]]:
    """This many pairs from each of the meshes."""
    choose = random.Random(seed)
    for sizes, devices, other, others in MESHES:
        pairs = [
            (one, two)
            for one, two in itertools.product(shardings(sizes, devices), shardings(other, others))
            if divides(one) and divides(two)
        ]
        yield from choose.sample(pairs, min(count, len(pairs)))


def divides(sharding: NamedSharding) -> bool:
    try:
        sharding.shard_shape(SHAPE)
    except ValueError:
        return False
    return True


@contextmanager
def by_messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Moves as between devices that have memory of their own."""
    forget_programs()
    with monkeypatch.context() as patch:
        patch.setattr(across, "on_host", lambda *ends: False)
        yield
    forget_programs()


def forget_programs() -> None:
    for each in (eager.program_of, eager.mover_of):
        each.cache_clear()


def check(source: NamedSharding, target: NamedSharding, *, values: Any = None, **options: Any) -> jax.Array:
    """Moves an array of indices and asserts that every shard is right, and that the source is there or donated."""
    values = filled(SHAPE) if values is None else values
    x = jax.device_put(values, source)
    y = redistribute(x, target, **options)
    assert_exact(y, target, values)
    assert x.is_deleted() == bool(options.get("donate"))
    if not x.is_deleted():
        assert_exact(x, source, values)
    return y


def mesh(devices: Sequence[int], **sizes: int) -> Mesh:
    return mesh_of(sizes, order=list(devices))


def some(dtype: Any, shape: Sequence[int] = (16, 8)) -> np.ndarray:
    """An array of any dtype, its elements telling each other apart as far as the dtype can."""
    return np.asarray(jax.numpy.arange(np.prod(shape)).reshape(shape).astype(dtype))


def check_views(x: jax.Array, target: NamedSharding, out: jax.Array) -> None:
    """The array of 12 x 24 through a view, in part, and into rows of one of 24 x 24 halves, which stays as it is."""
    values = filled(x.shape)
    turned = values.reshape(3, 4, 24).transpose(2, 1, 0).reshape(24, 12)
    assert_exact(redistribute(x, target, view="(t h) d -> d (h t)", t=3), target, turned)
    assert_exact(redistribute(x, target, view="(t h) d -> h d", take={"t": 1}, t=2), target, values[6:])
    old = np.full((24, 24), 0.5, "float32")
    old[6:18] = values
    assert_exact(redistribute(x, target, into={0: slice(6, 18)}, out=out), target, old)
    assert (np.asarray(out) == 0.5).all() and not x.is_deleted()
