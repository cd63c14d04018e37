"""Exchanges as rounds of transfers: in a round each device sends at most one message and receives at most one.

Even exchanges follow a closed form, one bijection of the devices a round (`even_rounds`). Uneven ones are an edge
colouring of the graph of senders and receivers (`colouring`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from reshard.geometry import messages
from reshard.geometry.blocks import Axis, Block
from reshard.geometry.pieces import count, cut
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.relay import relay, relay_figures
from reshard.lower.colouring import EvenRounds, colouring
from reshard.lower.groups import coordinate
from reshard.plans.rules import tile_view
from reshard.plans.rules.exchange import exchange_size
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
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Its extents at both ends."""
        return tuple(extent for _, extent in self.src), tuple(extent for _, extent in self.dst)

    def cut(self, most: int) -> Iterator[Box]:
        """The box in boxes of at most `most` elements; one whose axes differ at the two ends stays whole.

        >>> [box.dst for box in Box(((0, 4),), ((2, 4),)).cut(2)]
        [((2, 2),), ((4, 2),)]
        """
        extents, there = self.form
        if self.elements <= most or extents != there:
            yield self
            return
        for piece in cut(extents, most):
            yield Box(*(_moved(side, piece) for side in self))


class Transfer(NamedTuple):
    """Boxes that one device sends to another in one message; `relayed` ones are read from the sender's result.

    `blocks` are the same elements on flat tiles.
    """

    sender: int
    receiver: int
    boxes: tuple[Box, ...]
    relayed: bool = False
    blocks: tuple[Block, ...] = ()

    @property
    def elements(self) -> int:
        """Elements in the message."""
        return sum(box.elements for box in self.boxes)

    @property
    def form(self) -> tuple[Any, ...]:
        """The extents of its boxes, whatever their places: one program can serve all messages of a form."""
        return tuple(box.form for box in self.boxes)


def _moved(side: Sequence[Span], piece: Sequence[Span]) -> tuple[Span, ...]:
    return tuple((start + low, extent) for (start, _), (low, extent) in zip(side, piece, strict=True))


Rounds = tuple[tuple[Transfer, ...], ...]


def rounds(
    operand: Layout, result: Layout, chunk: int | None, device: int | None = None, *, relayed: bool = False
) -> tuple[TileView, TileView, tuple[Transfer, ...], Rounds]:
    """Views of both tiles, the local copies, and the rounds of messages of at most `chunk` elements.

    In an even exchange a device may keep its share while others send: that is a transfer to itself, which crosses
    no wire. Given a `device`, only what that one copies, sends and receives is worked out: its share of the rounds,
    in the same order.
    """
    r = refine(operand, result)
    if r is not None and r.exact:
        send = _merged(r, operand, tile_view.before(operand, r), [at for at, d in enumerate(r.digits) if d.src is None])
        receive = _merged(r, result, tile_view.after(result, r), [at for at, d in enumerate(r.digits) if d.dst is None])
        turns = _even(operand, r, chunk, send, receive, device)
        ends = send.view, receive.view
    else:
        turns = _relayed(operand, result, chunk, device) if relayed else _coloured(operand, result, chunk, device)
        ends = _whole_tile(operand), _whole_tile(result)
    turns = [[_with_blocks(t, *ends) for t in turn] for turn in turns]
    kept = [t for turn in turns if not _crosses(turn) for t in turn]
    return *ends, tuple(kept), tuple(tuple(turn) for turn in turns if _crosses(turn))


def _with_blocks(transfer: Transfer, send: TileView, receive: TileView) -> Transfer:
    send = receive if transfer.relayed else send
    return transfer._replace(blocks=tuple(_block(box, send.digits, receive.digits) for box in transfer.boxes))


