"""`Target`: where an array goes and what becomes of it on the way, for the leaves of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


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
