"""Part after part of a tile, in a loop."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.program import InParts, Slice
from reshard.types.rules.parts import Cut

Array = jax.Array


Run = Callable[[Array, Sequence[int]], Array]
LANES = 128
"""Elements to which a TPU pads the minor dim of an array in memory."""


def run_in_parts(step: InParts, run: Run, tile: Array, shape: Sequence[int]) -> Array:
    """A loop, so that XLA keeps one part at a time: unrolled, it moves several at once."""
    order = _lanes_last(shape)
    if isinstance(step.each, Slice) or order == tuple(range(len(shape))):
        return _loop(step, run, tile, shape)
    as_it_is = partial(_loop, step, run, shape=shape)
    return lax.platform_dependent(tile, tpu=partial(as_it_is, order=order), default=as_it_is)


def _lanes_last(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims of a loop's result as a TPU should keep them: what a loop carries is laid out dim by dim, and a
    narrow minor dim padded, to twice the bytes of the tile and more. A result that is not carried is not.
    """
    dims = range(len(shape))
    minor = next((dim for dim in reversed(dims) if shape[dim] % LANES == 0), len(shape) - 1)
    return (*(dim for dim in dims if dim != minor), minor)


def _loop(step: InParts, run: Run, tile: Array, shape: Sequence[int], order: Sequence[int] | None = None) -> Array:
    """All parts, in a result whose dims are kept in this order while the loop runs."""
    order = order or range(len(shape))
    part_shape = [*shape[: step.put.axis], step.put.outer * step.put.inner, *shape[step.put.axis + 1 :]]
    put = step.put._replace(axis=list(order).index(step.put.axis))

    def one(number: Array, filled: Array) -> Array:
        part = lax.optimization_barrier(_part(step.take, tile, number))  # Else TPU may lay the tile out as the part.
        part = run(part, part_shape)
        return _with_part(put, filled, part.transpose(order), number)

    filled = lax.fori_loop(0, step.take.parts, one, jnp.zeros([shape[dim] for dim in order], tile.dtype))
    return filled.transpose(np.argsort(order))


def _part(cut: Cut, tile: Array, number: Array) -> Array:
    if cut.outer == 1:
        return lax.dynamic_slice_in_dim(tile, number * cut.inner, cut.inner, cut.axis)
    spread = tile.reshape(_spread(cut, tile.shape, cut.parts))
    part = lax.dynamic_slice_in_dim(spread, number, 1, cut.axis + 1)
    return part.reshape(*tile.shape[: cut.axis], cut.outer * cut.inner, *tile.shape[cut.axis + 1 :])


def _with_part(cut: Cut, tile: Array, part: Array, number: Array) -> Array:
    if cut.outer == 1:
        return lax.dynamic_update_slice_in_dim(tile, part, number * cut.inner, cut.axis)
    spread = tile.reshape(_spread(cut, tile.shape, cut.parts))
    part = part.reshape(_spread(cut, tile.shape, 1))
    return lax.dynamic_update_slice_in_dim(spread, part, number, cut.axis + 1).reshape(tile.shape)


def _spread(cut: Cut, shape: Sequence[int], count: int) -> tuple[int, ...]:
    return (*shape[: cut.axis], cut.outer, count, cut.inner, *shape[cut.axis + 1 :])
