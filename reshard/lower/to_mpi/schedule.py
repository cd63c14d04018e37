"""A checked plan as one device runs it: per step its local copies, and its turns with its peers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.lower.exchange import Span, Transfer
from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.groups import Groups
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Plain,
    ReduceScatter,
    Slice,
    lower,
)
from reshard.lower.to_mpi.blocks import Block, fold, from_part, of_spans, whole
from reshard.types.plan import Plan
from reshard.types.rules.tile_view import TileView


class Part(NamedTuple):
    """What goes to, or comes from, one device, in the order of its blocks; padding is sent along."""

    peer: int
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        """Elements of the message."""
        return sum(block.elements for block in self.blocks)


class Turn(NamedTuple):
    """What a device sends and receives at once; in one turn every device does at most one of each."""

    send: Part | None
    receive: Part | None


@dataclass(frozen=True)
class Move:
    """Local copies, and turns in the order that all devices keep; `scratch` bytes may stage messages."""

    local: tuple[Block, ...]
    turns: tuple[Turn, ...]
    scratch: int


@dataclass(frozen=True)
class Reduce:
    """Reductions over `group`: each member ends with its share (`scatter`) or with everything.

    `each` lists, part by part, one block per share in group order, from the operand to the result of the
    share's member. `packed` says that the operand's blocks do not lie one after another, `placed` that
    the result is not simply the combined block.
    """

    group: tuple[int, ...]
    reduction: str
    scatter: bool
    each: tuple[tuple[Block, ...], ...]
    packed: bool
    placed: bool


class Slot(NamedTuple):
    """Elements `start`, ... of a slot go to, or come from, the same place of a peer's slot."""

    peer: int
    slot: int
    start: int
    length: int


@dataclass(frozen=True)
class Overwrite:
    """Tile -> `slots` slots of `slot` elements in one buffer -> turns, out of one slot and into another -> tile.

    `pack` and `unpack` say which block of the operand's or the result's tile (its `src`) a slot holds.
    """

    slot: int
    slots: int
    pack: tuple[tuple[int, Block], ...]
    turns: tuple[tuple[Slot | None, Slot | None], ...]
    unpack: tuple[tuple[int, Block], ...]
    scratch: int


Step = Move | Reduce | Overwrite


@dataclass(frozen=True)
class Schedule:
    """A device's steps, with the shape of its tile after each."""

    tile_shape: tuple[int, ...]
    steps: tuple[Step, ...]
    tile_shapes: tuple[tuple[int, ...], ...]


def schedule(plan: Plan, device: int) -> Schedule:
    """What one device (an id of the mesh) does in a checked plan; raises `PlanError` for anything else.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> move = schedule(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)), 0).steps[0]
    >>> sent = move.turns[0].send
    >>> sent.peer, sent.blocks[0].src, sent.blocks[0].dst, sent.blocks[0].extents
    (1, (0, 2), (0, 0), (2, 2))
    """
    program = lower(plan)
    shapes = (program.tile_shape, *program.tile_shapes)
    steps = tuple(
        _step(instruction, device, shapes[at], step.cost.scratch)
        for at, (instruction, step) in enumerate(zip(program.instructions, plan.steps, strict=True))
    )
    return Schedule(program.tile_shape, steps, program.tile_shapes)


def _step(instruction: Instruction, device: int, shape: Sequence[int], scratch: int) -> Step:
    match instruction:
        case InParts():
            return _in_parts(instruction, device, shape, scratch)
        case ReduceScatter() | AllReduce():
            return _reduce(instruction, device, shape)
        case ExchangeInPlace():
            return _overwrite(instruction, device, scratch)
        case _:
            return _move(instruction, device, shape, scratch)


def _in_parts(parts: InParts, device: int, shape: Sequence[int], scratch: int) -> Step:
    """Every part's blocks, as blocks of the whole tiles: nothing need be cut out first."""
    cut = parts.take
    part = [cut.outer * cut.inner if dim == cut.axis else extent for dim, extent in enumerate(shape)]
    one = _step(parts.each, device, part, scratch)
    numbers = range(cut.parts)

    def moved(blocks: Sequence[Block], number: int) -> tuple[Block, ...]:
        return tuple(from_part(block, parts.take, parts.put, number) for block in blocks)

    def side(part: Part | None, number: int) -> Part | None:
        return None if part is None else Part(part.peer, moved(part.blocks, number))

    match one:
        case Reduce():
            each = tuple(moved(blocks, number) for number in numbers for blocks in one.each)
            return replace(one, each=each, packed=True, placed=True)
        case Move():
            local = tuple(block for number in numbers for block in moved(one.local, number))
            turns = [Turn(side(t.send, number), side(t.receive, number)) for number in numbers for t in one.turns]
            return Move(local, tuple(turns), scratch)
        case Overwrite():
            raise PlanError("an exchange in place has no parts; plan it with chunks")


