"""A checked plan as one device runs it: for each step its local copies and its messages, turn by turn.

An all-to-all of four devices on a mesh x=4, as device 1 runs it:

    turn    sends block    to    receives from    into block
    -       1              1     1                1             a local copy
    0       2              2     0                0
    1       3              3     3                3
    2       0              0     2                2

In each turn every device sends at most one message and receives at most one, and the peer of a send receives in the
same turn. The first unfinished message is therefore posted at both ends, so ranks that keep the order of the turns
never deadlock, however few buffers they have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.blocks import Block as FlatBlock
from reshard.lower.exchange_rounds import ExchangeInPlace, Span, Transfer
from reshard.lower.groups import Groups
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    CastTiles,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Plain,
    PutPart,
    ReduceScatter,
    Reorder,
    Slice,
    Spans,
    SplitSum,
    TakePart,
    is_alias,
    lower_steps,
)
from reshard.lower.to_mpi.blocks import Axis, Block, block_of_part, block_of_spans, fold_blocks, list_starts, whole_tile
from reshard.lower.to_mpi.boxes import Sides, is_closed, own_boxes
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.tile_view import TileView
from reshard.plans.rules.view_steps import TileOrder


class PeerBlocks(NamedTuple):
    """The blocks of one message to or from a peer (a device id), in order; padding is sent too."""

    peer: int
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        """Elements in the message."""
        return sum(block.elements for block in self.blocks)


class SendReceive(NamedTuple):
    """One turn: the message that a device sends and the one that it receives, if any."""

    send: PeerBlocks | None
    receive: PeerBlocks | None


@dataclass(frozen=True)
class StepMessages:
    """Local copies, then turns in an order common to all devices; up to `scratch` bytes may stage messages.

    With `flat`, the blocks are of flat tiles. The turns of `passed` follow those of `turns`, and send from the result's
    tile what has arrived there. A step that `is_alias` leaves every tile's memory as it is, so that nothing need be
    copied; one that `fills` writes into a result's tile that is there already.
    """

    local: tuple[Block, ...]
    turns: tuple[SendReceive, ...]
    scratch: int
    flat: bool = False
    passed: tuple[SendReceive, ...] = ()
    aliases: bool = False
    fills: bool = False


@dataclass(frozen=True)
class Reduce:
    """A reduction over the devices of `group`: a reduce-scatter if `scatter`, else an all-reduce.

    `each` has one tuple per part of the step; its blocks, one per share in group order, map the operand's tile to
    the result's tile of the member that keeps the share. `packed`: the operand's blocks must be packed, because
    they are not consecutive in memory. `placed`: the combined block must be copied into place in the result.
    """

    group: tuple[int, ...]
    reduction: str
    scatter: bool
    each: tuple[tuple[Block, ...], ...]
    packed: bool
    placed: bool


@dataclass(frozen=True)
class NewSummand:
    """A tile filled with the identity of `reduction`, into which blocks of the operand's tile are copied."""

    local: tuple[Block, ...]
    reduction: str


class SlotMessage(NamedTuple):
    """Elements `start` to `start + length` of a slot, sent to or received from the same offsets of a peer's slot."""

    peer: int
    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Overwrite:
    """An exchange inside one buffer of `slots` slots of `slot` elements each.

    The tile is packed into slots, each turn sends one slot and receives into another, and the slots are unpacked
    into the result's tile. `pack` and `unpack` pair each slot number with a block of the operand's or of the result's
    tile (the block's `src` end).
    """

    slot: int
    slots: int
    pack: tuple[tuple[int, Block], ...]
    turns: tuple[tuple[SlotMessage | None, SlotMessage | None], ...]
    unpack: tuple[tuple[int, Block], ...]
    scratch: int


RankStep = StepMessages | Reduce | NewSummand | Overwrite | CastTiles


@dataclass(frozen=True)
class Schedule:
    """One device's steps, the shape of its tile before the first one, and after each.

    Where the device is outside the mesh of a layout, its tile there has no elements, and nothing of a step among others
    is its own: such a step has no messages, or is a reduction without a group.
    """

    tile_shape: tuple[int, ...]
    steps: tuple[RankStep, ...]
    tile_shapes: tuple[tuple[int, ...], ...]


