"""`plan_tree`: random trees against the oracle, within budgets, the order of batches, and the trees of models."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.errors import BudgetError, PlanError
from reshard.plans.step import Footprint, find_peaks
from reshard.runtime import Account
from reshard.synth.tree_batches import rank_footprint
from tests.oracle import source_tiles
from tests.trees import check_tree, llama, random_tree

MESH = rs.Mesh(x=4, y=2)


def pair(source: str, target: str) -> tuple[rs.Layout, rs.Layout]:
    return rs.Layout.parse(source, MESH), rs.Layout.parse(target, MESH)


@given(st.integers(0, 1 << 30), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_random_tree_does_what_it_promises(seed: int, donate: bool):
    moves = random_tree(random.Random(seed))
    tree = rs.plan_tree(moves, donate=donate)
    check_tree(tree)
    assert tree.lower_bound_bytes <= tree.received_bytes <= sum(p.received_bytes for p in tree.plans.values())
    assert tree.launches <= sum(p.launches for p in tree.plans.values())
    assert rs.TreePlan.from_json(tree.to_json()) == tree


@given(st.integers(0, 1 << 30), st.booleans(), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_every_budget_from_the_floor_up_is_met(seed: int, donate: bool, share: float):
    moves = random_tree(random.Random(seed))
    free = rs.plan_tree(moves, donate=donate).peak_bytes
    floor = _floor(moves, donate)
    assert floor <= free
    budget = floor + int((free - floor) * share)
    tree = rs.plan_tree(moves, budget=budget, donate=donate)
    assert tree.peak_bytes <= budget
    assert check_tree(tree).peak_bytes <= budget


def _floor(moves: dict, donate: bool) -> int:
    try:
        rs.plan_tree(moves, budget=0, donate=donate)
    except BudgetError as error:
        return error.smallest
    return 0


def test_the_weights_of_a_model_move_in_few_launches():
    tree = rs.plan_tree(llama(MESH, layers=4))
    one_by_one = sum(plan.launches for plan in tree.plans.values())
    assert (len(tree.names), one_by_one) == (38, 47)
    assert tree.launches == 3
    check_tree(tree)


@pytest.mark.parametrize("network", [None, "tpu-v5p"])
def test_seven_hundred_arrays_are_planned_at_once(network: str | None):
    start = time.process_time()
    tree = rs.plan_tree(llama(rs.Mesh(x=8, y=8), 78, 1024, 2816, 32000), network=network)
    assert time.process_time() - start < 10  # 0.25 s on a quiet machine
    one_by_one = sum(plan.launches for plan in tree.plans.values())
    assert len(tree.names) == 704
    assert tree.launches * 10 <= one_by_one
    assert (tree.seconds is None) == (network is None)
    if tree.seconds is not None:
        assert tree.seconds < sum(plan.seconds or 0 for plan in tree.plans.values())


def test_donation_frees_sources_before_targets_are_made():
    gather, scatter = pair("f32[{x}256]", "f32[1024]"), pair("f32[1024]", "f32[{x}256]")
    tree = rs.plan_tree({"gather": gather, "scatter": scatter}, donate=True)
    assert [batch.names for batch in tree.batches] == [("scatter",), ("gather",)]
    assert tree.peak_bytes == 4096 + 1024 + 1024


def test_without_room_for_buffers_arrays_move_one_by_one():
    moves = {f"w{number}": pair("f32[{x}4, 16]", "f32[16, {x}4]") for number in range(8)}
    free = rs.plan_tree(moves)
    assert free.launches == 1
    tight = rs.plan_tree(moves, budget=free.peak_bytes - 1)
    assert 1 < tight.launches < 8
    floor = 8 * 2 * 256
    tightest = rs.plan_tree(moves, budget=floor)
    assert tightest.peak_bytes == floor
    check_tree(tightest)
    with pytest.raises(BudgetError, match=f"the smallest that works is {floor} B") as refused:
        rs.plan_tree(moves, budget=floor - 1)
    assert refused.value.smallest == floor


def test_nested_trees_are_named_by_their_paths():
    same = pair("f32[{x}4]", "f32[16]")
    tree = rs.plan_tree({"layers": [{"w": same}, {"w": same, 7: same}], "head": (same,)})
    assert tree.names == ("layers.0.w", "layers.1.w", "layers.1.7", "head.0")
    assert list(tree.plans) == list(tree.names)


def test_moves_with_views_and_casts_are_part_of_a_tree():
    fused = rs.Move(*pair("s32[{x}24, 8]", "s32[3, {x}8, 8]"), "(three h) d -> three h d", three=3)
    narrow = rs.Move(*pair("s32[{x}4, 8]", "s16[16, 8]"), cast=True)
    plain = pair("s32[{x}4, 8]", "s32[16, 8]")
    tree = rs.plan_tree({"qkv": fused, "narrow": narrow, "w": plain, "v": plain})
    assert tree.plans["qkv"].view is not None and ("w", "v") in [batch.names for batch in tree.batches]
    account = Account("uint8")
    moved = rs.simulate(tree, {name: source_tiles(plan) for name, plan in tree.plans.items()}, account)
    alone = rs.simulate(tree.plans["qkv"], source_tiles(tree.plans["qkv"]))
    for device, tile in alone.items():
        np.testing.assert_array_equal(moved["qkv"][device], tile)
    assert moved["narrow"][0].dtype == "int16"
    assert account.received_bytes <= tree.received_bytes and account.peak_bytes <= tree.peak_bytes
    assert tree.lower_bound_bytes <= tree.received_bytes
    assert rs.TreePlan.from_json(tree.to_json()) == tree
    assert rs.prove(tree).of["w"].right.holds


def test_an_empty_tree_has_nothing_to_do():
    tree = rs.plan_tree({})
    assert (tree.launches, tree.peak_bytes, tree.received_bytes, tree.batches) == (0, 0, 0, ())
    assert rs.TreePlan.from_json(tree.to_json()) == tree
    assert rs.simulate(tree, {}) == {}


@pytest.mark.parametrize(
    ("moves", "error", "message"),
    [
        (7, PlanError, "not a tree of moves"),
        (pair("f32[{x}4]", "f32[16]"), PlanError, "not a tree of moves"),
        ({"a": 7}, PlanError, "a: .*not a Layout|a: .*not a move"),
        ({"a": {None: pair("f32[4]", "f32[4]")}}, PlanError, "the key None at 'a'"),
        ({10**5000: pair("f32[4]", "f32[4]")}, PlanError, "the key an int of 16610 bits at 'the top'"),
        ({"a.b": pair("f32[4]", "f32[4]"), "a": {"b": pair("f32[4]", "f32[4]")}}, PlanError, "two arrays .* 'a.b'"),
        ({"w": pair("f32[{x}4]", "f32[8]")}, PlanError, "w: source .* global shape"),
        (
            {"w": pair("f32[{x}4]", "f32[16]")[0]},
            PlanError,
            r"w: the layout f32\[{x}4\] has no target; give a \(source,",
        ),
    ],
)
def test_what_is_not_a_tree_of_moves_is_refused(moves: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rs.plan_tree(moves)


def test_the_options_of_an_empty_tree_are_checked():
    with pytest.raises(PlanError, match="donate 'no': give True or False"):
        rs.plan_tree({}, donate="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="slack -1: give the share"):
        rs.plan_tree({}, slack=-1)


def test_a_tree_without_end_is_refused():
    tree: dict = {}
    tree["again"] = tree
    with pytest.raises(PlanError, match="nested more than 64 deep"):
        rs.plan_tree(tree)


# ---- Trees within a budget: only what must be is cut, and a budget without room for batches is met array by array ----


def test_only_arrays_that_do_not_fit_are_cut():
    moves = llama(MESH)
    floor = sum(plan.source.tile_bytes + plan.target.tile_bytes for plan in rs.plan_tree(moves).plans.values())
    tree = rs.plan_tree(moves, budget=floor + 1024)
    assert tree.peak_bytes <= floor + 1024
    cut = [name for name, plan in tree.plans.items() if plan.launches > 2]
    assert cut
    assert not any("norm" in name for name in cut)
    check_tree(tree)


def test_a_larger_budget_takes_fewer_launches():
    moves = llama(MESH)
    free = rs.plan_tree(moves)
    floor = sum(plan.source.tile_bytes + plan.target.tile_bytes for plan in free.plans.values())
    budgets = [floor, floor + 2048, floor + 8192, free.peak_bytes]
    launches = [rs.plan_tree(moves, budget=budget).launches for budget in budgets]
    assert launches == sorted(launches, reverse=True)
    assert launches[-1] == free.launches


# ---- Batches: what shares a launch, the time of a batch, and the order that peaks lowest ----


def test_a_batch_takes_the_latency_once_and_all_bytes():
    network = rs.Network.uniform(1e-3, 1e9)
    tree = rs.plan_tree(llama(MESH), network=network)
    for batch in tree.batches:
        alone = [plan.seconds or 0.0 for plan in batch.plans]
        assert batch.seconds is not None
        assert max(alone) <= batch.seconds <= sum(alone) - 1e-3 * (len(alone) - 1) + 1e-12


def test_no_other_order_peaks_lower():
    choose = random.Random(7)
    for _ in range(300):
        jobs = [_job(choose) for _ in range(5)]
        ours = find_peaks(sorted(jobs, key=rank_footprint))
        assert ours == min(find_peaks(order) for order in itertools.permutations(jobs))


def _job(choose: random.Random) -> Footprint:
    before, after = choose.randint(0, 9), choose.randint(0, 9)
    return Footprint((before,), (max(before, after) + choose.randint(0, 9),), (after,))


@pytest.mark.parametrize("far", [False, True])
def test_a_launch_that_arrays_share_waits_once(far: bool):
    """Ten arrays in one batch take what one array of their bytes takes."""
    server = rs.Mesh({"tp": 4}, device_ids=range(8, 12)) if far else rs.Mesh({"tp": 8})
    ends = [
        (rs.Layout.parse(f"f32[{{x}}{{y}}{size}]", MESH), rs.Layout.parse(f"f32[{size * 8}]", server))
        for size in (32, 320)
    ]
    one, ten = (rs.plan_tree([end] * count, network="h100") for end, count in zip(ends, (10, 1), strict=True))
    assert one.launches == ten.launches and len(one.batches) == 1
    assert one.seconds == pytest.approx(ten.seconds, rel=1e-6)
