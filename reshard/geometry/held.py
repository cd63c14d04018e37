"""What devices that hold part of their tiles already still need: an exchange without what does not have to move.

    f32[8] on device 0 -> f32[{x}4] on devices 1 and 2, which have f32[8] of the last version; elements 1 and 6 changed

    device 1 wants 0-3, holds 0-7, of these 1 and 6 are stale        it needs 1
    device 2 wants 4-7                                               it needs 6

A device needs what it wants and does not hold, and what it holds that is stale. Dim by dim, these are few products:

    wants a x b, holds c x d        (a without c) x b, and (a and c) x (b without d)
    of what it holds, e x f stale   (a and c and e) x (b and d and f)

What tiles share is a product of factors already (`messages`), so each factor is restricted to local indices of a dim of
the sender's tile (what is stale) or of the receiver's (what is held). Factors are restricted once for all devices that
have the same pieces, and what is restricted are loops: nothing is counted element by element.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from reshard.geometry.blocks import Block, Factor, block_part
from reshard.geometry.holders import Tile, tiles
from reshard.geometry.overlap import SharedDims, piece_runs
from reshard.types.index_set import Holding, Runs, merge_runs
from reshard.types.layout import Layout

Limits = tuple[tuple[int, int, Runs], ...]
"""For some dims of a factor, on one side: its number, and the local indices that are needed."""


class NeededParts:
    """What receivers that hold part of their tiles need of what they want."""

    def __init__(self, operand: Layout, result: Layout, holding: Holding, shared: Sequence[SharedDims]) -> None:
        self._operand, self._result, self._holding, self._shared = operand, result, holding, shared
        self._homes: Mapping[int, Tile] = tiles(holding.layout)
        self._wants = tiles(result)
        self._known: dict[tuple[Tile, Tile, Tile | None], tuple[tuple[Factor, ...], ...]] = {}
        self._restricted: dict[object, Factor] = {}
        # By number of a product of what is stale, dim of the operand and its piece: None for all of the piece.
        self._stale: dict[tuple[int, int, int], Runs | None] = {}
        # By side and dim: how far apart neighbours are in a flat tile, and how many there are.
        tiles_of_sides = operand.tile_shape, result.tile_shape
        self._steps = [[(math.prod(tile[at + 1 :]), n) for at, n in enumerate(tile)] for tile in tiles_of_sides]

    def of(self, receiver: int, source: Tile, product: tuple[Factor, ...]) -> tuple[tuple[Factor, ...], ...]:
        """What a receiver needs of the product that its tile shares with a source's tile, as products."""
        home, wanted = self._homes.get(receiver), self._wants[receiver]
        if home is None:
            return (product,)
        key = source, wanted, home
        if key not in self._known:
            self._known[key] = tuple(self._list_needed(source, wanted, home, product))
        return self._known[key]

    def _list_needed(
        self, source: Tile, wanted: Tile, home: Tile, product: tuple[Factor, ...]
    ) -> Iterator[tuple[Factor, ...]]:
        held: dict[tuple[int, int], Runs] = {}  # By (1, dim of the target): the local indices that are held.
        dims = enumerate(zip(self._result.dims, self._holding.layout.dims, strict=True))
        wants = [(at, piece_runs(dim)[wanted[at]], piece_runs(have)[home[at]]) for at, (dim, have) in dims]
        for at, mine, there in wants:
            both = _common_with_indices(mine, merge_runs((first, first + length) for first, _, length in there))
            if sum(stop - start for start, stop in both) < sum(run[2] for run in mine):
                own = merge_runs((local, local + length) for _, local, length in mine)
                lacking = _without_runs(own, both)
                yield from self._restrict(source, wanted, product, {**held, (1, at): lacking})
                held[1, at] = both
        for number, changed in enumerate(self._holding.stale.products):
            limits = dict(held)
            for at, (dim, runs) in enumerate(zip(self._operand.dims, changed, strict=True)):
                key = number, at, source[at]
                if key not in self._stale:
                    mine = piece_runs(dim)[source[at]]
                    both = _common_with_indices(mine, runs)
                    whole = sum(stop - start for start, stop in both) == sum(run[2] for run in mine)
                    self._stale[key] = None if whole else both
                limit = self._stale[key]
                if limit is not None:
                    limits[0, at] = limit
            yield from self._restrict(source, wanted, product, limits)

    def _restrict(
        self, source: Tile, wanted: Tile, product: tuple[Factor, ...], limits: Mapping[tuple[int, int], Runs]
    ) -> Iterator[tuple[Factor, ...]]:
        """The product without what lies outside of these local indices; nothing if that is all of it."""
        if not all(limits.values()):
            return
        factors: list[Factor] = []
        for number, (each, factor) in enumerate(zip(self._shared, product, strict=True)):
            own = [(0, at) for at in each.source if (0, at) in limits]
            own += [(1, at) for at in each.target if (1, at) in limits]
            ends = tuple(source[at] for at in each.source), tuple(wanted[at] for at in each.target)
            key = number, ends, tuple((side, at, limits[side, at]) for side, at in own)
            if key not in self._restricted:
                blocks: Sequence[Block] = factor
                for side, at in own:
                    dims = (each.source, each.target)[side]
                    steps = [self._steps[side][dim] for dim in dims]
                    blocks = [
                        part
                        for block in blocks
                        for part in restrict_block(block, side, steps, dims.index(at), limits[side, at])
                    ]
                self._restricted[key] = tuple(blocks)
            if not self._restricted[key]:
                return
            factors.append(self._restricted[key])
        yield tuple(factors)


