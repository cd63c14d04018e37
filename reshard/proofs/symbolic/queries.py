"""Claims about digits, and their decision by z3.

A claim is a statement over whole numbers: device coordinates below their radices, local digits below
theirs, which may be names of sizes that are at least 1. Digits are compared one by one, so that no
product of unknowns occurs; padding compares indices of dims whose sizes are numbers, which is linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from reshard.errors import UndecidedError
from reshard.proofs.symbolic.laws import Law, fails

Sum = tuple[tuple[int, str], ...]
"""A sum of variables times whole numbers."""


@dataclass(frozen=True)
class Claim:
    """For all variables below their bounds: if all `given` sums are below theirs, what is claimed holds.

    A bound is a number or the name of a size. `equal` are pairs of variables, `below` sums and what they are
    below.
    """

    about: str
    bounds: tuple[tuple[str, int | str], ...]
    equal: tuple[tuple[str, str], ...]
    given: tuple[tuple[Sum, int], ...] = ()
    below: tuple[tuple[Sum, int], ...] = ()

    def __str__(self) -> str:
        goals = [f"{a} = {b}" for a, b in self.equal if a != b]
        goals += [f"{_spell(s)} < {limit}" for s, limit in self.below]
        held = sum(a == b for a, b in self.equal)
        same = f"{held} digits keep their value" if held else ""
        given = "".join(f" if {_spell(s)} < {limit}" for s, limit in self.given)
        return f"{self.about}: {', '.join([*([same] if same else []), *goals]) or 'nothing to show'}{given}"


@dataclass(frozen=True)
class Fewer:
    """For all sizes that vary, whose product is N: `least` N bytes are at most `most` N bytes."""

    about: str
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.about}: {self.least} N <= {self.most} N for all N >= 1"


@dataclass(frozen=True)
class Rounds:
    """In round j, receiver c hears from the device whose coordinate along each stride is that of `senders`: the
    receiver's along some stride, with a digit of j added in turn or not. Then no device sends twice in a round,
    and every share, (c + j) mod radix, is some round's.
    """

    about: str
    coordinates: tuple[tuple[int, int], ...]
    senders: tuple[tuple[int, str | None], ...]
    turns: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        return f"{self.about}: in each round no device sends twice, and over all rounds every share arrives"


@dataclass(frozen=True)
class Absent:
    """A search that found nothing: its conditions, in SMT-LIB 2, have no solution."""

    about: str
    conditions: str

    def __str__(self) -> str:
        return f"{self.about}: no choice meets all conditions"


Query = Claim | Fewer | Rounds | Law | Absent


def decide(claims: Sequence[Query], seconds: float = 10.0) -> None:
    """Proves every claim; raises `UndecidedError` with z3's example where one fails, or with its reason."""
    for claim in claims:
        solver = _solver(claim)
        solver.set("timeout", max(1, int(seconds * 1000)))
        verdict = solver.check()
        if verdict == z3().sat:
            raise UndecidedError(f"{claim.about}: z3 finds that it fails where {_model(solver.model())}")
        if verdict != z3().unsat:
            raise UndecidedError(f"{claim.about}: z3 does not decide it ({solver.reason_unknown()})")


def to_smt2(claim: Query) -> str:
    """The claim's negation in SMT-LIB 2: `unsat` says that the claim holds."""
    return f"; {claim}\n{_solver(claim).to_smt2()}"


@lru_cache(maxsize=1)
def z3() -> Any:
    """The solver's library, loaded by the first claim."""
    try:
        return import_module("z3")
    except ImportError as error:
        raise UndecidedError(f"z3 is needed to decide claims ({error}); install reshard[prove]") from None


def _solver(claim: Query) -> Any:
    solver = z3().Solver()
    if isinstance(claim, Fewer):
        unit = z3().Int("N")
        solver.add(unit >= 1, z3().Not(claim.least * unit <= claim.most * unit))
        return solver
    if isinstance(claim, Absent):
        solver.from_string(claim.conditions)
        return solver
    if isinstance(claim, Rounds | Law):
        solver.add(*(_rounds(claim) if isinstance(claim, Rounds) else fails(claim, z3())))
        return solver
    solver.add(*_ranges(claim))
    solver.add(*(_total(s) < limit for s, limit in claim.given))
    goals = [z3().Int(a) == z3().Int(b) for a, b in claim.equal]
    goals += [_total(s) < limit for s, limit in claim.below]
    solver.add(z3().Not(z3().And(*goals)))
    return solver


def _ranges(claim: Claim) -> Iterator[Any]:
    for name, bound in claim.bounds:
        value = z3().Int(name)
        yield value >= 0
        yield value < (z3().Int(bound) if isinstance(bound, str) else bound)
    for size in {bound for _, bound in claim.bounds if isinstance(bound, str)}:
        yield z3().Int(size) >= 1


def _rounds(claim: Rounds) -> Iterator[Any]:
    """Two receivers of one sender that differ, or a share that its round does not bring."""
    radices = dict(claim.coordinates)
    sides = [{s: z3().Int(f"{side}:{s}") for s in radices} for side in ("c", "d")]
    turns = {name: (z3().Int(name), radix) for name, _, radix in claim.turns}
    for values in sides:
        yield from (_within(values[s], radix) for s, radix in claim.coordinates)
    yield from (_within(turn, radix) for turn, radix in turns.values())

    def heard(values: dict[int, Any], stride: int, turn: str | None) -> Any:
        return values[stride] if turn is None else (values[stride] + turns[turn][0]) % turns[turn][1]

    same = [heard(sides[0], *sender) == heard(sides[1], *sender) for sender in claim.senders]
    apart = z3().Or(*(sides[0][s] != sides[1][s] for s in radices))
    lost = [_lost(z3().Int(f"share:{name}"), sides[0][s], radix) for name, s, radix in claim.turns]
    yield z3().Or(z3().And(*same, apart), *lost)


def _lost(share: Any, head: Any, radix: int) -> Any:
    """A share that round (share - head) mod radix does not bring."""
    return z3().And(_within(share, radix), (head + (share - head) % radix) % radix != share)


def _within(value: Any, radix: int) -> Any:
    return z3().And(value >= 0, value < radix)


def _total(terms: Sum) -> Any:
    return z3().Sum([k * z3().Int(name) for k, name in terms]) if terms else z3().IntVal(0)


def _spell(terms: Sum) -> str:
    return " + ".join(f"{k} {name}" if k != 1 else name for k, name in terms) or "0"


def _model(model: Any) -> str:
    return ", ".join(sorted(f"{d} = {model[d]}" for d in model.decls()))
