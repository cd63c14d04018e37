"""An all-to-all in parts on a TPU: blocks travel with full lanes, and each is written where it belongs.

    mesh <x=8>, bf16[512, {x}64, 512] -> bf16[{x}64, 512, 512], the part of rows 0 to 7 of a tile of the result

    arrived   (8, 8, 64, 512)     member, row, dim 1 of that member, dim 2
    written   row 0-7, columns 0-63     from member 0      one pass over memory; a part that is put together first
              row 0-7, columns 64-127   from member 1      and then written takes two
              ...

A message keeps the result's order of dims in memory, if its minor dim has full lanes: a multiple of 128 elements. If
it has not, the minor dim of the message is one that has, and a part is put together in that order, on the chip, before
it is transposed and written.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.exchange_order import box_extents
from reshard.lower.program import AllGather, AllToAll, Exchange, InParts, Plain, Program, Slice
from reshard.lower.to_shard_map import tpu_layout
from reshard.lower.to_shard_map.collectives import gathered, gathered_dim, to_all
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import cut_out, laid_out, merged, opened, piece, resized, unfilled
from reshard.lower.to_shard_map.tpu_layout import memory_order
from reshard.plans.rules.parts import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.types import dtypes

Array = jax.Array
Number = TypeVar("Number", int, jax.Array)
UNROLLED = 16
"""The most blocks of a part that are copied one by one; more are transposed at once."""


def last_full(order: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
    """The dims in this order, except that the last one whose extent is full lanes comes last, if there is one."""
    minor = next((dim for dim in reversed(order) if extents[dim] % tpu_layout.LANES == 0), order[-1])
    return (*(dim for dim in order if dim != minor), minor)


def message_order(step: Plain, carried: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dims in which the messages of an exchange have full lanes on a TPU, near that of its result; None
    if it is their own, or if no order gives them."""
    extents = box_extents(step) if isinstance(step, Exchange) else None
    message = last_full(carried, extents) if extents else tuple(range(len(carried)))
    full = extents is not None and extents[message[-1]] % tpu_layout.LANES == 0
    return message if full and message != tuple(range(len(carried))) else None


