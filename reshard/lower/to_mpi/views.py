"""The steps of a move with a view as one device runs them: strided blocks between flat tiles.

    view "a b -> b a" of a tile of 2 x 3    Block((0,), (0,), (Axis(0, 2, 3, 1), Axis(0, 3, 1, 2)))

Two flat tiles have one dim, so a block of any strides in either is written as the blocks of other steps are, and runs
as they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reshard.lower.to_mpi.blocks import Axis, Block
from reshard.lower.views import PutPart, Reorder, Spans, StridedTransfer, TakePart, ViewExchange
from reshard.types.pair.view_boxes import StridedBox
from reshard.types.rules.view import TileOrder

Turn = tuple[tuple[int, tuple[Block, ...]] | None, tuple[int, tuple[Block, ...]] | None]
"""The peer and the blocks of the message that a device sends in a turn, and of the one that it receives."""


def local_blocks(step: Reorder | TakePart | PutPart, before: Sequence[int], after: Sequence[int]) -> tuple[Block, ...]:
    """The copies of a step that sends nothing, between flat tiles of these shapes.

    >>> local_blocks(TakePart(((1, 2),)), (4,), (2,))
    (Block(src=(1,), dst=(0,), axes=(Axis(dim=0, extent=2, src=1, dst=1),)),)
    """
    if isinstance(step, Reorder):
        return _full(_turned(step.order))
    if isinstance(step, TakePart):
        return _full(_part(step.spans, before, after))
    whole = _part(step.spans, after, before)
    return _full(Block(whole.dst, whole.src, tuple(axis._replace(src=axis.dst, dst=axis.src) for axis in whole.axes)))


def exchanged(step: ViewExchange, device: int) -> tuple[tuple[Block, ...], list[Turn]]:
    """The local copies and the turns of one device in an exchange of strided boxes."""
    local = [block for transfer in step.local if transfer.receiver == device for block in _blocks(transfer)]
    turns: list[Turn] = []
    for turn in step.rounds:
        sent = next((t for t in turn if t.sender == device), None)
        received = next((t for t in turn if t.receiver == device), None)
        if sent or received:
            turns.append(
                (
                    None if sent is None else (sent.receiver, _blocks(sent)),
                    None if received is None else (received.sender, _blocks(received)),
                )
            )
    return tuple(local), turns


def _blocks(transfer: StridedTransfer) -> tuple[Block, ...]:
    return tuple(strided_block(box) for box in transfer.boxes)


def strided_block(box: StridedBox) -> Block:
    """A box between two flat tiles.

    >>> strided_block(StridedBox(0, 4, (2, 3), (3, 1), (1, 2)))
    Block(src=(0,), dst=(4,), axes=(Axis(dim=0, extent=2, src=3, dst=1), Axis(dim=0, extent=3, src=1, dst=2)))
    """
    each = zip(box.extents, box.src_strides, box.dst_strides, strict=True)
    return Block((box.src,), (box.dst,), tuple(Axis(0, *axis) for axis in each if axis[0] != 1))


def _turned(order: TileOrder) -> Block:
    """The transposition of a tile, its axes in the order of the result."""
    src = [math.prod(order.digits[at + 1 :]) for at in range(len(order.digits))]
    after = [order.digits[at] for at in order.order]
    dst = [math.prod(after[at + 1 :]) for at in range(len(after))]
    axes = (Axis(0, order.digits[at], src[at], dst[n]) for n, at in enumerate(order.order))
    return Block((0,), (0,), tuple(axis for axis in axes if axis.extent != 1))


def _part(spans: Spans, full: Sequence[int], part: Sequence[int]) -> Block:
    """The spans of a full tile, which make up another tile."""
    src = [math.prod(full[at + 1 :]) for at in range(len(full))]
    dst = [math.prod(part[at + 1 :]) for at in range(len(part))]
    start = sum(low * stride for (low, _), stride in zip(spans, src, strict=True))
    axes = (Axis(0, extent, src[at], dst[at]) for at, (_, extent) in enumerate(spans) if extent != 1)
    return Block((start,), (0,), tuple(axes))


def _full(block: Block) -> tuple[Block, ...]:
    return (block,) if block.elements else ()
