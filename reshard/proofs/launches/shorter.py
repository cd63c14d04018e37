"""The search for a plan with fewer launches, length by length, until there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from textwrap import indent

from reshard.errors import PlanError, ReshardError, UndecidedError, quoted
from reshard.proofs import symbolic
from reshard.proofs.launches.encoding import kinds
from reshard.proofs.launches.prices import cheapest
from reshard.proofs.launches.search import Chosen, Goal, Search
from reshard.proofs.launches.space import Space, space_of
from reshard.proofs.proof import Fewest
from reshard.types.plan import Plan, Step, StepSpec, chain

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