def _block(box: Box, send: Sequence[int], receive: Sequence[int]) -> Block:
    """A box of digits as a block of flat tiles: a digit of one side that covers two of the other is split."""
    (src, before), (dst, after) = _strided(box.src, send), _strided(box.dst, receive)
    axes: list[Axis] = []
    while before and after:
        (have, step), (want, stride) = before.pop(), after.pop()
        if not have or not want:
            return Block(src, dst, (Axis(0, step, stride),))
        extent = min(have, want)
        axes.insert(0, Axis(extent, step, stride))
        if have > extent:
            before.append((have // extent, step * extent))
        if want > extent:
            after.append((want // extent, stride * extent))
    return Block(src, dst, tuple(axes))


def _strided(spans: Sequence[Span], digits: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """The first offset of a box in a flat tile, and the (extent, stride) of its digits of more than one value."""
    strides = [math.prod(digits[at + 1 :]) for at in range(len(digits))]
    start = sum(low * stride for (low, _), stride in zip(spans, strides, strict=True))
    return start, [(extent, stride) for (_, extent), stride in zip(spans, strides, strict=True) if extent != 1]


def _crosses(turn: Sequence[Transfer]) -> bool:
    return any(t.sender != t.receiver for t in turn)


class _MergedAxes(NamedTuple):
    """A tile whose digits are merged into as few axes as every box of an exchange allows.

    `members` lists the refined digits, by number, that each axis of `view` is made of.
    """

    view: TileView
    members: tuple[tuple[int, ...], ...]
    radices: tuple[int, ...]

    def spans(self, of_digits: Mapping[int, Span]) -> tuple[Span, ...]:
        """A box on the merged axes, from its span on every digit."""
        return tuple(self._span([(self.radices[at], *of_digits[at]) for at in axis]) for axis in self.members)

    @staticmethod
    def _span(digits: Sequence[tuple[int, int, int]]) -> Span:
        start, extent = 0, 1
        for radix, low, size in digits:
            start, extent = start * radix + low, extent * size
        return start, extent


def _merged(r: Refinement, layout: Layout, view: TileView, local: Sequence[int]) -> _MergedAxes:
    """A box takes one value of a digit that moves, and a run of the digits that stay: runs become one axis."""
    moving = tuple(axis for axis, at in enumerate(local) if (r.digits[at].src, r.digits[at].dst) != (None, None))
    runs = replace(view, blocks=moving).runs
    digits = tuple(math.prod(view.digits[axis] for axis in run) for run in runs)
    merged = TileView(layout.tile_shape, view.padded, digits, tuple(view.dims[run[0]] for run in runs), ())
    members = tuple(tuple(local[axis] for axis in run) for run in runs)
    return _MergedAxes(merged, members, tuple(d.radix for d in r.digits))


def _whole_tile(layout: Layout) -> TileView:
    return TileView(layout.tile_shape, layout.tile_shape, layout.tile_shape, tuple(range(len(layout.shape))), ())


def _even(
    operand: Layout, r: Refinement, chunk: int | None, send: _MergedAxes, receive: _MergedAxes, device: int | None
) -> list[list[Transfer]]:
    """One round a turn and piece of a share; all devices take part."""
    ids = operand.mesh.devices
    even = EvenRounds.of_exchange(r, len(ids))
    if device is not None and device not in ids:
        return []
    me = None if device is None else operand.mesh.position(device)
    pieces = _share_pieces(r, chunk)

    @cache
    def sent(receiver: int) -> list[tuple[Span, ...]]:
        return [send.spans(sent_spans(r, receiver, piece)) for piece in pieces]

    @cache
    def received(numbers: tuple[int, ...]) -> list[tuple[Span, ...]]:
        share = {digit.src: n for (digit, _), n in zip(even.shares, numbers, strict=True)}
        return [receive.spans(received_spans(r, share, piece)) for piece in pieces]

    turns: list[list[Transfer]] = []
    for turn in itertools.product(*(range(digit.radix) for digit, _ in even.shares)):
        receivers = range(len(ids)) if me is None else sorted({me, even.receiver(me, turn)})
        ends = [(ids[even.sender(at, turn)], at, received(tuple(even.share(at, turn)))) for at in receivers]
        turns += (
            [Transfer(sender, ids[at], (Box(sent(at)[number], places[number]),)) for sender, at, places in ends]
            for number in range(len(pieces))
        )
    return turns


def _share_pieces(r: Refinement, chunk: int | None) -> list[tuple[Span, ...]]:
    """A share, cut into pieces of at most `chunk` elements: spans of the digits that are local on both sides."""
    if not r.common:
        return []
    extents = [digit.radix for digit in r.digits if digit.src is None and digit.dst is None]
    return list(cut(extents, max(1, min(chunk or r.common, r.common))))


def sent_spans(r: Refinement, receiver: int, piece: Sequence[Span]) -> dict[int, Span]:
    """What the device at position `receiver` gets of each digit that is local in the operand, by number."""
    spans = iter(piece)
    local = [(at, d) for at, d in enumerate(r.digits) if d.src is None]
    return {at: next(spans) if d.dst is None else (coordinate(receiver, d.dst, d.radix), 1) for at, d in local}


def received_spans(r: Refinement, share: Mapping[int | None, int], piece: Sequence[Span]) -> dict[int, Span]:
    """Where a share goes on each digit that is local in the result, by number."""
    spans = iter(piece)
    local = [(at, d) for at, d in enumerate(r.digits) if d.dst is None]
    return {at: next(spans) if d.src is None else (share[d.src], 1) for at, d in local}


def _coloured(operand: Layout, result: Layout, chunk: int | None, device: int | None) -> list[list[Transfer]]:
    """The local copies as one turn, then the messages, or their pieces, coloured.

    The colours of a device's messages depend on those of all others, which are coloured without their boxes.
    """
    size = exchange_size(operand, result)
    cap = None if chunk is None or chunk >= size.message else chunk
    return _turns(messages.all_messages(operand, result), cap, device)


def _relayed(operand: Layout, result: Layout, chunk: int | None, device: int | None) -> list[list[Transfer]]:
    """Both turns of a relay, coloured one by one."""
    largest = relay_figures(operand, result).message
    cap = None if chunk is None or chunk >= largest else chunk
    first, second = (_turns(turn, cap, device) for turn in relay(operand, result))
    return [*first, *([transfer._replace(relayed=True) for transfer in turn] for turn in second)]


def _turns(listed_messages: Iterable[messages.Message], cap: int | None, device: int | None) -> list[list[Transfer]]:
    """The local copies as one turn, then the messages, or their pieces of at most `cap` elements, coloured."""
    local: list[Transfer] = []
    edges: list[Transfer] = []
    for message in listed_messages:
        check_deadline()
        listed = device is None or device in (message.sender, message.receiver)
        if message.sender == message.receiver:
            local += _transfers(message, None, listed)
        else:
            edges += _transfers(message, cap, listed)
    coloured = colouring([(edge.sender, edge.receiver) for edge in edges])
    turns = [local, *([edges[at] for at in turn] for turn in coloured)]
    return turns if device is None else [[t for t in turn if device in (t.sender, t.receiver)] for turn in turns]


def _transfers(message: messages.Message, cap: int | None, listed: bool) -> list[Transfer]:
    """A message as one transfer, or as one for each piece of at most `cap` elements; without boxes unless `listed`."""
    sender, receiver, _ = message
    if not listed:
        return [Transfer(sender, receiver, ())] * (1 if cap is None else _pieces(message, cap))
    if cap is None:
        return [Transfer(sender, receiver, tuple(_boxes(message, None)))]
    return [Transfer(sender, receiver, (box,)) for box in _boxes(message, cap)]


def _pieces(message: messages.Message, cap: int) -> int:
    """How many boxes of at most `cap` elements a message is cut into."""
    return sum(number * count(extents, cap) for extents, number in message.shape)


def _boxes(message: messages.Message, cap: int | None) -> Iterator[Box]:
    for runs in message.boxes:
        extents = [run.length for run in runs]
        for piece in cut(extents, cap or max(1, math.prod(extents))):
            yield Box(
                tuple((run.src + start, extent) for run, (start, extent) in zip(runs, piece, strict=True)),
                tuple((run.dst + start, extent) for run, (start, extent) in zip(runs, piece, strict=True)),
            )
