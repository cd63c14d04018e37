"""Who sends what to whom in an exchange: between any two layouts, on any two sets of devices, through any view.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]

    pieces of the source   0-2   3-5   6-8   9        the devices x=0 hold 0-2, and so on; y does not matter
    the devices y=0 need   0-2   3-4                  from the devices x=0 and x=1
    the devices y=1 need         5     6-8   9        from the devices x=1, x=2 and x=3

Each device asks for what it needs of every source tile that it does not hold, and the holders of a tile share the
requests for it. Among the same devices, and through a view, requests stay whole and are dealt evenly; a device holds
one tile, so no two of its messages to the same receiver can be merged, and the exchange takes as many rounds as some
device sends or receives messages (König: the edges of a bipartite graph of maximum degree r are r matchings). Between
two sets of devices, a holder's requests may be cut: see `crossing`.

`messages_of` lists the messages of one device without those of others, each in closed form from both numerals: who
holds a piece (`holders`), and what a piece shares with others (`overlap`). Its time grows with the messages of the
device, not with the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from reshard.geometry.crossing import holders_of, pull_limit
from reshard.geometry.dealing import assign_requests
from reshard.geometry.holders import holders, home_tile
from reshard.geometry.message import Message as Message
from reshard.geometry.message import (
    Product,
    SharedDims,
    Tile,
    count_elements,
    list_requests,
    scale_blocks,
    shared_dims,
    tile_of,
)
from reshard.geometry.message import cut_product as cut_product
from reshard.geometry.overlap import shares_from, shares_of
from reshard.geometry.remesh import one_set
from reshard.geometry.view_boxes import view_dims
from reshard.types.layout import Layout
from reshard.types.mesh import is_chain, merged_spans
from reshard.types.view import View
from reshard.types.whole import check_deadline


def exchange_messages(operand: Layout, result: Layout, view: View | None = None) -> Sequence[Message]:
    """Every message of the exchange, local copies included: their sender is their receiver.

    >>> from reshard.types import Mesh
    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2]", "f32[4]")]
    >>> sorted((each.sender, each.receiver, each.elements) for each in exchange_messages(*both))
    [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    """
    if view is not None:
        return _view_messages(operand, result, view)
    if not one_set(operand.mesh, result.mesh):
        return list(typical_messages(operand, result))
    shared = shared_dims(operand, result)
    first = _involved_devices(operand, result)
    listed = set(first)
    messages = list(_messages_among(operand, result, first, shared))
    # Devices that differ only in coordinates that no changed dim uses exchange alike, among themselves.
    for device in operand.mesh.devices:
        if device not in listed:
            copy = [device + offset for offset in first]
            listed.update(copy)
            messages += _messages_among(operand, result, copy, shared)
    return messages


@lru_cache(maxsize=256)
def _view_messages(operand: Layout, result: Layout, view: View) -> Sequence[Message]:
    return tuple(
        _assign_messages(operand, result, result.mesh.devices, view_dims(operand, result, view), holders_of(operand))
    )


def typical_messages(operand: Layout, result: Layout, view: View | None = None) -> Iterable[Message]:
    """The messages of devices of every kind; the others exchange alike."""
    if view is not None:
        return _view_messages(operand, result, view)
    shared = shared_dims(operand, result)
    if one_set(operand.mesh, result.mesh):
        return _messages_among(operand, result, _involved_devices(operand, result), shared)
    limit = pull_limit(operand, result)
    return _assign_messages(operand, result, result.mesh.devices, shared, holders_of(operand), limit)


def _messages_among(
    operand: Layout, result: Layout, devices: Sequence[int], shared: Sequence[SharedDims]
) -> Iterator[Message]:
    """The messages among some devices that need nothing from others."""
    held: dict[Tile, list[int]] = {}
    for device in devices:
        held.setdefault(tile_of(operand, device), []).append(device)
    return _assign_messages(operand, result, devices, shared, held)


def _assign_messages(
    operand: Layout,
    result: Layout,
    receivers: Sequence[int],
    shared: Sequence[SharedDims],
    held: Mapping[Tile, Sequence[int]],
    limit: int | None = None,
) -> Iterator[Message]:
    """The requests for each tile, assigned to its holders; cut where whole ones would load one beyond the limit."""
    for tile, demand in list_requests(operand, result, receivers, shared).items():
        check_deadline()
        givers = held[tile]
        own = set(givers)
        yield from (Message(device, device, (product,)) for device, product in demand if device in own)
        queue = [(device, product) for device, product in demand if device not in own]
        if limit is None:
            for at, (device, product) in enumerate(queue):
                yield Message(givers[at * len(givers) // len(queue)], device, (product,))
            continue
        for share in assign_requests([count_elements(product) for _, product in queue], len(givers), limit):
            device, product = queue[share.request]
            yield Message(givers[share.holder], device, cut_product(product, share.low, share.high))


def _involved_devices(operand: Layout, result: Layout) -> list[int]:
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


# The messages of one device.


def messages_of(operand: Layout, result: Layout, device: int) -> Iterator[Message]:
    """What a device copies, sends and receives in an exchange between layouts on the same devices.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=3)
    >>> before, after = Layout.parse("f32[{x}2/5]", mesh), Layout.parse("f32[5]", mesh)
    >>> [(each.sender, each.receiver, each.elements) for each in messages_of(before, after, 2)]
    [(0, 2, 2), (1, 2, 2), (2, 2, 1), (2, 0, 1), (2, 1, 1)]
    """
    exchange = _Exchange(operand, result, operand.mesh.position(device))
    yield from exchange.received()
    yield from exchange.sent()


class _Exchange:
    """An exchange as the device at a position of the operand's mesh sees it.

    Devices exchange among those that are `near`: equal in all coordinates that the exchange does not involve.
    """

    def __init__(self, operand: Layout, result: Layout, me: int) -> None:
        self._operand, self._result, self._me = operand, result, me
        self._rank = len(operand.dims)
        self._home = home_tile(operand, me)
        self._steps = [
            (math.prod(operand.tile_shape[at + 1 :]), math.prod(result.tile_shape[at + 1 :]))
            for at in range(self._rank)
        ]
        self._apart = [(low, high // low) for low, high in spans_apart(operand, result)]
        self._places = [me // stride % size for stride, size in self._apart]
        self._wanted = lru_cache(maxsize=None)(self._wanted_of)

    def received(self) -> Iterator[Message]:
        """What the device receives, its own copies included."""
        dims = zip(self._operand.dims, self._result.dims, self._wanted_tile(), self._steps, strict=False)
        wanted = (
            [(p, scale_blocks(blocks, *steps)) for p, blocks in shares_of(s, t, q).items()] for s, t, q, steps in dims
        )
        for owners in itertools.product(*wanted):
            check_deadline()
            tile = (*[p for p, _ in owners], *self._home[self._rank :])
            yield self._message(self._giver(tile, self._me), self._me, tuple([factor for _, factor in owners]))

    def sent(self) -> Iterator[Message]:
        """What the device sends to others."""
        mine = self._holders(self._home)
        dims = zip(self._operand.dims, self._result.dims, self._home, self._steps, strict=False)
        given = [
            {q: scale_blocks(blocks, *steps) for q, blocks in shares_from(s, t, p).items()} for s, t, p, steps in dims
        ]
        for receiver, pieces in self._wishes(self._home):
            check_deadline()
            if receiver not in mine and (len(mine) == 1 or self._giver(self._home, receiver) == self._me):
                product = tuple([of[q] for of, q in zip(given, pieces, strict=True)])
                yield self._message(self._me, receiver, product)

    def _message(self, sender: int, receiver: int, product: Product) -> Message:
        ids = self._operand.mesh.devices
        return Message(ids[sender], ids[receiver], (product,))

    def _wanted_tile(self) -> Tile:
        mesh = self._result.mesh
        return home_tile(self._result, mesh.position(self._operand.mesh.devices[self._me]))

    def _giver(self, tile: Tile, receiver: int) -> int:
        """Who gives of a tile to a receiver: itself, else the holders deal the others among themselves."""
        held = self._holders(tile)
        if receiver in held:
            return receiver
        if len(held) == 1:
            return held[0]
        wanted = self._wanted(tile)
        return held[wanted[receiver] * len(held) // len(wanted)]

    def _wanted_of(self, tile: Tile) -> dict[int, int]:
        """The number of each receiver that lacks part of a tile."""
        held = set(self._holders(tile))
        lacking = (receiver for receiver, _ in self._wishes(tile) if receiver not in held)
        return {receiver: number for number, receiver in enumerate(sorted(lacking))}

    def _wishes(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """The receivers of parts of a tile, each with the pieces of the result that it needs."""
        dims = zip(self._operand.dims, self._result.dims, tile, strict=False)
        takers = holders(self._result, any_summand=True)
        summand = tile[self._rank :]
        for pieces in itertools.product(*(shares_from(s, t, p) for s, t, p in dims)):
            for receiver in self._near(self._translated(takers.of(pieces))):
                if not summand or home_tile(self._operand, receiver)[self._rank :] == summand:
                    yield receiver, pieces

    def _holders(self, tile: Tile) -> Sequence[int]:
        return self._near(holders(self._operand).of(tile))

    @property
    def _translated(self) -> Callable[[tuple[int, ...]], Sequence[int]]:
        """Positions of the result's mesh as positions of the operand's."""
        one, other = self._operand.mesh, self._result.mesh
        if one == other:
            return lambda positions: positions
        return lambda positions: [one.position(other.devices[at]) for at in positions]

    def _near(self, positions: Sequence[int]) -> Sequence[int]:
        if not self._apart:
            return positions
        places = zip(self._apart, self._places, strict=True)
        for (stride, size), place in places:
            positions = [at for at in positions if at // stride % size == place]
        return positions
