"""Exchanges as rounds of transfers.

Even ones in closed form: one bijection of the devices a round (`groups.Chains`). Uneven ones by
colouring the edges of the bipartite graph sender -> receiver with as many colours as its largest
degree (König), so that no device sends or receives twice in a round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.lower.groups import Chains
from reshard.types.layout import Layout
from reshard.types.pair import messages
from reshard.types.pair.pieces import cut
from reshard.types.pair.refine import Refinement, refine
from reshard.types.rules import tile_view
from reshard.types.rules.exchange import exchange_size
from reshard.types.rules.tile_view import TileView

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


class Transfer(NamedTuple):
    """Boxes that one device sends to another in one message."""

    sender: int
    receiver: int
    boxes: tuple[Box, ...]

    @property
    def elements(self) -> int:
        """Elements in the message."""
        return sum(box.elements for box in self.boxes)


Rounds = tuple[tuple[Transfer, ...], ...]


def rounds(
    operand: Layout, result: Layout, chunk: int | None
) -> tuple[TileView, TileView, tuple[Transfer, ...], Rounds]:
    """Both tiles' views, the local copies, and the rounds of messages of at most `chunk` elements.

    An even exchange's rounds are bijections; where one has a device keep its share, that is a transfer
    to itself, which crosses no wire.
    """
    r = refine(operand, result)
    if r is not None and r.exact:
        send = _runs(r, operand, tile_view.before(operand, r), [at for at, a in enumerate(r.digits) if a.src is None])
        receive = _runs(r, result, tile_view.after(result, r), [at for at, a in enumerate(r.digits) if a.dst is None])
        turns = _even(operand, r, chunk, send, receive)
        ends = send.view, receive.view
    else:
        turns = _coloured(operand, result, chunk)
        ends = _plain(operand), _plain(result)
    kept = [t for turn in turns for t in turn if all(t.sender == t.receiver for t in turn)]
    sent = tuple(tuple(turn) for turn in turns if any(t.sender != t.receiver for t in turn))
    return *ends, tuple(kept), sent


class _Runs(NamedTuple):
    """A tile's axes: each the atoms of one dim that every box takes as one run, by their numbers."""

    view: TileView
    atoms: tuple[tuple[int, ...], ...]
    radices: tuple[int, ...]

    def spans(self, atom_spans: dict[int, Span]) -> tuple[Span, ...]:
        """A box in these axes, from the spans of its atoms."""
        return tuple(self._span([(self.radices[at], *atom_spans[at]) for at in run]) for run in self.atoms)

    @staticmethod
    def _span(parts: Sequence[tuple[int, int, int]]) -> Span:
        start, extent = 0, 1
        for radix, low, size in parts:
            start, extent = start * radix + low, extent * size
        return start, extent


def _runs(r: Refinement, layout: Layout, view: TileView, local: Sequence[int]) -> _Runs:
    """A box has one value of an atom that moves and a run of those that stay."""
    moving = tuple(axis for axis, at in enumerate(local) if (r.digits[at].src, r.digits[at].dst) != (None, None))
    runs = replace(view, blocks=moving).runs
    digits = tuple(math.prod(view.digits[axis] for axis in run) for run in runs)
    merged = TileView(layout.tile_shape, view.padded, digits, tuple(view.dims[run[0]] for run in runs), ())
    return _Runs(merged, tuple(tuple(local[axis] for axis in run) for run in runs), tuple(a.radix for a in r.digits))


def _plain(layout: Layout) -> TileView:
    return TileView(layout.tile_shape, layout.tile_shape, layout.tile_shape, tuple(range(len(layout.shape))), ())


def _even(operand: Layout, r: Refinement, chunk: int | None, send: _Runs, receive: _Runs) -> list[list[Transfer]]:
    chains = Chains(r)
    ids = operand.mesh.devices
    extents = [a.radix for a in r.digits if a.src is None and a.dst is None]
    pieces = list(cut(extents, max(1, min(chunk or r.common, r.common)))) if r.common else []
    turns: list[list[Transfer]] = []
    for turn in itertools.product(*(range(a.radix) for a, _ in chains.shares)):
        for piece in pieces:
            turns.append([])
            for at, receiver in enumerate(ids):
                share = dict(zip((a.src for a, _ in chains.shares), chains.share(at, turn), strict=True))
                box = Box(send.spans(sent_spans(r, at, piece)), receive.spans(received_spans(r, share, piece)))
                turns[-1].append(Transfer(ids[chains.sender(at, turn)], receiver, (box,)))
    return turns


