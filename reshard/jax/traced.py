"""Moves of traced arrays: checked while the caller's line is on the stack, then bound as a JAX primitive.

source is known or not       `bind_move`: a plan of this package
on no mesh, or a constant    `pin_sharding`: it is made where it is wanted
to a mesh of other types     the move on the array's mesh, then a change of its type, which moves nothing
dims left open, a device     JAX's own `with_sharding_constraint` and `device_put`
a tile in a `shard_map`      `move_tile`: the collectives of a plan, there

The primitive and its rules:

    moved      = redistribute_p.bind(x, request, body)
    tangent    moves like the primal; the cotangent moves back, target -> source
    batch      one dim in front, which stays where it is
    lowering   the plan's collectives, in a `shard_map`; without a source, XLA's partitioner hook, or a constraint

`body` is the move in JAX's own primitives, see `bind_move`.

A move whose source is unknown while it is traced is planned when XLA's partitioner compiles the program:
`custom_partitioning` calls back with the sharding that propagation gave the array. XLA has this hook on CPU and GPU,
but not on TPU (jax-ml/jax#38196).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from reshard.errors import LayoutError, MeshError, PlanError, ReshardError, TileError, quoted
from reshard.geometry.remesh import one_set
from reshard.jax import placement
from reshard.jax.eager import move_now, put_by_jax
from reshard.jax.request import ReshardRequest, plan_request
from reshard.jax.xla_pass import xla_hook
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import tile_function
from reshard.runtime import on_jax
from reshard.runtime.xla import slice_exchanges
from reshard.synth import Network
from reshard.synth.options import PlanOptions
from reshard.synth.planner import find_plan
from reshard.types.layout import Layout
from reshard.types.move import Move

redistribute_p = Primitive("redistribute")


def move_tile(
    tile: Any, source: Layout, target: Layout, *, budget: int | str | None = None, network: Network | str | None = None
) -> jax.Array:
    """This device's tile of the target, from its tile of the source, inside a `jax.shard_map` (with `check_vma=False`).

    Layouts are of any kind: in pieces of any size, block-cyclic, partial. Their devices are those of the axes that are
    manual there, by position. A tile has the layout's `tile_shape`, the room of the largest piece; what is beyond
    `tile_shape_of` a device is padding, of which no element of the result is made. In pieces that are new it is zeros,
    in those that stay what it was. `budget` and `network` are those of `reshard.plan`. It has derivatives of both
    kinds.

    Raises `MeshError` outside of a `shard_map`, or for other devices, and `TileError` for a tile of another shape.

    >>> import reshard as rs
    >>> from jax.sharding import PartitionSpec as P
    >>> count = len(jax.devices())
    >>> rows = rs.Layout.from_sizes([4] * count, rs.Mesh(x=count), (4 * count,), "f32")
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> back = rs.Layout.from_owners([*range(count)] * 4, rs.Mesh(x=count), (4 * count,), "f32")
    >>> move = lambda tile: move_tile(tile, rows, back)
    >>> move = jax.shard_map(move, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    >>> x = jax.numpy.arange(4.0 * count)
    >>> bool((move(x) == x.reshape(4, count).T.reshape(-1)).all())
    True
    """
    options = PlanOptions.read(budget, network)
    for what, given in (("source", source), ("target", target)):
        if not isinstance(given, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"the {what} {quoted(given)} is a {type(given).__name__}; give a reshard.Layout")
    plan = find_plan(Move(source, target, cast=True), None, options)
    inside = placement.manual_mesh()
    axes = {} if inside is None else {name: inside.shape[name] for name in inside.manual_axes}
    if math.prod(axes.values()) != source.mesh.size or inside is None or not one_set(source.mesh, target.mesh):
        where = "outside of any shard_map" if inside is None else f"in a shard_map over {axes}"
        raise MeshError(
            f"the move of a tile from {source} on {source.mesh} to {target} on {target.mesh} is {where}: call it in a "
            f"jax.shard_map that is manual over axes with these devices, the same ones on both sides"
        )
    tile = jax.numpy.asarray(tile)
    if tile.shape != source.tile_shape or tile.dtype.name != source.dtype:
        raise TileError(
            f"a tile of shape {tile.shape} and dtype {tile.dtype}; tiles of {source} have {source.tile_shape} and "
            f"{source.dtype}, with room for the largest piece: pad it"
        )
    program = lower_plan(plan)
    if options.budget is None:  # One collective for all messages has buffers of all.
        program = slice_exchanges(plan, program)
    return tile_function(program, axes)(tile)


def move_traced(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """The moved array, in the memory of the target."""
    target = request.target
    try:
        result = _move_on_mesh(x, request)
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
        raise MeshError(
            f"the array of shape {x.shape} is traced (jit, grad, vmap, scan) on other devices than those of the "
            f"target's mesh {dict(target.mesh.shape)}, and a traced program runs on one set of devices: move a "
            f"concrete array, outside of it"
        ) from None
    return result if target.memory_kind in (None, "device") else jax.device_put(result, target)


def place_constant(x: Any, target: NamedSharding) -> jax.Array:
    """An array of the host or of one device as a constant of the program, placed as the target says."""
    inside = placement.manual_mesh()
    return pin_sharding(jax.numpy.asarray(x), target if inside is None else _resolve_inside(x, target, inside))


def constrain_open(x: Any, given: object) -> jax.Array:
    """The array under a sharding constraint that leaves dims to the compiler; also of a concrete array."""
    target, inside = placement.named_sharding(given, x, "target"), placement.manual_mesh()
    if inside is not None:
        target = NamedSharding(inside, target.spec)
    try:
        with placement.without_context_mesh():
            return jax.lax.with_sharding_constraint(x, target)
    except ValueError as error:
        raise LayoutError(
            f"the target {target.spec} on mesh {dict(target.mesh.shape)} leaves dims to the compiler, which refuses it "
            f"for the array of shape {x.shape}: {error}"
        ) from None


def _move_on_mesh(x: jax.Array, request: ReshardRequest) -> jax.Array:
    inside = placement.manual_mesh()
    if inside is not None:
        target = _resolve_inside(x, request.target, inside)
        if request.source is None:  # The hook does not exist there.
            return pin_sharding(x, target)
        request = replace(request, target=target, source=NamedSharding(inside, request.source.spec))
    target, source = request.target, request.source
    if inside is None and source is not None and (request.crosses or request.reorders):
        return bind_move(x, request)  # A derivative that is taken outside of jit moves now; a program is refused.
    mesh, there = jax.typeof(x).sharding.mesh, target.mesh
    # The traced program may have no mesh yet; an abstract one `jax.set_mesh` may still set.
    if mesh.empty and (not isinstance(there, JaxMesh) or there.abstract_mesh == jax.sharding.get_abstract_mesh()):
        return pin_sharding(x, target)
    typed = placement.has_explicit(mesh)
    if source is not None and (typed or placement.has_explicit(source.mesh)):
        _check_source(x, source)
    if typed or placement.has_explicit(there):
        if _axes_text(mesh) != _axes_text(there):
            return _move_between_types(x, request)
        if source is None:
            return pin_sharding(x, target)  # A type of mixed axes has a part of the source.
    elif source is None and not mesh.empty and dict(mesh.shape) != dict(there.shape):
        return pin_sharding(x, target)  # JAX passes the axes of one mesh only to XLA's hook.
    return bind_move(x, request)


def _resolve_inside(x: Any, target: NamedSharding, inside: placement.AnyMesh) -> NamedSharding:
    """The target inside a `shard_map` that is manual over other axes; raises an error if it names a manual axis."""
    target = NamedSharding(inside, target.spec)
    placement.layout_of(target, x.shape, "uint8")
    return target


def _move_between_types(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """To a mesh of other axes or types: planned as far as the array's own mesh can express the target.

    Then the type becomes that of the target, as JAX's own moves have it; this moves nothing more.
    """
    target, source = request.target, request.source
    mesh, there = jax.typeof(x).sharding.mesh, target.mesh
    if not mesh.empty and mesh.size != there.size:
        raise MeshError(
            f"the array of shape {x.shape} is on mesh {_axes_text(mesh)}, the target on {_axes_text(there)}; inside "
            f"jit all arrays are on the same devices: give a target on as many"
        )
    moved = x
    # XLA's hook finds no plan where the mesh that is set has explicit axes.
    planned = source is not None or not placement.has_explicit(jax.sharding.get_abstract_mesh())
    if not placement.has_explicit(mesh) and set(there.axis_types) == {AxisType.Explicit} and planned:
        moved = _move_on_mesh(x, replace(request, target=target.update(mesh=placement.of_auto_axes(there))))
    elif placement.has_explicit(mesh) and source is not None:
        with suppress(LayoutError):  # If only other axes can express it, JAX moves it.
            here = placement.layout_of(target, x.shape, "uint8").to_jax(source.mesh)
            moved = bind_move(x, replace(request, target=here))
    return pin_sharding(moved, target)


def _check_source(x: jax.Array, source: NamedSharding) -> None:
    """Raises an error for a source that contradicts the type, which JAX would report later, or not at all."""
    typed = jax.typeof(x).sharding
    mesh = typed.mesh
    if _axes_text(source.mesh) != _axes_text(mesh):
        raise MeshError(
            f"the array of shape {x.shape} is on mesh {_axes_text(mesh)}, the source {source.spec} on "
            f"{_axes_text(source.mesh)}; give a source on the array's own mesh, or none"
        )
    if placement.restrict_axes(source, AxisType.Explicit, x.ndim).spec != typed.spec:
        raise PlanError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_axes_text(mesh)}, but the source that is "
            f"given is {source.spec}; the type is right: leave source out, or let it agree on the explicit axes"
        )


def _axes_text(mesh: placement.AnyMesh) -> str:
    return f"{dict(mesh.shape)} of axis types ({', '.join(kind.name for kind in mesh.axis_types)})"


def bind_move(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """Binds the primitive, with the move in JAX's own primitives as `body`.

    JAX searches programs for their devices and meshes and must see those of the move; XLA's hook needs the devices.
    """
    body = None
    if request.source is None or not (request.crosses or request.reorders):
        try:
            body = jax.make_jaxpr(partial(_trace_move, request))(x)
        except ReshardError:
            raise
        except ValueError:
            # Under vmap the batch's explicit axis is hidden here; batching binds again with it.
            if not isinstance(x, Tracer) or request.source is None or not placement.has_explicit(request.source.mesh):
                raise
    return redistribute_p.bind(x, request=request, body=body)


def _trace_move(request: ReshardRequest, x: jax.Array) -> jax.Array:
    """The move in JAX's own primitives, to be traced."""
    if request.source is not None and request.reorders:
        source, target = request.ends
        raise MeshError(
            f"the meshes {dict(source.mesh.shape)} and {dict(target.mesh.shape)} of the move of shape {x.shape} list "
            f"their devices in different orders; inside jit all arrays have one: move it outside of jit"
        )
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
    target = placement.restrict_axes(request.target, AxisType.Explicit, x.ndim)
    return x.update(sharding=target.update(mesh=getattr(target.mesh, "abstract_mesh", target.mesh), memory_kind=None))


def _keep_source(request: ReshardRequest) -> ReshardRequest:
    """The move of a tangent or cotangent, which nobody donates."""
    return replace(request, options=request.options._replace(donate=False))


def _move_tangent(primals: Any, tangents: Any, *, request: ReshardRequest, body: ClosedJaxpr | None) -> tuple[Any, Any]:
    """Moves the tangent like the primal; outside jit, the sharding of a concrete primal is the source of both."""
    (x,), (tangent,) = primals, tangents
    if request.source is None:
        request = replace(request, source=placement.sharding_of(x))
    moved = bind_move(x, request)
    return moved, tangent if isinstance(tangent, ad.Zero) else bind_move(tangent, _keep_source(request))


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
    # Of `spmd_axis_name`, the axes that types do not have: whether a batch is on an explicit axis, its type says.
    names, mesh = axis.spmd_name, request.target.mesh
    listed = () if names is None else names if isinstance(names, tuple) else (names,)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = tuple(name for name in listed if kinds.get(name) != AxisType.Explicit) or None
    held = axis.explicit_mesh_axis or auto
    source = None if request.source is None else placement.add_leading_dim(request.source, held)
    return bind_move(x, replace(request, target=placement.add_leading_dim(request.target, held), source=source)), 0


batching.fancy_primitive_batchers[redistribute_p] = _move_batch


def _lower_move(ctx: Any, x: Any, *, request: ReshardRequest, body: ClosedJaxpr | None) -> Any:
    run: Any = jaxpr_as_fun(body) if body is not None else lambda x: [_trace_move(request, x)]
    if request.source is None:
        platforms = ctx.module_context.platforms
        # On TPU, whose partitioner has no hook, the pass inside XLA finds the move by the collectives that XLA makes.
        # Elsewhere the hook needs the mesh of the program to name a sharding; where nothing in the program is on a mesh
        # yet, its arrays are made where the constraints want them.
        context = ctx.module_context.axis_context
        no_mesh = hasattr(context, "abstract_mesh") and context.abstract_mesh is None
        if no_mesh or ("tpu" in platforms and xla_hook.is_on()):
            run = lambda x: [pin_sharding(x, request.target)]  # noqa: E731
        else:
            check_platforms(platforms, request, ctx.avals_in[0].shape)
    return mlir.lower_fun(run, multiple_results=True)(ctx, x)


mlir.register_lowering(redistribute_p, _lower_move)


def pin_sharding(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Pins the current sharding for the partitioner; unnecessary for explicitly sharded types."""
    explicit, auto = (placement.restrict_axes(target, kind, x.ndim) for kind in (AxisType.Explicit, AxisType.Auto))
    typed = jax.typeof(x).sharding
    types = placement.has_explicit(target.mesh) or placement.has_explicit(typed.mesh)
    if types and typed != NamedSharding(target.mesh.abstract_mesh, explicit.spec):
        x = jax.sharding.reshard(x, explicit)
    if AxisType.Auto not in target.mesh.axis_types:
        return x
    with placement.without_context_mesh():
        return jax.lax.with_sharding_constraint(x, auto)


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
        target, (operand,) = NamedSharding(mesh, request.target.spec), operands
        source = operand.sharding
        if isinstance(source, NamedSharding) and source.mesh.shape == target.mesh.shape:
            source = NamedSharding(target.mesh, source.spec)
            plan = plan_request(replace(request, source=source, target=target), operand.shape, operand.dtype.name)
            if plan.source.even and plan.target.even:
                run = tile_function(lower_plan(plan), on_jax.list_free_axes(target.mesh).axes)
                return mesh, run, target, (source,)
        # Uneven arrays are left to XLA, because its hook hands over tiles that it cannot cut evenly.
        return mesh, lambda tile: tile, target, (target,)

    before = " ".join(f"i{at}" for at in range(rank))
    after = " ".join(f"o{at}" for at in range(rank))
    # "i0 i1 -> o0 o1": different factors on both sides, so that the operand's sharding never becomes the result's.
    move.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=f"{before} -> {after}")
    return move
