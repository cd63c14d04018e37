"""An exchange between two sets of devices in two turns: to devices that pass elements on, then from them to the others.

    f32[12] on device 0 -> f32[12] on devices 0 to 4

    at once     device 0 sends all 12 elements to each of the four others: 48
    relayed     turn 1: device 0 sends 3 elements to each of the four: 12
                turn 2: each of these sends its 3 to the three others: 9

Elements of one source tile that the same devices lack make up one class, and each of these devices gets a share of it
in the first turn, which it passes on in the second, out of its own tile of the result. Shares are even at first, then
eased for devices that would send more than the bound: a holder of much passes on little. Every device receives exactly
what it lacks, once.

An all-gather after the crossing does the same in fewer messages. But it sends to devices that hold elements already
where the two sets overlap, and needs pieces that the target's axes divide.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.deadline import check_deadline
from reshard.types.layout import Layout
from reshard.types.pair.crossing import dealt, fewest_through, holders_of
from reshard.types.pair.message import Message, Runs, Tile, cut, elements, requests, tile_of
from reshard.types.pair.overlap import shares
from reshard.types.pair.runs import Progression

_SWEEPS = 32
"""How often weights are eased."""


class Relay(NamedTuple):
    """The messages of both turns; local copies are in the first. Those of the second are read from result tiles."""

    first: tuple[Message, ...]
    second: tuple[Message, ...]


class Turn(NamedTuple):
    """The busiest device's figures in one turn, in elements: received, sent, and the rounds of messages."""

    received: int
    sent: int
    rounds: int


class RelayFigures(NamedTuple):
    """Both turns; elements of the busiest sender over both, and of the largest message."""

    turns: tuple[Turn, Turn]
    sent: int
    message: int


class _Class(NamedTuple):
    """Elements of a source tile that the same devices lack."""

    tile: Tile
    runs: Runs
    lacking: tuple[int, ...]


class _Share(NamedTuple):
    """What one device is sent in the first turn: elements number `low` to `high` of a class."""

    device: int
    of: _Class
    low: int
    high: int


@lru_cache(maxsize=16)
def relay(operand: Layout, result: Layout) -> Relay:
    """The messages of both turns.

    >>> from reshard.types import Mesh
    >>> turns = relay(Layout.parse("f32[12]", Mesh(x=1)), Layout.parse("f32[12]", Mesh(d=5)))
    >>> [[(m.sender, m.receiver, m.elements) for m in turn if m.sender != m.receiver][:4] for turn in turns]
    [[(0, 1, 3), (0, 2, 3), (0, 3, 3), (0, 4, 3)], [(1, 2, 3), (1, 3, 3), (1, 4, 3), (2, 1, 3)]]
    """
    classes, local = _classes(operand, result)
    given = list(_shares(classes, operand, result))
    first = (*local, *_first(given, operand, result))
    return Relay(first, tuple(_second(given)))


@lru_cache(maxsize=256)
def relay_figures(operand: Layout, result: Layout) -> RelayFigures:
    """The figures of both turns.

    >>> from reshard.types import Mesh
    >>> relay_figures(Layout.parse("f32[12]", Mesh(x=1)), Layout.parse("f32[12]", Mesh(d=5))).turns
    (Turn(received=3, sent=12, rounds=4), Turn(received=9, sent=9, rounds=3))
    """
    turns = [[m for m in turn if m.sender != m.receiver] for turn in relay(operand, result)]
    sent: Counter[int] = Counter()
    for message in itertools.chain(*turns):
        sent[message.sender] += message.elements
    largest = max((message.elements for message in itertools.chain(*turns)), default=0)
    first, second = map(_turn, turns)
    return RelayFigures((first, second), max(sent.values(), default=0), largest)


def _turn(messages: Sequence[Message]) -> Turn:
    sent, received, sends, receives = (Counter[int]() for _ in range(4))
    for message in messages:
        sent[message.sender] += message.elements
        received[message.receiver] += message.elements
        sends[message.sender] += 1
        receives[message.receiver] += 1
    rounds = max([*sends.values(), *receives.values()], default=0)
    return Turn(max(received.values(), default=0), max(sent.values(), default=0), rounds)


