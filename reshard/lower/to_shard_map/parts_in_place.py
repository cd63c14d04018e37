"""A step whose parts take each other's place: a loop that XLA runs in the memory of a donated tile.

The loop carries one buffer, which is the tile as it lies in memory, so that neither making it nor unmaking it moves
anything. On a TPU the two minor dims lie in tiles of 8 x 128 elements, and the buffer is a list of them, or of rows:

    bf16[2048, 8192]   in memory 256 x 64 tiles   buffer (256 * 64, 8, 128)
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange_in_place import transposing_stops
from reshard.lower.program import InParts
from reshard.lower.to_shard_map.block_writes import Run, shape_of_part
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import fix_layout, make_unfilled
from reshard.lower.to_shard_map.tpu_layout import LANES, SUBLANES, choose_memory_order
from reshard.plans.rules.parts import Cut, Regions, part_regions

Array = jax.Array
Shape = Sequence[int]


@dataclass(frozen=True)
class TileMemory:
    """How a tile lies in memory: its dims, major first, the last ones in units of several elements."""

    order: tuple[int, ...]
    unit: tuple[int, ...] = ()

    def extents(self, shape: Shape) -> list[int]:
        """The dims of a tile in memory, in units."""
        units = [1] * (len(shape) - len(self.unit)) + list(self.unit)
        return [shape[dim] // unit for dim, unit in zip(self.order, units, strict=True)]

    def fits(self, shape: Shape) -> bool:
        """Whether a tile of this shape consists of whole units."""
        return all(shape[dim] % self._unit_of(at) == 0 for at, dim in enumerate(self.order))

    def divides(self, cut: Cut) -> bool:
        """Whether each piece of a part consists of whole units."""
        return cut.inner % self._unit_of(self.order.index(cut.axis)) == 0

    def buffer(self, tile: Array) -> Array:
        """The tile's units one after another."""
        extents = self.extents(tile.shape)
        inside = len(extents) - len(self.unit)
        pairs = zip(extents[inside:], self.unit, strict=True)
        opened = tile.transpose(self.order).reshape(*extents[:inside], *(size for pair in pairs for size in pair))
        return opened.transpose(self._units_last(inside)).reshape(-1, *self.unit)

    def tile(self, buffer: Array, shape: Shape) -> Array:
        """The tile of this shape whose units these are."""
        extents = self.extents(shape)
        opened = buffer.reshape(*extents, *self.unit)
        inside = len(extents) - len(self.unit)
        closed = opened.transpose(np.argsort(self._units_last(inside))).reshape([shape[dim] for dim in self.order])
        return closed.transpose(np.argsort(self.order))

    def settled(self, tile: Array) -> Array:
        """The tile, made as it lies in memory: a TPU would move tiles of 8 x 128 elements several times otherwise."""
        if not self.unit:
            return tile
        return lax.optimization_barrier(fix_layout(tile.transpose(self.order))).transpose(np.argsort(self.order))

    def _unit_of(self, at: int) -> int:
        inside = at - (len(self.order) - len(self.unit))
        return self.unit[inside] if inside >= 0 else 1

    def _units_last(self, inside: int) -> list[int]:
        """The axes of a tile whose last dims are opened into (extent, unit), those of units last."""
        pairs = range(inside, inside + 2 * len(self.unit), 2)
        return [*range(inside), *pairs, *(at + 1 for at in pairs)]


@dataclass(frozen=True)
class LyingTiles:
    """How the tiles of a step's operand and result lie in memory, in the same units."""

    operand: TileMemory
    result: TileMemory

    def regions(self, take: Cut, operand: Shape, put: Cut, result: Shape) -> Regions:
        """Where the parts lie in tiles of these shapes."""
        take = take._replace(axis=self.operand.order.index(take.axis))
        put = put._replace(axis=self.result.order.index(put.axis))
        return part_regions(self.operand.extents(operand), take, self.result.extents(result), put)


_WIDTHS = ("float32", "bfloat16", "int8")
"""A dtype of each width, by which the order of dims may differ where there are few rows."""


