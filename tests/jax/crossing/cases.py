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
        patch.setattr(across, "on_host", lambda source, target: False)
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
