"""Slab after slab of a tile, in a loop."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.program import Slabs
from reshard.types.slabs import Cut

Array = jax.Array


def slabs(step: Slabs, run: Callable[[Array, Sequence[int]], Array], tile: Array, shape: Sequence[int]) -> Array:
    """A loop, so that XLA keeps one slab at a time: unrolled, it moves several at once."""
    slab_shape = [*shape[: step.put.axis], step.put.outer * step.put.inner, *shape[step.put.axis + 1 :]]

    def one(number: Array, filled: Array) -> Array:
        part = run(_slab(step.take, tile, number), slab_shape)
        return _with_slab(step.put, filled, part, number)

    return lax.fori_loop(0, step.take.slabs, one, jnp.zeros(tuple(shape), tile.dtype))


def _slab(cut: Cut, tile: Array, number: Array) -> Array:
    if cut.outer == 1:
        return lax.dynamic_slice_in_dim(tile, number * cut.inner, cut.inner, cut.axis)
    spread = tile.reshape(_spread(cut, tile.shape, cut.slabs))
    part = lax.dynamic_slice_in_dim(spread, number, 1, cut.axis + 1)
    return part.reshape(*tile.shape[: cut.axis], cut.outer * cut.inner, *tile.shape[cut.axis + 1 :])


def _with_slab(cut: Cut, tile: Array, part: Array, number: Array) -> Array:
    if cut.outer == 1:
        return lax.dynamic_update_slice_in_dim(tile, part, number * cut.inner, cut.axis)
    spread = tile.reshape(_spread(cut, tile.shape, cut.slabs))
    part = part.reshape(_spread(cut, tile.shape, 1))
    return lax.dynamic_update_slice_in_dim(spread, part, number, cut.axis + 1).reshape(tile.shape)


def _spread(cut: Cut, shape: Sequence[int], count: int) -> tuple[int, ...]:
    return (*shape[: cut.axis], cut.outer, count, cut.inner, *shape[cut.axis + 1 :])
