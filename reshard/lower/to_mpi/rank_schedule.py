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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, overload

import numpy as np

from reshard.errors import PlanError
from reshard.geometry.blocks import Axis, Block, cut_block, list_strides
from reshard.geometry.figures import exchange_figures
from reshard.geometry.holders import holders
from reshard.geometry.messages import Message, messages_of
from reshard.geometry.refine import refine
from reshard.geometry.relay import relay_messages
from reshard.geometry.remesh import one_set
from reshard.lower.exchange_rounds import CutTurns, ExchangeInPlace, Span, Transfer
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
from reshard.lower.to_mpi.fetches import list_across
from reshard.lower.to_mpi.peer_table import Column, PeerTable
from reshard.lower.to_mpi.tile_blocks import (
    Blocks,
    Frames,
    Shape,
    block_of_part,
    block_of_spans,
    block_of_tile,
    clip_block,
    list_starts,
    multiply_factors,
)
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.types.layout import Layout


class PeerBlocks(NamedTuple):
    """The blocks of one message to or from a peer (a device id), in order; padding is sent too."""

    peer: int
    blocks: Blocks


class SendReceive(NamedTuple):
    """One turn: the message that a device sends and the one that it receives, if any."""

    send: PeerBlocks | None
    receive: PeerBlocks | None


@dataclass(frozen=True, eq=False)
class TableTurns(Sequence[SendReceive]):
    """Turns with a message to each peer of one table, and from each of another one, in the order of their rows."""

    sends: PeerTable
    receives: PeerTable

    def __len__(self) -> int:
        """How many turns there are."""
        return max(len(self.sends), len(self.receives))

    @overload
    def __getitem__(self, number: int) -> SendReceive: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[SendReceive]: ...
    def __getitem__(self, number: int | slice) -> SendReceive | Sequence[SendReceive]:
        """The turn of this number, or some of them."""
        turns = range(len(self))[number]
        if not isinstance(turns, int):
            return [self[at] for at in turns]
        # Where a device sends to more than it receives from, the last turns have no message to receive.
        ends = (
            PeerBlocks(int(table.peers[turns]), table.blocks_of_row(turns)) if turns < len(table) else None
            for table in (self.sends, self.receives)
        )
        return SendReceive(*ends)


Turns = Sequence[SendReceive]


@dataclass(frozen=True)
class StepMessages:
    """Local copies, then turns in an order common to all devices; up to `scratch` bytes may stage messages.

    The blocks of messages lie in tiles of the shapes `frames`, which may be padded, or None if they lie in the tiles as
    they are; local copies are between tiles without that padding. The turns of `passed` follow those of `turns`, and
    send from the result's tile what has arrived there. A step that `aliases` leaves every tile's memory as it is, so
    that nothing need be copied; one that `fills` writes into a result's tile that is there already.
    """

    local: Blocks
    turns: Turns
    scratch: int
    frames: Frames | None = None
    passed: Turns = ()
    aliases: bool = False
    fills: bool = False


@dataclass(frozen=True)
class Reduce:
    """A reduction over the devices of `group`: a reduce-scatter if `scatter`, else an all-reduce.

    `each` has one tuple per part of the step; its blocks, one per share in group order, map the operand's tile, padded
    to the first of the `frames`, to the result's tile of the member that keeps the share, padded to the second.
    `packed`: the operand's blocks must be packed, because they are not consecutive in memory. `placed`: the combined
    block must be copied into place in the result.
    """

    group: tuple[int, ...]
    reduction: str
    scatter: bool
    each: tuple[Blocks, ...]
    packed: bool
    placed: bool
    frames: Frames = ((), ())


@dataclass(frozen=True)
class NewSummand:
    """A tile filled with the identity of `reduction`, into which blocks of the operand's tile are copied."""

    local: Blocks
    reduction: str
    frames: Frames | None = None


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
    turns: Sequence[tuple[SlotMessage | None, SlotMessage | None]]
    unpack: tuple[tuple[int, Block], ...]
    scratch: int


RankStep = StepMessages | Reduce | NewSummand | Overwrite | CastTiles


@dataclass(frozen=True)
class Schedule:
    """One device's steps, the shape of its tile before the first one, and after each.

    Where the device is outside the mesh of a layout, its tile there has no elements, and nothing of a step among others
    is its own: such a step has no messages, or is a reduction without a group.
    """

    tile_shape: Shape
    steps: tuple[RankStep, ...]
    tile_shapes: tuple[Shape, ...]


