"""The words for choices that have a name: data parallel, ZeRO, FSDP and tensor parallel, each written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from reshard.errors import BudgetError
from reshard.jax.layout_choice.explain import describe_change, describe_split, explain_choice
from reshard.jax.layout_choice.graph import build_graph
from reshard.jax.layout_choice.op_rules import read_op_rules
from reshard.jax.layout_choice.trace_step import trace_step
from reshard.synth.choice.assess import assess_splits
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.milp import SplitSearch, choose_splits
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Access, Assignment, Node, Problem, Split, Tensor
from reshard.synth.choice.trade_off import solve_trade_off
from reshard.types import Layout, Mesh

MESH = Mesh(x=4, y=2)
SPEED = DeviceSpeed.preset("tpu-v5p")
BATCH, WIDE, OUT = 64, 512, 1024
TENSORS = [
    ("batch", (BATCH, WIDE)),
    ("params/layers/0/w", (WIDE, OUT)),
    ("opt/mu/layers/0/w", (WIDE, OUT)),
    ("dot_general step.py:3", (BATCH, OUT)),
    ("dot_general step.py:4", (WIDE, OUT)),
    ("result/params/layers/0/w", (WIDE, OUT)),
    ("result/opt/mu/layers/0/w", (WIDE, OUT)),
]
PROBLEM = Problem(
    MESH,
    tuple(Tensor(name, shape, "f32", 0, 9) for name, shape in TENSORS),
    (
        Node("batch", (BATCH, WIDE), frozenset({0, 1}), (), (Access(0, ((0,), (1,)), 0),)),
        Node("w", (WIDE, OUT), frozenset({0, 1}), (Access(5, ((0,), (1,)), 9),), (Access(1, ((0,), (1,)), 0),)),
        Node("mu", (WIDE, OUT), frozenset({0, 1}), (Access(6, ((0,), (1,)), 9),), (Access(2, ((0,), (1,)), 0),)),
        Node(
            "forward",
            (BATCH, WIDE, OUT),
            frozenset({0, 1, 2}),
            (Access(0, ((0,), (1,)), 1), Access(1, ((1,), (2,)), 1)),
            (Access(3, ((0,), (2,)), 1, sums=(1,)),),
            flops=2.0 * BATCH * WIDE * OUT,
        ),
        Node(
            "backward",
            (BATCH, WIDE, OUT),
            frozenset({0, 1, 2}),
            (Access(0, ((0,), (1,)), 2), Access(3, ((0,), (2,)), 2)),
            (Access(4, ((1,), (2,)), 2, sums=(0,)),),
            flops=2.0 * BATCH * WIDE * OUT,
        ),
        Node(
            "update",
            (WIDE, OUT),
            frozenset({0, 1}),
            tuple(Access(tensor, ((0,), (1,)), 3) for tensor in (1, 2, 4)),
            tuple(Access(tensor, ((0,), (1,)), 3) for tensor in (5, 6)),
            touched=(((0, 1), 20.0 * WIDE * OUT),),
        ),
    ),
)
ARGUMENTS = [(TENSORS[at][0], at) for at in range(3)]
ALL = ("x", "y")
WHOLE, ROWS = ((), ()), (ALL, ())
BY_BATCH = (ALL, (), ())
CHOICES: dict[str, tuple[Split, ...]] = {
    "data parallel": (ROWS, WHOLE, WHOLE, BY_BATCH, BY_BATCH, WHOLE),
    "ZeRO-1": (ROWS, WHOLE, ROWS, BY_BATCH, BY_BATCH, ROWS),
    "FSDP": (ROWS, ROWS, ROWS, BY_BATCH, BY_BATCH, ROWS),
    "columns": ((("x",), ()), ((), ("y",)), ((), ("y",)), *2 * ((("x",), (), ("y",)),), ((), ("y",))),
}
WORDS = {
    "data parallel": {
        "batch": "batch over x, y",
        "params/layers/*/w": "whole on every device; gradient all-reduced over x, y",
        "opt/mu/layers/*/w": "whole on every device",
    },
    "ZeRO-1": {
        "batch": "batch over x, y",
        "params/layers/*/w": "whole on every device; sliced over x, y; next value gathered over x, y; "
        "gradient reduce-scattered over x, y",
        "opt/mu/layers/*/w": "by rows over x, y",
    },
    "FSDP": {
        "batch": "batch over x, y",
        "params/layers/*/w": "by rows over x, y; gathered over x, y for its use; gradient reduce-scattered over x, y",
        "opt/mu/layers/*/w": "by rows over x, y",
    },
    "columns": {
        "batch": "batch over x",
        "params/layers/*/w": "by columns over y; gradient all-reduced over x",
        "opt/mu/layers/*/w": "by columns over y",
    },
}


@pytest.fixture(scope="module")
def prices() -> MovePrices:
    return MovePrices(MESH, "tpu-v5p")


def assess(name: str, prices: MovePrices) -> Assignment:
    return assess_splits(PROBLEM, CHOICES[name], frozenset(), prices, SPEED)


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_have_a_name_are_told_in_its_words(name: str, prices: MovePrices):
    said = explain_choice(PROBLEM, assess(name, prices), ARGUMENTS, prices, SPEED)
    assert {each: group.words for group in said.groups for each in group.names} == WORDS[name]
    # What the caller knows to be state is no batch, though it lies otherwise than what replaces it.
    said = explain_choice(PROBLEM, assess(name, prices), ARGUMENTS, prices, SPEED, state={dict(ARGUMENTS)["batch"]})
    assert not any(group.words.startswith("batch") for group in said.groups)


def test_a_pattern_stands_for_arrays_of_one_group(prices: MovePrices):
    arguments = [("data/0", 0), ("state/0", 1), ("state/1", 2)]
    said = explain_choice(PROBLEM, assess("columns", prices), arguments, prices, SPEED)
    assert sorted(group.names for group in said.groups) == [("data/*",), ("state/0",), ("state/1",)]


def test_a_rivals_moves_are_compared_with_those_that_were_chosen(prices: MovePrices):
    chosen, rival = assess("columns", prices), assess("FSDP", prices)
    faster = dataclasses.replace(chosen, seconds=0.6 * chosen.seconds)
    budgets = [(2**29, chosen), (2**30, faster)]
    said = explain_choice(PROBLEM, chosen, ARGUMENTS, prices, SPEED, ("FSDP", rival), budgets)
    rows = dict(said.avoided)
    assert list(rows) == ["params/layers/*/w", "gradient of params/layers/*/w"]
    assert rows["params/layers/*/w"].startswith("gathered over x, y, 1.8 MiB received, ")
    assert rows["params/layers/*/w"].endswith("; here 0 s")
    [(name, words)] = said.moves
    assert name == "gradient of params/layers/*/w" and words.startswith("all-reduced over x, 1.5 MiB received")
    assert "; a budget of 512.0 MiB would gain nothing; " in said.memory
    assert said.memory.endswith("; with a budget of 1.0 GiB the step would take 40% less time")
    text = str(said)
    assert all(title in text for title in ("chosen\n", "the dearest moves\n", "what FSDP moves beside it\n"))
    assert said.to_dict()["rival"] == "FSDP"


def test_less_memory_takes_longer_down_to_where_nothing_fits(prices: MovePrices):
    """Rows are needed whole before and after a large array lives: kept, or gathered a second time."""
    whole, dims = ((), ()), ((0,), (1,))

    def make(name: str, only: Split, reads: tuple[Access, ...], writes: tuple[Access, ...]) -> Node:
        return Node(name, (WIDE, OUT), frozenset({0, 1}), reads, writes, only=(only,))

    nodes = (
        make("rows", ROWS, (), (Access(0, dims, 0),)),
        make("early", whole, (Access(0, dims, 1),), (Access(2, dims, 1),)),
        make("large", whole, (), (Access(1, dims, 3),)),
        make("last of large", whole, (Access(1, dims, 5),), (Access(3, dims, 5),)),
        make("late", whole, (Access(0, dims, 8),), (Access(4, dims, 8),)),
    )
    lives = [(0, 8), (3, 5), (1, 1), (5, 5), (8, 8)]
    tensors = tuple(Tensor(f"t{at}", (WIDE, OUT), "f32", *life) for at, life in enumerate(lives))
    problem = Problem(MESH, tensors, nodes)
    trade = solve_trade_off(SplitSearch(problem, prices, SPEED), budget=7 * 2**20)
    choices = [choice for _, choice in trade.points]
    assert all(choice.peak_bytes <= budget for budget, choice in trade.points)
    assert choices[0].anew and not choices[-1].anew
    assert choices[0].move_seconds == pytest.approx(2 * choices[-1].move_seconds)
    svg = trade.to_svg()
    assert "budget 7.0 MiB" in svg and svg.count("chosen</title>") == 2
    most = choices[-1].peak_bytes
    assert [budget for budget, _ in solve_trade_off(SplitSearch(problem, prices, SPEED), [1, most]).points] == [most]
    with pytest.raises(BudgetError):
        solve_trade_off(SplitSearch(problem, prices, SPEED), [1, 2])


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("f32[{x}4]", "in pieces over x"),
        ("f32[{x}4, {y}8]", "by rows over x and by columns over y"),
        ("f32[4, {x}4, 8]", "by dim 1 over x"),
        ("f32[2{x}2, 8]", "by rows in several runs over x"),
        ("f32[16, 8] + sum{x}", "a sum over x"),
        ("f32[16, 8]", "whole on every device"),
    ],
)
def test_splits_are_told_by_rows_and_columns(layout: str, words: str):
    assert describe_split(Layout.parse(layout, MESH)) == words


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("f32[{x}4, 8]", "f32[16, 8]", "gathered over x"),
        ("f32[{x}4, 16]", "f32[16, {x}4]", "turned to lie by columns over x"),
        ("f32[16, 8] + sum{x}", "f32[{x}4, 8]", "reduce-scattered over x"),
        ("f32[16, 8] + sum{x}{y}", "f32[{x}4, 8]", "reduce-scattered over x, all-reduced over y"),
        ("f32[2{x}2, 8]", "f32[{x}4, 8]", "dealt out in another order"),
    ],
)
def test_moves_are_told_by_what_becomes_of_each_axis(source: str, target: str, words: str):
    assert describe_change(Layout.parse(source, MESH), Layout.parse(target, MESH)) == words


@pytest.mark.slow
def test_slices_that_a_loop_moves_are_told_of_the_argument(prices: MovePrices):
    """Stacked weights of which no device has room for all, gathered by layer: forward, and backward."""

    def step(params: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)[0].sum()

        return {"w": params["w"] - jax.grad(loss)(params["w"])}

    shapes = {"w": jax.ShapeDtypeStruct((16, 512, 512), "float32")}, jax.ShapeDtypeStruct((4096, 512), "float32")
    traced = trace_step(step, shapes, donate=(0,), platform="cpu")
    fixed = {0: P(None, ("x", "y")), 1: P(("x", "y"))}
    graph = build_graph(traced, read_op_rules(traced), MESH, fixed)
    free = choose_splits(graph.problem, prices, SPEED)
    named = list(zip(("params/w", "batch"), graph.arguments, strict=True))
    for budget, words in ((None, "once, for "), (free.peak_bytes - 2**23, "slice by slice, for each of 2 uses")):
        chosen = choose_splits(graph.problem, prices, SPEED, budget=budget)
        said = explain_choice(graph.problem, chosen, named, prices, SPEED)
        told = {group.names[0]: group.words for group in said.groups}["params/w"]
        assert f"by dim 1 over x, y; gathered over x, y {words}" in told
