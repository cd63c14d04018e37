"""Which of the moves that a program is known to need a traced one is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from reshard.doctor.model import Known
from reshard.errors import ReshardError
from reshard.hlo import Source
from reshard.types.bounds import lower_bound

Dims = tuple[int, ...]


class Traced(NamedTuple):
    """A move as the HLO has it: where from, what it sends, and the dims of its tiles.

    The tiles have several forms: padded, reshaped, and not. `needed_bytes` is None where the move could not be
    followed.
    """

    where: Source
    dtype: str
    before: Collection[Dims]
    after: Collection[Dims]
    received_bytes: int
    needed_bytes: int | None


class Matcher:
    """The known moves, and how often each has been met."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known = [move for move in known if move.source != move.target]
        self.met: Counter[int] = Counter()

    def match(self, traced: Traced) -> Known | None:
        """The known move with the tiles and the bound of a traced one, its layouts in what is sent.

        One of the same line, or else next to it, if there is any; else one of the only line that has such a move. None
        if there is none.
        """
        fits = [at for at, move in enumerate(self.known) if _fits(move, traced)]
        here = f"{traced.where.file}:{traced.where.line}"
        same = [at for at in fits if self.known[at].where == here]
        near = [at for at in fits if here in self.known[at].near]
        alone = fits if len({self.known[at].where for at in fits}) == 1 else []
        found = same or near or alone
        if not found:
            return None
        at = min(found, key=lambda at: (self.met[at], at))
        self.met[at] += 1
        return _sent(self.known[at], traced.dtype)


def _fits(move: Known, traced: Traced) -> bool:
    if not (_has(traced.before, move.source.tile_shape) and _has(traced.after, move.target.tile_shape)):
        return False
    try:
        sent = _sent(move, traced.dtype)
        bound = lower_bound(sent.source, sent.target)
    except ReshardError:
        return False
    return bound <= traced.received_bytes and traced.needed_bytes in (None, bound)


def _has(forms: Collection[Dims], tile: Dims) -> bool:
    """Whether a tile has one of the forms, dims of size 1 aside."""
    return _plain(tile) in map(_plain, forms)


def _plain(dims: Dims) -> Dims:
    return tuple(size for size in dims if size != 1)


def _sent(move: Known, dtype: str) -> Known:
    """The move in another element type: XLA may convert before it sends."""
    return move._replace(source=replace(move.source, dtype=dtype), target=replace(move.target, dtype=dtype))
