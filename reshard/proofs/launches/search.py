"""The search: a limited number of steps from a source to a target, as unknowns of one set of conditions.

layouts     s0        s1        s2        s3        ...        source = s0, target = the last
steps          slice     move      slice     move              a slice or a move may also change nothing
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import Any, NamedTuple

from reshard.errors import PlanError, ReshardError, StepError, UndecidedError, quoted
from reshard.geometry.figures import exchange_figures
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules import split_steps
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.proofs import symbolic
from reshard.proofs.launches.encoding import RULES, Between, Price, UnknownLayout, kinds, slices
from reshard.proofs.launches.space import Space, State, space_of
from reshard.proofs.proof import Fewest
from reshard.proofs.symbolic.claims import z3
from reshard.types.layout import Layout

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


# What a step costs by its typing rule, in the way with the fewest launches that fits into the memory.


MOST_ELEMENTS = 1 << 12
"""A larger message is not tried in chunks of every size, so whether some chunk fits is undecided."""


def cheapest(
    kind: str, operand: Layout, result: Layout, retained: int, live: int, most: int, donate: bool
) -> Step | None:
    """The step with the fewest launches, within `most` launches and `live` bytes; None if there is none.

    `retained` bytes are live beside it. Only if the source is donated may it run in place.

    >>> from reshard.types import Mesh
    >>> operand, result = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]"))
    >>> [cheapest("all_to_all", operand, result, 0, live, 4, donate=False).launches for live in (768, 767)]
    [1, 4]
    """
    fitting: list[Step] = []
    for name, mode in _ways(kind, operand, result, most, donate):
        try:
            step = Step(name, operand, result, mode, retained)
        except StepError:
            continue
        if step.live_bytes <= live and step.launches <= most:
            fitting.append(step)
            if mode == PLAIN:  # Pieces only add launches.
                break
    return min(fitting, key=lambda step: step.launches, default=None)


def _ways(kind: str, operand: Layout, result: Layout, most: int, donate: bool) -> Iterator[tuple[str, StepMode]]:
    """A step as a whole and in parts; an exchange also in chunks of all sizes; and in place, which a slice can be."""
    yield kind, PLAIN
    for count in split_steps.possible_counts(operand, result):
        if count <= most:
            yield from ((kind, StepMode(parts=count, in_place=in_place)) for in_place in {False, donate})
    if kind == "slice" and donate:
        yield "exchange", StepMode(in_place=True)
    if kind == "exchange":
        yield from ((kind, mode) for mode in _chunks(operand, result, most, donate))


def _chunks(operand: Layout, result: Layout, most: int, donate: bool) -> Iterator[StepMode]:
    """The ways to cut the messages of an exchange; the larger the chunks, the fewer the launches."""
    size = exchange_figures(operand, result)
    if donate:
        yield from (StepMode(-(-size.message // count), in_place=True) for count in range(1, most + 1))
    if size.message > MOST_ELEMENTS:
        raise UndecidedError(f"messages of {size.message} elements are not cut in all ways")
    for cap in range(size.message - 1, 0, -1):
        if size.cut(cap)[0] > most:
            return
        yield StepMode(chunk=cap)


# The search for a plan with fewer launches, length by length, until there is none.


MOST_CHOICES = 400_000
"""A search over more pairs of digits, layout by layout, is not started: writing its conditions would take too long."""


def fewest(plan: Plan, limit: float = 30.0) -> Fewest:
    """Searches for a plan with fewer launches that receives as few bytes in the same memory, for `limit` seconds.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=2, y=2)
    >>> plan = rs.plan(rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[{y}4, {x}4]", mesh))
    >>> fewest(plan).argument
    ('some device receives 64 bytes in any plan, and nothing is received without a launch',)
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"{quoted(plan)} is a {type(plan).__name__}, not a Plan; give what reshard.plan() returns")
    check_limit(limit)
    try:
        return _without_search(plan) or _search_alone(plan, time.monotonic() + limit)
    except TimeoutError:
        return _undecided(f"the search was ended after {limit:g} s")
    except UndecidedError as error:
        return _undecided(str(error))


def check_limit(limit: object) -> None:
    """Raises `PlanError` for what is not a number of seconds, at least 0, that the search may take."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise PlanError(f"limit {quoted(limit)}: give the seconds that the search may take, a number of at least 0")


def _undecided(why: str) -> Fewest:
    return Fewest(f"not decided: {why}", (), holds=False)


def _statement(plan: Plan, launches: int) -> str:
    return (
        f"no plan with fewer than {_launches(launches)} receives at most {plan.received_bytes} bytes on the worst "
        f"device within {plan.peak_bytes} bytes"
    )


def _launches(count: int) -> str:
    return f"{count} launch{'' if count == 1 else 'es'}"


def _without_search(plan: Plan) -> Fewest | None:
    """The verdict on a plan of no launches, and on one of a single launch that has something to receive."""
    if plan.launches == 0:
        return _no_launch()
    return _one_launch(plan) if plan.launches == 1 and plan.lower_bound_bytes > 0 else None


def _no_launch() -> Fewest:
    return Fewest("nothing is launched", ())


def _one_launch(plan: Plan) -> Fewest:
    why = f"some device receives {plan.lower_bound_bytes} bytes in any plan, and nothing is received without a launch"
    return Fewest(_statement(plan, 1), (why,))


_ONE_SEARCH = threading.Lock()
"""Searches share z3's main context, in which two threads at once would end the process."""


