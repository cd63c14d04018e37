"""Steps in parts: each part is a step on a smaller array, and together they are the step.

The reference runtime measures the memory, the bytes and the launches that the plan promises.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError, StepError
from reshard.lower import lower_plan
from reshard.lower.program import InParts
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.plans.rules.collectives import RULES, check_step
from reshard.plans.rules.split_steps import Cut, possible_counts, split_layouts, split_step
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.layouts import pairs, random_crossing, random_layout
from tests.oracle import PADDING, check, tiles_of

MESH = Mesh(x=4, y=2)


def layouts(source: str, target: str, mesh: Mesh = MESH) -> tuple[Layout, Layout]:
    return Layout.parse(source, mesh), Layout.parse(target, mesh)


def one_step(kind: str, source: str, target: str, parts: int, donate: bool = False, mesh: Mesh = MESH) -> Plan:
    before, after = layouts(source, target, mesh)
    return chain(before, after, [StepSpec(kind, after, StepMode(parts=parts))], donate)


STEPS = [
    # A part is some of the rows, of the columns, of a strided dim, or of a dim after the one that changes.
    ("slice", "f32[16, 8]", "f32[16, {x}2]"),
    ("slice", "f32[16, 8]", "f32[{x}4, {y}4]"),
    ("all_gather", "f32[{x}4, 16]", "f32[16, 16]"),
    ("all_gather", "f32[8, {x}4]", "f32[8, 16]"),
    ("all_gather", "f32[4{x}4]", "f32[64]"),
    ("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]"),
    ("all_to_all", "f32[{x}{y}2, 16, 16]", "f32[16, {x}4, {y}8]"),
    ("all_to_all", "f32[{x}8, 4, 32]", "f32[32, 4, {x}8]"),
    ("permute", "f32[{x}{y}2, 4]", "f32[{y}{x}2, 4]"),
    ("exchange", "f32[{x}4, 16]", "f32[16, {x}4]"),
    ("exchange", "f32[{x}4, 16]", "f32[{y}8, 16]"),
    ("exchange", "f32[{x}8, {y}8]", "f32[{y}16, {x}4]"),
    ("reduce_scatter", "f32[16, 8] + sum{x}", "f32[{x}4, 8]"),
    ("reduce_scatter", "f32[8, 16] + max{x}", "f32[8, {x}4]"),
    ("all_reduce", "f32[16, 8] + sum{x}", "f32[16, 8]"),
    ("all_reduce", "f32[{y}8, 8] + mean{x}", "f32[{y}8, 8]"),
    ("split_sum", "f32[{x}4, 8]", "f32[16, 8] + sum{x}{y}"),
    ("split_sum", "f32[16, 8]", "f32[{y}8, 8] + max{x}"),
]


# ---- one part, by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "count", "operand", "result", "take", "put"),
    [
        # Rows that stay rows.
        ("f32[16, {x}2]", "f32[16, 8]", 4, "f32[4, {x}2]", "f32[4, 8]", Cut(0, 1, 4, 4), Cut(0, 1, 4, 4)),
        # 16 rows are {x}4 before and 4 x 4 after: a part is the same 2 of the 4 in both.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 2, "f32[{x}2, 16]", "f32[8, {x}4]", Cut(0, 1, 2, 2), Cut(0, 4, 2, 2)),
        # Dim 0 has no digit that is local on both sides, so dim 1 is split.
        ("f32[{x}, 6]", "f32[4, 6]", 3, "f32[{x}, 2]", "f32[4, 2]", Cut(1, 1, 3, 2), Cut(1, 1, 3, 2)),
        # The digit before the held one, into single values.
        ("f32[3{x}5]", "f32[60]", 3, "f32[{x}5]", "f32[20]", Cut(0, 1, 3, 5), Cut(0, 1, 3, 20)),
    ],
)
def test_a_part(source: str, target: str, count: int, operand: str, result: str, take: Cut, put: Cut):
    part = split_step(*layouts(source, target), count)
    assert part is not None
    assert (str(part.operand), str(part.result), part.take, part.put) == (operand, result, take, put)


@pytest.mark.parametrize(
    ("source", "target", "axis"),
    [
        ("f32[{x}, 8, 8, 8]", "f32[4, 8, 8, 8]", 1),  # not one of the two minor dims
        ("f32[{x}, 16, 256]", "f32[4, 16, 256]", 1),  # both keep whole 8 x 128 tiles: the one with contiguous parts
        ("f32[{x}, 8, 256]", "f32[4, 8, 256]", 2),  # parts of 8 x 128 rather than of 4 x 256
    ],
)
def test_the_dim_that_costs_the_copies_least(source: str, target: str, axis: int):
    part = split_step(*layouts(source, target), 2)
    assert part is not None
    assert (part.take.axis, part.put.axis) == (axis, axis)


def test_a_padded_dim_is_not_cut_but_another_one_is():
    before, after = layouts("f32[{x}3/10, 6]", "f32[10, 6]")
    assert possible_counts(before, after) == (2, 3, 6)
    check(chain(before, after, [StepSpec("all_gather", after, StepMode(parts=3))]))


def test_numerals_without_a_common_refinement():
    before, after = layouts("f32[{x}3, 6]", "f32[{y}2, 6]", Mesh(x=2, y=3))
    assert possible_counts(before, after) == () and split_step(before, after, 2) is None


# ---- parts together are the step -------------------------------------------------------------------


def cut_out(cut: Cut, tile: np.ndarray, number: int) -> np.ndarray:
    """Part `number` of a tile, without the library: the indices along its axis whose middle digit is `number`."""
    along = np.arange(tile.shape[cut.axis])
    return np.compress(along // cut.inner % cut.parts == number, tile, axis=cut.axis)


@pytest.mark.parametrize(("kind", "source", "target"), STEPS)
def test_parts_are_disjoint_and_together_the_step(kind: str, source: str, target: str):
    """In each part, operand and result hold the same elements, and the tiles have the shape of the part's layouts."""
    before, after = layouts(source, target)
    assert possible_counts(before, after)
    for count in possible_counts(before, after):
        step = split_step(before, after, count)
        assert step is not None
        taken = [held(before, step.take, number) for number in range(count)]
        put = [held(after, step.put, number) for number in range(count)]
        assert taken == put
        assert sum(map(len, taken)) == len(set().union(*taken)) == np.prod(before.shape)
        for layout, cut, part in ((before, step.take, step.operand), (after, step.put, step.result)):
            tile = cut_out(cut, next(iter(tiles_of(layout).values())), 0)
            assert tile.shape == part.tile_shape
            assert part.tile_bytes * count == layout.tile_bytes
            assert cut.outer * cut.parts * cut.inner == layout.tile_shape[cut.axis]


