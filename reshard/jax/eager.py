"""Moves concrete arrays: each plan runs now, small ones many to a program; or JAX places what needs no plan.

EagerMove       one array and the compiled program that moves it
prepared        a move, checked and planned, but not started
run             starts moves; `move_now` is both, for one array
put             what JAX places itself: arrays that are not sharded yet, and targets without a layout
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from reshard.errors import LayoutError, MeshError, PlanError
from reshard.jax import crossing, placement
from reshard.jax.request import PlanArguments, ReshardRequest, orders_differ, plan_of
from reshard.jax.starting import started
from reshard.jax.weak_types import weakened
from reshard.lower.to_shard_map import scales
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.types.layout import Layout

SMALL = 256 << 10
"""An array whose tiles of source and target have at most as many bytes together moves with others in one program: its
cost is that of starting the program, not of copying it."""


@dataclass(frozen=True, eq=False)
class EagerProgram:
    """A planned move of concrete arrays of one shape, dtype and sharding; there is one object for equal moves."""

    request: ReshardRequest
    source: NamedSharding
    plan: Plan
    weak: bool
    run: Callable[[jax.Array], jax.Array]
    together: bool
    """Whether it may share a program with other moves."""


class EagerMove(NamedTuple):
    """A concrete array, what moves it, and what is then made of it: keys are moved as integers."""

    x: jax.Array
    program: EagerProgram
    wrapped: Callable[[jax.Array], jax.Array] | None = None


Pending = EagerMove | Callable[[], jax.Array]
"""A move that is not started: one that is planned, or one that JAX makes."""


def move_now(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """Moves a concrete array: its actual sharding is the source, and a `source=` that contradicts it is an error."""
    return run_now(prepared(x, request))


def run_now(move: Pending) -> jax.Array:
    """Starts one move, planned or left to JAX."""
    return run(move) if isinstance(move, EagerMove) else move()


def prepared(x: jax.Array, request: ReshardRequest) -> Pending:
    """The move of a concrete array, checked and planned."""
    known = placement.sharding_of(x)
    if known is None:
        return _left_to_jax(x, request, f"it has a {type(x.sharding).__name__}, whose layout is not known")
    if request.source is not None:
        check_source(x, request.source, known)
    if not request.donate and _is_there(known, request.target, x.ndim):
        return partial(put, x, request.target, donate=False)
    return _mover(replace(request, source=None), known, x.shape, x.dtype, x.weak_type)(x)


@lru_cache(maxsize=4096)
def mover_of(
    aval: Any, known: NamedSharding, target: NamedSharding, arguments: PlanArguments
) -> Callable[[jax.Array], Pending] | None:
    """How concrete arrays of this type and sharding move, checked and planned once; None if `prepared` has to look."""
    if placement.leaves_open(target) or placement.is_key_dtype(aval.dtype):
        return None
    target = placement.resolve(target, aval, "target")
    if not arguments.donate and _is_there(known, target, aval.ndim):
        return None
    request = ReshardRequest(target, None, *arguments)
    return _mover(request, known, aval.shape, aval.dtype, aval.weak_type)


def _mover(
    request: ReshardRequest, known: NamedSharding, shape: tuple[int, ...], dtype: Any, weak: bool
) -> Callable[[jax.Array], Pending]:
    """How arrays of this type and sharding move."""
    near = _device_memory(known)
    if near != known.memory_kind:  # Collectives work in the devices' own memory.
        there = NamedSharding(known.mesh, known.spec, memory_kind=near)
        return lambda x: lambda: move_now(put(x, there, donate=request.donate), request)
    target = on_devices(request.target, known)
    if crossing.crosses(known, target):
        across = _mover_across(replace(request, target=target), known, shape, dtype, weak)
        return lambda x: partial(across, x)
    program = program_of(replace(request, source=known, target=target), shape, dtype, weak)
    return lambda x: EagerMove(x, program)


def _mover_across(
    request: ReshardRequest, known: NamedSharding, shape: tuple[int, ...], dtype: Any, weak: bool
) -> Callable[[jax.Array], jax.Array]:
    """How arrays move to other devices, in their own memory; a memory of another kind is filled from there."""
    target = request.target
    far = _device_memory(target)
    if far != target.memory_kind:
        there = replace(request, target=NamedSharding(target.mesh, target.spec, memory_kind=far))
        across = _mover_across(there, known, shape, dtype, weak)
        return lambda x: put(across(x), target, donate=False)
    if 0 in shape:
        return partial(put, target=target, donate=request.donate)
    with placement.without_mesh(), placement.unguarded():
        program = crossing.program_across(request, known, shape, dtype)

    def moved(x: jax.Array) -> jax.Array:
        with placement.without_mesh(), placement.unguarded():
            there = program(x)
            return crossing.weakened_on(target)(there) if weak else there

    return moved


def prepared_on_device(x: jax.Array, device: Any, arguments: PlanArguments) -> Pending:
    """The move of a sharded array to one device, where it is an array on that device alone."""
    target = NamedSharding(JaxMesh(np.array([device]), ("device",)), PartitionSpec())
    move = partial(move_now, x, ReshardRequest(target, None, *arguments))

    def moved() -> jax.Array:
        there = move()
        shards = [shard.data for shard in there.addressable_shards]
        alone = SingleDeviceSharding(device)
        whole = jax.make_array_from_single_device_arrays(x.shape, alone, shards, dtype=x.dtype)
        return crossing.weakened_on(alone)(whole) if x.weak_type else whole

    return moved


def _left_to_jax(x: jax.Array, request: ReshardRequest, why: str) -> Pending:
    """The move by `jax.device_put`, which keeps to no budget."""
    if request.budget is None:
        return partial(put, x, request.target, donate=request.donate)
    mesh = dict(request.target.mesh.shape)
    raise MeshError(
        f"the array of shape {x.shape} on {len(x.sharding.device_set)} devices, the target {request.target.spec} on "
        f"{request.target.mesh.size} (mesh {mesh}): {why}, so jax.device_put moves it, which keeps to no budget; leave "
        f"budget out"
    )


@lru_cache(maxsize=256)
def _device_memory(sharding: NamedSharding) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def check_source(x: jax.Array, given: NamedSharding, known: NamedSharding) -> None:
    if not given.is_equivalent_to(known, x.ndim):
        raise PlanError(
            f"the array of shape {x.shape} is sharded as {known.spec} on mesh {dict(known.mesh.shape)}, not as the "
            f"source that is given, {given.spec} on {dict(given.mesh.shape)}; leave source out for a concrete array"
        )


@lru_cache(maxsize=4096)
def _is_there(source: NamedSharding, target: NamedSharding, rank: int) -> bool:
    """Whether an array already has its target sharding, in the same kind of memory."""
    if source == target:
        return True
    sums = any(s.spec.unreduced or s.spec.reduced for s in (source, target))  # JAX's comparison ignores them.
    return isinstance(target.mesh, JaxMesh) and not sums and source.is_equivalent_to(target, rank)


def run(move: EagerMove) -> jax.Array:
    """Starts one move."""
    moved = started(move.program.run, move.x)
    if move.program.request.donate and not move.x.is_deleted() and moved is not move.x:
        move.x.delete()  # XLA keeps the buffer until the move has read it.
    return moved if move.wrapped is None else move.wrapped(moved)


@lru_cache(maxsize=4096)
def program_of(request: ReshardRequest, shape: tuple[int, ...], dtype: Any, weak: bool) -> EagerProgram:
    """The program for arrays with this source, shape, dtype and weakness of type."""
    source, target = request.source, request.target
    if source is None:
        raise PlanError(f"the source of the move to {target} is not known")
    plan = plan_of(request, shape, dtype.name)
    _check_even(plan, shape, target)
    if isinstance(source.mesh, JaxMesh) and _needs_two_meshes(source, target):
        return EagerProgram(request, source, plan, weak, _across(plan, source.mesh, target, weak), together=False)
    return EagerProgram(request, source, plan, weak, _compiled(plan, source, request, weak), _together(plan, request))


def _together(plan: Plan, request: ReshardRequest) -> bool:
    """Whether a move gains by sharing a program: others' tiles count against no budget, and stacks do not overwrite."""
    small = plan.source.tile_bytes + plan.target.tile_bytes <= SMALL
    sums = plan.source.partial or plan.target.partial  # JAX does not concatenate unreduced arrays.
    return small and not sums and not request.donate and request.budget is None


