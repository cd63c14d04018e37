"""Who sends what to whom in an exchange: between any two layouts, on any two sets of devices, through any view.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]

    pieces of the source   0-2   3-5   6-8   9        the devices x=0 hold 0-2, and so on; y does not matter
    the devices y=0 need   0-2   3-4                  from the devices x=0 and x=1
    the devices y=1 need         5     6-8   9        from the devices x=1, x=2 and x=3

Each device asks for what it needs of every source tile that it does not hold, and the holders of a tile share the
requests for it. Among the same devices, and through a view, requests stay whole and are dealt evenly; a device holds
one tile, so no two of its messages to the same receiver can be merged, and the exchange takes as many rounds as some
device sends or receives messages (König: the edges of a bipartite graph of maximum degree r are r matchings). Between
two sets of devices, a holder's requests may be cut: see `dealing`.

What two tiles share is a product of factors, each of which is what their pieces of some dims share: one dim, or several
that a view ties together. A factor of ten blocks and another of ten are a hundred blocks, which are listed only where
they are read.

    f32[{x}2, 6] -> f32[4, {x}3] on <x=2>, from device 1 to device 0

    dim 0    rows 0-1 of the sender's tile are rows 2-3 of the receiver's    Block(0, 6, (Axis(2, 6, 3),))
    dim 1    columns 0-2 of it are columns 0-2                               Block(0, 0, (Axis(3, 1, 1),))
    both     the product of the two                                          Block(0, 6, (Axis(2, 6, 3), Axis(3, 1, 1)))
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.blocks import (
    Axis,
    Block,
    Factor,
    Product,
    count_product,
    cut_range,
    multiply_blocks,
    scale_blocks,
    split_rows,
)
from reshard.geometry.dealing import assign_requests
from reshard.geometry.held import NeededParts
from reshard.geometry.holders import Tile, count_copies, holders, holders_of, home_tile, pull_limit, tile_of, tiles
from reshard.geometry.overlap import SharedDims, list_owners, shared_dims, shared_elements, shares_from, shares_of
from reshard.geometry.remesh import one_set
from reshard.geometry.view_layouts import view_dims
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.mesh import is_chain, merged_spans
from reshard.types.view import View
from reshard.types.whole import check_deadline

Shape = tuple[tuple[tuple[int, ...], int], ...]
"""The blocks that make up one message: their extents, and how many have these."""


class Message(NamedTuple):
    """What one device sends to another: products of factors; a sender that is the receiver copies."""

    sender: int
    receiver: int
    products: tuple[Product, ...]

    @property
    def elements(self) -> int:
        """True elements in the message, without padding."""
        return sum(map(count_product, self.products))

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks that make up the message."""
        for product in self.products:
            yield from map(multiply_blocks, itertools.product(*product))

    @property
    def is_run(self) -> bool:
        """Whether the message can be sent and received where it lies."""
        single = len(self.products) == 1 and all(len(factor) == 1 for factor in self.products[0])
        return single and next(self.blocks).is_run

    @property
    def shape(self) -> Shape:
        """The blocks by their extents."""
        shapes: Counter[tuple[int, ...]] = Counter()
        for each in itertools.chain.from_iterable(itertools.product(*product) for product in self.products):
            shapes[tuple([axis.extent for block in each for axis in block.axes])] += 1
        return tuple(sorted(shapes.items()))


def cut_product(product: Product, low: int, high: int) -> tuple[Product, ...]:
    """The elements number `low` to `high` of a product of factors, in row-major order, as products.

    Elements 3 to 8 of 3 x 4 are the last of row 0 and the whole of row 1:

    >>> from reshard.geometry.blocks import Axis
    >>> product = (Block(0, 0, (Axis(3, 4, 4),)),), (Block(0, 0, (Axis(4, 1, 1),)),)
    >>> [[[(each.src, each.elements) for each in factor] for factor in part] for part in cut_product(product, 3, 8)]
    [[[(0, 1)], [(3, 1)]], [[(4, 1)], [(0, 4)]]]
    """
    if low >= high:
        return ()
    if (low, high) == (0, count_product(product)):
        return (product,)
    parts: list[Product] = []
    for first, last, start, end in split_rows(low, high, count_product(product[1:])):
        # Elements of the first factor, counted in the order of its blocks.
        index: list[Block] = []
        below = 0
        for block in product[0]:
            size = block.elements
            index += cut_range(block, max(first - below, 0), min(last - below, size))
            below += size
        parts += [(tuple(index), *rest) for rest in cut_product(product[1:], start, end)]
    return tuple(parts)


def cut_products(products: Sequence[Product], low: int, high: int) -> tuple[Product, ...]:
    """The elements number `low` to `high` of some products, one after another."""
    parts: list[Product] = []
    for product in products:
        size = count_product(product)
        parts += cut_product(product, max(low, 0), min(high, size))
        low, high = low - size, high - size
    return tuple(parts)


