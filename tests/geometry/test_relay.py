"""Relays: every device gets what it lacks once, and nobody passes on what it has not received."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

import pytest

from reshard.geometry.holders import count_lacked, fewest_through
from reshard.geometry.relay import Demand, balance_shares, relay_figures, relay_messages
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.types import Layout, Mesh
from tests import oracle
from tests.endpoint_lp import forwarded
from tests.layouts import random_crossing, random_layout


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(80))
def test_every_device_receives_what_it_lacks_once(seed: int):
    source, target = random_crossing(random.Random(seed))
    turns = [[m for m in turn if m.sender != m.receiver] for turn in relay_messages(source, target)]
    received, sent, after_first = Counter(), Counter(), Counter()
    for number, turn in enumerate(turns):
        for message in turn:
            received[message.receiver] += message.elements
            sent[message.sender] += message.elements
            after_first[message.receiver] += message.elements * (number == 0)
        assert len({(m.sender, m.receiver) for m in turn}) == len(turn)
    assert {d: n for d, n in count_lacked(source, target).items() if n} == dict(received)
    assert all(after_first[message.sender] for message in turns[1])
    assert relay_figures(source, target).sent == max(sent.values(), default=0)


@pytest.mark.fast(20)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("seed", range(60))
def test_a_relay_moves_every_element_within_its_promise(seed: int, chunk: int | None):
    source, target = random_crossing(random.Random(seed))
    oracle.check(chain(source, target, [StepSpec("exchange", target, StepMode(chunk, relay=True))]))


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_device_is_near_the_linear_program(seed: int):
    """In whole elements, of arrays that have many."""
    choose = random.Random(seed)
    meshes = [layout.mesh for layout in random_crossing(choose)]
    shape = [choose.choice((24, 32, 60)) for _ in range(2)]
    source, target = (random_layout(choose, mesh, shape) for mesh in meshes)
    busiest = max(relay_figures(source, target).sent, *count_lacked(source, target).values())
    assert busiest <= 1.01 * ceil(forwarded(source, target) - 1e-6)


def test_a_broadcast_loads_nobody_more_than_once():
    """From one device to sixteen, itself included: pulled, it would send fifteen times what they need."""
    source, target = Layout.parse("f32[48, 48]", Mesh(x=1)), Layout.parse("f32[48, 48]", Mesh(d=16))
    figures = relay_figures(source, target)
    assert figures.sent == 48 * 48
    assert sum(turn.rounds for turn in figures.turns) == 15 + 14


def test_a_holder_of_much_passes_on_little():
    """Device 0 sends 12 elements of its own; of what others send it, it passes on less than they do."""
    source, target = Layout.parse("f32[{x}12]", Mesh(x=2)), Layout.parse("f32[24]", Mesh(d=6))
    passed = Counter()
    for message in relay_messages(source, target).second:
        passed[message.sender] += message.elements
    assert passed[0] < passed[5]


def test_whole_elements_are_spread_over_all_classes():
    """Twelve classes of 64 elements for 44 devices: whoever gets two of one class gets one of the next."""
    source = Layout.parse("s32[32, {v:(2)17}2/24]", Mesh(v=34))
    target = Layout.parse("s32[32, 24]", Mesh(v=15, w=3))
    figures = relay_figures(source, target)
    assert figures.sent <= fewest_through(source, target)


# Who passes on how much: near a linear program that shares no code, in whole elements.


def test_holders_send_what_nobody_has_room_to_pass_on():
    """Devices 1 and 2 send 100 elements of their own each, so device 0 sends its ten to both."""
    demands = [Demand(10, [0], [1, 2]), Demand(100, [1], [3]), Demand(100, [2], [4])]
    assert balance_shares(demands, enough=100)[0] == (0, 0)


def test_an_early_class_leaves_room_for_a_later_one():
    """Device 1 sends 100 elements of its own, so the two others pass on what device 0 sends."""
    demands = [Demand(60, [0], [1, 2, 3]), Demand(100, [1], [4])]
    counts = balance_shares(demands, enough=100)
    assert counts[0][0] == 0 and sum(counts[0]) == 60