def schedule_device(plan: Plan, device: int) -> Schedule:
    """The schedule of one device (an id of the mesh) in a checked plan; `PlanError` if `plan` is not one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> step = schedule_device(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), 0).steps[0]
    >>> sent = step.turns[0].send
    >>> sent.peer, sent.blocks[0].src, sent.blocks[0].dst, sent.blocks[0].extents
    (1, (0, 2), (0, 0), (2, 2))
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"schedule takes a checked Plan, not {type(plan).__name__}; make one with reshard.plan()")
    steps = tuple(_own_step(step, device) for step in plan.steps)
    shapes = [
        layout.tile_shape if device in layout.mesh.devices else (0,) * max(1, len(layout.shape))
        for layout in (plan.source, *(step.result for step in plan.steps))
    ]
    return Schedule(shapes[0], steps, tuple(shapes[1:]))


def _own_step(step: Step, device: int) -> RankStep:
    """A device's part of a step, in which it may have none."""
    scratch = step.cost.scratch
    if is_closed(step, device):
        local, messages, passed = own_boxes(step, device)
        return StepMessages(local, _zip_rounds(messages), scratch, passed=_zip_rounds(passed))
    (instruction,) = lower_steps(step.operand, [step], device).instructions
    # A cast is one on every rank, with a tile or without: it changes the dtype of all steps that follow.
    if isinstance(instruction, CastTiles) or device in (*step.operand.mesh.devices, *step.result.mesh.devices):
        return _lower_step(instruction, device, step.operand.tile_shape, scratch, step.result.tile_shape)
    if step.kind in ("reduce_scatter", "all_reduce"):
        return Reduce((), str(step.operand.reduction), step.kind == "reduce_scatter", (), False, False)
    # Ranks drop a step that leaves memory as it is: all must, or they meet at different points of the call.
    return StepMessages((), (), scratch, aliases=is_alias(instruction))


def _lower_step(
    instruction: Instruction, device: int, shape: Sequence[int], scratch: int, after: Sequence[int] = ()
) -> RankStep:
    match instruction:
        case CastTiles():
            return instruction
        case Exchange(strided=True):
            local, turns = strided_rounds(instruction, device)
            rounds = tuple(_name_peers(turn) for turn in turns)
            return StepMessages(local, rounds, scratch, flat=True, fills=instruction.fills)
        case Reorder() | TakePart() | PutPart():
            kept, fills = is_alias(instruction), isinstance(instruction, PutPart)
            return StepMessages(local_blocks(instruction, shape, after), (), 0, True, aliases=kept, fills=fills)
        case InParts(in_place=True):
            raise PlanError("parts that take each other's place run on JAX alone; for MPI, plan an exchange in place")
        case InParts():
            return _lower_parts(instruction, device, shape, scratch)
        case ReduceScatter() | AllReduce():
            return _lower_reduction(instruction, device, shape)
        case SplitSum():
            return _lower_summand(instruction, device)
        case ExchangeInPlace():
            return _lower_overwrite(instruction, device, scratch)
        case _:
            return _lower_messages(instruction, device, shape, scratch)


def _zip_rounds(sides: Sides) -> tuple[SendReceive, ...]:
    return tuple(_name_peers(turn) for turn in itertools.zip_longest(*sides))


def _name_peers(turn: Turn) -> SendReceive:
    sent, received = turn
    return SendReceive(None if sent is None else PeerBlocks(*sent), None if received is None else PeerBlocks(*received))


def _lower_parts(parts: InParts, device: int, shape: Sequence[int], scratch: int) -> RankStep:
    """The blocks of all parts, as blocks of the whole tiles, so that no part is cut out before it moves."""
    cut = parts.take
    part = [cut.outer * cut.inner if dim == cut.axis else extent for dim, extent in enumerate(shape)]
    one = _lower_step(parts.each, device, part, scratch)
    numbers = range(cut.parts)

    def in_tile(blocks: Sequence[Block], number: int) -> tuple[Block, ...]:
        return tuple(block_of_part(block, parts.take, parts.put, number) for block in blocks)

    def side(message: PeerBlocks | None, number: int) -> PeerBlocks | None:
        return None if message is None else PeerBlocks(message.peer, in_tile(message.blocks, number))

    match one:
        case Reduce():
            each = tuple(in_tile(blocks, number) for number in numbers for blocks in one.each)
            return replace(one, each=each, packed=True, placed=True)
        case NewSummand():
            return replace(one, local=tuple(block for number in numbers for block in in_tile(one.local, number)))
        case StepMessages():
            local = tuple(block for number in numbers for block in in_tile(one.local, number))
            turns = [SendReceive(side(t.send, n), side(t.receive, n)) for n in numbers for t in one.turns]
            return StepMessages(local, tuple(turns), scratch)
        case Overwrite() | CastTiles():
            raise PlanError("an exchange in place cannot run in parts; plan it with chunks")


