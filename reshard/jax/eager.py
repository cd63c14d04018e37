"""Moves concrete arrays: the plan runs now, in one compiled program, or across two meshes of the same devices."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import MeshError, PlanError, ReshardError
from reshard.jax import placement
from reshard.jax.request import ReshardRequest, orders_differ, plan_of
from reshard.runtime import on_jax
from reshard.types.plan import Plan


def put(x: Any, target: NamedSharding, donate: bool) -> jax.Array:
    """Places an array that is not sharded yet on the devices of the target."""
    if not isinstance(target.mesh, JaxMesh) and not placement.is_tracing():
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has no devices, and the array of shape {x.shape}, which is "
            f"not sharded yet, has none either; give a NamedSharding on a jax.sharding.Mesh"
        )
    if target.spec.unreduced:  # device_put splits no sum of an array that is not sharded.
        whole = NamedSharding(target.mesh, PartitionSpec(*target.spec.partitions))
        return move_now(jax.device_put(x, whole, donate=donate), ReshardRequest(target))
    placed = jax.device_put(x, target, donate=donate)
    if donate and isinstance(x, jax.Array) and not x.is_deleted() and target.shard_shape(x.shape) != x.shape:
        x.delete()  # No shard is as large as x, so none shares its memory.
    return placed


def move_now(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """Moves a concrete array: its actual sharding is the source, and a `source=` that contradicts it is an error."""
    known = placement.sharding_of(x)
    if known is None:
        raise ReshardError(
            f"the array of shape {x.shape} has a {type(x.sharding).__name__}; only NamedSharding is read: move it to "
            f"one with jax.device_put first"
        )
    if request.source is not None and not request.source.is_equivalent_to(known, x.ndim):
        raise PlanError(
            f"the array of shape {x.shape} is sharded as {known.spec} on mesh {dict(known.mesh.shape)}, not as the "
            f"source that is given, {request.source.spec} on {dict(request.source.mesh.shape)}; leave source out for a "
            f"concrete array"
        )
    target = _on_devices(request.target, known)
    _check_devices(x, known, target)
    request = replace(request, source=known, target=target)
    plan = plan_of(request, x.shape, x.dtype.name)
    with placement.without_context_mesh():
        if isinstance(known.mesh, JaxMesh) and _needs_two_meshes(known, target):
            moved = on_jax.apply_across(plan, known.mesh, x, target)
        else:
            moved = _compiled(plan, known, target, request.donate and _aliases(plan))(x)
    if request.donate and not x.is_deleted() and moved is not x:
        x.delete()  # XLA keeps the buffer until the move has read it.
    return moved


def _needs_two_meshes(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether one jitted program cannot hold both ends: it has one order of devices, and one mesh if it is explicit."""
    return orders_differ(source, target) or (
        placement.has_explicit(source.mesh) and source.mesh.shape != target.mesh.shape
    )


def _on_devices(target: NamedSharding, source: NamedSharding) -> NamedSharding:
    """The target on a mesh with devices: an abstract mesh takes those of the source."""
    if isinstance(target.mesh, JaxMesh) or not isinstance(source.mesh, JaxMesh):
        return target
    if target.mesh.size != source.mesh.size:
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has {target.mesh.size} devices, not {source.mesh.size}"
        )
    devices = source.mesh.devices.reshape(tuple(target.mesh.shape.values()))
    return NamedSharding(JaxMesh(devices, target.mesh.axis_names, axis_types=target.mesh.axis_types), target.spec)


def _check_devices(x: jax.Array, source: NamedSharding, target: NamedSharding) -> None:
    if source.device_set != target.device_set:
        raise MeshError(
            f"the array of shape {x.shape} is on {len(source.device_set)} devices (mesh {dict(source.mesh.shape)}), "
            f"the target on {len(target.device_set)} (mesh {dict(target.mesh.shape)}), and they are not the same "
            f"ones; a redistribution keeps the devices: use jax.device_put to move to others"
        )


def _aliases(plan: Plan) -> bool:
    """Whether XLA can reuse a donated source's buffer for the result, which requires equal sizes."""
    return plan.source.tile_bytes == plan.target.tile_bytes and plan.source.even and plan.target.even


@lru_cache(maxsize=4096)
def _compiled(plan: Plan, source: NamedSharding, target: NamedSharding, donate: bool) -> Any:
    run = partial(on_jax.apply, plan, source.mesh)
    return jax.jit(run, in_shardings=source, out_shardings=target, donate_argnums=(0,) if donate else ())
