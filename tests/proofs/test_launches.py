"""Fewest launches: no plan of the planner's on small meshes has a shorter rival, and a worse plan is found out.

The search is held against another one, which lists all layouts and asks the typing rules for every step.
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
from reshard.errors import StepError
from reshard.proofs import Fewest, fewest, prove
from reshard.proofs.launches import encoding
from reshard.proofs.launches.space import Space, State, space_of
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules import parts
from reshard.types.rules.checker import check_step
from reshard.types.rules.cost import PLAIN, StepMode
from tests.layouts import contiguous_layouts, divisible_shape

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")

SMALL = (Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=2, y=2, z=2))
FIGURES = ("received_bytes", "launches", "peak_bytes")


def decided(found: Fewest) -> bool:
    """Of a shorter plan, too, whether there are fewer launches still."""
    return not any(line.startswith("not decided") for line in (found.statement, *found.argument))


# ---- all pairs of small meshes ---------------------------------------------------------------------------


def renamed(layout: Layout, names: dict[str, str]) -> Layout:
    held = [[d.axis._replace(axis=names[d.axis.axis]) for d in dim.digits if d.axis] for dim in layout.dims]
    return Layout.tiled(layout.mesh, layout.shape, layout.dtype, held)


def renamings(mesh: Mesh) -> list[dict[str, str]]:
    """Axes of one size change names."""
    every = (dict(zip(mesh.axes, order, strict=True)) for order in itertools.permutations(mesh.axes))
    return [names for names in every if all(mesh.axes[a] == mesh.axes[b] for a, b in names.items())]


@cache
def classes(mesh: Mesh) -> dict[tuple[Layout, Layout], list[tuple[Layout, Layout]]]:
    """All pairs of different contiguous layouts of rank 2, by one of each class: others are it under other names."""
    layouts = list(contiguous_layouts(mesh, divisible_shape(mesh, 2)))
    other = {(layout, n): renamed(layout, names) for layout in layouts for n, names in enumerate(renamings(mesh))}
    found: dict[tuple[Layout, Layout], list[tuple[Layout, Layout]]] = {}
    for pair in itertools.permutations(layouts, 2):
        every = [(other[pair[0], n], other[pair[1], n]) for n in range(len(renamings(mesh)))]
        found.setdefault(min(every, key=lambda p: (str(p[0]), str(p[1]))), []).append(pair)
    return found


def test_all_pairs_are_there():
    assert [sum(map(len, classes(mesh).values())) for mesh in SMALL] == [11 * 10, 11 * 10, 49 * 48]


@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_no_pair_has_a_plan_of_fewer_launches(mesh: Mesh):
    """At the same bytes and memory; the other pairs of a class have the same plan under other names."""
    searched = 0
    for (source, target), same in classes(mesh).items():
        plan = rs.plan(source, target)
        for pair in same:
            assert all(getattr(rs.plan(*pair), name) == getattr(plan, name) for name in FIGURES)
        found = fewest(plan, limit=600)
        searched += bool(found.claims)
        assert found.holds, f"{plan}\n{found.statement}"
    assert searched > 5


# ---- a worse plan is found out ---------------------------------------------------------------------------


def by(source: str, *moves: tuple[str, str], mesh: Mesh, donate: bool = False) -> Plan:
    made = [StepSpec(kind, Layout.parse(text, mesh)) for kind, text in moves]
    return chain(Layout.parse(source, mesh), made[-1].result, made, donate)


FOUR, SIX, _ = SMALL
WORSE = [
    by("f32[{x}{y}2, 8]", ("all_to_all", "f32[{x}4, {y}4]"), ("all_to_all", "f32[8, {y}{x}2]"), mesh=FOUR),
    by("f32[{x}{y}2, 8]", ("all_gather", "f32[{x}4, 8]"), ("all_gather", "f32[8, 8]"), mesh=FOUR),
    by("f32[{x}{y}, 6]", ("exchange", "f32[{y}{x}, 6]"), ("exchange", "f32[6, {x}{y}]"), mesh=SIX),
    by("f32[8, {x}4]", ("all_gather", "f32[8, 8]"), ("slice", "f32[8, {y}4]"), ("permute", "f32[8, {x}4]"), mesh=FOUR),
    by("f32[8, 8] + sum{x}{y}", ("all_reduce", "f32[8, 8] + sum{y}"), ("all_reduce", "f32[8, 8]"), mesh=FOUR),
    by(
        "f32[8, 8] + sum{x}{y}",
        ("reduce_scatter", "f32[{x}4, 8] + sum{y}"),
        ("reduce_scatter", "f32[{x}{y}2, 8]"),
        mesh=FOUR,
    ),
]
FEWEST = [1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(("plan", "launches"), list(zip(WORSE, FEWEST, strict=True)))
def test_a_worse_plan_is_found_out(plan: Plan, launches: int):
    found = fewest(plan, limit=600)
    assert isinstance(found.better, Plan) and not found.holds
    assert found.better.launches == launches < plan.launches
    assert (found.better.source, found.better.target) == (plan.source, plan.target)
    assert all(line in found.statement for line in str(found.better).splitlines())
    assert found.better.received_bytes <= plan.received_bytes and found.better.peak_bytes <= plan.peak_bytes


def test_memory_can_make_a_longer_plan_the_shortest():
    """One launch does, if its messages may be staged whole."""
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
    mesh = SMALL[2]
    plan = rs.plan(Layout.parse("f32[{x}4, {y}4]", mesh), Layout.parse("f32[{y}4, 8]", mesh))
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
        ("int4[{x}4, {y}4]", "int4[{y}4, 8]", SMALL[2], "below a byte"),
        ("f32[{x:(1)2}3, {x:(2)3}2]", "f32[{x:(1)3}2, 6]", Mesh(x=6), "overlap"),
    ],
)
def test_what_is_not_searched_is_not_decided(source: str, target: str, mesh: Mesh, why: str):
    plan = rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert plan.launches > 1
    found = fewest(plan, limit=600)
    assert (found.holds, found.better, found.claims) == (False, None, ())
    assert found.statement.startswith("not decided: ") and why in found.statement


def test_a_limit_of_time_is_kept():
    mesh = Mesh(x=2, y=2, z=2)
    plan = rs.plan(Layout.parse("f32[{x}4, {y}4]", mesh), Layout.parse("f32[{y}4, 8]", mesh))
    assert fewest(plan, limit=0).statement == "not decided: the search was ended after 0 s"


def test_a_search_that_is_too_large_is_not_begun():
    mesh = Mesh(dcn=64, x=16, y=32, z=32)
    source, target = "bf16[{dcn}{x}{y}64, {z}128]", "bf16[{z}{y}2048, {dcn}{x}4]"
    found = fewest(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh)))
    assert "too large" in found.statement


# ---- the conditions against the rules ----------------------------------------------------------------------


def every_layout(mesh: Mesh, shape: tuple[int, ...], partial: bool = False) -> list[Layout]:
    """All even layouts of whole prime axes, which hold any digit of any dim, or nothing; with `partial` or summands."""
    axes = [mesh.sub_axis(name) for name in mesh.axes]
    found = set()
    for choice in itertools.product(*(places(axis.size, shape, partial) for axis in axes)):
        held = list(zip(axes, choice, strict=True))
        dims = [nested([(low, axis) for axis, (d, low) in held if d == at], n) for at, n in enumerate(shape)]
        if None not in dims:
            found.add(Layout(mesh, tuple(dims), "int8", "sum", tuple(axis for axis, (d, _) in held if d == SUMMED)))
    return sorted(found, key=str)


IDLE, SUMMED = -1, -2


def places(radix: int, shape: tuple[int, ...], partial: bool) -> list[tuple[int, int]]:
    free = [(IDLE, 0), (SUMMED, 0)] if partial else [(IDLE, 0)]
    return free + [(d, low) for d, n in enumerate(shape) for low in range(1, n + 1) if n % (low * radix) == 0]


def nested(held: list, size: int) -> Dim | None:
    digits, at = [], size
    for low, axis in sorted(held, reverse=True):
        if at % (low * axis.size):
            return None
        digits += [Digit(at // (low * axis.size), None), Digit(axis.size, axis)]
        at = low
    return Dim((*digits, Digit(at, None)), size)


def judged(kind: str, one: Layout, other: Layout) -> tuple[int, int, int] | None:
    try:
        return tuple(check_step(kind, one, other))
    except StepError:
        return None


@pytest.mark.parametrize(
    ("mesh", "shape", "partial"),
    [(FOUR, (4, 4), False), (SIX, (6, 6), False), (SIX, (12,), False), (FOUR, (4,), True), (SIX, (6,), True)],
    ids=str,
)
def test_the_conditions_are_the_typing_rules(mesh: Mesh, shape: tuple[int, ...], partial: bool):
    """For all pairs of layouts and all kinds: typed if and only if the rule says so, at the rule's price."""
    layouts = every_layout(mesh, shape, partial)
    summed = max(layouts, key=lambda layout: len(layout.partial))
    space, solver = space_of(Plan(summed, summed, ())), z3.Solver()
    stages = [encoding.UnknownLayout(space, name, solver.add) for name in "ab"]
    between = encoding.Between(*stages, "t")
    rules = {kind: rule(between) for kind, rule in encoding.RULES.items() if kind in encoding.kinds(space)}
    for one, other in itertools.product(layouts, layouts):
        solver.push()
        solver.add(*stages[0].equals(space.state(one)), *stages[1].equals(space.state(other)))
        free = solver.check(encoding.slices(between)) == z3.sat
        assert free == (judged("slice", one, other) is not None)
        found = {kind: costs(solver, *rule) for kind, rule in rules.items()}
        boxes = found.pop("boxes", None)
        real = {kind: judged(kind, one, other) for kind in found}
        if boxes is not None:
            assert found.pop("exchange") is None
            assert all(a <= b for a, b in zip(boxes, real.pop("exchange"), strict=True))
        assert found == real, f"{one} -> {other}"
        solver.pop()