def schedule_device(plan: Plan, device: int) -> Schedule:
    """The schedule of one device (an id of the mesh) in a checked plan; `PlanError` if `plan` is not one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> step = schedule_device(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), 0).steps[0]
    >>> sent = step.turns[0].send
    >>> sent.peer, sent.blocks[0].src, sent.blocks[0].dst, sent.blocks[0].extents
    (1, 2, 0, (2, 2))
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"schedule takes a checked Plan, not {type(plan).__name__}; make one with reshard.plan()")
    steps = tuple(_schedule_step(step, device) for step in plan.steps)
    shapes = [
        layout.tile_shape if device in layout.mesh.devices else (0,) * max(1, len(layout.shape))
        for layout in (plan.source, *(step.result for step in plan.steps))
    ]
    return Schedule(shapes[0], steps, tuple(shapes[1:]))


LEAST_STAGED = 4 << 10
"""Bytes of a message from which it takes no longer to send it than MPI takes to pack as many that lie in short runs."""

_MANY = 1000  # Messages that a rank receives: fewer are small ones, too.


def is_worth_staging(staging: int, received: int) -> bool:
    """Whether messages of at most so many bytes are worth it, if a rank receives so many: if not, MPI
    sends them from tile to tile, as it does without a buffer.

    >>> is_worth_staging(64, 10 << 20), is_worth_staging(64, 4 << 10), is_worth_staging(4 << 10, 10 << 20)
    (False, True, True)
    """
    return staging > 0 and (staging >= LEAST_STAGED or received <= _MANY * staging)


def _schedule_step(step: Step, device: int) -> RankStep:
    """A device's part of a step, in which it may have none."""
    scratch = step.cost.scratch
    if step.kind == "exchange" and not step.mode.in_place:
        # Where no buffer stages a message, it is sent and received where it lies, however many runs it has.
        scratch = scratch if is_worth_staging(scratch // 2, step.received_bytes) else 0
        if not scratch:
            step = replace(step, mode=step.mode._replace(chunk=None))
    if is_closed(step, device):
        return own_boxes(step, device, scratch)
    (instruction,) = lower_steps(step.operand, [step], device).instructions
    # A cast is one on every rank, with a tile or without: it changes the dtype of all steps that follow.
    if not isinstance(instruction, CastTiles) and device not in (*step.operand.mesh.devices, *step.result.mesh.devices):
        if step.kind in ("reduce_scatter", "all_reduce"):
            return Reduce((), str(step.operand.reduction), step.kind == "reduce_scatter", (), False, False)
        # Ranks drop a step that leaves memory as it is: all must, or they meet at different points of the call.
        return StepMessages((), (), scratch, aliases=is_alias(instruction))
    shapes = step.operand.tile_shape, step.result.tile_shape
    mine = _lower_instruction(instruction, device, shapes, scratch)
    if not isinstance(mine, StepMessages | NewSummand) or mine.frames is None:
        return mine
    # Messages keep their padding until they are cut, so that both ends cut alike; what stays here need not.
    local = tuple(part for block in mine.local for part in clip_block(block, mine.frames, shapes))
    return replace(mine, local=local, frames=None if mine.frames == shapes else mine.frames)


def _lower_instruction(instruction: Instruction, device: int, shapes: Frames, scratch: int) -> RankStep:
    match instruction:
        case CastTiles():
            return instruction
        case Reorder() | TakePart() | PutPart():
            kept, fills = is_alias(instruction), isinstance(instruction, PutPart)
            return StepMessages(local_blocks(instruction, *shapes), (), 0, aliases=kept, fills=fills)
        case InParts(in_place=True):
            raise PlanError("parts that take each other's place run on JAX alone; for MPI, plan an exchange in place")
        case InParts():
            return _lower_parts(instruction, device, shapes, scratch)
        case Slice(send=send, receive=receive, block=block):
            local = _block_between(send, block[device], receive, 0)
            return StepMessages(local, (), scratch, (send.padded, receive.padded))
        case AllGather() | AllToAll():
            return _lower_group(instruction, device, scratch)
        case Permute(pairs=pairs):
            whole = _full_blocks(block_of_tile(shapes[0]))
            if not whole or (device, device) in pairs:
                return StepMessages(whole, (), scratch, shapes)
            send = next((PeerBlocks(receiver, whole) for sender, receiver in pairs if sender == device), None)
            receive = next((PeerBlocks(sender, whole) for sender, receiver in pairs if receiver == device), None)
            return StepMessages((), (SendReceive(send, receive),), scratch, shapes)
        case Exchange():
            return _lower_exchange(instruction, device, scratch)
        case AllReduce(groups=groups, reduction=reduction):
            each = _full_blocks(block_of_tile(shapes[0]))
            return Reduce(_group_with(groups, device), reduction, False, (each,), False, False, (shapes[0], shapes[0]))
        case ReduceScatter(groups=groups, send=send, receive=receive, reduction=reduction):
            group = _group_with(groups, device)
            each = itertools.chain(*(_block_between(send, n, receive, 0) for n in range(len(group))))
            packed, placed = not send.in_place, receive.tile != receive.padded
            return Reduce(group, reduction, True, (tuple(each),), packed, placed, (send.padded, receive.padded))
        case SplitSum(send=send, receive=receive, reduction=reduction):
            place = instruction.place[device]
            kept = () if place is None else _block_between(send, instruction.keep[device], receive, place)
            return NewSummand(kept, reduction, (send.padded, receive.padded))
        case ExchangeInPlace():
            return _lower_overwrite(instruction, device, scratch)


def _lower_parts(parts: InParts, device: int, shapes: Frames, scratch: int) -> RankStep:
    """The blocks of all parts, as blocks of the whole tiles, so that no part is cut out before it moves."""
    take, put = parts.take, parts.put

    def resize(shape: Shape, cut: Cut, extent: int) -> Shape:
        return (*shape[: cut.axis], extent, *shape[cut.axis + 1 :])

    part = tuple(resize(shape, cut, cut.outer * cut.inner) for shape, cut in zip(shapes, (take, put), strict=True))
    one = _lower_instruction(parts.each, device, (part[0], part[1]), scratch)
    if isinstance(one, Overwrite | CastTiles) or one.frames is None:
        raise PlanError("an exchange in place cannot run in parts; plan it with chunks")
    numbers, frames = range(take.parts), one.frames
    # The dim that is cut has no padding: nothing is cut where there is some.
    before, after = (resize(f, c, c.outer * c.inner * c.parts) for f, c in zip(frames, (take, put), strict=True))

    def in_tile(blocks: Blocks, number: int) -> Blocks:
        return tuple(block_of_part(block, take, put, number, frames) for block in blocks)

    def side(message: PeerBlocks | None, number: int) -> PeerBlocks | None:
        return None if message is None else PeerBlocks(message.peer, in_tile(message.blocks, number))

    if isinstance(one, Reduce):
        each = tuple(in_tile(blocks, number) for number in numbers for blocks in one.each)
        return replace(one, each=each, packed=True, placed=True, frames=(before, after))
    local = tuple(block for number in numbers for block in in_tile(one.local, number))
    if isinstance(one, NewSummand):
        return replace(one, local=local, frames=(before, after))
    turns = [SendReceive(side(t.send, n), side(t.receive, n)) for n in numbers for t in one.turns]
    return StepMessages(local, tuple(turns), scratch, (before, after))


def _lower_group(step: AllGather | AllToAll, device: int, scratch: int) -> StepMessages:
    """The turns of a gather or an all-to-all: turn k sends to the k-th next member, receives from the k-th previous."""
    group = _group_with(step.groups, device)
    me, size, each = group.index(device), len(group), isinstance(step, AllToAll)
    leave, arrive = list_starts(step.send), list_starts(step.receive)
    frames = step.send.padded, step.receive.padded
    blocks = _block_between(step.send, 0, step.receive, 0)
    if not blocks:
        return StepMessages((), (), scratch, frames)

    def table(sender: Column, receiver: Column, peers: Column) -> PeerTable:
        dst = np.broadcast_to(np.array(arrive)[sender], peers.shape)
        src = np.broadcast_to(np.array(leave)[receiver if each else 0], peers.shape)
        return PeerTable(np.array(group)[peers], src, dst, 0 * peers, ((Block(0, 0, blocks[0].axes),),))

    mine, turn = np.array([me]), np.arange(1, size)
    after, before = (mine + turn) % size, (mine - turn) % size
    turns = TableTurns(table(mine, after, after), table(before, mine, before))
    return StepMessages(table(mine, mine, mine).blocks_of_row(0), turns, scratch, frames)


def _lower_exchange(step: Exchange, device: int, scratch: int) -> StepMessages:
    def blocks_of(transfer: Transfer) -> Blocks:
        return tuple([block for block in transfer.blocks if block.elements])

    local: list[Block] = []
    turns: tuple[list[SendReceive], list[SendReceive]] = [], []  # Those of a relay's second round, too.
    for turn in (step.local, *step.rounds):
        mine = [transfer for transfer in turn if device in transfer[:2]]
        local += [block for t in mine if t.sender == t.receiver for block in blocks_of(t)]
        sent = next((PeerBlocks(t.receiver, blocks_of(t)) for t in mine if t.receiver != device), None)
        received = next((PeerBlocks(t.sender, blocks_of(t)) for t in mine if t.sender != device), None)
        if sent or received:
            turns[any(t.relayed for t in mine)].append(SendReceive(sent, received))
    first, passed = map(tuple, turns)
    frames = step.send.padded, step.receive.padded
    return StepMessages(tuple(local), first, scratch, frames, passed, fills=step.fills)


def _lower_overwrite(step: ExchangeInPlace, device: int, scratch: int) -> Overwrite:
    turns: list[tuple[SlotMessage | None, SlotMessage | None]] = []
    rounds = step.rounds
    for turn in rounds.whole if isinstance(rounds, CutTurns) else rounds:
        out = next((SlotMessage(t.receiver, t.src_slot, t.start, t.length) for t in turn if t.sender == device), None)
        into = next((SlotMessage(t.sender, t.dst_slot, t.start, t.length) for t in turn if t.receiver == device), None)
        if out or into:
            turns.append((out, into))

    def slots(view: TileView, places: Sequence[tuple[int, Sequence[int | None]]]) -> Iterator[tuple[int, Block]]:
        for slot, place in places:
            spans = [(0, radix) if at is None else (at, 1) for radix, at in zip(view.digits, place, strict=True)]
            yield slot, block_of_spans(view, spans, view, spans)

    pack, unpack = slots(step.send, step.pack[device]), slots(step.receive, step.unpack[device])
    mine: Sequence[tuple[SlotMessage | None, SlotMessage | None]] = tuple(turns)
    if isinstance(rounds, CutTurns):
        mine = CutTurns(tuple(turns), rounds.length, rounds.largest)
    return Overwrite(step.slot, step.slots, tuple(pack), mine, tuple(unpack), scratch)


def _block_between(send: TileView, block: int, receive: TileView, place: int) -> Blocks:
    """Block number `block` of the sender's view, placed as block number `place` of the receiver's; none if empty."""

    def spans(view: TileView, number: int) -> list[Span]:
        each = [(0, radix) for radix in view.digits]
        for digit in reversed(view.blocks):
            number, value = divmod(number, view.digits[digit])
            each[digit] = value, 1
        return each

    return _full_blocks(block_of_spans(send, spans(send, block), receive, spans(receive, place)))


def _full_blocks(block: Block) -> Blocks:
    """The block as a tuple of one, or of none if it is empty."""
    return (block,) if block.elements else ()


def _group_with(groups: Groups, device: int) -> tuple[int, ...]:
    return next(group for group in groups if device in group)


def local_blocks(step: Reorder | TakePart | PutPart, before: Sequence[int], after: Sequence[int]) -> Blocks:
    """The copies of a step that changes indices and sends nothing, between tiles of these shapes.

    >>> local_blocks(TakePart(((1, 2),)), (4,), (2,))
    (Block(src=1, dst=0, axes=(Axis(extent=2, src=1, dst=1),)),)
    """
    if isinstance(step, Reorder):
        digits, order = step.order
        src, dst = list_strides(digits), list_strides([digits[at] for at in order])
        axes = [Axis(digits[at], src[at], dst[n]) for n, at in enumerate(order) if digits[at] != 1]
        return _full_blocks(Block(0, 0, tuple(axes)))
    if isinstance(step, TakePart):
        return _full_blocks(_block_of_window(step.spans, before, after))
    return _full_blocks(_block_of_window(step.spans, after, before).reversed)


def _block_of_window(spans: Spans, full: Sequence[int], part: Sequence[int]) -> Block:
    """The spans of a full tile, which make up another tile."""
    each = list(zip(spans, list_strides(full), list_strides(part), strict=True))
    axes = [Axis(extent, src, dst) for (_, extent), src, dst in each if extent != 1]
    return Block(sum(low * src for (low, _), src, _ in each), 0, tuple(axes))


# An exchange of boxes as one device runs it, without the messages of the others.
#
# Turn k sends to the k-th next device and receives from the k-th previous one, which both ends know without colouring
# the messages of all devices. A message that is cut into chunks takes as many turns, one after another, before those of
# the next device:
#
#     chunks of 2 elements     turn 1           turn 1           turn 2
#     device 0                 0:2 to 1         2:3 to 1         0:2 to 2
#
# Between two sets of devices, the devices of both are counted together, by ascending id.


def is_closed(step: Step, device: int) -> bool:
    """Whether the messages of a device follow from its own tiles: boxes that go straight from tile to tile."""
    mode, before, after = step.mode, step.operand, step.result
    if step.kind != "exchange" or mode.in_place or mode.parts > 1 or mode.view is not None or mode.holding is not None:
        return False
    if not one_set(before.mesh, after.mesh):
        return True
    r = refine(before, after)
    return device in before.mesh.devices and (r is None or not r.exact)


def own_boxes(step: Step, device: int, scratch: int) -> StepMessages:
    """What a device copies, sends and receives in an exchange of boxes, of which `scratch` bytes may be staged."""
    before, after, chunk = step.operand, step.result, step.mode.chunk
    if step.mode.relay:
        # The plan has listed the messages of all devices.
        both = relay_messages(before, after, gathers=step.mode.gathers)
        first, second = ([each for each in turn if device in each[:2]] for turn in both)
    else:
        across = not one_set(before.mesh, after.mesh)
        first, second = [] if across else [*messages_of(before, after, device)], []
        for given in (False, True) if across else ():
            for peer, blocks in list_across(before, after, device, None, given=given).items():
                if not given or peer != device:  # What it keeps is listed once.
                    ends = (device, peer) if given else (peer, device)
                    first.append(Message(*ends, tuple([((block,),) for block in blocks])))
    largest = exchange_figures(before, after, relayed=step.mode.relay, gathers=step.mode.gathers).message
    cap = None if chunk is None or chunk >= largest or not scratch else chunk
    place = number_both_ends(before, after)
    if not step.mode.relay and cap is None and holders(before).copies == 1:
        # Each tile has one holder, who sends all that is asked of it.
        sent, received = (list_across(before, after, device, None, given=given) for given in (True, False))
        others = [table.select_rows(table.peers != device) for table in (sent, received)]
        ahead = [np.array([place[peer] - place[device] for peer in table.peers.tolist()], int) for table in others]
        rows = [np.argsort(way * column % len(place)) for way, column in zip((1, -1), ahead, strict=True)]
        both = TableTurns(*(table.select_rows(order) for table, order in zip(others, rows, strict=True)))
        return StepMessages(sent.get(device, ()), both, scratch)

    def turns(messages: Iterable[Message]) -> Turns:
        sides: tuple[list[tuple[int, int, PeerBlocks]], ...] = ([], [])  # Sent and received: turn, chunk, message.
        for message in messages:
            sender, receiver, _ = message
            if sender != receiver:
                side, peer = (sides[0], receiver) if sender == device else (sides[1], sender)
                turn = (place[receiver] - place[sender]) % len(place)
                if cap is None:
                    chunks = [tuple(block for product in message.products for block in multiply_factors(product))]
                else:
                    chunks = [(piece,) for block in message.blocks for piece in cut_block(block, cap)]
                side += [(turn, at, PeerBlocks(peer, blocks)) for at, blocks in enumerate(chunks)]
        sent, received = ([each[2] for each in sorted(side, key=lambda each: each[:2])] for side in sides)
        return tuple(SendReceive(*turn) for turn in itertools.zip_longest(sent, received))

    kept = tuple(
        b for each in first if each.sender == each.receiver for p in each.products for b in multiply_factors(p)
    )
    return StepMessages(kept, turns(first), scratch, passed=turns(second))


@lru_cache(maxsize=64)
def number_both_ends(before: Layout, after: Layout) -> Mapping[int, int]:
    """The number of each device among those of both layouts, by which turns are counted.

    >>> from reshard.types import Mesh
    >>> here, there = Mesh(x=2), Mesh({"y": 2}, device_ids=[7, 1])
    >>> dict(number_both_ends(Layout.parse("f32[4]", here), Layout.parse("f32[4]", there)))
    {0: 0, 1: 1, 7: 2}
    """
    devices = before.mesh.devices
    if not one_set(before.mesh, after.mesh):
        devices = tuple(sorted({*devices, *after.mesh.devices}))
    return {device: at for at, device in enumerate(devices)}
