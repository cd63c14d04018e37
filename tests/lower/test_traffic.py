"""The traffic of lowered programs against the reference runtime: what it counts as received, and who sent it."""

import random
from collections import Counter

import numpy as np
import pytest

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program_traffic import InstructionTraffic, TrafficMatrix, instruction_traffic, program_traffic
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import Account, run
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.oracle import PADDING, tiles_of

M42 = Mesh(x=4, y=2)
PLANS = [
    (M42, "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]", {}),
    (M42, "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]", {"budget": 4500}),
    (M42, "f32[{x}4, {y}8]", "f32[16, 16]", {}),
    (M42, "f32[{x}4, 16]", "f32[16, {y}8]", {}),
    (Mesh(x=4, y=2), "f32[{x}{y}2]", "f32[{y}{x}2]", {}),
    (Mesh(x=4), "f32[{x}3/10, 4]", "f32[10, {x}]", {}),
    (Mesh(x=3, y=2), "f32[{x}4/10]", "f32[{y}{x}2/10]", {}),
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {"budget": 256 + 32, "donate": True}),
    (Mesh(x=2, y=2), "f32[{x}2, {y}8]", "f32[4, {x}{y}4]", {"budget": 64 + 16, "donate": True}),
    (Mesh(x=4), "f32[16] + sum{x}", "f32[{x}4]", {}),
    (Mesh(x=4), "f32[5] + sum{x}", "f32[5]", {}),
    (Mesh(x=2, y=2), "f32[8, 4] + mean{x}{y}", "f32[{y}4, {x}2]", {}),
    (Mesh(x=4), "int4[{x}3]", "int4[12]", {}),
    (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}2]", "f32[8]", {}),
    (Mesh(x=4), "f32[]", "f32[]", {}),
]


def planned(mesh, source, target, options) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)


def traffic_of(plan: Plan) -> TrafficMatrix:
    return program_traffic(lower_plan(plan))


def received(plan: Plan) -> Counter:
    """Received elements by device, as the reference runtime counts them."""
    memory = Account(plan.source.dtype)
    tiles = {d: np.ones(plan.source.tile_shape, plan.source.dtype) for d in plan.source.mesh.devices}
    run(lower_plan(plan), tiles, memory)
    return +memory.elements


def folded(plan: Plan) -> Counter:
    """The same, by the fold."""
    sums: Counter = Counter()
    for (_, receiver), elements in traffic_of(plan).elements.items():
        sums[receiver] += elements
    return sums


def arrivals(plan: Plan) -> Counter:
    """True elements by (sender, receiver), seen by marking every tile with its device, step by step."""
    sums: Counter = Counter()
    for step in plan.steps:
        one = chain(step.operand, step.result, [StepSpec(step.kind, step.result, step.mode)], plan.donate)
        marks = {device: at + 1 for at, device in enumerate(one.source.mesh.devices)}
        indices = tiles_of(one.target)
        tiles = {device: np.full(one.source.tile_shape, mark, one.source.dtype) for device, mark in marks.items()}
        for receiver, tile in run(lower_plan(one), tiles).items():
            for sender, mark in marks.items():
                elements = int(np.sum((tile == mark) & (indices[receiver] != PADDING)))
                if sender != receiver and elements:
                    sums[sender, receiver] += elements
    return sums


