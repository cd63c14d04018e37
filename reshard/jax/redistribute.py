"""`redistribute`: an array, or a tree of them, in another sharding, by a plan of this package.

A primitive of its own, so that every transformation of JAX applies: its transpose is the move back, under
`vmap` the batch dim stays where it is. It lowers to the plan's collectives. Where the source is not known
when it is traced (auto axes under jit), XLA's partitioner is asked for it while it compiles.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh

from reshard.errors import LayoutError, MeshError, PlanError, ReshardError
from reshard.jax import placement
from reshard.jax.partitioner_hook import check_platforms, left_to_a_pass, moved_late
from reshard.jax.request import Request, orders_differ, plan_of, reordered
from reshard.runtime import on_jax
from reshard.synth import Network
from reshard.synth.planner import check_options
from reshard.types.layout import Layout
from reshard.types.plan import Plan


def redistribute(
    x: Any,
    sharding: Any,
    *,
    source: Any = None,
    budget: int | None = None,
    network: Network | str | None = None,
    donate: bool = False,
) -> Any:
    """The same values, sharded anew: in place of `jax.device_put`, `with_sharding_constraint` and `reshard`.

    `x` is an array or a tree of them; `sharding` a `NamedSharding`, a `PartitionSpec` on the mesh that is set
    (or the array's own), or a `reshard.Layout`; one for all leaves, or a tree of them with the structure of
    `x`, or of its top. `source` says the sharding that `x` has where tracing cannot know it, likewise.
    `budget` are the bytes that may live on a device during the move, source and result included; without one,
    large moves go in parts, so that they need little more than source and result. `network` as in
    `reshard.plan`. With `donate`, `x` is given up, and deleted once the move is under way.

    It works eagerly, under jit, grad, vmap, scan and remat, on auto and explicit axes, inside `jax.set_mesh`
    and a `shard_map` that is manual over other axes. What is not sharded yet (numpy arrays, arrays on one
    device) is put on the devices by `jax.device_put`.

    Raises `LayoutError`, `MeshError` or `PlanError` for a source or target that cannot be, and `BudgetError`,
    with the smallest that works, for a budget that no plan meets.

    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> redistribute(jax.numpy.arange(3), NamedSharding(mesh, PartitionSpec("x"))).tolist()
    [0, 1, 2]
    """
    loaded = Network.load(network) if isinstance(network, str) else network
    check_options(budget, loaded)
    leaves, tree = jax.tree.flatten(x)
    targets = _broadcast(sharding, x, "target")
    sources = [None] * len(leaves) if source is None else _broadcast(source, x, "source")
    options = {"budget": budget, "network": loaded, "donate": donate}
    done = [_one(leaf, t, s, options) for leaf, t, s in zip(leaves, targets, sources, strict=True)]
    return jax.tree.unflatten(tree, done)


def _is_sharding(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, jax.sharding.Sharding | PartitionSpec | Layout)


def _broadcast(given: Any, x: Any, what: str) -> list[Any]:
    """One sharding per leaf of `x`, from one for all, or from a tree that is a prefix of it."""
    if _is_sharding(given):
        return [given] * len(jax.tree.leaves(x))
    try:
        spread = jax.tree.broadcast(given, x, is_leaf=_is_sharding)
    except ValueError as error:
        raise PlanError(
            f"the tree of {what} shardings is no prefix of the tree of arrays ({error}); give one sharding for all, or "
            f"a tree of them of the same structure"
        ) from None
    found: list[Any] = []
    jax.tree.map(lambda leaf, s: found.append(s), x, spread)  # pyright: ignore[reportUnknownLambdaType]
    return found


def _one(x: Any, sharding: Any, source: Any, options: dict[str, Any]) -> jax.Array:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    target = placement.resolved(sharding, x, "target")
    before = None if source is None else placement.resolved(source, x, "source")
    if placement.is_keys(x):
        return _keys(x, target, before, options)
    if isinstance(x, Tracer):
        return _traced(x, Request(target, before or placement.known_source(x), **options))
    if placement.on_one_device(x):
        return _put(x, target, options["donate"])
    return _concrete(x, Request(target, before, **options))


def _put(x: Any, target: NamedSharding, donate: bool) -> jax.Array:
    """What is not sharded yet, on the devices of the target."""
    if not isinstance(target.mesh, JaxMesh) and not placement.tracing():
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has no devices, and the array of shape {x.shape}, which is "
            f"not sharded yet, is on no mesh that has; give a NamedSharding on a jax.sharding.Mesh"
        )
    done = jax.device_put(x, target, donate=donate)
    if donate and isinstance(x, jax.Array) and not x.is_deleted() and target.shard_shape(x.shape) != x.shape:
        x.delete()  # No shard is as large as x, so none is x itself.
    return done


def _keys(x: jax.Array, target: NamedSharding, source: NamedSharding | None, options: dict[str, Any]) -> jax.Array:
    """Random keys, as the integers that they are made of; a dim of those comes last, and is never split."""
    moved = _one(jax.random.key_data(x), target, source, options)
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))


def _traced(x: jax.Array, request: Request) -> jax.Array:
    """Checked while the caller's line is on the stack, then left to the transformations."""
    inside = placement.region()
    if inside is not None:
        if request.source is None:
            raise LayoutError(
                f"the array of shape {x.shape} is inside a shard_map that is manual over some axes of mesh "
                f"{dict(inside.shape)}, and the source of its move to {request.target.spec} is not known; give source="
            )
        source = NamedSharding(inside, request.source.spec)
        request = replace(request, target=NamedSharding(inside, request.target.spec), source=source)
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty and placement.of_context(request.target):  # Nothing of this program is on a mesh yet.
        return _pinned(x, request.target)
    _check_types(x, request)
    if request.source is None and not mesh.empty and dict(mesh.shape) != dict(request.target.mesh.shape):
        return _pinned(x, request.target)  # JAX gives XLA's hook the axes of one mesh only.
    return _bind(x, request)


def _check_types(x: jax.Array, request: Request) -> None:
    """What JAX would only find later, or not: axis types that differ, and a source that is not the array's."""
    meshes = (jax.typeof(x).sharding.mesh, *(s.mesh for s in (request.source, request.target) if s is not None))
    if any(placement.has_explicit(mesh) for mesh in meshes):
        _check_explicit(x, request.source, request.target)
    if request.source is not None and reordered(request.source, request.target):
        raise MeshError(
            f"the meshes {dict(request.source.mesh.shape)} and {dict(request.target.mesh.shape)} of the move of shape "
            f"{x.shape} list their devices in different orders; inside jit all arrays have one: move it outside of jit"
        )


def _check_explicit(x: jax.Array, source: NamedSharding | None, target: NamedSharding) -> None:
    typed = jax.typeof(x).sharding
    mesh = typed.mesh
    if mesh.empty:
        raise MeshError(
            f"the array of shape {x.shape} is on no mesh, and the target on {_told(target.mesh)}; inside jit explicit "
            f"axes are those of the mesh that is set: call it inside jax.set_mesh"
        )
    for what, given in (("target", target), ("source", source)):
        if given is not None and _told(given.mesh) != _told(mesh):
            raise MeshError(
                f"the array of shape {x.shape} is on mesh {_told(mesh)}, the {what} on {_told(given.mesh)}; inside jit "
                f"an array with explicit axes stays on its mesh: name its axes"
            )
    if source is None:
        raise LayoutError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_told(mesh)}, and how it is sharded over "
            f"axes that are not explicit is not known; give source="
        )
    if placement.over(AxisType.Explicit, source, x.ndim).spec != typed.spec:
        raise PlanError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_told(mesh)}, not as the source that is "
            f"given, {source.spec}; the type is right: leave source out, or let it say the same of explicit axes"
        )


