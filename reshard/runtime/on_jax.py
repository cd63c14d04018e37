"""Plans on global JAX arrays: the lowered program inside `jax.shard_map`.

Layouts are by position: device d of a plan is the d-th device of the jax mesh, over the axes that are not
manual already. Uneven dims are padded to whole pieces first and cut again after; XLA keeps its shards so
already, hence neither moves data.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from reshard.errors import MeshError
from reshard.lower import lower
from reshard.lower.to_shard_map import shares_lie_in_order, tile_function
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.notation import jax_sharding
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.cost import PLAIN, StepMode
from reshard.types.rules.exchange import exchange_size
from reshard.types.rules.parts import counts, split_step

AnyMesh = JaxMesh | AbstractMesh
LEAST = 16 << 20
"""Bytes of operand and result on a device from which a step is done in parts."""
PARTS = 8


def apply(plan: Plan, mesh: AnyMesh, array: jax.Array) -> jax.Array:
    """The array, moved by the plan; to be traced, or run as it is.

    `mesh` has the plan's devices by position on its axes that are not manual; its axes are cut where the
    layouts use parts of them. Raises `LayoutError` for layouts that no `NamedSharding` says.
    """
    if not plan.steps:
        return array
    mesh = cut(mesh, (plan.source, plan.target))
    axes = free_axes(mesh)
    before, after = spec(plan.source, axes), spec(plan.target, axes)
    moved = _on_tiles(plan, mesh, axes, before, after)(_padded(array, plan.source, NamedSharding(mesh, before)))
    return _trimmed(moved, plan.target, NamedSharding(mesh, after))


def apply_across(plan: Plan, mesh: JaxMesh, array: jax.Array, target: NamedSharding) -> jax.Array:
    """Moves an array to another mesh of the same devices, in another order or of other axes; not to be traced.

    Every device computes its tile on the source's mesh, and the tiles are then read as the target's.
    """
    if not plan.source.even or not plan.target.even:
        raise MeshError(
            f"{plan.source} on {plan.source.mesh} to {plan.target} on {plan.target.mesh}: uneven arrays move on one "
            f"mesh only; redistribute to an even sharding on the source's mesh first"
        )
    stacked = _stacked(plan, mesh)(array) if array.ndim else array  # Every device has a scalar.
    return jax.make_array_from_single_device_arrays(array.shape, target, [s.data for s in stacked.addressable_shards])


@lru_cache(maxsize=1024)
def _stacked(plan: Plan, mesh: JaxMesh) -> Callable[[jax.Array], jax.Array]:
    """The move, its tiles stacked along dim 0 in the order of the source's devices."""
    axes = free_axes(mesh)
    return jax.jit(_on_tiles(plan, mesh, axes, spec(plan.source, axes), PartitionSpec(tuple(axes.axes))))


