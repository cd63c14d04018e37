"""Fewest launches: layouts as choices, the conditions that z3 gets, and the search.

On small meshes no plan of the planner's has a shorter rival, and a worse plan is detected. The conditions are compared
with the typing rules on all pairs of small layouts, and the search with another one, which lists all layouts and asks
the rules for every step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from contextlib import suppress
from functools import cache

import pytest

import reshard as rs
from reshard.errors import PlanError, StepError, UndecidedError
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import StepMode
from reshard.proofs import Fewest, fewest, launches, prove
from reshard.proofs.launches import (
    Chosen,
    Goal,
    Hold,
    Search,
    Space,
    cheapest_step,
    space_of,
)
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim
from tests.layouts import contiguous_layouts, divisible_shape

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")

FOUR, SIX, EIGHT = Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=2, y=2, z=2)
IDLE, SUMMED = -1, -2


def every_layout(mesh: Mesh, shape: tuple[int, ...], partial: bool = False) -> list[Layout]:
    """All even layouts of whole prime axes; an axis holds any digit of any dim, nothing, or, if `partial`, summands."""
    axes = [mesh.sub_axis(name) for name in mesh.axes]
    layouts = set()
    for choice in itertools.product(*(places(axis.size, shape, partial) for axis in axes)):
        held = list(zip(axes, choice, strict=True))
        dims = [nested([(low, axis) for axis, (d, low) in held if d == at], n) for at, n in enumerate(shape)]
        if None not in dims:
            layouts.add(Layout(mesh, tuple(dims), "int8", "sum", tuple(axis for axis, (d, _) in held if d == SUMMED)))
    return sorted(layouts, key=str)


def places(radix: int, shape: tuple[int, ...], partial: bool) -> list[tuple[int, int]]:
    """What an axis of a prime size can hold: (dim, place)."""
    free = [(IDLE, 0), (SUMMED, 0)] if partial else [(IDLE, 0)]
    return free + [(d, low) for d, n in enumerate(shape) for low in range(1, n + 1) if n % (low * radix) == 0]


def nested(held: list, size: int) -> Dim | None:
    """The dim whose digits at these places are held; None if they do not nest."""
    digits, at = [], size
    for low, axis in sorted(held, reverse=True):
        if at % (low * axis.size):
            return None
        digits += [Digit(at // (low * axis.size), None), Digit(axis.size, axis)]
        at = low
    return Dim((*digits, Digit(at, None)), size)


def plan_of(source: str, *moves: tuple[str, str], mesh: Mesh, donate: bool = False) -> Plan:
    """The plan of the given steps: (kind, result)."""
    specs = [StepSpec(kind, Layout.parse(text, mesh)) for kind, text in moves]
    return chain(Layout.parse(source, mesh), specs[-1].result, specs, donate)


# ---- layouts as choices


def space(text: str, mesh: Mesh) -> Space:
    return space_of(Plan(*[Layout.parse(text, mesh)] * 2, ()))


@pytest.mark.parametrize(("mesh", "shape"), [(FOUR, (4, 4)), (SIX, (6, 6)), (SIX, (12,))], ids=str)
def test_every_layout_is_one_state(mesh: Mesh, shape: tuple[int, ...]):
    layouts = every_layout(mesh, shape, partial=True)
    summed = max(layouts, key=lambda layout: len(layout.partial))
    choices = space_of(Plan(summed, summed, ()))
    assert len({choices.state(layout) for layout in layouts}) == len(layouts)
    assert [choices.layout(choices.state(layout)) for layout in layouts] == layouts


@pytest.mark.parametrize(
    ("source", "target", "meshes", "why"),
    [
        ("f32[{x}2]", "f32[{y}2]", (Mesh(x=4), Mesh(y=4)), "several meshes"),
        ("f32[{x}3/10]", "f32[10]", (Mesh(x=4),) * 2, "even"),
        ("f32[0]", "f32[0]", (Mesh(x=4),) * 2, "not empty"),
        ("int4[{x}2]", "int4[8]", (Mesh(x=4),) * 2, "below a byte"),
        ("f32[{x:(1)2}3]", "f32[{x:(1)3}2]", (Mesh(x=6),) * 2, "overlap"),
    ],
)
def test_layouts_that_are_no_such_choices_are_refused(source: str, target: str, meshes: tuple[Mesh, Mesh], why: str):
    ends = [Layout.parse(text, mesh) for text, mesh in zip((source, target), meshes, strict=True)]
    plan = Plan(*ends, ()) if source == target else chain(*ends, [StepSpec("exchange", ends[1])])
    with pytest.raises(UndecidedError, match=why):
        space_of(plan)


# ---- the conditions are the typing rules


def figures(kind: str, one: Layout, other: Layout) -> tuple[int, int, int] | None:
    try:
        return tuple(check_step(kind, one, other))
    except StepError:
        return None


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "shape", "partial"),
    [
        pytest.param(FOUR, (4, 4), False, marks=pytest.mark.slow),
        pytest.param(SIX, (6, 6), False, marks=pytest.mark.sweep),
        (SIX, (12,), False),
        (FOUR, (4,), True),
        (SIX, (6,), True),
    ],
    ids=str,
)
def test_the_conditions_are_the_typing_rules(mesh: Mesh, shape: tuple[int, ...], partial: bool):
    """For all pairs of layouts and all kinds: typed if and only if the rule says so, at the rule's price."""
    layouts = every_layout(mesh, shape, partial)
    summed = max(layouts, key=lambda layout: len(layout.partial))
    space, solver = space_of(Plan(summed, summed, ())), z3.Solver()
    ends = [launches.UnknownLayout(space, name, solver.add) for name in "ab"]
    between = launches.Between(*ends, "t")
    rules = {kind: rule(between) for kind, rule in launches.RULES.items() if kind in launches.step_kinds(space)}
    for one, other in itertools.product(layouts, layouts):
        solver.push()
        solver.add(*ends[0].equals(space.state(one)), *ends[1].equals(space.state(other)))
        free = solver.check(launches.slice_condition(between)) == z3.sat
        assert free == (figures("slice", one, other) is not None)
        prices = {kind: price_of(solver, *rule) for kind, rule in rules.items()}
        boxes = prices.pop("boxes", None)
        real = {kind: figures(kind, one, other) for kind in prices}
        if boxes is not None:
            assert prices.pop("exchange") is None
            assert all(a <= b for a, b in zip(boxes, real.pop("exchange"), strict=True))
        assert prices == real, f"{one} -> {other}"
        solver.pop()


