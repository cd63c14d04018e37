"""Exchanges between two sets of devices: every message, and all figures, against counting and linear programs."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

import pytest

from reshard.types import Layout, Mesh
from reshard.types.pair import crossing as module
from reshard.types.pair.crossing import crossing, dealt, fewest_received, fewest_through, sent_by_device
from reshard.types.pair.messages import all_messages
from tests.endpoint_lp import classes, forwarded, pulled, sent
from tests.layouts import random_crossing

SEEDS = range(150)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_those_of_the_messages_and_the_best_there_are(seed: int):
    source, target = random_crossing(random.Random(seed))
    figures = crossing(source, target)
    sent, received, sends, receives = Counter(), Counter(), Counter(), Counter()
    crossing_messages = [m for m in all_messages(source, target) if m.sender != m.receiver]
    for message in crossing_messages:
        sent[message.sender] += message.elements
        received[message.receiver] += message.elements
        sends[message.sender] += 1
        receives[message.receiver] += 1
    assert len({(m.sender, m.receiver) for m in crossing_messages}) == len(crossing_messages)
    assert figures.sent == max(sent.values(), default=0)
    assert figures.received == max(received.values(), default=0) == fewest_received(source, target)
    assert figures.rounds == max((*sends.values(), *receives.values()), default=0)
    assert figures.message == max((m.elements for m in crossing_messages), default=0)
    assert {d: n for d, n in sent_by_device(source, target).items() if n} == sent
    assert max(figures.sent, figures.received) == ceil(pulled(source, target) - 1e-6)


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_of_the_busiest_device_is_below_every_plan(seed: int):
    """It counts, element by element, what must leave the holders of a tile, and holds for plans that forward too."""
    source, target = random_crossing(random.Random(seed))
    lacked: Counter[frozenset[int]] = Counter()
    received: Counter[int] = Counter()
    for (holders, lacking), count in classes(source, target).items():
        lacked[holders] += count
        received.update(dict.fromkeys(lacking, count))
    leaves = (ceil(count / len(holders)) for holders, count in lacked.items())
    bound = fewest_through(source, target)
    assert bound == max([*received.values(), *leaves], default=0)
    assert bound <= ceil(forwarded(source, target) - 1e-6)


@pytest.mark.parametrize(
    ("source", "target", "first"),
    [
        ("f32[{x}{y}2, 8]", "f32[{d}4, {e}4]", 6),  # disjoint, nested: in closed form
        ("f32[{x}{y}2, 8]", "f32[{d}4, {e}4]", 3),  # overlapping, each tile held once
        ("f32[{x}4, 8]", "f32[12, {e}4]", 6),
        ("f32[12, 8]", "f32[{e}{d}2, 8]", 6),
        ("f32[12, {y}4]", "f32[12, {e}4]", 6),
    ],
)
def test_closed_forms_are_what_counting_gives(source: str, target: str, first: int):
    pair = Layout.parse(source, Mesh(x=3, y=2)), Layout.parse(target, Mesh.parse(f"d=3,e=2@{first}"))
    assert crossing(*pair) == module._counted(*pair)


def test_requests_stay_whole_where_that_loads_nobody_more():
    assert [tuple(s) for s in dealt([6, 6, 6], 4, limit=6)] == [(0, 0, 0, 6), (1, 1, 0, 6), (2, 2, 0, 6)]
    shares = list(dealt([6, 6, 6], 4, limit=5))
    assert [sum(s.high - s.low for s in shares if s.holder == h) for h in range(4)] == [5, 5, 5, 3]
    assert list(dealt([], 3, limit=0)) == []


def test_large_meshes_have_their_figures_at_once():
    """A pull from 1,024 devices to 512 that replicate 64 times: half a million messages, none of them listed."""
    source = Layout.parse("f32[{fsdp}8, 1024]", Mesh(fsdp=1024))
    target = Layout.parse("f32[8192, {tp}128]", Mesh.parse("tp=8,rep=64@1024"))
    figures = crossing(source, target)
    assert (figures.rounds, figures.received, figures.sent) == (1024, 8192 * 128, 512 * 8 * 128)


@pytest.mark.parametrize("seed", range(15))
def test_an_optimum_in_whole_elements_is_that_in_fractions_rounded_up(seed: int):
    """Both are flows, whose capacities may as well be whole: what plans are compared with."""
    sizes = classes(*random_crossing(random.Random(seed)))
    assert sent(sizes, forwarding=True, whole=True) == pytest.approx(ceil(sent(sizes, forwarding=True) - 1e-6))