def costs(solver, typed, price) -> tuple[int, int, int] | None:
    solver.push()
    solver.add(typed)
    fine = solver.check() == z3.sat
    model = solver.model() if fine else None
    solver.pop()
    return tuple(model.eval(z3.IntVal(0) + p, model_completion=True).as_long() for p in price) if fine else None


@pytest.mark.parametrize(
    ("mesh", "shape"), [(SMALL[1], (6, 12)), (Mesh(x=4, y=2), (8, 8)), (Mesh(x=6), (12, 6))], ids=str
)
def test_choices_are_layouts(mesh: Mesh, shape: tuple[int, ...]):
    """A layout is the choice that it is read as, sub-axes and strided digits too."""
    choose = random.Random(0)
    for _ in range(60):
        space = space_of(Plan(*[Layout(mesh, tuple(Dim((Digit(n, None),), n) for n in shape), "int8")] * 2, ()))
        state = random_state(choose, space)
        assert space.state(space.layout(state)) == state


def random_state(choose: random.Random, space: Space) -> State:
    while True:
        state = tuple(choose.choice([encoding.UNUSED, *holds]) for holds in space.holds)
        spans = [space.span(at, hold) for at, hold in enumerate(state) if hold.dim >= 0]
        if all(a.dim != b.dim or encoding.nest(a, b) for a, b in itertools.combinations(spans, 2)):
            return state


