"""Batches: what shares a launch, the time of a batch, and the order that peaks lowest."""

from __future__ import annotations

import itertools
import random

import reshard as rs
from reshard.plans.memory import Footprint, find_peaks
from reshard.plans.plan import device_kinds
from reshard.synth.batches import group_plans, rank_footprint, sort_batches
from tests.trees import llama

MESH = rs.Mesh(x=4, y=2)


def test_a_batch_takes_the_latency_once_and_all_bytes():
    network = rs.Network.uniform(1e-3, 1e9)
    tree = rs.plan_tree(llama(MESH), network=network)
    for batch in tree.batches:
        alone = [plan.seconds or 0.0 for plan in batch.plans]
        assert batch.seconds is not None
        assert max(alone) <= batch.seconds <= sum(alone) - 1e-3 * (len(alone) - 1) + 1e-12


def test_equal_arguments_give_equal_batches():
    plans = rs.plan_tree(llama(MESH)).plans
    assert group_plans(plans, None) == group_plans(dict(plans), None)


def test_no_other_order_peaks_lower():
    choose = random.Random(7)
    for _ in range(300):
        jobs = [_job(choose) for _ in range(5)]
        ours = find_peaks(sorted(jobs, key=rank_footprint))
        assert ours == min(find_peaks(order) for order in itertools.permutations(jobs))


def _job(choose: random.Random) -> Footprint:
    before, after = choose.randint(0, 9), choose.randint(0, 9)
    return Footprint((before,), (max(before, after) + choose.randint(0, 9),), (after,))


def test_batches_are_put_in_that_order():
    plans = rs.plan_tree(llama(MESH), donate=True).plans
    kinds = device_kinds(plans.values())
    order = [rank_footprint(batch.footprint(kinds)) for batch in sort_batches(group_plans(plans, None), kinds)]
    assert order == sorted(order)
