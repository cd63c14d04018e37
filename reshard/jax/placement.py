"""What a caller means by a target: shardings, specs and layouts, made one `NamedSharding` on one mesh."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.sharding import Mesh as JaxMesh

from reshard.errors import LayoutError, MeshError, about_sharding
from reshard.runtime import on_jax
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.notation import jax_sharding
from reshard.types.notation.sharding import place

AnyMesh = JaxMesh | AbstractMesh
Target = NamedSharding | PartitionSpec | Layout
NO_MESH = AbstractMesh((), ())


def resolved(given: object, x: Any, what: str) -> NamedSharding:
    """The `NamedSharding` that is meant for an array.

    Raises `LayoutError` for what is no sharding or does not fit the array, and `MeshError` for a spec without a mesh
    or of axes that it does not have.
    """
    sharding = _on_a_mesh(given, mesh_of(x), what)
    if isinstance(given, Layout):
        _check_array(given, x, what)
    layout(sharding, x.shape, "uint32" if is_keys(x) else x.dtype.name)
    return sharding


def _on_a_mesh(given: object, mesh: AnyMesh | None, what: str) -> NamedSharding:
    if isinstance(given, NamedSharding):
        return given
    if not isinstance(given, PartitionSpec | Layout):
        raise LayoutError(
            f"the {what} {given!r} is a {type(given).__name__}; give a NamedSharding, a PartitionSpec or a "
            f"reshard.Layout"
        )
    if mesh is None or mesh.empty:
        raise MeshError(
            f"the {what} {given} says no mesh, and none is set; give NamedSharding(mesh, spec), or call inside "
            f"jax.set_mesh"
        )
    if isinstance(given, Layout):
        return given.to_jax(mesh)
    try:
        return NamedSharding(mesh, given)
    except ValueError as error:
        raise MeshError(f"the {what} {given} on mesh {dict(mesh.shape)}: {error}; name axes of that mesh") from None


def _check_array(given: Layout, x: Any, what: str) -> None:
    if given.shape != x.shape or given.dtype != x.dtype.name:
        raise LayoutError(
            f"the {what} {given} is of an array of shape {given.shape} and dtype {given.dtype}, and this one has "
            f"{x.shape} and {x.dtype.name}; give a layout of this array"
        )


def mesh_of(x: Any) -> AnyMesh | None:
    """The mesh that a spec for this array is about: the one that is set, else the array's own."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context if isinstance(x, Tracer) or tracing() else jax.sharding.get_mesh()
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def tracing() -> bool:
    """Whether this is inside of a transformation, where constants are not put anywhere yet."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def region() -> AbstractMesh | None:
    """The mesh inside a `shard_map` that is manual over some of its axes; None outside."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not any(kind == AxisType.Manual for kind in context.axis_types):
        return None
    return context


def on_own_mesh() -> AbstractContextManager[None]:
    """For a move, which is on its own meshes, whichever mesh is set: to JAX, no other is allowed beside that one."""
    return nullcontext() if region() is not None else jax.sharding.use_abstract_mesh(NO_MESH)


def known_source(x: Any) -> NamedSharding | None:
    """The sharding that an array has: always known of a concrete one, of a traced one if its axes are explicit."""
    if not isinstance(x, Tracer):
        sharding = getattr(x, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) else None
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or any(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return None
    return sharding


def of_context(sharding: NamedSharding) -> bool:
    """Whether a sharding is on the mesh that is set, or on one that is only abstract, which waits to be."""
    return not isinstance(sharding.mesh, JaxMesh) or sharding.mesh.abstract_mesh == jax.sharding.get_abstract_mesh()


def has_explicit(mesh: AnyMesh) -> bool:
    """Whether types say how arrays are sharded over some axes of a mesh."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def over(kind: AxisType, sharding: NamedSharding, rank: int) -> NamedSharding:
    """A sharding as far as it is over axes of one kind, an entry per dim; over explicit axes, what a type says."""
    axes = {name for name, its in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True) if its == kind}
    spec = sharding.spec
    given = (entry if isinstance(entry, tuple) else (entry,) for entry in spec.partitions)
    entries = [tuple(name for name in names if name in axes) or None for names in given]
    entries += [None] * (rank - len(entries))
    sums = {"unreduced": spec.unreduced & axes, "reduced": spec.reduced & axes}
    return NamedSharding(sharding.mesh, PartitionSpec(*entries, **sums), memory_kind=sharding.memory_kind)


def is_keys(x: Any) -> bool:
    """Whether these are random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def on_one_device(x: Any) -> bool:
    """Whether this is not sharded yet: an array of one device, or of the host."""
    return not isinstance(x, jax.Array) or isinstance(x.sharding, SingleDeviceSharding)


@lru_cache(maxsize=4096)
def layout(sharding: NamedSharding, shape: tuple[int, ...], dtype: str, *, ids: bool = False) -> Layout:
    """The layout of an array so sharded, devices by position, or with `ids` by their ids.

    Inside a `shard_map` that is manual over some axes, over the others.
    """
    if ids:
        return Layout.from_jax(sharding, shape, dtype)
    return layout_on(on_jax.free_axes(sharding.mesh), sharding, shape, dtype)


def layout_on(mesh: Mesh, sharding: NamedSharding, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout on a mesh of this package with the sharding's axes."""
    with about_sharding(f"{sharding.spec} on {mesh}", shape):
        placed = place(jax_sharding.read(sharding, len(shape)), mesh)
        return Layout.tiled(placed.mesh, shape, dtype, placed.dims, placed.partial, placed.reduction)


def device_order(mesh: AnyMesh) -> tuple[int, ...] | None:
    """The ids of a mesh's devices by position, None for one without devices."""
    return tuple(device.id for device in mesh.devices.flat) if isinstance(mesh, JaxMesh) else None


def platform(mesh: AnyMesh) -> str | None:
    """What the devices of a mesh are: `cpu`, `gpu`, `tpu`; None where it is not known."""
    if isinstance(mesh, JaxMesh):
        return str(mesh.devices.flat[0].platform)
    kind = getattr(getattr(mesh, "abstract_device", None), "platform", None)
    return None if kind is None else str(kind)
