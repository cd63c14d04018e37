"""Who passes on how much: near a linear program that shares no code, in whole elements."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

import pytest

from reshard.types.pair.relay_loads import Demand, levelled, passed_on, sends
from tests.endpoint_lp import least


def _demands(choose: random.Random) -> list[Demand]:
    """Devices in groups that hold one tile each, and classes of these tiles that any other devices lack."""
    devices = list(range(choose.randint(2, 14)))
    choose.shuffle(devices)
    groups: list[list[int]] = []
    while devices and len(groups) < 4:
        groups.append([devices.pop() for _ in range(min(len(devices), choose.randint(1, 3)))])
    everyone = [*devices, *(device for group in groups for device in group)]
    demands: list[Demand] = []
    for group in groups:
        others = sorted(set(everyone) - set(group))
        for _ in range(choose.randint(1, 3) if others else 0):
            lacking = choose.sample(others, choose.randint(1, len(others)))
            demands.append(Demand(choose.randint(40, 400), group, lacking))
    return demands


@pytest.mark.parametrize("seed", range(60))
def test_the_busiest_sender_is_near_the_linear_program(seed: int):
    demands = _demands(random.Random(seed))
    classes = Counter[tuple[frozenset[int], frozenset[int]]]()
    for demand in demands:
        classes[frozenset(demand.holders), frozenset(demand.lacking)] += demand.size
    optimum = ceil(least(classes, forwarding=True) - 1e-6)
    counts = passed_on(demands, optimum)
    sent = sends(demands, counts)
    by_holders: dict[tuple[int, ...], int] = {}
    for demand, some in zip(demands, counts, strict=True):
        assert all(count >= 0 for count in some) and sum(some) <= demand.size
        rest = demand.size * len(demand.lacking) - sum(some) * demand.further
        by_holders[tuple(demand.holders)] = by_holders.get(tuple(demand.holders), 0) + rest
    for holders, amount in by_holders.items():
        sent.update(dict(zip(holders, levelled([sent[device] for device in holders], amount), strict=True)))
    assert max(sent.values(), default=0) <= 1.05 * optimum


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_as_even_as_whole_numbers_can_be(seed: int):
    choose = random.Random(seed)
    bases, amount = [choose.randint(0, 9) for _ in range(choose.randint(1, 6))], choose.randint(0, 30)
    added, one_by_one = levelled(bases, amount), list(bases)
    for _ in range(amount):
        one_by_one[one_by_one.index(min(one_by_one))] += 1
    assert sum(added) == amount and min(added) >= 0
    assert max(base + more for base, more in zip(bases, added, strict=True)) == max(one_by_one)
