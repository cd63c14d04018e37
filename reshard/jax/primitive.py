"""The JAX primitive of a move, and its rules: evaluation, derivatives, batching and lowering.

    moved      = redistribute_p.bind(x, request, body)
    tangent    moves like the primal; the cotangent moves back, target -> source
    batch      one dim in front, which stays where it is
    lowering   the plan's collectives, in a `shard_map`; without a source, XLA's partitioner hook, or a constraint

`body` is the move in JAX's own primitives, see `bind_move`.

A move whose source is unknown while it is traced is planned when XLA's partitioner compiles the program:
`custom_partitioning` calls back with the sharding that propagation gave the array. XLA has this hook on CPU and GPU,
but not on TPU (jax-ml/jax#38196).
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from reshard.errors import LayoutError, ReshardError
from reshard.jax import placement
from reshard.jax.eager import move_now, put_by_jax
from reshard.jax.request import ReshardRequest, plan_request
from reshard.jax.xla_pass import xla_hook
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.runtime import on_jax

redistribute_p = Primitive("redistribute")


def bind_move(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """Binds the primitive, with the move in JAX's own primitives as `body`.

    JAX searches programs for their devices and meshes and must see those of the move; XLA's hook needs the devices.
    """
    try:
        body = jax.make_jaxpr(partial(_trace_move, request))(x)
    except ReshardError:
        raise
    except ValueError:
        if not isinstance(x, Tracer) or request.source is None or not placement.has_explicit(request.source.mesh):
            raise
        body = None  # Under vmap the batch's explicit axis is hidden here; batching binds again with it.
    return redistribute_p.bind(x, request=request, body=body)


def _trace_move(request: ReshardRequest, x: jax.Array) -> jax.Array:
    """The move in JAX's own primitives, to be traced."""
    with placement.without_context_mesh():
        if request.source is None:
            return pin_sharding(move_by_partitioner(x, request), request.target)
        plan = plan_request(request, x.shape, x.dtype.name)
        return pin_sharding(on_jax.apply_plan(plan, placement.manual_mesh() or request.source.mesh, x), request.target)


@redistribute_p.def_impl
def _move_eagerly(x: jax.Array, *, request: ReshardRequest, body: ClosedJaxpr | None) -> jax.Array:
    """Runs the move eagerly, also at the end of an eager transformation: the array and its sharding are known now."""
    if placement.is_unsharded(x):
        return put_by_jax(x, request.target, donate=False)
    return move_now(x, replace(request, source=None))


@redistribute_p.def_abstract_eval
def _typed_like_target(x: Any, *, request: ReshardRequest, body: ClosedJaxpr | None) -> Any:
    mesh = x.sharding.mesh
    return x.update(sharding=NamedSharding(mesh, request.target.spec)) if placement.has_explicit(mesh) else x


def _move_tangent(primals: Any, tangents: Any, *, request: ReshardRequest, body: ClosedJaxpr | None) -> tuple[Any, Any]:
    """Moves the tangent like the primal; outside jit, the sharding of a concrete primal is the source of both."""
    (x,), (tangent,) = primals, tangents
    if request.source is None and not isinstance(x, Tracer):
        request = replace(request, source=placement.sharding_of(x))
    moved = bind_move(x, request)
    return moved, tangent if isinstance(tangent, ad.Zero) else bind_move(tangent, _keep_source(request))


def _keep_source(request: ReshardRequest) -> ReshardRequest:
    """The move of a tangent or cotangent, which nobody donates."""
    return replace(request, options=request.options._replace(donate=False))


def _move_back(ct: Any, x: Any, *, request: ReshardRequest, body: ClosedJaxpr | None) -> list[Any]:
    """Moves the cotangent back. Each summand of a partial source gets the whole cotangent, see `_dual_sharding`."""
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval)]
    if request.source is None:  # Pin it, as a sharding constraint does, and let the partitioner choose the rest.
        return [pin_sharding(ct, request.target)]
    back = replace(_keep_source(request), target=_dual_sharding(request.source), source=_dual_sharding(request.target))
    return [bind_move(ct, back)]


