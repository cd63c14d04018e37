"""The normal form: slice ; move ; gather, at the lower bound, with no tile larger than the larger end."""

from __future__ import annotations

import re

import pytest

from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.collectives import check_step
from reshard.synth.routes import Pair, normal
from reshard.synth.routes.chains import visit_states
from reshard.types import Layout, Mesh
from tests.synth.routes.candidates import pair_of, random_chains, runs

CUBE = Mesh(x=2, y=2, z=2)


def test_the_table_in_the_docstring_is_the_plan():
    """Kinds, layouts and bytes of the worked example, as the module shows them."""
    rows = re.findall(r"^    (slice|permute|all_gather) .*?  (f32\[.*?\]) +(\d+) B", normal.__doc__ or "", re.MULTILINE)
    route = next(normal.routes(pair_of("f32[{y}{x}2, 4]", "f32[{z}4, {y}2]", CUBE), None))
    plan = chain(*(Layout.parse(text, CUBE) for text in ("f32[{y}{x}2, 4]", "f32[{z}4, {y}2]")), route)
    assert rows == [(step.kind, str(step.result), str(step.received_bytes)) for step in plan.steps]
    assert len(rows) == 3


@pytest.mark.fast(1)
@pytest.mark.parametrize("seed", range(2))
def test_every_route_of_uneven_layouts_runs(seed: int):
    mixed = 0
    for chains in random_chains(30 + seed, 100):
        pair = Pair(chains.source, chains.target)
        bound = chain(pair.source, pair.target, (StepSpec("exchange", pair.target),)).received_bytes
        for route in normal.routes(pair, None):
            assert runs(pair, route).received_bytes >= bound
            mixed += [step.kind for step in route][-2:] == ["all_gather", "exchange"]
    assert mixed


def test_gathers_before_an_exchange_take_the_major_sub_axes():
    """Gathered along x, each device has some of the elements; along y, those at the end would have none."""
    pair = pair_of("f32[{x}{y}8/1021]", "f32[1021]", Mesh(x=12, y=12))
    routes = [route for route in normal.routes(pair, None) if len(route) == 2]
    plans = {str(route[0].result): chain(pair.source, pair.target, route) for route in routes}
    by_x = plans["f32[11{y}8/1021]"]
    assert (by_x.launches, by_x.received_bytes) == (12, 4 * 1029)


@pytest.mark.parametrize("seed", range(3))
def test_the_normal_form_meets_the_bound(seed: int):
    for chains in random_chains(10 + seed, 100, even=True):
        pair = Pair(chains.source, chains.target)
        plan = runs(pair, next(normal.routes(pair, None)))
        assert plan.received_bytes == plan.lower_bound_bytes, str(plan)
        assert max(step.result.tile_bytes for step in plan.steps) <= max(
            chains.source.tile_bytes, chains.target.tile_bytes
        )
        kinds = [step.kind for step in plan.steps]
        assert re.fullmatch("(slice )?((all_to_all|permute|exchange) )?(all_gather )?", "".join(k + " " for k in kinds))


def test_the_exchange_and_borrowed_axes_meet_the_bound_too():
    for chains in random_chains(20, 100, even=True):
        pair = Pair(chains.source, chains.target)
        for route in [
            (StepSpec("exchange", pair.target),),
            visit_states(chains, [chains.sliced(b := chains.borrowings()), chains.ungathered(b)]),
        ]:
            plan = chain(chains.source, chains.target, route)
            assert plan.received_bytes == plan.lower_bound_bytes
            if chains.refinement.swapped:
                assert route in list(normal.routes(pair, None))


def test_chains_of_swaps_are_a_route_too():
    """Two swaps of halves, where one exchange takes two rounds."""
    routes = list(normal.routes(pair_of("f32[{y}4, 8, {z}4]", "f32[8, {z}4, {y}4]", CUBE), None))
    assert [[step.kind for step in route] for route in routes] == [
        ["exchange"],
        ["exchange"],
        ["all_to_all", "all_to_all"],
    ]


def test_pairs_of_others():
    """Nothing for numerals that do not nest and for reductions; no step for equal layouts."""
    assert list(normal.routes(pair_of("f32[{x:(1)2}3]", "f32[{x:(1)3}2]", Mesh(x=6)), None)) == []
    assert list(normal.routes(pair_of("f32[8] + sum{x}", "f32[8]", CUBE), None)) == []
    assert list(normal.routes(pair_of("f32[{x}4]", "f32[{x}4]", CUBE), None)) == [()]
    assert list(normal.routes(pair_of("f32[{x}4]", "f32[{x}4]", CUBE), {})) == [()]


def test_partial_sub_axes_of_both_ends_are_kept():
    pair = pair_of("f32[{x}4] + sum{y}", "f32[8] + sum{y}", CUBE)
    (route, _) = normal.routes(pair, None)
    assert [step.kind for step in route] == ["all_gather"]
    check_step("all_gather", pair.source, route[0].result)