def _on_tiles(
    plan: Plan, mesh: AnyMesh, axes: Mesh, before: PartitionSpec, after: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    return jax.shard_map(
        tile_function(lower(plan), axes.axes),
        mesh=mesh,
        in_specs=before,
        out_specs=after,
        axis_names=frozenset(axes.axes),
        check_vma=False,  # Gathers and permutes give replicated results, which its rules cannot see.
    )


def free_axes(mesh: AnyMesh) -> Mesh:
    """The axes of a jax mesh that are not manual, with its devices by position."""
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return Mesh({str(name): size for (name, size), kind in kinds if kind != AxisType.Manual})


def spec(layout: Layout, axes: Mesh) -> PartitionSpec:
    """The layout's `PartitionSpec` on axes with the same devices by position."""
    held = [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]
    return jax_sharding.partition_spec(layout.mesh, held, layout.partial, layout.reduction, axes)


def in_parts(plan: Plan, least: int = LEAST, count: int = PARTS) -> Plan:
    """The plan with its large collectives in parts, so that their buffers are a fraction of the tiles.

    XLA stages a collective's operand and result beside the tiles themselves (an all-to-all peaks at twice
    source and target on TPU, an all-gather at 1.9 times the two), but in a loop it reuses one part's.
    """
    moves = [_parted(step, least, count) for step in plan.steps]
    return chain(plan.source, plan.target, moves, plan.donate, [step.seconds for step in plan.steps])


def _parted(step: Step, least: int, count: int) -> StepSpec:
    """The step in parts; should there be too few, as an exchange, if its messages are smaller."""
    as_it_is = StepSpec(step.kind, step.result, step.mode)
    if step.mode != PLAIN or step.operand.tile_bytes + step.result.tile_bytes < least:
        return as_it_is
    if step.kind == "slice" and step.operand.dims[-1] == step.result.dims[-1]:
        return as_it_is  # Only to slice its minor dim does TPU lay the whole operand out anew.
    parts = _in_parts(step, count)
    if parts < count and step.kind in ("all_gather", "all_to_all"):
        rounds = exchange_size(step.operand, step.result).rounds
        if parts < rounds <= 4 * count:
            return StepSpec("exchange", step.result)
    return as_it_is._replace(mode=StepMode(parts=parts))


def _in_parts(step: Step, count: int) -> int:
    """A number of parts: aligned if there are any, and if it can be, from `count` to four times as many."""
    able = counts(step.operand, step.result)
    enough = [found for found in able if count <= found <= 4 * count]
    wanted = [*enough, *reversed([found for found in able if found < count])]
    parts = ((found, split_step(step.operand, step.result, found)) for found in wanted)
    aligned = (found for found, part in parts if part is not None and part.aligned)
    return next(aligned, next(iter(wanted), 1))


def peak_bytes(plan: Plan) -> int:
    """The plan's peak where the target is there from the start: XLA is given memory for a result before it runs."""
    later = (step.live_bytes + plan.target.tile_bytes for step in plan.steps[:-1])
    return max(plan.peak_bytes, *later) if len(plan.steps) > 1 else plan.peak_bytes


def overwrites(plan: Plan) -> bool:
    """Whether XLA can run the plan's exchanges in place: where shares must be rearranged first, it would copy."""
    return not any(step.mode.in_place for step in plan.steps) or shares_lie_in_order(lower(plan))


def _padded(array: jax.Array, layout: Layout, sharding: NamedSharding) -> jax.Array:
    if layout.even:
        return array
    room = [(0, to - now, 0) for now, to in zip(layout.shape, layout.padded_shape, strict=True)]
    array = lax.with_sharding_constraint(array, sharding)
    return lax.with_sharding_constraint(lax.pad(array, np.zeros((), array.dtype), room), sharding)


def _trimmed(array: jax.Array, layout: Layout, sharding: NamedSharding) -> jax.Array:
    if layout.even:
        return array
    return lax.with_sharding_constraint(lax.slice(array, [0] * array.ndim, layout.shape), sharding)


def cut(mesh: AnyMesh, layouts: Sequence[Layout]) -> AnyMesh:
    """The mesh itself if the layouts hold whole axes of it, else one whose axes are cut where they do.

    Raises `MeshError` where one is needed but an axis is manual, or no axes can be cut so.
    """
    own = free_axes(mesh)
    spans = [(own.stride(axis), own.stride(axis) * axis.size) for axis in map(own.sub_axis, own.axes)]
    ends = sorted({1, own.size} | {end for span in spans for end in span} | {e for lay in layouts for e in _ends(lay)})
    if not any(low < end < high for low, high in spans for end in ends):
        return mesh
    told = f"mesh {own} cannot be cut for {', '.join(map(str, layouts))}"
    if any(high % low for low, high in pairwise(ends)):
        raise MeshError(f"{told}: its axes would have to be cut at {ends}, which do not divide each other")
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        raise MeshError(f"{told} inside a shard_map that is manual over other axes; use layouts of whole axes there")
    sizes = [high // low for low, high in pairwise(ends)][::-1]
    names = tuple(f"axis{at}" for at in range(len(sizes)))
    if isinstance(mesh, JaxMesh):
        return JaxMesh(mesh.devices.reshape(sizes), names)
    return AbstractMesh(tuple(sizes), names)


def _ends(layout: Layout) -> Iterator[int]:
    for axis in (*layout.held, *layout.partial):
        yield layout.mesh.stride(axis)
        yield layout.mesh.stride(axis) * axis.size
