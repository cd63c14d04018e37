"""JAX arrays filled with the oracle's indices, and what a compiled move is compared with.

An array is right if every shard that this process holds is the oracle's tile of the device (`tests.oracle`, which is
built on `types.meaning` alone), and if the array's sharding is equivalent to the target. That JAX means the same by a
sharding is a test of its own (`test_redistribute`). A compiled program is right if its collectives are the plan's.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import reshard as rs
from reshard import hlo
from reshard.lower import lower_plan
from reshard.types import Layout
from tests.layouts import contiguous_layouts
from tests.oracle import PADDING, of_boxes, tiles_of

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
FACTORINGS = ({"x": 4, "y": 2}, {"x": 2, "y": 4}, {"a": 2, "b": 2, "c": 2}, {"k": 8})
"""Meshes of the same eight devices."""


def mesh_of(sizes: dict[str, int], kind: AxisType = AUTO, order: Sequence[int] | None = None) -> jax.sharding.Mesh:
    """A mesh of the first devices, or of those in `order`, by their numbers."""
    devices = jax.devices()
    listed = [devices[at] for at in order or range(math.prod(sizes.values()))]
    grid = np.array(listed).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def filled(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """The array whose elements are their own global indices, as far as the dtype can hold them."""
    (whole,) = tiles_of(Layout.from_spec(rs.Mesh(), shape, "int32", [])).values()
    return whole.astype(dtype)


def specs(sizes: dict[str, int], rank: int) -> list[PartitionSpec]:
    """Every contiguous spec of a mesh: each axis unused or in one dim, in every order."""
    mesh = rs.Mesh(sizes)
    return [spec_of(layout) for layout in contiguous_layouts(mesh, (mesh.size,) * rank)]


def spec_of(layout: Layout) -> PartitionSpec:
    """The spec of a layout of whole axes; not by `to_jax`, which is under test."""
    held = [tuple(digit.axis.axis for digit in dim.digits if digit.axis is not None) for dim in layout.dims]
    return PartitionSpec(*(axes or None for axes in held))


def on(mesh: jax.sharding.Mesh, layout: Layout) -> NamedSharding:
    """A layout of whole axes on a mesh that has them."""
    return NamedSharding(mesh, spec_of(layout))


def pairs(shardings: Sequence[NamedSharding]) -> Iterator[tuple[NamedSharding, NamedSharding]]:
    """All pairs of two different shardings."""
    return itertools.permutations(shardings, 2)


def refactored(seed: int, count: int) -> list[tuple[NamedSharding, NamedSharding]]:
    """Random pairs of shardings whose meshes have the same devices on different axes."""
    choose = random.Random(seed)
    drawn: list[tuple[NamedSharding, NamedSharding]] = []
    for _ in range(count):
        ends = [NamedSharding(mesh_of(sizes), choose.choice(specs(sizes, 2))) for sizes in choose.sample(FACTORINGS, 2)]
        drawn.append((ends[0], ends[1]))
    return drawn


def assert_exact(array: jax.Array, sharding: NamedSharding | None, values: np.ndarray) -> None:
    """Every shard is the oracle's tile; with `sharding` None, the compiler's choice, the slice that JAX says it is."""
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    if sharding is not None:
        same = array.sharding.is_equivalent_to(sharding, array.ndim)
        assert same, f"{array.sharding} instead of {sharding}"
        assert array.sharding.device_set == sharding.device_set
    assert array.addressable_shards
    for shard in array.addressable_shards:
        actual = np.asarray(shard.data)
        wanted = values[shard.index] if sharding is None else tile(sharding, shard.device, values)
        assert actual.shape == wanted.shape, f"device {shard.device.id}: {actual.shape}, not {wanted.shape}"
        wrong = np.argwhere(np.atleast_1d(actual != wanted))
        text = f"device {shard.device.id} of {sharding}: {len(wrong)} of {wanted.size} elements, first {wrong[:1]}"
        assert actual.tobytes() == wanted.tobytes(), text


def tile(sharding: NamedSharding, device: Any, values: np.ndarray) -> np.ndarray:
    """The tile of an array that the oracle says a device has."""
    axes = tuple((str(name), size) for name, size in sharding.mesh.shape.items())
    spec = (*sharding.spec.partitions, *[None] * (values.ndim - len(sharding.spec.partitions)))
    index = _indices(axes, spec, values.shape)[list(sharding.mesh.devices.flat).index(device)]
    assert not (index == PADDING).any(), f"{sharding} of shape {values.shape} is uneven: JAX has no such arrays"
    return values.reshape(-1)[index]


@lru_cache
def _indices(axes: tuple[tuple[str, int], ...], spec: tuple[Any, ...], shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    entries = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in spec]
    return tiles_of(Layout.from_spec(rs.Mesh(axes), shape, "int32", entries))


# ---- compiled programs -----------------------------------------------------------------------------


def executed(compiled: Any) -> Counter[tuple[str, int]]:
    """(kind, bytes that a device receives) of every collective, as often as it runs."""
    runs: Counter[tuple[str, int]] = Counter()
    for one in hlo.collectives(hlo.parse(compiled.as_text())):
        assert one.times is not None, one
        runs[one.kind, one.received_bytes] += one.times
    return runs


def promised(*plans: rs.Plan, batch: int = 1) -> Counter[tuple[str, int]]:
    """The same for plans that move `batch` arrays at once.

    An exchange is one permute per round. If pieces do not nest, all messages of a round are as long as its longest,
    because XLA permutes arrays of one size.
    """
    runs: Counter[tuple[str, int]] = Counter()
    for step, instruction in ((s, i) for p in plans for s, i in zip(p.steps, lower_plan(p).instructions, strict=True)):
        if of_boxes(step):
            sizes = [max(transfer.elements for transfer in turn) for turn in instruction.rounds]
            runs.update(("permute", step.operand.nbytes(size) * batch) for size in sizes)
        elif step.launches:
            share, rest = divmod(step.received_bytes, step.launches)
            assert rest == 0, f"launches of different sizes: {step}"
            runs["permute" if step.kind == "exchange" else step.kind, share * batch] += step.launches
    return runs


def as_plan(source: NamedSharding, target: NamedSharding, shape: Sequence[int], dtype: str, **options: Any) -> rs.Plan:
    """The plan of a move, its layouts written out here by position."""
    return rs.plan(layout_of(source, shape, dtype), layout_of(target, shape, dtype), **options)


def layout_of(sharding: NamedSharding, shape: Sequence[int], dtype: str) -> Layout:
    """The layout of a sharding, from its spec's text alone."""
    mesh = rs.Mesh({str(name): size for name, size in sharding.mesh.shape.items()})
    entries = [[e] if isinstance(e, str) else list(e or ()) for e in sharding.spec.partitions]
    return Layout.from_spec(mesh, shape, dtype, entries)
