"""The search: steps from a source to a target, at most so many, as unknowns of one set of conditions."""

from __future__ import annotations

from typing import Any, NamedTuple

from reshard.proofs.launches.encoding import RULES, Between, Price, Stage, kinds, slices
from reshard.proofs.launches.space import Space, State
from reshard.proofs.symbolic.queries import z3


class Goal(NamedTuple):
    """What a plan must meet: elements received and live on the worst device, and launches, at the most."""

    source: State
    target: State
    received: int
    live: int
    launches: int
    donate: bool


class Chosen(NamedTuple):
    """A step that z3 chose, and whether the source is kept beside it."""

    number: int
    kind: str
    before: State
    after: State
    retained: bool


class _Step(NamedTuple):
    """A step between two stages: what it is and costs, and whether a step before it has left the source."""

    before: Stage
    after: Stage
    kinds: dict[str, Any]
    received: Any
    launches: Any
    begun: Any


class Search:
    """The conditions on plans of at most `length` steps that move data, with slices before, between and after."""

    def __init__(self, space: Space, goal: Goal, length: int) -> None:
        lib = z3()
        self.space, self.goal = space, goal
        self.solver = lib.Solver()
        self.stages = [Stage(space, f"s{n}", self.solver.add) for n in range(2 * length + 2)]
        self.steps: list[_Step] = []
        begun: Any = lib.BoolVal(False)
        for n in range(2 * length + 1):
            step = self._slice(n, begun) if n % 2 == 0 else self._move(n, begun)
            begun = lib.Or(begun, step.kinds["slice"] if n % 2 == 0 else lib.Not(step.kinds["none"]))
            self.steps.append(step)
        for one, other in zip(self.steps[1::2], self.steps[3::2], strict=False):
            self.solver.add(lib.Implies(one.kinds["none"], other.kinds["none"]))
        self.solver.add(*self.stages[0].is_(goal.source), *self.stages[-1].is_(goal.target))
        self.solver.add(lib.Sum([s.received for s in self.steps]) <= goal.received)
        self.solver.add(lib.Sum([s.launches for s in self.steps]) <= goal.launches)

    def _slice(self, n: int, begun: Any) -> _Step:
        at = Between(self.stages[n], self.stages[n + 1], f"t{n}")
        changed = at.some()
        self.solver.add(slices(at))
        self._fits(changed, at, begun, 0, z3().BoolVal(True))
        return _Step(at.before, at.after, {"slice": changed}, z3().IntVal(0), z3().IntVal(0), begun)

    def _move(self, n: int, begun: Any) -> _Step:
        """A step of one of the kinds that move data, or none."""
        lib, add = z3(), self.solver.add
        at = Between(self.stages[n], self.stages[n + 1], f"t{n}")
        received, launches, scratch = (lib.Int(f"{at.name}:{what}") for what in ("received", "launches", "scratch"))
        chosen = {kind: lib.Bool(f"{at.name}:{kind}") for kind in ("none", *kinds(self.space))}
        add(lib.PbEq([(c, 1) for c in chosen.values()], 1))
        add(lib.Implies(chosen["none"], lib.And(*at.kept, received == 0, launches == 0)))
        add(lib.Or(chosen["none"], lib.And(at.some(), launches >= 1)))
        for kind in kinds(self.space):
            typed, price = RULES[kind](at)
            add(lib.Implies(chosen[kind], lib.And(typed, received >= price.received, self._cost(at, kind, price))))
        self._fits(lib.Not(chosen["none"]), at, begun, scratch, chosen["exchange"])
        return _Step(at.before, at.after, chosen, received, launches, begun)

    def _cost(self, at: Between, kind: str, price: Price) -> Any:
        """In one go, or in pieces: without scratch, in twice the launches; boxes are priced when they are found."""
        lib = z3()
        launches, scratch = lib.Int(f"{at.name}:launches"), lib.Int(f"{at.name}:scratch")
        if kind == "boxes":
            return lib.And(launches >= price.launches, scratch >= 0)
        whole = lib.And(launches >= price.launches, scratch == price.scratch)
        return lib.Or(whole, lib.And(launches >= 2 * price.launches, scratch == 0))

    def _fits(self, changed: Any, at: Between, begun: Any, scratch: Any, in_place: Any) -> None:
        """The source if it is kept, operand, result and scratch are within the memory; or the larger of two tiles,
        where a step can go in place over a donated source.
        """
        lib = z3()
        kept = 0 if self.goal.donate else lib.If(begun, self.stages[0].tile, 0)
        fits = kept + at.before.tile + at.after.tile + scratch <= self.goal.live
        if self.goal.donate:
            most = [tile <= self.goal.live for tile in (at.before.tile, at.after.tile)]
            fits = lib.Or(fits, lib.And(in_place, *most))
        self.solver.add(lib.Implies(changed, fits))

    def find(self, seconds: float) -> list[Chosen] | None:
        """Steps that meet all conditions, or None where there are none; `TimeoutError` if z3 does not say."""
        self.solver.set("timeout", max(1, int(seconds * 1000)))
        verdict = self.solver.check()
        if verdict == z3().unsat:
            return None
        if verdict != z3().sat:
            raise TimeoutError(self.solver.reason_unknown())
        model = self.solver.model()
        found: list[Chosen] = []
        for n, step in enumerate(self.steps):
            kind = next((k for k, chosen in step.kinds.items() if z3().is_true(model.eval(chosen, True))), "none")
            if kind != "none":
                begun = z3().is_true(model.eval(step.begun, True)) and not self.goal.donate
                found.append(Chosen(n, kind, step.before.read(model), step.after.read(model), begun))
        return found

    def learn(self, step: Chosen, price: tuple[int, int] | None) -> None:
        """A step that was found receives and launches at least so much, at every place; None: it cannot be done."""
        lib = z3()
        for other in self.steps[step.number % 2 :: 2]:
            this = [other.kinds[step.kind], *other.before.is_(step.before), *other.after.is_(step.after)]
            if not self.goal.donate:
                this.append(other.begun == step.retained)
            then = lib.BoolVal(False)
            if price is not None:
                then = lib.And(other.received >= price[0], other.launches >= price[1])
            self.solver.add(lib.Implies(lib.And(*this), then))