def price_of(solver, typed, price) -> tuple[int, int, int] | None:
    solver.push()
    solver.add(typed)
    fits = solver.check() == z3.sat
    model = solver.model() if fits else None
    solver.pop()
    return tuple(model.eval(z3.IntVal(0) + p, model_completion=True).as_long() for p in price) if fits else None


def test_unknown_layouts_are_exactly_the_layouts():
    """As many solutions as there are layouts, each with the tile of its layout."""
    layouts = every_layout(SIX, (12,))
    space, solver = space_of(Plan(layouts[0], layouts[0], ())), z3.Solver()
    unknown = launches.UnknownLayout(space, "s", solver.add)
    states = {}
    while solver.check() == z3.sat:
        state = unknown.read(solver.model())
        states[state] = solver.model().eval(unknown.tile).as_long()
        solver.add(z3.Not(z3.And(*unknown.equals(state))))
    assert states == {space.state(layout): layout.tile_shape[0] for layout in layouts}
    assert launches.order_holds(space)[0] == Hold(0, 6)


# ---- the cheapest way to run a step


PAIRS = [
    (Mesh(x=3), "f32[{x}5, 6]", "f32[15, {x}2]"),
    (Mesh(x=2), "f32[{x}4, 8]", "f32[8, {x}4]"),
    (Mesh(x=2, y=3), "f32[{x}6, 7]", "f32[{y}4, 7]"),
    (Mesh(x=5), "f32[{x}3]", "f32[15]"),
]


