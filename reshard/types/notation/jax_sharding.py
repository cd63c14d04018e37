"""JAX's `NamedSharding` to a layout's mesh and axes and back; jax itself is not imported.

A sharding is read by its attributes, and one is only made for a jax mesh that is given: whoever has
one has loaded jax.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from reshard.errors import LayoutError, MeshError
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.notation.sharding import RawSharding


def mesh_of(jax_mesh: Any) -> Mesh:
    """The mesh of a `jax.sharding.Mesh` (its device ids) or `AbstractMesh` (numbered by position)."""
    shape: Any = getattr(jax_mesh, "shape", None)
    if not hasattr(shape, "items"):
        raise MeshError(f"{jax_mesh!r} is no jax mesh; give a jax.sharding.Mesh or AbstractMesh")
    devices = getattr(jax_mesh, "devices", None) if type(jax_mesh).__name__ == "Mesh" else None
    ids = None if devices is None else [device.id for device in devices.flat]
    return Mesh({str(name): int(size) for name, size in shape.items()}, device_ids=ids)


def read(sharding: Any, rank: int) -> RawSharding:
    """A `NamedSharding`'s spec as plain data, padded to `rank` dims."""
    spec = getattr(sharding, "spec", None)
    if spec is None or not hasattr(sharding, "mesh"):
        raise LayoutError(
            f"{sharding!r} is a {type(sharding).__name__}, not a NamedSharding; give "
            f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(...))"
        )
    entries = spec.partitions  # A spec with unreduced axes refuses to be iterated.
    if len(entries) > rank:
        raise LayoutError(f"{spec} has {len(entries)} entries for an array of rank {rank}; give at most one per dim")
    unreduced = tuple(sorted(str(axis) for axis in getattr(spec, "unreduced", ())))
    kind = getattr(spec, "unreduced_kind", None)
    dims = tuple(_entry(entry, spec) for entry in entries)
    return RawSharding(dims, unreduced=unreduced, reduction=str(getattr(kind, "name", "sum"))).padded(rank)


def _entry(entry: Any, spec: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, Iterable):
        return tuple(str(axis) for axis in entry)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise LayoutError(f"{spec}: {entry!r} leaves a dim to the compiler; name its axes, or None")


def write(
    mesh: Mesh, dims: Sequence[Sequence[SubAxis]], partial: Sequence[SubAxis], reduction: str | None, jax_mesh: Any
) -> Any:
    """The `NamedSharding` on a jax mesh whose dims are held by these sub-axes of `mesh`."""
    other = mesh_of(jax_mesh)
    if mesh.size != other.size or (mesh.device_ids is not None and mesh.device_ids != other.device_ids):
        raise MeshError(
            f"mesh {mesh!r} of the layout and the jax mesh {other!r} list different devices; give a jax mesh of the "
            f"same devices in the same order"
        )
    spec = partition_spec(mesh, dims, partial, reduction, other)
    return sys.modules["jax"].sharding.NamedSharding(jax_mesh, spec)


def partition_spec(
    mesh: Mesh, dims: Sequence[Sequence[SubAxis]], partial: Sequence[SubAxis], reduction: str | None, axes: Mesh
) -> Any:
    """The `PartitionSpec` on other axes with the same devices by position."""
    jax = sys.modules["jax"]  # Whoever asks has a jax mesh, so there is jax.
    names = [whole_axes(held, mesh, axes) for held in dims]
    entries = [tuple(dim) if len(dim) > 1 else (dim[0] if dim else None) for dim in names]
    extra: dict[str, Any] = {"unreduced": set(whole_axes(partial, mesh, axes))} if partial else {}
    if partial and reduction != "sum":
        extra["unreduced_kind"] = _kind(jax, reduction)
    return jax.sharding.PartitionSpec(*entries, **extra)


def _kind(jax: Any, reduction: str | None) -> Any:
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    found = getattr(kinds, reduction or "sum", None)
    if found is None:
        raise LayoutError(
            f"jax {jax.__version__} has no unreduced arrays of kind {reduction}; finish the reduction first"
        )
    return found


def whole_axes(axes: Iterable[SubAxis], mesh: Mesh, target: Mesh) -> list[str]:
    """The axes of `target` that a dim's sub-axes are, major to minor.

    Raises `LayoutError` where they are only parts of axes.
    """
    found: list[str] = []
    for stride, size in _runs(axes, mesh):
        parts = target.sub_axes(stride, size)
        if any(part.size != target.axes[part.axis] for part in parts):
            told = " ".join(mesh.spell(part) for part in mesh.sub_axes(stride, size))
            raise LayoutError(
                f"{told} of mesh {mesh} is only a part of an axis of mesh {target}; a NamedSharding names whole axes, "
                f"so give a jax mesh over the same devices whose axes are cut there"
            )
        found += [part.axis for part in parts if part.size > 1]
    return found


def _runs(axes: Iterable[SubAxis], mesh: Mesh) -> list[tuple[int, int]]:
    """(stride, size) factors of the positions, those joined of which one goes on where the other ends."""
    found: list[tuple[int, int]] = []
    for axis in axes:
        stride = mesh.stride(axis)
        if found and found[-1][0] == stride * axis.size:
            found[-1] = (stride, found[-1][1] * axis.size)
        else:
            found.append((stride, axis.size))
    return found
