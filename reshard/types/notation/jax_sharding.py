"""JAX's `NamedSharding`, read into plain data and made from a layout; this module does not import jax.

    NamedSharding(<jax mesh x=4, y=2>, P('y', None, 'x'))   <->   f32[{y}8, 16, {x}4] on <x=4, y=2>

Reading needs only the attributes of the sharding. Making one needs a jax mesh, and a caller that has a jax
mesh has loaded jax, so `sys.modules` has it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

from reshard.errors import LayoutError, MeshError, NotationError, quoted, shortened
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.notation.sharding import OPS, RawSharding


def mesh_of(jax_mesh: Any) -> Mesh:
    """Converts a `jax.sharding.Mesh`, with its device ids, or an `AbstractMesh`, numbered by position.

    Raises `MeshError` for any other object.
    """
    shape: Any = getattr(jax_mesh, "shape", None)
    if not hasattr(shape, "items") or not hasattr(jax_mesh, "axis_names"):
        raise MeshError(f"{quoted(jax_mesh)} is not a jax mesh; give a jax.sharding.Mesh or AbstractMesh")
    return Mesh(jax_mesh)


def read_sharding(sharding: Any, rank: int) -> RawSharding:
    """Reads the spec of a `NamedSharding` as plain data, padded to `rank` dims; raises `LayoutError` for others."""
    spec = getattr(sharding, "spec", None)
    if not hasattr(spec, "partitions") or not hasattr(sharding, "mesh"):
        raise LayoutError(
            f"{quoted(sharding)} is a {type(sharding).__name__}, not a NamedSharding; give "
            f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(...))"
        )
    return read_spec(spec, rank)


def read_spec(spec: Any, rank: int) -> RawSharding:
    """Reads a `PartitionSpec` as plain data, padded to `rank` dims; raises `LayoutError` for open dims."""
    entries = spec.partitions  # Iterating over a spec with unreduced axes raises.
    if len(entries) > rank:
        raise LayoutError(f"{spec} has {len(entries)} entries for an array of rank {rank}; give at most one per dim")
    dims: list[tuple[str, ...]] = []
    for entry in entries:
        if entry is None or isinstance(entry, str):
            dims.append(() if entry is None else (entry,))
        elif isinstance(entry, Iterable):
            dims.append(tuple(str(axis) for axis in cast("Iterable[object]", entry)))
        else:
            raise LayoutError(f"{spec}: {entry!r} leaves a dim to the compiler; name its axes, or None")
    unreduced = tuple(sorted(str(axis) for axis in getattr(spec, "unreduced", ())))
    kind = getattr(spec, "unreduced_kind", None)
    return RawSharding(tuple(dims), unreduced=unreduced, reduction=str(getattr(kind, "name", "sum"))).padded(rank)


def write_sharding(
    mesh: Mesh, dims: Sequence[Sequence[SubAxis]], partial: Sequence[SubAxis], reduction: str | None, jax_mesh: Any
) -> Any:
    """Makes the `NamedSharding` on `jax_mesh` that splits each dim along these sub-axes of `mesh`.

    Raises `MeshError` for a jax mesh of other devices, `LayoutError` for what a `NamedSharding` cannot express.
    """
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
    """Makes the `PartitionSpec` that names the axes of the mesh `axes`, whose positions are those of `mesh`."""
    jax = sys.modules["jax"]  # Loaded, since the caller has a jax mesh.
    names = [whole_axes(held, mesh, axes) for held in dims]
    entries = [tuple(dim) if len(dim) > 1 else (dim[0] if dim else None) for dim in names]
    extra: dict[str, Any] = {"unreduced": set(whole_axes(partial, mesh, axes))} if partial else {}
    if partial and reduction != "sum":
        kind = getattr(getattr(jax.sharding, "UnreducedKind", None), reduction or "sum", None)
        if kind is None:
            raise LayoutError(
                f"jax {jax.__version__} has no unreduced arrays of kind {reduction}; finish the reduction first"
            )
        extra["unreduced_kind"] = kind
    return jax.sharding.PartitionSpec(*entries, **extra)


def whole_axes(axes: Iterable[SubAxis], mesh: Mesh, target: Mesh) -> list[str]:
    """The axes of `target` that together are these sub-axes of `mesh`, major to minor.

    Raises `LayoutError` where they are only parts of axes.

    >>> flat, grid = Mesh(d=8), Mesh(x=4, y=2)
    >>> whole_axes([flat.sub_axis("d")], flat, grid)
    ['x', 'y']
    """
    # The (stride, size) factors of the positions; a factor that continues the one before it is merged with it.
    runs: list[tuple[int, int]] = []
    for axis in axes:
        stride, size = mesh.stride(axis), axis.size
        if runs and runs[-1][0] == stride * size:
            size *= runs.pop()[1]
        runs.append((stride, size))
    names: list[str] = []
    for stride, size in runs:
        parts = target.sub_axes(stride, size)
        if any(part.size != target.axes[part.axis] for part in parts):
            spelling = " ".join(mesh.spell(part) for part in mesh.sub_axes(stride, size))
            raise LayoutError(
                f"{spelling} of mesh {mesh} is only a part of an axis of mesh {target}; a NamedSharding names whole "
                f"axes, so give a jax mesh over the same devices whose axes are cut there"
            )
        names += [part.axis for part in parts if part.size > 1]
    return names


# JAX's partition specs as text, `P('x', None)`, parsed into plain data and never evaluated.
#
#     spec    = name "(" [entry {"," entry}] {"," keyword} ")"     name: P, PS, PartitionSpec
#     entry   = None | axis | "(" axis {"," axis} ")"              axes major to minor
#     keyword = "unreduced" "=" "{" axis {"," axis} "}" | "unreduced_kind" "=" ("sum" | "max" | "min")
#
# An axis is a string. As an extension of JAX's notation it may be a sub-axis, `'y:(1)2'`.


NAMES = ("P", "PS", "PartitionSpec")


def parse_spec(text: str) -> RawSharding:
    """Reads one spec; raises `NotationError` that names the part it cannot read.

    >>> parse_spec("P(('x', 'y'), None, unreduced={'z'})")[:3]
    ((('x', 'y'), ()), (), ('z',))
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"partition spec {quoted(text)} is not text; give a str")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _fail_spec(text, "it is not a Python expression; write P('x', None)")
    if not isinstance(node, ast.Call) or _last_name(node.func) not in NAMES:
        _fail_spec(text, f"it is not a call of {', '.join(NAMES)}; write P('x', None)")
    dims = tuple(_read_spec_entry(entry, text) for entry in node.args)
    unreduced: tuple[str, ...] = ()
    kind = "sum"
    for keyword in node.keywords:
        match keyword.arg:
            case "unreduced":
                unreduced = _read_axes(keyword.value, text)
            case "unreduced_kind":
                # `sum`, `'sum'`, `UnreducedKind.sum`, or None.
                node = keyword.value
                given = node.value if isinstance(node, ast.Constant) else _last_name(node)
                if given is not None and given not in OPS:
                    _fail_spec(
                        text, f"cannot read unreduced_kind {_show_node(node, text)!r}; use one of {', '.join(OPS)}"
                    )
                kind = "sum" if given is None else str(given)
            case "reduced":
                _fail_spec(
                    text, "reduced axes describe how gradients are summed, not where elements are; leave them out"
                )
            case other:
                _fail_spec(text, f"unknown argument {other or '**'!r}; use unreduced={{'x'}} or unreduced_kind=sum")
    return RawSharding(dims, unreduced=unreduced, reduction=kind)


