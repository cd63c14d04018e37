"""Who sends what to whom in an exchange of boxes, between layouts without a common refinement.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]

    pieces of the source   0-2   3-5   6-8   9        the devices x=0 hold 0-2, and so on; y does not matter
    the devices y=0 need   0-2   3-4                  from the devices x=0 and x=1
    the devices y=1 need         5     6-8   9        from the devices x=1, x=2 and x=3

Each device fetches from every source piece that its target tile overlaps and that it does not hold. The devices that
hold a piece deal its requests evenly among themselves. A device holds only one piece, so no two of its messages to
the same receiver can be merged. The exchange therefore takes as many rounds as some device sends or receives messages
(König: the edges of a bipartite graph of maximum degree r are r matchings).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Layout
from reshard.types.mesh import is_chain, merged_spans
from reshard.types.pair.overlap import piece, shares
from reshard.types.pair.runs import Progression, Run

Box = tuple[Run, ...]
"""One run of each dim."""

Runs = tuple[tuple[Progression, ...], ...]
"""For each dim, the runs that two tiles have in common."""

Shape = tuple[tuple[tuple[int, ...], int], ...]
"""The boxes that make up one message: their extents, and how many have these."""

Load = tuple[tuple[int, Shape], ...]
"""The messages that one device sends, or receives: how many of each shape."""

_Tile = tuple[int, ...]
"""A tile of the source: the number of its piece in each dim, then the coordinates along the partial sub-axes."""


class Message(NamedTuple):
    """What one device sends to another, as the runs of each dim; a sender that is the receiver copies."""

    sender: int
    receiver: int
    runs: Runs

    @property
    def elements(self) -> int:
        """True elements in the message, without padding."""
        return math.prod(sum(run.elements for run in dim) for dim in self.runs)

    @property
    def boxes(self) -> Iterator[Box]:
        """The boxes that make up the message: one run of each dim."""
        return itertools.product(*([run for each in dim for run in each.runs] for dim in self.runs))

    @property
    def shape(self) -> Shape:
        """The boxes by their extents, counted without listing them."""
        shapes: Counter[tuple[int, ...]] = Counter()
        for box in itertools.product(*self.runs):
            shapes[tuple(each.length for each in box)] += math.prod(each.times for each in box)
        return tuple(sorted(shapes.items()))


def all_messages(operand: Layout, result: Layout) -> list[Message]:
    """Every message of the exchange, local copies included, for all devices."""
    first = _involved(operand, result)
    listed = set(first)
    messages = list(_messages(operand, result, first))
    # Devices that differ only in coordinates that no changed dim uses exchange alike, among themselves.
    for device in operand.mesh.devices:
        if device not in listed:
            copy = [device + offset for offset in first]
            listed.update(copy)
            messages += _messages(operand, result, copy)
    return messages


@lru_cache(maxsize=256)
def loads(operand: Layout, result: Layout) -> frozenset[Load]:
    """The distinct loads of devices, from one device for every coordinate that the exchange involves."""
    sent: dict[int, Counter[Shape]] = {}
    received: dict[int, Counter[Shape]] = {}
    for message in _messages(operand, result, _involved(operand, result)):
        if message.sender != message.receiver:
            shape = message.shape
            sent.setdefault(message.sender, Counter())[shape] += 1
            received.setdefault(message.receiver, Counter())[shape] += 1
    every = (*sent.values(), *received.values())
    return frozenset(tuple(sorted((n, s) for s, n in load.items())) for load in every)


def _messages(operand: Layout, result: Layout, devices: Sequence[int]) -> Iterator[Message]:
    """The messages among some devices that need nothing from others."""
    home = {device: _tile(operand, device) for device in devices}
    holders: dict[_Tile, list[int]] = {}
    for device, tile in home.items():
        holders.setdefault(tile, []).append(device)
    for tile, requests in _requests(operand, result, home).items():
        yield from _dealt(holders[tile], [(device, runs) for device, runs in requests if home[device] != tile])
        yield from (Message(device, device, runs) for device, runs in requests if home[device] == tile)


def _requests(operand: Layout, result: Layout, home: Mapping[int, _Tile]) -> dict[_Tile, list[tuple[int, Runs]]]:
    """For each source tile, the devices that need part of it, with the runs that they need."""
    requests: dict[_Tile, list[tuple[int, Runs]]] = {}
    rank = len(operand.dims)
    for device, tile in home.items():
        position = result.mesh.position(device)
        wanted = [shares(s, t)[piece(t, result.mesh, position)] for s, t in zip(operand.dims, result.dims, strict=True)]
        for owners in itertools.product(*(by.items() for by in wanted)):
            source = (*(p for p, _ in owners), *tile[rank:])
            requests.setdefault(source, []).append((device, tuple(runs for _, runs in owners)))
    return requests


def _dealt(holders: list[int], requests: list[tuple[int, Runs]]) -> Iterator[Message]:
    """The requests for one tile, dealt evenly among the devices that hold it."""
    for at, (device, runs) in enumerate(requests):
        yield Message(holders[at * len(holders) // len(requests)], device, runs)


def _tile(layout: Layout, device: int) -> _Tile:
    position = layout.mesh.position(device)
    pieces = (piece(dim, layout.mesh, position) for dim in layout.dims)
    return (*pieces, *layout.mesh.coordinates(position, layout.partial))


def _involved(operand: Layout, result: Layout) -> list[int]:
    """One device for every coordinate that a changed or padded dim uses; the other devices exchange alike."""
    mesh = operand.mesh
    if operand.mesh != result.mesh or mesh.device_ids is not None:
        return list(mesh.devices)
    spans = list(_involved_spans(operand, result))
    if not is_chain(sorted({end for span in spans for end in span})):
        return list(mesh.devices)
    positions = [0]
    for low, high in merged_spans(spans):
        positions = [at + low * k for at in positions for k in range(high // low)]
    return sorted(positions)


def _involved_spans(operand: Layout, result: Layout) -> Iterable[tuple[int, int]]:
    """The spans of the sub-axes that hold digits of changed or padded dims."""
    for s, t in zip(operand.dims, result.dims, strict=True):
        if s != t or s.padded != s.size:
            for digit in (*s.digits, *t.digits):
                if digit.axis is not None:
                    yield operand.mesh.span(digit.axis)
