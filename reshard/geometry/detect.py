"""Reads a layout in any notation: ours, JAX's, Shardy's, DTensor's or HLO's.

text                                    notation   the caller gives
f32[{y}8, 16, {x}4]                     ours       mesh
P('y', None, 'x')                       JAX        mesh, shape, dtype
[{"y"}, {}, {"x"}]                      Shardy     mesh (unless the text writes one), shape, dtype
[Shard(2), Shard(0)]                    DTensor    mesh, shape, dtype
{devices=[2,1,4]<=[4,2]T(1,0)}          HLO        shape, dtype
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.errors import LayoutError, MeshError, NotationError, quoted
from reshard.geometry.remesh import remesh
from reshard.types import dtypes
from reshard.types.dims import checked_shape
from reshard.types.layout import Layout, checked_mesh
from reshard.types.mesh import Mesh
from reshard.types.notation import dtensor

_PLACEMENT = r"(?:_?S(?:hard|tridedShard)?\s*\(|R\b|Replicate\b|P(?:artial)?\b|RaggedShard\s*\(|Owned\s*\()"
_KINDS = (
    ("HLO", re.compile(r"\s*(?:sharding\s*=\s*)?\{")),
    ("DTensor", re.compile(rf"\s*[\[(]\s*['\"]?{_PLACEMENT}")),
    ("Shardy", re.compile(r"\s*(?:sdy\.sharding\s*=|#sdy\.|<|\[)")),
    ("JAX", re.compile(r"\s*[\w.]*\b(?:P|PS|PartitionSpec)\s*\(")),
    ("reshard", re.compile(r"\s*[A-Za-z_]\w*\s*\[")),
)


def read(
    source: str, mesh: Mesh | None = None, shape: Sequence[int] | None = None, dtype: object | None = None
) -> Layout:
    """Reads a layout in any of the notations.

    The result is on `mesh` if one is given; an HLO sharding, which is read on a mesh of its own, is respelled in
    that mesh's axes. Raises `NotationError` for text in no known notation and for a missing mesh, shape or dtype,
    `LayoutError` for a shape or dtype that contradicts the text, `MeshError` for a mesh that cannot express it.

    >>> str(read("{devices=[2,1,4]<=[4,2]T(1,0)}", Mesh(x=4, y=2), (16, 16, 16), "float32"))
    'f32[{y}8, 16, {x}4]'
    >>> str(read("P('y', None, 'x')", Mesh(x=4, y=2), (16, 16, 16), "float32"))
    'f32[{y}8, 16, {x}4]'
    >>> str(read("[Shard(2), Shard(0)]", Mesh(x=4, y=2), (16, 16, 16), "float32"))
    'f32[{y}8, 16, {x}4]'
    """
    if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"{quoted(source)} is a {type(source).__name__}, not the text of a layout; give a str")
    kind = next((name for name, start in _KINDS if start.match(source)), None)
    if kind is None:
        raise NotationError(
            f"cannot tell the notation of {quoted(source)}; write f32[{{x}}8, 16], P('x', None), "
            f'[{{"x"}}, {{}}], [Shard(0), Replicate()] or {{devices=[2,1]<=[2]}}'
        )
    if kind == "reshard":
        layout = Layout.parse(source, _require_mesh(mesh, source, "reshard"))
        if shape is not None and checked_shape(shape) != layout.shape:
            raise LayoutError(f"{layout} has global shape {layout.shape}, not {quoted(tuple(shape))}; leave shape out")
        if dtype is not None and dtypes.canonical(dtype) != layout.dtype:
            raise LayoutError(f"{layout} has dtype {layout.dtype}, not {dtypes.canonical(dtype)}; leave dtype out")
        return layout
    if shape is None or dtype is None:
        missing = " and ".join(n for n, given in (("shape", shape), ("dtype", dtype)) if given is None)
        raise NotationError(f"{quoted(source)} is a sharding in {kind} notation, without {missing}; give {missing}")
    if kind == "Shardy":
        return Layout.from_shardy(source, mesh, shape, dtype)
    if kind == "DTensor":
        on = _require_mesh(mesh, source, kind, "has a placement for each axis")
        return Layout.from_dtensor(dtensor.parse_placements(source), on, shape, dtype)
    if kind == "JAX":
        return Layout.from_jax_text(source, _require_mesh(mesh, source, kind), shape, dtype)
    if mesh is None:
        return Layout.from_hlo(source, shape, dtype)
    # HLO names no axes: its sharding is read on a mesh of its own, and respelled.
    layout = Layout.from_hlo(source, shape, dtype, num_devices=checked_mesh(mesh).size)
    on_mesh = remesh(layout, mesh)
    if on_mesh is None:
        raise MeshError(
            f"sharding {quoted(source)} is over the devices {_spell_ids(layout.mesh)}, mesh {mesh} over "
            f"{_spell_ids(mesh)}, whose axes cannot express {layout} on {layout.mesh}; give a mesh of the same devices "
            f"that has these axes or products of them, or none"
        )
    return on_mesh


def _require_mesh(mesh: Mesh | None, source: str, kind: str, needs: str = "names axes") -> Mesh:
    if mesh is None:
        raise NotationError(f"{quoted(source)} is in {kind} notation, which {needs} of a mesh; give the mesh")
    return mesh


def _spell_ids(mesh: Mesh) -> str:
    if mesh.device_ids is None:
        return f"0..{mesh.size - 1}"
    return f"[{', '.join(map(str, mesh.device_ids[:8]))}{', ...' if mesh.size > 8 else ''}]"
