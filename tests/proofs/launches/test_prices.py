"""The cheapest way to run a step: among all chunks, parts and in place, the fewest launches that fit."""

from __future__ import annotations

import math

import pytest

from reshard.errors import StepError, UndecidedError
from reshard.plans.plan import Step
from reshard.plans.rules.step_mode import StepMode
from reshard.proofs.launches import cheapest_step
from reshard.types import Layout, Mesh

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


def test_what_is_kept_beside_counts():
    operand, result = (Layout.parse(text, Mesh(x=3)) for text in ("f32[{x}5, 6]", "f32[15, 6]"))
    alone = cheapest_step("all_gather", operand, result, 0, 10_000, 8, donate=False)
    assert cheapest_step("all_gather", operand, result, 40, alone.live_bytes, 1, donate=False) is None
    assert cheapest_step("all_gather", operand, result, 40, alone.live_bytes + 40, 1, donate=False).retained_bytes == 40


def test_a_slice_in_place_is_an_exchange():
    """Over a donated source, the larger of the two tiles is enough."""
    operand, result = (Layout.parse(text, Mesh(x=3)) for text in ("f32[15]", "f32[{x}5]"))
    step = cheapest_step("slice", operand, result, 0, operand.tile_bytes, 1, donate=True)
    assert (step.kind, step.mode.in_place, step.launches) == ("exchange", True, 0)
    assert cheapest_step("slice", operand, result, 0, operand.tile_bytes, 1, donate=False) is None


def test_a_large_message_is_not_cut_in_all_ways():
    operand, result = (Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}128, 256]", "f32[256, {x}128]"))
    with pytest.raises(UndecidedError, match="messages of 16384 elements are not cut in all ways"):
        cheapest_step("exchange", operand, result, 0, 1, 4, donate=False)
