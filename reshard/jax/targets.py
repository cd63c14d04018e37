"""`Target`: where an array goes and what becomes of it on the way; and trees of them, one for each leaf of a tree."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from reshard.errors import PlanError
from reshard.types.layout import Layout


@dataclass(frozen=True, eq=False)
class ViewOptions:
    """What a move is beside its sharding: a view, parts, another dtype, and what these need."""

    view: str | None = None
    take: Mapping[Any, Any] | None = None
    into: Mapping[Any, Any] | None = None
    out: jax.Array | None = None
    dtype: Any = None
    scale: Any = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def plain(self) -> bool:
        """Whether the array, its dims and its dtype stay as they are."""
        given = (self.view, self.take, self.into, self.out, self.dtype, self.scale)
        return not self.sizes and all(each is None for each in given)


class Target:
    """A sharding, and the view, parts and dtype of the array on it: the target of one leaf of a tree.

    `redistribute(x, Target(sharding, view=...))` is `redistribute(x, sharding, view=...)`; the arguments are the same.

    >>> import numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from reshard.jax import Target, redistribute
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows = NamedSharding(mesh, PartitionSpec("x"))
    >>> fused = jax.device_put(np.arange(48.0, dtype="float32").reshape(24, 2), rows)
    >>> parts = {
    ...     name: Target(rows, view="(three h) d -> h d", take={"three": at}, three=3)
    ...     for at, name in enumerate(("query", "key", "value"))
    ... }
    >>> moved = redistribute(dict.fromkeys(parts, fused), parts)
    >>> [x.shape for x in moved.values()], float(moved["key"][0, 0])
    ([(8, 2), (8, 2), (8, 2)], 16.0)
    """

    def __init__(
        self,
        sharding: Any,
        *,
        view: str | None = None,
        take: Mapping[Any, Any] | None = None,
        into: Mapping[Any, Any] | None = None,
        out: jax.Array | None = None,
        dtype: Any = None,
        scale: Any = None,
        **sizes: int,
    ) -> None:
        self.sharding = sharding
        self.options = ViewOptions(view, take, into, out, dtype, scale, sizes)


_FORMS = Sharding | PartitionSpec | Layout | jax.Device | Format | jax.memory.Space | Target
_MOST_SHOWN = 4


def is_target(given: object) -> bool:
    """Whether it is a target for one array, rather than a tree of targets."""
    return given is None or isinstance(given, _FORMS)


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
    try:
        each = jax.tree.broadcast(given, arrays, is_leaf=is_target)
    except ValueError:
        raise PlanError(
            f"the tree of {what} shardings is not a prefix of the tree of arrays: "
            f"{_list_differences(given, arrays, what)}; give one sharding for all, or a tree of them of the "
            f"same structure"
        ) from None
    listed: list[Any] = []
    jax.tree.map(lambda _, one: listed.append(one), arrays, each)  # Nodes that are None have no leaf.
    return listed


def _list_differences(given: Any, arrays: Any, what: str) -> str:
    """The leaves that only one of two trees has, by their names."""
    ours, theirs = _leaf_names(arrays), _leaf_names(given)
    known, above = set(theirs), {name[:end] for name in ours for end in range(len(name) + 1)}
    missing = [name for name in ours if not any(name[:end] in known for end in range(len(name) + 1))]
    only = (
        ("the arrays have", missing),
        (f"the {what} shardings have", [name for name in theirs if name not in above]),
    )
    lines = [f"only {who} {', '.join(map('.'.join, names[:_MOST_SHOWN]))}" for who, names in only if names]
    return "; ".join(lines) or "lists, tuples, dicts and other nodes are not in the same places"


def _leaf_names(tree: Any) -> list[tuple[str, ...]]:
    """The keys on the way to each leaf."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_target)
    return [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in leaves]
