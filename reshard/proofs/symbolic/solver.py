"""The only module of this package that needs z3: it decides claims, and writes them in SMT-LIB 2 for other solvers.

A claim is refuted by values for which it fails. z3 gets that negation, and the claim holds if there is no solution.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from reshard.errors import UndecidedError
from reshard.proofs.symbolic.claims import Absent, Claim, Fewer, Law, Query, Rounds, ShareTurn, Sum, Term

WORK = 50_000_000
"""z3's own count of what it does, after which it gives up: the same on every machine, however busy it is."""


def decide(claims: Sequence[Query], work: int = WORK) -> None:
    """Proves every claim; raises `UndecidedError` with z3's counterexample if one fails, else with its reason.

    Threads may decide claims side by side: each has a context of its own.

    >>> decide([Fewer("step 1", 3, 4)])
    >>> decide([Fewer("step 1", 4, 3)])
    Traceback (most recent call last):
    ...
    reshard.errors.UndecidedError: step 1: z3 finds that it fails where N = 1
    """
    for claim in claims:
        solver = _solver(claim, _context())
        solver.set("rlimit", work)
        verdict = solver.check()
        if verdict == z3().sat:
            raise UndecidedError(f"{claim.about}: z3 finds that it fails where {_spelled(solver.model())}")
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
        raise UndecidedError(f"z3 is needed to decide claims ({error}); install reshard[prove]") from None


_OF_THREAD = threading.local()


def _context() -> Any:
    """This thread's context: two threads in one would end the process, and making one takes longer than most proofs."""
    if not hasattr(_OF_THREAD, "context"):
        _OF_THREAD.context = z3().Context()
    return _OF_THREAD.context


def _solver(claim: Query, context: Any) -> Any:
    """A solver that looks for values for which the claim fails."""
    solver = z3().Solver(ctx=context)
    if isinstance(claim, Absent):
        solver.from_string(claim.conditions)
    else:
        solver.add(*_FAILURES[type(claim)](claim, context))
    return solver


def _claim_fails(claim: Claim, ctx: Any) -> Iterator[Any]:
    for name, bound in claim.bounds:
        yield _within(z3().Int(name, ctx), z3().Int(bound, ctx) if isinstance(bound, str) else bound)
    for size in dict.fromkeys(bound for _, bound in claim.bounds if isinstance(bound, str)):
        yield z3().Int(size, ctx) >= 1
    yield from (_total(s, ctx) < limit for s, limit in claim.given)
    goals = [z3().Int(a, ctx) == z3().Int(b, ctx) for a, b in claim.equal]
    goals += [_total(s, ctx) < limit for s, limit in claim.below]
    yield z3().Not(z3().And(*goals, ctx))


def _fewer_fails(claim: Fewer, ctx: Any) -> Iterator[Any]:
    unit = z3().Int("N", ctx)
    yield unit >= 1
    yield z3().Not(claim.least * unit <= claim.most * unit)


def _rounds_fail(claim: Rounds, ctx: Any) -> Iterator[Any]:
    """Two different receivers c and d of one sender, or a share that its round does not bring."""
    radices = dict(claim.coordinates)
    c, d = ({stride: z3().Int(f"{side}:{stride}", ctx) for stride in radices} for side in "cd")
    turns = {turn.name: turn for turn in claim.turns}
    for receiver in (c, d):
        yield from (_within(receiver[stride], radix) for stride, radix in claim.coordinates)
    yield from (_within(z3().Int(turn.name, ctx), turn.radix) for turn in claim.turns)

    def sender(receiver: dict[int, Any], stride: int, turn: str | None) -> Any:
        if turn is None:
            return receiver[stride]
        return (_first(receiver, turns[turn]) + z3().Int(turn, ctx)) % turns[turn].radix

    same_sender = [sender(c, *coordinate) == sender(d, *coordinate) for coordinate in claim.senders]
    different = z3().Or(*(c[stride] != d[stride] for stride in radices), ctx)
    lost = [_lost(z3().Int(f"share:{turn.name}", ctx), _first(c, turn), turn.radix) for turn in claim.turns]
    yield z3().Or(z3().And(*same_sender, different), *lost)


def _first(receiver: Mapping[int, Any], turn: ShareTurn) -> Any:
    """The share of round 0, before it is counted modulo the radix."""
    shifts = (times * (receiver[stride] / place % size) for times, stride, place, size in turn.shifts)
    return sum(shifts, start=receiver[turn.stride])


def _lost(share: Any, first: Any, radix: int) -> Any:
    """A share that round (share - first) mod radix does not bring."""
    return z3().And(_within(share, radix), (first + (share - first) % radix) % radix != share)


def _law_fails(law: Law, ctx: Any) -> Iterator[Any]:
    for size in law.sizes:
        yield _number(size, ctx) >= 1
    for digit, bound in law.digits:
        if bound is not None:
            yield _within(_number(digit, ctx), _number(bound, ctx))
    for one, other in law.given:
        yield _number(one, ctx) == _number(other, ctx)
    for high, above, last, end, radix in law.lemmas:
        same = _number(high * radix + last, ctx) == _number(above * radix + end, ctx)
        within = [_within(_number(digit, ctx), _number(radix, ctx)) for digit in (last, end)]
        equal = z3().And(_number(high, ctx) == _number(above, ctx), _number(last, ctx) == _number(end, ctx))
        yield z3().Implies(z3().And(same, *within), equal)
    goals = [_number(one, ctx) == _number(other, ctx) for one, other in law.equal]
    yield z3().Not(z3().And(*goals, *(_number(one, ctx) < _number(limit, ctx) for one, limit in law.below), ctx))


_FAILURES: dict[type[Any], Callable[[Any, Any], Iterator[Any]]] = {
    Claim: _claim_fails,
    Fewer: _fewer_fails,
    Rounds: _rounds_fail,
    Law: _law_fails,
}


def _number(term: Term, ctx: Any) -> Any:
    """A term as z3's expression; an unknown function of integers is an uninterpreted one."""
    args = [_number(a, ctx) for a in term.args]
    if term.head == "+":
        return args[0] + args[1]
    if term.head == "*":
        return args[0] * args[1]
    if args:
        return z3().Function(term.head, *[z3().IntSort(ctx)] * (len(args) + 1))(*args)
    return z3().IntVal(term.head, ctx) if term.head.isdigit() else z3().Int(term.head, ctx)


def _within(value: Any, bound: Any) -> Any:
    return z3().And(value >= 0, value < bound)


def _total(terms: Sum, ctx: Any) -> Any:
    return z3().Sum([k * z3().Int(name, ctx) for k, name in terms]) if terms else z3().IntVal(0, ctx)


def _spelled(model: Any) -> str:
    return ", ".join(sorted(f"{d} = {model[d]}" for d in model.decls()))