def _classes(operand: Layout, result: Layout) -> tuple[list[_Class], list[Message]]:
    """The classes, and the copies that devices make of what they hold."""
    holders = holders_of(operand)
    classes: list[_Class] = []
    local: list[Message] = []
    for tile, wanted in requests(operand, result, result.mesh.devices, lambda _: (), shares).items():
        own = set(holders[tile])
        lacking: dict[Tile, tuple[Runs, list[int]]] = {}
        for device, runs in wanted:
            if device in own:
                local.append(Message(device, device, (runs,)))
            else:
                lacking.setdefault(tile_of(result, device), (runs, []))[1].append(device)
        classes += [_Class(tile, runs, tuple(devices)) for runs, devices in lacking.values()]
    return classes, local


def _shares(classes: Sequence[_Class], operand: Layout, result: Layout) -> Iterator[_Share]:
    """Each class divided among the devices that lack it, by their weights, in whole elements.

    Who gets less than its weight of one class, in what it would then send, comes first in the next ones.
    """
    owed: dict[int, float] = {}
    for each, weights in zip(classes, _weights(classes, operand, result), strict=True):
        size, total, low = elements(each.runs), sum(weights), 0
        ideal = [size * (weight / total) for weight in weights]
        counts = [int(count) for count in ideal]
        others = len(each.lacking) - 1
        missed = [owed.get(device, 0.0) + (ideal[at] - counts[at]) * others for at, device in enumerate(each.lacking)]
        first = sorted(range(len(counts)), key=lambda at: -missed[at])
        for at in first[: size - sum(counts)]:
            counts[at] += 1
            missed[at] -= others
        owed |= dict(zip(each.lacking, missed, strict=True))
        for device, count in zip(each.lacking, counts, strict=True):
            if count:
                yield _Share(device, each, low, low + count)
            low += count


def _weights(classes: Sequence[_Class], operand: Layout, result: Layout) -> list[list[float]]:
    """For each class, how much of it each device passes on: at first evenly, then less by those that send too much.

    Only the four operations of floating point are used, so all processes get the same numbers.
    """
    holders, most = holders_of(operand), max(1, fewest_through(operand, result))
    weights = [[1.0 / len(each.lacking)] * len(each.lacking) for each in classes]
    passed = [elements(each.runs) * (len(each.lacking) - 1) for each in classes]
    held: dict[int, float] = {}
    for each in classes:
        for holder in holders[each.tile]:
            held[holder] = held.get(holder, 0.0) + elements(each.runs) / len(holders[each.tile])
    for _ in range(_SWEEPS):
        check_deadline()
        sends = dict(held)
        for each, some, count in zip(classes, weights, passed, strict=True):
            for device, weight in zip(each.lacking, some, strict=True):
                sends[device] = sends.get(device, 0.0) + weight * count
        if max(sends.values(), default=0.0) <= most:
            break
        for each, some in zip(classes, weights, strict=True):
            eased = [weight * most / (most + sends[device]) for device, weight in zip(each.lacking, some, strict=True)]
            total = sum(eased)
            some[:] = [weight / total for weight in eased]
    return weights


def _first(given: Sequence[_Share], operand: Layout, result: Layout) -> Iterator[Message]:
    """The shares of each tile, dealt among its holders."""
    holders, limit = holders_of(operand), fewest_through(operand, result)
    by_tile: dict[Tile, list[_Share]] = {}
    for share in given:
        by_tile.setdefault(share.of.tile, []).append(share)
    for tile, queue in by_tile.items():
        for part in dealt([share.high - share.low for share in queue], len(holders[tile]), limit):
            share = queue[part.request]
            products = cut(share.of.runs, share.low + part.low, share.low + part.high)
            yield Message(holders[tile][part.holder], share.device, products)


def _second(given: Sequence[_Share]) -> Iterator[Message]:
    """Each device passes its shares on, all that another one lacks of them in one message."""
    passed: dict[tuple[int, int], list[Runs]] = {}
    for share in given:
        products = [_at_both_ends(runs) for runs in cut(share.of.runs, share.low, share.high)]
        for other in share.of.lacking:
            if other != share.device:
                passed.setdefault((share.device, other), []).extend(products)
    for (sender, receiver), products in passed.items():
        yield Message(sender, receiver, tuple(products))


def _at_both_ends(runs: Runs) -> Runs:
    """Runs read from a tile of the result: replicas have an element at the same place."""
    return tuple(tuple(map(_from_result, dim)) for dim in runs)


def _from_result(run: Progression) -> Progression:
    repeats = tuple(repeat._replace(src=repeat.dst) for repeat in run.repeats)
    return run._replace(src=run.dst, repeats=repeats)
