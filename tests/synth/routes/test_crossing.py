"""Routes to other devices: what they do, that every plan is right, and how near it comes to the bounds."""

from __future__ import annotations

import itertools
import random
from math import ceil, prod

import pytest

import reshard as rs
from reshard.errors import BudgetError
from reshard.plans.plan import StepSpec, chain
from reshard.synth.routes import Pair, crossing
from tests import oracle
from tests.endpoint_lp import forwarded
from tests.layouts import random_crossing, random_layout

TRAINER, SERVER = rs.Mesh(fsdp=16), rs.Mesh.parse("tp=8,rep=16@16")


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(120))
def test_every_plan_moves_every_element(seed: int):
    choose = random.Random(seed)
    source, target = random_crossing(choose, partial=True)
    plan = rs.plan(source, target, donate=choose.random() < 0.3)
    oracle.check(plan)
    assert rs.Plan.from_json(plan.to_json()) == plan
    pull = chain(source, target, [StepSpec("exchange", target)]) if not source.partial and not target.partial else None
    if pull is not None:
        oracle.check(pull)
        assert _busiest(plan) <= _busiest(pull)
        assert plan.endpoint_bound_bytes <= max(plan.sent_bytes, plan.received_bytes)
    assert plan.lower_bound_bytes <= plan.received_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_pairs_of_device_sets(part: int):
    """1 to 48 devices a side, layouts of all families: every element right, the peak kept, proved."""
    for seed in range(part * 100, part * 100 + 100):
        plan = rs.plan(*random_crossing(random.Random(seed), partial=True, counts=range(1, 49)))
        oracle.check(plan)
        assert rs.prove(plan).right.holds


@pytest.mark.fast(25)
@pytest.mark.parametrize("seed", range(60))
def test_a_budget_is_met_from_the_floor_on(seed: int):
    source, target = random_crossing(random.Random(seed), partial=True)
    plan = rs.plan(source, target)
    try:
        tight = rs.plan(source, target, budget=plan.floor_bytes)
    except BudgetError as error:
        assert source.partial or target.partial, "only reductions need more than their tiles"
        tight = rs.plan(source, target, budget=error.smallest)
    assert tight.peak_bytes <= plan.peak_bytes
    oracle.check(tight)


@pytest.mark.slow
@pytest.mark.fast(0, slow=2)
@pytest.mark.parametrize("part", range(4))
def test_the_busiest_device_is_within_a_tenth_of_a_linear_program_that_forwards(part: int):
    """In whole elements: the program is a flow, so its optimum there is the one in fractions, rounded up."""
    for seed in range(part * 100, part * 100 + 100):
        choose = random.Random(seed)
        meshes = [layout.mesh for layout in random_crossing(choose)]
        shape = [choose.choice((24, 32, 48, 60, 64, 96)) for _ in range(2)]
        source, target = (random_layout(choose, mesh, shape) for mesh in meshes)
        plan, optimum = rs.plan(source, target), ceil(forwarded(source, target) - 1e-6)
        assert _busiest(plan) <= 1.1 * plan.source.nbytes(optimum), seed


def _busiest(plan: rs.Plan) -> int:
    return max(plan.sent_bytes, plan.received_bytes)


def test_overlapping_sets_take_as_few_launches_as_disjoint_ones():
    """A pull leaves out the 64th of its tile that a device holds already, and takes 63 messages for that."""
    trainer, source = rs.Mesh(fsdp=64), "f32[{fsdp}2, 128]"
    half, others = (rs.Mesh({"rep": 4, "tp": 8}, device_ids=range(at, at + 32)) for at in (32, 64))
    plans = [rs.plan(rs.Layout.parse(source, trainer), rs.Layout.parse("f32[128, {tp}16]", s)) for s in (half, others)]
    assert [(_busiest(plan), plan.launches) for plan in plans] == [(8192, 17), (8192, 17)]
    fewest = rs.plan(plans[0].source, plans[0].target, slack=0)
    assert (_busiest(fewest), fewest.launches) == (8064, 63)


def test_slack_is_counted_once_from_the_fewest_bytes_of_all_routes():
    """Pairs where a relay, or a route that is too far from the bound, decides what is within the slack."""
    for seed in (35, 41, 225, 487):
        choose = random.Random(seed)
        meshes = [layout.mesh for layout in random_crossing(choose, counts=range(1, 49))]
        shape = [choose.choice((24, 32, 48, 60, 64, 96)) for _ in range(2)]
        source, target = (random_layout(choose, mesh, shape) for mesh in meshes)
        pair = Pair(source, target)
        plans = [
            chain(source, target, route)
            for route in (*crossing.routes(pair, None), *crossing.list_relays(pair.source, pair.target))
        ]
        for slack in (0, 0.02, 0.05, 0.3):
            plan = rs.plan(source, target, slack=slack)
            within = [each for each in plans if _busiest(each) <= (1 + slack) * min(map(_busiest, plans))]
            total = (1 + slack) * min(each.endpoint_bytes for each in within)
            assert _busiest(plan) <= max(map(_busiest, within)), (seed, slack)
            assert plan.launches == min(each.launches for each in within if each.endpoint_bytes <= total), (seed, slack)


def test_without_slack_a_relay_is_tried_unless_another_route_is_at_the_bound():
    source, target = rs.Layout.parse("f32[{x}10/48]", rs.Mesh(x=5)), rs.Layout.parse("f32[48]", rs.Mesh.parse("d=5@1"))
    assert [_busiest(rs.plan(source, target, slack=slack)) for slack in (0, 0.05)] == [192, 200]
    assert rs.plan(source, target, slack=0).endpoint_bound_bytes == 192


