"""Who sends what to whom in an exchange of boxes, between layouts without a common refinement.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]

    pieces of the source   0-2   3-5   6-8   9        the devices x=0 hold 0-2, and so on; y does not matter
    the devices y=0 need   0-2   3-4                  from the devices x=0 and x=1
    the devices y=1 need         5     6-8   9        from the devices x=1, x=2 and x=3

Each device fetches from every source piece that its target tile overlaps and that it does not hold. The devices that
hold a piece deal its requests evenly among themselves. A device holds only one piece, so no two of its messages to
the same receiver can be merged. The exchange therefore takes as many rounds as some device sends or receives messages
(König: the edges of a bipartite graph of maximum degree r are r matchings). Between two sets of devices, a holder's
requests may be cut: see `pair.crossing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from reshard.geometry import crossing
from reshard.geometry.message import Box as Box
from reshard.geometry.message import Message as Message
from reshard.geometry.message import Runs, Tile, requests, tile_of
from reshard.geometry.overlap import shares
from reshard.geometry.remesh import one_set
from reshard.types.layout import Layout
from reshard.types.mesh import is_chain, merged_spans


def all_messages(operand: Layout, result: Layout) -> list[Message]:
    """Every message of the exchange, local copies included, for all devices."""
    if not one_set(operand.mesh, result.mesh):
        return list(crossing.messages(operand, result))
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


def typical_messages(operand: Layout, result: Layout) -> Iterator[Message]:
    """The messages of devices of every kind; the others exchange alike."""
    if one_set(operand.mesh, result.mesh):
        return _messages(operand, result, _involved(operand, result))
    return crossing.messages(operand, result)


def _messages(operand: Layout, result: Layout, devices: Sequence[int]) -> Iterator[Message]:
    """The messages among some devices that need nothing from others."""
    home = {device: tile_of(operand, device) for device in devices}
    rank = len(operand.dims)
    holders: dict[Tile, list[int]] = {}
    for device, tile in home.items():
        holders.setdefault(tile, []).append(device)
    for tile, wanted in requests(operand, result, devices, lambda device: home[device][rank:], shares).items():
        yield from _dealt(holders[tile], [(device, runs) for device, runs in wanted if home[device] != tile])
        yield from (Message(device, device, (runs,)) for device, runs in wanted if home[device] == tile)


def _dealt(holders: list[int], wanted: list[tuple[int, Runs]]) -> Iterator[Message]:
    """The requests for one tile, dealt evenly among the devices that hold it."""
    for at, (device, runs) in enumerate(wanted):
        yield Message(holders[at * len(holders) // len(wanted)], device, (runs,))


def _involved(operand: Layout, result: Layout) -> list[int]:
    """One device for every coordinate that a changed or padded dim uses; the other devices exchange alike."""
    apart = spans_apart(operand, result)
    if not apart:
        return list(operand.mesh.devices)
    positions, below = [0], 1
    for low, high in (*apart, (operand.mesh.size, operand.mesh.size)):
        positions = [at + below * k for at in positions for k in range(low // below)]
        below = high
    return sorted(positions)


def spans_apart(operand: Layout, result: Layout) -> list[tuple[int, int]]:
    """The spans of positions that an exchange does not involve, minor first: devices that differ there exchange alike,
    each among those that are equal there.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> spans_apart(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))
    [(1, 2)]
    """
    mesh = operand.mesh
    if operand.mesh != result.mesh or mesh.device_ids is not None:
        return []
    spans = list(_involved_spans(operand, result))
    if not is_chain(sorted({end for span in spans for end in span})):
        return []
    apart: list[tuple[int, int]] = []
    below = 1
    for low, high in (*merged_spans(spans), (mesh.size, mesh.size)):
        if below < low:
            apart.append((below, low))
        below = high
    return apart


def _involved_spans(operand: Layout, result: Layout) -> Iterable[tuple[int, int]]:
    """The spans of the sub-axes that hold digits of changed or padded dims."""
    for s, t in zip(operand.dims, result.dims, strict=True):
        if s != t or s.padded != s.size:
            for digit in (*s.digits, *t.digits):
                if digit.axis is not None:
                    yield operand.mesh.span(digit.axis)