def every_way(kind: str, operand: Layout, result: Layout, donate: bool) -> list[Step]:
    """All steps of a kind in every chunk, number of parts, and in place."""
    sizes = [None, *range(1, math.prod(operand.tile_shape) + 1)]
    modes = [StepMode(chunk, in_place) for chunk in sizes for in_place in {False, donate}]
    modes += [StepMode(None, in_place, n) for n in range(2, 20) for in_place in {False, donate}]
    steps = []
    for mode in modes:
        try:
            steps.append(Step(kind, operand, result, mode))
        except StepError:
            continue
    return steps


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "exchange"])
@pytest.mark.parametrize(("mesh", "source", "target"), PAIRS)
def test_no_way_that_fits_has_fewer_launches(mesh: Mesh, source: str, target: str, kind: str, donate: bool):
    operand, result = Layout.parse(source, mesh), Layout.parse(target, mesh)
    every = every_way(kind, operand, result, donate)
    for live in sorted({step.live_bytes for step in every} | {step.live_bytes - 1 for step in every}):
        for most in (1, 2, 3, 5, 12):
            fitting = [step.launches for step in every if step.live_bytes <= live and step.launches <= most]
            step = cheapest_step(kind, operand, result, 0, live, most, donate)
            assert (step.launches if step else None) == min(fitting, default=None), f"{live} bytes, {most} launches"
            assert step is None or step.live_bytes <= live


def test_a_large_message_is_not_cut_in_all_ways():
    operand, result = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}128, 256]", "f32[256, {x}128]"))
    with pytest.raises(UndecidedError, match="messages of 16384 elements are not cut in all ways"):
        cheapest_step("exchange", operand, result, 0, 1, 4, donate=False)


# ---- searches of a fixed length


ENOUGH = 10_000


def searched(
    source: str,
    target: str,
    mesh: Mesh,
    length: int,
    *,
    received: int = ENOUGH,
    live: int = ENOUGH,
    launches: int = ENOUGH,
    donate: bool = False,
) -> tuple[Space, Search]:
    ends = [Layout.parse(text, mesh) for text in (source, target)]
    space = space_of(Plan(ends[0], ends[0], ()))
    return space, Search(space, Goal(*map(space.state, ends), received, live, launches, donate), length)


def kinds_of(choices: list[Chosen]) -> list[str]:
    return [chosen.kind for chosen in choices]


def test_a_kept_source_counts_from_the_second_step_on():
    """16 elements of 4 summands: a reduce_scatter has 16 + 4 live, then an all_gather 4 + 16, and a kept source 16."""
    pair = "f32[4, 4] + sum{x}{y}", "f32[4, 4]", FOUR
    _, donated = searched(*pair, 2, live=20, launches=2, donate=True)
    assert [(chosen.kind, chosen.retained) for chosen in donated.find(60)] == [
        ("reduce_scatter", False),
        ("all_gather", False),
    ]
    assert searched(*pair, 2, live=19, launches=2, donate=True)[1].find(60) is None
    assert kinds_of(searched(*pair, 2, live=32, launches=2)[1].find(60)) == ["all_reduce"]
    assert searched(*pair, 2, live=31, launches=2)[1].find(60) is None
    for live in (35, 36):
        _, search = searched(*pair, 2, live=live, launches=2)
        while (choices := search.find(60)) is not None and "all_reduce" in kinds_of(choices):
            search.learn(next(chosen for chosen in choices if chosen.kind == "all_reduce"), None)
        assert (choices is not None) == (live == 36)
    assert [(chosen.kind, chosen.retained) for chosen in choices] == [("reduce_scatter", False), ("all_gather", True)]


