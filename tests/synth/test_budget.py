"""Budgets: every one from the floor up is met, by the plan and its run; below it the error has the smallest one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import BudgetError, PlanError
from reshard.geometry.refine import refine
from reshard.plans.plan import Step
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.layouts import contiguous_layouts, divisible_shape, pairs, random_pair
from tests.oracle import check
from tests.sampling import few_or_all
from tests.view_oracle import run_plan

MESH = Mesh(x=4, y=2)
NETWORK = rs.Network.uniform(1e-6, 1e9)


def keep(source: Layout, target: Layout, budget: int, donate: bool = False) -> rs.Plan:
    """Plans within a budget and asserts that the run stays within it too."""
    plan = rs.plan(source, target, budget=budget, donate=donate)
    memory = check(plan)
    assert memory.peak_bytes <= plan.peak_bytes <= budget, str(plan)
    return plan


def refuse(source: Layout, target: Layout, budget: int, donate: bool = False) -> int:
    """The smallest budget that the refusal names."""
    with pytest.raises(BudgetError) as caught:
        rs.plan(source, target, budget=budget, donate=donate)
    assert f"budget {budget} B" in str(caught.value)
    assert f"smallest that works is {caught.value.smallest} B" in str(caught.value)
    assert caught.value.smallest > budget
    return caught.value.smallest


def contract(source: Layout, target: Layout, extra: int) -> None:
    """The whole contract of a budget for layouts that are partial alike."""
    free = rs.plan(source, target)
    floor = free.floor_bytes
    # On two meshes, source and target may still be one placement, spelled twice.
    assert floor == (source.tile_bytes if free.source == free.target else source.tile_bytes + target.tile_bytes)
    least = keep(source, target, floor)
    assert least.received_bytes == least.lower_bound_bytes
    keep(source, target, floor + extra)
    if floor:
        assert refuse(source, target, floor - 1) == floor
        assert refuse(source, target, 0) == floor


@pytest.mark.parametrize("count", few_or_all(40, 400))
def test_every_budget_of_random_pairs(count: int):
    choose = random.Random(0)
    for _ in range(count):
        source, target = random_pair(choose, choose.choice(("int32", "float64", "complex128")))
        contract(source, target, choose.randint(0, 2 * source.tile_bytes + 1))


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2), Mesh(x=2, y=3)], ids=str)
def test_the_floor_of_every_contiguous_pair(mesh: Mesh):
    every = list(contiguous_layouts(mesh, divisible_shape(mesh, 2)))
    for source in every:
        for target in every:
            contract(source, target, 17)


@pytest.mark.slow
def test_each_budget_between_floor_and_peak():
    source, target = Layout.parse("f32[2, {x}4, 16]", MESH), Layout.parse("f32[2, 16, {x}4]", MESH)
    free = rs.plan(source, target)
    assert free.launches == 1
    launches = []
    for budget in range(free.floor_bytes, free.peak_bytes + 1):
        launches.append(keep(source, target, budget).launches)
    assert launches == sorted(launches, reverse=True), "more room, fewer launches"
    assert launches[-1] == 1
    assert len(set(launches)) > 3


def test_a_budget_prefers_the_fewest_launches_that_fit():
    source, target = Layout.parse("f32[{x}4, 16]", MESH), Layout.parse("f32[16, {x}4]", MESH)
    # Floor 512; messages of 4 x 4 elements need two buffers of 64 B, of two rows 32 B, of one row none.
    assert [(b, keep(source, target, b).launches) for b in (512, 575, 576, 639, 640)] == [
        (512, 12),
        (575, 12),
        (576, 6),
        (639, 6),
        (640, 3),
    ]
    assert keep(source, target, 768).launches == 1


@pytest.mark.slow
@settings(max_examples=100)
@given(pairs(), st.integers(0, 200))
def test_budgets_hold_with_a_network_too(pair: tuple[Layout, Layout], extra: int):
    source, target = pair
    floor = rs.plan(source, target).floor_bytes
    plan = rs.plan(source, target, budget=floor + extra, network=NETWORK)
    assert check(plan).peak_bytes <= plan.peak_bytes <= floor + extra
    if floor:
        with pytest.raises(BudgetError) as caught:
            rs.plan(source, target, budget=floor - 1, network=NETWORK)
        assert caught.value.smallest == floor


# ---- partial arrays: the smallest that works is exact --------------------------------------------


@pytest.mark.slow
@settings(max_examples=200)
@given(pairs("float64", partial=True))
def test_the_smallest_budget_of_a_reduction_works_and_no_smaller_one(pair: tuple[Layout, Layout]):
    source, target = pair
    free = rs.plan(source, target)
    smallest = free.peak_bytes
    if free.peak_bytes:
        try:
            rs.plan(source, target, budget=0)
        except BudgetError as error:
            smallest = error.smallest
        assert free.floor_bytes <= smallest <= free.peak_bytes
        refuse(source, target, smallest - 1)
    keep(source, target, smallest)
    keep(source, target, smallest + 8)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[4, 16] + sum{x}", "f32[4, {x}4]"),
        ("f32[8, 12] + max{x}", "f32[8, {x}3]"),
        ("f32[6, 8] + sum{y}", "f32[6, {y}4]"),
    ],
)
def test_parts_of_a_reduction_may_fill_the_budget(source: str, target: str):
    ends = Layout.parse(source, MESH), Layout.parse(target, MESH)
    smallest = refuse(*ends, 0)
    assert smallest < rs.plan(*ends).peak_bytes and refuse(*ends, smallest - 1) == smallest
    assert keep(*ends, smallest).peak_bytes == smallest


# ---- donated sources -----------------------------------------------------------------------------


def donated(source: Layout, target: Layout, extra: int) -> int:
    """The smallest budget for a donated source; it works, more works, and less does not."""
    free = rs.plan(source, target, donate=True)
    check(free)
    smallest = 0
    if free.peak_bytes:
        smallest = refuse(source, target, 0, donate=True)
        assert refuse(source, target, smallest - 1, donate=True) == smallest
    assert max(source.tile_bytes, target.tile_bytes) <= smallest or not free.peak_bytes
    assert smallest <= free.peak_bytes
    keep(source, target, smallest, donate=True)
    keep(source, target, smallest + extra, donate=True)
    return smallest


@pytest.mark.slow
@settings(max_examples=100)
@given(pairs("float64", partial=True), st.integers(0, 300))
def test_the_smallest_budget_of_a_donated_reduction(pair: tuple[Layout, Layout], extra: int):
    donated(*pair, extra)


@pytest.mark.fast(1)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2), Mesh(x=2, y=3)], ids=str)
def test_even_layouts_overwrite_a_donated_source(mesh: Mesh):
    every = list(contiguous_layouts(mesh, divisible_shape(mesh, 2)))
    for source in every:
        for target in every:
            larger = max(source.tile_bytes, target.tile_bytes)
            assert rs.plan(source, target, donate=True).floor_bytes == larger
            smallest = donated(source, target, 40)
            if refine(source, target) is not None:
                assert smallest == larger


def test_donation_is_never_dearer():
    choose = random.Random(8)
    for _ in range(300):
        source, target = random_pair(choose)
        kept, given_up = rs.plan(source, target), rs.plan(source, target, donate=True)
        assert given_up.received_bytes == kept.received_bytes == kept.lower_bound_bytes
        assert given_up.launches <= kept.launches
        assert given_up.peak_bytes <= kept.peak_bytes


def test_in_place_only_where_it_is_needed():
    source, target = Layout.parse("f32[{x}4, 16]", MESH), Layout.parse("f32[16, {x}4]", MESH)
    tight = keep(source, target, 256, donate=True)
    assert [s.mode for s in tight.steps] == [StepMode(1, in_place=True)]
    assert [s.mode for s in rs.plan(source, target, donate=True).steps] == [StepMode()]


# ---- bad budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [-1, True, False, 1 << 63, 1.5, -1e6, float("inf"), b"1"])
def test_bad_budgets(budget: object):
    source, target = Layout.parse("f32[{x}4]", MESH), Layout.parse("f32[16]", MESH)
    with pytest.raises(PlanError, match="whole number of at least 0"):
        rs.plan(source, target, budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "64 MB of it", "-1", "1e6", "9" * 5000, "20000PiB"])
def test_text_that_is_not_a_budget(text: str):
    source, target = Layout.parse("f32[{x}4]", MESH), Layout.parse("f32[16]", MESH)
    with pytest.raises(PlanError, match="the size") as caught:
        rs.plan(source, target, budget=text)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(("text", "limit"), [("80", 80), ("64MiB", 64 << 20), ("0.5 kB", 500)])
def test_text_is_the_budget_that_it_writes(text: str, limit: int):
    source, target = Layout.parse("f32[{x}4]", MESH), Layout.parse("f32[16]", MESH)
    assert rs.plan(source, target, budget=text) == rs.plan(source, target, budget=limit)
    with pytest.raises(BudgetError):
        rs.plan(source, target, budget="79")


def test_a_bad_budget_is_refused_after_an_equal_good_one():
    """The float 1e6 counts bytes; True does not, although True == 1 and 1 is cached."""
    source = target = Layout.parse("f32[0]", MESH)
    assert rs.plan(source, target, budget=1e6) == rs.plan(source, target, budget=1_000_000)  # type: ignore[arg-type]
    rs.plan(source, target, budget=1)
    with pytest.raises(PlanError, match="whole number of at least 0"):
        rs.plan(source, target, budget=True)


# ---- exchanges in chunks -------------------------------------------------------------------------


def test_chunks_are_the_smallest_of_the_fewest_rounds():
    """What devices that are not the busiest send is cut further for nothing."""
    choose = random.Random(11)
    cut = 0
    for _ in range(60):
        source, target = random_pair(choose, "int32")
        free = rs.plan(source, target)
        for step in keep(source, target, (free.floor_bytes + free.peak_bytes) // 2).steps:
            if step.kind == "exchange" and (step.mode.chunk or 1) > 1:
                smaller = Step("exchange", step.operand, step.result, step.mode._replace(chunk=step.mode.chunk - 1))
                assert smaller.launches > step.launches or smaller.live_bytes == step.live_bytes
                cut += 1
    assert cut > 10


APART = Mesh(x=4), Mesh({"y": 4}, device_ids=range(4, 8))


def test_disjoint_sets_need_one_buffer_of_a_chunk():
    source, target = Layout.parse("f32[{x}4, 16]", APART[0]), Layout.parse("f32[16, {y}4]", APART[1])
    launches = []
    for spare in (0, 31, 32, 63, 64):
        plan = keep(source, target, source.tile_bytes + spare)
        assert check(plan).peak_bytes == plan.peak_bytes
        launches.append(plan.launches)
    assert launches == [16, 16, 8, 8, 4]


def test_disjoint_sets_need_one_tile_through_a_view():
    ends = Layout.parse("s32[{x}24]", APART[0]), Layout.parse("s32[{y}24]", APART[1])
    move = rs.Move(*ends, view="(a b) -> (b a)", a=3)
    launches = []
    for spare in (0, 8, 12, 16, 32):
        plan = rs.plan(move, budget=move.source.tile_bytes + spare)
        assert plan.peak_bytes <= move.source.tile_bytes + spare
        run_plan(plan, move, lambda a: a.reshape(3, 32).T.reshape(-1))
        launches.append(plan.launches)
    assert launches == [24, 12, 9, 6, 3]