def _search_alone(plan: Plan, deadline: float) -> Fewest:
    """Searches when no other thread does; raises `TimeoutError` if its turn does not come by the deadline."""
    if not _ONE_SEARCH.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
        raise TimeoutError("another thread searches")
    try:
        return _searched(plan, deadline)
    finally:
        _ONE_SEARCH.release()


def _searched(plan: Plan, deadline: float) -> Fewest:
    """Searches for a shorter plan, then for one that is shorter still, until there is none."""
    space, best = space_of(plan), plan
    try:
        while best.launches > min(1, best.lower_bound_bytes):
            shorter, verdict = _shorter(plan, space, best.launches, deadline)
            if shorter is None:
                return verdict if best is plan else _improved(best, verdict)
            best = shorter
    except (TimeoutError, UndecidedError):
        if best is plan:
            raise
        return _improved(best, _undecided("whether there are fewer still"))
    return _improved(best, _one_launch(plan) if best.launches else _no_launch())


def _improved(better: Plan, fewer: Fewest) -> Fewest:
    """The verdict that a better plan exists, with the verdict on whether there are fewer launches still."""
    statement = f"fewer launches exist:\n{indent(str(better), '    ')}"
    return Fewest(statement, (fewer.statement, *fewer.argument), fewer.claims, holds=False, better=better)


def _shorter(plan: Plan, space: Space, launches: int, deadline: float) -> tuple[Plan | None, Fewest]:
    """A plan with fewer than `launches` launches, or None and the verdict that there is none."""
    size = sum(map(len, space.holds)) ** 2 * launches
    if size > MOST_CHOICES:
        raise UndecidedError(f"a search over {launches - 1} steps on {len(space.factors)} sub-axes is too large")
    priced, conditions = 0, ""
    for length in range(min(1, launches - 1), launches):
        if time.monotonic() > deadline:
            raise TimeoutError
        search = Search(space, _goal(plan, space, launches - 1), length)
        better, learnt = _chain(plan, launches, search, deadline)
        priced += learnt
        if better is not None:
            return better, _undecided("whether there are fewer still")
        conditions = search.solver.to_smt2()
    claim = symbolic.Absent(f"{_launches(launches - 1)} or fewer", conditions)
    return None, Fewest(_statement(plan, launches), tuple(_range(space, launches, priced)), (claim,))


def _goal(plan: Plan, space: Space, launches: int) -> Goal:
    """The plan's figures in elements: every buffer has a whole number of them."""
    one = plan.source.nbytes(1)
    ends = space.state(plan.source), space.state(plan.target)
    return Goal(*ends, plan.received_bytes // one, plan.peak_bytes // one, launches, plan.donate)


def _range(space: Space, launches: int, priced: int) -> Iterator[str]:
    """The lines of the argument that say what was searched."""
    yield (
        f"searched: slices, and at most {launches - 1} of {', '.join(k for k in kinds(space) if k != 'boxes')}, "
        f"in any order, whole or in pieces, between any even layouts of shape {space.shape} on the sub-axes {space}"
    )
    yield "an exchange counts a launch for each of its rounds; what a step costs is what its typing rule says"
    if priced:
        yield f"{priced} steps that z3 chose were priced by their rules, and turned out too expensive"


def _chain(plan: Plan, launches: int, search: Search, deadline: float) -> tuple[Plan | None, int]:
    """The first plan that the search finds, if any, and the number of steps that had to be priced.

    Each iteration excludes a step between two layouts or makes it more expensive, so the loop ends.
    """
    learnt, one = 0, plan.source.nbytes(1)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        choices = search.find(left)
        if choices is None:
            return None, learnt
        steps = [_priced(search.space, chosen, plan, launches - 1) for chosen in choices]
        better = None if None in steps else _plan(plan, launches, [step for step in steps if step is not None])
        if better is not None:
            return better, learnt
        for chosen, step in zip(choices, steps, strict=True):
            search.learn(chosen, None if step is None else (step.received_bytes // one, step.launches))
        learnt += len(choices)


def _priced(space: Space, chosen: Chosen, plan: Plan, most: int) -> Step | None:
    """The step as its typing rule prices it, with the fewest launches that fit."""
    kind = "exchange" if chosen.kind == "boxes" else chosen.kind
    operand, result = space.layout(chosen.before), space.layout(chosen.after)
    kept = plan.source.tile_bytes if chosen.retained else 0
    return cheapest(kind, operand, result, kept, plan.peak_bytes, most, plan.donate)


def _plan(plan: Plan, launches: int, steps: Sequence[Step]) -> Plan | None:
    """The plan of these steps, if it has fewer launches than given within the bytes and memory of `plan`."""
    specs = [StepSpec(step.kind, step.result, step.mode) for step in steps]
    try:
        better = chain(plan.source, plan.target, specs, plan.donate)
    except ReshardError:
        return None
    fits = better.received_bytes <= plan.received_bytes and better.peak_bytes <= plan.peak_bytes
    return better if fits and better.launches < launches else None
