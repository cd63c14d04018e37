"""What tiles need in a TPU's memory, where the two minor dims of an array are padded to 8 x 128 elements.

bf16[64, 64, 32, 64]     64 lanes of 128: twice its bytes, whichever dim is minor
bf16[16, 128, 128, 64]   its bytes: XLA makes a dim of 128 the minor one
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from reshard.lower.part_loops import loops
from reshard.lower.program import part_of
from reshard.lower.to_shard_map import LANES, SUBLANES, lanes_last
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.plan import Plan, Step


def padded_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes of an array with the least padding that some order of its dims has.

    >>> padded_bytes((64, 64, 32, 64), "bfloat16") // (64 * 64 * 32 * 64 * 2)
    2
    >>> padded_bytes((16, 128, 128, 64), "bfloat16") // (16 * 128 * 128 * 64 * 2)
    1
    """
    elements = math.prod(shape)
    if len(shape) > 1 and elements:
        minors = itertools.permutations(shape, 2)
        elements = min(
            elements // (second * minor) * _up(second, SUBLANES) * _up(minor, LANES) for second, minor in minors
        )
    return -(-elements * dtypes.bits(dtype) // 8)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def padding_bytes(plan: Plan) -> int:
    """What padding adds to the plan's peak: that of all tiles and buffers that live at once, in the worst loop."""
    return max((_padding(plan, loop) for loop in loops(plan.steps)), default=padding_of(plan.source))


def _padding(plan: Plan, loop: Sequence[Step]) -> int:
    first, last = loop[0], loop[-1]
    tiles = [last.result] if last.mode.in_place else [first.operand, last.result]
    if first is not plan.steps[0] and first.retained_bytes:
        tiles.append(plan.source)
    if not all(step.mode.in_place for step in plan.steps[plan.steps.index(last) + 1 :]):
        tiles.append(plan.target)  # XLA has its memory from the start.
    return sum(map(padding_of, tiles)) + max(map(_of_scratch, loop))


def padding_of(layout: Layout) -> int:
    """The bytes that padding adds to a tile."""
    return padded_bytes(layout.tile_shape, layout.dtype) - layout.tile_bytes


def _of_scratch(step: Step) -> int:
    """Buffers are padded as the tile is that is padded more; a slice at once has one if another dim becomes minor."""
    if step.kind == "slice" and step.mode.parts == 1:
        return relaid_bytes(step)
    part = part_of(step)
    if part is not None:
        times = padded_bytes(part.block, part.operand.dtype) / part.operand.nbytes(math.prod(part.block))
        rounds = 2 if step.kind == "exchange" else 1
        relaid = 2 * sum(map(_relaid, (part.operand, part.result))) if rounds == 2 and times > 1 else 0
        padding = padding_of(part.operand) + padding_of(part.result)
        return padding + relaid + int((times - 1) * rounds * message_bytes(step))
    ends = [end for end in (step.operand, step.result) if end.tile_bytes]
    times = max((padded_bytes(end.tile_shape, end.dtype) / end.tile_bytes for end in ends), default=1.0)
    return int((times - 1) * step.cost.scratch)


def _relaid(layout: Layout) -> int:
    """What a tile needs more with its last dim minor, as an exchange of narrow boxes leaves it."""
    *major, second, minor = (1, 1, *layout.tile_shape)
    in_order = layout.nbytes(math.prod(major) * _up(second, SUBLANES) * _up(minor, LANES))
    return in_order - padded_bytes(layout.tile_shape, layout.dtype)


def message_bytes(step: Step) -> int:
    """The bytes of the messages that a part of a step packs and receives; 0 for a step at once."""
    part = part_of(step)
    return 0 if part is None else step.cost.scratch - part.operand.tile_bytes - part.result.tile_bytes


def relaid_bytes(step: Step) -> int:
    """The bytes of a slice that a TPU copies because its order of dims is not the operand's; 0 if they agree.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=8)) for text in ("bf16[512, 512, 512]", "bf16[512, 512, {x}64]")]
    >>> relaid_bytes(Step("slice", *ends)) // ends[1].tile_bytes
    2
    """
    order, shape = lanes_last(step.operand.tile_shape), step.result.tile_shape
    if len(shape) < 2 or order == lanes_last(shape):
        return 0
    *major, second, minor = (shape[dim] for dim in order)
    elements = math.prod(major) * _up(second, SUBLANES) * _up(minor, LANES)
    return -(-elements * dtypes.bits(step.result.dtype) // 8)
