"""The reasons for each kind of step, with views too, and the sentences on bytes, memory and time."""

import random
import re

import pytest

import reshard as rs
from reshard.errors import BudgetError
from reshard.plans.plan import Step
from reshard.show.explain import assess_plan, explain_step, move_of, show_reasons
from reshard.show.plan_table import live_parts
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text, seconds_text
from tests.draw.cases import planned
from tests.layouts import random_layout
from tests.proofs.test_proof import PLANS
from tests.show.printing import printed


def test_every_step_of_random_plans_has_a_reason():
    chance = random.Random(1)
    kinds = set()
    for mesh, networks in ((rs.Mesh(x=4, y=2), (None, "h100")), (rs.Mesh(a=2, b=3, c=2), (None,))):
        for _ in range(150):
            source, target = (random_layout(chance, mesh, (12, 24)) for _ in range(2))
            for network in networks:
                plan = rs.plan(source, target, network=network)
                for step in plan.steps:
                    kinds.add(step.kind)
                    assert len(explain_step(step)) > 40
    assert kinds >= {"slice", "all_gather", "all_to_all", "permute", "exchange"}


M = Mesh(x=3, y=5)
WHY = [
    ("slice", "f32[15]", "f32[{y}3]", "dim 0 becomes split over y. Nothing is sent", "5 times smaller"),
    ("all_gather", "f32[{x}{y}1]", "f32[15]", "collects the 15 tiles along x and y", "the tile grow (15 times)"),
    ("all_to_all", "f32[{x}5, 6]", "f32[15, {x}2]", "in groups of 3 does it all", "keeps 1/3 of its tile"),
    ("permute", "f32[{x}5]", "f32[{x}5]", "only change devices", "different orders"),
    ("reduce_scatter", "f32[15] + sum{y}", "f32[{y}3]", "the sum of what the devices along y hold", "split over y"),
    ("all_reduce", "f32[15] + max{x}", "f32[15]", "the max of what the devices along x hold", "each keeps the whole"),
    ("split_sum", "f32[15]", "f32[15] + sum{y}", "becomes a sum along y: each element stays", "the others have zeros"),
    ("split_sum", "f32[{x}{y}1]", "f32[15] + max{x}{y}", "no longer split over x and y", "have the least value"),
    ("exchange", "f32[{x}5]", "f32[{y}3]", "do not nest", "sends every other one just the boxes that it needs"),
    (
        "exchange",
        "f32[{x}3/7]",
        "f32[{y}2/7]",
        "dim 0 (pieces of 3 before, pieces of 2 after) are uneven",
        "in a round",
    ),
]


@pytest.mark.parametrize(("kind", "before", "after", "first", "second"), WHY, ids=[f"{w[0]} {w[2]}" for w in WHY])
def test_reasons_name_axes_dims_and_numbers(kind, before, after, first, second):
    words = explain_step(Step(kind, Layout.parse(before, M), Layout.parse(after, M)))
    assert first in words and second in words


def test_a_permute_names_the_digits_that_change_hands():
    mesh = Mesh(x=3, y=3)
    words = explain_step(Step("permute", Layout.parse("f32[{x}{y}5]", mesh), Layout.parse("f32[{y}{x}5]", mesh)))
    assert words.endswith("Here, dim 0 passes from x then y to y then x.")


def test_a_gather_that_others_follow_has_another_reason():
    step = Step("all_gather", Layout.parse("f32[{x}5]", M), Layout.parse("f32[15]", M))
    assert "It comes last" in explain_step(step) and "It comes before other moves" in explain_step(step, last=False)


def test_different_meshes_are_a_reason():
    one, other = Mesh(x=4), Mesh({"x": 4}, device_ids=[1, 2, 3, 0])
    step = Step("exchange", Layout.parse("f32[{x}4]", one), Layout.parse("f32[{x}4]", other))
    assert "list the devices in different orders" in explain_step(step)


@pytest.mark.parametrize("name", ["three dims", "uneven", "partial", "block-cyclic"])
def test_the_smallest_budget_is_the_smallest(name):
    plan = planned(name)
    memory = assess_plan(plan, None)[1]
    smallest = int(match[1]) if (match := re.search(r"from (\d+) B", memory)) else plan.peak_bytes
    assert rs.plan(plan.source, plan.target, budget=smallest).peak_bytes <= smallest
    with pytest.raises(BudgetError):
        rs.plan(plan.source, plan.target, budget=smallest - 1)


def test_bytes_beyond_the_bound_are_compared_with_the_plan_for_bytes():
    mesh = Mesh(dcn=2, x=4)
    source, target = Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[{dcn}8, {x}4]", mesh)
    plan, least = rs.plan(source, target, network="tpu-v5p"), rs.plan(source, target)
    assert plan.received_bytes > plan.lower_bound_bytes
    bytes_, _, time = assess_plan(plan, "tpu-v5p")
    assert f"would receive {bytes_text(least.received_bytes)} in" in bytes_
    assert time.startswith(f"Time: {seconds_text(plan.seconds)} are predicted on tpu-v5p")


def test_every_step_has_a_numbered_paragraph():
    plan = planned("budget")
    lines = printed(show_reasons, plan, None).splitlines()
    assert [line for line in lines if re.match(r"  \d  ", line)][-1].startswith(f"  {len(plan.steps)}  ")
    assert {"why these steps", "how good it is"} <= set(lines)
    assert "no step is needed" in printed(show_reasons, planned("identity"), None)


def test_words():
    words = {name: [explain_step(step) for step in plan.steps] for name, plan in PLANS.items()}
    assert "keeps it" in words["take"][1] and "t=1 of the source's 3" in words["take"][1]
    assert "its other parts stay" in words["put"][-2]
    assert words["cast"][0].startswith("every device casts its tile from float32 to bfloat16: ")
    assert "transposed" in words["turn"][-1] and "memory stays as it is" in words["turn"][0]
    assert "no collective fits" in words["boxes"][0]
    assert all(assess_plan(plan, None) for plan in PLANS.values())


def test_the_move_of_a_plan():
    for plan in PLANS.values():
        assert rs.plan(move_of(plan)) == plan


def test_what_devices_hold_is_the_reason():
    mesh = rs.Mesh(x=2)
    source, target, have = (rs.Layout.parse(text, mesh) for text in ("f32[{x}4, 6]", "f32[8, 6]", "f32[8, {x}3]"))
    plan = rs.plan(source, target, have=have, changed=[1])
    said = explain_step(plan.steps[0])
    assert said.startswith("devices hold f32[8, {x}3] already") and "what has changed: [1, :]" in said
    assert sum(nbytes for _, nbytes in live_parts(plan.steps[0])) == plan.peak_bytes
