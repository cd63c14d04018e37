"""Steps run on one part of the tile after another, in a loop; several share one where `lower.part_loops` says so."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange_order import in_order
from reshard.lower.program import (
    AllGather,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Plain,
    ReduceScatter,
    Slice,
    part_of,
)
from reshard.lower.to_shard_map.block_writes import (
    Blockwise,
    LanePairs,
    arrived,
    blockwise,
    lane_pairs,
    message_order,
    put_together,
    sliced,
    written_into,
)
from reshard.lower.to_shard_map.collectives import gathered_dim, scattered, to_all, unscattered
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import blocks_of, closed, laid_out, resized, unfilled
from reshard.lower.to_shard_map.tpu_layout import memory_order
from reshard.plans.rules.parts import Cut, Part
from reshard.plans.step import Step

Array = jax.Array
Shape = Sequence[int]
Run = Callable[[Plain, MeshPlace, Array, Shape], Array]
"""Runs an instruction on a part; the shape is that of the part after it."""


@dataclass(frozen=True)
class PartLoop:
    """Steps that share a loop, each with the shape of the tile after it.

    A loop keeps one part in memory at a time; unrolled, XLA moves several at once.
    """

    steps: Sequence[InParts]
    shapes: Sequence[Shape]
    place: MeshPlace
    run: Run

    def on(self, tile: Array) -> Array:
        """The tile after all steps."""
        shape, last = self.shapes[-1], self.steps[-1]
        parts = phases(last.each, self.place, _part_shape(last.put, shape)) if last.overlap else None
        dtype = tile.dtype.name
        order = memory_order(shape, dtype)
        if parts is not None:
            return self._in_order(partial(self._overlapped, parts), order, tile)
        pairs = lane_pairs(last, shape, dtype)
        if pairs is not None:
            return lax.platform_dependent(tile, tpu=partial(self.by_pairs, pairs), default=self.by_parts)
        spelling = blockwise(last, shape, dtype)
        if spelling is not None:
            return lax.platform_dependent(tile, tpu=partial(self.by_blocks, spelling), default=self.by_parts)
        message = message_order(self.steps[-1].each, order)
        if message is not None:
            on_tpu = partial(self.by_parts, order=order, message=message)
            return lax.platform_dependent(tile, tpu=on_tpu, default=self.by_parts)
        return self._in_order(self.by_parts, order, tile)

    def _in_order(self, loop: Callable[..., Array], order: tuple[int, ...], tile: Array) -> Array:
        """The result of a loop that keeps its dims in this order on a TPU."""
        if order == tuple(range(len(order))):
            return loop(tile)
        return lax.platform_dependent(tile, tpu=partial(loop, order=order), default=loop)

    def by_parts(self, tile: Array, order: Sequence[int] | None = None, message: Sequence[int] | None = None) -> Array:
        """The result of all parts, its dims kept in this order while the loop runs, and in that of `message` where an
        exchange moves them in the last step."""
        shape, put = self.shapes[-1], self.steps[-1].put
        order = order or range(len(shape))
        place_of = put._replace(axis=list(order).index(put.axis))

        def one(number: Array, filled: Array) -> Array:
            part = self._last(self._after(len(self.steps) - 1, tile, number), message)
            return laid_out(_with_part(place_of, filled, part.transpose(order), number))

        filled = lax.fori_loop(0, put.parts, one, unfilled([shape[dim] for dim in order], tile.dtype))
        return filled.transpose(np.argsort(order))

    def by_blocks(self, spelling: Blockwise, tile: Array) -> Array:
        """The result of all parts; each block that arrives in the last step is written by itself."""
        last, into = self.steps[-1], spelling.into
        carried = [self.shapes[-1][dim] for dim in spelling.carried]
        put = last.put._replace(axis=spelling.carried.index(last.put.axis))

        def one(number: Array, filled: Array) -> Array:
            part = self._after(len(self.steps) - 1, tile, number)
            blocks = arrived(spelling, self.place.anew(), part)
            if into is not None:
                return laid_out(written_into(into, filled, blocks, [number]))
            return laid_out(_with_part(put, filled, put_together(spelling, blocks), number))

        start = unfilled(carried if into is None else into.shape, tile.dtype)
        filled = lax.fori_loop(0, put.parts, one, start)
        return filled.reshape(carried).transpose(np.argsort(spelling.carried))

    def by_pairs(self, pairs: LanePairs, tile: Array) -> Array:
        """The result of all parts, whose rows travel in pairs in the last step."""

        def one(number: Array, filled: Array) -> Array:
            part = self._after(len(self.steps) - 1, tile, number)
            return pairs.written_into(filled, pairs.arrived(self.place.anew(), part), number)

        filled = lax.fori_loop(0, pairs.put.parts, one, unfilled(pairs.opened(self.shapes[-1]), tile.dtype))
        carried = filled.reshape([self.shapes[-1][dim] for dim in pairs.carried])
        return carried.transpose(np.argsort(pairs.carried))

    def _overlapped(self, collective: Phases, tile: Array, order: Sequence[int] | None = None) -> Array:
        """The result of all parts, each written while the next one is on its way, dims in this order meanwhile."""
        shape, put = self.shapes[-1], self.steps[-1].put
        order = order or range(len(shape))
        place_of = put._replace(axis=list(order).index(put.axis))

        def packed(number: Number) -> Array:
            return collective.pack(self._after(len(self.steps) - 1, tile, jnp.asarray(number, jnp.int32)))

        def written(filled: Array, arrived: Array, number: Number) -> Array:
            part = collective.unpack(arrived).transpose(order)
            return laid_out(_with_part(place_of, filled, part, jnp.asarray(number, jnp.int32)))

        start = unfilled([shape[dim] for dim in order], tile.dtype)
        return overlapped(put.parts, start, packed, collective.send, written).transpose(np.argsort(order))

    def _after(self, count: int, tile: Array, number: Array) -> Array:
        """A part of the tile after the first `count` steps."""
        first, shape = self.steps[0], _part_shape(self.steps[0].put, self.shapes[0])
        part = None
        if isinstance(first.each, Slice) and len(self.steps) > 1:
            part = sliced(first.each, first.take, self.place.anew(), tile, number)
        done = part is not None
        part = resized(part, shape) if part is not None else _part(first.take, tile, number)
        if not _reads_little(self.steps[0].each, part, self.shapes[0]):
            part = _cut_out(part)
        for step, after in list(zip(self.steps[:count], self.shapes, strict=False))[done:]:
            part = self.run(step.each, self.place.anew(), part, _part_shape(step.put, after))
        return part

    def _last(self, part: Array, message: Sequence[int] | None) -> Array:
        """A part of the tile after the last step."""
        step, place, shape = self.steps[-1].each, self.place.anew(), _part_shape(self.steps[-1].put, self.shapes[-1])
        if message is None or not isinstance(step, Exchange):
            return self.run(step, place, part, shape)
        moved = self.run(in_order(step, message), place, part.transpose(message), [shape[dim] for dim in message])
        if tuple(message) != memory_order(self.shapes[-1], part.dtype.name):
            moved = laid_out(moved)  # Once all have arrived, they are transposed at once.
        return moved.transpose(np.argsort(message))


def _reads_little(step: Plain, part: Array, shape: Shape) -> bool:
    """Whether an exchange reads at most half of a part, whose minor dim on a TPU stays minor in a tile of this shape.

    All is read of a part that is cut out first.
    """
    dtype = part.dtype.name
    if not isinstance(step, Exchange) or memory_order(part.shape, dtype)[-1] != memory_order(shape, dtype)[-1]:
        return False
    read = Counter[int]()
    for transfer in itertools.chain(step.local, *step.rounds):
        read[transfer.sender] += transfer.elements
    return 2 * max(read.values(), default=0) <= part.size


def _part_shape(put: Cut, shape: Shape) -> list[int]:
    return [*shape[: put.axis], put.outer * put.inner, *shape[put.axis + 1 :]]


def _cut_out(part: Array) -> Array:
    """The part, on a TPU cut out before anything is done with it: otherwise XLA may give the tile the part's layout."""

    def as_it_is(part: Array) -> Array:
        return part

    return lax.platform_dependent(part, tpu=lax.optimization_barrier, default=as_it_is)


