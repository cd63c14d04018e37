"""What callers give as a target or source, for one array or for each leaf of a tree: read as one `NamedSharding`.

Target, Part               what becomes of an array, or of several that fill one
spread_targets, read_goals  a tree of that for a tree of arrays, of the same structure or of another
named_targets              such a tree of another structure, by a table of names
resolve_sharding           a sharding, a spec or a layout as a `NamedSharding` on one mesh, checked against the array
layout_of                  a `NamedSharding` as a `Layout`
the rest                   what JAX says of meshes and arrays: traced or not, explicit or auto, where and how many
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.sharding import Mesh as JaxMesh

from reshard.errors import LayoutError, MeshError, PlanError, about_sharding, did_you_mean, quoted
from reshard.geometry.detect import as_layout, find_notation
from reshard.runtime import on_jax
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.notation import jax_sharding
from reshard.types.notation.sharding import place_sharding
from reshard.types.view import View
from reshard.types.whole import read_items

if TYPE_CHECKING:
    from reshard.names import NamedView, Table

AnyMesh = JaxMesh | AbstractMesh
NO_MESH = AbstractMesh((), ())
NO_DEVICES = JaxMesh(np.empty((), dtype=object), ())
_LAYOUTS = NamedSharding | PartitionSpec | Layout
_DEEPEST = 200


@dataclass(frozen=True, eq=False)
class ViewOptions:
    """What a move is beside its sharding: a view, parts, another dtype, and what these need."""

    view: str | View | None = None
    take: Mapping[Any, Any] | None = None
    into: Mapping[Any, Any] | None = None
    out: jax.Array | None = None
    dtype: Any = None
    scale: Any = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    shape: tuple[int, ...] | None = None
    """The shape of the result, where a pattern does not say it."""

    @property
    def plain(self) -> bool:
        """Whether the array, its dims and its dtype stay as they are."""
        given = (self.view, self.take, self.into, self.out, self.dtype, self.scale)
        return not self.sizes and all(each is None for each in given)

    @property
    def fills(self) -> bool:
        """Whether the array fills a part of the result."""
        return bool(self.into) or (isinstance(self.view, View) and self.view.into)


class Part:
    """The array of a tree that fills a part of a `Target`: its name, and where it goes.

    The name is the path to the array, joined by dots. The arguments are those of `redistribute`; `scale` is that of the
    cast of this part.

    >>> Part("attn.q", into={0: slice(0, 4096)})
    Part('attn.q', into={0: slice(0, 4096, None)})
    """

    def __init__(
        self,
        source: str,
        *,
        view: str | View | None = None,
        take: Mapping[Any, Any] | None = None,
        into: Mapping[Any, Any] | None = None,
        scale: Any = None,
        **sizes: int,
    ) -> None:
        self.source = _checked_name(source)
        self.options = ViewOptions(view, take, into, None, None, scale, sizes)

    def __repr__(self) -> str:
        each = ("view", "take", "into", "scale")
        given = {name: getattr(self.options, name) for name in each} | {**self.options.sizes}
        more = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        return f"Part({self.source!r}{more})"


class Target:
    """A sharding, and the view, parts and dtype of the array on it: one leaf of a tree of targets.

    `redistribute(x, Target(sharding, view=...))` is `redistribute(x, sharding, view=...)`; the arguments are the same.

    >>> import numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from reshard.jax import Part, Target, redistribute
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows = NamedSharding(mesh, PartitionSpec("x"))
    >>> fused = jax.device_put(np.arange(48.0, dtype="float32").reshape(24, 2), rows)

    With `source`, the name of an array, or `parts`, several of them, a tree of targets has a structure of its own. The
    name is the path to the array in the tree of arrays, joined by dots; a leaf that names none reads the array at its
    own path.

    >>> split = {"view": "(three h) d -> h d", "three": 3}
    >>> layer = {name: Target(rows, source="qkv", take={"three": at}, **split) for at, name in enumerate("qkv")}
    >>> moved = redistribute({"qkv": fused}, {"attn": layer})
    >>> [x.shape for x in moved["attn"].values()], float(moved["attn"]["k"][0, 0])
    ([(8, 2), (8, 2), (8, 2)], 16.0)

    `parts` fill an array of this `shape`, all of it, each element once: parts that overlap or leave something out are
    refused, with the element. Or they fill an array that is given as `out`, whose other elements stay. Arrays that no
    leaf reads stay where they are; with `donate`, one that several leaves read is deleted after the last of them.

    >>> parts = [Part(f"attn.{name}", into={0: slice(8 * at, 8 * at + 8)}) for at, name in enumerate("qkv")]
    >>> again = redistribute(moved, {"qkv": Target(rows, shape=(24, 2), parts=parts)})
    >>> np.array_equal(again["qkv"], fused)
    True
    """

    def __init__(
        self,
        sharding: Any,
        *,
        source: str | None = None,
        parts: Sequence[Part] | None = None,
        shape: Sequence[int] | None = None,
        view: str | View | None = None,
        take: Mapping[Any, Any] | None = None,
        into: Mapping[Any, Any] | None = None,
        out: jax.Array | None = None,
        dtype: Any = None,
        scale: Any = None,
        **sizes: int,
    ) -> None:
        whole = None if shape is None else read_items(shape)
        if shape is not None and whole is None:
            raise PlanError(f"shape {quoted(shape)} of a target: give one size for each dim, such as (6144, 1024)")
        options = ViewOptions(view, take, into, out, dtype, scale, sizes, whole)
        self.sharding = sharding
        self.options = options
        self.source = None if source is None else _checked_name(source)
        self.parts = _checked_parts(parts, source, options)

    @property
    def named(self) -> bool:
        """Whether it names the arrays that it reads."""
        return self.source is not None or bool(self.parts)


def _checked_name(source: object) -> str:
    if isinstance(source, str):
        return source
    raise PlanError(
        f"source {quoted(source)} is a {type(source).__name__}; give the name of an array: the path to it in the tree "
        f'of arrays, joined by dots, such as "layers.0.q"'
    )


def _checked_parts(parts: object, source: object, given: ViewOptions) -> tuple[Part, ...]:
    if parts is None:
        return ()
    listed = tuple(cast("Sequence[object]", parts)) if isinstance(parts, list | tuple) else ()
    wrong = next((part for part in listed if not isinstance(part, Part)), None)
    if not listed or wrong is not None:
        what = quoted(parts) if wrong is None else quoted(wrong)
        raise PlanError(
            f"parts: {what}; give a list of reshard.jax.Part(name, into=...), one for each array that fills it"
        )
    own = {name: getattr(given, name) for name in ("view", "take", "into", "scale")}
    own |= {"source": source, **given.sizes}
    twice = next((name for name, value in own.items() if value is not None), None)
    if twice is not None:
        raise PlanError(f"{twice} {quoted(own[twice])} beside parts: give it to each Part, since parts differ in it")
    return cast("tuple[Part, ...]", listed)


_FORMS = Sharding | PartitionSpec | Layout | jax.Device | Format | jax.memory.Space | Target


def is_target(given: object) -> bool:
    """Whether it is a target for one array, rather than a tree of targets."""
    return given is None or isinstance(given, _FORMS) or find_notation(given) is not None


def spread_targets(given: Any, arrays: Any, what: str) -> list[Any]:
    """What each leaf of `arrays` gets, from one sharding for all or from a tree of them with the structure of the
    arrays, or of its top. `what` says what they are: "target" or "source". Raises `PlanError` for a tree of another
    structure.

    >>> from jax.sharding import PartitionSpec as P
    >>> spread_targets({"a": P("x"), "b": P()}, {"a": [1, 2], "b": 3}, "target")
    [P('x',), P('x',), P()]
    """
    if is_target(given):
        return [given] * len(jax.tree.leaves(arrays))
    check_tree(given, f"the tree of {what} shardings")
    if any(isinstance(each, str) and not find_notation(each) for each in jax.tree.leaves(given)):
        raise PlanError(
            f"the {what} shardings {quoted(given)} have names of axes in tuples, lists or text; give a NamedSharding, "
            f"or jax.sharding.PartitionSpec('x', None)"
        )
    try:
        each = jax.tree.broadcast(given, arrays, is_leaf=is_target)
    except Exception:  # JAX quotes what does not fit, by the caller's code.
        # The leaves that only one of the trees has, by the keys on the way to them.
        ours, theirs = (
            [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in leaves]
            for leaves in (jax.tree.leaves_with_path(tree, is_leaf=is_target) for tree in (arrays, given))
        )
        tops = [{name[:end] for end in range(len(name) + 1)} for name in ours]
        above = set[tuple[str, ...]]().union(*tops)
        only = (
            ("the arrays have", [name for name, its in zip(ours, tops, strict=True) if not its & set(theirs)]),
            (f"the {what} shardings have", [name for name in theirs if name not in above]),
        )
        lines = [
            f"only {who} {', '.join('.'.join(each) or 'one that is in no tree' for each in names[:4])}"
            for who, names in only
            if names
        ]
        differences = "; ".join(lines) or "lists, tuples, dicts and other nodes are not in the same places"
        raise PlanError(
            f"the tree of {what} shardings is not a prefix of the tree of arrays: {differences}; give one sharding for "
            f"all, or a tree of them of the same structure"
        ) from None
    listed: list[Any] = []
    jax.tree.map(lambda _, one: listed.append(one), arrays, each)  # Nodes that are None have no leaf.
    return listed


class ArrayGoal(NamedTuple):
    """One array of the result: its name if targets have names, its target, and the numbers of the leaves it reads."""

    name: str
    target: Any
    reads: tuple[int, ...]


def name_leaves(tree: Any, is_leaf: Any = None) -> list[str]:
    """The names of the leaves of a tree: the paths to them, joined by dots."""
    listed = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in listed]


def read_goals(given: Any, arrays: Any) -> tuple[list[ArrayGoal], Any]:
    """The arrays that a target for all leaves, or a tree of targets, asks for, and their structure.

    Goals have names where targets name arrays. Raises `PlanError` for a name that no array has, or several, and for a
    tree without names that is of another structure.
    """
    check_tree(given, "the tree of target shardings")
    if not any(isinstance(each, Target) and each.named for each in jax.tree.leaves(given, is_leaf=is_target)):
        targets = spread_targets(given, arrays, "target")
        return [ArrayGoal("", target, (at,)) for at, target in enumerate(targets)], jax.tree.structure(arrays)
    numbers: dict[str, list[int]] = {}
    for at, name in enumerate(name_leaves(arrays)):
        numbers.setdefault(name, []).append(at)

    def find_array(name: str, leaf: str, reads: str) -> int:
        found = numbers.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise PlanError(
                f"the target {leaf!r} {reads}, which is the name of {len(found)} arrays; rename one of them"
            )
        below = [each for each in numbers if each.startswith(f"{name}.")] if name else []
        near = below[:4] or get_close_matches(name, numbers, 4, 0.5) or [*numbers][:4]
        listed = ", ".join(map(repr, near)) or "none at all"
        raise PlanError(
            f"the target {leaf!r} {reads}, and there is no such array; there are {listed}; name an array by the path "
            f"to it, joined by dots{'; an array that is not in a tree has the empty path' if near == [''] else ''}"
        )

    goals: list[ArrayGoal] = []
    listed, structure = jax.tree.flatten(given, is_leaf=is_target)
    for leaf, target in zip(name_leaves(given, is_target), listed, strict=True):
        if isinstance(target, Target) and target.named:
            names = [part.source for part in target.parts] or [target.source or ""]
            reads = [(name, f"reads {name!r}") for name in names]
        else:
            reads = [(leaf, "names no source, so it reads the array of its own name")]
        goals.append(ArrayGoal(leaf, target, tuple(find_array(name, leaf, text) for name, text in reads)))
    return goals, structure


def named_targets(
    table: Table,
    arrays: Any,
    shardings: Any,
    *,
    dtype: Any = None,
    out: Mapping[str, jax.Array] | None = None,
    **sizes: int,
) -> dict[str, Target]:
    """What a table of names (`reshard.names`) makes of a tree of arrays: a `Target` for each of its target names, with
    the arrays that fill it, as `redistribute` takes them.

    `shardings` is a dict with one for each target name, a function of a name and a global shape, or one for all;
    `dtype` a dict of those that become another, or one for all. `out` has the arrays of which the table fills a part
    only. `sizes` are the table's. Raises `PlanError` for a table that does not fit the arrays, and for names in a dict
    that no array fills.

    >>> import numpy as np, reshard.names
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from reshard.jax import named_targets, redistribute
    >>> rows = NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), PartitionSpec("x"))
    >>> table = reshard.names.read('''
    ... [[rule]]
    ... source = "layers.{l}.{gate,up}"
    ... target = "layers.{l}.gate_up"
    ... view = "i m -> (two i) m"
    ... sizes = { two = { gate = 1, up = 1 } }
    ... ''')
    >>> layer = {name: jax.device_put(np.ones((8, 4), "float32"), rows) for name in ("gate", "up")}
    >>> fused = redistribute({"layers": [layer]}, named_targets(table, {"layers": [layer]}, rows))
    >>> {name: x.shape for name, x in fused.items()}
    {'layers.0.gate_up': (16, 4)}
    """
    shapes = dict(zip(name_leaves(arrays), map(np.shape, jax.tree.leaves(arrays)), strict=True))
    parts: dict[str, list[NamedView]] = {}
    for each in table.resolve(shapes, **sizes):
        parts.setdefault(each.target, []).append(each)
    given: dict[str, Mapping[str, Any]] = {}
    for what, named in (("shardings", shardings), ("dtype", dtype), ("out", out)):
        if isinstance(named, Mapping):
            given[what] = cast("Mapping[str, Any]", named)
            wrong = next((name for name in given[what] if name not in parts), None)
            if wrong is not None:
                raise PlanError(f"{what} names {quoted(wrong)}, which no array fills{did_you_mean(wrong, parts)}")
    lacks = next((name for name in parts if name not in given["shardings"]), None) if "shardings" in given else None
    if lacks is not None:
        raise PlanError(f"{lacks!r} is filled and has no sharding{did_you_mean(lacks, given['shardings'])}; give one")
    targets: dict[str, Target] = {}
    for name, views in parts.items():
        shape = views[0].view.target_shape
        sharding = given["shardings"][name] if "shardings" in given else shardings
        if callable(shardings) and not is_target(shardings):
            sharding = shardings(name, shape)
        cast_to = given["dtype"].get(name) if "dtype" in given else dtype
        filled = given["out"].get(name) if "out" in given else None
        if len(views) == 1 and not views[0].view.into:
            view = None if views[0].view.plain else views[0].view
            targets[name] = Target(sharding, source=views[0].source, shape=shape, view=view, dtype=cast_to, out=filled)
            continue
        parts_of = [Part(each.source, view=each.view) for each in views]
        targets[name] = Target(sharding, parts=parts_of, shape=shape, dtype=cast_to, out=filled)
    return targets


def unwrap_target(target: Any, x: Any) -> Any:
    """The sharding of a target; raises `PlanError` if it leaves the array as it is and gives the shape of another."""
    if not isinstance(target, Target):
        return target
    shape = target.options.shape
    if target.options.plain and shape not in (None, np.shape(x)):
        raise PlanError(
            f"the target has shape {shape}, the array that it reads {np.shape(x)}; give a view, or no shape"
        )
    return target.sharding


def check_tree(given: Any, what: str) -> None:
    """Raises `PlanError` for a tree that contains itself, on which JAX would recurse until the stack is full."""
    level: list[Any] = [given]
    for _ in range(_DEEPEST):  # Each node once a level, so that one that holds itself twice does not double.
        nodes = {id(node): node for node in level if isinstance(node, list | tuple | dict)}
        if not nodes:
            return
        level = [child for node in nodes.values() for child in (node.values() if isinstance(node, dict) else node)]
    raise PlanError(f"{what} contains itself, or has more than {_DEEPEST} levels; give a finite tree")


def resolve_sharding(given: object, x: Any, what: str) -> NamedSharding:
    """The `NamedSharding` for an array, or for its type, that the caller gave as `what`, "target" or "source".

    Raises `LayoutError` if it is not a sharding or does not fit the array, and `MeshError` for a spec without a mesh
    or with axes that the mesh does not have.
    """
    if not x.shape and len(getattr(getattr(given, "spec", given), "partitions", ())) and not isinstance(x, jax.Array):
        raise LayoutError(
            f"the {what} {given} splits dims, and a number has none; give a list of numbers as one array, "
            f"np.array(numbers): as it is, it is a tree of them"
        )
    sharding = named_sharding(given, x, what)
    if isinstance(given, Layout) and (given.shape != x.shape or given.dtype != x.dtype.name):
        raise LayoutError(
            f"the {what} {given} is for an array of shape {given.shape} and dtype {given.dtype}, but this array has "
            f"{x.shape} and {x.dtype.name}; give a layout of this array"
        )
    layout_of(sharding, x.shape, "uint32" if is_key_dtype(x.dtype) else x.dtype.name)  # It raises what does not fit.
    return sharding


def leaves_open(given: object) -> bool:
    """Whether a target leaves dims to the compiler."""
    spec = given.spec if isinstance(given, NamedSharding) else given
    return isinstance(spec, PartitionSpec) and PartitionSpec.UNCONSTRAINED in spec.partitions


def has_layout(given: object) -> bool:
    """Whether a target has a layout that a plan can lead to; the others (a device, a memory) are left to JAX."""
    return isinstance(given, _LAYOUTS | str) or not is_target(given)


def one_device(given: object) -> Any:
    """The device that a target names, if it is one device in its own memory."""
    if isinstance(given, SingleDeviceSharding):
        (device,) = given.device_set
        own = given.memory_kind in (None, device.default_memory().kind)
        return device if own else None
    return given if isinstance(given, jax.Device) else None


def is_spread(x: Any) -> bool:
    """Whether it is a concrete array of numbers on a mesh of several devices."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or is_key_dtype(x.dtype):
        return False
    return isinstance(x.sharding, NamedSharding) and len(x.sharding.device_set) > 1


