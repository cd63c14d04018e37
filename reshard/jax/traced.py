"""Moves of traced arrays, checked while the caller's line is on the stack; most of them bind the primitive.

source is known or not       `bind_move`: a plan of this package
on no mesh, or a constant    `pin_sharding`: it is made where it is wanted
to a mesh of another type    the move on the array's mesh, then a change of its type, which moves nothing
dims left open, a device     JAX's own `with_sharding_constraint` and `device_put`
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from reshard.errors import LayoutError, MeshError, PlanError
from reshard.jax import placement
from reshard.jax.primitive import bind_move, pin_sharding
from reshard.jax.request import ReshardRequest, lists_devices_anew

_DEVICE_MEMORY = (None, "device")


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
    return result if target.memory_kind in _DEVICE_MEMORY else jax.device_put(result, target)


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
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty and placement.on_context_mesh(request.target):  # The traced program has no mesh yet.
        return pin_sharding(x, request.target)
    if not placement.has_explicit(mesh) and placement.is_explicit(request.target.mesh):
        return _made_explicit(x, request)
    there = request.target.mesh
    other_axes = _axes_text(mesh) != _axes_text(there) and mesh.size == there.size
    if placement.is_explicit(mesh) and placement.is_of_one_type(there) and other_axes:
        return _on_another_mesh(x, request)
    _check_types(x, request)
    if request.source is None and not mesh.empty and dict(mesh.shape) != dict(request.target.mesh.shape):
        return pin_sharding(x, request.target)  # JAX passes the axes of one mesh only to XLA's hook.
    return bind_move(x, request)


def _resolve_inside(x: Any, target: NamedSharding, inside: placement.AnyMesh) -> NamedSharding:
    """The target inside a `shard_map` that is manual over other axes; raises an error if it names a manual axis."""
    target = NamedSharding(inside, target.spec)
    placement.layout_of(target, x.shape, "uint8")
    return target


def _made_explicit(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """A move from auto to explicit axes: as one on auto axes; then its type says where it is."""
    target = request.target
    if request.source is not None and placement.has_explicit(request.source.mesh):
        raise MeshError(
            f"the array of shape {x.shape} is on axes that are not explicit, and the source {request.source.spec} on "
            f"{_axes_text(request.source.mesh)}; give a source on the array's own mesh, or none"
        )
    there = _move_on_mesh(x, replace(request, target=NamedSharding(placement.of_auto_axes(target.mesh), target.spec)))
    return jax.sharding.reshard(there, NamedSharding(target.mesh, target.spec))


def _on_another_mesh(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """A move from an array's explicit mesh to one of other axes or types, as far as its own mesh can express it.

    If the target's axes are explicit, the result's type has them. If they are auto, the type stays as it is: under jit
    the types of arrays are on one mesh.
    """
    target = request.target
    mesh = jax.typeof(x).sharding.mesh
    try:
        here = placement.layout_of(target, x.shape, "uint8").to_jax(mesh)
    except LayoutError:
        if not placement.is_explicit(target.mesh):
            raise MeshError(
                f"the array of shape {x.shape} is on mesh {_axes_text(mesh)}, the target {target.spec} on "
                f"{_axes_text(target.mesh)}; inside jit the type of an array with explicit axes is on its mesh, whose "
                f"axes cannot express the target: name its axes, or give a target on explicit axes"
            ) from None
        there = x  # Only JAX can move it.
    else:
        there = _move_on_mesh(x, replace(request, target=here))
    return jax.sharding.reshard(there, target) if placement.is_explicit(target.mesh) else there


def _check_types(x: jax.Array, request: ReshardRequest) -> None:
    """Raises an error for differing axis types or a wrong source, which JAX would report later, or not at all."""
    meshes = (jax.typeof(x).sharding.mesh, *(s.mesh for s in (request.source, request.target) if s is not None))
    if any(placement.has_explicit(mesh) for mesh in meshes):
        _check_explicit(x, request.source, request.target)
    if request.source is not None and lists_devices_anew(request.source, request.target):
        raise MeshError(
            f"the meshes {dict(request.source.mesh.shape)} and {dict(request.target.mesh.shape)} of the move of shape "
            f"{x.shape} list their devices in different orders; inside jit all arrays have one: move it outside of jit"
        )


def _check_explicit(x: jax.Array, source: NamedSharding | None, target: NamedSharding) -> None:
    typed = jax.typeof(x).sharding
    mesh = typed.mesh
    if mesh.empty:
        raise MeshError(
            f"the array of shape {x.shape} is on no mesh, and the target on {_axes_text(target.mesh)}; inside jit "
            f"explicit axes must be those of the mesh that is set: call it inside jax.set_mesh"
        )
    for what, given in (("target", target), ("source", source)):
        if given is not None and _axes_text(given.mesh) != _axes_text(mesh):
            raise MeshError(
                f"the array of shape {x.shape} is on mesh {_axes_text(mesh)}, the {what} on {_axes_text(given.mesh)}; "
                f"inside jit an array with explicit axes stays on its mesh: name its axes"
            )
    if source is None:
        raise LayoutError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_axes_text(mesh)}, and its sharding over "
            f"axes that are not explicit is not known; give source="
        )
    if placement.restrict_axes(source, AxisType.Explicit, x.ndim).spec != typed.spec:
        raise PlanError(
            f"the array of shape {x.shape} is typed as {typed.spec} on mesh {_axes_text(mesh)}, but the source that is "
            f"given is {source.spec}; the type is right: leave source out, or let it agree on the explicit axes"
        )


def _axes_text(mesh: placement.AnyMesh) -> str:
    return f"{dict(mesh.shape)} of axis types ({', '.join(kind.name for kind in mesh.axis_types)})"