class Tally(NamedTuple):
    """What devices send and receive in some messages, local copies left out: elements, how many messages, and the
    elements of the largest one.
    """

    sent: Counter[int]
    received: Counter[int]
    sends: Counter[int]
    receives: Counter[int]
    largest: int

    @property
    def rounds(self) -> int:
        """The messages of the device that sends or receives the most."""
        return max((*self.sends.values(), *self.receives.values()), default=0)


def tally_messages(messages: Iterable[Message]) -> Tally:
    """Counts what devices send to each other."""
    sent, received, sends, receives = (Counter[int]() for _ in range(4))
    largest = 0
    for message in messages:
        sender, receiver, _ = message
        if sender != receiver:
            elements = message.elements
            sent[sender] += elements
            received[receiver] += elements
            sends[sender] += 1
            receives[receiver] += 1
            largest = max(largest, elements)
    return Tally(sent, received, sends, receives, largest)


# All messages of an exchange, or those of devices of every kind.


def exchange_messages(
    operand: Layout, result: Layout, view: View | None = None, holding: Holding | None = None
) -> Sequence[Message]:
    """Every message of the exchange, local copies included: their sender is their receiver.

    What receivers hold already, and is not stale, is in none.

    >>> from reshard.types import Mesh
    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2]", "f32[4]")]
    >>> sorted((each.sender, each.receiver, each.elements) for each in exchange_messages(*both))
    [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    """
    if holding is not None:
        return _list_beside_held(operand, result, view, holding)
    if view is not None:
        return _list_through_view(operand, result, view)
    if not one_set(operand.mesh, result.mesh):
        return list(typical_messages(operand, result))
    return list(_list_each(operand, result, shared_dims(operand, result)))


def _list_each(operand: Layout, result: Layout, shared: Sequence[SharedDims]) -> Iterator[Message]:
    first = _involved_devices(operand, result)
    listed = set(first)
    yield from _list_among(operand, result, first, shared)
    # Devices that differ only in coordinates that no changed dim uses exchange alike, among themselves.
    for device in operand.mesh.devices:
        if device not in listed:
            copy = [device + offset for offset in first]
            listed.update(copy)
            yield from _list_among(operand, result, copy, shared)


def count_sent(operand: Layout, result: Layout, *, every: bool) -> Counter[int]:
    """What devices send among the same devices, in elements: of every device, or of one of every kind.

    What pieces share counts as one run, so that tables of millions of runs are counted and not listed.
    """
    shared: list[SharedDims] = []
    for at, (s, t) in enumerate(zip(operand.dims, result.dims, strict=True)):
        runs: dict[Tile, Mapping[Tile, Factor]] = {}
        for q, by in enumerate(shared_elements(s, t)):
            runs[q,] = {(p,): (Block(0, 0, (Axis(n, 1, 1),)),) for p, n in by.items()}
        shared.append(SharedDims((at,), (at,), runs.__getitem__))
    if every:
        return tally_messages(_list_each(operand, result, shared)).sent
    return tally_messages(_list_among(operand, result, _involved_devices(operand, result), shared)).sent


def typical_messages(operand: Layout, result: Layout) -> Iterable[Message]:
    """The messages of devices of every kind; the others exchange alike."""
    shared = shared_dims(operand, result)
    if one_set(operand.mesh, result.mesh):
        return _list_among(operand, result, _involved_devices(operand, result), shared)
    limit = pull_limit(operand, result)
    return _assign_messages(operand, result, result.mesh.devices, shared, holders_of(operand), limit)


@lru_cache(maxsize=256)
def _list_through_view(operand: Layout, result: Layout, view: View) -> Sequence[Message]:
    shared, held = view_dims(operand, result, view), holders_of(operand)
    # Requests for summands stay whole, and those that one device has to meet anyway.
    alone = operand.partial or count_copies(operand) == 1
    limit = None if alone else pull_limit(operand, result, view)
    return tuple(_assign_messages(operand, result, result.mesh.devices, shared, held, limit))


