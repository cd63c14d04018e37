"""Routes between layouts that refine: at the bound, with no tile above the larger end, and staged for networks."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from math import isclose

import pytest

import reshard as rs
from reshard.errors import StepError
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.collectives import RULES, check_step
from reshard.synth import cost
from reshard.synth.network import PRESETS
from reshard.synth.routes import Pair, normal
from reshard.synth.routes.normal import (
    Borrowing,
    Chains,
    kind_between,
    list_staged,
    visit_states,
)
from reshard.types import Layout, Mesh
from reshard.types.whole import primes
from tests.layouts import contiguous_layouts, random_pair, sample_pairs
from tests.oracle import check
from tests.sampling import few_or_all
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


def test_partial_sub_axes_of_both_ends_are_kept():
    pair = pair_of("f32[{x}4] + sum{y}", "f32[8] + sum{y}", CUBE)
    (route, _) = normal.routes(pair, None)
    assert [step.kind for step in route] == ["all_gather"]
    check_step("all_gather", pair.source, route[0].result)


# ---- Chains: the states of a pair are layouts, one collective apart, whose kind the typing rules accept ----


def test_a_swap_borrows_the_axes_of_an_open_cycle():
    mesh = Mesh(x=2, y=2, z=2, w=2)
    pair = pair_of("f32[4, {x}{z}, {y}2]", "f32[4, 4, {w}{z}]", mesh)
    assert pair.refinement is not None
    chains = Chains(pair, pair.refinement)
    w, y = mesh.stride(mesh.sub_axis("w")), mesh.stride(mesh.sub_axis("y"))
    borrowed = chains.borrowings()
    assert borrowed == (Borrowing(head=4, tail=2, free=w, spent=y),)
    first, last = chains.sliced(borrowed), chains.ungathered(borrowed)
    assert str(chains.layout(first)) == "f32[4, {x}{z}, {y}{w}]"
    assert str(chains.layout(last)) == "f32[4, {x}{y}, {w}{z}]"
    assert kind_between(first, last) == "permute"


def test_digits_of_pairs_with_permute_cycles_are_prime():
    for chains in random_chains(2, 60):
        if chains.refinement.swapped:
            held = [d.radix for d in chains.digits if d.src is not None or d.dst is not None]
            assert all(primes(radix) == [radix] for radix in held)


def test_the_kind_of_a_step_is_one_that_its_rule_accepts():
    seen: set[str] = set()
    for chains in random_chains(4, 150):
        first, last = chains.sliced(), chains.ungathered()
        ways = [[first, last], *chains.detours(), [first, *chains.one_by_one(first, last), last]]
        ways.append([first, chains.swaps_alone(first, last), last])
        for states in ways:
            path = [chains.start, *states, chains.end]
            for before, after in pairwise(path):
                if before != after:
                    seen.add(kind_between(before, after))
                    check_step(kind_between(before, after), chains.layout(before), chains.layout(after))
    assert seen == {"slice", "all_gather", "all_to_all", "permute", "exchange"}


# ---- Plans for a network: the least predicted seconds, few bytes on slow axes, few messages of small arrays ----

INNER, OUTER = rs.Link(1e-6, 1e11), rs.Link(1e-5, 1e9)
SPLIT = rs.Network.of({"x": INNER, "dcn": OUTER})
WIRES = (
    rs.Network.uniform(1e-6, 1e9),
    rs.Network.uniform(1e-3, 1e12),
    rs.Network("two", inner=INNER, outer=OUTER, domain=2),
    PRESETS["tpu-v5p"],
    PRESETS["h100"],
)


def priced(plan: rs.Plan, network: rs.Network) -> float:
    """The seconds of a plan that was made without the network."""
    links = network.links(plan.source.mesh)
    return sum(cost.predict_seconds(StepSpec(s.kind, s.result, s.mode), s.operand, links) for s in plan.steps)


# ---- the least -----------------------------------------------------------------------------------


def alternatives(source: Layout, target: Layout, through: list[Layout], links: cost.Links) -> list[float]:
    """The seconds of all plans of one and two steps through some layouts, of any kinds."""
    times: list[float] = []
    for way in [[source, target], *([source, on, target] for on in through)]:
        total = 0.0
        for before, after in pairwise(way):
            kinds = []
            for kind in RULES:
                try:
                    kinds.append(cost.predict_seconds(StepSpec(kind, after), before, links))
                except StepError:
                    continue
            total += min(kinds) if before != after else 0.0
        times.append(total)
    return times


@pytest.mark.parametrize("network", WIRES, ids=str)
@pytest.mark.fast(2, slow=2)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2), Mesh(dcn=2, x=4), Mesh(x=2, y=3)], ids=str)
def test_no_plan_of_two_steps_is_faster(mesh: Mesh, network: rs.Network):
    """The planner prices a few routes, not all, and may leave a twentieth of the time to others."""
    shape = (mesh.size,) * 2
    every = list(contiguous_layouts(mesh, shape))
    links = network.links(mesh)
    for source, target in sample_pairs(mesh, 2, 40, seed=4):
        plan = rs.plan(source, target, network=network)
        check(plan)
        least = min(alternatives(source, target, every, links))
        assert (plan.seconds or 0.0) <= least * 1.05, f"{least} s: {plan}"


@pytest.mark.fast(2)
@pytest.mark.parametrize("network", WIRES, ids=str)
@pytest.mark.parametrize("count", few_or_all(100, 400))
def test_never_slower_than_the_plan_of_fewest_bytes(network: rs.Network, count: int):
    choose = random.Random(2)
    for _ in range(count):
        source, target = random_pair(choose, "float64", partial=choose.random() < 0.2)
        plan = rs.plan(source, target, network=network)
        check(plan)
        assert plan.seconds is not None
        fewest = rs.plan(source, target)
        assert plan.seconds <= priced(fewest, network) * (1 + 1e-9), f"{plan}\n{fewest}"
        assert isclose(plan.seconds, priced(plan, network), abs_tol=1e-15)


# ---- what a network changes ----------------------------------------------------------------------


def test_an_inner_reduction_comes_before_the_outer_one():
    mesh = Mesh(dcn=2, x=4)
    source, target = Layout.parse("f64[65536] + sum{dcn}{x}", mesh), Layout.parse("f64[65536]", mesh)
    fewest, fastest = rs.plan(source, target), rs.plan(source, target, network=SPLIT)
    check(fastest)
    assert (fastest.seconds or 0) <= priced(fewest, SPLIT) * (1 + 1e-9)
    # Scatter inside, sum a quarter across, gather inside: what every hierarchical all-reduce does.
    quarter = source.tile_bytes / 4
    inside, across = 2e-6 + 3 * quarter / 1e11, 2 * (1e-5 + quarter / 2 / 1e9)
    assert (fastest.seconds or 0) <= (2 * inside + across) * (1 + 1e-9), fastest


EQUAL_MOVES = (
    ("f32[{x}2048, {y}256]", "f32[4096, {z}{y}128]"),
    ("f32[{y}2048, {x}256]", "f32[{z}{y}1024, 512]"),
    ("f32[{x}{y}1024, 512]", "f32[2{z}1024, {y}256]"),
    ("f32[{z}64, 16, {x}512]", "f32[128, {x}8, {y}512]"),
)


def test_moves_of_equal_digits_take_equal_seconds_wherever_these_stand():
    """x is spent, y passes its digit to z, and takes a local one: in any dims, and for any names of alike axes."""
    plans = [rs.plan(*ends, mesh=CUBE, network="tpu-v5p") for ends in EQUAL_MOVES]
    assert len({round((plan.seconds or 0) * 1e12) for plan in plans}) == 1
    for (source, target), plan in zip(EQUAL_MOVES, plans, strict=True):
        halved = [step.result.tile_bytes for step in plan.steps if step.kind == "slice"]
        assert halved == [plan.source.tile_bytes // 2], (source, target)
        check(plan)


TWO_SPEEDS = Mesh(dcn=2, x=4, y=4)
BY_HAND: tuple[tuple[str, str, Mesh, str, str], ...] = (
    # A swap over dcn borrows y and x, which pass a digit on; what is left of both waits along a local digit.
    (
        "strides wait beside a swap that borrows", "h100", TWO_SPEEDS,
        "f16[{y}1024, {dcn}256] -> f16[{x}{dcn}512, 512]",
        "slice f16[{y}{x}256, {dcn}256] ; permute f16[{x}{dcn}{y:(1)2}256, {y:(2)2}256] ; all_gather",
    ),
    (
        "what is gathered passes to a faster axis", "h100", TWO_SPEEDS,
        "f32[{y}{dcn}6] -> f32[{x}12]",
        "permute f32[{x}{y:(1)2}6] ; all_gather",
    ),
    (
        "a digit is lent while strides wait", "tpu-v5e", TWO_SPEEDS,
        "f32[{dcn}8, {x}64, 4096] -> f32[{x}4, {dcn}{y}32, 4096]",
        "slice f32[{dcn}2{y:(1)2}2, {x}{y:(2)2}32, 4096] ; "
        "all_to_all f32[{dcn}2{y:(1)2}{x:(1)2}, 2{x:(2)2}{y:(2)2}32, 4096] ; "
        "all_to_all f32[2{x:(2)2}{y:(1)2}{x:(1)2}, {dcn}2{y:(2)2}32, 4096] ; all_to_all",
    ),
    (
        "spent strides wait elsewhere than free ones", "h100", TWO_SPEEDS,
        "f16[16, {y}64, {x}1024] -> f16[16, {dcn}128, 4096]",
        "slice f16[16, {y}{dcn}32, {x}1024] ; all_to_all f16[{y:(1)2}8, 2{y:(2)2}{dcn}32, {x}1024] ; "
        "all_to_all f16[{y:(1)2}8, {dcn}{y:(2)2}64, {x}1024] ; all_gather",
    ),
    (
        "strides wait until what is spent is gathered", "tpu-v5e", Mesh(node=4, gpu=8),
        "f32[16, 256, {node}384] -> f32[16, 256, {gpu}192]",
        "slice f32[16, 256, {node}{gpu}48] ; all_gather f32[16, 256, 4{gpu}48] ; "
        "all_to_all f32[16, 256, {gpu:(1)4}4{gpu:(4)2}48] ; all_to_all",
    ),
    (
        "swaps that come last borrow, too", "tpu-v5p", TWO_SPEEDS,
        "f16[{y}4, {dcn}128, 8, 64] -> f16[16, 256, {y}2, {dcn}32]",
        "slice f16[{y}4, {dcn}128, {x}2, 64] ; exchange f16[{x}4, 256, {y}2, {dcn}32] ; all_gather",
    ),
    (
        "a swap borrows from the faster of two slices", "h100", TWO_SPEEDS,
        "f32[16, {x}, 256, 64] -> f32[{y}4, 4, 256, {x}{dcn}8]",
        "slice f32[16, {x}, 256, {y}{dcn}8] ; permute f32[16, {y}, 256, {x}{dcn}8] ; all_to_all",
    ),
    (
        "a swap borrows what a longer chain starts with", "h100", TWO_SPEEDS,
        "bf16[{y}{dcn}2, 4, 256, 64] -> bf16[{x}4, 4, {dcn}{y}32, 64]",
        "slice bf16[{y}{dcn}2, 4, {x}64, 64] ; permute bf16[{x}{y:(2)2}2, 4, {dcn}{y:(1)2}64, 64] ; all_to_all",
    ),
    (
        "what will be a sum holds a digit that moves anyway", "h100", TWO_SPEEDS,
        "f32[36, {dcn}{x}9] -> f32[{x}9, {y}18] + sum{dcn}",
        "slice f32[{y:(2)2}{y:(1)2}9, {dcn}{x}9] ; permute f32[{x}9, {y}{dcn}9] ; split_sum",
    ),
    (
        "a sum is started from what one permute leaves", "h100", CUBE,
        "f32[{z}72, {y}72, 3] -> f32[144, {z}72, 3] + sum{x}",
        "permute f32[{x}72, {z}72, 3] ; split_sum",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("network", "mesh", "move", "way"), [row[1:] for row in BY_HAND], ids=[r[0] for r in BY_HAND])
def test_no_way_by_hand_is_faster(network: str, mesh: Mesh, move: str, way: str):
    source, target = (Layout.parse(text, mesh) for text in move.split(" -> "))
    seconds, operand, links = 0.0, source, rs.Network.preset(network).links(mesh)
    for kind, _, text in (step.partition(" ") for step in way.split(" ; ")):
        result = Layout.parse(text, mesh) if text else target
        seconds += cost.predict_seconds(StepSpec(kind, result), operand, links)
        operand = result
    plan = rs.plan(source, target, network=network)
    if source.tile_bytes < 1 << 16:
        check(plan)
    assert (plan.seconds or 0.0) <= seconds * (1 + 1e-9), str(plan)


def test_nothing_waits_along_digits_of_no_elements():
    check(rs.plan("f32[0, {z}{x}1] + sum{y}", "f32[{z}0, {y}2]", mesh=CUBE, network="tpu-v5p"))


def test_a_free_stride_waits_along_a_local_digit():
    """x halves what dcn carries twice, until y has left its digit: one exchange takes almost twice as long."""
    mesh = Mesh(dcn=2, x=4, y=4)
    plan = rs.plan("f16[{y}1024, {dcn}256]", "f16[{x}{dcn}512, 512]", mesh=mesh, network="tpu-v5p")
    assert [step.kind for step in plan.steps] == ["slice", "exchange", "all_gather"]
    alone = StepSpec("exchange", plan.target)
    direct = cost.predict_seconds(alone, plan.source, rs.Network.preset("tpu-v5p").links(mesh))
    assert 1.8 * (plan.seconds or 0) < direct
    check(plan)


def test_small_arrays_take_fewer_messages():
    """An all-to-all over 16 devices is 15 messages; gathering all of it, doubling each time, is 4."""
    mesh = Mesh(x=4, y=4)
    network = rs.Network.uniform(1e-5, 1e11)

    def move(size: int) -> rs.Plan:
        source = Layout.tiled(mesh, (size, size), "float32", [[mesh.sub_axis("x"), mesh.sub_axis("y")], []])
        target = Layout.tiled(mesh, (size, size), "float32", [[], [mesh.sub_axis("x"), mesh.sub_axis("y")]])
        plan = rs.plan(source, target, network=network)
        if size < 100:
            check(plan)
        return plan

    small, large = move(16), move(1 << 15)
    assert [s.kind for s in large.steps] == ["all_to_all"]
    assert large.received_bytes == large.lower_bound_bytes
    assert small.received_bytes > small.lower_bound_bytes
    assert {s.kind for s in small.steps} == {"all_gather", "slice"}
    assert round((small.seconds or 0) / 1e-5) == 4
    assert isclose(large.seconds or 0, 15 * (1e-5 + large.source.tile_bytes / 16 / 1e11), rel_tol=1e-9)


# ---- the routes themselves -----------------------------------------------------------------------


def test_every_route_runs():
    for chains in random_chains(30, 40):
        mesh = chains.source.mesh
        links = rs.Network.of({name: (0, 10.0**at) for at, name in enumerate(mesh.axes)} or {"x": (0, 1)}).links(mesh)
        routes = list(list_staged(chains, links))
        assert len(routes) == len(set(routes)) or routes[-1] in routes[:-1], "only the exchange may come twice"
        for route in routes:
            runs(Pair(chains.source, chains.target), route)


def test_a_gather_is_staged_by_axis_slowest_first():
    mesh = Mesh(dcn=2, x=4)
    pair = Pair(Layout.parse("f32[{dcn}{x}2, 8]", mesh), Layout.parse("f32[16, 8]", mesh))
    results = [[str(step.result) for step in route] for route in normal.routes(pair, SPLIT.links(mesh))]
    assert results[:2] == [["f32[16, 8]"], ["f32[2{x}2, 8]", "f32[16, 8]"]]


def test_a_permute_over_a_slow_axis_shares_its_links_among_all_devices():
    """Half of the devices would send a whole tile over `node`: lent a local digit, all send half of one."""
    mesh = Mesh(node=2, x=4, y=2)
    network = rs.Network("lab", inner=(0, 9.0), outer=(0, 1.0), domain=8)
    source, target = (Layout.parse(text, mesh) for text in ("f32[{y}{x}{node}8]", "f32[{x}{node}{y}8]"))
    plan = rs.plan(source, target, network=network)
    check(plan)
    alone = cost.predict_seconds(StepSpec("permute", target), source, network.links(mesh))
    assert (
        alone == 32.0 and (plan.seconds or 0.0) < 0.8 * alone and {step.kind for step in plan.steps} == {"all_to_all"}
    )
    gathered = rs.plan(source, Layout.parse("f32[{node}64]", mesh), network=network)
    check(gathered)
    far = rs.plan(source, target, network=rs.Network("lab", inner=(9, 9.0), outer=(9, 1.0), domain=8))
    assert [step.kind for step in far.steps] == ["permute"]
