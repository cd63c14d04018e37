"""A step run on one part of the tile after another, in a loop."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax import lax

from reshard.lower.program import AllToAll, InParts, Slice
from reshard.lower.to_shard_map.block_writes import (
    Blockwise,
    blockwise,
    exchanged,
    lanes_last,
    put_together,
    written_into,
)
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import laid_out, unfilled
from reshard.types.rules.parts import Cut

Array = jax.Array
Run = Callable[[Array, Sequence[int]], Array]


def run_in_parts(step: InParts, place: MeshPlace, run: Run, tile: Array, shape: Sequence[int]) -> Array:
    """Runs the step part by part. A loop keeps one part in memory at a time; unrolled, XLA moves several at once."""
    order = lanes_last(shape)
    spelling = blockwise(step, shape)
    as_it_is = partial(_loop, step, run, shape=shape)
    if spelling is not None and isinstance(step.each, AllToAll):
        on_tpu = partial(_block_loop, step, step.each, spelling, place, shape=shape)
        return lax.platform_dependent(tile, tpu=on_tpu, default=as_it_is)
    if isinstance(step.each, Slice) or order == tuple(range(len(shape))):
        return as_it_is(tile)
    return lax.platform_dependent(tile, tpu=partial(as_it_is, order=order), default=as_it_is)


def _loop(step: InParts, run: Run, tile: Array, shape: Sequence[int], order: Sequence[int] | None = None) -> Array:
    """The result of all parts, its dims kept in this order while the loop runs."""
    order = order or range(len(shape))
    part_shape = [*shape[: step.put.axis], step.put.outer * step.put.inner, *shape[step.put.axis + 1 :]]
    put = step.put._replace(axis=list(order).index(step.put.axis))

    def one(number: Array, filled: Array) -> Array:
        part = run(_own_part(step, tile, number), part_shape)
        return laid_out(_with_part(put, filled, part.transpose(order), number))

    filled = lax.fori_loop(0, step.take.parts, one, unfilled([shape[dim] for dim in order], tile.dtype))
    return filled.transpose(np.argsort(order))


def _block_loop(
    step: InParts, each: AllToAll, spelling: Blockwise, place: MeshPlace, tile: Array, shape: Sequence[int]
) -> Array:
    """The result of all parts of an all-to-all, block by block."""
    carried, into = [shape[dim] for dim in spelling.carried], spelling.into
    put = step.put._replace(axis=spelling.carried.index(step.put.axis))

    def one(number: Array, filled: Array) -> Array:
        blocks = exchanged(each, spelling, place.anew(), _own_part(step, tile, number))
        if into is not None:
            return laid_out(written_into(into, filled, blocks, [number]))
        return laid_out(_with_part(put, filled, put_together(each, spelling, blocks), number))

    start = unfilled(carried if into is None else into.shape, tile.dtype)
    filled = lax.fori_loop(0, step.take.parts, one, start)
    return filled.reshape(carried).transpose(np.argsort(spelling.carried))


def _own_part(step: InParts, tile: Array, number: Array) -> Array:
    """A part of the operand, cut out before anything is done with it: else TPU may give the tile the part's layout."""
    return lax.optimization_barrier(_part(step.take, tile, number))


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
