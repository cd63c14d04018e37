"""Claims about digits, as data; `solver` hands them to z3.

A claim is a statement about integers: device coordinates below their radices, and local digits below theirs, which may
be names of sizes that are at least 1. Digits are compared one by one, so no product of unknowns occurs. Padding
compares indices of dims whose sizes are numbers, which is linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from reshard.proofs.symbolic.laws import Law

Sum = tuple[tuple[int, str], ...]
"""A sum of variables times integers."""


@dataclass(frozen=True)
class Claim:
    """For all variables below their bounds: if each `given` sum is below its limit, the claimed relations hold.

    A bound is a number or the name of a size. Claimed are the `equal` pairs of variables, and that each sum in `below`
    is below its limit.

    >>> print(Claim("step 1", (("a", 4), ("b", "n0")), (("a", "a"), ("b", "b")), below=((((4, "a"), (1, "b")), 16),)))
    step 1: 2 digits keep their value, 4 a + b < 16
    """

    about: str
    bounds: tuple[tuple[str, int | str], ...]
    equal: tuple[tuple[str, str], ...]
    given: tuple[tuple[Sum, int], ...] = ()
    below: tuple[tuple[Sum, int], ...] = ()

    def __str__(self) -> str:
        goals = [f"{a} = {b}" for a, b in self.equal if a != b]
        goals += [f"{_spell(s)} < {limit}" for s, limit in self.below]
        unchanged = sum(a == b for a, b in self.equal)
        same = [f"{unchanged} digits keep their value"] if unchanged else []
        given = "".join(f" if {_spell(s)} < {limit}" for s, limit in self.given)
        return f"{self.about}: {', '.join([*same, *goals]) or 'nothing to show'}{given}"


@dataclass(frozen=True)
class Fewer:
    """For all sizes that vary, whose product is N: `least` N bytes are at most `most` N bytes."""

    about: str
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.about}: {self.least} N <= {self.most} N for all N >= 1"


class ShiftAlong(NamedTuple):
    """A multiple of `coordinate // place % size`, of the coordinate along a stride."""

    times: int
    stride: int
    place: int
    size: int


class ShareTurn(NamedTuple):
    """A digit j of a round's number, which brings share (c + j + shifts) mod radix to coordinate c along a stride."""

    name: str
    stride: int
    radix: int
    shifts: tuple[ShiftAlong, ...] = ()


@dataclass(frozen=True)
class Rounds:
    """The rounds of an even exchange: in each, no device sends twice, and over all of them every share arrives.

    In round j, the receiver c hears from the device whose coordinate along each stride of `coordinates` is given by
    `senders`: the receiver's coordinate along some stride, or the share that it gets there by the digit of j that is
    named.
    """

    about: str
    coordinates: tuple[tuple[int, int], ...]
    senders: tuple[tuple[int, str | None], ...]
    turns: tuple[ShareTurn, ...]

    def __str__(self) -> str:
        return f"{self.about}: in each round no device sends twice, and over all rounds every share arrives"


@dataclass(frozen=True)
class Absent:
    """A search without a result: its conditions, in SMT-LIB 2, have no solution."""

    about: str
    conditions: str

    def __str__(self) -> str:
        return f"{self.about}: no choice meets all conditions"


Query = Claim | Fewer | Rounds | Law | Absent
"""Whatever z3 decides."""


def _spell(terms: Sum) -> str:
    return " + ".join(f"{k} {name}" if k != 1 else name for k, name in terms) or "0"
