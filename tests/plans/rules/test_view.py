"""The rules of view, take, put and cast: what they derive, what they refuse, and when a tile's memory stays."""

import pytest

import reshard as rs
from reshard.errors import StepError
from reshard.plans.rules.collectives import VIEW_RULES, check_step
from reshard.plans.rules.step_mode import FREE, StepMode
from reshard.plans.rules.view_steps import keeps_memory, tile_order
from reshard.types.view import Atom, View, Window

MESH = rs.Mesh(x=4, y=2)
OPEN = View((Atom("t", 3), Atom("h", 8)), ((0, 1),), ((0,), (1,)))
TURN = View((Atom("t", 3), Atom("h", 8)), ((0, 1),), ((1,), (0,)))
PART = View((Atom("t", 1, Window(1, 3)), Atom("h", 8)), ((0,), (1,)), ((0,), (1,)))
FILL = View((Atom("t", 1, None, Window(1, 3)), Atom("h", 8)), ((0,), (1,)), ((0,), (1,)))


def layout(text: str) -> rs.Layout:
    return rs.Layout.parse(text, MESH)


STEPS = [
    ("view", "f32[3{x}2]", "f32[3, {x}2]", OPEN),
    ("view", "f32[3{x}2]", "f32[{x}2, 3]", TURN),
    (
        "view",
        "f32[{x}2 3] + sum{y}",
        "f32[{x}2, 3] + sum{y}",
        View((Atom("h", 8), Atom("t", 3)), ((0, 1),), ((0,), (1,))),
    ),
    ("take", "f32[3, {x}2]", "f32[1, {x}2]", PART),
    ("put", "f32[1, {x}2]", "f32[3, {x}2]", FILL),
    ("cast", "f32[3, {x}2]", "bf16[3, {x}2]", None),
]


@pytest.mark.parametrize(("kind", "operand", "result", "view"), STEPS)
def test_steps(kind, operand, result, view):
    assert check_step(kind, layout(operand), layout(result), StepMode(view=view)) == FREE


def test_there_is_a_step_of_every_kind():
    assert {kind for kind, *_ in STEPS} == set(VIEW_RULES)


@pytest.mark.parametrize(
    ("kind", "operand", "result", "view"),
    [
        ("view", "f32[{x}6]", "f32[3, {x}2]", OPEN),  # devices would have to send
        ("view", "f32[3{x}2]", "f32[3, {y}4]", OPEN),
        ("view", "f32[3{x}2]", "f32[{x}2, 3]", OPEN),  # the shape of another view
        ("view", "f32[3{x}2]", "bf16[3, {x}2]", OPEN),
        ("view", "f32[3{x}2]", "f32[3, {x}2] + sum{y}", OPEN),
        ("view", "f32[3, {x}2]", "f32[1, {x}2]", PART),
        ("view", "f32[3{x}2]", "f32[3, {x}2]", None),
        ("take", "f32[3, {x}2]", "f32[1, {y}4]", PART),
        ("take", "f32[{y}2/3, {x}2]", "f32[1, {x}2]", PART),
        ("take", "f32[3, {x}2]", "f32[{y}/1, {x}2]", PART),
        ("take", "f32[1, {x}2]", "f32[3, {x}2]", FILL),
        ("put", "f32[3, {x}2]", "f32[1, {x}2]", PART),
        ("put", "f32[1, {x}2]", "f32[{y}2/3, {x}2]", FILL),
        ("cast", "f32[3, {x}2]", "bf16[3, {y}4]", None),
        ("cast", "f32[3, {x}2]", "f32[3, {x}2]", None),
        ("cast", "f32[3, {x}2] + sum{y}", "bf16[3, {x}2] + sum{y}", None),
        ("cast", "f32[3, {x}2]", "bf16[3, {x}2]", OPEN),
        ("exchange", "f32[{x}6] + sum{y}", "f32[3, {x}2]", OPEN),
        ("slice", "f32[3, {x}2]", "f32[3, {x}2]", OPEN),
        ("exchange", "f32[24]", "f32[{x}6]", OPEN),
    ],
)
def test_refusals(kind, operand, result, view):
    with pytest.raises(StepError):
        check_step(kind, layout(operand), layout(result), StepMode(view=view))


def test_other_devices_and_options_are_refused():
    other = rs.Layout.parse("f32[3, {x}2]", rs.Mesh({"x": 4, "y": 2}, device_ids=range(1, 9)))
    for kind in VIEW_RULES:
        with pytest.raises(StepError):
            check_step(kind, layout("f32[3{x}2]"), other, StepMode(view=OPEN))
        with pytest.raises(StepError):
            check_step(kind, layout("f32[3{x}2]"), layout("f32[3, {x}2]"), StepMode(parts=2, view=OPEN))


def test_memory_stays_where_the_order_does():
    assert keeps_memory("view", layout("f32[3{x}2]"), layout("f32[3, {x}2]"), StepMode(view=OPEN))
    assert not keeps_memory("view", layout("f32[3{x}2]"), layout("f32[{x}2, 3]"), StepMode(view=TURN))
    held = View((Atom("h", 4), Atom("t", 3)), ((0,), (1,)), ((1,), (0,)))
    assert keeps_memory("view", layout("f32[{x}, 3]"), layout("f32[3, {x}]"), StepMode(view=held))
    assert not keeps_memory("take", layout("f32[3, {x}2]"), layout("f32[1, {x}2]"), StepMode(view=PART))
    assert tile_order(layout("f32[3{x}2]"), layout("f32[{x}2, 3]"), TURN) == ((3, 2), (1, 0))


def test_a_step_counts_one_tile_where_memory_stays():
    both = layout("f32[3{x}2]"), layout("f32[3, {x}2]")
    assert rs.Step("view", *both, StepMode(view=OPEN)).live_bytes == both[0].tile_bytes
    turned = layout("f32[{x}2, 3]")
    assert rs.Step("view", both[0], turned, StepMode(view=TURN)).live_bytes == 2 * both[0].tile_bytes