# ---- the search


SMALL = (FOUR, SIX, EIGHT)
FIGURES = ("received_bytes", "launches", "peak_bytes")


def decided(verdict: Fewest) -> bool:
    """Whether it is also decided for a shorter plan that there are no fewer launches still."""
    return not any(line.startswith("not decided") for line in (verdict.statement, *verdict.argument))


# ---- all pairs of small meshes ---------------------------------------------------------------------------


def renamed(layout: Layout, names: dict[str, str]) -> Layout:
    held = [[d.axis._replace(axis=names[d.axis.axis]) for d in dim.digits if d.axis] for dim in layout.dims]
    return Layout.tiled(layout.mesh, layout.shape, layout.dtype, held)


def renamings(mesh: Mesh) -> list[dict[str, str]]:
    """The permutations of the axes that keep all sizes."""
    every = (dict(zip(mesh.axes, order, strict=True)) for order in itertools.permutations(mesh.axes))
    return [names for names in every if all(mesh.axes[a] == mesh.axes[b] for a, b in names.items())]


@cache
def classes(mesh: Mesh) -> dict[tuple[Layout, Layout], list[tuple[Layout, Layout]]]:
    """All pairs of different contiguous layouts of rank 2, grouped by what is equal up to the names of axes."""
    layouts = list(contiguous_layouts(mesh, divisible_shape(mesh, 2)))
    other = {(layout, n): renamed(layout, names) for layout in layouts for n, names in enumerate(renamings(mesh))}
    groups: dict[tuple[Layout, Layout], list[tuple[Layout, Layout]]] = {}
    for pair in itertools.permutations(layouts, 2):
        every = [(other[pair[0], n], other[pair[1], n]) for n in range(len(renamings(mesh)))]
        groups.setdefault(min(every, key=lambda p: (str(p[0]), str(p[1]))), []).append(pair)
    return groups


def test_the_classes_have_all_pairs():
    assert [sum(map(len, classes(mesh).values())) for mesh in SMALL] == [11 * 10, 11 * 10, 49 * 48]


