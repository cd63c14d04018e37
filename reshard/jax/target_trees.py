"""Trees of targets and sources: one for each leaf of a tree of arrays."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from typing import Any

import jax

from reshard.errors import PlanError
from reshard.jax import placement

_MOST_SHOWN = 4


def spread(given: Any, arrays: Any, what: str) -> list[Any]:
    """What each leaf of `arrays` gets, from one sharding for all or from a tree of them with the structure of the
    arrays, or of its top. `what` says what they are: "target" or "source". Raises `PlanError` for a tree of another
    structure.

    >>> from jax.sharding import PartitionSpec as P
    >>> spread({"a": P("x"), "b": P()}, {"a": [1, 2], "b": 3}, "target")
    [P('x',), P('x',), P()]
    """
    if placement.is_target(given):
        return [given] * len(jax.tree.leaves(arrays))
    try:
        each = jax.tree.broadcast(given, arrays, is_leaf=placement.is_target)
    except ValueError:
        raise PlanError(
            f"the tree of {what} shardings is not a prefix of the tree of arrays: {_differences(given, arrays, what)}; "
            f"give one sharding for all, or a tree of them of the same structure"
        ) from None
    listed: list[Any] = []
    jax.tree.map(lambda _, one: listed.append(one), arrays, each)  # Nodes that are None have no leaf.
    return listed


def _differences(given: Any, arrays: Any, what: str) -> str:
    """The leaves that only one of two trees has, by their names."""
    ours, theirs = _names(arrays), _names(given)
    known, above = set(theirs), {name[:end] for name in ours for end in range(len(name) + 1)}
    missing = [name for name in ours if not any(name[:end] in known for end in range(len(name) + 1))]
    only = (
        ("the arrays have", missing),
        (f"the {what} shardings have", [name for name in theirs if name not in above]),
    )
    lines = [f"only {who} {', '.join(map('.'.join, names[:_MOST_SHOWN]))}" for who, names in only if names]
    return "; ".join(lines) or "lists, tuples, dicts and other nodes are not in the same places"


def _names(tree: Any) -> list[tuple[str, ...]]:
    """The keys on the way to each leaf."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=placement.is_target)
    return [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in leaves]
