"""What is drawn as traffic is what the reference runtime moves, and between the devices between which it moves."""

import random
from collections import Counter

import numpy as np
import pytest

import reshard as rs
from reshard.draw.moved import moved
from reshard.draw.traffic import matrix, together
from reshard.errors import ReshardError
from reshard.lower import lower
from reshard.runtime import Account, run
from reshard.types import Layout, Mesh
from reshard.types.plan import Plan, StepSpec, chain
from reshard.types.rules.checker import StepMode
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


def received(plan: Plan) -> Counter:
    """Elements that the runtime counts as received, by device."""
    memory = Account(plan.source.dtype)
    tiles = {d: np.ones(plan.source.tile_shape, plan.source.dtype) for d in plan.source.mesh.devices}
    run(lower(plan), tiles, memory)
    return +memory.elements


def rows(plan: Plan) -> Counter:
    """The same, by what is drawn."""
    found: Counter = Counter()
    for (_, receiver), count in moved(plan).elements.items():
        found[receiver] += count
    return found


def senders(plan: Plan) -> Counter:
    """Who sends whom how many true elements, seen by marking every tile with its device, step by step."""
    found: Counter = Counter()
    for step in plan.steps:
        one = chain(step.operand, step.result, [StepSpec(step.kind, step.result, step.mode)], plan.donate)
        ids = {device: at + 1 for at, device in enumerate(one.source.mesh.devices)}
        real = tiles_of(one.target)
        tiles = {d: np.full(one.source.tile_shape, n, one.source.dtype) for d, n in ids.items()}
        for receiver, tile in run(lower(one), tiles).items():
            for sender, number in ids.items():
                count = int(np.sum((tile == number) & (real[receiver] != PADDING)))
                if sender != receiver and count:
                    found[sender, receiver] += count
    return found


@pytest.mark.parametrize(("mesh", "source", "target", "options"), PLANS, ids=[f"{s}-{t}" for _, s, t, _ in PLANS])
def test_devices_receive_what_the_runtime_counts(mesh, source, target, options):
    plan = planned(mesh, source, target, options)
    if plan.source.dtype != "int4":
        assert rows(plan) == received(plan)
    found = moved(plan)
    assert max(found.received.values()) == plan.received_bytes
    assert sum(found.elements.values()) == sum(rows(plan).values())


MARKED = [case for case in PLANS if "+" not in case[1] and "int4" not in case[1]]  # No mark survives a reduction.


@pytest.mark.parametrize(("mesh", "source", "target", "options"), MARKED, ids=[f"{s}-{t}" for _, s, t, _ in MARKED])
def test_senders_are_those_whose_elements_arrive(mesh, source, target, options):
    plan = planned(mesh, source, target, options)
    found, true = moved(plan).elements, senders(plan)
    if all((step.operand.even and step.result.even) or step.kind == "exchange" for step in plan.steps):
        assert found == true
    else:  # A block is padded, and its padding moves, too.
        assert set(found) == set(true) and all(count <= found[pair] for pair, count in true.items())


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
        assert rows(each) == received(each), str(each)
        if not source.partial:
            found, true = moved(each).elements, senders(each)
            assert set(true) <= set(found) and all(count <= found[pair] for pair, count in true.items()), str(each)
            if all(step.operand.even and step.result.even for step in each.steps):
                assert found == true, str(each)


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
    assert rows(plan) == received(plan)
    if not before.partial:
        assert moved(plan).elements == senders(plan)


def test_all_of_a_matrix_is_there_in_blocks_of_devices():
    mesh = Mesh(x=512)
    plan = planned(mesh, "f32[{x}1, 512]", "f32[512, {x}1]", {})
    found = moved(plan)
    cells = matrix(found, sorted(mesh.devices), together(mesh.size))
    assert cells.shape == (256, 256) and cells.sum() == 512 * plan.received_bytes
    small = planned(Mesh(x=4), "f32[{x}4, 4]", "f32[16, {x}1]", {})
    assert np.array_equal(matrix(moved(small), [0, 1, 2, 3], 1), 16 * (1 - np.eye(4)))


def test_too_many_devices_or_launches_are_refused():
    with pytest.raises(ReshardError, match=r"1024 devices .*at most 512"):
        moved(planned(Mesh(x=1024), "f32[{x}1]", "f32[1024]", {}))
    many = planned(Mesh(x=8), "f32[{x}8192, 65536]", "f32[65536, {x}8192]", {"budget": 2 * 4 * 8192 * 65536})
    with pytest.raises(ReshardError, match="launches on 8 devices are too many"):
        moved(many)
