"""Laws: equations between numerals of unknown sizes. A law holds for every mesh and every size, or it is false.

    (pre(a) r + p) s + post(b)        the numeral of three digits: unknown ones, one of radix r, and unknown ones

A size is a name for any integer from 1 on, a digit is a name for an integer below a size. Division and remainder do not
occur: an index *is* the numeral of its digits, and two numerals that must be equal are given as equal. The parts of a
numeral that a law does not describe are unknown functions of their digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
