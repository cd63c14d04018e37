"""Routes of pairs that do not refine: every one is well typed and runs, and an exchange alone is among them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from reshard.plans.plan import StepSpec, chain
from reshard.synth.routes import Pair, boxes
from reshard.synth.routes.boxes import _deal_out
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.synth.routes.candidates import pair_of, runs


def kinds(pair: Pair) -> list[list[str]]:
    return [[step.kind for step in route] for route in boxes.routes(pair, None)]


def random_pairs(seed: int, count: int) -> Iterator[Pair]:
    """Random pairs that have no common refinement."""
    choose = random.Random(seed)
    while count:
        pair = Pair(*random_pair(choose))
        if pair.refinement is None:
            count -= 1
            yield pair


@pytest.mark.fast(1)
@pytest.mark.parametrize("seed", range(2))
def test_every_route_runs_and_the_exchange_alone_meets_the_bound(seed: int):
    for pair in random_pairs(seed, 120):
        routes = list(boxes.routes(pair, None))
        assert (StepSpec("exchange", pair.target),) in routes
        for route in routes:
            plan = runs(pair, route)
            assert plan.received_bytes >= plan.lower_bound_bytes
        alone = chain(pair.source, pair.target, (StepSpec("exchange", pair.target),))
        assert alone.received_bytes == alone.lower_bound_bytes


@pytest.mark.parametrize(
    ("source", "target", "mesh", "expected"),
    [
        # Six pieces of two, counted in two orders.
        ("f32[{y}{x}2/11]", "f32[{x}{y}2/11]", Mesh(x=2, y=3), ["permute"]),
        # Dim 1 refines: sliced before, gathered after.
        ("f32[{x}3/10, 16]", "f32[{x}{y}2/10, {z}8]", Mesh(x=4, y=2, z=2), ["slice", "exchange"]),
        ("f32[{x}{y}2/10, {z}8]", "f32[{x}3/10, 16]", Mesh(x=4, y=2, z=2), ["exchange", "all_gather"]),
        ("f32[{x}3/10, 16]", "f32[{x}{y}2/10, {z}8]", Mesh(z=2, x=4, y=2), ["slice", "exchange"]),
        # An exchange to a layout that is cut further than the target, by the spent x, and a gather.
        ("f32[{x}6, 6]", "f32[{y}4, 6]", Mesh(x=2, y=3), ["exchange", "all_gather"]),
        # Counted as the target counts, gathered in part, so that few pieces of either meet.
        ("f32[{y}{x}158/10067]", "f32[{x}1259/10067]", Mesh(x=8, y=8), ["permute", "all_gather", "exchange"]),
        ("f32[{x}{y}158/10067]", "f32[{x}1259/10067]", Mesh(x=8, y=8), ["all_gather", "exchange"]),
        # An exchange to an uneven layout that is cut further, and a gather.
        ("f32[{x}20/119]", "f32[{y}30/119]", Mesh(x=6, y=4), ["exchange", "all_gather"]),
        # Dealt out anew: x last, so that y can stand before it.
        ("f32[{x}3, {y}2]", "f32[{y}2, 6]", Mesh(x=2, y=3), ["exchange", "all_to_all", "all_gather"]),
    ],
)
def test_known_routes(source: str, target: str, mesh: Mesh, expected: list[str]):
    pair = pair_of(source, target, mesh)
    assert pair.refinement is None
    assert expected in kinds(pair)


def test_dealing_puts_the_holders_last():
    mesh = Mesh(x=2, y=3)
    layout, other = Layout.parse("f32[{x}3, {y}2]", mesh), Layout.parse("f32[{y}2, 6]", mesh)
    assert str(_deal_out(layout, other)) == "f32[3{x}, {y}2]"
    uneven = Layout.parse("f32[{x}3/5, {y}2]", mesh)
    assert _deal_out(uneven, Layout.parse("f32[{y}2/5, 6]", mesh)) is None
    assert _deal_out(layout, Layout.parse("f32[6, 6]", Mesh(z=6))) is None


def test_pairs_of_others():
    mesh = Mesh(x=4, y=2)
    assert kinds(pair_of("f32[{x}4]", "f32[16]", mesh)) == []
    assert kinds(pair_of("f32[{x}3/10] + sum{y}", "f32[10]", mesh)) == []