def _part(cut: Cut, tile: Array, number: Array) -> Array:
    """A part of a tile, cut out in the tile's order of dims."""
    order = memory_order(tile.shape, tile.dtype.name)
    if cut.outer == 1:
        part = lax.dynamic_slice_in_dim(tile, number * cut.inner, cut.inner, cut.axis, allow_negative_indices=False)
        return laid_out(part, order)
    spread = tile.reshape(_spread(cut, tile.shape, cut.parts))
    part = lax.dynamic_slice_in_dim(spread, number, 1, cut.axis + 1, allow_negative_indices=False)
    digits = (range(dim, dim + 3) if dim == cut.axis else [dim + 2 * (dim > cut.axis)] for dim in order)
    part = laid_out(part, [axis for each in digits for axis in each])
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


# Which steps in parts share a loop: those that follow each other, the parts of each being those of the next.
#
#   mesh <x=4, y=2>, f32[{x}{y}8, 3, 5] -> f32[{y}{x}8, 3, 5] -> f32[{y}32, 3, 5]     a permute and a gather, in 2 parts
#
#     part 0   rows 0-3 of the tile   permuted, gathered, and written to rows 0-3, 8-11, ... of the result
#     part 1   rows 4-7               rows 4-7, 12-15, ...
#
# The tile between the two is never whole. Parts in place of each other share no loop: they lie in one buffer.


def joined(instructions: Sequence[Instruction]) -> list[range]:
    """The numbers of all instructions, those that share a loop together."""
    return _runs([_follows(before, after) for before, after in pairwise(instructions)], len(instructions))


def _follows(before: Instruction, after: Instruction) -> bool:
    if not isinstance(before, InParts) or not isinstance(after, InParts) or before.in_place or after.in_place:
        return False
    return before.put == after.take


