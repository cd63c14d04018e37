"""Choices of layouts against every choice there is, of random small programs counted by an oracle of its own."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

import reshard as rs
from reshard.errors import BudgetError, PlanError
from reshard.synth.choice import flows, linear_program
from reshard.synth.choice.assess import assess_splits, list_placed_moves
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.flows import tabulate_problem
from reshard.synth.choice.label_bounds import LabelBounds
from reshard.synth.choice.linear_program import LinearProgram, Solution
from reshard.synth.choice.milp import SplitSearch, choose_splits
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Access, Node, Problem, Tensor
from reshard.synth.choice.splits import list_splits
from tests.synth.choice_oracle import INFINITE, SPEED, Enumeration, TablePrices, random_problem


def enumerate_case(seed, most=1500, joined=1):
    """A random problem that has few enough assignments to try all of them; sums are joined with others."""
    rng = random.Random(seed)
    while True:
        problem = random_problem(rng)
        problem = replace(problem, tensors=tuple(replace(each, joined=joined) for each in problem.tensors))
        every = Enumeration(problem, seed, most)
        if every.found:
            return rng, problem, every


SEEDS = [pytest.param(seed, marks=pytest.mark.slow if seed < 18 else pytest.mark.sweep) for seed in range(12, 40)]


# 127 and 130 have partial sums that move.
@pytest.mark.parametrize("seed", [*range(1, 7), *range(8, 12), 127, 130, *SEEDS])
def test_every_figure_and_the_best_choice_are_those_of_enumeration(seed):
    rng, problem, every = enumerate_case(seed, joined=9)
    prices = TablePrices(problem.mesh, seed)
    for seconds, peak, splits, anew in rng.sample(every.found, min(10, len(every.found))):
        assessed = assess_splits(problem, splits, anew, prices, SPEED)
        assert (assessed.seconds, assessed.peak_bytes) == (pytest.approx(seconds), peak)
    peaks = sorted({peak for seconds, peak, *_ in every.found if seconds < INFINITE})
    if not peaks or not peaks[0]:
        return
    fastest = min(peak for seconds, peak, *_ in every.found if seconds == every.best())
    # Budgets that bind, if any do: those below the peak of the fastest choice.
    for budget in [None, *rng.sample(peaks, 1), *[peak for peak in peaks if peak < fastest][-1:]]:
        chosen = choose_splits(problem, prices, SPEED, budget, gap=0.0)
        best = every.best(INFINITE if budget is None else budget)
        assert chosen.seconds == pytest.approx(best, abs=1e-6)
        assert chosen.bound_seconds == pytest.approx(best, abs=1e-3)
        assert budget is None or chosen.peak_bytes <= budget
        # Who is content with what is near the best stops sooner, and by then has shown how near it is.
        near = choose_splits(problem, prices, SPEED, budget, gap=0.05)
        assert near.bound_seconds - 1e-6 <= best <= near.seconds + 1e-6 and near.gap <= 0.05 + 1e-6
        assert budget is None or near.peak_bytes <= budget
    assert SplitSearch(problem, prices, SPEED, gap=0.0).find_smallest().peak_bytes == peaks[0]
    with pytest.raises(BudgetError) as refused:
        choose_splits(problem, prices, SPEED, peaks[0] - 1 + 7, extra_bytes=7, gap=0.0)
    assert refused.value.smallest == peaks[0] + 7


# In 21 reads end before bytes have a price, and in 99 one keeps its copy throughout a loop.
@pytest.mark.parametrize("seed", [3, 9, 21, 99, *(pytest.param(s, marks=pytest.mark.sweep) for s in range(100, 140))])
def test_no_choice_takes_less_than_its_splits_do_at_least_whatever_bytes_cost(seed):
    rng, problem, every = enumerate_case(seed, 600)
    found = [(splits, anew) for seconds, _, splits, anew in every.found if seconds < INFINITE]
    tables = tabulate_problem(problem, TablePrices(problem.mesh, seed), SPEED)
    bounds = LabelBounds(problem, tables, 1.0)
    length = 1 + len(problem.tensors)
    dear = (1.0 + every.best()) / (1.0 + max(peak for _, peak, *_ in every.found)) if found else 1.0
    for many in (0, 1, 2, 4, 1):
        at = rng.sample(range(length), min(many, length))
        prices = {position: dear * rng.choice([0.1, 1, 3, 10]) * rng.random() for position in at}
        bounds.price_bytes(prices)
        costs = [every.price_bytes(splits, anew, prices) for splits, anew in found]
        for _ in range(9):
            bounds.pass_costs(backward=False)
            least = bounds.bound()
            bounds.pass_costs(backward=True)
            for group, excess in zip(tables.groups, bounds.excess, strict=True):
                for split, more in zip(group.splits, excess.tolist(), strict=True):
                    of_split = [
                        c for c, (splits, _) in zip(costs, found, strict=True) if splits[group.nodes[0]] == split
                    ]
                    assert least + more <= min(of_split, default=INFINITE) * (1 + 1e-9) + 1e-6
            bounds.share_prices()


MESH = rs.Mesh(x=4, y=2)


def two_products(batch=4096, wide=8192):
    """h = x @ w, read by two products: the batch split needs no moves of h, another gathers it."""
    rows, columns = Access(0, ((0,), (1,)), 0), Access(1, ((0,), (1,)), 1)
    x, w = (
        Node(n, (a, b), frozenset({0, 1}), (), (access,))
        for n, a, b, access in [("x", batch, wide, rows), ("w", wide, wide, columns)]
    )
    product = Node(
        "h",
        (batch, wide, wide),
        frozenset({0, 1, 2}),
        (Access(0, ((0,), (1,)), 2), Access(1, ((1,), (2,)), 2)),
        (Access(2, ((0,), (2,)), 2, sums=(1,)),),
        2.0 * batch * wide * wide,
        (((0, 1), 4.0 * batch * wide), ((1, 2), 4.0 * wide * wide), ((0, 2), 4.0 * batch * wide)),
    )
    tensors = (
        Tensor("x", (batch, wide), "f32", 0, 2),
        Tensor("w", (wide, wide), "f32", 1, 9),
        Tensor("h", (batch, wide), "f32", 2, 3),
    )
    read = Node("out", (batch, wide), frozenset(), (Access(2, ((0,), (1,)), 3),), ())
    return Problem(MESH, tensors, (x, w, product, read))


# The first three have splits, rounded from parts, that hold few bytes but between which no plan moves; in two others
# a tensor lives on for its last move at the very position that binds; in the next a copy is made at birth, whose
# move needs no room where it is read. In the last three a fused tensor is not moved, or is, or rows are padded.
HARD = (
    (7712030390, 240),
    (7712030702, 1536),
    (7712030722, 12480),
    (4400110019, 360),
    (4400110038, 312),
    (9173400052, 572),
    (9727, 192),
    (9169, 800),
    (9333, 1728),
)


@pytest.mark.parametrize(("seed", "budget"), HARD)
def test_budgets_that_bind_hard_are_met_by_the_best_choice(seed, budget):
    _, problem, every = enumerate_case(seed)
    assert every.best(budget) < INFINITE
    chosen = choose_splits(problem, TablePrices(problem.mesh, seed), SPEED, budget, gap=0.0)
    assert chosen.seconds == pytest.approx(every.best(budget), abs=1e-6) and chosen.peak_bytes <= budget


def test_products_take_as_long_as_their_dtype():
    speed = DeviceSpeed("two rates", {"f32": 1e12, "s8": 4e12}, 1e18)

    def time_work(dtype):
        problem = two_products()
        problem = replace(problem, tensors=tuple(replace(each, dtype=dtype) for each in problem.tensors))
        return choose_splits(problem, MovePrices(MESH, "h100"), speed).seconds

    assert time_work("int8") < 0.3 * time_work("float32")


def test_real_prices_are_those_of_plans_and_what_is_fixed_stays():
    problem = two_products()
    prices, speed = MovePrices(MESH, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p")
    fixed = (("y", "x"), ())
    problem = replace(problem, nodes=(replace(problem.nodes[0], only=(fixed,)), *problem.nodes[1:]))
    chosen = choose_splits(problem, prices, speed)
    assert chosen.splits[0] == fixed
    # The order of a fixed batch is open to whoever reads it: nothing is put in another order.
    assert chosen.splits[2][0] == ("y", "x")
    moves = list_placed_moves(problem, chosen.splits, chosen.anew)
    plans = [rs.plan(move.source, move.target, network="tpu-v5p") for move in moves]
    assert chosen.move_seconds == pytest.approx(
        sum(move.times * p.seconds for move, p in zip(moves, plans, strict=True))
    )
    assert chosen.received_bytes == sum(move.times * p.received_bytes for move, p in zip(moves, plans, strict=True))
    assert chosen.gap <= 1e-3


def test_without_any_program_in_time_a_choice_is_returned_and_says_how_far_it_may_be(monkeypatch):
    problem = two_products()
    prices, speed = MovePrices(MESH, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p")
    best = choose_splits(problem, prices, speed)
    monkeypatch.setattr(LinearProgram, "solve", lambda *_: Solution(None, -math.inf, False))
    chosen = choose_splits(problem, prices, speed)
    assert best.seconds <= chosen.seconds < INFINITE and chosen.bound_seconds <= best.seconds
    unsplit = [((),) * len(node.sizes) for node in problem.nodes]
    assert chosen.seconds <= assess_splits(problem, unsplit, (), prices, speed).seconds


@pytest.mark.parametrize("slack", [False, True])
def test_a_program_that_takes_too_much_work_is_not_shown_to_be_impossible(monkeypatch, slack):
    monkeypatch.setattr(linear_program, "MOST_WORK", 1)
    program, rng = LinearProgram(), random.Random(5)
    parts = [program.add_column(whole=True) for _ in range(30)]
    # Which of 30 numbers add up to what the first 15 do, four times at once?
    for _ in range(4):
        weights = {part: float(rng.randrange(100)) for part in parts}
        beside = {program.add_column(1.0, math.inf): sign for sign in (1.0, -1.0)} if slack else {}
        program.add_row(weights | beside, *[sum(weights[part] for part in parts[:15])] * 2)
    found = program.solve(0.0, 60.0)
    assert not found.impossible and found.bound <= 1e-6 and (found.values is not None) == slack


def test_of_choices_that_take_as_long_the_one_that_holds_less_is_made():
    """An argument that is read in parts, and costs nothing to split, is split as it is read."""
    problem = two_products()
    x, *others = problem.nodes
    rows = ((("x", "y"), (), ()),)
    product = replace(problem.nodes[2], only=rows)
    problem = replace(problem, nodes=(replace(x, held_bytes=1e6), others[0], product, others[2]))
    chosen = choose_splits(problem, MovePrices(MESH, "tpu-v5p"), DeviceSpeed.preset("tpu-v5p"))
    assert chosen.splits[0] == (("x", "y"), ())


def test_whoever_is_tied_to_what_cannot_be_split_alike_is_told():
    problem = two_products()
    nodes = [
        replace(problem.nodes[0], tie="t", only=((("x",), ()),)),
        replace(problem.nodes[1], tie="t", only=(((), ()),)),
    ]
    with pytest.raises(PlanError, match="no split is allowed for x, w"):
        choose_splits(replace(problem, nodes=(*nodes, *problem.nodes[2:])), MovePrices(MESH, "h100"), SPEED)


def test_very_many_moves_have_the_prices_of_those_that_are_alike(monkeypatch):
    problem, speed = two_products(), DeviceSpeed.preset("tpu-v5p")
    exact = tabulate_problem(problem, MovePrices(MESH, "tpu-v5p"), speed)
    monkeypatch.setattr(flows, "ALIKE_FROM", 0)
    alike = tabulate_problem(problem, MovePrices(MESH, "tpu-v5p"), speed)
    assert {pair: alike.seconds[pair] for pair in exact.seconds} == pytest.approx(exact.seconds)


def test_of_many_factors_the_largest_are_split_by_three_axes():
    """A state of twelve qubits would have 1,753 splits, and millions of moves between two of them."""
    node = Node("state", (2,) * 11 + (64,), frozenset(range(12)), (), ())
    found = list_splits(node, rs.Mesh(x=2, y=2, z=2))
    assert len(found) <= 512 and any(split[11] == ("x", "y", "z") for split in found)
    # By two axes: none of them, one in any of twelve places, two in different ones, or both in the last.
    assert len(list_splits(node, rs.Mesh(x=2, y=2))) == 1 + 2 * 12 + 12 * 11 + 1
