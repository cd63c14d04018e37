"""A sharding as plain data: what every notation is read into, and how it is placed on a mesh.

    text          P(('x', 'y'), None)         in JAX's notation, or any other
    RawSharding   (('x', 'y'), ())            per dim the axes that split it, major to minor, still text
    Placed        ((x=4, y=2), ())            the same axes looked up on the mesh <x=4, y=2>

The split between reading and placing keeps parsers free of meshes: a typo in the text is a
`NotationError` of the parser, an axis that the mesh does not have is a `MeshError` of `place`.
"""

from __future__ import annotations

from typing import NamedTuple

from reshard.errors import MeshError
from reshard.types.mesh import Mesh, SubAxis

NO_TILE = (
    "the whole array is on one device and the others hold nothing, but in a layout every device of the mesh holds "
    "a tile; for an array on that device alone use Layout.from_spec(Mesh(device_ids=[{device}]), shape, dtype, [])"
)
"""Why a sharding on one device out of many is refused, with what to write instead."""

OPS = ("sum", "max", "min")
"""The reductions of unreduced axes that JAX's and XLA's notations can express."""


class RawMesh(NamedTuple):
    """A mesh as written inside a sharding."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] | None


class RawSharding(NamedTuple):
    """A sharding as written, its axes as text: `x`, or `x:(1)2` for a sub-axis."""

    dims: tuple[tuple[str, ...], ...]
    replicated: tuple[str, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduction: str = "sum"
    manual: tuple[str, ...] = ()
    mesh: RawMesh | None = None

    def padded(self, rank: int) -> RawSharding:
        """Appends dims that are not split, up to `rank`.

        >>> RawSharding((("x",),)).padded(3).dims
        (('x',), (), ())
        """
        return self._replace(dims=self.dims + ((),) * (rank - len(self.dims)))


class Placed(NamedTuple):
    """A sharding on a mesh. `idle` axes are named by the sharding (replicated, manual) but hold no digit."""

    mesh: Mesh
    dims: tuple[tuple[SubAxis, ...], ...]
    partial: tuple[SubAxis, ...] = ()
    reduction: str = "sum"
    idle: tuple[SubAxis, ...] = ()


def place(raw: RawSharding, mesh: Mesh | None) -> Placed:
    """Looks up the axes of a sharding on the mesh that it writes itself, else on `mesh`.

    Raises `MeshError` if there is no mesh, if `mesh` differs from the written one, or if it lacks an axis.

    >>> place(RawSharding((("x",), ("y:(1)2",))), Mesh(x=4, y=2)).dims
    ((SubAxis(axis='x', pre=1, size=4),), (SubAxis(axis='y', pre=1, size=2),))
    """
    own = None if raw.mesh is None else Mesh(raw.mesh.axes, device_ids=raw.mesh.device_ids)
    if own is not None and mesh is not None and own != mesh:
        raise MeshError(f"the sharding is on the mesh {own!r} that it writes, not on {mesh!r}; give that one, or none")
    known = mesh or own
    if known is None:
        raise MeshError("the sharding names axes, but no mesh is given; pass the mesh that has them")
    return Placed(
        known,
        tuple(tuple(known.sub_axis(axis) for axis in dim) for dim in raw.dims),
        tuple(known.sub_axis(axis) for axis in raw.unreduced),
        raw.reduction,
        tuple(known.sub_axis(axis) for axis in (*raw.replicated, *raw.manual)),
    )