def _told(mesh: placement.AnyMesh) -> str:
    return f"{dict(mesh.shape)} of axis types ({', '.join(kind.name for kind in mesh.axis_types)})"


# ---- eager -----------------------------------------------------------------------------------------


def _concrete(x: jax.Array, request: Request) -> jax.Array:
    """An array that is there: its sharding is the source, whatever was said."""
    known = placement.known_source(x)
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
    target = _with_devices(request.target, known)
    _check_devices(x, known, target)
    request = replace(request, source=known, target=target)
    plan = plan_of(request, x.shape, x.dtype.name)
    with placement.on_own_mesh():
        if isinstance(known.mesh, JaxMesh) and _to_another_mesh(known, target):
            moved = on_jax.apply_across(plan, known.mesh, x, target)
        else:
            moved = _compiled(plan, known, target, request.donate and _aliases(plan))(x)
    if request.donate and not x.is_deleted() and moved is not x:
        x.delete()  # XLA keeps it until the move has read it.
    return moved


def _to_another_mesh(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether no program that is jitted may hold both: its devices have one order, explicit axes one mesh."""
    return orders_differ(source, target) or (
        placement.has_explicit(source.mesh) and source.mesh.shape != target.mesh.shape
    )


def _with_devices(target: NamedSharding, source: NamedSharding) -> NamedSharding:
    """The target on a mesh that has devices: one that is only abstract takes those of the source."""
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
    """Whether XLA can put the result where a donated source was: it wants the same bytes."""
    return plan.source.tile_bytes == plan.target.tile_bytes and plan.source.even and plan.target.even


@lru_cache(maxsize=4096)
def _compiled(plan: Plan, source: NamedSharding, target: NamedSharding, donate: bool) -> Any:
    run = partial(on_jax.apply, plan, source.mesh)
    return jax.jit(run, in_shardings=source, out_shardings=target, donate_argnums=(0,) if donate else ())


# ---- the primitive ---------------------------------------------------------------------------------

redistribute_p = Primitive("redistribute")


def _bind(x: jax.Array, request: Request) -> jax.Array:
    """With the move as JAX's own primitives beside it: where JAX looks through a program for its devices and
    meshes, it must find them, and XLA's hook needs the devices.
    """
    try:
        body = jax.make_jaxpr(partial(_moved, request))(x)
    except ReshardError:
        raise
    except ValueError:
        if not isinstance(x, Tracer) or request.source is None or not placement.has_explicit(request.source.mesh):
            raise
        body = None  # Under vmap the explicit axis of the batch is out of sight; it is made when batched.
    return redistribute_p.bind(x, request=request, body=body)


def _moved(request: Request, x: jax.Array) -> jax.Array:
    """The move, to be traced."""
    with placement.on_own_mesh():
        if request.source is None:
            return _pinned(moved_late(x, request), request.target)
        plan = plan_of(request, x.shape, x.dtype.name)
        mesh, spec = placement.region() or request.source.mesh, request.source.spec
        if spec.reduced:
            x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec.partitions)))
        return _pinned(on_jax.apply(plan, mesh, x), request.target)


@redistribute_p.def_impl
def _impl(x: jax.Array, *, request: Request, body: ClosedJaxpr | None) -> jax.Array:
    """An eager transformation ends here; what it could not know is known now."""
    if placement.on_one_device(x):
        return _put(x, request.target, donate=False)
    return _concrete(x, replace(request, source=None))


@redistribute_p.def_abstract_eval
def _abstract(x: Any, *, request: Request, body: ClosedJaxpr | None) -> Any:
    mesh = x.sharding.mesh
    return x.update(sharding=NamedSharding(mesh, request.target.spec)) if placement.has_explicit(mesh) else x


def _jvp(primals: Any, tangents: Any, *, request: Request, body: ClosedJaxpr | None) -> tuple[Any, Any]:
    """The tangent moves as the primal does; outside jit, a concrete primal tells both where they come from."""
    (x,), (tangent,) = primals, tangents
    if request.source is None and not isinstance(x, Tracer):
        request = replace(request, source=placement.known_source(x))
    moved = _bind(x, request)
    return moved, tangent if isinstance(tangent, ad.Zero) else _bind(tangent, replace(request, donate=False))


def _transpose(ct: Any, x: Any, *, request: Request, body: ClosedJaxpr | None) -> list[Any]:
    """The move back. Of summands, each gets the whole cotangent: back to a layout that is not partial."""
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval)]
    if request.source is None:  # As for a sharding constraint: the partitioner takes it from there.
        return [_pinned(ct, request.target)]
    back = replace(request, target=_dual(request.source), source=_dual(request.target), donate=False)
    return [_bind(ct, back)]


def _dual(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a cotangent: each summand of an unreduced array gets all of it, which JAX calls reduced."""
    spec = sharding.spec
    if not spec.unreduced and not spec.reduced:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced))


