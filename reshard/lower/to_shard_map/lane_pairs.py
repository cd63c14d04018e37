"""Blocks of 64 lanes on a TPU, half a row: two rows of a block travel side by side.

Where they arrive, they are laid beside those of a neighbour.

    mesh <x=8>, bf16[512, 512, {x}64] -> bf16[512, 512, 512], the part of rows 0 to 63

    part      (64, 64, 512)      row, dim 2, dim 1: a TPU has dim 1 minor, of which there are full lanes
    sent      (32, 512, 128)     pairs of rows, dim 1, both rows' dim 2: transposed once, before it is sent
    arrived   (8, 32, 512, 128)
    written   rows 0, 2, ...  lanes 0-127     the first halves from members 0 and 1
              rows 1, 3, ...  lanes 0-127     the second halves from members 0 and 1
              ...

libtpu writes what it transposes to HBM, so what is transposed after it has arrived is written and read once more; and
blocks of 64 lanes would travel with 64 of padding.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.program import AllGather, AllToAll, InParts
from reshard.lower.to_shard_map import tpu_layout
from reshard.lower.to_shard_map.block_writes import UNROLLED, block_extents, last_full, packed
from reshard.lower.to_shard_map.collectives import gathered, to_all
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import laid_out, resized
from reshard.lower.to_shard_map.tpu_layout import memory_order
from reshard.types import dtypes
from reshard.types.rules.parts import Cut
from reshard.types.rules.tile_view import TileView

Array = jax.Array
ON_CHIP = 32 << 20
"""The most bytes of a part that is put together of halves of rows: of larger ones these would be in HBM, padded."""


@dataclass(frozen=True)
class LanePairs:
    """Parts of an all-to-all or a gather whose blocks are ranges of half a row of lanes.

    `message` is the order of dims of a block before it is transposed, and `carried` that of the result: they end with
    rows, lanes, wide and rows, wide, lanes. Parts are `put` along the rows.
    """

    step: AllToAll | AllGather
    message: tuple[int, ...]
    carried: tuple[int, ...]
    put: Cut

    def opened(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result while it is filled: its rows are parts of pairs of rows."""
        *major, _, wide, lanes = (shape[dim] for dim in self.carried)
        return (*major, self.put.outer, self.put.parts, self.put.inner // 2, 2, wide, lanes)

    def arrived(self, place: MeshPlace, part: Array) -> Array:
        """The pairs of rows that arrive for a part, along a new first axis."""
        if isinstance(self.step, AllToAll):
            return laid_out(to_all(self.step.groups, place, _paired(packed(self.step.send, self.message, part))))
        tile = resized(part, self.step.send.padded).transpose(self.message)
        return laid_out(gathered(self.step.groups, place, _paired(tile)[np.newaxis], 0))

    def written_into(self, filled: Array, pairs: Array, number: Array) -> Array:
        """`filled` with the pairs of rows of a part at their places."""
        shape = (*filled.shape[:-5], 1, filled.shape[-4], 1, filled.shape[-2], pairs.shape[-1])
        half = pairs.shape[-1] // 2
        for member in range(0, len(pairs), 2):
            near = pairs[member], pairs[member + 1]  # Whole: halves take as much of the chip each.
            for row in range(2):
                halves = [block[..., row * half : (row + 1) * half] for block in near]
                content = jnp.concatenate(halves, -1).reshape(shape)
                starts = [*[0] * (filled.ndim - 5), number, 0, row, 0, member * half]
                indices = [jnp.asarray(start, jnp.int32) for start in starts]
                filled = lax.dynamic_update_slice(filled, content, indices, allow_negative_indices=False)
        return laid_out(filled)


def _paired(blocks: Array) -> Array:
    """Blocks whose last dims are rows, lanes and wide with two rows side by side and wide before them."""
    *major, rows, lanes, wide = blocks.shape
    pairs = blocks.reshape(*major, rows // 2, 2 * lanes, wide)
    return laid_out(jnp.swapaxes(laid_out(pairs), -1, -2))


def lane_pairs(step: InParts, shape: Sequence[int], dtype: str) -> LanePairs | None:
    """The spelling of a step in parts of a tile of this shape; None where blocks are not halves of rows of lanes.

    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.runtime import on_jax
    >>> from reshard.types import Layout, Mesh
    >>> ends = (Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, 512, {x}64]", "bf16[{x}64, 512, 512]"))
    >>> program = lower_plan(on_jax.in_parts(plan(*ends)))
    >>> lane_pairs(program.instructions[0], program.tile_shapes[0], program.dtype).opened(program.tile_shapes[0])
    (1, 8, 4, 2, 512, 512)
    """
    if not isinstance(step.each, AllToAll | AllGather) or len(shape) < 3:
        return None
    view, carried = step.each.receive, memory_order(shape, dtype)
    *major, rows, wide, lanes = carried
    extents = block_extents(view)
    message = (*major, rows, lanes, wide)
    if last_full(carried, extents) != message or 2 * extents[lanes] != tpu_layout.LANES:
        return None
    if math.prod(view.tile) * dtypes.bits(dtype) > 8 * ON_CHIP:
        return None
    able = _side_by_side(view, lanes) and step.put.axis == rows and step.put.inner % 2 == 0
    return LanePairs(step.each, message, carried, step.put) if able else None


def _side_by_side(view: TileView, dim: int) -> bool:
    """Whether the blocks of a tile are ranges of a dim, in the order of their numbers, and an even number of them."""
    axes = tuple(axis for axis, of in enumerate(view.dims) if of == dim)
    in_turn = axes[: len(view.blocks)] == tuple(view.blocks)
    return view.tile == view.padded and in_turn and view.count % 2 == 0 and view.count <= UNROLLED