def whole_on(device: Any, memory_kind: str | None = None) -> NamedSharding:
    """The sharding of an array that is whole on one device."""
    return NamedSharding(JaxMesh(np.array([device]), ("device",)), PartitionSpec(), memory_kind=memory_kind)


def place_alone(x: Any) -> Any:
    """An array of one device as one that is sharded over that device alone, whose layout is known; others as they are.

    It is the same memory. An array of the host is put on a CPU device first.
    """
    if isinstance(x, np.ndarray):
        with suppress(RuntimeError):  # There may be no such platform.
            x = jax.device_put(x, jax.local_devices(backend="cpu")[0])
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not is_unsharded(x) or is_key_dtype(x.dtype):
        return x
    (device,) = x.devices()
    alone = whole_on(device, x.sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(x.shape, alone, [x], dtype=x.dtype)


def check_not_deleted(arrays: Any) -> None:
    """Raises `PlanError` if some array of a tree has been deleted."""
    alone = isinstance(arrays, jax.Array)
    if not alone:
        check_tree(arrays, "the tree of arrays")
    for x in (arrays,) if alone else jax.tree.leaves(arrays):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise PlanError(
                f"the array of shape {x.shape} and dtype {x.dtype} has been deleted: by a call that it was donated to, "
                f"or by its delete(); use the result of that call, or do not donate it"
            ) from None


def named_sharding(given: object, x: Any, what: str) -> NamedSharding:
    """The `NamedSharding` that the caller gave, not compared with the array."""
    if isinstance(given, NamedSharding):
        return given
    # A spec is on the mesh of `jax.set_mesh` or of `with mesh:`, else on the array's own.
    context, entered = jax.sharding.get_abstract_mesh(), NO_DEVICES
    with suppress(ImportError):  # JAX has no public name for the mesh of `with mesh:`.
        from jax._src.mesh import thread_resources  # pyright: ignore[reportPrivateImportUsage]

        entered = thread_resources.env.physical_mesh
    own: Any = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    mesh: Any = getattr(own, "mesh", None)
    typed = mesh is not None and has_explicit(mesh)
    if not context.empty:
        mesh = context if isinstance(x, Tracer) or is_tracing() else jax.sharding.get_mesh()
    elif not entered.empty:
        mesh = entered
    if not isinstance(given, PartitionSpec | Layout | str):
        swapped = "; write redistribute(x, sharding)" if hasattr(given, "__array__") else ""
        raise LayoutError(
            f"the {what} {quoted(given)} is a {type(given).__name__}; give a NamedSharding, a PartitionSpec or a "
            f"reshard.Layout{swapped}"
        )
    if mesh is None or mesh.empty:
        raise MeshError(
            f"the {what} {given} names no mesh, and none is set; give NamedSharding(mesh, spec), or call inside "
            f"jax.set_mesh"
        )
    if isinstance(given, str):
        given = as_layout(given, mesh, x.shape, "uint32" if is_key_dtype(x.dtype) else x.dtype.name)
    if isinstance(given, Layout):
        return given.to_jax(mesh)
    try:
        sharding = NamedSharding(mesh, given)
        # The types of arrays on explicit axes have an entry for each dim, and so has what `jax.sharding.reshard` makes:
        # a shorter spec would be another one for jit, which compiles again for it.
        short = typed and len(given.partitions) < x.ndim and has_explicit(mesh)
        return sharding.update(spec=fill_spec(given, x.ndim)) if short else sharding
    except Exception as error:  # An axis that occurs twice is no ValueError, but one of jax's own.
        raise MeshError(
            f"the {what} {given} on mesh {dict(mesh.shape)}: {error}; name axes of that mesh, each once"
        ) from None


def is_tracing() -> bool:
    """Whether a transformation is being traced, so that constants are not placed on devices yet."""
    try:
        jax.sharding.get_mesh()
    except ValueError:
        return True
    return False


def manual_mesh() -> AbstractMesh | None:
    """The context mesh inside a `shard_map` that is manual over some of its axes; None outside."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or not any(kind == AxisType.Manual for kind in context.axis_types):
        return None
    return context


def without_context_mesh() -> AbstractContextManager[None]:
    """A context for tracing a move on its own meshes, because JAX allows no other mesh beside the one that is set."""
    return nullcontext() if manual_mesh() is not None else jax.sharding.use_abstract_mesh(NO_MESH)


def without_mesh() -> AbstractContextManager[None]:
    """A context for programs on other devices than those of the mesh that is set, outside of traces."""
    return nullcontext() if jax.sharding.get_mesh().empty else jax.set_mesh(NO_DEVICES)


def without_transfer_guard() -> AbstractContextManager[None]:
    """A context in which the host's memory may be read and its arrays used, since what it does is a move between
    devices for the caller; JAX's own context takes 100 us, so it is entered only where there is a guard.
    """
    guard = getattr(jax.config, "jax_transfer_guard_host_to_device", None)
    return nullcontext() if guard in (None, "allow") else jax.transfer_guard("allow")


def sharding_of(x: Any) -> NamedSharding | None:
    """The sharding of an array; None for a traced array whose mesh axes are not all explicit: it is unknown then.

    Derivatives and batches that are taken outside of jit trace concrete arrays, whose shardings are known.
    """
    if not isinstance(x, Tracer):
        sharding = getattr(x, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) else None
    tracer: Any = x
    if hasattr(tracer, "primal"):
        return sharding_of(tracer.primal)
    if hasattr(tracer, "batch_dim"):
        batch, at = sharding_of(tracer.val), tracer.batch_dim
        if batch is not None and at is not None:
            entries = fill_spec(batch.spec, x.ndim + 1).partitions
            batch = batch.update(spec=batch.spec.update(partitions=(*entries[:at], *entries[at + 1 :])))
        return batch
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or any(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return None
    return sharding


def has_explicit(mesh: AnyMesh) -> bool:
    """Whether some axes of a mesh are explicit: the types of arrays include their sharding over these."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def of_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """The mesh with auto axes."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, JaxMesh):
        return JaxMesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=kinds)


