"""Fewest launches: no plan of the planner's on small meshes has a shorter rival, and a worse plan is detected.

The search is compared with another one, which lists all layouts and asks the typing rules for every step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest

import reshard as rs
from reshard.errors import PlanError, StepError
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules import split_steps
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.proofs import Fewest, fewest, prove
from reshard.types import Layout, Mesh
from tests.layouts import contiguous_layouts, divisible_shape
from tests.proofs.launches.small import EIGHT, FOUR, SIX, every_layout, plan_of

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")

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


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [FOUR, SIX, EIGHT], ids=str)
def test_no_pair_has_a_plan_of_fewer_launches(mesh: Mesh):
    """At the same bytes and memory; the other pairs of a class have the same plan under other names."""
    searched = 0
    for (source, target), same in classes(mesh).items():
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
    mesh = Mesh(dcn=64, x=16, y=32, z=32)
    source, target = "bf16[{dcn}{x}{y}64, {z}128]", "bf16[{z}{y}2048, {dcn}{x}4]"
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
        figures = {(s.received_bytes, s.launches, s.live_bytes) for s in steps(one, other, donate)}
        graph[one] += [(other, edge) for edge in sorted(figures)]
    return graph


def steps(one: Layout, other: Layout, donate: bool) -> Iterator[Step]:
    caps = [None, *range(1, math.prod(other.tile_shape))]
    chunks = [StepMode(cap, in_place) for cap in caps for in_place in ((False, True) if donate else (False,))]
    ways = [PLAIN, *(StepMode(parts=n) for n in split_steps.possible_counts(one, other))]
    for kind in ("slice", "all_gather", "all_to_all", "permute", "exchange"):
        for mode in [*ways, *(chunks if kind == "exchange" else [])]:
            try:
                yield Step(kind, one, other, mode)
            except StepError:
                continue


def shortest(plan: Plan) -> int:
    """Fewest launches from source to target within a plan's bytes and memory, by trying everything."""
    every = edges(plan.source.mesh, plan.source.shape, plan.donate)
    received = {(plan.source, True): {0: 0}}
    kept = 0 if plan.donate else plan.source.tile_bytes
    open_ends = [(0, 0, plan.source, True)]
    while open_ends:
        launched, before, at, first = open_ends.pop()
        for result, (more, launches, live) in every[at]:
            total, count = before + more, launched + launches
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
        (FOUR, (4, 4), False),
        pytest.param(FOUR, (4, 4), True, marks=pytest.mark.slow),
        pytest.param(SIX, (6, 6), False, marks=pytest.mark.slow),
        pytest.param(SIX, (6, 6), True, marks=pytest.mark.slow),
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