@lru_cache(maxsize=32)
def _list_beside_held(operand: Layout, result: Layout, view: View | None, holding: Holding) -> Sequence[Message]:
    """The messages of an exchange whose receivers hold part of their tiles; requests are cut where that is fairer."""
    demands, givers = list_needed(operand, result, view, holding), holders_of(operand)
    # What the busiest device must receive, or send if the holders of each tile share what is asked of them.
    received, limit = Counter[int](), 0
    for tile, demand in demands.items():
        own = set(givers[tile])
        asked = [(device, sum(map(count_product, products))) for device, products in demand if device not in own]
        received.update(dict(asked))
        limit = max(limit, -(-sum(count for _, count in asked) // len(own)))
    return tuple(_assign_demands(demands, givers, max(limit, *received.values(), 0)))


@lru_cache(maxsize=32)
def list_needed(
    operand: Layout, result: Layout, view: View | None, holding: Holding | None
) -> Mapping[Tile, Sequence[tuple[int, tuple[Product, ...]]]]:
    """For each source tile, the receivers that need part of it, with what they need beside what they hold.

    Devices that want the same tile and hold the same one need the same products.
    """
    shared = shared_dims(operand, result) if view is None else view_dims(operand, result, view)
    requests = list_requests(operand, result, result.mesh.devices, shared)
    if holding is None:
        return {tile: [(device, (product,)) for device, product in wants] for tile, wants in requests.items()}
    needed = NeededParts(operand, result, holding, shared)
    return {
        tile: [(device, products) for device, product in wants if (products := needed.of(device, tile, product))]
        for tile, wants in requests.items()
    }


def fewest_beside(operand: Layout, result: Layout, view: View | None, holding: Holding) -> int:
    """Elements that the busiest device sends or receives in every move beside what is held: `fewest_through`."""
    received = tally_messages(exchange_messages(operand, result, view, holding)).received
    leaving = list_leaving_beside(operand, result, view, holding)
    return max([0, *received.values(), *(-(-elements // len(devices)) for devices, elements in leaving)])


def list_held_copies(have: Layout, result: Layout, devices: Sequence[int]) -> Iterator[Message]:
    """What devices that have tiles of both copy of what they hold into their tiles of the result: nothing is sent.

    >>> from reshard.types import Mesh
    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}2]", "f32[4]")]
    >>> [(each.receiver, each.elements) for each in list_held_copies(*both, [0, 1])]
    [(0, 2), (1, 2)]
    """
    shared = shared_dims(have, result)
    for device in devices:
        each = zip(shared, tile_of(result, device), tile_of(have, device), strict=True)
        product = [dim.wanted((q,)).get((p,)) for dim, q, p in each]
        if None not in product:
            yield Message(device, device, (tuple([factor for factor in product if factor is not None]),))


def list_leaving_beside(
    operand: Layout, result: Layout, view: View | None, holding: Holding
) -> Iterator[tuple[Sequence[int], int]]:
    """For each tile of the operand, its holders, and the elements of it that must leave them, at least.

    Devices of one target tile that hold unlike parts of it are taken to need what the neediest one does.
    """
    givers, wanted = holders_of(operand), tiles(result)
    for tile, demand in list_needed(operand, result, view, holding).items():
        most: dict[Tile, int] = {}
        for device, products in demand:
            if device not in givers[tile]:
                size = sum(map(count_product, products))
                most[wanted[device]] = max(size, most.get(wanted[device], 0))
        yield givers[tile], sum(most.values())


def _list_among(
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
    requests = list_requests(operand, result, receivers, shared).items()
    demands = {tile: [(device, (product,)) for device, product in demand] for tile, demand in requests}
    return _assign_demands(demands, held, limit)


def _assign_demands(
    demands: Mapping[Tile, Sequence[tuple[int, tuple[Product, ...]]]],
    held: Mapping[Tile, Sequence[int]],
    limit: int | None,
) -> Iterator[Message]:
    """The requests for each tile, assigned to its holders; cut where whole ones would load one beyond the limit."""
    for tile, demand in demands.items():
        check_deadline()
        givers = held[tile]
        own = set(givers)
        yield from (Message(device, device, products) for device, products in demand if device in own)
        queue = [(device, products) for device, products in demand if device not in own]
        if limit is None:
            for at, (device, products) in enumerate(queue):
                yield Message(givers[at * len(givers) // len(queue)], device, products)
            continue
        sizes = [sum(map(count_product, products)) for _, products in queue]
        for share in assign_requests(sizes, len(givers), limit) if sizes else ():
            device, products = queue[share.request]
            yield Message(givers[share.holder], device, cut_products(products, share.low, share.high))


def list_requests(
    operand: Layout, result: Layout, receivers: Sequence[int], shared: Sequence[SharedDims]
) -> dict[Tile, list[tuple[int, Product]]]:
    """For each source tile, the receivers that need part of it, with what they need.

    Of a partial array, a device needs the summand that it has, and no other.
    """
    listed: dict[Tile, list[tuple[int, Product]]] = {}
    whole = tiles(result) if len(receivers) == result.mesh.size else {d: tile_of(result, d) for d in receivers}
    homes = tiles(operand) if operand.partial else {}
    rank = len(operand.dims)
    # Many devices want the same tile: what it is made of is worked out once.
    made_of: dict[Tile, list[tuple[Tile, Product]]] = {}
    for device in receivers:
        tile = whole[device]
        if tile not in made_of:
            check_deadline()
            made_of[tile] = [*list_owners(shared, tile)]
        summand = homes.get(device, ())[rank:]
        for source, product in made_of[tile]:
            listed.setdefault(source + summand, []).append((device, product))
    return listed


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
    # Only changed dims and padded ones: of a padded dim that stays, devices have unlike numbers of elements.
    involved = [(s, t) for s, t in zip(operand.dims, result.dims, strict=True) if s != t or s.padded != s.size]
    digits = [digit for s, t in involved for digit in (*s.digits, *t.digits)]
    spans = [mesh.span(digit.axis) for digit in digits if digit.axis is not None]
    if not is_chain(sorted({end for span in spans for end in span})):
        return []
    apart: list[tuple[int, int]] = []
    below = 1
    for low, high in (*merged_spans(spans), (mesh.size, mesh.size)):
        if below < low:
            apart.append((below, low))
        below = high
    return apart


# The messages of one device, in closed form from both numerals: who holds a piece (`holders`), and what a piece shares
# with others (`overlap`). The time grows with the messages of the device, not with the mesh.


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
    """An exchange as the device at a position of the operand's mesh sees it."""

    def __init__(self, operand: Layout, result: Layout, me: int) -> None:
        self._operand, self._result, self._me = operand, result, me
        self._rank, self._ids = len(operand.dims), operand.mesh.devices
        self._home = home_tile(operand, me)
        shapes = operand.tile_shape, result.tile_shape
        # The dims of both layouts, and how far apart neighbours along each are in a tile of either.
        self._dims = [
            (*dims, *(math.prod(shape[at + 1 :]) for shape in shapes))
            for at, dims in enumerate(zip(operand.dims, result.dims, strict=True))
        ]
        # Devices exchange among those that are equal in all coordinates that the exchange does not involve.
        self._near = [(low, high // low, me // low % (high // low)) for low, high in spans_apart(operand, result)]
        self._numbers: dict[Tile, dict[int, int]] = {}

    def received(self) -> Iterator[Message]:
        """What the device receives, its own copies included."""
        wanted = tile_of(self._result, self._ids[self._me])
        shared = [
            [(p, scale_blocks(blocks, *steps)) for p, blocks in shares_of(s, t, q).items()]
            for (s, t, *steps), q in zip(self._dims, wanted, strict=False)
        ]
        for owners in itertools.product(*shared):
            check_deadline()
            tile = (*[p for p, _ in owners], *self._home[self._rank :])
            giver = self._find_giver(tile, self._me)
            yield Message(self._ids[giver], self._ids[self._me], (tuple([factor for _, factor in owners]),))

    def sent(self) -> Iterator[Message]:
        """What the device sends to others."""
        mine = self._list_holders(self._home)
        given = [
            {q: scale_blocks(blocks, *steps) for q, blocks in shares_from(s, t, p).items()}
            for (s, t, *steps), p in zip(self._dims, self._home, strict=False)
        ]
        for receiver, pieces in self._list_takers(self._home):
            check_deadline()
            if receiver not in mine and (len(mine) == 1 or self._find_giver(self._home, receiver) == self._me):
                product = tuple([of[q] for of, q in zip(given, pieces, strict=True)])
                yield Message(self._ids[self._me], self._ids[receiver], (product,))

    def _find_giver(self, tile: Tile, receiver: int) -> int:
        """Who gives of a tile to a receiver: itself, else the holders deal the others among themselves."""
        held = self._list_holders(tile)
        if receiver in held:
            return receiver
        if len(held) == 1:
            return held[0]
        if tile not in self._numbers:
            lacking = sorted({taker for taker, _ in self._list_takers(tile)}.difference(held))
            self._numbers[tile] = {taker: number for number, taker in enumerate(lacking)}
        wanted = self._numbers[tile]
        return held[wanted[receiver] * len(held) // len(wanted)]

    def _list_takers(self, tile: Tile) -> Iterator[tuple[int, Tile]]:
        """The receivers of parts of a tile, each with the pieces of the result that it needs."""
        one, other = self._operand.mesh, self._result.mesh
        takers, summand = holders(self._result, any_summand=True), tile[self._rank :]
        shared = [shares_from(s, t, p) for (s, t, *_), p in zip(self._dims, tile, strict=False)]
        for pieces in itertools.product(*shared):
            positions: Sequence[int] = takers.of(pieces)
            if one != other:
                positions = [one.position(other.devices[at]) for at in positions]
            for receiver in self._keep_near(positions):
                if not summand or home_tile(self._operand, receiver)[self._rank :] == summand:
                    yield receiver, pieces

    def _list_holders(self, tile: Tile) -> Sequence[int]:
        return self._keep_near(holders(self._operand).of(tile))

    def _keep_near(self, positions: Sequence[int]) -> Sequence[int]:
        for stride, size, place in self._near:
            positions = [at for at in positions if at // stride % size == place]
        return positions
