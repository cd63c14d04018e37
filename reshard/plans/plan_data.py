"""Plans as plain data: the lines of a step in JSON, the checks of what was read, and the names of many arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, cast

from reshard.errors import PlanError, quoted
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.step import Step, StepSpec, checked_seconds
from reshard.types.index_set import Holding
from reshard.types.json_fields import Fields, same_json
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.move import Move
from reshard.types.view import View
from reshard.types.whole import MOST, whole

_MOST_INDENT = 64

FORMAT = 1
"""The format of plans in JSON. A reader of another one cannot tell what the fields mean, so it refuses."""


_MEMORY = ("live_bytes", "peak_bytes")


def checked_indent(indent: object) -> int | None:
    """The spaces by which JSON is indented, None for a single line; raises `PlanError` for anything else."""
    spaces = None if indent is None else whole(indent, most=_MOST_INDENT)
    if spaces is None and indent is not None:
        raise PlanError(f"indent {quoted(indent)}: give a whole number from 0 to {_MOST_INDENT}, or None")
    return spaces


def compare_figures(given: Mapping[str, Any], made: Mapping[str, Any], what: str) -> None:
    """Refuses JSON whose figures differ from those of its steps, or that promises less memory than they take.

    A plan with a view, written when exchanges through one were promised two buffers, keeps its promise, and is read.
    """
    through_view = any("view" in each for each in (made, *made.get("steps", ())))
    for name, value in made.items():
        figure = given.get(name, value)
        if through_view and name in _MEMORY and (promised := whole(figure)) is not None and promised >= value:
            continue
        if name != "steps" and not same_json(figure, value):
            raise PlanError(
                f"the JSON says {name} {quoted(given[name])} of {what}, but its steps make {quoted(value)}; plan "
                f"it again"
            )


def check_format(number: object) -> None:
    """Refuses a format that is not that of this version."""
    if not same_json(number, FORMAT):
        raise PlanError(
            f"this plan in JSON has format {quoted(number)}, and this version of reshard reads format {FORMAT}; read "
            f"it with the version that wrote it, or plan again"
        )


def step_data(step: Step) -> dict[str, Any]:
    """The lines of a `Step`; only one that has a view writes that."""
    through_view = step.kind == "exchange" and step.mode.view is not None
    return {
        "kind": _THROUGH_VIEW if through_view else step.kind,
        "operand": str(step.operand),
        "result": str(step.result),
        "mesh": step.result.mesh.to_dict(),
        "chunk": step.mode.chunk,
        "in_place": step.mode.in_place,
        "parts": step.mode.parts,
        **({"relay": True} if step.mode.relay else {}),
        **({"gathers": True} if step.mode.gathers else {}),
        **({"overlap": True} if step.mode.overlap else {}),
        "received_bytes": step.received_bytes,
        "live_bytes": step.live_bytes,
        "launches": step.launches,
        "seconds": step.seconds,
        **view_data(step.mode.view),
        **({} if step.mode.holding is None else {"beside_held": True}),
        **({"fresh": True} if step.mode.fresh else {}),
    }


_THROUGH_VIEW = "view_exchange"
"""How format 1 calls an exchange through a view."""


def read_step(step: Fields, holding: Holding | None = None) -> tuple[StepSpec, float | None]:
    """What JSON says of a step, its figures left out, and its seconds; `holding` is that of its plan."""
    mode = StepMode(
        step.get("chunk", int, NoneType, default=None),
        step.get("in_place", bool, default=False),
        step.get("parts", int, default=1),
        step.get("relay", bool, default=False),
        read_view(step),
        step.get("overlap", bool, default=False),
        holding if step.get("beside_held", bool, default=False) else None,
        step.get("fresh", bool, default=False),
        step.get("gathers", bool, default=False),
    )
    kind, result = step.get("kind", str), read_layout_field(step, "result", "mesh")
    return StepSpec("exchange" if kind == _THROUGH_VIEW else kind, result, mode), read_seconds(step)


def read_layout_field(fields: Fields, name: str, mesh: str) -> Layout:
    """The layout that a field has, on the mesh that another one has."""
    # Of equal meshes, the one that was read first: layouts on one object are compared without thousands of ids.
    first = _parse_layout("f32[]", Mesh.from_dict(fields.object(mesh))).mesh
    return _parse_layout(fields.get(name, str), first)


# The steps of a plan repeat its target, and those of a file of plans each other's layouts: half the time of reading.
_parse_layout = lru_cache(maxsize=1024)(Layout.parse)


def read_seconds(fields: Fields) -> float | None:
    """The predicted seconds of a plan, a step or a batch, None without a network."""
    value = checked_seconds(fields.get("seconds", float, int, NoneType))
    return None if value is None else float(value)


def view_data(view: View | None) -> dict[str, Any]:
    """The line of a view; none without one."""
    return {} if view is None else {"view": view.to_dict()}


def read_view(fields: Fields) -> View | None:
    """The view of a plan or a step, None where there is none."""
    return None if fields.data.get("view") is None else View.from_dict(fields.object("view"))


# Nested dicts, lists and tuples of moves as a flat dict: the name of an array is the path to it, joined by dots.
#
# {"layers": [{"w": move}, {"w": move}], "head": move}      layers.0.w, layers.1.w, head


MOST_DEPTH = 64
_MOST_ARRAYS = 1 << 17


def flatten_tree(tree: object, pairs: bool = False) -> dict[str, Any]:
    """The leaves by name: pairs of layouts, and whatever is not a dict, list or tuple. With `pairs`, any two things
    that are neither trees nor moves are such a pair.

    Raises `PlanError` for keys that are neither text nor ints, for two leaves of one name, and for what is not a tree.

    >>> from reshard.types import Mesh
    >>> a = Layout.parse("f32[8]", Mesh(x=2))
    >>> list(flatten_tree({"layers": [{"w": (a, a)}, {"w": (a, a)}]}))
    ['layers.0.w', 'layers.1.w']
    """
    if _is_leaf(tree, pairs):
        raise PlanError(f"{quoted(tree)} is not a tree of moves; give a dict of names and (source, target) pairs")
    flat: dict[str, Any] = {}
    for path, leaf in _list_leaves(tree, (), pairs):
        name = ".".join(path)
        if name in flat:
            raise PlanError(f"two arrays of the tree are called {quoted(name)}; give each a name of its own")
        if len(flat) == _MOST_ARRAYS:
            raise PlanError(f"the tree has more than {_MOST_ARRAYS} arrays; give a part of it at a time")
        flat[name] = leaf
    return flat


def _is_leaf(tree: object, pairs: bool) -> bool:
    """Whether it is one array's entry: a pair of layouts, or not a container."""
    if isinstance(tree, tuple | list):
        pair = cast("tuple[object, ...]", tree)
        if len(pair) != 2 or all(isinstance(each, Layout) for each in pair):
            return len(pair) == 2
        return pairs and not any(isinstance(each, tuple | list | Mapping | Move | None) for each in pair)
    return not isinstance(tree, Mapping)


def _list_leaves(tree: object, path: tuple[str, ...], pairs: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    if _is_leaf(tree, pairs):
        yield path, tree
        return
    if len(path) >= MOST_DEPTH:
        raise PlanError(f"the tree is nested more than {MOST_DEPTH} deep at {quoted('.'.join(path))}")
    if isinstance(tree, Mapping):
        for key, below in cast("Mapping[object, object]", tree).items():
            yield from _list_leaves(below, (*path, spell_key(key, path)), pairs)
    else:
        for number, below in enumerate(cast("list[object]", tree)):
            yield from _list_leaves(below, (*path, str(number)), pairs)


def spell_key(key: object, path: Sequence[str]) -> str:
    """The key of a tree as a part of names; raises `PlanError` for what is neither text nor an int."""
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool) and abs(key) <= MOST:
        return str(key)
    raise PlanError(
        f"the key {quoted(key)} at {quoted('.'.join(path) or 'the top')} of the tree: give text, or an int of 64 bits"
    )
