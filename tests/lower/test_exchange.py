"""Exchanges: rounds by hand, boxes that cover what they must, and one device's part of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.lower.exchange_rounds import Exchange, lower_exchange
from reshard.plans.plan import Step
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.layouts import pairs
from tests.lower.covering import busiest, covers, matchings


def exchange_of(before: Layout, after: Layout, chunk: int | None = None, device: int | None = None) -> Exchange:
    return lower_exchange(Step("exchange", before, after, StepMode(chunk)), device)


def test_rounds_of_an_all_to_all_by_exchange():
    """Three rounds of other pairs each; in pieces of at most 5 elements, a share of 16 makes four."""
    lowered = exchange_of(*(Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]")), 5)
    assert len(lowered.rounds) == 12 and {t.elements for turn in lowered.rounds for t in turn} == {4}
    pairs = {(t.sender, t.receiver) for turn in lowered.rounds for t in turn}
    assert pairs == {(a, b) for a in range(4) for b in range(4) if a != b}


def test_kept_shares_cross_no_wire():
    """Turns in which nobody sends are local copies; those in which some send have transfers to oneself too."""
    mesh = Mesh(x=2, y=2)
    lowered = exchange_of(Layout.parse("f32[{x}1, {y}2]", mesh), Layout.parse("f32[2, {x}2]", mesh))
    local, turns = lowered.local, lowered.rounds
    assert local == ()
    assert [(t.sender, t.receiver) for t in turns[0]] == [(0, 0), (2, 1), (3, 2), (1, 3)]
    assert [(t.sender, t.receiver) for t in turns[1]] == [(2, 0), (0, 1), (1, 2), (3, 3)]


def test_a_tile_is_reshaped_to_the_axes_that_boxes_need():
    """The four rows of a tile stay together; its columns fall into three shares of two."""
    lowered = exchange_of(Layout.parse("f32[{x}4, 6]", Mesh(x=3)), Layout.parse("f32[12, {x}2]", Mesh(x=3)))
    assert (lowered.send.digits, lowered.receive.digits) == ((4, 6), (12, 2))
    lowered = exchange_of(Layout.parse("f32[{x}4, 6]", Mesh(x=3)), Layout.parse("f32[12, 2{x}]", Mesh(x=3)))
    assert lowered.send.digits == (4, 2, 3)  # every third column: a box of its own axis


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        (Mesh(x=3), "f32[{x}2, 6]", "f32[6, {x}2]"),
        (Mesh(x=2, y=2), "f32[{x}{y}1, 6]", "f32[4, {x}3]"),
        (Mesh(x=5), "f32[{x}3/11, 2]", "f32[11, 2]"),  # the last piece has padding, and one device nothing
        (Mesh(x=3, y=2), "f32[{x}4/10]", "f32[{y}{x}2/10]"),
        (Mesh(x=2, y=3), "f32[{x}6, 7]", "f32[{y}4, 7]"),
        (Mesh(x=2), "f32[5{x}2]", "f32[{x}10]"),
        (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}3]", "f32[12]"),
        (Mesh(x=4), "f32[0, {x}2]", "f32[0, 8]"),
    ],
)
def test_every_element_arrives_once(mesh: Mesh, source: str, target: str, chunk: int | None):
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    step = Step("exchange", before, after, StepMode(chunk))
    lowered = lower_exchange(step)
    turns = lowered.rounds
    matchings(turns)
    covers(step, lowered)
    assert len(turns) == step.launches == busiest(turns)
    assert all(t.elements <= (chunk or t.elements) for turn in turns for t in turn)


@settings(max_examples=60)
@given(pairs(most_rank=2), st.sampled_from([None, 1, 3]))
def test_one_device_lists_what_all_list_for_it(pair: tuple[Layout, Layout], chunk: int | None):
    """Its transfers alone, in the rounds and in the order of the whole."""
    if pair[0].mesh.devices != pair[1].mesh.devices:
        return
    whole = exchange_of(*pair, chunk)
    for device in pair[0].mesh.devices:
        own = exchange_of(*pair, chunk, device)
        assert (own.send, own.receive, own.staged) == (whole.send, whole.receive, whole.staged)
        crossing = [[t for t in turn if device in (t.sender, t.receiver)] for turn in whole.rounds]
        kept = [t for turn in crossing if all(t.sender == t.receiver for t in turn) for t in turn]
        assert sorted(own.local) == sorted([*(t for t in whole.local if t.receiver == device), *kept])
        assert [sorted(turn) for turn in own.rounds] == [
            sorted(turn) for turn in crossing if any(t.sender != t.receiver for t in turn)
        ]
