"""Matches a traced move with one of the moves that the program is known to need.

XLA may reshape, convert or transpose the data, and gives it the line of a neighbouring instruction. So a known move
fits if its tiles, its lower bound and the digits that change holders agree; lines and shapes decide between several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.doctor.places import Known
from reshard.errors import ReshardError
from reshard.hlo import Source
from reshard.types.layout import Layout
from reshard.types.pair.refine import prime_digits, refine
from reshard.types.rules.bounds import lower_bound

Dims = tuple[int, ...]
Pair = tuple[Layout, Layout]


class TracedMove(NamedTuple):
    """A move as the HLO has it: its origin, the dtype it sends, the dims of its tiles, and its layouts if known.

    The tiles have several forms each: padded, reshaped, and as used. `needed_bytes` is None if the move could not be
    traced.
    """

    where: Source
    dtype: str
    before: Collection[Dims]
    after: Collection[Dims]
    received_bytes: int
    needed_bytes: int | None
    layouts: Pair | None


class Matcher:
    """The known moves, and how often each has been matched."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known = [move for move in known if move.source != move.target]
        self.matched: Counter[int] = Counter()

    def match(self, traced: TracedMove) -> Known | None:
        """The known move that fits a traced one, with its layouts in the dtype that is sent; None if there is none.

        Moves of the same line come first, then those next to it. Otherwise the match must be unambiguous: every move
        that fits is of one line.
        """
        fits = [at for at, move in enumerate(self.known) if _fits(move, traced)]
        candidates = self._nearest(fits, f"{traced.where.file}:{traced.where.line}")
        if not candidates:
            return None
        at = min(candidates, key=lambda at: (-_likeness(self.known[at], traced), self.matched[at], at))
        self.matched[at] += 1
        return _as_sent(self.known[at], traced.dtype)

    def _nearest(self, fits: Sequence[int], line: str) -> Sequence[int]:
        same = [at for at in fits if self.known[at].where == line]
        near = [at for at in fits if line in self.known[at].near]
        if same or near:
            return same or near
        return fits if len({self.known[at].where for at in fits}) == 1 else []


def _fits(move: Known, traced: TracedMove) -> bool:
    before, after = (math.prod(layout.tile_shape) for layout in (move.source, move.target))
    if before not in map(math.prod, traced.before) or after not in map(math.prod, traced.after):
        return False
    try:
        sent = _as_sent(move, traced.dtype)
        bound = lower_bound(sent.source, sent.target)
    except ReshardError:
        return False
    if bound > traced.received_bytes or traced.needed_bytes not in (None, bound):
        return False
    return _likeness(move, traced) > 0 and _same_digits(move, traced)


def _same_digits(move: Known, traced: TracedMove) -> bool:
    """Whether the same digits change holders, in any order: XLA may transpose arrays on the way."""
    moved, expected = _moved_digits(traced.layouts), _moved_digits((move.source, move.target))
    return moved is None or expected is None or sorted(moved) == sorted(expected)


def _likeness(move: Known, traced: TracedMove) -> int:
    """How well the tiles' dims and the order of the digits fit a move, rather than its reverse."""
    before, after = (_without_ones(layout.tile_shape) for layout in (move.source, move.target))
    tiles = (before in map(_without_ones, traced.before)) + (after in map(_without_ones, traced.after))
    moved = _moved_digits(traced.layouts)
    return 2 * tiles + (moved is not None and moved == _moved_digits((move.source, move.target)))


def _moved_digits(pair: Pair | None) -> list[tuple[int, int, int]] | None:
    """The digits that change holders, major to minor: radix, and strides of the holders (0 for none)."""
    refinement = None if pair is None else refine(*pair)
    if refinement is None:
        return None
    return [
        (digit.radix, digit.src or 0, digit.dst or 0) for digit in prime_digits(refinement) if digit.src != digit.dst
    ]


def _without_ones(dims: Dims) -> Dims:
    return tuple(size for size in dims if size != 1)


def _as_sent(move: Known, dtype: str) -> Known:
    """The move in another dtype: XLA may convert before it sends."""
    return move._replace(source=replace(move.source, dtype=dtype), target=replace(move.target, dtype=dtype))
