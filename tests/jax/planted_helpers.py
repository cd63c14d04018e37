"""A helper of another module than the program that calls it: two functions, one of which picks the sharding."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def _apply(mesh, x, spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def shard_images(mesh, x, over):
    """Splits images over the batch or over channels."""
    if over == "batch":
        return _apply(mesh, x, P("batch", None, None, None))
    return _apply(mesh, x, P(None, None, None, "batch"))