# ---- the search against another one --------------------------------------------------------------------------


Edge = tuple[int, int, int]
"""Bytes received, launches, and bytes live without what is kept beside."""


@cache
def edges(mesh: Mesh, shape: tuple[int, ...], donate: bool) -> dict[Layout, list[tuple[Layout, Edge]]]:
    """All steps between all layouts, in all ways."""
    layouts = every_layout(mesh, shape)
    found: dict[Layout, list[tuple[Layout, Edge]]] = {layout: [] for layout in layouts}
    for one, other in itertools.permutations(layouts, 2):
        figures = {(s.received_bytes, s.launches, s.live_bytes) for s in steps(one, other, donate)}
        found[one] += [(other, edge) for edge in sorted(figures)]
    return found


def steps(one: Layout, other: Layout, donate: bool) -> Iterator[Step]:
    caps = [None, *range(1, math.prod(other.tile_shape))]
    chunks = [StepMode(cap, in_place) for cap in caps for in_place in ((False, True) if donate else (False,))]
    ways = [PLAIN, *(StepMode(parts=n) for n in parts.counts(one, other))]
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


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("mesh", "shape"), [(FOUR, (4, 4)), (SIX, (6, 6))], ids=str)
def test_the_search_finds_what_trying_everything_finds(mesh: Mesh, shape: tuple[int, ...], donate: bool):
    """Detours over a random layout, often with shorter rivals, and plans with tight budgets."""
    choose = random.Random(5)
    layouts = every_layout(mesh, shape)
    verdicts: Counter = Counter()
    while min(verdicts[True], verdicts[False]) < 8:
        plan = detour(choose, *choose.sample(layouts, 3), donate)
        if not 1 < plan.launches <= 5:
            continue
        found = fewest(plan, limit=600)
        least = plan.launches if found.better is None else found.better.launches
        assert decided(found), found.statement
        assert least == shortest(plan), f"{plan}\n{found.statement}"
        verdicts[found.holds] += 1


def detour(choose: random.Random, source: Layout, between: Layout, target: Layout, donate: bool) -> Plan:
    if choose.random() < 0.4:
        least = rs.plan(source, target, donate=donate)
        with suppress(rs.errors.BudgetError):
            return rs.plan(source, target, budget=choose.randint(least.floor_bytes, least.peak_bytes), donate=donate)
    parts = [rs.plan(source, between), rs.plan(between, target)]
    moves = [StepSpec(step.kind, step.result, step.mode) for part in parts for step in part.steps]
    return chain(source, target, moves, donate)
