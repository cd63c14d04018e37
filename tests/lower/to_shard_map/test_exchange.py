"""Exchanges on a tile, round by round: even and uneven, whole and in pieces."""

from __future__ import annotations

import jax
import pytest

from reshard import hlo
from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map import exchange, place
from reshard.lower.to_shard_map import exchange as boxes
from reshard.lower.to_shard_map import exchange as joining
from reshard.plans.rules.cost import StepMode
from tests.lower.to_shard_map.on_xla import MESH, check_on_xla, one_step, stacked
from tests.sampling import sampled

STEPS = [
    ("f32[{x}4, 8]", "f32[{y}8, 8]"),
    ("f32[{x}4, 8]", "f32[16, {x}2]"),
    ("f32[{x}3/10, 8]", "f32[{y}5, 8]"),
    ("f32[{x}{y}2, 8]", "f32[16, 8]"),
]
LOOPS = [
    ("f32[{x}{y}2, 8]", "f32[{y}8, {x}2]", None),
    ("f32[{x}4, 16]", "f32[16, {x}{y}2]", None),
    ("f32[{x}{y}2, 8]", "f32[16, {y}{x}1]", None),
    ("f32[{x}4, 8]", "f32[16, {x}2]", 3),  # in pieces, the last of which is shorter
    ("f32[{x}{y}2]", "f32[{y}{x}2]", 1),
    ("f32[{x}{y}2, 8]", "f32[16, {x:(1)2}4]", None),  # a part of an axis
    ("f32[{x}3/10, 8]", "f32[{y}5, 8]", 4),  # uneven
]


@pytest.mark.fast(2)
@pytest.mark.parametrize(("source", "target"), STEPS)
def test_exchanges(source: str, target: str):
    check_on_xla(one_step("exchange", source, target))


@pytest.mark.fast(1)
@pytest.mark.parametrize("chunk", sampled([1, 3, 8, 100], 3, 100))
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[{x}4, 8]", "f32[16, {x}2]"),  # even, many shares of a device's own
        ("f32[{x}4, 8]", "f32[{y}8, 8]"),
        ("f32[{x}3/10, 8]", "f32[{y}5, 8]"),
        ("f32[{x}{y}2, 8]", "f32[16, 8]"),
    ],
)
def test_exchanges_in_pieces(source: str, target: str, chunk: int):
    """Local copies are in pieces too."""
    check_on_xla(one_step("exchange", source, target, StepMode(chunk)))


def rounds_of(source: str, target: str, chunk: int | None = None) -> list[int]:
    """The number of rounds in each group that one loop runs."""
    (step,) = lower_plan(one_step("exchange", source, target, StepMode(chunk))).instructions
    assert isinstance(step, Exchange)
    return [len(turns) for turns in exchange._group_alike(step.rounds)]


def test_only_pieces_between_the_same_devices_share_a_loop():
    # Three messages of 8 elements to the other devices along x, whole or in pieces of 2 or 1.
    assert rounds_of("f32[{x}4, 8]", "f32[16, {x}2]") == [1, 1, 1]
    assert rounds_of("f32[{x}4, 8]", "f32[16, {x}2]", 2) == [4, 4, 4]
    assert rounds_of("f32[{x}4, 8]", "f32[16, {x}2]", 1) == [8, 8, 8]
    assert rounds_of("f32[{x}4, 8]", "f32[16, {x}2]", 4) == [1] * 6  # two pieces are too few


def test_many_rounds_alike_are_one_loop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchange, "LOOPED", 3)
    assert rounds_of("f32[{x}4, 8]", "f32[16, {x}2]") == [3]
    assert rounds_of("f32[{x}4, 8]", "f32[16, {x}2]", 2) == [12]  # three loops otherwise
    assert rounds_of("f32[{x}2, 8]", "f32[{y}4, 8]") == [1, 1]
    assert rounds_of("f32[{x}3/10, 8]", "f32[{y}5, 8]") == [1] * 3  # boxes of several shapes


@pytest.mark.fast(3)
@pytest.mark.parametrize(("source", "target", "chunk"), LOOPS)
def test_loops_over_rounds_between_any_devices(
    source: str, target: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
):
    """One loop, with a branch for each list of pairs; tables are cut to what they depend on, in bytes."""
    monkeypatch.setattr(joining, "find_message_orders", lambda step: None)
    monkeypatch.setattr(exchange, "LOOPED", 2)
    monkeypatch.setattr(place, "LARGE", 1)
    monkeypatch.setattr(place, "WIDE", 1)
    check_on_xla(one_step("exchange", source, target, StepMode(chunk)))


def test_a_loop_sends_what_is_promised(monkeypatch: pytest.MonkeyPatch):
    """Each iteration runs one of the branches."""
    monkeypatch.setattr(joining, "find_message_orders", lambda step: None)
    monkeypatch.setattr(exchange, "LOOPED", 2)
    plan = one_step("exchange", "f32[{x}4, 8]", "f32[16, {x}2]")
    f, _ = stacked(lower_plan(plan), MESH.axes)
    text = f.lower(jax.ShapeDtypeStruct((8, 4, 8), "float32")).compile().as_text()
    assert " while(" in text and " conditional(" in text
    permutes = hlo.traffic(hlo.parse(text)).by_kind["permute"]
    assert (permutes.launches, permutes.received_bytes) == (plan.launches, plan.received_bytes)


def test_transfers_of_a_kind_have_one_shape_and_each_device_once():
    (step,) = lower_plan(one_step("exchange", "f32[{x}3/10, 8]", "f32[{y}5, 8]")).instructions
    assert isinstance(step, Exchange)
    for turn in [step.local, *step.rounds]:
        kinds = boxes.group_by_form(turn)
        assert sorted(t for kind in kinds for t in kind) == sorted(turn)
        for kind in kinds:
            assert len({t.form for t in kind}) == 1
            assert len({t.receiver for t in kind}) == len(kind)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("source", "target"), STEPS)
def test_exchanges_round_by_round(source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    """CPUs join messages at the end where they can; other platforms never do."""
    monkeypatch.setattr(joining, "find_message_orders", lambda step: None)
    check_on_xla(one_step("exchange", source, target))