def restrict_axes(sharding: NamedSharding, kind: AxisType, rank: int) -> NamedSharding:
    """A sharding restricted to axes of one kind, with an entry per dim.

    For example, P(("x", "y")) with explicit x and auto y is P("x") over explicit axes: the part that a type has.
    """
    axes = {name for name, its in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True) if its == kind}
    return sharding.update(spec=fill_spec(on_jax.keep_axes(sharding.spec, axes), rank))


def fill_spec(spec: PartitionSpec, rank: int) -> PartitionSpec:
    """The spec with an entry for each dim."""
    return spec.update(partitions=(*spec.partitions, *[None] * (rank - len(spec.partitions))))


def add_leading_dim(sharding: NamedSharding, held: Any) -> NamedSharding:
    """The sharding of an array with one more dim in front, split over the axes `held`."""
    return sharding.update(spec=sharding.spec.update(partitions=(held, *sharding.spec.partitions)))


@lru_cache(maxsize=256)
def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def is_unsharded(x: Any) -> bool:
    """Whether an array is on the host or on one device."""
    return not isinstance(x, jax.Array) or isinstance(x.sharding, SingleDeviceSharding)


@lru_cache(maxsize=4096)
def layout_of(
    sharding: NamedSharding,
    shape: tuple[int, ...],
    dtype: str,
    *,
    ids: bool = False,
    numbers: tuple[int, ...] | None = None,
) -> Layout:
    """The layout of an array with this sharding; devices are numbered by position, by `numbers`, or by their ids.

    Inside a `shard_map` that is manual over some axes, the layout is over the other axes.
    """
    if ids:
        return Layout.from_jax(sharding, shape, dtype)
    mesh = on_jax.list_free_axes(sharding.mesh)
    if numbers is not None:
        mesh = Mesh(mesh.axes, device_ids=numbers)
    with about_sharding(f"{sharding.spec} on {mesh}", shape):
        placed = place_sharding(jax_sharding.read_sharding(sharding, len(shape)), mesh)
        return Layout.tiled(placed.mesh, shape, dtype, placed.dims, placed.partial, placed.reduction)


def devices_of(mesh: AnyMesh) -> list[Any]:
    """The devices of a mesh by position; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, JaxMesh) else []


def platform_of(mesh: AnyMesh) -> str | None:
    """The platform of a mesh's devices, `cpu`, `gpu` or `tpu`; None if it is unknown."""
    if isinstance(mesh, JaxMesh):
        return str(mesh.devices.flat[0].platform)
    kind = getattr(getattr(mesh, "abstract_device", None), "platform", None)
    return None if kind is None else str(kind)


def local_shards(x: jax.Array) -> list[jax.Array]:
    """The shards of an array on this process's devices."""
    return [shard.data for shard in x.addressable_shards]
