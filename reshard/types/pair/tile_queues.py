"""The requests for each tile of a source, from the numerals: tiles that are asked for alike share one queue.

f32[{x}8, 4096] on <x=512, r=8> -> f32[4096, {y}2] on <y=2048>

Every device of the target asks for 8 x 2 elements of every tile: one queue of 2,048 requests for 512 tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from reshard.types.layout import Layout
from reshard.types.pair.dealing import Queue
from reshard.types.pair.holders import holders
from reshard.types.pair.shared import shared_elements

Sizes = tuple[tuple[int, int], ...]
"""What a piece of a source dim shares with pieces of the target: (piece, elements)."""

Kinds = tuple[int, ...]
"""A number for each dim of a tile."""


class TileQueues:
    """The queue of each source tile: the positions of a target that need part of it, whoever holds it.

    `sizes` says what a piece of a dim shares, by the numbers of both. Tiles of equal `kinds` have one queue.
    """

    def __init__(self, target: Layout, sizes: Callable[[int, int], Sizes]) -> None:
        self._holders, self._sizes = holders(target), sizes
        self._numbers: dict[tuple[int, Sizes], int] = {}
        self._shared: list[Sizes] = []
        self._kind = lru_cache(maxsize=None)(self._kind_of)
        self.listed = lru_cache(maxsize=64)(self._list)

    def of(self, tile: Sequence[int]) -> Queue:
        """The queue of a tile."""
        return self.listed(self.kinds(tile))

    def kinds(self, tile: Sequence[int]) -> Kinds:
        """What the pieces of a tile share, as numbers: equal for pieces that are asked for alike."""
        return tuple([self._kind(dim, piece) for dim, piece in enumerate(tile)])

    def _kind_of(self, dim: int, piece: int) -> int:
        sizes = self._sizes(dim, piece)
        number = self._numbers.setdefault((dim, sizes), len(self._shared))
        if number == len(self._shared):
            self._shared.append(sizes)
        return number

    def _list(self, kinds: Kinds) -> Queue:
        requests: list[tuple[int, int]] = []
        for parts in itertools.product(*(self._shared[kind] for kind in kinds)):
            size = math.prod([size for _, size in parts])
            requests += [(at, size) for at in self._holders.of([piece for piece, _ in parts])]
        return Queue.of(requests)


def tile_queues(source: Layout, target: Layout) -> TileQueues:
    """The queues of all tiles, from what all pieces share.

    >>> from reshard.types.mesh import Mesh
    >>> queues = tile_queues(Layout.parse("f32[{x}3/5]", Mesh(x=2)), Layout.parse("f32[{y}2/5]", Mesh(y=3)))
    >>> [(queues.of([piece]).positions, queues.of([piece]).sizes()) for piece in range(2)]
    [([0, 1], [2, 1]), ([1, 2], [1, 1])]
    """
    shared = [shared_elements(t, s) for s, t in zip(source.dims, target.dims, strict=True)]
    return TileQueues(target, lambda dim, piece: tuple(shared[dim][piece].items()))
