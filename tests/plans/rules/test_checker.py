"""What holds for every rule: what no step changes, which modes there are, and which kinds derive a pair."""

from __future__ import annotations

import random

import pytest

from reshard.errors import StepError
from reshard.plans.rules.collectives import CROSSING, RULES, check_step
from reshard.plans.rules.step_mode import Cost, StepMode
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import random_pair
from tests.plans.rules.steps import cost


@pytest.mark.fast(20)
@pytest.mark.parametrize("kind", list(RULES))
@pytest.mark.parametrize(
    ("operand", "result"),
    [
        ("f32[16] + sum{x}", "f32[16] + max{x}"),
        ("f32[16] + sum{x}{y}", "f32[16] + max{y}"),
        ("f32[16] + sum{x}{y}", "f32[{x}4] + max{y}"),
        ("f32[16] + sum{x}", "f32[{y}8] + max{x}"),
        ("f32[{y}8] + sum{x}", "f32[16] + max{x}"),
        ("f32[{y}8, 16] + sum{x}", "f32[16, {y}8] + max{x}"),
        ("f32[{y}8] + sum{x:(1)2}", "f32[{x:(2)2}8] + max{x:(1)2}"),
    ],
)
def test_no_rule_changes_the_reduction(kind: str, operand: str, result: str):
    with pytest.raises(StepError):
        cost(kind, operand, result)


@pytest.mark.parametrize("kind", list(RULES))
def test_every_rule_keeps_shape_dtype_and_devices(kind: str):
    for operand, result, why in (
        ("f32[16]", "f32[17]", "keeps the global shape and the dtype"),
        ("f32[16]", "f32[16, 1]", "keeps the global shape and the dtype"),
        ("f32[16]", "s32[16]", "keeps the global shape and the dtype"),
    ):
        with pytest.raises(StepError, match=why):
            cost(kind, operand, result)
    if kind not in CROSSING:
        with pytest.raises(StepError, match="lead to other devices"):
            check_step(kind, Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[{x}2]", Mesh(x=8)))


@pytest.mark.parametrize("kind", list(RULES))
@pytest.mark.parametrize(
    ("operand", "result"), [("f32[{x}4]", "f32[{x}4]"), ("f32[{x}4]", "f32[8]"), ("f32[8]", "f32[{x}4]")]
)
def test_only_permutes_and_exchanges_lead_to_other_devices(kind: str, operand: str, result: str):
    before, after = Layout.parse(operand, Mesh(x=2)), Layout.parse(result, Mesh({"x": 2}, device_ids=[4, 5]))
    if kind == "exchange" or (kind == "permute" and operand == result):
        assert check_step(kind, before, after).received == before.nbytes(after.tile_shape[0])
        return
    with pytest.raises(StepError):
        check_step(kind, before, after)


@pytest.mark.parametrize("mode", [StepMode(4), StepMode(in_place=True)])
def test_only_exchanges_are_chunked_or_in_place(mode: StepMode):
    for kind in set(RULES) - {"exchange"}:
        with pytest.raises(StepError, match="only an exchange is chunked, by at least 1 element, in place, relayed"):
            cost(kind, "f32[16]", "f32[{x}4]", mode)


def test_unknown_steps():
    with pytest.raises(StepError, match=r"unknown step 'teleport'; the steps are slice, all_gather"):
        cost("teleport", "f32[16]", "f32[16]")


def test_pairs_without_a_common_refinement_need_an_exchange():
    mesh = Mesh(x=2, y=3)
    for kind in ("slice", "all_gather", "all_to_all"):
        with pytest.raises(StepError, match="no common refinement; use an exchange"):
            cost(kind, "f32[{x}3]", "f32[{y}2]", mesh=mesh)
    # Pieces 0-2 and 3-5 against 0-1, 2-3 and 4-5: the middle one has one element of each half.
    assert cost("exchange", "f32[{x}3]", "f32[{y}2]", mesh=mesh).received == 2 * 4


@pytest.mark.parametrize("seed", range(2))
def test_the_kinds_that_derive_a_random_pair_agree_with_its_exchange(seed: int):
    """An exchange derives every pair at the bound; no other kind receives less, and a slice only where it is free."""
    choose = random.Random(seed)
    derived = 0
    for _ in range(400):
        source, target = random_pair(choose)
        kinds: dict[str, Cost] = {}
        for kind in RULES:
            try:
                kinds[kind] = check_step(kind, source, target)
            except StepError:
                continue
        assert "exchange" in kinds
        assert not kinds.keys() & {"reduce_scatter", "all_reduce"}
        for kind, step_cost in kinds.items():
            derived += 1
            # A slice is derived only if every device holds its target tile already.
            assert (kind == "slice") <= (kinds["exchange"].received == 0)
            assert step_cost.received >= kinds["exchange"].received
    assert derived > 400


def test_a_step_in_parts_by_hand():
    """Two parts of 128 B each way: each needs copies of both, and packs one."""
    assert cost("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]", StepMode(parts=2)) == Cost(192, 2, 128 + 128 + 128)