def sent_spans(r: Refinement, receiver: int, piece: Sequence[Span]) -> dict[int, Span]:
    """Per atom that is local in the operand, what the receiver's coordinates choose of it."""
    spans = iter(piece)
    local = [(at, a) for at, a in enumerate(r.digits) if a.src is None]
    return {at: next(spans) if a.dst is None else (receiver // a.dst % a.radix, 1) for at, a in local}


def received_spans(r: Refinement, share: dict[int | None, int], piece: Sequence[Span]) -> dict[int, Span]:
    """Per atom that is local in the result, where the share goes."""
    spans = iter(piece)
    local = [(at, a) for at, a in enumerate(r.digits) if a.dst is None]
    return {at: next(spans) if a.src is None else (share[a.src], 1) for at, a in local}


def _coloured(operand: Layout, result: Layout, chunk: int | None) -> list[list[Transfer]]:
    size = exchange_size(operand, result)
    cap = None if chunk is None or chunk >= size.message else chunk
    local: list[Transfer] = []
    edges: list[Transfer] = []
    for message in messages.messages(operand, result):
        if message.sender == message.receiver:
            local.append(Transfer(message.sender, message.receiver, tuple(_boxes(message, None))))
        elif cap is None:
            edges.append(Transfer(message.sender, message.receiver, tuple(_boxes(message, None))))
        else:
            edges += [Transfer(message.sender, message.receiver, (box,)) for box in _boxes(message, cap)]
    return [local, *colour(edges)]


def _boxes(message: messages.Message, cap: int | None) -> Iterator[Box]:
    for runs in message.boxes:
        extents = [run.length for run in runs]
        for piece in cut(extents, cap or max(1, math.prod(extents))):
            yield Box(
                tuple((run.src + start, extent) for run, (start, extent) in zip(runs, piece, strict=True)),
                tuple((run.dst + start, extent) for run, (start, extent) in zip(runs, piece, strict=True)),
            )


def colour(edges: Sequence[Transfer]) -> list[list[Transfer]]:
    """Rounds in which no device sends or receives twice, as few as the busiest device allows.

    Each edge takes a colour free at its sender; if that is taken at its receiver, the path that
    alternates between the two ends' free colours is flipped. The graph is bipartite, so the path
    never comes back to the sender, and every edge is coloured once.
    """
    senders: dict[int, dict[int, int]] = {}
    receivers: dict[int, dict[int, int]] = {}
    for at, edge in enumerate(edges):
        sends, receives = senders.setdefault(edge.sender, {}), receivers.setdefault(edge.receiver, {})
        mine, theirs = _free(sends), _free(receives)
        if mine != theirs:
            _flip(edges, senders, receivers, edge.receiver, mine, theirs)
        sends[mine] = receives[mine] = at
    count = max((max(taken) + 1 for taken in senders.values()), default=0)
    turns: list[list[Transfer]] = [[] for _ in range(count)]
    for taken in senders.values():
        for number, at in taken.items():
            turns[number].append(edges[at])
    return turns


def _free(taken: dict[int, int]) -> int:
    return next(number for number in itertools.count() if number not in taken)


def _flip(
    edges: Sequence[Transfer],
    senders: dict[int, dict[int, int]],
    receivers: dict[int, dict[int, int]],
    start: int,
    mine: int,
    theirs: int,
) -> None:
    """Swaps two colours along the path that leaves receiver `start` by colour `mine`."""
    path: list[int] = []
    side, node, number = receivers, start, mine
    while (at := side[node].get(number)) is not None:
        path.append(at)
        side, node = (senders, edges[at].sender) if side is receivers else (receivers, edges[at].receiver)
        number = theirs if number == mine else mine
    old = {at: mine if i % 2 == 0 else theirs for i, at in enumerate(path)}
    for at, number in old.items():
        del senders[edges[at].sender][number], receivers[edges[at].receiver][number]
    for at, number in old.items():
        new = theirs if number == mine else mine
        senders[edges[at].sender][new] = receivers[edges[at].receiver][new] = at
