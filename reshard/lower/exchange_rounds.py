"""Exchanges as rounds of transfers: in a round each device sends at most one message and receives at most one.

    f32[{x}2, 6] -> f32[6, {x}2] on <x=3>, device 1

    local      its own share           Block(2, 4, (Axis(2, 6, 2), Axis(2, 1, 1)))
    round 1    to device 0             Block(0, 4, ...), and from device 2 Block(2, 8, ...)
    round 2    to device 2, and from device 0

Even exchanges follow a closed form, one bijection of the devices a round (`EvenRounds`). All others, between uneven
layouts, to other devices or through a view, are an edge colouring of the graph of senders and receivers (`colouring`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

from reshard.errors import PlanError
from reshard.geometry.blocks import Axis, Block, cut_block, list_strides, measure_pieces, split_box
from reshard.geometry.figures import exchange_figures
from reshard.geometry.holders import holders_of
from reshard.geometry.messages import Message, exchange_messages
from reshard.geometry.refine import RefinedDigit, Refinement, refine
from reshard.geometry.relay import relay_messages
from reshard.lower.colouring import SPREAD, EvenRounds, colour_edges
from reshard.lower.groups import coordinate
from reshard.plans.plan import Step
from reshard.plans.rules import tile_view
from reshard.plans.rules.collectives import in_place_cut
from reshard.plans.rules.tile_view import TileView
from reshard.types.layout import Layout
from reshard.types.whole import check_deadline

Span = tuple[int, int]
"""(start, extent) along one axis."""


class Box(NamedTuple):
    """The same elements, in row-major order, in the operand's digits and in the result's."""

    src: tuple[Span, ...]
    dst: tuple[Span, ...]

    @property
    def elements(self) -> int:
        """Elements in the box."""
        return math.prod(extent for _, extent in self.src)

    @property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its extents at both ends."""
        return tuple(extent for _, extent in self.src), tuple(extent for _, extent in self.dst)


class Transfer(NamedTuple):
    """Blocks that one device sends to another in one message; `relayed` ones are read from the sender's result."""

    sender: int
    receiver: int
    blocks: tuple[Block, ...]
    relayed: bool = False

    @property
    def elements(self) -> int:
        """Elements in the message."""
        return sum([block.elements for block in self.blocks])

    @property
    def form(self) -> tuple[Any, ...]:
        """The extents of its blocks, whatever their places and strides: one program can serve messages of one form."""
        return tuple([block.extents for block in self.blocks])


Rounds = tuple[tuple[Transfer, ...], ...]


@dataclass(frozen=True)
class Exchange:
    """Blocks go from the operand's tiles to the result's, in rounds; `staged` if messages need buffers.

    `send` and `receive` are the tiles, reshaped to the digits that the axes of blocks follow. `receivers` are the
    devices that have a tile of the result; in a crossing these are not the ones that have the operand's. If it `fills`
    part of the result, the tile is there already, and its other parts stay; `viewed` says that a view ties the two ends
    together. The last `gathers` rounds are one launch, in which groups of devices pass on to each other what the rounds
    before left: in each, a device sends the same to the next one of its group. With a `dtype`, elements are cast to it:
    before they are sent if it is narrower, else after they have arrived. On the platforms where it is `sliced_on`, all
    messages are one ragged all-to-all, and no rounds.
    """

    send: TileView
    receive: TileView
    receivers: tuple[int, ...]
    local: tuple[Transfer, ...]
    rounds: Rounds
    staged: bool
    fills: bool = False
    viewed: bool = False
    dtype: str | None = None
    gathers: int = 0
    sliced_on: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        """One for each round, and one for all those in which groups of devices gather."""
        return len(self.rounds) - self.gathers + bool(self.gathers)

    @cached_property
    def relays(self) -> bool:
        """Whether devices pass on what they have received, out of their tiles of the result."""
        return any(t.relayed for turn in self.rounds for t in turn)

    @cached_property
    def strided(self) -> bool:
        """Whether the elements of some block come in another order at the other end, or are no slice of the dims there.

        A part of an array that is taken as it is, or put into one, is a slice at both ends, like what no view moves.
        """
        if not self.viewed:
            return False
        try:
            each = (t for turn in (self.local, *self.rounds) for t in turn)
            return any(len(self.slice_transfer(t).blocks) != len(t.blocks) for t in each)
        except PlanError:
            return True

    @cached_property
    def sliced(self) -> tuple[tuple[Transfer, ...], Rounds]:
        """The local copies and the rounds, with boxes as blocks: slices of the digits of both tiles. Not of a `strided`
        exchange."""
        local, *rounds = (tuple(map(self.slice_transfer, turn)) for turn in (self.local, *self.rounds))
        return local, tuple(rounds)

    def slice_transfer(self, transfer: Transfer) -> Transfer:
        """One transfer with boxes as blocks; a relayed one is read from a tile of the result."""
        send, receive = (self.receive if transfer.relayed else self.send).digits, self.receive.digits
        boxes = [box for block in transfer.blocks for box in digit_boxes(block, send, receive)]
        return transfer._replace(blocks=tuple(boxes))


