"""What tiles need in a TPU's memory, where the two minor dims of an array are padded to 8 x 128 elements.

bf16[64, 64, 32, 64]     64 lanes of 128: twice its bytes, whichever dim is minor
bf16[16, 128, 128, 64]   its bytes: XLA makes a dim of 128 the minor one
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from reshard.geometry.refine import refine
from reshard.geometry.remesh import one_set
from reshard.lower.program import part_of
from reshard.lower.to_shard_map import LANES, SUBLANES, in_place_of, memory_order, padded_elements
from reshard.lower.to_shard_map.parts import loops
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.cost import PLAIN
from reshard.plans.rules.parts import Part
from reshard.types import dtypes
from reshard.types.layout import Layout


def padded_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes of an array with the least padding that some order of its dims has.

    >>> padded_bytes((64, 64, 32, 64), "bfloat16") // (64 * 64 * 32 * 64 * 2)
    2
    >>> padded_bytes((16, 128, 128, 64), "bfloat16") // (16 * 128 * 128 * 64 * 2)
    1
    """
    return _bytes_in(memory_order(shape, dtype), shape, dtype)


def padding_bytes(plan: Plan) -> int:
    """What padding adds to the plan's peak: that of all tiles and buffers that live at once, in the worst loop.

    XLA may give the parts of another loop other addresses, where sizes differ.
    """
    every = loops(plan.steps)
    parted = (loop for loop in every if loop[0].mode.parts > 1)
    elsewhere = sorted(max(step.cost.scratch for step in loop) for loop in parted)[-2:-1]
    return max((_padding(plan, loop) for loop in every), default=padding_of(plan.source)) + sum(elsewhere)


def _padding(plan: Plan, loop: Sequence[Step]) -> int:
    first, last = loop[0], loop[-1]
    tiles = [last.result] if last.mode.in_place else [first.operand, last.result]
    if first is not plan.steps[0] and first.retained_bytes:
        tiles.append(plan.source)
    if not all(step.mode.in_place for step in plan.steps[plan.steps.index(last) + 1 :]):
        tiles.append(plan.target)  # XLA has its memory from the start.
    return sum(map(padding_of, tiles)) + sum(map(_of_scratch, loop)) + _beside(loop)


def _beside(loop: Sequence[Step]) -> int:
    """The buffers of the smaller steps of a loop, which XLA has beside those of the largest; ends they share once."""
    scratch = [step.cost.scratch for step in loop]
    shared = sum(part.result.tile_bytes for part in map(part_of, loop[:-1]) if part is not None)
    return max(0, sum(scratch) - max(scratch) - shared)


def padding_of(layout: Layout) -> int:
    """The bytes that padding adds to a tile."""
    return padded_bytes(layout.tile_shape, layout.dtype) - layout.tile_bytes


def _of_scratch(step: Step) -> int:
    """Buffers are padded like the more padded of the two tiles; a slice at once has a buffer if another dim becomes
    minor.
    """
    part = part_of(step)
    if step.kind == "slice":
        return relaid_bytes(step) if part is None else _of_sliced(part)
    if part is not None:
        return _of_part(step, part)
    box = _message(step)
    if box is not None:
        return max(0, _of_messages(step, box) - step.cost.scratch)
    ends = [end for end in (step.operand, step.result) if end.tile_bytes]
    times = max((padded_bytes(end.tile_shape, end.dtype) / end.tile_bytes for end in ends), default=1.0)
    return int((times - 1) * step.cost.scratch)


def _message(step: Step) -> tuple[int, ...] | None:
    """The extents of the messages of an exchange at once; None where they differ, and for other steps."""
    if step.kind != "exchange" or step.mode != PLAIN or not one_set(step.operand.mesh, step.result.mesh):
        return None
    r = refine(step.operand, step.result)
    return r.box if r is not None and r.exact and step.launches else None


def _of_messages(step: Step, box: Sequence[int]) -> int:
    """Two messages, the wider one in the order of dims of an end; and the copies of ends that messages do not fit."""
    dtype, own = step.operand.dtype, padded_bytes(box, step.operand.dtype)
    widest, copies = own, 0
    for tile in (step.operand.tile_shape, step.result.tile_shape):
        if in_place_of(tile, box, dtype):
            widest = max(widest, _bytes_in(memory_order(tile, dtype), box, dtype))
        else:
            copies += _bytes_in(memory_order(box, dtype), tile, dtype)
    return own + widest + copies


