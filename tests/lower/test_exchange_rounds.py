"""Exchanges: rounds by hand, one device's part of them, and slot by slot, run here without any runtime."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import PlanError
from reshard.geometry.refine import refine
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, lower_exchange, lower_in_place, place_offsets
from reshard.plans.plan import Step
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests.layouts import pairs, random_crossing, random_pair
from tests.lower.covering import covers, matchings
from tests.oracle import tiles_of


def exchange_of(before: Layout, after: Layout, chunk: int | None = None, device: int | None = None) -> Exchange:
    return lower_exchange(Step("exchange", before, after, StepMode(chunk)), device)


def test_kept_shares_cross_no_wire():
    """Turns in which nobody sends are local copies; those in which some send have transfers to oneself too."""
    mesh = Mesh(x=2, y=2)
    lowered = exchange_of(Layout.parse("f32[{x}1, {y}2]", mesh), Layout.parse("f32[2, {x}2]", mesh))
    local, turns = lowered.local, lowered.rounds
    assert local == ()
    assert [(t.sender, t.receiver) for t in turns[0]] == [(0, 0), (2, 1), (3, 2), (1, 3)]
    assert [(t.sender, t.receiver) for t in turns[1]] == [(2, 0), (0, 1), (1, 2), (3, 3)]


@settings(max_examples=50)
@given(st.randoms(), st.sampled_from([-1, 0, 1]), st.booleans())
def test_chunks_about_as_long_as_the_longest_message(choose: random.Random, more: int, relay: bool):
    """Of several blocks in one message, the rounds are those of the promise, on other devices and relayed too."""
    before, after = random_crossing(choose, counts=(1, 2, 3, 4)) if relay else random_pair(choose, most_rank=2)
    whole = lower_exchange(Step("exchange", before, after, StepMode(relay=relay)))
    longest = max([t.elements for turn in whole.rounds for t in turn if t.sender != t.receiver], default=0)
    step = Step("exchange", before, after, StepMode(max(1, longest + more), relay=relay))
    lowered = lower_exchange(step)
    matchings(lowered.rounds)
    covers(step, lowered)
    assert len(lowered.rounds) == step.launches
    assert more < 0 or not longest or lowered == replace(whole, staged=lowered.staged)


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


# ---- in place ------------------------------------------------------------------------------------

EMPTY = -1
Slots = dict[int, np.ndarray]
"""By device, one row a slot."""


def packed(step: ExchangeInPlace, tiles: dict[int, np.ndarray]) -> Slots:
    slots = {device: np.full((step.slots, step.slot), EMPTY) for device in tiles}
    for device, tile in tiles.items():
        for slot, place in step.pack[device]:
            slots[device][slot] = tile.reshape(-1)[list(place_offsets(step.send, place))]
    return slots


def after_rounds(step: ExchangeInPlace, slots: Slots) -> list[Slots]:
    """The slots after each round; all messages of a round are read before any is written."""
    history = []
    for turn in step.rounds:
        before = {device: rows.copy() for device, rows in slots.items()}
        slots = {device: rows.copy() for device, rows in slots.items()}
        for t in turn:
            piece = slice(t.start, t.start + t.length)
            slots[t.receiver][t.dst_slot, piece] = before[t.sender][t.src_slot, piece]
        history.append(slots)
    return history


def unpacked(step: ExchangeInPlace, slots: Slots) -> dict[int, np.ndarray]:
    tiles = {}
    for device, rows in slots.items():
        tiles[device] = np.full(step.receive.elements, EMPTY)
        for slot, place in step.unpack[device]:
            tiles[device][list(place_offsets(step.receive, place))] = rows[slot]
    return tiles


def sound(source: Layout, target: Layout, chunk: int | None = None) -> ExchangeInPlace:
    step = lower_in_place(source, target, chunk)
    slots = packed(step, tiles_of(source))
    end = [slots, *after_rounds(step, slots)][-1]
    wanted = tiles_of(target)
    for device, tile in unpacked(step, end).items():
        assert np.array_equal(tile, wanted[device].reshape(-1)), f"device {device}: {source} -> {target}"
    assert step.slot * step.slots == max(step.send.elements, step.receive.elements)
    assert all(0 <= slot < step.slots for t in step.rounds for m in t for slot in (m.src_slot, m.dst_slot))
    for turn in step.rounds:
        assert len({t.sender for t in turn}) == len({t.receiver for t in turn}) == len(turn) > 0
        assert all(t.sender != t.receiver for t in turn)
    return step


# ---- the example of the docstring ------------------------------------------------------------------

MESH = Mesh(x=2, y=2)
BEFORE, AFTER = Layout.parse("f32[{x}{y}1, 2]", MESH), Layout.parse("f32[4, {x}1]", MESH)


def row(name: str, tiles: list[np.ndarray]) -> str:
    cells = [" ".join("." if i == EMPTY else str(i) for i in tile.reshape(-1)) for tile in tiles]
    return f"{name:<10}" + "".join(f"{cell:<14}" for cell in cells).rstrip()


def test_the_table_of_the_docstring_is_what_happens():
    step = sound(BEFORE, AFTER)
    start = packed(step, tiles_of(BEFORE))
    history = [start, start, *after_rounds(step, start)]  # nothing is sent in turn 0
    rows = [row("tile", list(tiles_of(BEFORE).values())), row("pack", list(start.values()))]
    rows += [row(f"turn {at}", list(slots.values())) for at, slots in enumerate(history[1:])]
    rows.append(row("unpack", list(unpacked(step, history[-1]).values())))
    assert len(rows) == 7
    for line in rows:
        assert line in (lower_in_place.__doc__ or ""), line


# ---- any pair ----------------------------------------------------------------------------------------


def test_random_pairs():
    choose, done = random.Random(8), 0
    while done < 120:
        source, target = random_pair(choose, most_rank=2)
        r = refine(source, target)
        if r is None or not r.exact or source == target or r.pieces * r.common > 400:
            continue
        sound(source, target, choose.choice((None, 1, 2, 5)))
        done += 1


# ---- staging, and what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "chunk", "staged"),
    [
        # Shares of 4 elements.
        ("f32[{x}2, 6]", "f32[6, {x}2]", None, True),
        ("f32[{x}2, 6]", "f32[6, {x}2]", 4, True),
        ("f32[{x}2, 6]", "f32[6, {x}2]", 3, True),
        ("f32[{x}2, 6]", "f32[6, {x}2]", 2, True),
        ("f32[{x}2, 6]", "f32[6, {x}2]", 1, False),
        # Shares of one element: read and written at once, whatever the chunk.
        ("f32[{x}1, 3]", "f32[3, {x}1]", None, False),
        ("f32[{x}1, 3]", "f32[3, {x}1]", 5, False),
        ("f32[{x}1]", "f32[3]", 1, False),
        # Nothing at all.
        ("f32[0, {x}2]", "f32[0, 6]", None, False),
    ],
)
def test_messages_of_several_elements_are_staged(source: str, target: str, chunk: int | None, staged: bool):
    before, after = Layout.parse(source, Mesh(x=3)), Layout.parse(target, Mesh(x=3))
    step = lower_in_place(before, after, chunk)
    assert step.staged is staged
    assert step.staged == any(t.length > 1 for turn in step.rounds for t in turn)
    assert step.staged == (Step("exchange", before, after, StepMode(chunk, in_place=True)).cost.scratch > 0)


def test_pieces_of_a_share_follow_each_other():
    step = lower_in_place(Layout.parse("f32[{x}5, 15]", Mesh(x=3)), Layout.parse("f32[15, {x}5]", Mesh(x=3)), 12)
    assert step.slot == 25
    assert [{(t.start, t.length) for t in turn} for turn in step.rounds] == [{(0, 9)}, {(9, 9)}, {(18, 7)}] * 2


def test_uneven_layouts_are_refused():
    with pytest.raises(PlanError, match="cannot go in place; the layouts are not even"):
        lower_in_place(Layout.parse("f32[{x}4/10]", Mesh(x=3)), Layout.parse("f32[10]", Mesh(x=3)), None)
