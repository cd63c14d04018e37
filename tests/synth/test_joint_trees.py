"""Trees of arrays whose senders differ: launches that they share, bytes and peaks as predicted, every element."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

import pytest

import reshard as rs
from benchmarks.joint_trees import draw_tree
from reshard.geometry.relay import relay_messages
from reshard.runtime import Account
from tests.oracle import check_target, source_tiles
from tests.trees import random_readers


@pytest.mark.fast(5)
@pytest.mark.parametrize("seed", range(12))
def test_arrays_with_readers_of_their_own_move_together(seed: int) -> None:
    choose = random.Random(seed)
    moves = random_readers(choose, choose.choice((4, 8)), choose.randint(5, 40))
    tree, account = rs.plan_tree(moves, donate=choose.random() < 0.5), Account("uint8")
    moved = rs.simulate(tree, {name: source_tiles(plan) for name, plan in tree.plans.items()}, account)
    for name, plan in tree.plans.items():
        check_target(plan, moved[name])
    assert (account.launches, account.received_bytes) == (tree.launches, tree.received_bytes)
    assert account.peak_bytes <= tree.peak_bytes
    assert tree.received_bytes == tree.lower_bound_bytes
    assert tree.launches < sum(plan.launches for plan in tree.plans.values())
    assert rs.TreePlan.from_json(tree.to_json()) == tree
    assert rs.prove(tree)


@pytest.mark.parametrize("seed", range(6))
def test_a_relay_that_gathers_has_the_figures_of_its_messages(seed: int) -> None:
    choose = random.Random(seed)
    gathering = [
        step
        for plan in rs.plan_tree(random_readers(choose, 8, 30)).plans.values()
        for step in plan.steps
        if step.mode.gathers
    ]
    assert gathering
    for step in gathering:
        first, second = relay_messages(step.operand, step.result, gathers=True)
        received, sends, receives = (Counter[int]() for _ in range(3))
        for message in (*first, *second):
            received[message.receiver] += message.elements * (message.sender != message.receiver)
        for message in first:
            sends[message.sender] += message.sender != message.receiver
            receives[message.receiver] += message.sender != message.receiver
        rounds = max((*sends.values(), *receives.values()), default=0)
        assert step.launches == rounds + bool(second)
        assert step.received_bytes == step.operand.nbytes(max(received.values()))
        # A device has as many pairs as other groups have its place, or as many as senders share one place.
        assert rounds <= max(prod(axis.size for axis in step.result.held), len(sends))


@pytest.mark.parametrize(("kind", "batches"), [("grids", 30), ("norms", 1)])
def test_many_arrays_take_few_launches(kind: str, batches: int) -> None:
    moves = draw_tree(random.Random(5), kind, 60, 128, 256)
    tree = rs.plan_tree(moves)
    assert len(tree.batches) <= batches
    assert tree.launches <= 8 * len(tree.batches)
    assert tree.received_bytes == tree.lower_bound_bytes