def _read_spec_entry(node: ast.expr, text: str) -> tuple[str, ...]:
    """The axes of one dim."""
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=str(axis)):
            return (axis,)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_read_axis(part, text) for part in parts)
        case _ if _last_name(node) == "UNCONSTRAINED":
            _fail_spec(text, "UNCONSTRAINED leaves the choice to the compiler; name the axes of that dim, or None")
        case _:
            _fail_spec(
                text,
                f"cannot read {_show_node(node, text)!r}; an entry is None, an axis 'x' or a tuple ('x', 'y'), and "
                f"a shell needs quotes around all of it: \"P('x', None)\"",
            )


def _read_axes(node: ast.expr, text: str) -> tuple[str, ...]:
    """The axes of a set: a set, tuple or list display, or a call of set() or frozenset()."""
    match node:
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[], keywords=[]):
            return ()
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[inner], keywords=[]):
            return _read_axes(inner, text)
        case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_read_axis(part, text) for part in parts)
        case _:
            _fail_spec(text, f"cannot read {_show_node(node, text)!r}; write a set of axes, as in unreduced={{'x'}}")


def _read_axis(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    _fail_spec(text, f"cannot read {_show_node(node, text)!r}; an axis is a string, as in ('x', 'y')")


def _last_name(node: ast.expr) -> str:
    """The last part of a name: `P` for `P` and for `jax.P`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _show_node(node: ast.expr, text: str) -> str:
    return shortened(ast.get_source_segment(text.strip(), node) or "an argument", 80)


def _fail_spec(text: str, why: str) -> NoReturn:
    raise NotationError(f"partition spec {quoted(text)}: {why}")