def _of_sliced(part: Part) -> int:
    """A slice in parts reads a whole part if it keeps several ranges of the minor dim, and rearranges it in memory to
    cut out narrow ones.
    """
    ends = padding_of(part.operand) + padding_of(part.result) + _relaid_slice(part.operand, part.result)
    if one_range(part.operand, part.result):
        return ends
    minor = memory_order(part.operand.tile_shape, part.operand.dtype)[-1]
    local = itertools.takewhile(lambda digit: digit.axis is None, reversed(part.result.dims[minor].digits))
    full = math.prod(digit.radix for digit in local) % LANES == 0
    return ends + (1 if full else 2) * part.operand.tile_bytes


def _of_part(step: Step, part: Part) -> int:
    """Messages of narrow boxes are packed, sent, and rearranged; so are tiles whose dims lie in another order than
    theirs.
    """
    dtype, order = part.operand.dtype, memory_order(part.block, part.operand.dtype)
    times = padding_of_block(part)
    if step.mode.in_place:
        return padding_of(part.operand) + padding_of(part.result) + int((times - 1) * message_bytes(step))
    copies = 3 if step.kind == "exchange" else 2 if times > 1 else 1
    if step.kind == "exchange" and not _staged(step, part):
        copies = max(copies, step.launches // step.mode.parts)  # XLA sends all of them at once.
    ends = {"exchange": (part.operand, part.result), "all_gather": (part.result,)}.get(step.kind, ())
    shapes = [end.tile_shape for end in ends]
    relaid = [shape for shape in shapes if memory_order(shape, dtype)[-1] != order[-1]]
    padding = (
        padding_of(part.operand) + padding_of(part.result) + sum(_bytes_in(order, shape, dtype) for shape in relaid)
    )
    return padding + int((times * copies - 1) * message_bytes(step))


def padding_of_block(part: Part) -> float:
    """How many times its own bytes a block that travels in a part needs; a block of fewer than 8 x 128 elements is
    padded to that many.
    """
    elements = math.prod(part.block)
    padded = padded_bytes(part.block, part.operand.dtype) / part.operand.nbytes(elements)
    return max(padded, SUBLANES * LANES / elements)


def _bytes_in(order: Sequence[int], shape: Sequence[int], dtype: str) -> int:
    """The bytes of an array with its dims in memory in this order."""
    return -(-padded_elements([shape[dim] for dim in order], dtype) * dtypes.bits(dtype) // 8)


def one_range(operand: Layout, result: Layout) -> bool:
    """Whether a slice keeps one range of indices of the dim that a TPU has minor in the operand.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=2)) for text in ("f32[256, 256]", "f32[256, {x}128]", "f32[256, 128{x}]")]
    >>> one_range(ends[0], ends[1]), one_range(ends[0], ends[2])
    (True, False)
    """
    minor = memory_order(operand.tile_shape, operand.dtype)[-1]
    held = [[digit.axis is not None for digit in end.dims[minor].digits] for end in (operand, result)]
    return all(flags == sorted(flags, reverse=True) for flags in held)


def message_bytes(step: Step) -> int:
    """The bytes of the messages that a part of a step packs and receives; 0 for a step at once.

    XLA has buffers even for those of an exchange that are one run of memory in both tiles.
    """
    part = part_of(step)
    if part is None:
        return 0
    staged = _staged(step, part)
    return (
        staged
        if step.mode.in_place
        else staged or (2 * step.received_bytes // step.launches if step.kind == "exchange" else 0)
    )


def _staged(step: Step, part: Part) -> int:
    """The bytes of messages that the step's rule counts: none for those that are one run of memory in both tiles."""
    return step.cost.scratch - part.operand.tile_bytes - part.result.tile_bytes


def relaid_bytes(step: Step) -> int:
    """The bytes of a slice that a TPU copies because its order of dims is not the operand's; 0 if they agree.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, 512, 512]", "bf16[512, 512, {x}64]")]
    >>> relaid_bytes(Step("slice", *ends)) // ends[1].tile_bytes
    2
    """
    return _relaid_slice(step.operand, step.result)


def _relaid_slice(operand: Layout, result: Layout) -> int:
    order, shape = memory_order(operand.tile_shape, operand.dtype), result.tile_shape
    if order == memory_order(shape, result.dtype):
        return 0
    return _bytes_in(order, shape, result.dtype)
