"""How the holders of a tile share the requests for it: one by one, or from the sums of a queue alone.

    requests of 6, 6 and 6 elements     ends       0        6        12       18
    four holders, 5 elements each       quotas     0      5      10      15   18
    holder 1                                              1 of request 0, 4 of request 1

Where whole requests, dealt evenly, load no holder more than a limit, they stay whole: fewer messages. Otherwise each
holder gets one contiguous share of the queue: no other choice of senders loads the busiest device less. The ends of the
requests say what every holder sends, so a queue of thousands that many tiles have in common is listed once; requests
that are all alike are a `range`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import sub
from typing import Any, NamedTuple

from reshard.geometry.holders import holders
from reshard.geometry.overlap import shared_elements
from reshard.geometry.view_layouts import Unit, count_shared
from reshard.types.layout import Layout
from reshard.types.view import View

_FEW = 16
"""Up to this many left-out requests are skipped one by one; with more, the others are listed anew."""


class Share(NamedTuple):
    """What one holder sends of one request: elements number `low` to `high` of it."""

    holder: int
    request: int
    low: int
    high: int


def assign_requests(sizes: Sequence[int], holders: int, limit: int) -> Sequence[Share]:
    """Requests of these sizes, dealt evenly among the holders of a tile: whole if none then sends more than `limit`.

    >>> [tuple(share) for share in assign_requests([6, 6, 6], 4, limit=5)]
    [(0, 0, 0, 5), (1, 0, 5, 6), (1, 1, 0, 4), (2, 1, 4, 6), (2, 2, 0, 3), (3, 2, 3, 6)]
    >>> [tuple(share) for share in assign_requests([6, 6, 6], 4, limit=6)]
    [(0, 0, 0, 6), (1, 1, 0, 6), (2, 2, 0, 6)]
    """
    whole = assign_whole(sizes, holders)
    loads = [0] * holders
    for share in whole:
        loads[share.holder] += share.high
    if max(loads) <= limit:
        return whole
    return assign_by_quota(sizes, [-(-sum(sizes) // holders)] * holders)


def assign_whole(sizes: Sequence[int], holders: int) -> list[Share]:
    """Requests of these sizes, dealt evenly among holders by their number.

    >>> [tuple(share) for share in assign_whole([6, 5, 6], 2)]
    [(0, 0, 0, 6), (0, 1, 0, 5), (1, 2, 0, 6)]
    """
    return [Share(at * holders // len(sizes), at, 0, size) for at, size in enumerate(sizes)]


def assign_by_quota(sizes: Sequence[int], quotas: Sequence[int]) -> list[Share]:
    """The queue of requests cut into one contiguous share a holder, of the elements of its quota or, in the end, fewer.

    >>> [tuple(share) for share in assign_by_quota([6, 6], [4, 0, 8])]
    [(0, 0, 0, 4), (2, 0, 4, 6), (2, 1, 0, 6)]
    """
    shares: list[Share] = []
    holder, room = 0, quotas[0]
    for at, size in enumerate(sizes):
        low = 0
        while low < size:
            while not room:
                holder += 1
                room = quotas[holder]
            high = min(size, low + room)
            shares.append(Share(holder, at, low, high))
            low, room = high, room - (high - low)
    return shares


class Queue(NamedTuple):
    """Requests for a tile: the positions that make them, ascending, and the sums of the elements of the first ones.

    Requests of the numbers in `gone`, which ascend, are left out.

    >>> queue = Queue.of([(2, 6), (5, 6), (7, 6)])
    >>> queue.positions, queue.ends, queue.without([5, 6]).sizes()
    ([2, 5, 7], range(0, 24, 6), [6, 6])
    """

    positions: Sequence[int]
    ends: Sequence[int]
    gone: tuple[int, ...] = ()

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> Queue:
        """The queue of requests, each a position and a number of elements that is at least 1."""
        ascending = sorted(requests)
        sizes = [size for _, size in ascending]
        if len(set(sizes)) > 1:
            ends: Sequence[int] = [*itertools.accumulate(sizes, initial=0)]
        else:
            step = sizes[0] if sizes else 1
            ends = range(0, step * (len(sizes) + 1), step)
        return cls([at for at, _ in ascending], ends)

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.positions) - len(self.gone)

    def sizes(self) -> list[int]:
        """The elements of each request."""
        return _leave_out([*map(sub, self.ends[1:], self.ends)], self.gone)

    def first(self, requests: int) -> int:
        """The elements that the first of the `requests` ask for together."""
        less = 0
        for at in self.gone:
            if at >= requests:
                break
            requests, less = requests + 1, less + self.ends[at + 1] - self.ends[at]
        return self.ends[requests] - less

    def only(self, positions: Iterable[int]) -> Queue:
        """The requests of these positions."""
        numbers = (at for position in positions if (at := self._find(position)) is not None and at not in self.gone)
        return Queue.of((self.positions[at], self.ends[at + 1] - self.ends[at]) for at in numbers)

    def without(self, positions: Iterable[int]) -> Queue:
        """The queue without the requests of these positions."""
        more = {at for position in positions if (at := self._find(position)) is not None}
        rest = self._replace(gone=tuple(sorted(more.union(self.gone))))
        return rest if len(rest.gone) <= _FEW else rest.listed()

    def listed(self) -> Queue:
        """The same queue with nothing left out."""
        if not self.gone:
            return self
        kept = _leave_out(self.positions, self.gone)
        alike = isinstance(self.ends, range)
        return Queue(kept, self.ends[: len(kept) + 1] if alike else [*itertools.accumulate(self.sizes(), initial=0)])

    def shares(self, position: int, holders: int, limit: int) -> Iterator[Share]:
        """What the holders send to a position, as `assign_requests` says.

        >>> [tuple(share) for share in Queue.of([(2, 6), (5, 6), (7, 6)]).shares(5, holders=4, limit=5)]
        [(1, 1, 0, 4), (2, 1, 4, 6)]
        """
        number = self._find(position)
        if number is None or number in self.gone:
            return
        at = number - bisect_left(self.gone, number)
        start, end = self.first(at), self.first(at + 1)
        if max(self._loads_of_whole(holders)[1]) <= limit:
            yield Share(at * holders // self.requests, at, 0, end - start)
            return
        quota = -(-self.first(self.requests) // holders)
        for holder in range(start // quota, -(-end // quota)):
            low, high = max(start, holder * quota), min(end, (holder + 1) * quota)
            yield Share(holder, at, low - start, high - start)

    def figures(self, holders: int, limit: int) -> QueueFigures:
        """The figures of `assign_requests`, without its shares.

        >>> Queue.of([(2, 6), (5, 6), (7, 6)]).figures(holders=4, limit=5)
        QueueFigures(sends=(1, 2, 2, 1), sent=(5, 5, 5, 3), message=5, extra={2: 1, 5: 1, 7: 1})
        """
        sends, loads = self._loads_of_whole(holders)
        if max(loads) <= limit:
            alike = isinstance(self.ends, range)
            largest = max(self.ends[1:2] if alike and self.requests else self.sizes(), default=0)
            return QueueFigures(tuple(sends), tuple(loads), largest, {})
        queue = self.listed()
        positions, ends = queue.positions, queue.ends
        quota = -(-ends[-1] // holders)
        marks = [min(holder * quota, ends[-1]) for holder in range(holders + 1)]
        # A holder's share meets the requests that end behind its start and begin before its end.
        spans = [*itertools.pairwise(marks)]
        sends = [bisect_left(ends, high) - bisect_right(ends, low) + 1 if low < high else 0 for low, high in spans]
        cuts: dict[int, list[int]] = {}
        for mark in dict.fromkeys(marks):
            at = bisect_right(ends, mark) - 1
            if mark != ends[at]:
                cuts.setdefault(at, [ends[at], ends[at + 1]]).insert(-1, mark)
        sizes = queue.sizes()
        for at, parts in cuts.items():
            sizes[at] = max(high - low for low, high in itertools.pairwise(parts))
        extra = {positions[at]: len(parts) - 2 for at, parts in cuts.items()}
        return QueueFigures(tuple(sends), tuple(high - low for low, high in spans), max(sizes), extra)

    def _find(self, position: int) -> int | None:
        """The number of a position's request among all; None if it makes none."""
        at = bisect_left(self.positions, position)
        return at if at < len(self.positions) and self.positions[at] == position else None

    def _loads_of_whole(self, holders: int) -> tuple[list[int], list[int]]:
        """How many requests, and how many elements, each holder sends where requests stay whole."""
        firsts = [-(-holder * self.requests // holders) for holder in range(holders + 1)]
        sums = [self.first(requests) for requests in firsts]
        return [*map(sub, firsts[1:], firsts)], [*map(sub, sums[1:], sums)]


class QueueFigures(NamedTuple):
    """The messages and the elements that each holder sends, and the largest message, in elements. `extra` are those
    whose requests are cut, with how many more messages than one they receive.
    """

    sends: tuple[int, ...]
    sent: tuple[int, ...]
    message: int
    extra: dict[int, int]


def _leave_out(values: Sequence[int], gone: Sequence[int]) -> list[int]:
    """The values but for those of some numbers, which ascend."""
    parts = (values[low + 1 : high] for low, high in itertools.pairwise([-1, *gone, len(values)]))
    return list(itertools.chain.from_iterable(parts))


# The requests for each tile of a source, from the numerals: tiles that are asked for alike share one queue.
#
# f32[{x}8, 4096] on <x=512, r=8> -> f32[4096, {y}2] on <y=2048>
#
# Every device of the target asks for 8 x 2 elements of every tile: one queue of 2,048 requests for 512 tiles.


Sizes = tuple[tuple[Any, int], ...]
"""What a piece of a source dim shares with pieces of the target: (piece, elements)."""

Kinds = tuple[int, ...]
"""A number for each dim of a tile."""


class TileQueues:
    """The queue of each source tile: the positions of a target that need part of it, whoever holds it.

    `sizes` says what a piece of a dim shares, by the numbers of both. Tiles of equal `kinds` have one queue. Through a
    view, a group of dims is one whose pieces are those of all, and `order` makes a tile of the target's.
    """

    def __init__(
        self,
        target: Layout,
        sizes: Callable[[int, Any], Sizes],
        order: Callable[[Sequence[Any]], Sequence[int]] = tuple,
    ) -> None:
        self._holders, self._sizes, self._order = holders(target), sizes, order
        self._numbers: dict[tuple[int, Sizes], int] = {}
        self._shared: list[Sizes] = []
        self._kind = lru_cache(maxsize=None)(self._number_sizes)
        self.listed = lru_cache(maxsize=64)(self._list)

    def of(self, tile: Sequence[Any]) -> Queue:
        """The queue of a tile."""
        return self.listed(self.kinds(tile))

    def kinds(self, tile: Sequence[Any]) -> Kinds:
        """What the pieces of a tile share, as numbers: equal for pieces that are asked for alike."""
        return tuple([self._kind(dim, piece) for dim, piece in enumerate(tile)])

    def _number_sizes(self, dim: int, piece: Any) -> int:
        sizes = self._sizes(dim, piece)
        number = self._numbers.setdefault((dim, sizes), len(self._shared))
        if number == len(self._shared):
            self._shared.append(sizes)
        return number

    def _list(self, kinds: Kinds) -> Queue:
        requests: list[tuple[int, int]] = []
        for parts in itertools.product(*(self._shared[kind] for kind in kinds)):
            size = math.prod([size for _, size in parts])
            tile = self._order([piece for piece, _ in parts])
            requests += [(at, size) for at in self._holders.of(tile)]
        return Queue.of(requests)


def tile_queues(source: Layout, target: Layout, view: View | None = None) -> TileQueues:
    """The queues of all tiles, from what all pieces share; through a view, of the pieces of each group of dims.

    >>> from reshard.types.mesh import Mesh
    >>> queues = tile_queues(Layout.parse("f32[{x}3/5]", Mesh(x=2)), Layout.parse("f32[{y}2/5]", Mesh(y=3)))
    >>> [(queues.of([piece]).positions, queues.of([piece]).sizes()) for piece in range(2)]
    [([0, 1], [2, 1]), ([1, 2], [1, 1])]
    """
    if view is not None:
        groups = count_shared(source, target, view)
        dims = [at for each in groups for at in each.target]
        places = [dims.index(at) for at in range(len(target.dims))]

        def order(pieces: Sequence[Unit]) -> Sequence[int]:
            numbers = [number for each in pieces for number in each]
            return [numbers[at] for at in places]

        return TileQueues(target, lambda group, pieces: groups[group].sizes(pieces), order)
    shared = [shared_elements(t, s) for s, t in zip(source.dims, target.dims, strict=True)]

    def sizes(dim: int, piece: int) -> Sizes:
        return tuple(shared[dim][piece].items())

    return TileQueues(target, sizes)
