"""Claims about digits, as data, and z3, which decides them: the only module of this package that needs it.

A claim is refuted by values for which it fails. z3 gets that negation, and the claim holds if there is no solution.

A claim is a statement about integers: device coordinates below their radices, and local digits below theirs, which may
be names of sizes that are at least 1. Digits are compared one by one, so no product of unknowns occurs. Padding
compares indices of dims whose sizes are numbers, which is linear.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from reshard.errors import UndecidedError

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


# ---- what z3 decides ----------------------------------------------------------------------------


WORK = 50_000_000
"""z3's own count of what it does, after which it gives up: the same on every machine, however busy it is."""


def decide_claims(claims: Sequence[Query], work: int = WORK) -> None:
    """Proves every claim; raises `UndecidedError` with z3's counterexample if one fails, else with its reason.

    Threads may decide claims side by side: each has a context of its own.

    >>> decide_claims([Fewer("step 1", 3, 4)])
    >>> decide_claims([Fewer("step 1", 4, 3)])
    Traceback (most recent call last):
    ...
    reshard.errors.UndecidedError: step 1: z3 finds that it fails where N = 1
    """
    for claim in claims:
        solver = _solver(claim, _context())
        solver.set("rlimit", work)
        verdict = solver.check()
        if verdict == z3().sat:
            model = solver.model()
            values = ", ".join(sorted(f"{d} = {model[d]}" for d in model.decls()))
            raise UndecidedError(f"{claim.about}: z3 finds that it fails where {values}")
        if verdict != z3().unsat:
            reason = f"within {work:,} units of its work ({solver.reason_unknown()})"
            raise UndecidedError(f"{claim.about}: z3 does not decide it {reason}")


def to_smt2(claim: Query) -> str:
    """The claim's negation in SMT-LIB 2: `unsat` means that the claim holds."""
    return f"; {claim}\n{_solver(claim, _context()).to_smt2()}"


@lru_cache(maxsize=1)
def z3() -> Any:
    """The z3 library, loaded by the first claim; raises `UndecidedError` if it is not installed."""
    try:
        return import_module("z3")
    except ImportError as error:
        raise UndecidedError(f"z3 is needed to decide claims ({error}); pip install z3-solver") from None


_OF_THREAD = threading.local()


def _context() -> Any:
    """This thread's context: two threads in one would end the process, and making one takes longer than most proofs."""
    if not hasattr(_OF_THREAD, "context"):
        _OF_THREAD.context = z3().Context()
    return _OF_THREAD.context


def _solver(claim: Query, context: Any) -> Any:
    """A solver that looks for values for which the claim fails."""
    solver = z3().Solver(ctx=context)
    match claim:
        case Absent():
            solver.from_string(claim.conditions)
        case Claim():
            solver.add(*_claim_fails(claim, context))
        case Fewer():
            unit = z3().Int("N", context)
            solver.add(unit >= 1, z3().Not(claim.least * unit <= claim.most * unit))
        case Rounds():
            solver.add(*_rounds_fail(claim, context))
        case Law():
            solver.add(*_law_fails(claim, context))
    return solver


def _claim_fails(claim: Claim, ctx: Any) -> Iterator[Any]:
    def total(terms: Sum) -> Any:
        return z3().Sum([k * z3().Int(name, ctx) for k, name in terms]) if terms else z3().IntVal(0, ctx)

    for name, bound in claim.bounds:
        yield _within(z3().Int(name, ctx), z3().Int(bound, ctx) if isinstance(bound, str) else bound)
    for size in dict.fromkeys(bound for _, bound in claim.bounds if isinstance(bound, str)):
        yield z3().Int(size, ctx) >= 1
    yield from (total(s) < limit for s, limit in claim.given)
    goals = [z3().Int(a, ctx) == z3().Int(b, ctx) for a, b in claim.equal]
    goals += [total(s) < limit for s, limit in claim.below]
    yield z3().Not(z3().And(*goals, ctx))


def _rounds_fail(claim: Rounds, ctx: Any) -> Iterator[Any]:
    """Two different receivers c and d of one sender, or a share that its round does not bring."""
    c, d = ({stride: z3().Int(f"{side}:{stride}", ctx) for stride, _ in claim.coordinates} for side in "cd")
    turns = {turn.name: turn for turn in claim.turns}
    for receiver in (c, d):
        yield from (_within(receiver[stride], radix) for stride, radix in claim.coordinates)
    yield from (_within(z3().Int(turn.name, ctx), turn.radix) for turn in claim.turns)

    def first(receiver: dict[int, Any], turn: ShareTurn) -> Any:
        """The share of round 0, before it is counted modulo the radix."""
        shifts = (times * (receiver[stride] / place % size) for times, stride, place, size in turn.shifts)
        return sum(shifts, start=receiver[turn.stride])

    def sender(receiver: dict[int, Any], stride: int, turn: str | None) -> Any:
        if turn is None:
            return receiver[stride]
        return (first(receiver, turns[turn]) + z3().Int(turn, ctx)) % turns[turn].radix

    same_sender = [sender(c, *coordinate) == sender(d, *coordinate) for coordinate in claim.senders]
    different = z3().Or(*(c[stride] != d[stride] for stride in c), ctx)
    lost: list[Any] = []  # A share that round (share - first) mod radix does not bring.
    for turn in claim.turns:
        share, begun, radix = z3().Int(f"share:{turn.name}", ctx), first(c, turn), turn.radix
        lost.append(z3().And(_within(share, radix), (begun + (share - begun) % radix) % radix != share))
    yield z3().Or(z3().And(*same_sender, different), *lost)


def _law_fails(law: Law, ctx: Any) -> Iterator[Any]:
    def number(term: Term) -> Any:
        """A term as z3's expression; an unknown function of integers is an uninterpreted one."""
        args = [number(a) for a in term.args]
        if term.head == "+":
            return args[0] + args[1]
        if term.head == "*":
            return args[0] * args[1]
        if args:
            return z3().Function(term.head, *[z3().IntSort(ctx)] * (len(args) + 1))(*args)
        return z3().IntVal(term.head, ctx) if term.head.isdigit() else z3().Int(term.head, ctx)

    for size in law.sizes:
        yield number(size) >= 1
    for digit, bound in law.digits:
        if bound is not None:
            yield _within(number(digit), number(bound))
    for one, other in law.given:
        yield number(one) == number(other)
    for high, above, last, end, radix in law.lemmas:
        same = number(high * radix + last) == number(above * radix + end)
        within = [_within(number(digit), number(radix)) for digit in (last, end)]
        equal = z3().And(number(high) == number(above), number(last) == number(end))
        yield z3().Implies(z3().And(same, *within), equal)
    goals = [number(one) == number(other) for one, other in law.equal]
    yield z3().Not(z3().And(*goals, *(number(one) < number(limit) for one, limit in law.below), ctx))


def _within(value: Any, bound: Any) -> Any:
    return z3().And(value >= 0, value < bound)
