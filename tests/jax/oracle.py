"""Index-filled arrays on a mesh of JAX devices, and what a compiled move is compared with.

An array is right if every shard that this process holds is the numpy slice that its sharding means, and if
the sharding is the one that was asked for. A compiled program is right if its collectives are the plan's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import reshard as rs
from reshard import hlo
from reshard.lower import lower
from reshard.types import Layout
from tests.layouts import contiguous_layouts
from tests.oracle import of_boxes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(sizes: dict[str, int], kind: AxisType = AUTO, order: Sequence[int] | None = None) -> jax.sharding.Mesh:
    """A mesh of the first devices, or of those in `order`, by their numbers."""
    devices = jax.devices()
    listed = [devices[at] for at in order or range(math.prod(sizes.values()))]
    grid = np.array(listed).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def filled(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Every element is its own number, as far as the dtype goes."""
    return np.arange(math.prod(shape)).reshape(tuple(shape)).astype(dtype)


def specs(sizes: dict[str, int], rank: int) -> list[PartitionSpec]:
    """Every contiguous spec of a mesh: each axis unused or in one dim, in every order."""
    mesh = rs.Mesh(sizes)
    return [spec_of(layout) for layout in contiguous_layouts(mesh, (mesh.size,) * rank)]


def spec_of(layout: Layout) -> PartitionSpec:
    """Written out here, not by `to_jax`, which is under test."""
    held = [tuple(digit.axis.axis for digit in dim.digits if digit.axis is not None) for dim in layout.dims]
    return PartitionSpec(*(axes or None for axes in held))


def on(mesh: jax.sharding.Mesh, layout: Layout) -> NamedSharding:
    """A layout of whole axes on a mesh that has them."""
    return NamedSharding(mesh, spec_of(layout))


def pairs(shardings: Sequence[NamedSharding]) -> Iterator[tuple[NamedSharding, NamedSharding]]:
    """All pairs of two different ones."""
    return itertools.permutations(shardings, 2)


def assert_exact(array: jax.Array, sharding: NamedSharding | None, values: np.ndarray) -> None:
    """Every shard against the numpy slice; `None` for a sharding that is the compiler's choice."""
    assert (array.shape, array.dtype) == (values.shape, values.dtype)
    if sharding is not None:
        same = array.sharding.is_equivalent_to(sharding, array.ndim)
        assert same, f"{array.sharding} instead of {sharding}"
        assert array.sharding.device_set == sharding.device_set
    assert array.addressable_shards
    for shard in array.addressable_shards:
        found, wanted = np.asarray(shard.data), values[shard.index]
        assert found.shape == wanted.shape, f"device {shard.device.id}: {found.shape}, not {wanted.shape}"
        wrong = np.argwhere(np.atleast_1d(found != wanted))
        told = f"device {shard.device.id} of {sharding}: {len(wrong)} of {wanted.size} elements, first {wrong[:1]}"
        assert found.tobytes() == wanted.tobytes(), told


# ---- compiled programs -----------------------------------------------------------------------------


def executed(compiled: Any) -> Counter[tuple[str, int]]:
    """(kind, bytes that a device receives) of every collective, as often as it runs."""
    found: Counter[tuple[str, int]] = Counter()
    for one in hlo.collectives(hlo.parse(compiled.as_text())):
        assert one.times is not None, one
        found[one.kind, one.received_bytes] += one.times
    return found


def promised(*plans: rs.Plan, batch: int = 1) -> Counter[tuple[str, int]]:
    """The same of plans, on so many arrays at once. An exchange is a permute a round, and where pieces do not nest, a
    round's messages are as long as its longest: XLA permutes arrays of one size.
    """
    found: Counter[tuple[str, int]] = Counter()
    for step, instruction in ((s, i) for p in plans for s, i in zip(p.steps, lower(p).instructions, strict=True)):
        if of_boxes(step):
            sizes = [max(transfer.elements for transfer in turn) for turn in instruction.rounds]
            found.update(("permute", step.operand.nbytes(size) * batch) for size in sizes)
        elif step.launches:
            share, rest = divmod(step.received_bytes, step.launches)
            assert rest == 0, f"launches of different sizes: {step}"
            found["permute" if step.kind == "exchange" else step.kind, share * batch] += step.launches
    return found


def as_plan(source: NamedSharding, target: NamedSharding, shape: Sequence[int], dtype: str, **options: Any) -> rs.Plan:
    """The plan of a move, its layouts written out here by position."""
    return rs.plan(layout_of(source, shape, dtype), layout_of(target, shape, dtype), **options)


def layout_of(sharding: NamedSharding, shape: Sequence[int], dtype: str) -> Layout:
    """The layout of a sharding, from its spec's text alone."""
    mesh = rs.Mesh({str(name): size for name, size in sharding.mesh.shape.items()})
    entries = [[e] if isinstance(e, str) else list(e or ()) for e in sharding.spec.partitions]
    return Layout.from_spec(mesh, shape, dtype, entries)