def _lower_messages(step: Plain, device: int, shape: Sequence[int], scratch: int) -> StepMessages:
    match step:
        case Slice(send=send, receive=receive, block=block):
            return StepMessages(_drop_empty(_block_between(send, block[device], receive, 0)), (), scratch)
        case AllGather(groups=groups, send=send, receive=receive) | AllToAll(groups=groups, send=send, receive=receive):
            group = _group_with(groups, device)
            return _rounds_of_group(group, group.index(device), send, receive, isinstance(step, AllToAll), scratch)
        case Permute(pairs=pairs):
            return _round_of_pairs(pairs, device, whole_tile(shape), scratch)
        case Exchange():
            local = [_blocks_of_slices(transfer, step) for transfer in step.local if transfer.receiver == device]
            local += [
                _blocks_of_slices(t, step) for turn in step.rounds for t in turn if t.sender == t.receiver == device
            ]
            turns = (_own_round(turn, device, step) for turn in step.rounds)
            return StepMessages(tuple(itertools.chain(*local)), tuple(t for t in turns if t != _IDLE), scratch)
        case _:
            raise PlanError(f"{type(step).__name__} sends no messages")


_IDLE = SendReceive(None, None)


def _rounds_of_group(
    group: tuple[int, ...], me: int, send: TileView, receive: TileView, each: bool, scratch: int
) -> StepMessages:
    """The turns of a gather or an all-to-all: turn k sends to the k-th next member, receives from the k-th previous."""
    leave, arrive = list_starts(send), list_starts(receive)
    axes = _block_between(send, 0, receive, 0).axes

    def to(sender: int, receiver: int) -> tuple[Block, ...]:
        return (Block(leave[receiver if each else 0], arrive[sender], axes),)

    if any(not axis.extent for axis in axes):
        return StepMessages((), (), scratch)
    size = len(group)
    turns = [
        SendReceive(PeerBlocks(group[after], to(me, after)), PeerBlocks(group[before], to(before, me)))
        for after, before in (((me + k) % size, (me - k) % size) for k in range(1, size))
    ]
    return StepMessages(to(me, me), tuple(turns), scratch)


def _round_of_pairs(pairs: Sequence[tuple[int, int]], device: int, block: Block, scratch: int) -> StepMessages:
    blocks = _drop_empty(block)
    if not blocks or (device, device) in pairs:
        return StepMessages(blocks, (), scratch)
    send = next((PeerBlocks(receiver, blocks) for sender, receiver in pairs if sender == device), None)
    receive = next((PeerBlocks(sender, blocks) for sender, receiver in pairs if receiver == device), None)
    return StepMessages((), (SendReceive(send, receive),), scratch)


def _own_round(turn: Sequence[Transfer], device: int, step: Exchange) -> SendReceive:
    sent = next((t for t in turn if t.sender == device != t.receiver), None)
    received = next((t for t in turn if t.receiver == device != t.sender), None)
    return SendReceive(
        None if sent is None else PeerBlocks(sent.receiver, _blocks_of_slices(sent, step)),
        None if received is None else PeerBlocks(received.sender, _blocks_of_slices(received, step)),
    )


def _blocks_of_slices(transfer: Transfer, step: Exchange) -> tuple[Block, ...]:
    boxes = step.slice_transfer(transfer).boxes
    return tuple(
        fold_blocks(block_of_spans(step.send, box.src, step.receive, box.dst) for box in boxes if box.elements)
    )


def _lower_reduction(step: ReduceScatter | AllReduce, device: int, shape: Sequence[int]) -> Reduce:
    group = _group_with(step.groups, device)
    if isinstance(step, AllReduce):
        return Reduce(group, step.reduction, False, (_drop_empty(whole_tile(shape)),), False, False)
    blocks = tuple(
        itertools.chain(*(_drop_empty(_block_between(step.send, n, step.receive, 0)) for n in range(len(group))))
    )
    placed = step.receive.tile != step.receive.padded
    return Reduce(group, step.reduction, True, (blocks,), not step.send.in_place, placed)


def _lower_summand(step: SplitSum, device: int) -> NewSummand:
    place = step.place[device]
    kept = () if place is None else _drop_empty(_block_between(step.send, step.keep[device], step.receive, place))
    return NewSummand(kept, step.reduction)


def _lower_overwrite(step: ExchangeInPlace, device: int, scratch: int) -> Overwrite:
    turns: list[tuple[SlotMessage | None, SlotMessage | None]] = []
    for turn in step.rounds:
        out = next((SlotMessage(t.receiver, t.src_slot, t.start, t.length) for t in turn if t.sender == device), None)
        into = next((SlotMessage(t.sender, t.dst_slot, t.start, t.length) for t in turn if t.receiver == device), None)
        if out or into:
            turns.append((out, into))

    def slots(view: TileView, places: Sequence[tuple[int, Sequence[int | None]]]) -> Iterator[tuple[int, Block]]:
        for slot, place in places:
            spans = [(0, radix) if at is None else (at, 1) for radix, at in zip(view.digits, place, strict=True)]
            yield slot, block_of_spans(view, spans, view, spans)

    pack, unpack = slots(step.send, step.pack[device]), slots(step.receive, step.unpack[device])
    return Overwrite(step.slot, step.slots, tuple(pack), tuple(turns), tuple(unpack), scratch)