def _common_with_indices(piece: Sequence[tuple[int, int, int]], runs: Runs) -> Runs:
    """The local indices of a piece whose indices in the array are in some runs.

    >>> _common_with_indices(((0, 0, 3), (6, 3, 3)), ((2, 7), (8, 9)))
    ((2, 4), (5, 6))
    """

    def common() -> Iterator[tuple[int, int]]:
        for first, local, length in piece:
            at = max(0, bisect_right(runs, (first, first)) - 1)
            while at < len(runs) and runs[at][0] < first + length:
                low, high = max(runs[at][0], first), min(runs[at][1], first + length)
                if low < high:
                    yield low - first + local, high - first + local
                at += 1

    return merge_runs(common())


def _without_runs(runs: Runs, others: Runs) -> Runs:
    """What is in some runs and not in others, all of which lie within them."""
    left: list[tuple[int, int]] = []
    at = 0
    for start, stop in runs:
        while at < len(others) and others[at][0] < stop:
            low, high = others[at]
            if start < low:
                left.append((start, low))
            start, at = high, at + 1
        if start < stop:
            left.append((start, stop))
    return tuple(left)


def restrict_block(block: Block, side: int, steps: Sequence[tuple[int, int]], dim: int, runs: Runs) -> Iterator[Block]:
    """The part of a block whose local indices in a dim of one side's tile (0: the sender's) are in some runs.

    `steps` are, for each dim that the block has on that side, the distance of neighbours in the tile, and the extent.

    >>> from reshard.geometry.blocks import Axis
    >>> rows = Block(0, 0, (Axis(4, 10, 10), Axis(10, 1, 1)))
    >>> [(part.src, part.extents) for part in restrict_block(rows, 0, [(10, 4), (1, 10)], 0, ((1, 3),))]
    [(10, (2, 10))]
    """
    step, extent = steps[dim]
    first = (block.dst if side else block.src) // step % extent
    own = [
        (number, axis[0], axis[1 + side] // step)
        for number, axis in enumerate(block.axes)
        if axis[0] > 1 and step <= axis[1 + side] < step * extent
    ]
    yield from _restrict_axes(block, own, first, runs)


def _restrict_axes(block: Block, own: Sequence[tuple[int, int, int]], first: int, runs: Runs) -> Iterator[Block]:
    """The parts of a block whose axes `own`, as (number, extent, step), lead from a local index to those in runs."""
    last = first + sum((extent - 1) * step for _, extent, step in own)
    at = bisect_right(runs, (first, runs[-1][1])) - 1
    if at >= 0 and runs[at][1] > last:
        yield block
        return
    # The runs that have some index between the first and the last one.
    low = at if at >= 0 and runs[at][1] > first else at + 1
    if low == len(runs) or runs[low][0] > last:
        return
    number, extent, step = own[0]
    if len(own) > 1:
        for value in range(extent):
            part = block_part(
                block, [(value, 1) if n == number else (0, axis.extent) for n, axis in enumerate(block.axes)]
            )
            yield from _restrict_axes(part, own[1:], first + value * step, runs)
        return
    spans: list[tuple[int, int]] = []
    while low < len(runs) and runs[low][0] <= last:
        start, stop = max(0, -(-(runs[low][0] - first) // step)), min(extent, -(-(runs[low][1] - first) // step))
        if start < stop:
            spans.append((start, stop))
        low += 1
    for start, stop in merge_runs(spans):
        whole = [(0, axis.extent) for axis in block.axes]
        whole[number] = start, stop - start
        yield block_part(block, whole)
