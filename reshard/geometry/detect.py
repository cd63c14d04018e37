"""Reads a layout in any form: text in every notation, or the objects of JAX and torch.

text                                    notation   the caller gives
f32[{y}8, 16, {x}4]                     reshard    mesh
P('y', None, 'x'), or ('y', None, 'x')  JAX        mesh, shape, dtype
[{"y"}, {}, {"x"}]                      Shardy     mesh (unless the text writes one), shape, dtype
[Shard(2), Shard(0)], or S(2), S(0)     DTensor    mesh, shape, dtype
{devices=[2,1,4]<=[4,2]T(1,0)}          HLO        shape, dtype

object                                             the caller gives
Layout, jax.Array, ShapeDtypeStruct, DTensor       nothing
NamedSharding                                      shape, dtype
PartitionSpec, a list of placements or of axes     mesh, shape, dtype

What the two layouts of a move leave out, `as_layouts` takes from each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from reshard.errors import LayoutError, MeshError, NotationError, ReshardError, name_arguments, quoted
from reshard.geometry.remesh import remesh
from reshard.types import dtypes
from reshard.types.dims import checked_shape
from reshard.types.layout import Layout, checked_mesh
from reshard.types.mesh import Mesh, MeshLike
from reshard.types.notation import dtensor

LayoutLike = Any
"""What says a layout; see `as_layout`."""

_PLACEMENT = r"(?:_?S(?:hard|tridedShard)?\s*\(|R\b|Replicate\b|P(?:artial)?\b|RaggedShard\s*\(|Owned\s*\()"
_OWN = re.compile(r"\s*[A-Za-z_]\w*\s*\[")
_PLACED = re.compile(rf"{_PLACEMENT}")
_KINDS = (
    ("HLO", re.compile(r"\s*(?:sharding\s*=\s*)?\{")),
    ("DTensor", re.compile(rf"\s*(?:[\[(]\s*['\"]?{_PLACEMENT}|(?!P\b){_PLACEMENT})")),
    ("JAX", re.compile(r"\s*(?:\[\s*(?:['\"]|None\b|\[\s*['\"])|\(\s*(?:['\"]|None\b|[\[(]\s*['\"]))")),
    ("Shardy", re.compile(r"\s*(?:sdy\.sharding\s*=|#sdy\.|<|\[)")),
    ("JAX", re.compile(r"\s*[\w.]*\b(?:P|PS|PartitionSpec)\s*\(")),
    ("reshard", _OWN),
)


@name_arguments
def as_layout(
    thing: Any, mesh: MeshLike | None = None, shape: Sequence[int] | None = None, dtype: object = None
) -> Layout:
    """The layout that is given: as a `Layout`, as text in any notation, or as what JAX and torch say of an array.

    - A `jax.Array`, a `jax.ShapeDtypeStruct` with a sharding, a torch `DTensor` and a `DistArray` have all of it.
    - A `NamedSharding` needs `shape` and `dtype`.
    - A `PartitionSpec`, a list of its entries, DTensor placements, and text need `mesh`, and `shape` and `dtype`, where
      they do not say them. `mesh` is a `Mesh`, a dict or text of axes and sizes, a jax mesh or torch's DeviceMesh; what
      has devices of its own stays on these.

    Raises `LayoutError` for what says no layout, `NotationError` for text that cannot be read and for what is missing,
    and `MeshError` for a mesh that does not have the axes.

    >>> print(as_layout("f32[{x}4, 8]", {"x": 4}), as_layout(("x", None), "x=4", (16, 8), "float32"))
    f32[{x}4, 8] f32[{x}4, 8]
    >>> print(as_layout(["S(1)"], Mesh(x=4), (16, 8), "float32"))
    f32[16, {x}2]
    """
    if isinstance(thing, str):
        return read(thing, mesh, shape, dtype)
    said = _layout_of_object(thing)
    if said is not None:
        return said
    if not _says_layout(thing):
        advice = "give one, text such as 'f32[{x}4, 8]', a NamedSharding or a PartitionSpec"
        if isinstance(thing, Mesh) or hasattr(thing, "axis_names"):
            advice = "a mesh goes in mesh="
        elif hasattr(thing, "__array__") or hasattr(thing, "sharding"):
            advice = "it has no sharding: give the layout that it has"
        raise LayoutError(f"{quoted(thing)} is a {type(thing).__name__}, not a Layout; {advice}")
    if hasattr(thing, "spec"):
        return Layout.from_jax(thing, shape, dtype)
    needed = (("mesh", mesh), ("shape", shape), ("dtype", dtype))
    missing = " and ".join(name for name, given in needed if given is None)
    if mesh is None or shape is None or missing:
        raise NotationError(f"{quoted(thing)} is a {type(thing).__name__} without {missing}; give {missing}")
    given = checked_mesh(mesh)
    items = cast("list[Any]", thing if isinstance(thing, list | tuple) else ())
    # Text is a placement where the mesh has no axis of its name.
    texts = {each for each in items if isinstance(each, str) and each not in given.axes and _PLACED.match(each)}
    if items and all(_is_placement(each) or (isinstance(each, str) and each in texts) for each in items):
        return Layout.from_dtensor(items, given, shape, dtype)
    return Layout.from_spec(thing, given, shape, dtype)


def _layout_of_object(thing: Any) -> Layout | None:
    """The layout of an object that has all of it; None for any other."""
    if isinstance(thing, Layout):
        return thing
    if isinstance(getattr(thing, "layout", None), Layout):  # DistArray's
        return thing.layout
    if hasattr(thing, "placements") and hasattr(thing, "device_mesh"):
        return Layout.from_dtensor(thing.placements, thing.device_mesh, tuple(thing.shape), thing.dtype)
    sharding = getattr(thing, "sharding", None)
    if sharding is None or not hasattr(thing, "dtype"):
        return None
    if hasattr(sharding, "spec") or len(getattr(sharding, "device_set", ())) != 1:
        return Layout.from_jax(thing)
    # An array that is not sharded is whole on its device.
    (device,) = sharding.device_set
    return Layout.from_spec([], Mesh(device_ids=[device.id]), thing.shape, thing.dtype)


def _says_layout(thing: Any) -> bool:
    """Whether it is a sharding, a spec, or a list of placements or of axes."""
    if hasattr(thing, "partitions") or (hasattr(thing, "spec") and hasattr(thing, "mesh")):
        return True
    if not isinstance(thing, list | tuple):
        return False
    # An entry of a list is a placement, an axis, several of them, or None.
    entry: Any
    for entry in cast("list[Any]", thing):
        axes: list[Any] = [*cast("list[Any]", entry)] if isinstance(entry, list | tuple) else [entry]
        if entry is not None and not (
            _is_placement(cast("object", entry)) or all(isinstance(axis, str) for axis in axes)
        ):
            return False
    return True


def _is_placement(given: object) -> bool:
    return type(given).__name__.lstrip("_") in ("Shard", "StridedShard", "Replicate", "Partial", "RaggedShard", "Owned")


class _End(NamedTuple):
    """An end of a move as it was given, with the mesh, shape and dtype that its caller gives for it."""

    thing: Any
    mesh: MeshLike | None
    shape: Sequence[int] | None
    dtype: object

    @property
    def says_shape(self) -> bool:
        """Whether it has shape and dtype of its own, which are then compared, not taken from the other end."""
        thing = self.thing
        return _OWN.match(thing) is not None if isinstance(thing, str) else _layout_of_object(thing) is not None

    def read_beside(self, other: Layout) -> Layout:
        """The layout on the mesh that it is given or brings, else on that of the array's other layout."""
        end = self
        if not self.says_shape:
            shape, dtype = (other.shape if self.shape is None else self.shape), self.dtype
            end = self._replace(shape=shape, dtype=other.dtype if dtype is None else dtype)
        if self.mesh is not None:
            return as_layout(*end)
        try:
            layout = as_layout(*end)
        except ReshardError:
            return as_layout(*end._replace(mesh=other.mesh))
        # HLO's `{replicated}` reads as one device: the number of devices is not in its text.
        lent = isinstance(self.thing, str) and layout.mesh.size == 1 < other.mesh.size
        return as_layout(*end._replace(mesh=other.mesh)) if lent else layout


