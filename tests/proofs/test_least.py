"""The prover's lower bound: by counting elements, by hand, and equal to the planner's own bound."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

import reshard as rs
from reshard.plans.rules.bounds import lower_bound
from reshard.proofs.least import Floor, least_steps_bytes
from reshard.proofs.symbolic.form import form_of
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_pair


def bound(source: Layout, target: Layout) -> Floor:
    return least_steps_bytes(source, target, form_of([source, target], (), ()))


def elements(layout: Layout, device: int) -> set[tuple[int, ...]]:
    dims = zip(meaning(layout, device), layout.shape, strict=True)
    return set(product(*([index for index in indices if index < size] for indices, size in dims)))


@pytest.mark.parametrize("seed", range(2))
def test_the_bound_counts_the_elements_that_the_worst_device_lacks(seed: int):
    choose = random.Random(seed)
    for _ in range(60):
        source, target = random_pair(choose, "float32")
        lacks = [len(elements(target, d) - elements(source, d)) for d in target.mesh.devices]
        assert bound(source, target).elements == max(lacks), f"{source} -> {target}"


def test_the_bound_is_the_planners():
    choose = random.Random(1)
    for number in range(150):
        source, target = random_pair(choose, choose.choice(["float32", "int4", "bfloat16"]), partial=number % 3 == 0)
        if source.partial == target.partial:
            assert source.nbytes(bound(source, target).elements) == rs.plan(source, target).lower_bound_bytes


@pytest.mark.parametrize(
    ("source", "before", "target", "after"),
    [
        ("f32[12] + sum{x}", Mesh(x=6), "f32[{d}4/12]", Mesh({"d": 3, "e": 2}, device_ids=[2, 0, 5, 1, 4, 3])),
        ("f32[{y}7/13] + max{x}", Mesh(x=4, y=2), "f32[{x}2/13]", Mesh({"x": 8}, device_ids=[2, 1, 0, 7, 6, 5, 4, 3])),
        ("f32[6] + sum{x}", Mesh(x=2, y=3), "f32[{x}2]", Mesh(x=3, y=2)),
    ],
)
def test_between_meshes_without_common_sub_axes_all_devices_are_one_team(
    source: str, before: Mesh, target: str, after: Mesh
):
    pair = Layout.parse(source, before), Layout.parse(target, after)
    assert pair[0].nbytes(bound(*pair).elements) == lower_bound(*pair)
    assert rs.prove(rs.plan(*pair)).right.holds


def test_the_bound_of_a_reduction_is_worked_out_anew():
    """By counting devices: it is that of `types.bounds` if the sub-axes nest, and no plan receives less."""
    choose, compared = random.Random(7), 0
    while compared < 400:
        source, target = random_pair(choose, "float32", partial=True)
        if source.partial == target.partial:
            continue
        least = source.nbytes(bound(source, target).elements)
        axes = [*source.held, *source.partial, *target.held, *target.partial]
        ends = {e for a in axes for e in (source.mesh.stride(a), source.mesh.stride(a) * a.size)}
        if all(high % low == 0 for low, high in pairwise(sorted(ends))):
            assert least == lower_bound(source, target)
            compared += 1
        assert least <= rs.plan(source, target).received_bytes


def test_sub_axes_that_do_not_nest_are_one_team():
    """Twelve devices make each sum: 6 summands, 3 holders, and so 5 + 2 receipts for each of 12 elements."""
    mesh = Mesh(x=12)
    least = bound(Layout.parse("f32[12] + sum{x:(2)6}", mesh), Layout.parse("f32[3{x:(3)4}]", mesh))
    assert least.elements == 7
    assert "7 receipts for each of 12 elements, of which one of 12 devices has 7 or more" in least.argument


@pytest.mark.parametrize(
    ("source", "target", "mesh", "elements", "argument"),
    [
        ("f32[{x}5]", "f32[15]", Mesh(x=3), 10, "1/3 of its target tile"),
        ("f32[15]", "f32[{x}5]", Mesh(x=3), 0, "all of its target tile"),
        ("f32[{x}5, {y}7]", "f32[{y}5, {x}7]", Mesh(x=3, y=3), 35, "a digit of dim 0 is held along stride 3"),
        ("f32[{x}3/10]", "f32[{y}5]", Mesh(x=4, y=2), 5, "device 1 needs 5 elements, of which it holds 0"),
        ("f32[7] + sum{x}", "f32[7]", Mesh(x=5), 12, "8 receipts for each of 7 elements"),
    ],
)
def test_bounds_by_hand(source: str, target: str, mesh: Mesh, elements: int, argument: str):
    least = bound(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert least.elements == elements
    assert argument in least.argument
