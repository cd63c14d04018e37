"""The form of a plan: which sizes vary, and digits that agree with the refinement without sharing its code."""

from __future__ import annotations

import itertools
import random

import pytest

import reshard as rs
from reshard.geometry.refine import refine
from reshard.proofs import Proof, prove
from reshard.proofs.symbolic.form import FormDigit, close_cuts, form_of, local_place, step_digits
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


@pytest.mark.parametrize(
    ("meshes", "texts", "fixed"),
    [
        ([Mesh(x=4)] * 2, ("f32[{x}3/10, 7]", "f32[10, 7]"), {0: "it is padded"}),
        ([Mesh(x=4)] * 2, ("f32[0, 7]", "f32[0, 7]"), {0: "it is empty"}),
        ([Mesh(x=2, y=3)] * 2, ("f32[{x}6, 7]", "f32[{y}4, 7]"), {0: "its numerals do not nest"}),
        (
            [Mesh(x=2), Mesh({"x": 2}, device_ids=[1, 0])],
            ("f32[{x}6]", "f32[{x}6]"),
            {0: "its devices are counted in several orders"},
        ),
    ],
)
def test_why_a_dim_keeps_its_size(meshes: list[Mesh], texts: tuple[str, str], fixed: dict[int, str]):
    layouts = [Layout.parse(text, mesh) for text, mesh in zip(texts, meshes, strict=True)]
    assert form_of(layouts, (), ()).fixed == fixed


def test_several_free_digits_of_a_dim_are_named_major_first():
    """x cuts dim 1 into 5, 3 and 7; a place that is tied has no name, and an extra cut splits a digit."""
    mesh = Mesh(x=3)
    layouts = [Layout.parse(text, mesh) for text in ("f32[105]", "f32[5{x}7]")]
    form = form_of(layouts, (), ())
    assert [form.spell(layout) for layout in layouts] == ["[n0a 3 n0b]", "[n0a{x}n0b]"]
    assert form.sizes == {"n0a": 5, "n0b": 7} and form.unit == 35
    assert form_of(layouts, (), {(0, 1)}).names == {(0, 21): "n0"}
    assert form_of([Layout.parse("f32[12]", mesh)], [(0, 4)], ()).sizes == {"n0a": 3, "n0b": 4}


def test_a_cut_is_carried_through_the_devices():
    """y:(2)3 cuts the positions of y, and with them the digit of dim 0 that y holds as a whole."""
    mesh = Mesh(y=6)
    layouts = [Layout.parse(text, mesh) for text in ("f32[{y}5, 6]", "f32[30, {y:(2)3}2]")]
    digits = step_digits(*layouts, form_of(layouts, (), ()))
    assert [d[:5] for d in digits] == [
        (0, 15, 2, 3, None),
        (0, 5, 3, 1, None),
        (0, 1, 5, None, None),
        (1, 2, 3, None, 1),
        (1, 1, 2, None, None),
    ]


def test_cuts_that_cannot_be_carried_over():
    mesh = Mesh(x=12)
    layouts = [Layout.parse(text, mesh) for text in ("f32[{x:(2)6}2]", "f32[{x:(3)4}3]")]
    assert step_digits(*layouts, form_of(layouts, (), ())) is None
    assert close_cuts({0: {1, 4, 6}}, [], set()) == {0}
    assert close_cuts({0: {1, 2, 6}}, [], {1, 2, 3}) == set()


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