def find_tiles_on_tpu(take: Cut, operand: Shape, put: Cut, result: Shape) -> LyingTiles | None:
    """How tiles of these shapes lie on a TPU; None if their parts do not consist of whole 8 x 128 tiles.

    >>> find_tiles_on_tpu(Cut(0, 1, 8, 8), (64, 512, 512), Cut(0, 8, 8, 8), (512, 512, 64)).result
    TileMemory(order=(0, 2, 1), unit=(512,))
    >>> find_tiles_on_tpu(Cut(0, 8, 8, 256), (16384, 1024), Cut(0, 1, 8, 256), (2048, 8192)).result
    TileMemory(order=(0, 1), unit=(8, 128))
    """
    if len(operand) < 2:
        return None
    if any(len({choose_memory_order(shape, dtype) for dtype in _WIDTHS}) > 1 for shape in (operand, result)):
        return None
    ends = [(shape, choose_memory_order(shape, _WIDTHS[0]), cut) for shape, cut in ((operand, take), (result, put))]
    in_tiles = [TileMemory(order, (SUBLANES, LANES)) for _, order, _ in ends]
    if not all(tile.fits(shape) and tile.divides(cut) for tile, (shape, _, cut) in zip(in_tiles, ends, strict=True)):
        return None
    minors = {shape[order[-1]] for shape, order, _ in ends}
    if len(minors) > 1 or any(cut.axis == order[-1] for _, order, cut in ends):
        return LyingTiles(*in_tiles)
    rows = (minors.pop(),)
    return LyingTiles(*(TileMemory(order, rows) for _, order, _ in ends))


def find_regions_on_tpu(take: Cut, operand: Shape, put: Cut, result: Shape) -> Regions | None:
    """Where parts in place of each other lie in a TPU's memory, or None if a TPU would copy the tile.

    >>> find_regions_on_tpu(Cut(1, 8, 8, 8), (64, 512, 512), Cut(1, 1, 8, 8), (512, 64, 512))
    Regions(outer=512, before=1, parts=8, after=1)
    """
    lying = find_tiles_on_tpu(take, operand, put, result)
    return None if lying is None else lying.regions(take, operand, put, result)


def run_parts_in_place(step: InParts, shape: Shape, place: MeshPlace, run: Run, tile: Array) -> Array:
    """The tile of this shape after a step that overwrites its operand part by part; `run` does it on a part."""

    def run_in(lying: LyingTiles, tile: Array) -> Array:
        """The same, in a buffer that is the tiles as they lie in memory."""
        where = lying.regions(step.take, tile.shape, step.put, shape)
        before, after = shape_of_part(step.take, tile.shape), shape_of_part(step.put, shape)
        unit = lying.operand.unit

        def overwrite_part(number: Array, buffer: Array) -> Array:
            region = lax.dynamic_slice_in_dim(buffer, number, 1, 1, allow_negative_indices=False)
            part = lying.operand.settled(lying.operand.tile(lax.optimization_barrier(region), before))
            moved = lying.result.settled(run(step.each, place.anew(), part, after))
            moved = lying.result.buffer(moved).reshape(region.shape)
            return fix_layout(lax.dynamic_update_slice_in_dim(buffer, moved, number, 1, allow_negative_indices=False))

        buffer = lying.operand.buffer(tile).reshape(where.outer, where.before * where.parts, -1, *unit)
        buffer = _transpose_slots(buffer, where.before).reshape(where.outer, where.parts, -1, *unit)
        buffer = lax.fori_loop(0, where.parts, overwrite_part, fix_layout(buffer))
        buffer = _transpose_slots(buffer.reshape(where.outer, where.parts * where.after, -1, *unit), where.parts)
        return lying.result.tile(buffer, shape)

    rows = LyingTiles(*[TileMemory(tuple(range(tile.ndim)))] * 2)  # in the order of indices, but on a TPU
    tpu = find_tiles_on_tpu(step.take, tile.shape, step.put, shape)
    if tpu is None:
        return run_in(rows, tile)
    return lax.platform_dependent(tile, tpu=partial(run_in, tpu), default=partial(run_in, rows))


def _transpose_slots(slots: Array, rows: int) -> Array:
    """The slots along axis 1, `rows` rows of them, transposed in place, with one slot in hand."""
    stops = transposing_stops(rows, slots.shape[1] // rows)
    if not stops:
        return slots
    table = jnp.asarray(np.asarray(stops, np.int32))

    def one(number: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        slots, hand = carried
        at = lax.dynamic_index_in_dim(table, number, keepdims=False, allow_negative_indices=False)
        taken = lax.dynamic_slice_in_dim(slots, at, 1, 1, allow_negative_indices=False)
        slots = lax.dynamic_update_slice_in_dim(slots, hand, at, 1, allow_negative_indices=False)
        return fix_layout(slots), fix_layout(taken)

    hand = make_unfilled((slots.shape[0], 1, *slots.shape[2:]), slots.dtype)
    return lax.fori_loop(0, len(stops), one, (fix_layout(slots), fix_layout(hand)))[0]
