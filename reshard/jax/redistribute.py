"""`redistribute`: moves an array, or a tree of arrays, to another sharding by a plan of this package.

placement           resolves what the caller gave to `NamedSharding`s
eager               moves a concrete array now
primitive           moves a traced array: a JAX primitive, so that every transformation applies to it
partitioner_hook    ... whose source tracing does not know (auto axes under jit): XLA's partitioner provides it
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from reshard.errors import LayoutError, MeshError, PlanError
from reshard.jax import placement
from reshard.jax.eager import move_now, put
from reshard.jax.primitive import bind, pinned
from reshard.jax.request import ReshardRequest, reordered
from reshard.synth import Network
from reshard.synth.planner import bytes_of, check_network
from reshard.types.layout import Layout


def redistribute(
    x: Any,
    sharding: Any,
    *,
    source: Any = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
) -> Any:
    """Moves an array to another sharding, in place of `jax.device_put`, `with_sharding_constraint` and `reshard`.

    `x` is an array or a tree of arrays. `sharding` is a `NamedSharding`, a `PartitionSpec` on the mesh that is set
    (or on the array's own), or a `reshard.Layout`: one for all leaves, or a tree of them whose structure is that of
    `x`, or of its top. `source`, in the same forms, is the sharding of `x` if tracing cannot know it.
    `budget` (bytes, or text such as "64MiB") bounds what lives on each device during the move, source and result
    included; without one, large moves are split into parts, which need little more than source and result. `network`
    is that of `reshard.plan`.
    With `donate`, `x` is deleted once the move is under way.

    It works eagerly, under jit, grad, vmap, scan and remat, on auto and explicit axes, inside `jax.set_mesh`, and
    inside a `shard_map` that is manual over other axes. Arrays that are not sharded yet (numpy arrays, arrays on one
    device) are placed by `jax.device_put`.

    Raises `LayoutError`, `MeshError` or `PlanError` for an invalid source or target, and `BudgetError`, with the
    smallest budget that works, if no plan fits the budget.

    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    >>> rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    >>> x = jax.device_put(np.arange(64.0, dtype="float32").reshape(8, 8), rows)
    >>> y = redistribute(x, columns)
    >>> y.sharding == columns, np.array_equal(y, x)
    (True, True)

    Under jit with auto axes, `source=` tells what tracing cannot know:

    >>> move = jax.jit(lambda v: redistribute(v * 2, columns, source=rows))
    >>> move(x).sharding.is_equivalent_to(columns, 2)
    True
    """
    loaded = Network.load(network) if isinstance(network, str) else network
    check_network(loaded)
    leaves, tree = jax.tree.flatten(x)
    targets = _broadcast(sharding, x, "target")
    sources = [None] * len(leaves) if source is None else _broadcast(source, x, "source")
    options = {"budget": bytes_of(budget), "network": loaded, "donate": donate}
    moved = [_redistribute(leaf, t, s, options) for leaf, t, s in zip(leaves, targets, sources, strict=True)]
    return jax.tree.unflatten(tree, moved)


def _is_sharding(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, jax.sharding.Sharding | PartitionSpec | Layout)


def _broadcast(given: Any, x: Any, what: str) -> list[Any]:
    """One sharding per leaf of `x`, from one sharding for all, or from a tree of them that is a prefix of `x`."""
    if _is_sharding(given):
        return [given] * len(jax.tree.leaves(x))
    try:
        spread = jax.tree.broadcast(given, x, is_leaf=_is_sharding)
    except ValueError as error:
        raise PlanError(
            f"the tree of {what} shardings is not a prefix of the tree of arrays ({error}); give one sharding for all, "
            f"or a tree of them of the same structure"
        ) from None
    shardings: list[Any] = []
    jax.tree.map(lambda leaf, s: shardings.append(s), x, spread)  # pyright: ignore[reportUnknownLambdaType]
    return shardings


def _redistribute(x: Any, sharding: Any, source: Any, options: dict[str, Any]) -> jax.Array:
    """Moves one leaf."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    target = placement.resolve(sharding, x, "target")
    before = None if source is None else placement.resolve(source, x, "source")
    if placement.is_key_array(x):
        return _keys(x, target, before, options)
    if isinstance(x, Tracer):
        return _traced(x, ReshardRequest(target, before or placement.sharding_of(x), **options))
    if placement.is_unsharded(x):
        return put(x, target, options["donate"])
    return move_now(x, ReshardRequest(target, before, **options))


def _keys(x: jax.Array, target: NamedSharding, source: NamedSharding | None, options: dict[str, Any]) -> jax.Array:
    """Moves random keys as the integers that they consist of; these add a last dim, which is never split."""
    moved = _redistribute(jax.random.key_data(x), target, source, options)
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))


def _traced(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """Checks a move while the caller's line is on the stack, and binds the primitive."""
    inside = placement.manual_mesh()
    if inside is not None:
        if request.source is None:
            raise LayoutError(
                f"the array of shape {x.shape} is inside a shard_map that is manual over some axes of mesh "
                f"{dict(inside.shape)}, and the source of its move to {request.target.spec} is not known; give source="
            )
        source = NamedSharding(inside, request.source.spec)
        request = replace(request, target=NamedSharding(inside, request.target.spec), source=source)
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty and placement.on_context_mesh(request.target):  # The traced program has no mesh yet.
        return pinned(x, request.target)
    _check_types(x, request)
    if request.source is None and not mesh.empty and dict(mesh.shape) != dict(request.target.mesh.shape):
        return pinned(x, request.target)  # JAX passes the axes of one mesh only to XLA's hook.
    return bind(x, request)


def _check_types(x: jax.Array, request: ReshardRequest) -> None:
    """Raises an error for differing axis types or a wrong source, which JAX would report later, or not at all."""
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
            f"the array of shape {x.shape} is on no mesh, and the target on {_axes(target.mesh)}; inside jit explicit "
            f"axes must be those of the mesh that is set: call it inside jax.set_mesh"
        )
    for what, given in (("target", target), ("source", source)):
        if given is not None and _axes(given.mesh) != _axes(mesh):
            raise MeshError(
                f"the array of shape {x.shape} is on mesh {_axes(mesh)}, the {what} on {_axes(given.mesh)}; inside jit "
                f"an array with explicit axes stays on its mesh: name its axes"
            )
    if source is None:
        raise LayoutError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_axes(mesh)}, and its sharding over axes "
            f"that are not explicit is not known; give source="
        )
    if placement.restrict(source, AxisType.Explicit, x.ndim).spec != typed.spec:
        raise PlanError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_axes(mesh)}, but the source that is "
            f"given is {source.spec}; the type is right: leave source out, or let it agree on the explicit axes"
        )


def _axes(mesh: placement.AnyMesh) -> str:
    return f"{dict(mesh.shape)} of axis types ({', '.join(kind.name for kind in mesh.axis_types)})"
