"""Nested dicts, lists and tuples of moves as a flat dict: the name of an array is the path to it, joined by dots.

{"layers": [{"w": move}, {"w": move}], "head": move}      layers.0.w, layers.1.w, head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from reshard.errors import PlanError, quoted
from reshard.types.layout import Layout
from reshard.types.whole import MOST

MOST_DEPTH = 64
_MOST_ARRAYS = 1 << 17


def flattened(tree: object) -> dict[str, Any]:
    """The leaves by name: pairs of layouts, and whatever is not a dict, list or tuple.

    Raises `PlanError` for keys that are neither text nor ints, for two leaves of one name, and for what is not a tree.

    >>> from reshard.types import Mesh
    >>> a = Layout.parse("f32[8]", Mesh(x=2))
    >>> list(flattened({"layers": [{"w": (a, a)}, {"w": (a, a)}]}))
    ['layers.0.w', 'layers.1.w']
    """
    if _is_leaf(tree):
        raise PlanError(f"{quoted(tree)} is not a tree of moves; give a dict of names and (source, target) pairs")
    flat: dict[str, Any] = {}
    for path, leaf in _leaves(tree, ()):
        name = ".".join(path)
        if name in flat:
            raise PlanError(f"two arrays of the tree are called {quoted(name)}; give each a name of its own")
        if len(flat) == _MOST_ARRAYS:
            raise PlanError(f"the tree has more than {_MOST_ARRAYS} arrays; give a part of it at a time")
        flat[name] = leaf
    return flat


def _is_leaf(tree: object) -> bool:
    """Whether it is one array's entry: a pair of layouts, or not a container."""
    if isinstance(tree, tuple | list):
        pair = cast("tuple[object, ...]", tree)
        return len(pair) == 2 and all(isinstance(each, Layout) for each in pair)
    return not isinstance(tree, Mapping)


def _leaves(tree: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if _is_leaf(tree):
        yield path, tree
        return
    if len(path) >= MOST_DEPTH:
        raise PlanError(f"the tree is nested more than {MOST_DEPTH} deep at {quoted('.'.join(path))}")
    if isinstance(tree, Mapping):
        for key, below in cast("Mapping[object, object]", tree).items():
            yield from _leaves(below, (*path, key_text(key, path)))
    else:
        for number, below in enumerate(cast("list[object]", tree)):
            yield from _leaves(below, (*path, str(number)))


def key_text(key: object, path: Sequence[str]) -> str:
    """The key of a tree as a part of names; raises `PlanError` for what is neither text nor an int."""
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool) and abs(key) <= MOST:
        return str(key)
    raise PlanError(
        f"the key {quoted(key)} at {quoted('.'.join(path) or 'the top')} of the tree: give text, or an int of 64 bits"
    )
