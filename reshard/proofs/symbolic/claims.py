"""Claims about digits, as data; `solver` hands them to z3.

A claim is a statement about integers: device coordinates below their radices, and local digits below theirs, which may
be names of sizes that are at least 1. Digits are compared one by one, so no product of unknowns occurs. Padding
compares indices of dims whose sizes are numbers, which is linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Laws: equations between numerals of unknown sizes. A law holds for every mesh and every size, or it is false.
#
#     (pre(a) r + p) s + post(b)        the numeral of three digits: unknown ones, one of radix r, and unknown ones
#
# A size is a name for any integer from 1 on, a digit is a name for an integer below a size. Division and remainder do
# not occur: an index *is* the numeral of its digits, and two numerals that must be equal are given as equal. The parts
# of a numeral that a law does not describe are unknown functions of their digits.


@dataclass(frozen=True)
class Term:
    """An integer: a name, a literal, a sum, a product, or an unknown function of other terms.

    >>> a, r = Term("a"), Term("r")
    >>> str((a * r + 1) * r), str(Term("pre")(a))
    ('(a r + 1) r', 'pre(a)')
    """

    head: str
    args: tuple[Term, ...] = ()

    def __add__(self, other: Term | int) -> Term:
        return Term("+", (self, _term(other)))

    def __mul__(self, other: Term | int) -> Term:
        return Term("*", (self, _term(other)))

    def __call__(self, *args: Term) -> Term:
        return Term(self.head, args)

    def __str__(self) -> str:
        args = [str(a) for a in self.args]
        if self.head == "+":
            return " + ".join(args)
        if self.head == "*":
            return " ".join(f"({s})" if a.head == "+" else s for a, s in zip(self.args, args, strict=True))
        return f"{self.head}({', '.join(args)})" if args else self.head


Pair = tuple[Term, Term]


class Lemma(NamedTuple):
    """If high radix + last = above radix + end, and last and end are below the radix, then high = above, last = end."""

    high: Term
    above: Term
    last: Term
    end: Term
    radix: Term


@dataclass(frozen=True)
class Law:
    """For all `sizes` from 1 on and all `digits` from 0 to below their bounds, what is given implies what is claimed.

    A bound of None means any integer. Given are equal pairs; claimed are the `equal` pairs, and that the first of each
    pair in `below` is smaller than the second. `lemmas` are instances of the law of numerals, proved by itself.
    """

    about: str
    sizes: tuple[Term, ...]
    digits: tuple[tuple[Term, Term | None], ...]
    given: tuple[Pair, ...] = ()
    equal: tuple[Pair, ...] = ()
    below: tuple[Pair, ...] = ()
    lemmas: tuple[Lemma, ...] = ()

    def __str__(self) -> str:
        goals = [f"{a} = {b}" for a, b in self.equal] + [f"{a} < {b}" for a, b in self.below]
        given = [f"{a} = {b}" for a, b in self.given]
        return f"{self.about}: {', '.join(goals)}" + (f", if {', '.join(given)}" if given else "")


def _term(value: Term | int) -> Term:
    return value if isinstance(value, Term) else Term(str(value))


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
