"""Who passes on how much: near a linear program that shares no code, in whole elements."""

from __future__ import annotations

import random
from collections import Counter
from math import ceil

import pytest

from reshard.geometry.relay import Demand, balance_shares, count_passed_on, level_sums
from tests.endpoint_lp import sent


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
    sizes = Counter[tuple[frozenset[int], frozenset[int]]]()
    for demand in demands:
        sizes[frozenset(demand.holders), frozenset(demand.lacking)] += demand.size
    optimum = ceil(sent(sizes, forwarding=True) - 1e-6)
    counts = balance_shares(demands, optimum)
    for demand, some in zip(demands, counts, strict=True):
        assert all(count >= 0 for count in some) and sum(some) <= demand.size
    assert _busiest(demands, counts) <= 1.01 * optimum


def _busiest(demands: list[Demand], counts: list[tuple[int, ...]]) -> int:
    """What the busiest device sends if devices pass on so much, and holders send the rest as evenly as they can."""
    loads = count_passed_on(demands, counts)
    by_holders: Counter[tuple[int, ...]] = Counter()
    for demand, some in zip(demands, counts, strict=True):
        rest = demand.size * len(demand.lacking) - sum(some) * demand.further
        by_holders[tuple(demand.holders)] += rest
    for holders, amount in by_holders.items():
        more = level_sums([loads[device] for device in holders], amount)
        loads.update(dict(zip(holders, more, strict=True)))
    return max(loads.values(), default=0)


def test_holders_send_what_nobody_has_room_to_pass_on():
    """Devices 1 and 2 send 100 elements of their own each, so device 0 sends its ten to both."""
    demands = [Demand(10, [0], [1, 2]), Demand(100, [1], [3]), Demand(100, [2], [4])]
    assert balance_shares(demands, enough=100)[0] == (0, 0)


def test_an_early_class_leaves_room_for_a_later_one():
    """Device 1 sends 100 elements of its own, so the two others pass on what device 0 sends."""
    demands = [Demand(60, [0], [1, 2, 3]), Demand(100, [1], [4])]
    counts = balance_shares(demands, enough=100)
    assert counts[0][0] == 0 and _busiest(demands, counts) == 100


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_as_even_as_whole_numbers_can_be(seed: int):
    choose = random.Random(seed)
    bases, amount = [choose.randint(0, 9) for _ in range(choose.randint(1, 6))], choose.randint(0, 30)
    added, one_by_one = level_sums(bases, amount), list(bases)
    for _ in range(amount):
        one_by_one[one_by_one.index(min(one_by_one))] += 1
    assert sum(added) == amount and min(added) >= 0
    assert max(base + more for base, more in zip(bases, added, strict=True)) == max(one_by_one)