@pytest.mark.parametrize(("mesh", "source", "target", "options"), PLANS, ids=[f"{s}-{t}" for _, s, t, _ in PLANS])
def test_flows_are_what_the_runtime_counts_and_what_arrives(mesh, source, target, options):
    plan = planned(mesh, source, target, options)
    matrix = traffic_of(plan)
    assert matrix.received[matrix.busiest_receiver] == max(matrix.received.values()) == plan.received_bytes
    assert matrix.launches == plan.launches
    assert sum(matrix.sent.values()) >= sum(matrix.received.values()) > 0 or not plan.received_bytes
    if plan.source.dtype == "int4":
        return
    assert folded(plan) == received(plan)
    if plan.source.partial:
        return  # A reduction would combine the marks.
    elements, true = matrix.elements, arrivals(plan)
    if all((step.operand.even and step.result.even) or step.kind == "exchange" for step in plan.steps):
        assert elements == true
    else:  # Padded blocks move their padding, too.
        assert set(elements) == set(true) and all(count <= elements[pair] for pair, count in true.items())


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(80))
def test_random_plans(seed):
    choose = random.Random(seed)
    source, target = random_pair(choose, "float32", partial=seed % 4 == 0)
    floor = source.tile_bytes + target.tile_bytes
    plan = rs.plan(source, target, donate=seed % 5 == 1)
    plans = [plan]
    if not source.partial and plan.peak_bytes > floor and not plan.donate:
        plans.append(rs.plan(source, target, budget=floor))
    for each in plans:
        assert folded(each) == received(each), str(each)
        if not source.partial:
            elements, true = traffic_of(each).elements, arrivals(each)
            assert all(count <= elements[pair] for pair, count in true.items()), str(each)
            if all(step.operand.even and step.result.even for step in each.steps):
                assert elements == true, str(each)


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        ("all_to_all", "f32[{x}4, 16]", "f32[16, {x}4]"),
        ("all_gather", "f32[{x}4, 16]", "f32[16, 16]"),
        ("permute", "f32[{x}4, 16]", "f32[{y}4, 16]"),
        ("reduce_scatter", "f32[16, 16] + sum{x}", "f32[{x}4, 16]"),
        ("all_reduce", "f32[16, 3] + sum{x}", "f32[16, 3]"),
    ],
)
def test_a_step_in_parts(kind, source, target):
    mesh = Mesh(x=4) if kind != "permute" else Mesh(x=4, y=4)
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    plan = chain(before, after, [StepSpec(kind, after, StepMode(parts=4))])
    assert folded(plan) == received(plan)
    (moved,) = (instruction_traffic(i, int(np.prod(before.tile_shape))) for i in lower_plan(plan).instructions)
    assert moved.launches == plan.launches == 4
    assert before.nbytes(moved.received) == plan.received_bytes == max(traffic_of(plan).received.values())
    if not before.partial:
        assert traffic_of(plan).elements == arrivals(plan)


MESH = Mesh(x=3)


def instruction(kind: str, source: str, target: str, mesh: Mesh = MESH) -> InstructionTraffic:
    """The traffic of one step."""
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    program = lower_plan(chain(before, after, [StepSpec(kind, after)]))
    return instruction_traffic(program.instructions[0], int(np.prod(program.tile_shape)))


@pytest.mark.parametrize(
    ("kind", "source", "target", "received", "launches"),
    [
        ("slice", "f32[12]", "f32[{x}4]", 0, 0),
        ("all_gather", "f32[{x}4]", "f32[12]", 8, 1),
        ("all_gather", "f32[{x}3/7]", "f32[7]", 6, 1),  # padding travels
        ("all_to_all", "f32[{x}4, 12]", "f32[12, {x}4]", 32, 1),
        ("permute", "f32[{x}{y}2]", "f32[{y}{x}2]", 2, 1),
        ("exchange", "f32[{x}4]", "f32[12]", 8, 2),
        ("exchange", "f32[{x}3/7]", "f32[7]", 6, 2),  # device 2 holds one element of seven
        ("reduce_scatter", "f32[12] + sum{x}", "f32[{x}4]", 8, 1),
        ("all_reduce", "f32[12] + sum{x}", "f32[12]", 16, 1),
        ("all_reduce", "f32[7] + sum{x}", "f32[7]", 10, 1),  # 2 (3 - 1) / 3 of 7, rounded up
    ],
)
def test_one_instruction(kind: str, source: str, target: str, received: int, launches: int):
    moved = instruction(kind, source, target, Mesh(x=3, y=2) if kind == "permute" else MESH)
    assert (moved.received, moved.launches) == (received, launches)
    by_receiver: Counter = Counter()
    for sender, receiver, elements in moved:
        assert sender != receiver
        by_receiver[receiver] += elements
    assert max(by_receiver.values(), default=0) == received


def test_an_all_reduce_is_spread_over_the_other_members():
    """Each of 3 devices receives 10 elements of a tile of 7: five from either of the others."""
    assert sorted(instruction("all_reduce", "f32[7] + sum{x}", "f32[7]")) == [
        (a, b, 5) for a in range(3) for b in range(3) if a != b
    ]
    four = list(instruction("all_reduce", "f32[3] + sum{x}", "f32[3]", Mesh(x=4)))
    assert sorted(elements for _, receiver, elements in four if receiver == 0) == [1, 2, 2]