def loops(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    """All steps, those that share a loop together.

    >>> from reshard.types import Layout, Mesh
    >>> from reshard.plans.rules.cost import StepMode
    >>> texts = ("f32[{x}{y}8, 3, 5]", "f32[{y}{x}8, 3, 5]", "f32[{y}32, 3, 5]")
    >>> ends = [Layout.parse(text, Mesh(x=4, y=2)) for text in texts]
    >>> two = [Step("permute", *ends[:2], StepMode(parts=2)), Step("all_gather", *ends[1:], StepMode(parts=2))]
    >>> [len(loop) for loop in loops(two)]
    [2]
    """
    parts = [None if step.mode.in_place else part_of(step) for step in steps]
    runs = _runs([share_loop(before, after) for before, after in pairwise(parts)], len(steps))
    return [tuple(steps[at] for at in run) for run in runs]


def share_loop(before: Part | None, after: Part | None) -> bool:
    """Whether the parts of a step are those of the next."""
    return before is not None and after is not None and before.put == after.take


def _runs(joins: Sequence[bool], count: int) -> list[range]:
    """All numbers up to a count; number n and n + 1 are together if entry n says so."""
    runs: list[range] = []
    for at in range(count):
        runs.append(range(runs.pop().start if at and joins[at - 1] else at, at + 1))
    return runs


# Parts on their way while others are written: what a GPU runs beside a collective.
#
#     sent       part 1            part 2            part 3            ...
#     beside     part 0 written    part 1 written    part 2 written
#
# A turn of the loop does two parts. With one, the part that the loop carries to the next turn would have to take the
# place of the one before it, which is still being written, so XLA would copy it. With two, each takes the other's
# place. At most two parts of what is sent and two of what arrives are in memory.


Number = Array | int


class Phases(NamedTuple):
    """A collective in three: what is sent, the collective alone, and the tile that what arrives makes up."""

    pack: Callable[[Array], Array]
    send: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


def phases(step: Plain, place: MeshPlace, shape: Sequence[int]) -> Phases | None:
    """The phases of a collective after which a tile has this shape; None for what is not one collective.

    >>> phases(Permute(()), MeshPlace((0,), {}), (4,)).unpack(1)
    1
    """
    of = _PHASES.get(type(step))
    return None if of is None else of(step, place, shape)


def overlapped(
    count: int,
    start: Array,
    packed: Callable[[Number], Array],
    send: Callable[[Array], Array],
    written: Callable[[Array, Array, Number], Array],
) -> Array:
    """`start` with all of `count` parts `written` by number, each while the next one is on its way.

    `packed` is what is sent of a part.
    """

    def one(filled: Array, arrived: Array, following: Array, number: Number) -> tuple[Array, Array]:
        # The part before this one is written before the next one is sent, into its memory.
        following, filled = lax.optimization_barrier((following, filled))
        return written(filled, arrived, number), send(following)

    def two(turn: Array, parts: tuple[Array, Array]) -> tuple[Array, Array]:
        number = 2 * turn
        filled, arrived = one(*parts, packed(number + 1), number)
        # XLA would pack both parts at once, before either is sent.
        last, _ = lax.optimization_barrier((number + 2, filled))
        return one(filled, arrived, packed(last), number + 1)

    turns = (count - 1) // 2
    filled, arrived = lax.fori_loop(0, turns, two, (start, send(packed(0))))
    for number in range(2 * turns, count - 1):
        filled, arrived = one(filled, arrived, packed(number + 1), number)
    return written(filled, arrived, count - 1)


def _all_to_all(step: AllToAll, place: MeshPlace, shape: Sequence[int]) -> Phases:
    return Phases(partial(blocks_of, step.send), partial(to_all, step.groups, place), partial(closed, step.receive))


def _all_gather(step: AllGather, place: MeshPlace, shape: Sequence[int]) -> Phases:
    rows = gathered_dim(step.receive) == 0

    def pack(tile: Array) -> Array:
        tile = resized(tile, step.send.padded)
        return tile if rows else tile[np.newaxis]

    def send(tile: Array) -> Array:
        return lax.all_gather(tile, axis=0, tiled=True, **place.group(step.groups))

    return Phases(pack, send, partial(resized, shape=shape) if rows else partial(closed, step.receive))


def _reduce_scatter(step: ReduceScatter, place: MeshPlace, shape: Sequence[int]) -> Phases | None:
    if step.reduction not in ("sum", "mean"):
        return None
    return Phases(
        partial(blocks_of, step.send), partial(scattered, step.groups, place), partial(unscattered, step, shape=shape)
    )


def _permute(step: Permute, place: MeshPlace, shape: Sequence[int]) -> Phases:
    return Phases(_itself, partial(place.permute, pairs=step.pairs), _itself)


def _itself(tile: Array) -> Array:
    return tile


_PHASES: dict[type[Plain], Callable[[Any, MeshPlace, Sequence[int]], Phases | None]] = {
    AllToAll: _all_to_all,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    Permute: _permute,
}