def digit_boxes(block: Block, send: Sequence[int], receive: Sequence[int]) -> Iterator[Box]:
    """The boxes that a block consists of, on tiles reshaped to these digits.

    An axis that is not a slice of a digit at both ends, such as one that steps over elements, is listed value by value.
    Raises `PlanError` for a block whose axes come in another order at its other end: boxes keep one order.

    >>> [box.dst for box in digit_boxes(Block(0, 4, (Axis(2, 6, 8), Axis(2, 1, 1))), (12,), (3, 8))]
    [((0, 1), (4, 2)), ((1, 1), (4, 2))]
    """
    before, after = list_strides(send), list_strides(receive)
    extents = [1] * len(send), [1] * len(receive)
    listed: list[Axis] = []
    below = 0, 0
    for axis in reversed(block.axes):
        extent, src, dst = axis
        if extent == 1:
            continue
        if not extent:
            return
        if src < below[0] or dst < below[1]:
            raise PlanError(f"{block} has its axes in another order at its other end, so it is not a slice of {send}")
        found = [
            next((number for number, stride in enumerate(strides) if stride <= step and digits[number] != 1), None)
            for strides, digits, step in ((before, send, src), (after, receive, dst))
        ]
        at, to = found
        if at is None or to is None or not src or not dst:
            raise PlanError(f"{block} has an axis that steps over no digit of {send} or {receive}")
        # What is inside of the axis fills its digit from below: then the two together are one slice of it.
        if before[at] * extents[0][at] == src and after[to] * extents[1][to] == dst:
            extents[0][at] *= extent
            extents[1][to] *= extent
            below = src, dst
        else:
            listed.append(axis)
    starts = [(block.src, block.dst)]
    for extent, src, dst in reversed(listed):
        starts = [(start + n * src, end + n * dst) for start, end in starts for n in range(extent)]
    for start, end in starts:
        yield Box(_unravel_spans(start, before, send, extents[0]), _unravel_spans(end, after, receive, extents[1]))


