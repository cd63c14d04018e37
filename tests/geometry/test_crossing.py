"""Exchanges between two sets of devices: every message, and all figures, against counting and linear programs."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

import pytest

from reshard.geometry.crossing import crossing, fewest_received, fewest_through, sent_by_device
from reshard.geometry.messages import all_messages
from reshard.types import Layout, Mesh
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


LARGE = {
    "rows to rows": ("f32[{x}5, 31]", "f32[{y}2/20, 31]"),
    "rows to columns": ("f32[{x}4, 30]", "f32[16, {y}3/30]"),
    "rows to columns, of prime sizes": ("f32[{x}4/13, 37]", "f32[13, {y}4/37]"),
    "blocks": ("f32[2{x}3/23, {r}16/31]", "f32[{z}12/23, {y}3/31]"),
}


@pytest.mark.parametrize("first", [0, 3, 20])
@pytest.mark.parametrize("name", LARGE)
def test_queues_give_the_figures_of_the_messages_one_by_one(name: str, first: int):
    """Copies on both sides, and more requests than holders: overlapping in all devices, in some, in none."""
    before, after = LARGE[name]
    source = Layout.parse(before, Mesh(x=4, r=2, w=2))
    target = Layout.parse(after, Mesh.parse(f"y=12,z=2@{first}") if "{z}" in after else Mesh.parse(f"y=12@{first}"))
    listed = [m for m in all_messages(source, target) if m.sender != m.receiver]
    sent, sends, receives = Counter(), Counter(m.sender for m in listed), Counter(m.receiver for m in listed)
    for message in listed:
        sent[message.sender] += message.elements
    figures = crossing(source, target)
    assert (figures.sent, figures.message) == (max(sent.values()), max(m.elements for m in listed))
    assert figures.rounds == max(*sends.values(), *receives.values())
    assert {device: count for device, count in sent_by_device(source, target).items() if count} == sent


def test_large_meshes_have_their_figures_at_once():
    """A pull from 1,024 devices to 512 that replicate 64 times: half a million messages, none of them listed."""
    source = Layout.parse("f32[{fsdp}8, 1024]", Mesh(fsdp=1024))
    target = Layout.parse("f32[8192, {tp}128]", Mesh.parse("tp=8,rep=64@1024"))
    figures = crossing(source, target)
    assert (figures.rounds, figures.received, figures.sent) == (1024, 8192 * 128, 512 * 8 * 128)


def test_large_meshes_that_overlap_have_their_figures_at_once():
    """Eight copies on 4,096 devices, to columns on 2,048 of these, where some hold part of what they need."""
    source = Layout.parse("f32[{x}8/4091, 4093]", Mesh(x=512, r=8))
    target = Layout.parse("f32[4091, {y}2/4093]", Mesh(y=2048))
    figures = crossing(source, target)
    assert (figures.rounds, figures.received, figures.sent) == (511, 2 * (4091 - 8), 8 * 4093 // 8 + 3)


@pytest.mark.parametrize("seed", range(15))
def test_an_optimum_in_whole_elements_is_that_in_fractions_rounded_up(seed: int):
    """Both are flows, whose capacities may as well be whole: what plans are compared with."""
    sizes = classes(*random_crossing(random.Random(seed)))
    assert sent(sizes, forwarding=True, whole=True) == pytest.approx(ceil(sent(sizes, forwarding=True) - 1e-6))
