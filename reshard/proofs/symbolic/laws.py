"""Laws: equations between numerals of unknown sizes, which hold for every mesh and every size or not at all.

A size is a name for any whole number from 1 on, a digit one for a number below a size. Division and
remainder do not occur: an index *is* the numeral of its digits, and two numerals that are equal are given as
equal. Parts of a numeral that a law says nothing of are unknown functions of their digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Term:
    """A whole number: a name, a literal, a sum, a product, or what an unknown function makes of some.

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
    """For all `sizes` from 1 on and all `digits`, from 0 to below their bounds (None: any whole number): if the
    pairs that are `given` are equal, so are those that are claimed, and those `below` are smaller than their limits.

    `lemmas` are instances of the law of numerals, which is shown by itself.
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


def fails(law: Law, z3: Any) -> Iterator[Any]:
    """What holds of numbers for which a law does not: no numbers are such, if it is one."""
    number = _numbers(z3)
    for size in law.sizes:
        yield number(size) >= 1
    for digit, bound in law.digits:
        if bound is not None:
            yield _within(number(digit), number(bound), z3)
    for one, other in law.given:
        yield number(one) == number(other)
    for high, above, last, end, radix in law.lemmas:
        same = number(high * radix + last) == number(above * radix + end)
        within = [_within(number(digit), number(radix), z3) for digit in (last, end)]
        yield z3.Implies(z3.And(same, *within), z3.And(number(high) == number(above), number(last) == number(end)))
    goals = [number(one) == number(other) for one, other in law.equal]
    yield z3.Not(z3.And(*goals, *(number(one) < number(limit) for one, limit in law.below)))


def _within(value: Any, bound: Any, z3: Any) -> Any:
    return z3.And(value >= 0, value < bound)


def _numbers(z3: Any) -> Callable[[Term], Any]:
    def number(term: Term) -> Any:
        args = [number(a) for a in term.args]
        if term.head == "+":
            return args[0] + args[1]
        if term.head == "*":
            return args[0] * args[1]
        if args:
            return z3.Function(term.head, *[z3.IntSort()] * (len(args) + 1))(*args)
        return z3.IntVal(term.head) if term.head.isdigit() else z3.Int(term.head)

    return number


def _term(value: Term | int) -> Term:
    return value if isinstance(value, Term) else Term(str(value))
