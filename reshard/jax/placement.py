"""What a caller means by a target: shardings, specs and layouts, made one `NamedSharding` on one mesh."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.sharding import Mesh as JaxMesh

from reshard.errors import LayoutError, MeshError
from reshard.runtime import on_jax
from reshard.types import jax_sharding, shardy
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

AnyMesh = JaxMesh | AbstractMesh
Target = NamedSharding | PartitionSpec | Layout


def resolved(given: object, mesh: AnyMesh | None, what: str) -> NamedSharding:
    """The `NamedSharding` that is meant; `mesh` is the one of the context or of the array, if any.

    Raises `LayoutError` for what is no sharding, and `MeshError` for a spec without a mesh.
    """
    if isinstance(given, NamedSharding):
        return given
    if not isinstance(given, PartitionSpec | Layout):
        raise LayoutError(
            f"the {what} {given!r} is a {type(given).__name__}; give a NamedSharding, a PartitionSpec "
            f"or a reshard.Layout"
        )
    if mesh is None or mesh.empty:
        raise MeshError(
            f"the {what} {given} says no mesh, and none is set; give NamedSharding(mesh, spec), "
            f"or call inside jax.set_mesh"
        )
    return given.to_jax(mesh) if isinstance(given, Layout) else NamedSharding(mesh, given)


def mesh_of(x: Any) -> AnyMesh | None:
    """The mesh that a spec for this array is about: the one that is set, else the array's own."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty:
        return context
    sharding = getattr(x, "sharding", None) if not isinstance(x, Tracer) else jax.typeof(x).sharding
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def region() -> AbstractMesh | None:
    """The mesh inside a `shard_map` that is manual over some of its axes; None outside."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not any(kind == AxisType.Manual for kind in context.axis_types):
        return None
    return context


def known_source(x: Any) -> NamedSharding | None:
    """The sharding that an array has: always known of a concrete one, of a traced one if its axes are explicit."""
    if not isinstance(x, Tracer):
        return x.sharding if isinstance(x.sharding, NamedSharding) else None
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or any(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return None
    return sharding


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
    placed = shardy.place(jax_sharding.read(sharding, len(shape)), mesh)
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