def _across(plan: Plan, mesh: JaxMesh, target: NamedSharding, weak: bool) -> Callable[[jax.Array], jax.Array]:
    weaken = jax.jit(weakened, out_shardings=target) if weak else None

    def moved(x: jax.Array) -> jax.Array:
        there = on_jax.apply_across(plan, mesh, x, target)
        return there if weaken is None else weaken(there)

    return moved


def _compiled(plan: Plan, source: NamedSharding, request: ReshardRequest, weak: bool) -> Any:
    donated = (0,) if request.donate and _aliases(plan) else ()
    moved = partial(traced_move, plan, source.mesh, weak)
    return jax.jit(moved, in_shardings=source, out_shardings=request.target, donate_argnums=donated)


def traced_move(plan: Plan, mesh: placement.AnyMesh, weak: bool, x: jax.Array) -> jax.Array:
    """The move in a program of concrete arrays."""
    moved = on_jax.apply(plan, mesh, x)
    return weakened(moved) if weak else moved


def _check_even(plan: Plan, shape: tuple[int, ...], target: NamedSharding) -> None:
    if not plan.target.even:
        raise LayoutError(
            f"the target {target.spec} on mesh {dict(target.mesh.shape)} does not divide the shape {shape}; outside of "
            f"jit JAX shards only what divides evenly: pad the array, or move it under jit"
        )


