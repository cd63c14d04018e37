"""The search: a limited number of steps from a source to a target, as unknowns of one set of conditions.

layouts     s0        s1        s2        s3        ...        source = s0, target = the last
steps          slice     move      slice     move              a slice or a move may also change nothing
"""

from __future__ import annotations

from typing import Any, NamedTuple

from reshard.proofs.launches.encoding import RULES, Between, Price, UnknownLayout, kinds, slices
from reshard.proofs.launches.space import Space, State
from reshard.proofs.symbolic.solver import z3

_LONGEST = 1e6
"""Seconds; z3 counts milliseconds in 32 bits."""


class Goal(NamedTuple):
    """What a plan must meet: at most these elements received and live on the worst device, and these launches."""

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


class _UnknownStep(NamedTuple):
    """A step between two unknown layouts: its kind and costs, and whether an earlier step has left the source."""

    before: UnknownLayout
    after: UnknownLayout
    kinds: dict[str, Any]
    received: Any
    launches: Any
    begun: Any


class Search:
    """The conditions on plans of at most `length` steps that move data, with slices before, between and after them."""

    def __init__(self, space: Space, goal: Goal, length: int) -> None:
        lib = z3()
        self.space, self.goal = space, goal
        self.solver = lib.Solver()
        self.layouts = [UnknownLayout(space, f"s{n}", self.solver.add) for n in range(2 * length + 2)]
        self.steps: list[_UnknownStep] = []
        begun: Any = lib.BoolVal(False)
        for n in range(2 * length + 1):
            step = self._slice(n, begun) if n % 2 == 0 else self._move(n, begun)
            begun = lib.Or(begun, step.kinds["slice"] if n % 2 == 0 else lib.Not(step.kinds["none"]))
            self.steps.append(step)
        for one, other in zip(self.steps[1::2], self.steps[3::2], strict=False):
            self.solver.add(lib.Implies(one.kinds["none"], other.kinds["none"]))
        self.solver.add(*self.layouts[0].equals(goal.source), *self.layouts[-1].equals(goal.target))
        self.solver.add(lib.Sum([s.received for s in self.steps]) <= goal.received)
        self.solver.add(lib.Sum([s.launches for s in self.steps]) <= goal.launches)

    def _slice(self, n: int, begun: Any) -> _UnknownStep:
        at = Between(self.layouts[n], self.layouts[n + 1], f"t{n}")
        changed = at.some()
        self.solver.add(slices(at))
        self._fits(changed, at, begun, 0, z3().BoolVal(True))
        return _UnknownStep(at.before, at.after, {"slice": changed}, z3().IntVal(0), z3().IntVal(0), begun)

    def _move(self, n: int, begun: Any) -> _UnknownStep:
        """A step of one of the kinds that move data, or none."""
        lib, add = z3(), self.solver.add
        at = Between(self.layouts[n], self.layouts[n + 1], f"t{n}")
        received, launches, scratch = (lib.Int(f"{at.name}:{what}") for what in ("received", "launches", "scratch"))
        chosen = {kind: lib.Bool(f"{at.name}:{kind}") for kind in ("none", *kinds(self.space))}
        add(lib.PbEq([(c, 1) for c in chosen.values()], 1))
        add(lib.Implies(chosen["none"], lib.And(*at.kept, received == 0, launches == 0)))
        add(lib.Or(chosen["none"], lib.And(at.some(), launches >= 1)))
        for kind in kinds(self.space):
            typed, price = RULES[kind](at)
            add(lib.Implies(chosen[kind], lib.And(typed, received >= price.received, self._cost(at, kind, price))))
        self._fits(
            lib.Not(chosen["none"]), at, begun, scratch, lib.Or(chosen["exchange"], self._parts_fit(at, launches))
        )
        return _UnknownStep(at.before, at.after, chosen, received, launches, begun)

    def _parts_fit(self, at: Between, launches: Any) -> Any:
        """Parts take each other's place in tiles of one size: beside the tile, two of at most as many as launches."""
        tile, goal = at.before.tile, self.goal
        return z3().And(tile == at.after.tile, launches >= 2, 2 * tile <= (goal.live - tile) * goal.launches)

    def _cost(self, at: Between, kind: str, price: Price) -> Any:
        """A step runs as a whole, or in pieces: without scratch in twice the launches. Boxes are priced later."""
        lib = z3()
        launches, scratch = lib.Int(f"{at.name}:launches"), lib.Int(f"{at.name}:scratch")
        if kind == "boxes":
            return lib.And(launches >= price.launches, scratch >= 0)
        whole = lib.And(launches >= price.launches, scratch == price.scratch)
        return lib.Or(whole, lib.And(launches >= 2 * price.launches, scratch == 0))

    def _fits(self, changed: Any, at: Between, begun: Any, scratch: Any, in_place: Any) -> None:
        """Adds the condition that a step that changes something is within the memory.

        Live are the source if it is kept, operand, result and scratch. Where a step can run in place over a donated
        source, the larger of the two tiles is enough.
        """
        lib = z3()
        kept = 0 if self.goal.donate else lib.If(begun, self.layouts[0].tile, 0)
        fits = kept + at.before.tile + at.after.tile + scratch <= self.goal.live
        if self.goal.donate:
            tiles = [tile <= self.goal.live for tile in (at.before.tile, at.after.tile)]
            fits = lib.Or(fits, lib.And(in_place, *tiles))
        self.solver.add(lib.Implies(changed, fits))

    def find(self, seconds: float) -> list[Chosen] | None:
        """Steps that meet all conditions, None if there are none; raises `TimeoutError` if z3 does not say."""
        self.solver.set("timeout", max(1, int(min(seconds, _LONGEST) * 1000)))
        verdict = self.solver.check()
        if verdict == z3().unsat:
            return None
        if verdict != z3().sat:
            raise TimeoutError(self.solver.reason_unknown())
        model = self.solver.model()
        choices: list[Chosen] = []
        for n, step in enumerate(self.steps):
            kind = next((k for k, chosen in step.kinds.items() if z3().is_true(model.eval(chosen, True))), "none")
            if kind != "none":
                retained = z3().is_true(model.eval(step.begun, True)) and not self.goal.donate
                choices.append(Chosen(n, kind, step.before.read(model), step.after.read(model), retained))
        return choices

    def learn(self, step: Chosen, price: tuple[int, int] | None) -> None:
        """Adds that a step receives and launches at least its price, at every place; None: it cannot be done."""
        lib = z3()
        for other in self.steps[step.number % 2 :: 2]:
            this = [other.kinds[step.kind], *other.before.equals(step.before), *other.after.equals(step.after)]
            if not self.goal.donate:
                this.append(other.begun == step.retained)
            then = lib.BoolVal(False)
            if price is not None:
                then = lib.And(other.received >= price[0], other.launches >= price[1])
            self.solver.add(lib.Implies(lib.And(*this), then))