def _dual_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a cotangent: "unreduced" axes (one summand each) become "reduced" ones (all of it on each)."""
    spec = sharding.spec
    if not spec.unreduced and not spec.reduced:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced))


ad.primitive_jvps[redistribute_p] = _move_tangent
ad.primitive_transposes[redistribute_p] = _move_back


def _move_batch(
    axis: Any, args: Any, dims: Any, *, request: ReshardRequest, body: ClosedJaxpr | None
) -> tuple[Any, int | None]:
    """Puts the batch dim first and leaves it in place: on its explicit axes, on `spmd_axis_name`, or unsplit."""
    if dims[0] is None:
        return bind_move(args[0], request), None
    x = jax.numpy.moveaxis(args[0], dims[0], 0)
    held = axis.explicit_mesh_axis or _auto_axes(axis.spmd_name, request.target.mesh)
    source = None if request.source is None else placement.add_leading_dim(request.source, held)
    return bind_move(x, replace(request, target=placement.add_leading_dim(request.target, held), source=source)), 0


batching.fancy_primitive_batchers[redistribute_p] = _move_batch


def _auto_axes(names: Any, mesh: placement.AnyMesh) -> tuple[Any, ...] | None:
    """The axes of `spmd_axis_name` that types do not have; whether a batch is on an explicit axis, its type says."""
    listed = () if names is None else names if isinstance(names, tuple) else (names,)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in listed if kinds.get(name) != AxisType.Explicit) or None


def _lower_move(ctx: Any, x: Any, *, request: ReshardRequest, body: ClosedJaxpr | None) -> Any:
    run = jaxpr_as_fun(body) if body is not None else partial(_moved_alone, request)
    if request.source is None:
        platforms = ctx.module_context.platforms
        # On TPU, whose partitioner has no hook, the pass inside XLA finds the move by the collectives that XLA makes.
        # Elsewhere the hook needs the mesh of the program to name a sharding; where nothing in the program is on a mesh
        # yet, its arrays are made where the constraints want them.
        context = ctx.module_context.axis_context
        no_mesh = hasattr(context, "abstract_mesh") and context.abstract_mesh is None
        if no_mesh or ("tpu" in platforms and xla_hook.is_on()):
            run = partial(_pin_alone, request.target)
        else:
            check_platforms(platforms, request, ctx.avals_in[0].shape)
    return mlir.lower_fun(run, multiple_results=True)(ctx, x)


def _moved_alone(request: ReshardRequest, x: jax.Array) -> list[jax.Array]:
    return [_trace_move(request, x)]


def _pin_alone(target: NamedSharding, x: jax.Array) -> list[jax.Array]:
    return [pin_sharding(x, target)]


def pin_sharding(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Pins the current sharding for the partitioner; unnecessary for explicitly sharded types."""
    explicit, auto = (placement.restrict_axes(target, kind, x.ndim) for kind in (AxisType.Explicit, AxisType.Auto))
    if placement.has_explicit(target.mesh):
        if jax.typeof(x).sharding == NamedSharding(target.mesh.abstract_mesh, explicit.spec):
            return x
        x = jax.sharding.reshard(x, explicit)
    if AxisType.Auto not in target.mesh.axis_types:
        return x
    with placement.without_context_mesh():
        return jax.lax.with_sharding_constraint(x, auto)


mlir.register_lowering(redistribute_p, _lower_move)


def check_platforms(platforms: Sequence[str], request: ReshardRequest, shape: tuple[int, ...]) -> None:
    """Raises `LayoutError` on a platform whose partitioner has no hook."""
    if "tpu" in platforms:
        raise LayoutError(
            f"redistribute to {request.target.spec} on mesh {dict(request.target.mesh.shape)}, array of shape {shape}: "
            f"its source sharding is not known under jit with auto axes, and XLA on TPU cannot be asked for it; give "
            f"source=, use explicit axes, or compile the program with reshard.jax.jit"
        )


def move_by_partitioner(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """The move, to be traced; it is planned when the partitioner knows the array's sharding."""
    return _partitioning_identity(request, x.ndim)(x)


@lru_cache(maxsize=1024)
def _partitioning_identity(request: ReshardRequest, rank: int) -> Any:
    """An identity function whose partitioning is the move; one per rank, because its sharding rule names each dim."""

    @custom_partitioning
    def move(x: Any) -> Any:
        return x

    def infer(mesh: Any, operands: Any, result: Any) -> NamedSharding:
        return NamedSharding(mesh, request.target.spec)

    def partition(mesh: Any, operands: Any, result: Any) -> tuple[Any, Any, NamedSharding, tuple[NamedSharding]]:
        target = NamedSharding(mesh, request.target.spec)
        run, source = _tile_move(request, operands[0], target)
        return mesh, run, target, (source,)

    before = " ".join(f"i{at}" for at in range(rank))
    after = " ".join(f"o{at}" for at in range(rank))
    # "i0 i1 -> o0 o1": different factors on both sides, so that the operand's sharding never becomes the result's.
    move.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=f"{before} -> {after}")
    return move


def _tile_move(request: ReshardRequest, operand: Any, target: NamedSharding) -> tuple[Any, NamedSharding]:
    """The function that each device runs on its tile, and the source sharding that it requires.

    Uneven arrays are left to XLA, because its hook hands over tiles that it cannot cut evenly.
    """
    source = operand.sharding
    if isinstance(source, NamedSharding) and source.mesh.shape == target.mesh.shape:
        source = NamedSharding(target.mesh, source.spec)
        plan = plan_request(replace(request, source=source, target=target), operand.shape, operand.dtype.name)
        if plan.source.even and plan.target.even:
            return tile_function(lower_plan(plan), on_jax.list_free_axes(target.mesh).axes), source
    return _keep_tile, target


def _keep_tile(tile: jax.Array) -> jax.Array:
    return tile