ad.primitive_jvps[redistribute_p] = _jvp
ad.primitive_transposes[redistribute_p] = _transpose


def _batched(axis: Any, args: Any, dims: Any, *, request: Request, body: ClosedJaxpr | None) -> tuple[Any, int | None]:
    """The batch dim goes first, and stays as it is: on the axes it has, those vmap was told, or none."""
    if dims[0] is None:
        return _bind(args[0], request), None
    x = jax.numpy.moveaxis(args[0], dims[0], 0)
    held = axis.spmd_name or axis.explicit_mesh_axis
    source = None if request.source is None else _lifted(request.source, held)
    return _bind(x, replace(request, target=_lifted(request.target, held), source=source)), 0


def _lifted(sharding: NamedSharding, held: Any) -> NamedSharding:
    """With a dim in front."""
    spec = sharding.spec
    sums = {name: axes for name in ("unreduced", "reduced") if (axes := getattr(spec, name))}
    return NamedSharding(sharding.mesh, PartitionSpec(held, *spec.partitions, **sums))


batching.fancy_primitive_batchers[redistribute_p] = _batched


def _lowered(ctx: Any, x: Any, *, request: Request, body: ClosedJaxpr | None) -> Any:
    run = jaxpr_as_fun(body) if body is not None else partial(_moved_alone, request)
    if request.source is None:
        if left_to_a_pass():
            run = partial(_constrained, request.target)
        else:
            check_platforms(ctx.module_context.platforms, request, ctx.avals_in[0].shape)
    return mlir.lower_fun(run, multiple_results=True)(ctx, x)


def _moved_alone(request: Request, x: jax.Array) -> list[jax.Array]:
    return [_moved(request, x)]


def _constrained(target: NamedSharding, x: jax.Array) -> list[jax.Array]:
    return [_pinned(x, target)]


def _pinned(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Said to the partitioner to be as it is; an explicit type says so already."""
    explicit, auto = (placement.over(kind, target, x.ndim) for kind in (AxisType.Explicit, AxisType.Auto))
    if placement.has_explicit(target.mesh):
        if jax.typeof(x).sharding == NamedSharding(target.mesh.abstract_mesh, explicit.spec):
            return x
        x = jax.sharding.reshard(x, explicit)
    if AxisType.Auto not in target.mesh.axis_types:
        return x
    with placement.on_own_mesh():
        return jax.lax.with_sharding_constraint(x, auto)


mlir.register_lowering(redistribute_p, _lowered)