@dataclass(frozen=True)
class Writes:
    """Where the blocks of a tile are written: the tile's dims in an order, each as runs in which a block has one range.

    `view` has the digits of the tile in this order, and those that number what is written as its blocks.
    """

    view: TileView

    @classmethod
    def of(cls, view: TileView, order: Sequence[int]) -> Writes:
        """Those of a tile whose dims lie in memory in this order."""
        axes = sorted(range(len(view.digits)), key=lambda axis: order.index(view.dims[axis]))
        return cls(
            replace(
                view,
                digits=tuple(view.digits[axis] for axis in axes),
                dims=tuple(view.dims[axis] for axis in axes),
                blocks=tuple(axes.index(axis) for axis in view.blocks),
            )
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The tile's shape in runs."""
        return tuple(math.prod(self.view.digits[axis] for axis in run) for run in self.view.runs)

    @property
    def block(self) -> tuple[int, ...]:
        """A block's shape in runs."""
        kept = ([axis for axis in run if axis not in self.view.blocks] for run in self.view.runs)
        return tuple(math.prod(self.view.digits[axis] for axis in run) for run in kept)

    @property
    def free(self) -> bool:
        """Whether the runs lie in memory as the dims do, so that neither is copied to the other."""
        runs = [
            [run for run in self.view.runs if self.view.dims[run[0]] == dim] for dim in dict.fromkeys(self.view.dims)
        ]
        if len(runs[-1]) > 1 or self.block[-1] % tpu_layout.LANES:
            return False
        return len(runs) < 2 or len(runs[-2]) == 1 or self.shape[-2] % tpu_layout.SUBLANES == 0

    def values(self, number: Number, later: int = 0) -> list[Number]:
        """The values of the digits that number a block, of all but the last `later` of these."""
        values: list[Number] = []
        for axis in reversed(self.view.blocks[: len(self.view.blocks) - later]):
            values.insert(0, number % self.view.digits[axis])
            number = number // self.view.digits[axis]
        return values

    def starts(self, values: Sequence[Any]) -> list[Any]:
        """Where a block begins in each run, from the values of the digits that number it."""
        by_axis = dict(zip(self.view.blocks, values, strict=True))
        digits = self.view.digits
        below = {a: math.prod(digits[b] for b in run if b > a) for run in self.view.runs for a in run}
        return [sum(by_axis[a] * below[a] for a in run if a in by_axis) for run in self.view.runs]


def with_part_digit(view: TileView, cut: Cut, shape: Sequence[int]) -> TileView | None:
    """The view of a whole tile of this shape, of which `view` is that of a part; its last block digit is the part's
    number. None if the part is not between two digits.

    >>> with_part_digit(TileView((2, 4), (2, 4), (2, 2, 2), (0, 1, 1), (1,)), Cut(1, 2, 3, 2), (2, 12)).digits
    (2, 2, 3, 2)
    """
    if view.tile != view.padded:
        return None
    digits = [radix for radix, dim in zip(view.digits, view.dims, strict=True) if dim == cut.axis]
    ends = itertools.accumulate(digits, operator.mul, initial=1)
    before = next((number for number, end in enumerate(ends) if end == cut.outer), None)
    if before is None:
        return None
    at = sum(dim < cut.axis for dim in view.dims) + before
    return TileView(
        tuple(shape),
        tuple(shape),
        (*view.digits[:at], cut.parts, *view.digits[at:]),
        (*view.dims[:at], cut.axis, *view.dims[at:]),
        (*(axis + (axis >= at) for axis in view.blocks), at),
    )


@dataclass(frozen=True)
class Blockwise:
    """How the parts of an all-to-all travel and are written.

    `message` is the order of dims of a block, and `carried` that of the result. Blocks are written `into` the whole
    result, or else into a part of it in the message's order, `staged`, or else transposed to one. Tiles that are
    gathered `along` one dim lie in a part as they arrive.
    """

    step: AllToAll | AllGather
    message: tuple[int, ...]
    carried: tuple[int, ...]
    into: Writes | None
    staged: Writes | None
    along: int | None = None


def blockwise(step: InParts, shape: Sequence[int], dtype: str) -> Blockwise | None:
    """The spelling of an all-to-all or a gather in parts of a tile of this shape on a TPU; None where nothing is gained
    by one.

    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.runtime import on_jax
    >>> from reshard.types import Layout, Mesh
    >>> ends = (Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, 512, {x}64]", "bf16[512, {x}64, 512]"))
    >>> program = lower_plan(on_jax.in_parts(plan(*ends)))
    >>> blockwise(program.instructions[0], program.tile_shapes[0], program.dtype).message
    (1, 2, 0)
    """
    if not isinstance(step.each, AllToAll | AllGather):
        return None
    receive, carried = step.each.receive, memory_order(shape, dtype)
    message = last_full(carried, block_extents(receive))
    into = staged = None
    along = gathered_dim(receive) if isinstance(step.each, AllGather) else None
    if along is None and receive.count <= UNROLLED:
        whole = with_part_digit(receive, step.put, shape) if message == carried else None
        into = None if whole is None else _free(whole, carried)
        staged = None if message == carried else _free(receive, message)
    return None if message == carried and into is None else Blockwise(step.each, message, carried, into, staged, along)


def _free(view: TileView, order: Sequence[int]) -> Writes | None:
    """The places of blocks in a tile whose dims are in this order, if its runs lie in memory as its dims do."""
    if view.tile != view.padded:
        return None
    writes = Writes.of(view, order)
    return writes if writes.free else None


def sent_as_it_lies(program: Program) -> bool:
    """Whether a program is one all-to-all whose operand a TPU sends without a copy, and puts together in one.

    Blocks lie one after another in memory then, and each is a box of full lanes in the result.

    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> def lies(*texts):
    ...     return sent_as_it_lies(lower_plan(plan(*(Layout.parse(text, Mesh(x=8)) for text in texts))))
    >>> lies("bf16[64, {x}8, 512]", "bf16[{x}8, 64, 512]"), lies("bf16[{x}8, 64, 512]", "bf16[64, {x}8, 512]")
    (True, False)
    """
    step = program.instructions[0] if len(program.instructions) == 1 else None
    if not isinstance(step, AllToAll) or step.send.tile != step.send.padded:
        return False
    sent = Writes.of(step.send, memory_order(program.tile_shape, program.dtype)).view
    at_front = sent.blocks == tuple(range(len(sent.blocks)))
    along_one = len({step.receive.dims[axis] for axis in step.receive.blocks}) == 1  # Along two, it is copied twice.
    free = _free(step.receive, memory_order(program.tile_shapes[0], program.dtype)) is not None
    return at_front and along_one and free


def block_extents(view: TileView) -> list[int]:
    """The extents of a block in the dims of the tile."""
    rest = [(view.dims[axis], r) for axis, r in enumerate(view.digits) if axis not in view.blocks]
    return [math.prod(r for of, r in rest if of == dim) for dim in range(len(view.tile))]


def arrived(spelling: Blockwise, place: MeshPlace, part: Array) -> Array:
    """The blocks that arrive for a part, along a new first axis or `along` their dim, dims in the message's order."""
    step, along = spelling.step, spelling.along
    if isinstance(step, AllToAll):
        return _exchanged(step, spelling.message, place, part)
    tile = resized(part, step.send.padded).transpose(spelling.message)
    if along is not None:
        return gathered(step.groups, place, tile, spelling.message.index(along))
    return gathered(step.groups, place, tile[np.newaxis], 0)


def _exchanged(step: AllToAll, message: Sequence[int], place: MeshPlace, part: Array) -> Array:
    return to_all(step.groups, place, packed(step.send, message, part))


def packed(view: TileView, message: Sequence[int], part: Array) -> Array:
    """The blocks of a part, one after another: copied one by one on the chip, if they are ranges of the minor dim."""
    extents = [block_extents(view)[dim] for dim in message]
    ranges = tuple(message) == memory_order(view.tile, part.dtype.name) and message[-1] in {
        view.dims[axis] for axis in view.blocks
    }
    runs = _free(view, message) if ranges and view.count <= UNROLLED else None
    if runs is None:
        view = merged(view)
        rest = (axis for axis in range(len(view.digits)) if axis not in view.blocks)
        rest = sorted(rest, key=lambda axis: message.index(view.dims[axis]))
        return opened(view, part).transpose(*view.blocks, *rest).reshape(view.count, *extents)
    tile = laid_out(part.transpose(message)).reshape(runs.shape)
    filled = unfilled((view.count, *extents), part.dtype)
    for number in range(view.count):
        block = piece(tile, list(map(_index, runs.starts(runs.values(number)))), runs.block)
        filled = lax.dynamic_update_slice_in_dim(filled, block.reshape(1, *extents), number, 0)
    return laid_out(filled)


def written_into(writes: Writes, filled: Array, blocks: Array, part: Sequence[Array] = ()) -> Array:
    """`filled`, in the runs of `writes`, with every block in its place; `part` is the number of their part."""
    for number in range(len(blocks)):
        starts = writes.starts([*writes.values(number, len(part)), *part])
        content = blocks[number].reshape(writes.block)
        filled = lax.dynamic_update_slice(filled, content, list(map(_index, starts)), allow_negative_indices=False)
    return filled


def sliced(step: Slice, take: Cut, place: MeshPlace, tile: Array, number: Array) -> Array | None:
    """What a device keeps of a part of its tile, read at once.

    None if the part is not between two digits, or if several ranges of a TPU's minor dim are kept: it would copy all of
    the tile to have them in one.
    """
    whole, minor = with_part_digit(step.send, take, tile.shape), memory_order(tile.shape, tile.dtype.name)[-1]
    if whole is None or sum(whole.dims[run[0]] == minor for run in whole.runs) > 1:
        return None
    runs = Writes.of(whole, range(tile.ndim))
    starts = runs.starts([*runs.values(place.by_device(step.block), 1), number])
    kept = piece(tile.reshape(runs.shape), list(map(_index, starts)), runs.block)
    return cut_out(tile, kept.reshape(step.receive.padded))


def _index(start: Array | int) -> Array:
    return jnp.asarray(start, jnp.int32)


def put_together(spelling: Blockwise, blocks: Array) -> Array:
    """A part of the result, its dims in the order in which the result is carried, of the blocks that arrived."""
    view, message = spelling.step.receive, spelling.message
    if spelling.along is not None:
        there = resized(blocks, [view.tile[dim] for dim in message])
    elif spelling.staged is not None:
        filled = unfilled(spelling.staged.shape, blocks.dtype)
        filled = laid_out(written_into(spelling.staged, filled, laid_out(blocks)))
        there = filled.reshape([view.tile[dim] for dim in message])
    else:
        return _transposed(merged(view), message, blocks).transpose(spelling.carried)
    return there.transpose([message.index(dim) for dim in spelling.carried])


def _transposed(view: TileView, message: Sequence[int], blocks: Array) -> Array:
    """The part that blocks make up, its dims in their own order."""
    rest = (axis for axis in range(len(view.digits)) if axis not in view.blocks)
    axes = [*view.blocks, *sorted(rest, key=lambda axis: message.index(view.dims[axis]))]
    spread = blocks.reshape([view.digits[axis] for axis in axes]).transpose(np.argsort(axes))
    return resized(spread.reshape(view.padded), view.tile)


# Blocks of 64 lanes on a TPU, half a row: two rows of a block travel side by side.
#
# Where they arrive, they are laid beside those of a neighbour.
#
#     mesh <x=8>, bf16[512, 512, {x}64] -> bf16[512, 512, 512], the part of rows 0 to 63
#
#     part      (64, 64, 512)      row, dim 2, dim 1: a TPU has dim 1 minor, of which there are full lanes
#     sent      (32, 512, 128)     pairs of rows, dim 1, both rows' dim 2: transposed once, before it is sent
#     arrived   (8, 32, 512, 128)
#     written   rows 0, 2, ...  lanes 0-127     the first halves from members 0 and 1
#               rows 1, 3, ...  lanes 0-127     the second halves from members 0 and 1
#               ...
#
# libtpu writes what it transposes to HBM, so what is transposed after it has arrived is written and read once more; and
# blocks of 64 lanes would travel with 64 of padding.


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
