"""How the parts of a result travel in the last step of a loop, and how they are written to what the loop carries.

    make_part_writer        a part is made as on any platform, and written to its place
    make_fused_writer       on a TPU, where blocks have full lanes: a kernel cuts and packs, another joins and writes

On a mesh <x=8>, bf16[512, {x}64, 512] -> bf16[{x}64, 512, 512], the part of rows 0 to 7 of a tile of the result:

    arrived   (8, 8, 64, 512)     member, row, dim 1 of that member, dim 2
    written   row 0-7, columns 0-63     from member 0      one pass over memory; a part that is put together first
              row 0-7, columns 64-127   from member 1      and then written takes two
              ...
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from reshard.lower.program import AllGather, AllToAll, InParts, Plain, Program, Slice, shape_of_part
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_collectives import send_blocks
from reshard.lower.to_shard_map.tile_memory import (
    LANES,
    SUBLANES,
    BlockRuns,
    choose_memory_order,
    cut_box,
    find_free_runs,
    fix_layout,
    keep_tile_layout,
    merge_block_digits,
    split_tile_digits,
)
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView

Array = jax.Array
Run = Callable[[Plain, MeshPlace, Array, Sequence[int]], Array]
"""Runs an instruction on a part; the shape is that of the part after it."""


class PartWriter(NamedTuple):
    """How a loop fills a result: the shape of what it carries, and the result's dims in the order that this has them.

    Of each part, what `pack` makes is sent by `send`, and what arrives is written by `write`, which is also given the
    part's number.
    """

    carried: tuple[int, ...]
    order: tuple[int, ...]
    pack: Callable[[Array], Array]
    send: Callable[[Array], Array]
    write: Callable[[Array, Array, Array], Array]
    overlaps: bool = False
    """Whether a part is written while the next one is on its way."""
    cut: Callable[[Array, Array], Array] | None = None
    """What makes the message of a part out of the whole tile, in one kernel on a TPU."""

    def tile(self, filled: Array, shape: Sequence[int]) -> Array:
        """The result of this shape that a loop has filled."""
        return filled.reshape([shape[dim] for dim in self.order]).transpose(np.argsort(self.order))


def pack_as_it_is(part: Array) -> Array:
    """The part itself."""
    return part


def make_part_writer(
    step: InParts, shape: Sequence[int], place: MeshPlace, run: Run, order: Sequence[int] | None = None
) -> PartWriter:
    """The writer of parts of a result of this shape that `run` makes, its dims in this order while the loop runs."""
    order = tuple(order or range(len(shape)))
    part_shape = shape_of_part(step.put, shape)
    put = step.put._replace(axis=order.index(step.put.axis))

    def send(part: Array) -> Array:
        return run(step.each, place.anew(), part, part_shape)

    def write(filled: Array, part: Array, number: Array) -> Array:
        return write_part(put, filled, part.transpose(order), number)

    return PartWriter(tuple(shape[dim] for dim in order), order, pack_as_it_is, send, write)


def open_cut(cut: Cut, shape: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of `count` parts of a tile, the cut axis as (outer, count, inner)."""
    return (*shape[: cut.axis], cut.outer, count, cut.inner, *shape[cut.axis + 1 :])


def write_part(cut: Cut, tile: Array, part: Array, number: Array) -> Array:
    """The tile with a part in its place."""
    if cut.outer == 1:
        return lax.dynamic_update_slice_in_dim(tile, part, number * cut.inner, cut.axis, allow_negative_indices=False)
    spread, part = tile.reshape(open_cut(cut, tile.shape, cut.parts)), part.reshape(open_cut(cut, tile.shape, 1))
    filled = lax.dynamic_update_slice_in_dim(spread, part, number, cut.axis + 1, allow_negative_indices=False)
    return filled.reshape(tile.shape)


