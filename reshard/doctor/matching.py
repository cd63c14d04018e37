"""Which of the moves that a program is known to need a traced one is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.doctor.report.model import Known
from reshard.errors import ReshardError
from reshard.hlo import Source
from reshard.types.layout import Layout
from reshard.types.pair.refine import prime_digits, refine
from reshard.types.rules.bounds import lower_bound

Dims = tuple[int, ...]
Pair = tuple[Layout, Layout]


class Traced(NamedTuple):
    """A move as the HLO has it: where from, what it sends, the dims of its tiles, and its layouts if it has any.

    The tiles have several forms: padded, reshaped, and not. `needed_bytes` is None where the move could not be
    followed.
    """

    where: Source
    dtype: str
    before: Collection[Dims]
    after: Collection[Dims]
    received_bytes: int
    needed_bytes: int | None
    layouts: Pair | None


class Matcher:
    """The known moves, and how often each has been met."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known = [move for move in known if move.source != move.target]
        self.met: Counter[int] = Counter()

    def match(self, traced: Traced) -> Known | None:
        """The known move with the tiles, the bound and the digits of a traced one, its layouts in what is sent.

        One of the same line, or else next to it, if there is any; else one of the only line that has such a move.
        None if there is none.
        """
        fits = [at for at, move in enumerate(self.known) if _fits(move, traced)]
        here = f"{traced.where.file}:{traced.where.line}"
        same = [at for at in fits if self.known[at].where == here]
        near = [at for at in fits if here in self.known[at].near]
        alone = fits if len({self.known[at].where for at in fits}) == 1 else []
        found = same or near or alone
        if not found:
            return None
        at = min(found, key=lambda at: (-_likeness(self.known[at], traced), self.met[at], at))
        self.met[at] += 1
        return _sent(self.known[at], traced.dtype)


def _fits(move: Known, traced: Traced) -> bool:
    before, after = (math.prod(layout.tile_shape) for layout in (move.source, move.target))
    if before not in map(math.prod, traced.before) or after not in map(math.prod, traced.after):
        return False
    try:
        sent = _sent(move, traced.dtype)
        bound = lower_bound(sent.source, sent.target)
    except ReshardError:
        return False
    if bound > traced.received_bytes or traced.needed_bytes not in (None, bound):
        return False
    return _likeness(move, traced) > 0 and _same_digits(move, traced)


def _same_digits(move: Known, traced: Traced) -> bool:
    """Whether the same digits change holders, in any order: arrays are turned on the way."""
    found, wanted = _changing(traced.layouts), _changing((move.source, move.target))
    return found is None or wanted is None or sorted(found) == sorted(wanted)


def _likeness(move: Known, traced: Traced) -> int:
    """How much speaks for a move and not for its reverse: the dims of the tiles, and the order of the digits."""
    before, after = (_plain(layout.tile_shape) for layout in (move.source, move.target))
    tiles = (before in map(_plain, traced.before)) + (after in map(_plain, traced.after))
    found = _changing(traced.layouts)
    return 2 * tiles + (found is not None and found == _changing((move.source, move.target)))


def _changing(pair: Pair | None) -> list[tuple[int, int, int]] | None:
    """The digits that change holders, major to minor: radix and strides of the holders, 0 for none."""
    refinement = None if pair is None else refine(*pair)
    if refinement is None:
        return None
    return [(atom.radix, atom.src or 0, atom.dst or 0) for atom in prime_digits(refinement) if atom.src != atom.dst]


def _plain(dims: Dims) -> Dims:
    return tuple(size for size in dims if size != 1)


def _sent(move: Known, dtype: str) -> Known:
    """The move in another element type: XLA may convert before it sends."""
    return move._replace(source=replace(move.source, dtype=dtype), target=replace(move.target, dtype=dtype))
