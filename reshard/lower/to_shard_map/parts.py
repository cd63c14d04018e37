"""A step run on one part of the tile after another, in a loop."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax import lax

from reshard.lower.program import InParts, Slice
from reshard.lower.to_shard_map.tiles import laid_out, unfilled
from reshard.types.rules.parts import Cut

Array = jax.Array
Run = Callable[[Array, Sequence[int]], Array]
LANES = 128
"""A TPU pads the minor dim of an array in memory to a multiple of this many elements."""


def run_in_parts(step: InParts, run: Run, tile: Array, shape: Sequence[int]) -> Array:
    """Runs the step part by part. A loop keeps one part in memory at a time; unrolled, XLA moves several at once."""
    order = _lanes_last(shape)
    if isinstance(step.each, Slice) or order == tuple(range(len(shape))):
        return _loop(step, run, tile, shape)
    as_it_is = partial(_loop, step, run, shape=shape)
    return lax.platform_dependent(tile, tpu=partial(as_it_is, order=order), default=as_it_is)


def _lanes_last(shape: Sequence[int]) -> tuple[int, ...]:
    """The order of dims in which a TPU should carry a loop's result: one with full lanes last, if there is one.

    A TPU lays out a loop's carry dim by dim and pads a narrow minor dim, to twice the bytes of the tile and more.
    Results that no loop carries are not padded.
    """
    dims = range(len(shape))
    minor = next((dim for dim in reversed(dims) if shape[dim] % LANES == 0), len(shape) - 1)
    return (*(dim for dim in dims if dim != minor), minor)


def _loop(step: InParts, run: Run, tile: Array, shape: Sequence[int], order: Sequence[int] | None = None) -> Array:
    """The result of all parts, its dims kept in this order while the loop runs."""
    order = order or range(len(shape))
    part_shape = [*shape[: step.put.axis], step.put.outer * step.put.inner, *shape[step.put.axis + 1 :]]
    put = step.put._replace(axis=list(order).index(step.put.axis))

    def one(number: Array, filled: Array) -> Array:
        part = lax.optimization_barrier(
            _part(step.take, tile, number)
        )  # Without it TPU may give the tile the part's layout.
        part = run(part, part_shape)
        return laid_out(_with_part(put, filled, part.transpose(order), number))

    filled = lax.fori_loop(0, step.take.parts, one, unfilled([shape[dim] for dim in order], tile.dtype))
    return filled.transpose(np.argsort(order))


def _part(cut: Cut, tile: Array, number: Array) -> Array:
    if cut.outer == 1:
        return lax.dynamic_slice_in_dim(tile, number * cut.inner, cut.inner, cut.axis, allow_negative_indices=False)
    spread = tile.reshape(_spread(cut, tile.shape, cut.parts))
    part = lax.dynamic_slice_in_dim(spread, number, 1, cut.axis + 1, allow_negative_indices=False)
    return part.reshape(*tile.shape[: cut.axis], cut.outer * cut.inner, *tile.shape[cut.axis + 1 :])


def _with_part(cut: Cut, tile: Array, part: Array, number: Array) -> Array:
    if cut.outer == 1:
        return lax.dynamic_update_slice_in_dim(tile, part, number * cut.inner, cut.axis, allow_negative_indices=False)
    spread = tile.reshape(_spread(cut, tile.shape, cut.parts))
    part = part.reshape(_spread(cut, tile.shape, 1))
    filled = lax.dynamic_update_slice_in_dim(spread, part, number, cut.axis + 1, allow_negative_indices=False)
    return filled.reshape(tile.shape)


def _spread(cut: Cut, shape: Sequence[int], count: int) -> tuple[int, ...]:
    return (*shape[: cut.axis], cut.outer, count, cut.inner, *shape[cut.axis + 1 :])
