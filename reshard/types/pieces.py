"""Pieces of any size: which piece of a dim has each of its indices, as runs in the order of the indices.

    {x}(3,5,0,2)            a piece for each coordinate along x      indices 0-2, 3-7, none, 8-9
    {x}~10                  10 as evenly as can be                   3, 3, 2 and 2 indices
    {x}(3@0,2@2,5@0)        runs of length@piece                     piece 0 has 0-2 and 5-9, piece 2 has 3-4

Inside a tile, the indices of a piece are in ascending order. A table by owner may have millions of runs, so they are
kept as arrays of 64 bits, and are compared and hashed as such. The standard library is enough for all of it; numpy,
where the process has loaded it, goes through long tables ten times as fast (`loaded_numpy`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from reshard.errors import LayoutError, quoted
from reshard.types.whole import MOST, MOST_DEVICES, whole

_SHOWN = 8
"""The runs that an error or a picture shows of a long list."""


class Run(NamedTuple):
    """Neighbouring indices of a dim that one piece has: from `start` on, in its tile from `local` on."""

    start: int
    local: int
    length: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """The runs of a dim in the order of its indices: how long each is, and the number of its piece, below `count`.

    They may be given in any form, as lists or buffers of ints: empty runs are left out, and neighbours of one piece
    are merged. Raises `LayoutError` for lengths or numbers that are not a list of runs (*whole sizes*, *exact cover*).

    >>> pieces = Pieces([3, 2, 0, 5], [0, 2, 1, 0], 3)
    >>> str(pieces), pieces.size, pieces.sizes, pieces.largest, pieces.is_intervals
    ('(3@0,2@2,5@0)', 10, (8, 0, 2), 8, False)
    >>> [*pieces.runs_of(0)]
    [Run(start=0, local=0, length=3), Run(start=5, local=3, length=5)]
    """

    lengths: Sequence[int]
    numbers: Sequence[int]
    count: int

    def __post_init__(self) -> None:
        lengths, numbers = read_table(self.lengths, "the lengths of runs"), read_table(self.numbers, "piece numbers")
        if whole(self.count, 1) is None or len(lengths) != len(numbers):
            raise LayoutError(
                f"{len(lengths)} lengths and {len(numbers)} piece numbers for {quoted(self.count)} pieces: give the "
                f"length and the piece of each run (exact cover)"
            )
        np = loaded_numpy(len(numbers))
        least, most = (min, max) if np is None else (np.min, np.max)
        if numbers and not 0 <= least(numbers) <= most(numbers) < self.count:
            wrong = least(numbers) if least(numbers) < 0 else most(numbers)
            raise LayoutError(
                f"piece {wrong} of {self.count}: pieces are numbered from 0 to {self.count - 1} (exact cover)"
            )
        shortest = least(lengths) if lengths else 1
        if shortest < 0:
            raise LayoutError(f"a piece has {shortest} elements; sizes are at least 0 and at most {MOST} (whole sizes)")
        if not shortest:
            numbers, lengths = array("q", itertools.compress(numbers, lengths)), array("q", filter(None, lengths))
        alike = map(operator.eq, numbers, itertools.islice(numbers, 1, None))
        if np is not None:
            alike = [bool((np.asarray(numbers)[1:] == np.asarray(numbers)[:-1]).any())]
        if any(alike):
            starts = list_changes(numbers)
            parts = itertools.pairwise((*starts, len(numbers)))
            lengths = array("q", [min(sum(lengths[low:high]), MOST + 1) for low, high in parts])
            numbers = array("q", map(numbers.__getitem__, starts))
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "numbers", numbers)
        if self.size > MOST:
            raise LayoutError(f"pieces of {self.size} elements in all; at most {MOST} are (whole sizes)")

    @classmethod
    def from_sizes(cls, sizes: object) -> Pieces:
        """Each piece one run, in order.

        >>> str(Pieces.from_sizes([3, 5, 0, 2]))
        '(3,5,0,2)'
        """
        lengths = read_table(sizes, "sizes of pieces")
        return cls(lengths, range(len(lengths)), max(1, len(lengths)))

    @classmethod
    def even(cls, size: int, count: int) -> Pieces:
        """As evenly as can be, larger pieces first.

        >>> str(Pieces.even(10, 4)), Pieces.even(10, 4).sizes
        ('~10', (3, 3, 2, 2))
        """
        each, larger = divmod(size, count)
        return cls([each + 1] * larger + [each] * (count - larger), range(count), count)

    @classmethod
    def from_owners(cls, owners: object, count: int) -> Pieces:
        """Each index in the piece that `owners` has for it: a list, or anything with the buffer protocol.

        >>> str(Pieces.from_owners([0, 0, 2, 2, 0], 3))
        '(2@0,2@2,1@0)'
        """
        table = read_table(owners, "owners")
        starts = list_changes(table)
        if (np := loaded_numpy(len(starts))) is not None:
            lengths, numbers = np.diff(starts, append=len(table)), np.asarray(table)[starts]
            del table, starts  # Tables of ten millions take 80 MB each.
            return cls(lengths, numbers, count)
        ends = itertools.chain(itertools.islice(starts, 1, None), [len(table)])
        return cls(array("q", map(operator.sub, ends, starts)), array("q", map(table.__getitem__, starts)), count)

    @cached_property
    def size(self) -> int:
        """The size of the dim."""
        return sum(self.lengths)

    @cached_property
    def _order(self) -> Sequence[int]:
        """The runs, as indices of the lists, piece by piece and in order."""
        if (np := loaded_numpy(len(self.numbers))) is None:
            return sorted(range(len(self.numbers)), key=self.numbers.__getitem__)
        return np.argsort(np.asarray(self.numbers).astype(np.min_scalar_type(self.count)), kind="stable")

    @cached_property
    def locals(self) -> Sequence[int]:
        """Where each run starts in its tile."""
        places = array("q", bytes(8 * len(self.lengths)))
        if (np := loaded_numpy(len(places))) is not None:
            order, lengths = self._order, np.asarray(self.lengths)
            sizes, of = np.array(self.sizes), np.asarray(self.numbers)[order]
            np.asarray(places)[order] = np.cumsum(lengths[order]) - lengths[order] - (np.cumsum(sizes) - sizes)[of]
            return places
        filled = [0] * self.count
        for at, (number, length) in enumerate(zip(self.numbers, self.lengths, strict=True)):
            places[at] = filled[number]
            filled[number] += length
        return places

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each piece."""
        np = loaded_numpy(len(self.numbers))
        if np is not None and self.size < 1 << 53:  # It adds up doubles.
            return tuple(np.bincount(self.numbers, self.lengths, self.count).astype("q").tolist())
        sizes = [0] * self.count
        for number, length in zip(self.numbers, self.lengths, strict=True):
            sizes[number] += length
        return tuple(sizes)

    @cached_property
    def starts(self) -> Sequence[int]:
        """The first index of each run."""
        starts = array("q", [0])
        if (np := loaded_numpy(len(self.lengths))) is not None:
            starts.frombytes(np.cumsum(self.lengths)[:-1].view("u1"))
            return starts
        return array("q", itertools.islice(itertools.accumulate(self.lengths, initial=0), len(self.lengths)))

    @cached_property
    def largest(self) -> int:
        """The elements of the largest piece, which is what tiles have memory for."""
        return max(self.sizes)

    @cached_property
    def is_intervals(self) -> bool:
        """Whether each piece is one run, in order."""
        return len(self.numbers) <= self.count and all(
            map(operator.lt, self.numbers, itertools.islice(self.numbers, 1, None))
        )

    def runs_of(self, piece: int) -> Iterator[Run]:
        """The runs of a piece, in order."""
        local = 0
        for at in self.list_runs(piece):
            yield Run(self.starts[at], local, self.lengths[at])
            local += self.lengths[at]

    def list_runs(self, piece: int) -> Sequence[int]:
        """Which of all runs are those of a piece, in order."""
        order, number = self._order, self.numbers.__getitem__
        return order[bisect_left(order, piece, key=number) : bisect_right(order, piece, key=number)]

    def renumbered(self, numbers: Sequence[int], count: int) -> Pieces:
        """The same runs, each in the one of `count` pieces that `numbers` has for its own."""
        return Pieces(self.lengths, array("q", map(numbers.__getitem__, self.numbers)), count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pieces):
            return NotImplemented
        return (self.count, self.numbers, self.lengths) == (other.count, other.numbers, other.lengths)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        digest = hashlib.blake2b(memoryview(cast("array[int]", self.lengths)), digest_size=7)
        digest.update(memoryview(cast("array[int]", self.numbers)))
        return int.from_bytes(digest.digest()) + self.count

    def __reduce__(self) -> tuple[type[Pieces], tuple[object, ...]]:
        return Pieces, (self.lengths, self.numbers, self.count)  # Not what is derived from them.

    def _write(self, shown: int | None) -> str:
        """The text, of at most so many runs."""
        each, larger = divmod(self.size, self.count)
        if not self.is_intervals:
            words = (f"{length}@{number}" for length, number in zip(self.lengths, self.numbers, strict=True))
        elif all(size == each + (number < larger) for number, size in enumerate(self.sizes)):
            return f"~{self.size}"
        else:
            words = map(str, self.sizes)
        return f"({','.join(itertools.islice(words, shown))})"

    def __str__(self) -> str:
        return self._write(None)

    def __format__(self, _: str) -> str:
        """The text for people: long lists are shortened, with a digest by which unlike ones still differ."""
        runs = self.count if self.is_intervals else len(self.numbers)
        first = self._write(None if runs <= 2 * _SHOWN else _SHOWN)
        if runs <= 2 * _SHOWN or first.startswith("~"):
            return first
        return f"{first[:-1]}, and {runs - _SHOWN} more, #{self._hash:x})"

    def __repr__(self) -> str:
        return f"<Pieces {self:} of {self.count}>"

    def read_numeral(self, radices: Sequence[int]) -> list[tuple[int, int | None]] | None:
        """The digits, major first, of the numeral that says these pieces, each with its held factor if it has one.

        `radices` are the factors of the numbers of pieces, major first. Returns None if no numeral says them. For
        example {x:(1)2}{x:(2)2}{y}:

        >>> Pieces.from_owners([0, 0, 2, 2, 4, 4, 6, 6] * 3, 8).read_numeral([2, 2, 2])
        [(2, 2), (3, None), (2, 0), (2, 1), (2, None)]
        """
        # All runs are blocks of the last digit, which only the end of the dim cuts short, and the first index is in
        # piece 0. Then each digit shows at the block with the number that its value 1 is worth: a held one moves on to
        # another piece, a local one starts again with piece 0.
        lengths, numbers = cast("array[int]", self.lengths), cast("array[int]", self.numbers)
        blocks = len(lengths)
        if not blocks or numbers[0] or lengths[-1] > lengths[0] or lengths[:-1].count(lengths[0]) < blocks - 1:
            return None
        digits: list[tuple[int, int | None]] = [(lengths[0], None)]
        left = {math.prod(radices[at + 1 :]): at for at in range(len(radices))}
        owners, place = [0], 1
        while place < blocks:
            at = left.pop(numbers[place], None)
            if at is not None:
                weight, radix = numbers[place], radices[at]
                owners = [number + value * weight for value in range(radix) for number in owners][:blocks]
            elif not numbers[place]:
                rounds = range(place, blocks, place)
                radix = 1 + sum(1 for _ in itertools.takewhile(lambda block: not numbers[block], rounds))
                owners = (owners * radix)[:blocks]
            else:
                return None
            if numbers[: len(owners)] != array("q", owners):
                return None
            digits.append((radix, at))
            place *= radix
        # What no index reaches are values of the most significant digits, of which one round has them all.
        unreached = [(radices[at], at) for at in left.values()]
        return [*unreached, *reversed(digits)]

    def find_order(self, radices: Sequence[int]) -> list[int] | None:
        """The order of held factors, as indices of `radices`, in which these pieces are intervals; None if none is.

        The factors that come first in `radices` are taken first, so that equal pieces get equal orders.

        >>> Pieces([3, 2, 2, 3], [0, 2, 1, 3], 4).find_order([2, 2])
        [1, 0]
        """
        numbers = self.numbers
        if self.is_intervals:
            return [*range(len(radices))]
        if len(numbers) > self.count or len(set(numbers)) < len(numbers):
            return None
        # An order is right if each run has a larger number than the last: their first factors that differ must grow.
        order: list[int] = []
        left = list(range(len(radices)))
        pairs: list[tuple[int, int]] = [*itertools.pairwise(numbers)]
        while left:
            for at in left:
                weight, prime = math.prod(radices[at + 1 :]), radices[at]
                steps: list[int] = [other // weight % prime - one // weight % prime for one, other in pairs]
                if not pairs or min(steps) >= 0:
                    pairs = [pair for pair, step in zip(pairs, steps, strict=True) if not step]
                    left.remove(at)
                    order.append(at)
                    break
            else:
                return None
        return order


_LONG = 256
"""Tables of at least this many items go through numpy, if it is there."""


def loaded_numpy(items: int = _LONG) -> Any:
    """numpy, for a table of so many items, if the process has loaded it: whoever has an array has."""
    return sys.modules.get("numpy") if items >= _LONG else None


def list_changes(table: array[int]) -> array[int]:
    """The places of a table with another number than the place before, the first one included.

    >>> list_changes(array("q", [5, 5, 7]))
    array('q', [0, 2])
    """
    starts = array("q", [0] * bool(table))
    if (np := loaded_numpy(len(table))) is not None:
        numbers = np.asarray(table)
        starts.frombytes((np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).astype("q", copy=False).view("u1"))
    else:
        changes = map(operator.ne, table, itertools.islice(table, 1, None))
        starts.extend(itertools.compress(range(1, len(table)), changes))
    return starts


def read_table(given: Any, what: str) -> array[int]:
    """Ints of 64 bits from a list, or from anything with the buffer protocol, such as a numpy array.

    >>> read_table(range(3), "sizes"), read_table(bytes([1, 2]), "sizes")
    (array('q', [0, 1, 2]), array('q', [1, 2]))
    """
    table = array("q")
    try:
        if isinstance(given, array) and given.typecode == "q":
            return cast("array[int]", given)[:]  # Whoever gave it may write to it later.
        if isinstance(given, range) and len(given) > MOST_DEVICES:
            raise OverflowError  # A range takes no memory until it is listed.
        if not isinstance(given, range | list | tuple | array):
            view: Any = memoryview(given)
            if view.ndim != 1 or view.format.lstrip("@=<") not in tuple("bBhHiIlLqQ"):
                raise LayoutError(f"{what}: {view.ndim} dims of format {view.format!r}; give one dim of ints")
            if view.contiguous and view.format in ("q", "l") and view.itemsize == 8:
                table.frombytes(view.cast("B"))
                return table
            np = loaded_numpy(len(view))
            if np is None or view.format[-1] in "LQ":
                return array("q", view.tolist())
            table.frombytes(np.asarray(view).astype("q", copy=False).view("u1"))
            return table
        listed = cast("Sequence[Any]", given)
        if not set(map(type, listed)) <= {int}:
            listed = [whole(each, -MOST) for each in listed]
        return array("q", listed)
    except (TypeError, ValueError, OverflowError):
        raise LayoutError(
            f"{what} {quoted(cast('object', given))}: give ints of at most {MOST}, as a list or an array of one dim "
            f"(whole sizes)"
        ) from None


def read_offsets(given: object, what: str) -> array[int]:
    """Where each piece or row starts, and the last one ends: ints that ascend from 0 on."""
    offsets = read_table(given, what)
    if not offsets or offsets[0] or any(map(operator.gt, offsets, itertools.islice(offsets, 1, None))):
        raise LayoutError(
            f"{what} {quoted(offsets[:_SHOWN].tolist())}: give where each starts and the last one ends, ascending from "
            f"0 on (exact cover)"
        )
    return offsets
