"""One reader for every notation of a layout: ours, JAX's, Shardy's and HLO's.

    f32[{y}8, 16, {x}4]                     ours       mesh
    P('y', None, 'x')                       JAX        mesh, shape, dtype
    [{"y"}, {}, {"x"}]                      Shardy     mesh (unless written inside), shape, dtype
    {devices=[2,1,4]<=[4,2]T(1,0)}          HLO        shape, dtype

On the right, what the text does not say and the caller must.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reshard.errors import LayoutError, MeshError, NotationError
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh

_KINDS = (
    ("HLO", re.compile(r"\s*(?:sharding\s*=\s*)?\{")),
    ("Shardy", re.compile(r"\s*(?:sdy\.sharding\s*=|#sdy\.|<|\[)")),
    ("JAX", re.compile(r"\s*[\w.]*\b(?:P|PS|PartitionSpec)\s*\(")),
    ("reshard", re.compile(r"\s*[A-Za-z_]\w*\s*\[")),
)


def read(
    source: str, mesh: Mesh | None = None, shape: Sequence[int] | None = None, dtype: object | None = None
) -> Layout:
    """Reads a layout in whichever notation it is in; raises `NotationError` that says what is missing.

    A mesh that is given is the mesh of the result, for HLO too: its sharding is then told in that
    mesh's axes, if they can tell it. A shape or dtype that the text says itself must agree.

    >>> str(read("{devices=[2,1,4]<=[4,2]T(1,0)}", Mesh(x=4, y=2), (16, 16, 16), "float32"))
    'f32[{y}8, 16, {x}4]'
    """
    kind = next((name for name, start in _KINDS if start.match(source)), None)
    if kind is None:
        raise NotationError(
            f"cannot tell the notation of {_short(source)!r}; write f32[{{x}}8, 16], P('x', None), "
            f'[{{"x"}}, {{}}] or {{devices=[2,1]<=[2]}}'
        )
    if kind == "reshard":
        return _ours(source, mesh, shape, dtype)
    if shape is None or dtype is None:
        missing = " and ".join(n for n, given in (("shape", shape), ("dtype", dtype)) if given is None)
        raise NotationError(f"{_short(source)!r} is a sharding in {kind} notation, without {missing}; give {missing}")
    if kind == "HLO":
        num_devices = 1 if mesh is None else mesh.size
        found = Layout.from_hlo(source, shape, dtype, num_devices=num_devices)
        return found if mesh is None else _told_on(mesh, found, source)
    if kind == "Shardy":
        return Layout.from_shardy(source, mesh, shape, dtype)
    return Layout.from_jax_text(source, _given(mesh, source, kind), shape, dtype)


def _given(mesh: Mesh | None, source: str, kind: str) -> Mesh:
    if mesh is None:
        raise NotationError(f"{_short(source)!r} is in {kind} notation, which names axes of a mesh; give the mesh")
    return mesh


def _ours(source: str, mesh: Mesh | None, shape: Sequence[int] | None, dtype: object | None) -> Layout:
    found = Layout.parse(source, _given(mesh, source, "reshard"))
    if shape is not None and tuple(shape) != found.shape:
        raise LayoutError(f"{found} has global shape {found.shape}, not {tuple(shape)}; leave shape out")
    if dtype is not None and dtypes.canonical(dtype) != found.dtype:
        raise LayoutError(f"{found} has dtype {found.dtype}, not {dtypes.canonical(dtype)}; leave dtype out")
    return found


def _told_on(mesh: Mesh, layout: Layout, source: str) -> Layout:
    """The same layout in the axes of another mesh of the same devices in the same order."""
    own = layout.mesh
    if own == mesh:
        return layout
    if own.size != mesh.size or own.devices != mesh.devices:
        raise MeshError(
            f"sharding {_short(source)!r} is over the devices {_ids(own)}, mesh {mesh} over {_ids(mesh)}; "
            f"give a mesh of the same devices in the same order, or none"
        )
    dims: list[Dim] = []
    for dim in layout.dims:
        digits: list[Digit] = []
        for digit in dim.digits:
            subs = [None] if digit.axis is None else mesh.sub_axes(own.stride(digit.axis), digit.radix)
            digits += [Digit(digit.radix if sub is None else sub.size, sub) for sub in subs]
        dims.append(Dim(tuple(digits), dim.size))
    partial = [sub for held in layout.partial for sub in mesh.sub_axes(own.stride(held), held.size)]
    return Layout(mesh, tuple(dims), layout.dtype, layout.reduction, tuple(partial))


def _ids(mesh: Mesh) -> str:
    if mesh.device_ids is None:
        return f"0..{mesh.size - 1}"
    return f"[{', '.join(map(str, mesh.device_ids[:8]))}{', ...' if mesh.size > 8 else ''}]"


def _short(source: str) -> str:
    return source if len(source) <= 300 else source[:297] + "..."