def _needs_two_meshes(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether one jitted program cannot hold both ends: it has one order of devices, and one mesh if it is explicit."""
    return orders_differ(source, target) or (
        placement.has_explicit(source.mesh) and source.mesh.shape != target.mesh.shape
    )


def on_devices(target: NamedSharding, source: NamedSharding) -> NamedSharding:
    """The target on a mesh with devices: an abstract mesh takes those of the source."""
    if isinstance(target.mesh, JaxMesh) or not isinstance(source.mesh, JaxMesh):
        return target
    if target.mesh.size != source.mesh.size:
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has {target.mesh.size} devices, not {source.mesh.size}"
        )
    devices = source.mesh.devices.reshape(tuple(target.mesh.shape.values()))
    return NamedSharding(JaxMesh(devices, target.mesh.axis_names, axis_types=target.mesh.axis_types), target.spec)


def _aliases(plan: Plan) -> bool:
    """Whether XLA can reuse a donated source's buffer for the result, which requires equal sizes."""
    return plan.source.tile_bytes == plan.target.tile_bytes and plan.source.even and plan.target.even


def put(x: Any, target: Any, *, donate: bool) -> jax.Array:
    """Places an array by `jax.device_put`: one that is not sharded yet, or for a target that has no layout.

    Raises `LayoutError` for what JAX refuses.
    """
    if isinstance(target, NamedSharding) and not isinstance(target.mesh, JaxMesh) and not placement.is_tracing():
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has no devices, and the array of shape {x.shape}, which is "
            f"not sharded yet, has none either; give a NamedSharding on a jax.sharding.Mesh"
        )
    if isinstance(target, NamedSharding) and target.spec.unreduced:  # device_put starts no sum.
        whole = NamedSharding(target.mesh, PartitionSpec(*target.spec.partitions))
        return move_now(put(x, whole, donate=donate), ReshardRequest(target))
    try:
        placed = jax.device_put(x, target, donate=donate)
    except (TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"jax.device_put refuses the move to {target}: {error}") from None
    if donate and placed is not x and isinstance(x, jax.Array) and not isinstance(x, Tracer):
        discard(x, [placed])
    return placed


def plain(x: jax.Array) -> jax.Array:
    """The array, or the integers that random keys consist of."""
    return jax.random.key_data(x) if placement.is_key_array(x) else x


def discard(x: jax.Array, results: Iterable[jax.Array]) -> None:
    """Deletes a donated array, unless a result shares its memory."""
    buffers = {shard.data.unsafe_buffer_pointer() for array in results for shard in plain(array).addressable_shards}
    x = plain(x)
    if not x.is_deleted() and not any(s.data.unsafe_buffer_pointer() in buffers for s in x.addressable_shards):
        x.delete()


# Moves with a view between meshes that list the same devices in another order, such as a transposed one.
#
#     source on devices 0 1 2 3   the steps, one program on this mesh      a stack of the target's tiles
#     target on devices 3 1 2 0   the tiles are its shards as they are     the result
#
# A jitted program has one order of devices, so the steps run on the source's mesh. What they read by the target's
# tiles, the array of which a part is filled and the scale of a cast at the end, is handed to it as shards in the same
# way.


@lru_cache(maxsize=1024)
def reordered_program(whole: Plan, source: NamedSharding, target: NamedSharding) -> Callable[..., jax.Array]:
    """The compiled move; beside the array it takes the array of which a part is filled, and the scale of a cast.

    The scale is on all devices of the source's mesh if the first step casts, else of the target's.
    """
    mesh = source.mesh
    if not isinstance(mesh, JaxMesh):
        raise MeshError(f"the source's mesh {dict(mesh.shape)} has no devices; give a NamedSharding on a mesh of them")
    run = on_jax.to_stack(whole.source, whole.steps, mesh)
    first = on_jax.narrows(whole.steps)
    goal = whole.target
    scalar = not goal.shape

    def stack_of(x: jax.Array, tile: tuple[int, ...]) -> jax.Array:
        """The shards of an array on the target's mesh as a stack on the source's."""
        shape = (goal.mesh.size * tile[0], *tile[1:]) if tile else ()
        sharding = NamedSharding(mesh, on_jax.stack_spec(mesh, goal))
        return jax.make_array_from_single_device_arrays(shape, sharding, _shards(x), dtype=x.dtype)

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        tiles: dict[str, jax.Array] = {}
        if into is not None:
            tiles["into"] = stack_of(into, goal.tile_shape)
        if scale is not None and not first:
            parts = _by_tiles(scale, goal, target)
            tiles["scale"] = stack_of(parts, () if scalar else parts.sharding.shard_shape(parts.shape))
        stack = started(run, x, scale if first else None, tiles)
        return jax.make_array_from_single_device_arrays(goal.shape, target, _shards(stack), dtype=stack.dtype)

    return moved


def _by_tiles(scale: jax.Array, layout: Layout, target: NamedSharding) -> jax.Array:
    """The scale of the target's elements, which is on all its devices, each with its part."""
    blocks, held = scales.spread(scale, layout, target.spec)
    return jax.jit(jnp.asarray, out_shardings=NamedSharding(placement.of_auto_axes(target.mesh), held))(blocks)


def _shards(x: Any) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]