def _unravel_spans(
    offset: int, strides: Sequence[int], digits: Sequence[int], extents: Sequence[int]
) -> tuple[Span, ...]:
    if offset and not digits:
        raise PlanError(f"a block starts at element {offset} of a tile of one element")
    each = zip(strides, digits, extents, strict=True)
    spans = [(offset // stride % radix, extent) for stride, radix, extent in each]
    if spans:  # An offset outside of the tile is outside of the first digit, instead of at its other end.
        spans[0] = offset // strides[0], extents[0]
    return tuple(spans)


def lower_exchange(step: Step, device: int | None = None) -> Exchange:
    """The local copies and the rounds of messages of an exchange.

    In an even exchange a device may keep its share while others send: that is a transfer to itself, which crosses
    no wire. Given a `device`, only what that one copies, sends and receives is worked out: its share of the rounds,
    in the same order.

    >>> from reshard.types import Mesh
    >>> both = [Layout.parse(text, Mesh(x=3)) for text in ("f32[{x}2, 6]", "f32[6, {x}2]")]
    >>> step = lower_exchange(Step("exchange", *both), device=1)
    >>> [[(each.sender, each.receiver) for each in turn] for turn in (step.local, *step.rounds)]
    [[(1, 1)], [(1, 0), (2, 1)], [(0, 1), (1, 2)]]
    """
    operand, result, mode = step.operand, step.result, step.mode
    chunk, relayed, view, holding = mode.chunk, mode.relay, mode.view, mode.holding
    r = refine(operand, result) if view is None and holding is None else None
    gathering: list[list[Transfer]] = []
    if r is not None and r.exact:
        send = _merged_view(operand, tile_view.before(operand, r), [d for d in r.digits if d.src is None])
        receive = _merged_view(result, tile_view.after(result, r), [d for d in r.digits if d.dst is None])
        turns = _even_turns(operand, r, chunk, device)
    else:
        send, receive = (
            TileView(end.tile_shape, end.tile_shape, end.tile_shape, tuple(range(len(end.shape))), ())
            for end in (operand, result)
        )
        figures = exchange_figures(operand, result, view, relayed=relayed, holding=holding, gathers=mode.gathers)
        largest = figures.message
        cap = None if chunk is None or chunk >= largest else chunk
        if mode.gathers:
            first, second = relay_messages(operand, result, view, gathers=True)
            turns = _coloured_turns(first, None, device)
            gathering = _list_gathering_turns(second, result, device)
            turns += gathering
        elif relayed:
            first, second = (
                _coloured_turns(turn, cap, device) for turn in relay_messages(operand, result, view, holding)
            )
            turns = [*first, *([transfer._replace(relayed=True) for transfer in turn] for turn in second)]
        else:
            turns = _coloured_turns(exchange_messages(operand, result, view, holding), cap, device)
    # A turn in which every device keeps its own is no round.
    kept = len(turns) - len(gathering)
    crossing = [at >= kept or any(t.sender != t.receiver for t in turn) for at, turn in enumerate(turns)]
    return Exchange(
        send,
        receive,
        result.mesh.devices,
        local=tuple(t for turn, crosses in zip(turns, crossing, strict=True) if not crosses for t in turn),
        rounds=tuple(tuple(turn) for turn, crosses in zip(turns, crossing, strict=True) if crosses),
        staged=step.cost.scratch > 0,
        fills=step.mode.fills,
        viewed=view is not None or holding is not None,
        dtype=None if operand.dtype == result.dtype else result.dtype,
        gathers=len(gathering),
    )


def _list_gathering_turns(passed: Sequence[Message], result: Layout, device: int | None) -> list[list[Transfer]]:
    """In each turn, devices send to the next one of their group, in the next turn to that after it."""
    if not passed:
        return []
    groups = holders_of(result).values()
    place = {each: at for group in groups for at, each in enumerate(group)}
    copies = max(map(len, groups))
    turns: list[list[Transfer]] = [[] for _ in range(1, copies)]
    blocks: dict[int, tuple[Block, ...]] = {}  # A device sends the same to all others.
    for message in passed:
        sender, receiver, _ = message
        if device is None or device in (sender, receiver):
            if sender not in blocks:
                blocks[sender] = tuple(message.blocks)
            turn = (place[receiver] - place[sender]) % copies - 1
            turns[turn].append(Transfer(sender, receiver, blocks[sender], True))
    return turns


def _merged_view(layout: Layout, view: TileView, local: Sequence[RefinedDigit]) -> TileView:
    """A tile reshaped to as few digits as every message allows.

    A message takes one value of a digit that moves, and a run of the digits that stay: runs become one digit.
    """
    moving = tuple(axis for axis, d in enumerate(local) if (d.src, d.dst) != (None, None))
    runs = replace(view, blocks=moving).runs
    digits = tuple(math.prod(view.digits[axis] for axis in run) for run in runs)
    return TileView(layout.tile_shape, view.padded, digits, tuple(view.dims[run[0]] for run in runs), ())


def _even_turns(operand: Layout, r: Refinement, chunk: int | None, device: int | None) -> list[list[Transfer]]:
    """One round for each turn and piece of a share; all devices take part."""
    ids = operand.mesh.devices
    if device is not None and device not in ids:
        return []
    me = None if device is None else operand.mesh.position(device)
    messages = EvenMessages(r, len(ids), chunk)
    even = messages.even
    turns: list[list[Transfer]] = []
    for turn in itertools.product(*(range(digit.radix) for digit, _ in even.shares)):
        receivers = range(len(ids)) if me is None else sorted({me, even.receiver(me, turn)})
        sent = [
            (ids[even.sender(at, turn)], ids[at], messages.blocks(at, tuple(even.share(at, turn)))) for at in receivers
        ]
        turns += ([Transfer(sender, to, (blocks[n],)) for sender, to, blocks in sent] for n in messages.pieces)
    return turns


class EvenMessages:
    """The blocks that each device of an even exchange gets, for each share in pieces of at most `chunk` elements.

    Like `EvenRounds`, it takes any position and any numbers of shares that have `//`, `%`, `*` and `+`.
    """

    def __init__(self, r: Refinement, devices: int, chunk: int | None) -> None:
        # Where it is for the compiler's good, devices that keep a share do so in different rounds.
        self.even = EvenRounds(r, spread=devices <= SPREAD)
        send, receive = _map_local_strides(r, held_before=True), _map_local_strides(r, held_before=False)
        # A share is cut into spans of the digits that are local on both sides: where they start, and their loops.
        staying = [at for at, digit in enumerate(r.digits) if digit.src is None and digit.dst is None]
        extents = [r.digits[at].radix for at in staying]
        cut = list(split_box(extents, max(1, min(chunk or r.common, r.common)))) if r.common else []
        self._pieces: list[tuple[int, int, tuple[Axis, ...]]] = []
        for piece in cut:
            lows = [(at, low) for at, (low, _) in zip(staying, piece, strict=True)]
            src, dst = (sum(low * strides[at] for at, low in lows) for strides in (send, receive))
            self._pieces.append((src, dst, _piece_axes(r, piece, send, receive)))
        self.pieces = range(len(cut))
        digits = list(enumerate(r.digits))
        numbered = {digit.src: at for at, digit in digits}
        self._leaving = [(d.dst, d.radix, send[at]) for at, d in digits if d.src is None and d.dst is not None]
        self._arriving = [receive[numbered[digit.src]] for digit, _ in self.even.shares]
        # Where shares start, by receiver and by their numbers: each comes up in many turns.
        self._sent: dict[int, int] = {}
        self._received: dict[tuple[int, ...], int] = {}

    def blocks(self, receiver: int, numbers: tuple[int, ...]) -> list[Block]:
        """The pieces of the share of these numbers, on their way to the device at a position."""
        if (sent := self._sent.get(receiver)) is None:
            starts = [coordinate(receiver, stride, radix) * apart for stride, radix, apart in self._leaving]
            sent = self._sent[receiver] = sum(starts)
        if (received := self._received.get(numbers)) is None:
            starts = [number * apart for number, apart in zip(numbers, self._arriving, strict=True)]
            received = self._received[numbers] = sum(starts)
        return [Block(sent + src, received + dst, axes) for src, dst, axes in self._pieces]


def _map_local_strides(r: Refinement, *, held_before: bool) -> dict[int, int]:
    """By the number of each digit that is local before, or after: how far apart its values are in the flat tile."""
    strides: dict[int, int] = {}
    stride = 1
    for at in range(len(r.digits) - 1, -1, -1):
        digit = r.digits[at]
        if (digit.src if held_before else digit.dst) is None:
            strides[at] = stride
            stride *= digit.radix
    return strides


def _piece_axes(
    r: Refinement, piece: Sequence[Span], send: Mapping[int, int], receive: Mapping[int, int]
) -> tuple[Axis, ...]:
    """The axes of a piece of a share; digits of one dim that go on evenly in both tiles are one."""
    axes: list[Axis] = []
    last_dim = -1
    staying = [at for at, digit in enumerate(r.digits) if digit.src is None and digit.dst is None]
    for at, (_, extent) in zip(staying, piece, strict=True):
        if extent == 1:
            continue
        dim, src, dst = r.digits[at].dim, send[at], receive[at]
        if dim == last_dim and axes[-1][1:] == (extent * src, extent * dst):
            axes[-1] = Axis(axes[-1].extent * extent, src, dst)
        else:
            axes.append(Axis(extent, src, dst))
        last_dim = dim
    return tuple(axes)


def _coloured_turns(messages: Iterable[Message], cap: int | None, device: int | None) -> list[list[Transfer]]:
    """The local copies as one turn, then the messages, or their pieces of at most `cap` elements, coloured.

    The colours of a device's messages depend on those of all others, which are coloured without their blocks.
    """
    local: list[Transfer] = []
    edges: list[Transfer] = []
    for message in messages:
        check_deadline()
        sender, receiver, _ = message
        listed = device is None or device in (sender, receiver)
        if sender == receiver or cap is None:
            transfer = Transfer(sender, receiver, tuple(message.blocks) if listed else ())
            (local if sender == receiver else edges).append(transfer)
        elif listed:
            pieces = (piece for block in message.blocks for piece in cut_block(block, cap))
            edges += [Transfer(sender, receiver, (piece,)) for piece in pieces]
        else:
            edges += [Transfer(sender, receiver, ())] * sum(
                n * measure_pieces(extents, cap)[0] for extents, n in message.shape
            )
    coloured = colour_edges([(edge.sender, edge.receiver) for edge in edges])
    turns = [local, *([edges[at] for at in turn] for turn in coloured)]
    return turns if device is None else [[t for t in turn if device in (t.sender, t.receiver)] for turn in turns]


# Exchanges that overwrite their operand: one buffer a device, cut into slots, so that no second tile is needed.
#
#     tile --pack--> slot slot slot ... --rounds--> slot slot slot ... --unpack--> tile
#
# A slot holds one *share*: what a tile of the operand has for a tile of the result. Where the result replicates along
# an axis that the operand uses, g devices need the same share, and it is sent in g neighbouring turns. Its slot is free
# in the last of them, and a share that arrives may fill it in the same turn.
#
# **Why the buffer is never larger than the larger tile.** Let a device send f different shares. After k of them have
# left, f - k wait and k g have arrived, so at most max(f, f g) slots are in use, and these are the sizes of the
# operand's and the result's tile in shares. `lower_in_place` has an example.


Place = tuple[int | None, ...]
"""Where a share lies in a view of a tile: an index for each digit, None where it takes the whole digit."""


class SlotTransfer(NamedTuple):
    """`length` elements of a slot, from `start` on, go to the same place of another device's slot."""

    sender: int
    receiver: int
    src_slot: int
    dst_slot: int
    start: int
    length: int


@dataclass(frozen=True)
class CutTurns(Sequence[tuple[Any, ...]]):
    """The turns of `whole` slots, each repeated for piece after piece of at most `largest` of the `length` elements.

    They are made when they are asked for: at the floor of a budget a piece is one element, and slots have millions.

    >>> turns = CutTurns(((SlotTransfer(0, 1, 0, 0, 0, 5), None),), 5, 2)
    >>> len(turns), [turn[0][4:] for turn in turns]
    (3, [(0, 2), (2, 2), (4, 1)])
    """

    whole: tuple[tuple[Any, ...], ...]
    length: int
    largest: int

    def __len__(self) -> int:
        return len(self.whole) * -(-self.length // max(1, self.largest))

    @overload
    def __getitem__(self, at: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[Any, ...], ...]: ...

    def __getitem__(self, at: int | slice) -> tuple[Any, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(len(self))[at])
        turn, piece = divmod(range(len(self))[at], -(-self.length // self.largest))
        start = piece * self.largest
        span = {"start": start, "length": min(self.largest, self.length - start)}
        return tuple(None if each is None else each._replace(**span) for each in self.whole[turn])


@dataclass(frozen=True)
class ExchangeInPlace:
    """Each device has a buffer of `slots` slots of `slot` elements.

    `pack` lists, for every device, (slot, place of the operand's tile) of each share that is sent or kept; `unpack`
    does the same for the result's tile. `staged` says that messages need buffers of their own while they travel.
    """

    send: TileView
    receive: TileView
    slot: int
    slots: int
    pack: dict[int, tuple[tuple[int, Place], ...]]
    rounds: Sequence[tuple[SlotTransfer, ...]]
    unpack: dict[int, tuple[tuple[int, Place], ...]]
    staged: bool


def lower_in_place(operand: Layout, result: Layout, chunk: int | None) -> ExchangeInPlace:
    """The rounds of an even exchange between slots, in messages of at most `chunk` elements.

    For example, f32[{x}{y}1, 2] -> f32[4, {x}1] on <x=2, y=2>: an array of 4 x 2, its elements numbered 0 to 7.
    Device d holds row d; devices 0 and 1 need column 0 (elements 0, 2, 4, 6), devices 2 and 3 column 1. A share is
    one element, a device has f = 2 of them, and g = 2 devices need each, so that a buffer has 4 slots:

                  device 0      device 1      device 2      device 3
        tile      0 1           2 3           4 5           6 7
        pack      0 1 . .       2 3 . .       5 4 . .       7 6 . .      in the order in which they are sent
        turn 0    0 1 . .       2 3 . .       5 4 . .       7 6 . .      each keeps its first share: nothing is sent
        turn 1    0 1 2 .       2 3 0 .       5 4 7 .       7 6 5 .      0 <-> 1 and 2 <-> 3 swap copies of slot 0
        turn 2    0 1 2 4       2 3 0 6       5 4 7 1       7 6 5 3      0 <-> 2 and 1 <-> 3 swap copies of slot 1
        turn 3    0 6 2 4       2 4 0 6       5 3 7 1       7 1 5 3      0 <-> 3 and 1 <-> 2; slot 1 leaves: reused
        unpack    0 2 4 6       0 2 4 6       1 3 5 7       1 3 5 7

    Raises `PlanError` for layouts without an exact common refinement: their shares are not all of one size.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> step = lower_in_place(Layout.parse("f32[{x}{y}1, 2]", mesh), Layout.parse("f32[4, {x}1]", mesh), None)
    >>> [(t.sender, t.src_slot, t.receiver, t.dst_slot) for t in step.rounds[-1]]
    [(3, 1, 0, 1), (2, 1, 1, 1), (1, 1, 2, 1), (0, 1, 3, 1)]
    """
    r = refine(operand, result)
    if r is None or not r.exact:
        raise PlanError(f"exchange: {operand} -> {result} cannot go in place; the layouts are not even")
    send, receive = tile_view.before(operand, r), tile_view.after(result, r)
    slots = max(send.elements, receive.elements) // r.common if r.common else 0
    ids = operand.mesh.devices
    turns = list(_list_bijections(r, len(ids))) if r.common else []
    # By position: the slots that are free, those of shares that wait to be sent, and those of shares that have arrived.
    free = [list(range(slots))[::-1] for _ in ids]
    waiting: list[dict[Place, int]] = [{} for _ in ids]
    arrived: list[dict[Place, int]] = [{} for _ in ids]
    # A slot for every share that is sent, or kept, on the device that has it, in the order of the rounds.
    for share in itertools.chain(*turns):
        if share.src not in waiting[share.sender]:
            waiting[share.sender][share.src] = free[share.sender].pop()
    last_turn = {(share.sender, share.src): number for number, turn in enumerate(turns) for share in turn}
    largest = in_place_cut(r.common, chunk)[1]
    rounds: list[tuple[SlotTransfer, ...]] = []
    for number, turn in enumerate(turns):
        # All slots that a turn frees are free before it fills any; that of a share that a device keeps is not freed.
        for sender, receiver, src, _ in turn:
            slot, leaves = waiting[sender][src], last_turn[sender, src] == number and sender != receiver
            if leaves and slot not in arrived[sender].values():
                free[sender].append(slot)
        moves: list[tuple[int, int, int, int]] = []
        for sender, receiver, src, dst in turn:
            arrived[receiver][dst] = waiting[sender][src] if sender == receiver else free[receiver].pop()
            if sender != receiver:
                moves.append((ids[sender], ids[receiver], waiting[sender][src], arrived[receiver][dst]))
        rounds += [tuple(SlotTransfer(*move, 0, r.common) for move in moves)] if moves else []
    pack, unpack = (
        {
            device: tuple((slot, place) for place, slot in shares.items())
            for device, shares in zip(ids, own, strict=True)
        }
        for own in (waiting, arrived)
    )
    # A single element needs no staging buffer: it can be read and written at once.
    turns_of_pieces = CutTurns(tuple(rounds), r.common, largest)
    return ExchangeInPlace(send, receive, r.common, slots, pack, turns_of_pieces, unpack, staged=largest > 1)


class _Send(NamedTuple):
    """One share on its way: positions of sender and receiver, its place in the operand and in the result."""

    sender: int
    receiver: int
    src: Place
    dst: Place


def _list_bijections(r: Refinement, size: int) -> Iterator[list[_Send]]:
    """The bijections of the exchange, those that send the same share next to each other."""
    rounds = EvenRounds(r)
    replicates = [head not in r.used_after for _, head in rounds.shares]
    ranges = [range(digit.radix) for digit, _ in rounds.shares]
    order = sorted(range(len(ranges)), key=replicates.__getitem__)
    for values in itertools.product(*(ranges[at] for at in order)):
        turn = [0] * len(ranges)
        for at, value in zip(order, values, strict=True):
            turn[at] = value
        sends: list[_Send] = []
        for at in range(size):
            share = {d.src: value for (d, _), value in zip(rounds.shares, rounds.share(at, turn), strict=True)}
            src = tuple(None if d.dst is None else coordinate(at, d.dst, d.radix) for d in r.digits if d.src is None)
            dst = tuple(None if d.src is None else share[d.src] for d in r.digits if d.dst is None)
            sends.append(_Send(rounds.sender(at, turn), at, src, dst))
        yield sends


def place_offsets(view: TileView, place: Place) -> Iterator[int]:
    """The flat offsets in a tile, in order, of the elements at a place of it.

    >>> list(place_offsets(TileView((2, 3), (2, 3), (2, 3), (0, 1), ()), (None, 1)))
    [1, 4]
    """
    strides = list_strides(view.digits)
    spans = [range(radix) if value is None else (value,) for radix, value in zip(view.digits, place, strict=True)]
    for index in itertools.product(*spans):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))
