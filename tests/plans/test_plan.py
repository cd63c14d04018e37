"""Plans of one array: chains are checked as they are built, JSON is checked again, figures are folds over steps."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import PlanError, ReshardError, StepError
from reshard.lower import lower_plan
from reshard.lower.program_traffic import program_traffic as matrix
from reshard.plans.plan import FORMAT, Plan, Step, StepSpec, chain, find_idle_axes, floor_bytes
from reshard.plans.plan_data import read_view, view_data
from reshard.plans.rules.collectives import RULES
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from reshard.types.json_fields import Fields
from reshard.types.view import View
from tests.layouts import pairs, random_crossing
from tests.program_faults import plans, replaced

MESH = Mesh(x=4, y=2)
NETWORK = rs.Network.uniform(1e-6, 1e9)


def layout(text: str, mesh: Mesh = MESH) -> Layout:
    return Layout.parse(text, mesh)


A, B = layout("f32[{y}8, 16, {x}4]"), layout("f32[16, {x}{y}2, 16]")
THREE = rs.plan(layout("f32[{x:(1)2}8, {y}8, 16, 8]"), layout("f32[16, 16, {y}8, {x:(2)2}4]"))


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


def test_bytes_may_be_more_than_64_bits_hold():
    many = Mesh(x=4, y=4)
    source = Layout.parse("f32[{x:(1)2}8, {y}1048576, 2097152, 1048576]", many)
    plan = rs.plan(source, Layout.parse("f32[16, 4194304, {y}524288, {x:(2)2}524288]", many))
    assert [s.retained_bytes for s in plan.steps] == [0, source.tile_bytes, source.tile_bytes]
    assert source.tile_bytes == 1 << 66


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


# ---- JSON ----------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(pairs(), st.booleans(), st.sampled_from((None, NETWORK)))
def test_json_round_trip(pair: tuple[Layout, Layout], donate: bool, network: rs.Network | None):
    plan = rs.plan(*pair, donate=donate, network=network)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_dict() == plan.to_dict()
    assert Plan.from_json(plan.to_json(indent=2)) == plan


def test_json_round_trip_of_partial_and_of_other_meshes():
    for source, target in (
        (layout("f32[16, 8] + max{x}{y}"), layout("f32[{x}4, 8]")),
        (layout("f32[{x}2]", Mesh({"x": 4}, device_ids=[3, 1, 2, 0])), layout("f32[{x}2]", Mesh(x=4))),
        (layout("f32[{x}2]", Mesh(x=4)), layout("f32[{a}{b}2]", Mesh(a=2, b=2))),
    ):
        plan = rs.plan(source, target)
        assert Plan.from_json(plan.to_json()) == plan


def test_json_says_its_format_and_an_older_text_without_one_is_read():
    data = json.loads(THREE.to_json())
    assert data.pop("format") == FORMAT == 1
    assert Plan.from_json(json.dumps(data)) == THREE


@pytest.mark.parametrize("number", [0, 2, "1", None, True, [1]])
def test_json_of_another_format_is_refused_by_its_number(number: object):
    with pytest.raises(PlanError, match="reads format 1; read it with the version that wrote it"):
        Plan.from_json(json.dumps({**json.loads(THREE.to_json()), "format": number}))


@pytest.mark.parametrize(
    "bad", ["[" * 100_000, '{"a":' * 100_000, b"\xff\xfe", b"\x80{}", "9" * 5000, None, 7, "", "null", "{}", '"plan"']
)
def test_what_cannot_even_be_read_is_refused(bad: Any):
    with pytest.raises(PlanError, match="this is not a plan in JSON"):
        Plan.from_json(bad)


@pytest.mark.parametrize("bad", [-1, -1e-9, float("inf"), float("nan"), True, "1"])
def test_seconds_are_finite_and_not_negative(bad: Any):
    with pytest.raises(PlanError, match="seconds"):
        replace(THREE.steps[0], seconds=bad)
    with pytest.raises(PlanError, match="seconds"):
        Plan(A, A, (), seconds=bad)


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
    "target": put("target", to="f32[16, 16, {y}8, {x}2]"),
    "dtype of the target": put("target", to="s32[16, 16, {y}8, {x:(2)2}4]"),
    "mesh": put("mesh", "axes", "x", to=8),
    "unknown axis": put("mesh", "axes", to={"a": 8}),
    "kind": put("steps", 1, "kind", to="all_gather"),
    "unknown kind": put("steps", 1, "kind", to="send"),
    "result": put("steps", 1, "result", to="f32[{x:(1)2}8, 16, {x:(2)2}8, {y}4]"),
    "operand": put("steps", 1, "operand", to="f32[16, 16, 16, 8]"),
    "order of the steps": lambda data: data["steps"].reverse(),
    "a step too few": drop("steps", 1),
    "a step too many": lambda data: data["steps"].append(data["steps"][2]),
    "bytes received": put("received_bytes", to=0),
    "launches": put("launches", to=1),
    "peak": put("peak_bytes", to=THREE.peak_bytes - 1),
    "bytes received in a step": put("steps", 1, "received_bytes", to=0),
    "live bytes of a step": put("steps", 1, "live_bytes", to=0),
    "donation": put("donate", to=True),
    "chunk of an all-to-all": put("steps", 1, "chunk", to=4),
    "in place": put("steps", 1, "in_place", to=True),
    "steps that are not a list": put("steps", to=3),
    "sizes that are not numbers": put("mesh", "axes", "x", to="4"),
    "missing source": drop("source"),
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


def test_an_exchange_after_a_crossing_sends_what_each_device_sends():
    """Its busiest device is not the one that sends the most before."""
    there = Mesh({"v": 12}, device_ids=[9, 10, 6, 7, 2, 8, 4, 3, 5, 0, 1, 11])
    ends = Layout.parse("s32[{v}8, 17, 5]", Mesh(v=2, w=3)), Layout.parse("s32[16, 17, 5] + product{v:(1)4}", there)
    plan = rs.plan(*ends, network="tpu-v5p", budget=12240)
    assert [step.kind for step in plan.steps] == ["exchange", "exchange", "split_sum"]
    assert plan.sent_bytes == max(matrix(lower_plan(plan)).sent.values())


def test_seconds_where_nothing_is_sent_are_refused():
    """Others may be those of some network; a plan's own are the sum of its steps'."""
    part, whole = (Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    for plan in (rs.plan(whole, whole, network="h100"), rs.plan(whole, part, network="h100")):
        assert plan.seconds == 0.0 and Plan.from_json(plan.to_json()) == plan
        data = json.loads(plan.to_json())
        for timed in (data, *data["steps"]):
            timed["seconds"] = 1e-6
        with pytest.raises(PlanError, match="which sends nothing"):
            Plan.from_json(json.dumps(data))


# ---- Steps: checked by their rule as they are built, with what they send, receive and keep live ----

HERE = Mesh(x=4)
APART, OVERLAPPING = Mesh.parse("d=2@4"), Mesh.parse("d=2@3")


def _step(target: Mesh, retained: int = 0) -> Step:
    source, result = Layout.parse("f32[{x}4]", HERE), Layout.parse("f32[{d}8]", target)
    return Step("exchange", source, result, retained_bytes=retained)


def test_a_step_that_no_rule_derives_cannot_be_built_of_step():
    with pytest.raises(StepError, match="lead to other devices"):
        Step("all_gather", Layout.parse("f32[{x}4]", HERE), Layout.parse("f32[16]", APART))
    with pytest.raises(StepError, match="from 4 devices to 2"):
        Step("permute", Layout.parse("f32[16]", HERE), Layout.parse("f32[16]", APART))
    with pytest.raises(StepError, match="stay partial on other devices"):
        Step("exchange", Layout.parse("f32[16] + sum{x}", HERE), Layout.parse("f32[16] + sum{x}", Mesh.parse("x=4@4")))


def test_a_device_has_both_tiles_only_if_it_is_in_both_sets():
    """Tiles of 16 and 32 bytes; messages of 16, which are one run and need no buffer."""
    assert _step(APART).live_bytes == 32
    assert _step(APART, retained=24).live_bytes == 16 + 24
    assert _step(OVERLAPPING).live_bytes == 16 + 32


def test_what_the_busiest_device_sends_and_receives():
    step = _step(APART)
    assert (step.sent_bytes, step.received_bytes, step.launches) == (16, 32, 2)
    gather = Step("all_gather", Layout.parse("f32[{d}8]", APART), Layout.parse("f32[16]", APART))
    assert gather.sent_bytes == gather.received_bytes == 32


# ---- The lines of plans in JSON: views come back, figures that do not fit are refused ----

PLAN_DATA_MESH = rs.Mesh(x=2)
PLAN = rs.plan(
    rs.Move(
        rs.Layout.parse("f32[{x}2, 6]", PLAN_DATA_MESH),
        rs.Layout.parse("f32[6, {x}2]", PLAN_DATA_MESH),
        view="a b -> b a",
    )
)


def test_a_view_comes_back():
    for view in (View.identity((2,)), None):
        assert read_view(Fields.of(view_data(view), "a plan")) == view
    assert rs.Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    "view",
    [None, {"atoms": [["a", 4, None, None], ["b", 6, None, None]], "source": [[0], [1]], "target": [[0], [1]]}, {}, 3],
)
def test_another_view_is_refused(view):
    data = json.loads(PLAN.to_json())
    data["view"] = view
    with pytest.raises(PlanError):
        rs.Plan.from_json(json.dumps(data))
    data = json.loads(PLAN.to_json())
    data["steps"][0]["view"] = view
    with pytest.raises(rs.errors.ReshardError):
        rs.Plan.from_json(json.dumps(data))


# ---- Wrong steps and plans near right ones: the constructors of `Step` and `Plan` must refuse each ----


def test_a_step_of_another_kind_is_refused():
    """An exchange may replace any other step, since it can make any move; no other kind can."""
    for plan in plans():
        for step in (s for s in plan.steps if s.kind != "exchange"):
            for kind in set(RULES) - {step.kind, "exchange"}:
                with pytest.raises(ReshardError):
                    Step(kind, step.operand, step.result)


def test_a_plan_for_another_target_is_refused():
    """The steps of every plan, with each other target of the same mesh."""
    refused = 0
    for plan in plans():
        for other in plans():
            if other.target != plan.target and other.target.mesh == plan.target.mesh:
                with pytest.raises(ReshardError):
                    Plan(plan.source, other.target, plan.steps, plan.donate)
                refused += 1
    assert refused > 20


def test_a_step_whose_result_is_wrong_is_refused():
    """Each result with two holders or two dims swapped, or with a summand too many or too few."""
    refused = 0
    for plan in plans():
        for at, step in enumerate(plan.steps):
            for text in near(str(step.result)):
                try:
                    result = Layout.parse(text, step.result.mesh)
                except ReshardError:
                    continue
                if result == step.result or result.shape != step.result.shape:
                    continue
                with pytest.raises(ReshardError):
                    wrong = Step(step.kind, step.operand, result, step.mode, step.retained_bytes)
                    Plan(plan.source, plan.target, replaced(plan.steps, at, wrong), plan.donate)
                refused += 1
    assert refused > 20


def near(text: str) -> Iterator[str]:
    """Texts of layouts that are close to the given one."""
    for a, b in combinations("xyz", 2):
        yield text.replace(f"{{{a}}}", "{?}").replace(f"{{{b}}}", f"{{{a}}}").replace("{?}", f"{{{b}}}")
    body = text[text.index("[") + 1 : text.index("]")]
    dims = body.split(", ")
    for i, j in combinations(range(len(dims)), 2):
        swapped = list(dims)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield text.replace(body, ", ".join(swapped))
    for op in ("sum", "max"):
        yield f"{text} + {op}{{x}}"
        yield f"{text} + {op}{{y}}"
    yield text.split(" + ")[0]


# ---- What the busiest device sends and receives in all steps, against counting every message ----


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(60))
def test_no_device_sends_or_receives_more_than_the_plan_says(seed: int):
    plan = rs.plan(*random_crossing(random.Random(seed)))
    sent, received = Counter(), Counter()
    for (sender, receiver), elements in matrix(lower_plan(plan)).elements.items():
        sent[sender] += elements * 4
        received[receiver] += elements * 4
    assert max(received.values(), default=0) <= plan.received_bytes
    assert max(sent.values(), default=0) <= plan.sent_bytes
    if [step.kind for step in plan.steps] == ["exchange"]:
        assert max(received.values(), default=0) == plan.received_bytes
        assert max(sent.values(), default=0) == plan.sent_bytes


def test_the_sides_of_disjoint_sets_are_counted_apart():
    source = rs.Layout.parse("f32[{fsdp}4, 8]", rs.Mesh(fsdp=4))
    target = rs.Layout.parse("f32[16, {tp}4]", rs.Mesh.parse("tp=2,rep=4@4"))
    plan = rs.plan(source, target)
    assert [(s.kind, s.sent_bytes, s.received_bytes) for s in plan.steps] == [
        ("exchange", 128, 64),
        ("all_gather", 192, 192),
    ]
    assert (plan.sent_bytes, plan.received_bytes, plan.endpoint_bytes) == (192, 256, 128 + 192)
    assert plan.lower_bound_bytes == plan.endpoint_bound_bytes == 256


# ---- The idle axes of layouts on the way ----

IDLE_MESH = Mesh(x=4, y=4)


@pytest.mark.parametrize(
    ("source", "target", "between", "axes"),
    [
        ("f32[{x}4]", "f32[16]", ["f32[4{y}]", "f32[16]"], ("y",)),
        ("f32[{x}4]", "f32[16]", ["f32[{x}4]", "f32[16]"], ()),
        ("f32[{x:(1)2}8]", "f32[16]", ["f32[{x}4]", "f32[16]"], ("x:(2)2",)),
        ("f32[16]", "f32[{x:(2)2}8]", ["f32[{x}{y}1]"], ("x:(1)2", "y")),
        ("f32[16] + sum{x}", "f32[16]", ["f32[{x}4]", "f32[16]"], ()),
    ],
)
def test_idle_axes_are_those_that_neither_end_uses(source: str, target: str, between: list[str], axes: tuple[str, ...]):
    layouts = [Layout.parse(text, IDLE_MESH) for text in (source, target)]
    assert find_idle_axes(*layouts, [Layout.parse(text, IDLE_MESH) for text in between]) == axes