@pytest.mark.parametrize(
    ("mesh", "share"),
    [
        (FOUR, 1),
        pytest.param(SIX, 6, marks=pytest.mark.slow),
        pytest.param(EIGHT, 1, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_no_pair_has_a_plan_of_fewer_launches(mesh: Mesh, share: int):
    """At the same bytes and memory; the other pairs of a class have the same plan under other names."""
    searched, every = 0, list(classes(mesh).items())
    for (source, target), same in random.Random(0).sample(every, len(every) // share):
        plan = rs.plan(source, target)
        for pair in same:
            assert all(getattr(rs.plan(*pair), name) == getattr(plan, name) for name in FIGURES)
        verdict = fewest(plan, limit=600)
        searched += bool(verdict.claims)
        assert verdict.holds, f"{plan}\n{verdict.statement}"
    assert searched > 5


# ---- a worse plan is detected ---------------------------------------------------------------------------


WORSE = [
    plan_of("f32[{x}{y}2, 8]", ("all_to_all", "f32[{x}4, {y}4]"), ("all_to_all", "f32[8, {y}{x}2]"), mesh=FOUR),
    plan_of("f32[{x}{y}2, 8]", ("all_gather", "f32[{x}4, 8]"), ("all_gather", "f32[8, 8]"), mesh=FOUR),
    plan_of("f32[{x}{y}, 6]", ("exchange", "f32[{y}{x}, 6]"), ("exchange", "f32[6, {x}{y}]"), mesh=SIX),
    plan_of(
        "f32[8, {x}4]", ("all_gather", "f32[8, 8]"), ("slice", "f32[8, {y}4]"), ("permute", "f32[8, {x}4]"), mesh=FOUR
    ),
    plan_of("f32[8, 8] + sum{x}{y}", ("all_reduce", "f32[8, 8] + sum{y}"), ("all_reduce", "f32[8, 8]"), mesh=FOUR),
    plan_of(
        "f32[8, 8] + sum{x}{y}",
        ("reduce_scatter", "f32[{x}4, 8] + sum{y}"),
        ("reduce_scatter", "f32[{x}{y}2, 8]"),
        mesh=FOUR,
    ),
]
FEWEST = [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(("plan", "launches"), list(zip(WORSE, FEWEST, strict=True)))
def test_a_worse_plan_is_detected(plan: Plan, launches: int):
    verdict = fewest(plan, limit=600)
    assert isinstance(verdict.better, Plan) and not verdict.holds
    assert verdict.better.launches == launches < plan.launches
    assert (verdict.better.source, verdict.better.target) == (plan.source, plan.target)
    assert all(line in verdict.statement for line in str(verdict.better).splitlines())
    assert verdict.better.received_bytes <= plan.received_bytes and verdict.better.peak_bytes <= plan.peak_bytes


def test_memory_can_make_a_longer_plan_the_shortest():
    """One launch is enough only if its messages may be staged whole."""
    mesh = Mesh(x=2)
    source, target = Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[8, {x}4]", mesh)
    free = rs.plan(source, target)
    tight = rs.plan(source, target, budget=free.peak_bytes - 1)
    assert free.launches == 1 < tight.launches
    assert fewest(tight).holds
    longer = rs.plan(source, target, budget=tight.peak_bytes - 1)
    assert tight.launches < longer.launches
    assert fewest(longer).holds
    loose = chain(source, target, [StepSpec(step.kind, step.result, StepMode(chunk=1)) for step in longer.steps])
    assert fewest(loose).better.launches < loose.launches


def test_a_proof_says_what_was_searched():
    plan = rs.plan(Layout.parse("f32[{x}4, {y}4]", EIGHT), Layout.parse("f32[{y}4, 8]", EIGHT))
    assert prove(plan).launches is None
    proof = prove(plan, launches=True)
    assert isinstance(proof.launches, Fewest) and proof.launches.holds
    text = proof.explain()
    assert "launches: no plan with fewer than 2 launches receives at most 128 bytes on the worst device" in text
    assert "searched: slices, and at most 1 of all_gather, all_to_all, permute, exchange" in text
    last = proof.to_smt2().split("(reset)\n")[-1]
    solver = z3.Solver()
    solver.from_string(last)
    assert solver.check() == z3.unsat


@pytest.mark.parametrize(
    ("source", "target", "mesh", "why"),
    [
        ("f32[{x}3/10]", "f32[{y}5]", Mesh(x=4, y=2), "even"),
        ("int4[{x}4, {y}4]", "int4[{y}4, 8]", EIGHT, "below a byte"),
        ("f32[{x:(1)2}3, {x:(2)3}2]", "f32[{x:(1)3}2, 6]", Mesh(x=6), "overlap"),
    ],
)
def test_what_is_not_searched_is_not_decided(source: str, target: str, mesh: Mesh, why: str):
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert plan.launches > 1
    verdict = fewest(plan, limit=600)
    assert (verdict.holds, verdict.better, verdict.claims) == (False, None, ())
    assert verdict.statement.startswith("not decided: ") and why in verdict.statement


def test_a_time_limit_is_kept():
    plan = rs.plan(Layout.parse("f32[{x}4, {y}4]", EIGHT), Layout.parse("f32[{y}4, 8]", EIGHT))
    assert fewest(plan, limit=0).statement == "not decided: the search was ended after 0 s"


def test_options_are_checked_whether_a_search_follows_or_not():
    plan = rs.plan(Layout.parse("f32[{x}4, {y}4]", EIGHT), Layout.parse("f32[{y}4, 8]", EIGHT))
    for limit in ("soon", -1, True, float("nan")):
        with pytest.raises(PlanError, match=f"limit {limit!r}: give the seconds"):
            rs.prove(plan, limit=limit)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="launches 'no': give True or False"):
        rs.prove(plan, launches="no")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_search_that_is_too_large_is_not_started():
    mesh = Mesh(dcn=4, x=16, y=32, z=32)
    source, target = "bf16[{dcn}{x}{y}64, {z}128]", "bf16[{z}{y}128, {dcn}{x}64]"
    verdict = fewest(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh)))
    assert "too large" in verdict.statement


# ---- the search against another one --------------------------------------------------------------------------


Edge = tuple[int, int, int]
"""Bytes received, launches, and bytes live without the source beside."""


@cache
def edges(mesh: Mesh, shape: tuple[int, ...], donate: bool) -> dict[Layout, list[tuple[Layout, Edge]]]:
    """All steps between all layouts, in all ways."""
    layouts = every_layout(mesh, shape)
    graph: dict[Layout, list[tuple[Layout, Edge]]] = {layout: [] for layout in layouts}
    for one, other in itertools.permutations(layouts, 2):
        kinds = "slice", "all_gather", "all_to_all", "permute", "exchange"
        every = itertools.chain.from_iterable(every_way(kind, one, other, donate) for kind in kinds)
        figures = {(s.received_bytes, s.launches, s.live_bytes) for s in every}
        graph[one] += [(other, edge) for edge in sorted(figures)]
    return graph


def shortest(plan: Plan) -> int:
    """Fewest launches from source to target within a plan's bytes and memory, by trying everything."""
    every = edges(plan.source.mesh, plan.source.shape, plan.donate)
    received = {(plan.source, True): {0: 0}}
    kept = 0 if plan.donate else plan.source.tile_bytes
    open_ends = [(0, 0, plan.source, True)]
    while open_ends:
        launched, before, at, first = open_ends.pop()
        for result, (more, launched_too, live) in every[at]:
            total, count = before + more, launched + launched_too
            if total > plan.received_bytes or count > plan.launches or live + (0 if first else kept) > plan.peak_bytes:
                continue
            known = received.setdefault((result, False), {})
            if all(known.get(n, total + 1) > total for n in range(count + 1)):
                known[count] = total
                open_ends.append((count, total, result, False))
    return min(received.get((plan.target, False), {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shape", "donate"),
    [
        (FOUR, (4, 4), True),
        pytest.param(FOUR, (4, 4), False, marks=pytest.mark.sweep),
        *(pytest.param(SIX, (6, 6), each, marks=pytest.mark.sweep) for each in (False, True)),
    ],
    ids=str,
)
def test_the_search_finds_what_trying_everything_finds(mesh: Mesh, shape: tuple[int, ...], donate: bool):
    """For detours over a random layout, which often have shorter rivals, and for plans with tight budgets."""
    choose = random.Random(5)
    layouts = every_layout(mesh, shape)
    verdicts: Counter = Counter()
    while min(verdicts[True], verdicts[False]) < 8:
        plan = detour(choose, *choose.sample(layouts, 3), donate)
        if not 1 < plan.launches <= 5:
            continue
        verdict = fewest(plan, limit=600)
        least = plan.launches if verdict.better is None else verdict.better.launches
        assert decided(verdict), verdict.statement
        assert least == shortest(plan), f"{plan}\n{verdict.statement}"
        verdicts[verdict.holds] += 1


def detour(choose: random.Random, source: Layout, between: Layout, target: Layout, donate: bool) -> Plan:
    if choose.random() < 0.4:
        least = rs.plan(source, target, donate=donate)
        with suppress(rs.errors.BudgetError):
            return rs.plan(source, target, budget=choose.randint(least.floor_bytes, least.peak_bytes), donate=donate)
    legs = [rs.plan(source, between), rs.plan(between, target)]
    specs = [StepSpec(step.kind, step.result, step.mode) for leg in legs for step in leg.steps]
    return chain(source, target, specs, donate)
