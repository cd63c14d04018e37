"""`exchange`: costs by hand with and without chunks, in place, and refusals."""

from __future__ import annotations

from math import prod

import pytest

from reshard.errors import StepError
from reshard.geometry.figures import exchange_figures, received_by_device
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.collectives import check_step, in_place_cut
from reshard.plans.rules.step_mode import Cost, StepMode
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.view import Atom, View
from tests.geometry import brute
from tests.oracle import check
from tests.plans.rules.steps import MESH, cost, derived, one_step


@pytest.mark.parametrize(
    ("operand", "result", "chunk", "expected"),
    [
        # Messages of 4 x 4 elements from three others; two staging buffers of 64 B.
        ("f32[{x}4, 16]", "f32[16, {x}4]", None, Cost(192, 3, 128)),
        # Chunks of two rows: six rounds, buffers of 32 B.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 8, Cost(192, 6, 64)),
        # Chunks of nine elements are two rows as well.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 9, Cost(192, 6, 64)),
        # One row of four is contiguous in both tiles: no buffers.
        ("f32[{x}4, 16]", "f32[16, {x}4]", 4, Cost(192, 12, 0)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 1, Cost(192, 48, 0)),
        # Like an all-gather: whole tiles, in place.
        ("f32[{x}4]", "f32[16]", None, Cost(48, 3, 0)),
        # A digit changes holders while another becomes local: no device has its share yet.
        ("f32[{x:(1)2}{x:(2)2}4]", "f32[{x:(2)2}8]", None, Cost(32, 2, 0)),
        # Uneven: device 3 has one element of ten and fetches three tiles of three.
        ("f32[{x}3/10]", "f32[10]", None, Cost(36, 3, 24)),
        ("f32[10]", "f32[{x}3/10]", None, Cost(0, 0, 0)),
        ("f32[{x}4]", "f32[{x}4]", None, Cost(0, 0, 0)),
        ("f32[0, {x}]", "f32[0, 4]", None, Cost(0, 0, 0)),
    ],
)
def test_exchange(operand: str, result: str, chunk: int | None, expected: Cost):
    assert cost("exchange", operand, result, StepMode(chunk)) == expected


@pytest.mark.parametrize(
    ("operand", "result", "chunk", "expected"),
    [
        # The rounds are those of an exchange that keeps its operand, but chunks of a packed message need not be rows.
        ("f32[{x}4, 16]", "f32[16, {x}4]", None, Cost(192, 3, 128)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 9, Cost(192, 6, 64)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 6, Cost(192, 9, 48)),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 1, Cost(192, 48, 0)),
        ("f32[{x}4]", "f32[16]", None, Cost(48, 3, 32)),
        ("f32[{x}4]", "f32[{x}4]", None, Cost(0, 0, 0)),
        ("f32[0, {x}]", "f32[0, 4]", None, Cost(0, 0, 0)),
    ],
)
def test_exchange_in_place(operand: str, result: str, chunk: int | None, expected: Cost):
    assert cost("exchange", operand, result, StepMode(chunk, in_place=True)) == expected