def as_layouts(
    source: Any,
    target: Any,
    mesh: MeshLike | None = None,
    target_mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    dtype: object = None,
) -> tuple[Layout, Layout]:
    """The two layouts of a move, each as `as_layout` reads it; what one of them leaves out, the other one says.

    >>> print(*as_layouts("f32[{x}4, 8]", "P(None, 'x')", Mesh(x=4)))
    f32[{x}4, 8] f32[16, {x}2]
    """
    if isinstance(source, Layout) and isinstance(target, Layout):
        return source, target
    before = _End(source, mesh, shape, dtype)
    after = _End(target, mesh if target_mesh is None else target_mesh, shape, dtype)
    # The end that has shape and dtype comes first; where both or none have, the source does.
    turned = after.says_shape and not before.says_shape
    first, second = (after, before) if turned else (before, after)
    if first.mesh is None and isinstance(first.thing, str):  # Text of ours lacks a mesh, which the other end may have.
        own = getattr(getattr(second.thing, "sharding", second.thing), "mesh", None)
        first = first._replace(mesh=getattr(second.thing, "device_mesh", own))
    try:
        one = as_layout(*first)
    except ReshardError as error:
        if first.mesh is not None:
            raise
        try:  # It may lack only a mesh, and the other end may bring one.
            other = as_layout(*second)
        except ReshardError:
            raise error from None
        one = first.read_beside(other)
    two = second.read_beside(one)
    if not first.says_shape and first.mesh is None:
        one = first.read_beside(two)
    return (two, one) if turned else (one, two)


def find_notation(text: object) -> str | None:
    """The notation in which text begins; None for other text, and for what is none."""
    return next((name for name, start in _KINDS if start.match(text)), None) if isinstance(text, str) else None


def read(
    source: str, mesh: MeshLike | None = None, shape: Sequence[int] | None = None, dtype: object | None = None
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
    mesh = None if mesh is None else checked_mesh(mesh)
    kind = find_notation(source)
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
        # A list of axes is a spec without its name.
        source = f"P{source.strip()}" if source.lstrip()[:1] == "(" else source
        source = f"P({source.strip()[1:-1]})" if source.lstrip()[:1] == "[" else source
        return Layout.from_jax_text(source, _require_mesh(mesh, source, kind), shape, dtype)
    if mesh is None:
        return Layout.from_hlo(source, shape, dtype)
    # HLO names no axes: its sharding is read on a mesh of its own, and respelled.
    layout = Layout.from_hlo(source, shape, dtype, num_devices=mesh.size)
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