def test_what_the_target_replicates_crosses_once():
    """A pull sends each tile 128 times; 16 replicas that pass it on among themselves receive it once."""
    source, target = rs.Layout.parse("f32[{fsdp}8, 128]", TRAINER), rs.Layout.parse("f32[128, {tp}16]", SERVER)
    plan, pull = rs.plan(source, target), chain(source, target, [StepSpec("exchange", target)])
    assert [step.kind for step in plan.steps] == ["exchange", "all_gather"]
    assert max(plan.sent_bytes, plan.received_bytes) == plan.endpoint_bound_bytes == 8192
    assert pull.sent_bytes == 8 * plan.endpoint_bound_bytes
    assert plan.launches == 9, "dim 0 is cut for the crossing; cut along dim 1, each device would send 128 messages"


def test_an_element_that_a_device_has_never_moves():
    source, target = rs.Layout.parse("f32[{x}4]", rs.Mesh(x=4)), rs.Layout.parse("f32[{d}8]", rs.Mesh.parse("d=2@0"))
    plan = rs.plan(source, target)
    assert (plan.received_bytes, plan.sent_bytes) == (32, 16)


def test_equal_tiles_are_permuted():
    source, target = (rs.Layout.parse("f32[{x}4, 8]", rs.Mesh.parse(text)) for text in ("x=4", "x=4@8"))
    assert [step.kind for step in rs.plan(source, target).steps] == ["permute"]


def test_sums_are_finished_before_they_cross():
    source = rs.Layout.parse("f32[16, 8] + sum{x}", rs.Mesh(x=4))
    target = rs.Layout.parse("f32[16, 8]", rs.Mesh.parse("d=2@4"))
    plan = rs.plan(source, target)
    assert next(step.kind for step in plan.steps) == "reduce_scatter"
    oracle.check(plan)


def test_a_network_prices_the_crossing():
    """A slow link between the two sets: crossing once costs less than every replica pulling for itself."""
    source, target = rs.Layout.parse("f32[{fsdp}8, 128]", TRAINER), rs.Layout.parse("f32[128, {tp}16]", SERVER)
    network = rs.Network("lab", inner=(1e-6, 1e11), outer=(1e-5, 1e10), domain=256, between=(2e-5, 1e9))
    plan = rs.plan(source, target, network=network)
    crossing, gather = plan.steps
    assert crossing.seconds == pytest.approx(crossing.launches * 2e-5 + crossing.sent_bytes / 1e9)
    assert plan.seconds == pytest.approx((crossing.seconds or 0) + (gather.seconds or 0))
    assert prod(plan.target.shape) * 4 / TRAINER.size / 1e9 < (crossing.seconds or 0)


def test_elements_cross_once_for_each_domain():
    """Between the server's hosts a gather would be slower than the crossing, inside one it is faster."""
    source = rs.Layout.parse("f32[{fsdp}64, 512]", rs.Mesh(fsdp=16))
    target = rs.Layout.parse("f32[1024, 512]", rs.Mesh.parse("host=2,rep=8@16"))
    network = rs.Network("lab", inner=(1e-6, 1e11), outer=(1e-5, 1e8), domain=8, between=(1e-6, 1e10))
    plan = rs.plan(source, target, network=network)
    crossing, gather = plan.steps
    assert str(crossing.result) == "f32[{rep}128, 512]"
    assert gather.kind == "all_gather"
    assert str(rs.plan(source, target).steps[0].result) == "f32[{host}{rep}64, 512]"


def test_pieces_that_do_not_nest_are_turned_on_one_side_where_messages_cost_more():
    """Rows on 8 devices to columns on 4 others, or back: each of the 4 would ask all 8 for itself, in 8 launches."""
    rows, columns = ("f32[{x}{y}32, 1024]", rs.Mesh(x=4, y=2)), ("f32[256, {tp}256]", rs.Mesh.parse("tp=4@8"))
    there, back = (
        [rs.Layout.parse(*end) for end in ends]
        for ends in ((rows, columns), (columns, ("f32[{x}{y}32, 1024]", rs.Mesh.parse("x=4,y=2@12"))))
    )
    for source, target in (there, back):
        small, large = (
            rs.plan(source, target, network=rs.Network("lab", inner=(1e-6, 1e11), outer=(2e-6, speed), domain=4))
            for speed in (5e10, 1e6)  # What crosses twice decides where links are slow.
        )
        assert sorted(step.kind for step in small.steps) == ["all_to_all", "exchange"] and small.launches == 3
        assert large.received_bytes <= small.received_bytes
        oracle.check(small)
        assert rs.prove(small).right.holds


@pytest.mark.fast(10)
@pytest.mark.parametrize("seed", range(60))
def test_no_turn_by_hand_is_faster(seed: int):
    choose = random.Random(seed)
    source, target = random_crossing(choose)
    plan = rs.plan(source, target, network="h100")
    oracle.check(plan)
    for at, to in itertools.permutations(range(len(source.shape)), 2):
        for turned in (source.with_local(at, to), target.with_local(at, to)):
            if turned.even and source.even and target.even:
                legs = [rs.plan(source, turned, network="h100"), rs.plan(turned, target, network="h100")]
                assert (plan.seconds or 0) <= sum(leg.seconds or 0 for leg in legs) * (1 + 1e-9), (at, to)
