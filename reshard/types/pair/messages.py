"""Who sends what to whom in an exchange of boxes, for layouts with no common refinement.

Each device fetches from every source piece that its target tile overlaps and that it does not
hold. A piece is held by one or several devices, its *replicas*, and its requests are dealt evenly
among them; two pieces are never on one device, so no request can be merged with another. The
rounds needed are therefore the largest number of messages that a device sends or receives
(König: a bipartite graph of maximum degree r is the union of r matchings).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis, joined
from reshard.types.pair.overlap import Run, piece, shares

Box = tuple[Run, ...]


class Message(NamedTuple):
    """Device ids, and per dim the runs that go from one tile to the other (equal ids: a local copy)."""

    sender: int
    receiver: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def elements(self) -> int:
        """True elements in the message, no padding."""
        return math.prod(sum(run.length for run in dim) for dim in self.runs)

    @property
    def boxes(self) -> Iterator[Box]:
        """The boxes that make up the message: one run of each dim."""
        return itertools.product(*self.runs)


Shape = tuple[tuple[int, ...], ...]
"""The extents of the boxes that make up one message."""

Load = tuple[tuple[int, Shape], ...]
"""The messages that one device sends, or receives: how many of each shape."""


def messages(operand: Layout, result: Layout) -> list[Message]:
    """Every message of the exchange, local copies included, for all devices."""
    first = _involved(operand, result)
    taken = set(first)
    found = list(_messages(operand, result, first))
    # Devices that differ in other coordinates move alike, and among themselves.
    for device in operand.mesh.devices:
        if device not in taken:
            copy = [device + offset for offset in first]
            taken.update(copy)
            found += _messages(operand, result, copy)
    return found


@lru_cache(maxsize=256)
def loads(operand: Layout, result: Layout) -> frozenset[Load]:
    """The distinct loads of devices, from one device for every coordinate that the move involves."""
    sent: dict[int, Counter[Shape]] = {}
    received: dict[int, Counter[Shape]] = {}
    for message in _messages(operand, result, _involved(operand, result)):
        if message.sender != message.receiver:
            shape = tuple(tuple(r.length for r in box) for box in message.boxes)
            sent.setdefault(message.sender, Counter())[shape] += 1
            received.setdefault(message.receiver, Counter())[shape] += 1
    every = (*sent.values(), *received.values())
    return frozenset(tuple(sorted((n, s) for s, n in load.items())) for load in every)


def _messages(operand: Layout, result: Layout, devices: Iterable[int]) -> Iterator[Message]:
    devices = list(devices)
    holders: dict[tuple[int, ...], list[int]] = {}
    home: dict[int, tuple[int, ...]] = {}
    for device in devices:
        home[device] = _tile(operand, operand.mesh.position(device))
        holders.setdefault(home[device], []).append(device)
    requests: dict[tuple[int, ...], list[tuple[int, tuple[tuple[Run, ...], ...]]]] = {}
    for device in devices:
        position = result.mesh.position(device)
        wanted = [shares(s, t)[piece(t, result.mesh, position)] for s, t in zip(operand.dims, result.dims, strict=True)]
        plane = _plane(operand.partial, operand.mesh, operand.mesh.position(device))
        for owners in itertools.product(*(by.items() for by in wanted)):
            source = (*(p for p, _ in owners), *plane)
            requests.setdefault(source, []).append((device, tuple(runs for _, runs in owners)))
    for source, wants in requests.items():
        yield from _deal(holders[source], [w for w in wants if home[w[0]] != source])
        yield from (Message(device, device, runs) for device, runs in wants if home[device] == source)


def _deal(holders: list[int], wants: list[tuple[int, tuple[tuple[Run, ...], ...]]]) -> Iterator[Message]:
    """Requests for one piece, dealt evenly among the devices that hold it."""
    for at, (device, runs) in enumerate(wants):
        yield Message(holders[at * len(holders) // len(wants)], device, runs)


def _tile(layout: Layout, position: int) -> tuple[int, ...]:
    pieces = tuple(piece(dim, layout.mesh, position) for dim in layout.dims)
    return (*pieces, *_plane(layout.partial, layout.mesh, position))


def _plane(partial: tuple[SubAxis, ...], mesh: Mesh, position: int) -> tuple[int, ...]:
    """Which summand of a partial array a device holds: another one is no replica."""
    return mesh.coordinates(position, partial)


def _involved(operand: Layout, result: Layout) -> list[int]:
    """Devices for every coordinate that a changed or a padded dim uses; the others move alike."""
    mesh = operand.mesh
    if operand.mesh != result.mesh or mesh.device_ids is not None:
        return list(mesh.devices)
    spans: list[tuple[int, int]] = []
    for s, t in zip(operand.dims, result.dims, strict=True):
        if s != t or s.padded != s.size:
            spans += [_span(mesh, d.axis) for dim in (s, t) for d in dim.digits if d.axis is not None]
    ends = sorted({end for span in spans for end in span})
    if any(high % low for low, high in itertools.pairwise(ends)):
        return list(mesh.devices)
    positions = [0]
    for low, high in joined(spans):
        positions = [at + low * k for at in positions for k in range(high // low)]
    return sorted(positions)


def _span(mesh: Mesh, axis: SubAxis) -> tuple[int, int]:
    return mesh.stride(axis), mesh.stride(axis) * axis.size