def _block_between(send: TileView, block: int, receive: TileView, place: int) -> Block:
    """Block number `block` of the sender's view, placed as block number `place` of the receiver's."""
    return block_of_spans(send, _spans_of_number(send, block), receive, _spans_of_number(receive, place))


def _spans_of_number(view: TileView, number: int) -> list[Span]:
    spans = [(0, radix) for radix in view.digits]
    for axis in reversed(view.blocks):
        number, value = divmod(number, view.digits[axis])
        spans[axis] = (value, 1)
    return spans


def _drop_empty(block: Block) -> tuple[Block, ...]:
    """The block as a tuple of one, or of none if it is empty."""
    return (block,) if block.elements else ()


def _group_with(groups: Groups, device: int) -> tuple[int, ...]:
    return next(group for group in groups if device in group)


# The steps of a move with a view as one device runs them: strided blocks between flat tiles.
#
#     view "a b -> b a" of a tile of 2 x 3    Block((0,), (0,), (Axis(0, 2, 3, 1), Axis(0, 3, 1, 2)))
#
# Two flat tiles have one dim, so a block of any strides in either is written as the blocks of other steps are, and runs
# as they do.


Turn = tuple[tuple[int, tuple[Block, ...]] | None, tuple[int, tuple[Block, ...]] | None]
"""The peer and the blocks of the message that a device sends in a turn, and of the one that it receives."""


def local_blocks(step: Reorder | TakePart | PutPart, before: Sequence[int], after: Sequence[int]) -> tuple[Block, ...]:
    """The copies of a step that sends nothing, between flat tiles of these shapes.

    >>> local_blocks(TakePart(((1, 2),)), (4,), (2,))
    (Block(src=(1,), dst=(0,), axes=(Axis(dim=0, extent=2, src=1, dst=1),)),)
    """
    if isinstance(step, Reorder):
        return _full_block(_transpose_block(step.order))
    if isinstance(step, TakePart):
        return _full_block(_block_of_part(step.spans, before, after))
    whole = _block_of_part(step.spans, after, before)
    return _full_block(
        Block(whole.dst, whole.src, tuple(axis._replace(src=axis.dst, dst=axis.src) for axis in whole.axes))
    )


def strided_rounds(step: Exchange, device: int) -> tuple[tuple[Block, ...], list[Turn]]:
    """The local copies and the turns of one device in an exchange of strided boxes."""
    local = [block for transfer in step.local if transfer.receiver == device for block in _strided_blocks(transfer)]
    turns: list[Turn] = []
    for turn in step.rounds:
        sent = next((t for t in turn if t.sender == device), None)
        received = next((t for t in turn if t.receiver == device), None)
        if sent or received:
            turns.append(
                (
                    None if sent is None else (sent.receiver, _strided_blocks(sent)),
                    None if received is None else (received.sender, _strided_blocks(received)),
                )
            )
    return tuple(local), turns


def _strided_blocks(transfer: Transfer) -> tuple[Block, ...]:
    return tuple(strided_block(block) for block in transfer.blocks)


def strided_block(block: FlatBlock) -> Block:
    """A block between two flat tiles, as one of tiles of one dim."""
    return Block((block.src,), (block.dst,), tuple(Axis(0, *axis) for axis in block.axes if axis.extent != 1))


def _transpose_block(order: TileOrder) -> Block:
    """The transposition of a tile, its axes in the order of the result."""
    src = [math.prod(order.digits[at + 1 :]) for at in range(len(order.digits))]
    after = [order.digits[at] for at in order.order]
    dst = [math.prod(after[at + 1 :]) for at in range(len(after))]
    axes = (Axis(0, order.digits[at], src[at], dst[n]) for n, at in enumerate(order.order))
    return Block((0,), (0,), tuple(axis for axis in axes if axis.extent != 1))


def _block_of_part(spans: Spans, full: Sequence[int], part: Sequence[int]) -> Block:
    """The spans of a full tile, which make up another tile."""
    src = [math.prod(full[at + 1 :]) for at in range(len(full))]
    dst = [math.prod(part[at + 1 :]) for at in range(len(part))]
    start = sum(low * stride for (low, _), stride in zip(spans, src, strict=True))
    axes = (Axis(0, extent, src[at], dst[at]) for at, (_, extent) in enumerate(spans) if extent != 1)
    return Block((start,), (0,), tuple(axes))


def _full_block(block: Block) -> tuple[Block, ...]:
    return (block,) if block.elements else ()