def _move(step: Plain, device: int, shape: Sequence[int], scratch: int) -> Move:
    match step:
        case Slice(send=send, receive=receive, block=block):
            return Move(_full(_between(send, block[device], receive, 0)), (), scratch)
        case AllGather(groups=groups, send=send, receive=receive) | AllToAll(groups=groups, send=send, receive=receive):
            group = _of(groups, device)
            return _grouped(group, group.index(device), send, receive, isinstance(step, AllToAll), scratch)
        case Permute(pairs=pairs):
            return _paired(pairs, device, whole(shape), scratch)
        case Exchange():
            turns = tuple(_turn(turn, device, step) for turn in step.rounds)
            local = [_boxes(transfer, step) for transfer in step.local if transfer.receiver == device]
            local += [_boxes(t, step) for turn in step.rounds for t in turn if t.sender == t.receiver == device]
            return Move(tuple(itertools.chain(*local)), tuple(t for t in turns if t != _IDLE), scratch)
        case _:
            raise PlanError(f"{type(step).__name__} moves nothing")


_IDLE = Turn(None, None)


def _grouped(group: tuple[int, ...], me: int, send: TileView, receive: TileView, each: bool, scratch: int) -> Move:
    """Turn k: to the k-th member after this one, from the k-th before it."""

    def to(sender: int, receiver: int) -> tuple[Block, ...]:
        return _full(_between(send, receiver if each else 0, receive, sender))

    turns: list[Turn] = []
    for k in range(1, len(group)):
        after, before = (me + k) % len(group), (me - k) % len(group)
        sent, received = to(me, after), to(before, me)
        turns.append(
            Turn(Part(group[after], sent) if sent else None, Part(group[before], received) if received else None)
        )
    return Move(to(me, me), tuple(t for t in turns if t != _IDLE), scratch)


def _paired(pairs: Sequence[tuple[int, int]], device: int, block: Block, scratch: int) -> Move:
    to = next((receiver for sender, receiver in pairs if sender == device), device)
    source = next((sender for sender, receiver in pairs if receiver == device), device)
    blocks = _full(block)
    if source == device or not blocks:
        return Move(blocks, (), scratch)
    return Move((), (Turn(Part(to, blocks), Part(source, blocks)),), scratch)


def _turn(turn: Sequence[Transfer], device: int, step: Exchange) -> Turn:
    sent = next((t for t in turn if t.sender == device != t.receiver), None)
    received = next((t for t in turn if t.receiver == device != t.sender), None)
    return Turn(
        None if sent is None else Part(sent.receiver, _boxes(sent, step)),
        None if received is None else Part(received.sender, _boxes(received, step)),
    )


def _boxes(transfer: Transfer, step: Exchange) -> tuple[Block, ...]:
    return tuple(fold(of_spans(step.send, box.src, step.receive, box.dst) for box in transfer.boxes if box.elements))


def _reduce(step: ReduceScatter | AllReduce, device: int, shape: Sequence[int]) -> Reduce:
    group = _of(step.groups, device)
    if isinstance(step, AllReduce):
        return Reduce(group, step.reduction, False, (_full(whole(shape)),), False, False)
    blocks = tuple(itertools.chain(*(_full(_between(step.send, n, step.receive, 0)) for n in range(len(group)))))
    placed = step.receive.tile != step.receive.padded
    return Reduce(group, step.reduction, True, (blocks,), not step.send.in_place, placed)


def _overwrite(step: ExchangeInPlace, device: int, scratch: int) -> Overwrite:
    turns: list[tuple[Slot | None, Slot | None]] = []
    for turn in step.rounds:
        out = next((Slot(t.receiver, t.src_slot, t.start, t.length) for t in turn if t.sender == device), None)
        into = next((Slot(t.sender, t.dst_slot, t.start, t.length) for t in turn if t.receiver == device), None)
        if out or into:
            turns.append((out, into))

    def slots(view: TileView, places: Sequence[tuple[int, Sequence[int | None]]]) -> Iterator[tuple[int, Block]]:
        for slot, place in places:
            spans = [(0, radix) if at is None else (at, 1) for radix, at in zip(view.digits, place, strict=True)]
            yield slot, of_spans(view, spans, view, spans)

    pack, unpack = slots(step.send, step.pack[device]), slots(step.receive, step.unpack[device])
    return Overwrite(step.slot, step.slots, tuple(pack), tuple(turns), tuple(unpack), scratch)


def _between(send: TileView, block: int, receive: TileView, place: int) -> Block:
    """A numbered block of one view as a numbered block of another."""
    return of_spans(send, _spans(send, block), receive, _spans(receive, place))


def _spans(view: TileView, number: int) -> list[Span]:
    spans = [(0, radix) for radix in view.digits]
    for axis in reversed(view.blocks):
        number, value = divmod(number, view.digits[axis])
        spans[axis] = (value, 1)
    return spans


def _full(block: Block) -> tuple[Block, ...]:
    """The block, unless it is empty."""
    return (block,) if block.elements else ()


def _of(groups: Groups, device: int) -> tuple[int, ...]:
    return next(group for group in groups if device in group)
