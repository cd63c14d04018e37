"""The form of a plan: which sizes vary, and digits that agree with the refinement without sharing its code."""

from __future__ import annotations

import itertools
import random

import pytest

import reshard as rs
from reshard.geometry.refine import refine
from reshard.proofs import Proof, prove
from reshard.proofs.symbolic.form import FormDigit, form_of, local_place, step_digits
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_layout, random_pair

SIZED = [
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {}, "[{x}n0, 4 n1] -> [4 n0, {x}n1]"),
    (Mesh(x=4, y=2), "f32[{x}2, {y}4]", "f32[8, {y}4]", {}, "[{x}n0, {y}n1] -> [4 n0, {y}n1]"),
    (Mesh(x=2, y=2), "f32[{x}4, {y}2]", "f32[{y}4, {x}2]", {}, "[{x}n0, {y}n1] -> [{y}n0, {x}n1]"),
    (Mesh(x=4), "f32[4{x}2]", "f32[{x}8]", {}, "[4{x}n0] -> [{x}4 n0]"),
    (Mesh(x=2, y=3), "f32[{x}6, 7]", "f32[{y}4, 7]", {}, "[{x}6, n1] -> [{y}4, n1]"),
    (Mesh(x=4), "f32[{x}3/10, 4]", "f32[10, {x}]", {}, "[{x}3/10, 4] -> [10, {x}]"),
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {"budget": 544}, "[{x}4, 4 n1] -> [4 4, {x}n1]"),
    (Mesh(x=4), "f32[16, 3] + sum{x}", "f32[{x}4, 3]", {}, "[4 n0, n1] -> [{x}n0, n1]"),
    (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}4, 16]", "f32[16, {x}4]", {}, "[{x}n0, 4 n1] -> [4 n0, {x}n1]"),
    (Mesh(x=2), "f32[5{x}2]", "f32[{x}10]", {}, "[5{x}2] -> [{x}10]"),
]


def forms(proof: Proof) -> str:
    return f"{proof.form.spell(proof.plan.source)} -> {proof.form.spell(proof.plan.target)}"


@pytest.mark.parametrize(("mesh", "source", "target", "options", "form"), SIZED)
def test_which_sizes_vary(mesh: Mesh, source: str, target: str, options: dict, form: str):
    assert forms(prove(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options))) == form


@pytest.mark.parametrize("seed", range(3))
def test_the_digits_are_those_of_the_refinement(seed: int):
    """Two implementations that share no code agree on every digit, and on which pairs do not nest."""
    choose, nested = random.Random(seed), 0
    for number in range(250):
        source, target = random_pair(choose, partial=number % 3 == 0)
        digits, refinement = step_digits(source, target, form_of([source, target], (), ())), refine(source, target)
        if 0 in source.shape:
            continue
        assert (digits is None) == (refinement is None), f"{source} -> {target}"
        if digits is not None and refinement is not None:
            expected = [(d.dim, d.radix, d.src, d.dst) for d in refinement.digits]
            assert [(d.dim, d.radix, d.src, d.dst) for d in digits] == expected
            nested += 1
    assert nested > 100


@pytest.mark.parametrize("seed", range(2))
def test_digits_spell_the_global_indices(seed: int):
    """The digits of each side, by coordinates and local digits, are the indices of `meaning`, in the local order."""
    choose = random.Random(seed)
    for _ in range(60):
        source, target = random_pair(choose, most_rank=2)
        digits = step_digits(source, target, form_of([source, target], (), ()))
        if digits is None:
            continue
        for layout, side in ((source, "src"), (target, "dst")):
            device = choose.choice(layout.mesh.devices)
            for at, indices in enumerate(meaning(layout, device)):
                own = [d for d in digits if d.dim == at]
                spelled = spelled_indices(own, side, layout.mesh.position(device))
                assert spelled[: len(indices)] == list(indices)


def spelled_indices(digits: list[FormDigit], side: str, position: int) -> list[int]:
    ranges = []
    for d in digits:
        stride = getattr(d, side)
        ranges.append(range(d.radix) if stride is None else [position // stride % d.radix])
    return [sum(v * d.low for v, d in zip(values, digits, strict=True)) for values in itertools.product(*ranges)]


def test_the_place_of_a_local_index():
    """Local index 1 is place 1; the held digit of 3 lies between the local digits of 2 and 5."""
    layout = Layout.parse("f32[5{x}2]", Mesh(x=3))
    assert [local_place(layout, 0, count) for count in (1, 2, 10)] == [1, 6, 30]
    assert [local_place(layout, 0, count) for count in (3, 4, 7)] == [None, 12, None]
    choose = random.Random(0)
    for _ in range(60):
        some = random_layout(choose, Mesh(x=2, y=3), (24,))
        local = meaning(some, some.mesh.devices[0])[0]
        for count in range(1, len(local)):
            place = local_place(some, 0, count)
            assert place is None or local[count] - local[0] == place
