"""Plans: the chain is checked as it is built, JSON is read and checked again, figures are folds over the steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError, ReshardError, StepError
from reshard.plans.plan import FORMAT, Plan, Step, StepSpec, chain, floor_bytes
from reshard.plans.rules.cost import StepMode
from reshard.show.plan_table import list_totals
from reshard.types import Layout, Mesh
from tests.layouts import pairs

MESH = Mesh(x=4, y=2)
NETWORK = rs.Network.uniform(1e-6, 1e9)


def layout(text: str, mesh: Mesh = MESH) -> Layout:
    return Layout.parse(text, mesh)


A, B = layout("f32[{y}8, 16, {x}4]"), layout("f32[16, {x}{y}2, 16]")
THREE = rs.plan(layout("f32[{x:(1)2}8, {y}8, 16, 8]"), layout("f32[16, 16, {y}8, {x:(2)2}4]"))


def test_the_example_has_three_steps():
    assert [s.kind for s in THREE.steps] == ["slice", "all_to_all", "all_gather"]


# ---- figures -------------------------------------------------------------------------------------


def test_figures_are_folds_over_the_steps():
    first, second, third = THREE.steps
    tile = 8 * 8 * 16 * 8 * 4
    assert [s.operand.tile_bytes for s in THREE.steps] == [tile, tile // 2, tile // 2]
    assert [s.retained_bytes for s in THREE.steps] == [0, tile, tile]
    assert [s.received_bytes for s in THREE.steps] == [0, tile // 4, tile // 2]
    assert THREE.received_bytes == THREE.lower_bound_bytes == tile * 3 // 4
    assert THREE.launches == first.launches + second.launches + third.launches == 2
    for step in THREE.steps:
        size = step.operand.tile_bytes + step.result.tile_bytes
        assert step.live_bytes == step.retained_bytes + size + step.cost.scratch
    assert THREE.peak_bytes == max(s.live_bytes for s in THREE.steps)
    assert THREE.floor_bytes == 2 * tile


def test_floor():
    assert floor_bytes(A, A) == floor_bytes(A, A, donate=True) == A.tile_bytes
    assert floor_bytes(A, B) == A.tile_bytes + B.tile_bytes
    assert floor_bytes(A, layout("f32[16, 16, 16]"), donate=True) == 16**3 * 4


def test_a_donated_source_is_freed_after_the_first_step():
    specs = [StepSpec(s.kind, s.result) for s in THREE.steps]
    donated = chain(THREE.source, THREE.target, specs, donate=True)
    assert [s.retained_bytes for s in donated.steps] == [0, 0, 0]
    assert donated.peak_bytes < THREE.peak_bytes


def test_nothing_to_do():
    plan = Plan(A, A, ())
    assert (plan.received_bytes, plan.launches, plan.peak_bytes) == (0, 0, A.tile_bytes)
    assert "nothing to do" in str(plan)


def test_text_shows_every_step_and_total():
    text = str(THREE)
    for step in THREE.steps:
        assert step.kind in text
        assert str(step.result) in text
    assert "2 launches" in text
    assert "predicted" not in text
    assert "us predicted" in str(rs.plan(A, B, network=NETWORK))


# ---- broken chains and steps ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((), "the steps end in"),
        (THREE.steps[:1], "the steps end in"),
        (THREE.steps[:2], "the steps end in"),
        (THREE.steps[1:], "step 1 (all_to_all) starts from"),
        ((THREE.steps[0], THREE.steps[2]), "step 2 (all_gather) starts from"),
        ((THREE.steps[1], THREE.steps[0], THREE.steps[2]), "step 1 (all_to_all) starts from"),
        ((*THREE.steps, THREE.steps[2]), "step 4 (all_gather) starts from"),
    ],
)
def test_broken_chains_are_refused(steps: tuple[Step, ...], words: str):
    with pytest.raises(PlanError) as caught:
        Plan(THREE.source, THREE.target, steps)
    assert words in str(caught.value)
    assert "fix the chain" in str(caught.value)


def test_live_bytes_cannot_be_left_out():
    second = THREE.steps[1]
    light = Step(second.kind, second.operand, second.result)
    with pytest.raises(PlanError, match=r"step 2 \(all_to_all\).*live bytes"):
        Plan(THREE.source, THREE.target, (THREE.steps[0], light, THREE.steps[2]))


def test_only_a_donated_source_is_overwritten():
    spec = StepSpec("exchange", layout("f32[16, {x}4, 16]"), StepMode(in_place=True))
    source = layout("f32[{x}4, 16, 16]")
    with pytest.raises(PlanError, match=r"overwrites the source.*donate=True"):
        chain(source, spec.result, [spec])
    assert chain(source, spec.result, [spec], donate=True).peak_bytes < floor_bytes(source, spec.result) + 2 * 256 * 4


def test_a_step_that_no_rule_derives_cannot_be_built():
    for kind in ("slice", "all_gather", "permute", "reduce_scatter", "all_reduce"):
        with pytest.raises(StepError, match=kind):
            Step(kind, A, B)
    with pytest.raises(StepError, match="unknown step"):
        Step("send", A, B)


@pytest.mark.parametrize("at", range(3))
def test_a_step_with_another_result_is_refused(at: int):
    """A wrong layout after a step is refused by the rule of the step, by the next step, or by the target."""
    right = THREE.steps[at]
    wrong = (
        "f32[16, {y}8, 16, {x:(2)2}4]",
        "f32[{x:(1)2}8, {y}8, {x:(2)2}8, 8]",
        "f32[{x:(1)2}8, 16, {y}8, {x:(2)2}4] + sum{x:(1)2}",
        "f32[{x:(1)2}{y}4, 16, 16, {x:(2)2}4]",
        "f32[16, 16, {x:(2)2}8, {y}4]",
        "f32[16, 16, {y}8, 4{x:(2)2}]",
        "f32[{x:(2)2}8, {y}8, 16, {x:(1)2}4]",
    )
    for text in wrong:
        try:
            result = layout(text)
        except ReshardError:
            continue
        with pytest.raises((StepError, PlanError)):
            broken = Step(right.kind, right.operand, result, right.mode, right.retained_bytes)
            Plan(THREE.source, THREE.target, (*THREE.steps[:at], broken, *THREE.steps[at + 1 :]))


def test_plans_are_frozen():
    with pytest.raises(AttributeError):
        THREE.donate = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        THREE.steps[0].kind = "permute"  # type: ignore[misc]


# ---- JSON ----------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(pairs(), st.booleans(), st.sampled_from((None, NETWORK)))
def test_json_round_trip(pair: tuple[Layout, Layout], donate: bool, network: rs.Network | None):
    plan = rs.plan(*pair, donate=donate, network=network)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_dict() == plan.to_dict()
    assert Plan.from_json(plan.to_json(indent=2)) == plan


def test_json_round_trip_of_a_chunked_plan_and_one_in_place():
    source, target = layout("f32[{x}4, 16]"), layout("f32[16, {x}4]")
    for donate in (False, True):
        plan = rs.plan(source, target, budget=floor_bytes(source, target, donate) + 16, donate=donate)
        assert plan.steps[0].mode != StepMode()
        assert Plan.from_json(plan.to_json()) == plan


def test_json_round_trip_of_partial_and_of_other_meshes():
    for source, target in (
        (layout("f32[16, 8] + max{x}{y}"), layout("f32[{x}4, 8]")),
        (layout("f32[{x}2]", Mesh({"x": 4}, device_ids=[3, 1, 2, 0])), layout("f32[{x}2]", Mesh(x=4))),
        (layout("f32[{x}2]", Mesh(x=4)), layout("f32[{a}{b}2]", Mesh(a=2, b=2))),
    ):
        plan = rs.plan(source, target)
        assert Plan.from_json(plan.to_json()) == plan


def test_json_has_the_promised_keys():
    data = json.loads(THREE.to_json())
    keys = {"source", "target", "steps", "received_bytes", "lower_bound_bytes", "launches", "peak_bytes", "seconds"}
    assert keys <= data.keys()
    for step in data["steps"]:
        assert {"kind", "operand", "result", "received_bytes", "live_bytes"} <= step.keys()


def test_json_says_its_format_and_an_older_text_without_one_is_read():
    data = json.loads(THREE.to_json())
    assert data.pop("format") == FORMAT == 1
    assert Plan.from_json(json.dumps(data)) == THREE


@pytest.mark.parametrize("number", [0, 2, "1", None, True, [1]])
def test_json_of_another_format_is_refused_by_its_number(number: object):
    with pytest.raises(PlanError, match="reads format 1; read it with the version that wrote it"):
        Plan.from_json(json.dumps({**json.loads(THREE.to_json()), "format": number}))


@pytest.mark.parametrize("bad", ["[" * 100_000, '{"a":' * 100_000, b"\xff\xfe", b"\x80{}", "9" * 5000, None, 7])
def test_what_cannot_even_be_read_is_refused(bad: Any):
    with pytest.raises(PlanError, match="this is not a plan in JSON"):
        Plan.from_json(bad)


@pytest.mark.parametrize("bad", [-1, -1e-9, float("inf"), float("nan"), True, "1"])
def test_seconds_are_finite_and_not_negative(bad: Any):
    with pytest.raises(PlanError, match="seconds"):
        replace(THREE.steps[0], seconds=bad)
    with pytest.raises(PlanError, match="seconds"):
        Plan(A, A, (), seconds=bad)


def test_the_text_of_a_plan_has_the_figures_of_the_command():
    for network in (None, "h100", NETWORK):
        for budget in (None, floor_bytes(A, B) + 64):
            plan = rs.plan(A, B, budget=budget, network=network)
            printed = str(plan)
            shown = dict(list_totals(plan, "h100"))
            assert f"received {shown['received'].partition(' on')[0]} (bound" in printed
            assert f", {shown['launches']} launch" in printed
            assert f"peak {shown['peak'].partition(' live')[0]} a device" in printed
            assert ("predicted" in shown) == ("predicted" in printed)
            assert network is None or f"{shown['predicted'].partition(' on')[0]} predicted" in printed


def put(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


TAMPERED = {
    "source": put("source", to="f32[16, {y}8, 16, 8]"),
    "source that is not a layout": put("source", to="f32[16"),
    "target": put("target", to="f32[16, 16, {y}8, {x}2]"),
    "dtype of the target": put("target", to="s32[16, 16, {y}8, {x:(2)2}4]"),
    "mesh": put("mesh", "axes", "x", to=8),
    "unknown axis": put("mesh", "axes", to={"a": 8}),
    "kind": put("steps", 1, "kind", to="all_gather"),
    "unknown kind": put("steps", 1, "kind", to="send"),
    "result": put("steps", 1, "result", to="f32[{x:(1)2}8, 16, {x:(2)2}8, {y}4]"),
    "result of the last step": put("steps", 2, "result", to="f32[16, 16, {y}8, 8]"),
    "operand": put("steps", 1, "operand", to="f32[16, 16, 16, 8]"),
    "order of the steps": lambda data: data["steps"].reverse(),
    "a step too few": drop("steps", 1),
    "a step too many": lambda data: data["steps"].append(data["steps"][2]),
    "bytes received": put("received_bytes", to=0),
    "bound": put("lower_bound_bytes", to=1),
    "launches": put("launches", to=1),
    "peak": put("peak_bytes", to=THREE.peak_bytes - 1),
    "bytes received in a step": put("steps", 1, "received_bytes", to=0),
    "live bytes of a step": put("steps", 1, "live_bytes", to=0),
    "launches of a step": put("steps", 1, "launches", to=0),
    "donation": put("donate", to=True),
    "chunk of an all-to-all": put("steps", 1, "chunk", to=4),
    "chunk that is not a number": put("steps", 1, "chunk", to="4"),
    "in place": put("steps", 1, "in_place", to=True),
    "steps that are not a list": put("steps", to=3),
    "step that is not an object": put("steps", 0, to="slice"),
    "axes that are not an object": put("mesh", "axes", to=["abc"]),
    "sizes that are not numbers": put("mesh", "axes", "x", to="4"),
    "device ids that are not numbers": put("mesh", "device_ids", to=["a"] * 8),
    "source that is not text": put("source", to=7),
    "missing source": drop("source"),
    "missing steps": drop("steps"),
    "missing kind": drop("steps", 0, "kind"),
    "seconds that are not a number": put("steps", 1, "seconds", to="soon"),
    "total seconds": put("seconds", to=1.0),
}


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_tampered_json_is_refused(change: Callable[[dict[str, Any]], None]):
    data = json.loads(THREE.to_json())
    change(data)
    with pytest.raises(ReshardError):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"plan"', "{}", '{"source": null}'])
def test_what_is_not_a_plan_is_refused(text: str):
    with pytest.raises(PlanError, match="this is not a plan in JSON"):
        Plan.from_json(text)


def test_a_reduction_cannot_be_swapped_in_json():
    plan = rs.plan(layout("f32[16, 8] + sum{x}"), layout("f32[16, {y}4] + sum{x}"))
    assert [s.kind for s in plan.steps] == ["slice"]
    with pytest.raises(ReshardError):
        Plan.from_json(plan.to_json().replace("{y}4] + sum{x}", "{y}4] + max{x}"))