@pytest.mark.parametrize(
    ("operand", "result", "mesh"),
    [("f32[{x}3/10]", "f32[10]", MESH), ("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3))],
)
def test_exchange_in_place_needs_even_layouts(operand: str, result: str, mesh: Mesh):
    with pytest.raises(StepError, match="only even layouts with a common refinement go in place"):
        cost("exchange", operand, result, StepMode(in_place=True), mesh)


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunks_have_elements(chunk: int):
    for in_place in (False, True):
        with pytest.raises(StepError, match="at least 1 element"):
            cost("exchange", "f32[{x}4]", "f32[16]", StepMode(chunk, in_place))


def test_figures_of_random_pairs_are_those_of_a_count():
    for operand, result in derived("exchange", count=120):
        if operand.partial:
            continue
        step_cost = check_step("exchange", operand, result)
        assert step_cost.received == 4 * brute.fewest_received(operand, result), f"{operand} -> {result}"
        size = exchange_figures(operand, result)
        assert size.rounds == brute.rounds(operand, result), f"{operand} -> {result}"
        if size.rounds:
            assert size.message >= brute.largest_message(operand, result)
            check(one_step("exchange", operand, result))


@pytest.mark.parametrize("in_place", [False, True])
def test_chunks_trade_scratch_for_rounds(in_place: bool):
    """Messages of 5 x 7 elements among 3 devices: every chunk size, as the runtime measures it."""
    mesh = Mesh(x=3)
    operand, result = Layout.parse("f32[{x}5, 21]", mesh), Layout.parse("f32[15, {x}7]", mesh)
    for chunk in (1, 6, 7, 8, 14, 20, 34, 35, 100):
        plan = chain(operand, result, [StepSpec("exchange", result, StepMode(chunk, in_place))], donate=in_place)
        assert plan.received_bytes == 2 * 35 * 4
        assert plan.launches % 2 == 0 and plan.launches >= 2 * -(-35 // chunk)
        check(plan)


def test_cutting_messages_of_different_shapes():
    """Device 3 sends one element and fetches three tiles of three: chunks of two are 2 + 1 elements."""
    size = exchange_figures(Layout.parse("f32[{x}3/10]", MESH), Layout.parse("f32[10]", MESH))
    assert (size.rounds, size.message, size.run) == (3, 3, 1)
    assert [size.cut(cap) for cap in (1, 2, 3, 99)] == [(9, 1), (6, 2), (3, 3), (3, 3)]


@pytest.mark.parametrize(("message", "chunk"), [(0, None), (0, 3), (1, 1), (7, 3), (7, 7), (7, 8), (10, 4), (35, 6)])
def test_in_place_chunks_cover_the_message(message: int, chunk: int | None):
    count, largest = in_place_cut(message, chunk)
    assert count * largest >= message > (count - 1) * largest or message == count == largest == 0
    assert largest <= (chunk or message)


def test_prod_of_extents_is_the_message():
    """An even exchange sends the digits that are local on both sides."""
    size = exchange_figures(Layout.parse("f32[{x}6, 20, 3]", MESH), Layout.parse("f32[24, {x}5, 3]", MESH))
    ((((rounds, ((extents, count),)),),),) = size.loads()
    assert (rounds, extents, count, prod(extents)) == (3, (6, 5, 3), 1, size.message)
    assert size.run == 15


def test_a_digit_that_both_layouts_hold_does_not_end_a_run():
    size = exchange_figures(Layout.parse("f32[{x}4, 6{y}]", MESH), Layout.parse("f32[16, 6{y}]", MESH))
    assert size.run == size.message == 4 * 6


# ---- through a view ---------------------------------------------------------------------------------

SQUARE = Mesh(x=2, y=2)
TURN = View((Atom("a", 3), Atom("b", 4)), ((0, 1),), ((1, 0),))


def test_through_a_view_bytes_rounds_and_scratch_are_those_of_the_messages():
    both = [Layout.parse(text, SQUARE) for text in ("f32[{x}{y}3]", "f32[{y}{x}3]")]
    figures, received = exchange_figures(*both, TURN), received_by_device(*both, TURN).most
    scratch = 8 * figures.message if figures.message > figures.run else 0
    assert check_step("exchange", *both, StepMode(view=TURN)) == (4 * received, figures.rounds, scratch)
    assert received > 0
    with pytest.raises(StepError, match="without a view"):
        check_step("exchange", *both, StepMode(view=TURN, in_place=True))
    summed = [Layout.parse(text, SQUARE) for text in ("f32[{x}6] + sum{y}", "f32[{x}6] + sum{y}")]
    with pytest.raises(StepError, match="of no sum"):
        check_step("exchange", *summed, StepMode(view=TURN, relay=True))


def test_through_a_view_a_sum_stays_a_sum_on_one_mesh():
    both = [Layout.parse(text, SQUARE) for text in ("f32[{x}6] + sum{y}", "f32[{x}6] + sum{y}")]
    assert check_step("exchange", *both, StepMode(view=TURN)).received == 8
    other = Layout.parse("f32[{y}6] + sum{x}", SQUARE)
    with pytest.raises(StepError):
        check_step("exchange", both[0], other, StepMode(view=TURN))