def held(layout: Layout, cut: Cut, number: int) -> set[int]:
    """The elements in part `number` of all tiles."""
    parts = (cut_out(cut, tile, number) for tile in tiles_of(layout).values())
    return {int(i) for part in parts for i in part.reshape(-1)} - {PADDING}


@pytest.mark.parametrize(("kind", "source", "target"), STEPS)
def test_a_step_in_parts_keeps_its_promises(kind: str, source: str, target: str):
    """The result is right, with exactly the memory, the bytes and the launches of the plan."""
    whole = Step(kind, *layouts(source, target))
    for count in possible_counts(*layouts(source, target)):
        for donate in (False, True):
            plan = one_step(kind, source, target, count, donate)
            check(plan)
            assert plan.received_bytes == whole.received_bytes
            assert plan.launches == whole.launches * count
            (instruction,) = lower_plan(plan).instructions
            assert isinstance(instruction, InParts) and instruction.take.parts == instruction.put.parts == count


def test_every_kind_that_can_be_in_parts_is_here():
    assert {kind for kind, _, _ in STEPS} == set(RULES)


@settings(max_examples=75)
@given(pairs("float64", partial=True), st.randoms())
def test_random_reductions_in_random_parts(pair: tuple[Layout, Layout], choose: random.Random):
    check(in_random_parts(rs.plan(*pair), choose))


def in_random_parts(plan: Plan, choose: random.Random) -> Plan:
    def mode(step: Step) -> StepMode:
        able = possible_counts(step.operand, step.result) if step.mode == StepMode() else ()
        return StepMode(parts=choose.choice(able)) if able else step.mode

    return chain(plan.source, plan.target, [StepSpec(s.kind, s.result, mode(s)) for s in plan.steps], plan.donate)


# ---- memory ----------------------------------------------------------------------------------------


def test_more_parts_need_less_memory():
    """The peak falls towards that of the two tiles."""
    source, target = "f32[{x}64, 64]", "f32[256, {x}16]"
    peaks = [one_step("all_to_all", source, target, count).peak_bytes for count in (2, 4, 8, 16, 32, 64)]
    assert peaks == sorted(peaks, reverse=True)
    ends = sum(end.tile_bytes for end in layouts(source, target))
    assert peaks[-1] == ends + ends // 64


# ---- refusals --------------------------------------------------------------------------------------


def test_parts_of_a_step_that_no_rule_derives():
    with pytest.raises(StepError, match="only held digits may change"):
        check_step("all_gather", *layouts("f32[{x}4, 16]", "f32[16, {x}4]"), StepMode(parts=2))


def test_json():
    plan = one_step("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", 2)
    assert Plan.from_json(plan.to_json()) == plan
    for wrong in ('"parts": 4', '"parts": 1', '"parts": 3'):
        with pytest.raises((PlanError, StepError)):
            Plan.from_json(plan.to_json().replace('"parts": 2', wrong))


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(40))
def test_layouts_on_any_devices_are_cut_alike(seed: int):
    """Element by element: a part has the same elements in each layout, the parts are disjoint, and all there is."""
    choose = random.Random(seed)
    layouts = [layout for _ in range(2) for layout in random_crossing(choose, counts=(1, 2, 4))]
    shape = [choose.choice((8, 12, 16)) for _ in range(2)]
    layouts = [random_layout(choose, layout.mesh, shape) for layout in layouts][: choose.randint(1, 3)]
    count = choose.choice((2, 3, 4))
    split = split_layouts(layouts, count)
    if split is None:
        return
    everything: list[int] = []
    for number in range(count):
        elements: dict[int, int] = {}
        for layout, (part, cut) in zip(layouts, split, strict=True):
            smaller = tiles_of(part)
            for device, tile in tiles_of(layout).items():
                opened = tile.reshape(
                    (*tile.shape[: cut.axis], cut.outer, count, cut.inner, *tile.shape[cut.axis + 1 :])
                )
                taken = opened.take(number, cut.axis + 1).ravel().tolist()
                for at, element in zip(smaller[device].ravel().tolist(), taken, strict=True):
                    assert elements.setdefault(at, element) == element
        everything += elements.values()
    assert sorted(everything) == list(range(shape[0] * shape[1]))


def test_layouts_that_share_no_local_digit_are_not_cut():
    rows, columns = Layout.parse("f32[{x}1, 4]", Mesh(x=2)), Layout.parse("f32[2, {y}1]", Mesh(y=4))
    assert split_layouts([rows], 4) and split_layouts([columns], 2)
    assert split_layouts([rows, columns], 2) is None
    assert split_layouts([Layout.from_spec(Mesh(x=2), (3, 4), "f32", ["x"])], 2) is None, "padded"
