"""The messages that devices send and receive in an exchange, by their shapes: what cutting them into chunks needs.

    mesh <x=4>, f32[{x}3/10] -> f32[10]     devices 0 to 2 receive boxes of 3, 3 and 1, device 3 three boxes of 3

Where each tile has one holder, the messages that a target tile takes are the product of those of its pieces, dim by
dim, and so are those that a source tile gives. Pieces are of few kinds, so the loads of thousands of devices are found
without a list of their messages. Where holders share requests, all messages are listed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.exchange_stats import count_kept, tile_elements
from reshard.geometry.holders import holders, home_tile
from reshard.geometry.message import Message, Shape, piece_columns, tiles
from reshard.geometry.messages import exchange_messages, spans_apart, typical_messages
from reshard.geometry.overlap import shares
from reshard.types.layout import Dim, Layout
from reshard.types.whole import check_deadline

Load = tuple[tuple[int, Shape], ...]
"""The messages that one device sends, or receives: how many of each shape."""

Lengths = tuple[tuple[tuple[int, ...], int], ...]
"""The blocks that two pieces share: how many there are of each extents."""

Parts = tuple[tuple[Lengths, int], ...]
"""What one piece shares with all pieces of the other side: how many share such runs."""

Own = tuple[Lengths, ...]
"""What the two tiles of a device share, dim by dim."""

Kind = tuple[tuple[Parts, ...], Own | None]
"""What a tile of a device shares with all tiles of the other side, dim by dim, and with the device's own one."""


@lru_cache(maxsize=256)
def loads(operand: Layout, result: Layout) -> frozenset[Load]:
    """The distinct loads of devices, from one device for every coordinate that the exchange involves.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> sorted(loads(Layout.parse("f32[{x}3/5]", mesh), Layout.parse("f32[5]", mesh)))
    [((1, (((2,), 1),)),), ((1, (((3,), 1),)),)]
    """
    if _has_single_holders(operand, result):
        return frozenset(_loads_of_single_holders(operand, result))
    return loads_of(typical_messages(operand, result))


def loads_of(listed: Iterable[Message]) -> frozenset[Load]:
    """The distinct loads of devices in some messages, local copies left out."""
    sent: dict[int, Counter[Shape]] = {}
    received: dict[int, Counter[Shape]] = {}
    for message in listed:
        if message.sender != message.receiver:
            shape = message.shape
            sent.setdefault(message.sender, Counter())[shape] += 1
            received.setdefault(message.receiver, Counter())[shape] += 1
    return frozenset(map(_sort_load, (*sent.values(), *received.values())))


@lru_cache(maxsize=256)
def most_sent_among(operand: Layout, result: Layout) -> int:
    """The elements that the busiest device sends in an exchange among the same devices.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> most_sent_among(Layout.parse("f32[{x}2/5]", mesh), Layout.parse("f32[5]", mesh))
    6
    """
    if _has_single_holders(operand, result):
        return max(count_sent_among(operand, result).values())
    sent: Counter[int] = Counter()
    for message in typical_messages(operand, result):
        if message.sender != message.receiver:
            sent[message.sender] += message.elements
    return max(sent.values(), default=0)


def count_sent_among(operand: Layout, result: Layout) -> Mapping[int, int]:
    """The elements that each device sends in an exchange among the same devices.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=3)
    >>> dict(count_sent_among(Layout.parse("f32[{x}2/5]", mesh), Layout.parse("f32[5]", mesh)))
    {0: 4, 1: 4, 2: 2}
    """
    if _has_single_holders(operand, result):
        own, copies = count_kept(operand, result), _count_near(operand, result, result)
        each = zip(operand.mesh.devices, tile_elements(operand), strict=True)
        return {device: copies * size - own.get(device, 0) for device, size in each}
    sent = dict.fromkeys(operand.mesh.devices, 0)
    for message in exchange_messages(operand, result):
        if message.sender != message.receiver:
            sent[message.sender] += message.elements
    return sent


def _sort_load(shapes: Mapping[Shape, int]) -> Load:
    return tuple(sorted((number, shape) for shape, number in shapes.items() if number))