def put_full_lanes_last(order: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
    """The dims in this order, except that the last one whose extent is full lanes comes last, if there is one."""
    minor = next((dim for dim in reversed(order) if extents[dim] % LANES == 0), order[-1])
    return (*(dim for dim in order if dim != minor), minor)


def add_part_digit(view: TileView, cut: Cut, shape: Sequence[int]) -> TileView | None:
    """The view of a whole tile of this shape, of which `view` is that of a part; its last block digit is the part's
    number. None if the part is not between two digits.

    >>> add_part_digit(TileView((2, 4), (2, 4), (2, 2, 2), (0, 1, 1), (1,)), Cut(1, 2, 3, 2), (2, 12)).digits
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


class OpenTile(NamedTuple):
    """A tile opened into digits in its order of memory: those that number blocks, and the others in a message's order.

    A part is `kept` values of digit `at`, from its number times as many on.
    """

    digits: tuple[int, ...]
    blocks: tuple[int, ...]
    rest: tuple[int, ...]
    at: int
    kept: int

    @property
    def part(self) -> list[int]:
        """The digits of the message of a part."""
        return [self.kept if axis == self.at else self.digits[axis] for axis in (*self.blocks, *self.rest)]


def open_tile(view: TileView, cut: Cut, message: Sequence[int], dtype: str) -> OpenTile | None:
    """A tile, of which `view` is that of a part; None where a TPU would copy it to open it: where blocks or parts are
    ranges of its minor dim, or break its rows of 8."""
    shape = tuple(n * cut.parts if dim == cut.axis else n for dim, n in enumerate(view.tile))
    whole = add_part_digit(merge_block_digits(view), cut, shape) or add_part_digit(view, cut, shape)
    if whole is None:
        return None
    lying = choose_memory_order(shape, dtype)
    lies = BlockRuns.of(whole, lying).view
    blocks = list(lies.blocks)
    at = blocks.pop()
    # The part is a range of the digit that follows its number, or one value of that.
    ranges = at + 1 < len(lies.digits) and lies.dims[at + 1] == lies.dims[at] and at + 1 not in blocks
    kept = lies.digits[at + 1] if ranges else 1
    digits = (*lies.digits[:at], kept * cut.parts, *lies.digits[at + 1 + ranges :])
    dims = [dim for axis, dim in enumerate(lies.dims) if not ranges or axis != at]
    rows = [digits[axis] for axis, dim in enumerate(dims) if dim in lying[-2:-1]]
    if any(dims.count(dim) > 1 for dim in lying[-1:]) or (len(rows) > 1 and rows[-1] % SUBLANES):
        return None
    numbering = tuple(axis - (ranges and axis > at) for axis in blocks)
    rest = sorted(set(range(len(digits))) - set(numbering), key=lambda axis: (message.index(dims[axis]), axis))
    return OpenTile(digits, numbering, tuple(rest), at, kept)


def make_fused_writer(step: InParts, shape: Sequence[int], dtype: str, place: MeshPlace) -> PartWriter | None:
    """The writer of an all-to-all in parts of a tile of this shape on a TPU: a kernel cuts a part out and packs it, and
    another one puts it together and writes it; None where blocks have not full lanes in the result's order of dims.

    libtpu does both in one pass over memory if both ends of a kernel are as they lie, and nothing is reshaped between
    what cuts or writes a part and what transposes it. Therefore tiles are opened into digits first.
    """
    each = step.each
    if not isinstance(each, AllToAll) or any(view.tile != view.padded for view in (each.send, each.receive)):
        return None
    order = choose_memory_order(shape, dtype)
    if put_full_lanes_last(order, list_block_extents(each.receive)) != order:
        return None
    sent, received = (
        open_tile(view, cut, order, dtype) for view, cut in ((each.send, step.take), (each.receive, step.put))
    )
    put, view = step.put._replace(axis=order.index(step.put.axis)), merge_block_digits(each.receive)
    extents = [list_block_extents(each.send)[dim] for dim in order]

    def pack(part: Array) -> Array:
        # The blocks one after another, dims in the message's order: in as few digits as these blocks have.
        view = merge_block_digits(each.send)
        rest = (axis for axis in range(len(view.digits)) if axis not in view.blocks)
        rest = sorted(rest, key=lambda axis: order.index(view.dims[axis]))
        packed = split_tile_digits(view, part).transpose(*view.blocks, *rest)
        return fix_layout(packed.reshape(view.count, *extents))

    def cut(tile: Array, number: Array) -> Array:
        assert sent is not None
        lying = choose_memory_order(tile.shape, tile.dtype.name)
        opened = tile.transpose(lying).reshape(sent.digits)
        part = lax.dynamic_slice_in_dim(opened, number * sent.kept, sent.kept, sent.at, allow_negative_indices=False)
        return fix_layout(part.transpose(*sent.blocks, *sent.rest)).reshape(each.send.count, *extents)

    def write(filled: Array, blocks: Array, number: Array) -> Array:
        if received is not None:
            part = fix_layout(blocks.reshape(received.part)).transpose(np.argsort((*received.blocks, *received.rest)))
            start = number * received.kept
            return lax.dynamic_update_slice_in_dim(filled, part, start, received.at, allow_negative_indices=False)
        rest = (axis for axis in range(len(view.digits)) if axis not in view.blocks)
        axes = [*view.blocks, *sorted(rest, key=lambda axis: order.index(view.dims[axis]))]
        spread = fix_layout(blocks).reshape([view.digits[axis] for axis in axes])
        part = spread.transpose(np.argsort(axes)).reshape(view.tile).transpose(order)
        return write_part(put, filled, fix_layout(part), number)

    carried = tuple(shape[dim] for dim in order) if received is None else received.digits
    send = partial(send_blocks, each.groups, place)
    return PartWriter(carried, order, pack, send, write, cut=None if sent is None else cut)


class PartForm(NamedTuple):
    """How the parts of an all-to-all or a gather travel on a TPU, as passes over memory.

    They are `cut` out with their blocks packed, in one kernel a part; or first, and then `packed`, unless blocks lie
    one after another. They are written with as many `kernels` a part, after being `joined` in another pass, or put
    together in another order of dims where that `turns`.
    """

    cut: bool
    packed: bool
    joined: bool
    kernels: int
    turns: bool


def choose_part_form(step: InParts, shape: Sequence[int], dtype: str) -> PartForm:
    """How the parts of a step with a result of this shape travel."""
    each = step.each
    if not isinstance(each, AllToAll | AllGather):
        return PartForm(False, False, False, 1, False)
    order = choose_memory_order(shape, dtype)
    turns = put_full_lanes_last(order, list_block_extents(each.receive)) != order
    if isinstance(each, AllToAll):
        fused = not turns and all(view.tile == view.padded for view in (each.send, each.receive))
        cut = fused and open_tile(each.send, step.take, order, dtype) is not None
        packed = not cut and not lie_in_turn(each.send, choose_memory_order(each.send.tile, dtype))
        joined = fused and open_tile(each.receive, step.put, order, dtype) is None
        return PartForm(cut, packed, joined, 1 if fused else 2, turns)
    return PartForm(False, False, False, 1, turns)


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
    at_front = lie_in_turn(step.send, choose_memory_order(program.tile_shape, program.dtype))
    along_one = len({step.receive.dims[axis] for axis in step.receive.blocks}) == 1  # Along two, it is copied twice.
    free = find_free_runs(step.receive, choose_memory_order(program.tile_shapes[0], program.dtype)) is not None
    return at_front and along_one and free


def lie_in_turn(view: TileView, order: Sequence[int]) -> bool:
    """Whether the blocks of a tile whose dims lie in memory in this order lie one after another, as they travel."""
    blocks = BlockRuns.of(view, order).view.blocks
    return blocks == tuple(range(len(blocks)))


def list_block_extents(view: TileView) -> list[int]:
    """The extents of a block in the dims of the tile."""
    rest = [(view.dims[axis], r) for axis, r in enumerate(view.digits) if axis not in view.blocks]
    return [math.prod(r for of, r in rest if of == dim) for dim in range(len(view.tile))]


def slice_part(step: Slice, take: Cut, place: MeshPlace, tile: Array, number: Array) -> Array | None:
    """What a device keeps of a part of its tile, read at once.

    None if the part is not between two digits, or if several ranges of a TPU's minor dim are kept: it would copy all of
    the tile to have them in one.
    """
    whole, minor = add_part_digit(step.send, take, tile.shape), choose_memory_order(tile.shape, tile.dtype.name)[-1]
    if whole is None or sum(whole.dims[run[0]] == minor for run in whole.runs) > 1:
        return None
    runs = BlockRuns.of(whole)
    kept = cut_box(tile.reshape(runs.shape), runs.starts(place.by_device(step.block), number), runs.block)
    return keep_tile_layout(tile, kept.reshape(step.receive.padded))