def _has_single_holders(operand: Layout, result: Layout) -> bool:
    """Whether each tile has one holder, among the devices that exchange with each other."""
    return not operand.partial and _count_near(operand, result, operand) == 1


def _count_near(operand: Layout, result: Layout, layout: Layout) -> int:
    """How many devices have the same tile of one of the layouts, among those that exchange with each other."""
    apart = [(low, high // low) for low, high in spans_apart(operand, result)]
    positions = holders(layout).of(home_tile(layout, 0))
    return sum(all(at // low % size == 0 for low, size in apart) for at in positions)


# ---- one holder a tile -----------------------------------------------------------------------------


class _DimLoads(NamedTuple):
    """What each piece of a target dim takes, what each of the source gives, and what two of them share."""

    taken: Sequence[Parts]
    given: Sequence[Parts]
    common: Mapping[tuple[int, int], Lengths]


def _loads_of_single_holders(operand: Layout, result: Layout) -> Iterator[Load]:
    dims = [_dim_loads(s, t) for s, t in zip(operand.dims, result.dims, strict=True)]
    owns = _own_shares(operand, result, [dim.common for dim in dims])
    copies = _count_near(operand, result, result)
    taken = _kinds_of_tiles(result, [dim.taken for dim in dims], owns), 1
    given = _kinds_of_tiles(operand, [dim.given for dim in dims], owns), copies
    for kinds, times in (taken, given):
        for parts, own in kinds:
            check_deadline()
            shapes: Counter[Shape] = Counter()
            for each in itertools.product(*parts):
                shapes[_message_shape([lengths for lengths, _ in each])] += times * math.prod(
                    [count for _, count in each]
                )
            if own is not None:
                shapes[_message_shape(own)] -= 1
            if load := _sort_load(shapes):
                yield load


def _dim_loads(source: Dim, target: Dim) -> _DimLoads:
    by_target = shares(source, target)
    common = {
        (p, q): tuple(sorted(Counter([block.extents for block in runs]).items()))
        for q, by in enumerate(by_target)
        for p, runs in by.items()
    }
    given: list[Counter[Lengths]] = [Counter() for _ in range(math.prod(d.radix for d in source.digits if d.axis))]
    taken: list[Counter[Lengths]] = [Counter() for _ in by_target]
    for (p, q), lengths in common.items():
        given[p][lengths] += 1
        taken[q][lengths] += 1
    return _DimLoads(_sort_parts(taken), _sort_parts(given), common)


def _sort_parts(of_pieces: Iterable[Counter[Lengths]]) -> list[Parts]:
    return [tuple(sorted(each.items())) for each in of_pieces]


def _own_shares(operand: Layout, result: Layout, common: Sequence[Mapping[tuple[int, int], Lengths]]) -> dict[int, Own]:
    """What the two tiles of each device share; only devices that have some are listed."""
    held, owns = tiles(operand), dict[int, Own]()
    for device, wanted in tiles(result).items():
        if device in held:
            pairs = zip(common, held[device], wanted, strict=True)
            own = [lengths for of, p, q in pairs if (lengths := of.get((p, q))) is not None]
            if len(own) == len(common):
                owns[device] = tuple(own)
    return owns


def _kinds_of_tiles(layout: Layout, parts: Sequence[Sequence[Parts]], owns: Mapping[int, Own]) -> set[Kind]:
    """The distinct parts of the tiles of devices, each with what the device has of them."""
    columns = [[of[piece] for piece in column] for of, column in zip(parts, piece_columns(layout), strict=True)]
    devices = layout.mesh.devices
    rows = zip(*columns, strict=True) if columns else itertools.repeat((), len(devices))
    return {(row, owns.get(device)) for row, device in zip(rows, devices, strict=True)}


def _message_shape(lengths: Sequence[Lengths]) -> Shape:
    """The boxes of a message: the product of the runs of all dims."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for each in itertools.product(*lengths):
        shapes[tuple([extent for extents, _ in each for extent in extents])] += math.prod([times for _, times in each])
    return tuple(sorted(shapes.items()))
