"""Common refinements: each numeral rebuilt from the atoms means what it did, and none where there is none."""

from __future__ import annotations

import random
from math import prod

import pytest
from hypothesis import given, settings

from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from reshard.types.pair.refine import Factor, RefinedDigit, Refinement, refine, same_devices
from tests.layouts import pairs, random_pair


def found(source: str, target: str, mesh: Mesh) -> Refinement | None:
    return refine(Layout.parse(source, mesh), Layout.parse(target, mesh))


def rebuilt(refinement: Refinement, rank: int, position: int, after: bool) -> list[list[int]]:
    """Per dim, the global indices on the device at a position, straight from the atoms."""
    indices: list[list[int]] = [[0] for _ in range(rank)]
    for atom in refinement.digits:
        stride = atom.dst if after else atom.src
        values = range(atom.radix) if stride is None else (position // stride % atom.radix,)
        indices[atom.dim] = [at * atom.radix + value for at in indices[atom.dim] for value in values]
    return indices


def holds(source: Layout, target: Layout, refinement: Refinement) -> None:
    assert prod(refinement.padded) == prod(a.radix for a in refinement.digits)
    assert refinement.exact == (refinement.padded == source.shape)
    for layout, after in ((source, False), (target, True)):
        for device in layout.mesh.devices:
            indices = rebuilt(refinement, len(layout.shape), layout.mesh.position(device), after)
            for mine, theirs, size in zip(indices, meaning(layout, device), layout.shape, strict=True):
                # Padding may be more than a layout alone needs; what is held is not.
                assert [i for i in mine if i < size] == [i for i in theirs if i < size], f"{layout}: {refinement}"
                assert tuple(mine[: len(theirs)]) == theirs


@settings(max_examples=300)
@given(pairs())
def test_atoms_mean_what_both_layouts_mean(pair: tuple[Layout, Layout]):
    refinement = refine(*pair)
    if refinement is not None:
        holds(*pair, refinement)


def test_most_random_pairs_of_a_mesh_refine():
    choose, refined = random.Random(5), 0
    for _ in range(500):
        source, target = random_pair(choose)
        refinement = refine(source, target)
        if refinement is not None:
            holds(source, target, refinement)
            refined += bool(refinement.digits)
    assert refined > 200


X4Y2 = Mesh(x=4, y=2)


@pytest.mark.parametrize(
    ("source", "target", "mesh", "atoms"),
    [
        ("f32[{x}4]", "f32[16]", X4Y2, [RefinedDigit(0, 4, 2, None), RefinedDigit(0, 4, None, None)]),
        ("f32[16]", "f32[{y}8]", X4Y2, [RefinedDigit(0, 2, None, 1), RefinedDigit(0, 8, None, None)]),
        # x is cut in two by y's digit: x:(1)2 has stride 4, x:(2)2 stride 2.
        (
            "f32[{x}{y}2]",
            "f32[{y}{x}2]",
            X4Y2,
            [
                RefinedDigit(0, 2, 4, 1),
                RefinedDigit(0, 2, 2, 4),
                RefinedDigit(0, 2, 1, 2),
                RefinedDigit(0, 2, None, None),
            ],
        ),
        ("f32[{x}4]", "f32[{x}4]", X4Y2, [RefinedDigit(0, 4, 2, 2), RefinedDigit(0, 4, None, None)]),
        (
            "f32[3{x}2]",
            "f32[3{x}2]",
            X4Y2,
            [RefinedDigit(0, 3, None, None), RefinedDigit(0, 4, 2, 2), RefinedDigit(0, 2, None, None)],
        ),
        ("f32[0, {y}]", "f32[0, 2]", X4Y2, [RefinedDigit(0, 0, None, None), RefinedDigit(1, 2, 1, None)]),
        # Blocks of two in four rounds, dealt anew in two rounds of four.
        (
            "f32[4{y}2]",
            "f32[2{y}4]",
            X4Y2,
            [
                RefinedDigit(0, 2, None, None),
                RefinedDigit(0, 2, None, 1),
                RefinedDigit(0, 2, 1, None),
                RefinedDigit(0, 2, None, None),
            ],
        ),
    ],
)
def test_atoms_by_hand(source: str, target: str, mesh: Mesh, atoms: list[RefinedDigit]):
    refinement = found(source, target, mesh)
    assert refinement is not None
    assert list(refinement.digits) == atoms


def test_parts_of_a_refinement():
    refinement = found("f32[{x}4, 8, {y}3]", "f32[16, {x}2, {y}3]", X4Y2)
    assert refinement is not None
    assert [(a.dim, a.radix) for a in refinement.gathered] == [(0, 4)]
    assert [(a.dim, a.radix) for a in refinement.sliced] == [(1, 4)]
    assert refinement.swapped == ()
    assert (refinement.common, refinement.pieces) == (4 * 2 * 3, 4)
    assert (refinement.used_before, refinement.used_after) == ({2, 1}, {2, 1})


def test_partial_factors():
    refinement = found("f32[8] + sum{x}{y}", "f32[{x:(1)2}4] + sum{y}", X4Y2)
    assert refinement is not None
    assert refinement.kept == (Factor(1, 2),)
    assert set(refinement.reduced) == {Factor(4, 2), Factor(2, 2)}


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f32[2{x:(1)2}3]", "f32[3{x:(1)2}2]", Mesh(x=4)),  # 2 then 3 against 3 then 2
        ("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3)),
        ("f32[{x:(1)2}6]", "f32[{x:(2)3}4]", Mesh(x=6)),
        ("f32[{x:(1)4}3, 1]", "f32[{x:(2)6}2, 1]", Mesh(x=12)),
    ],
)
def test_no_common_refinement(source: str, target: str, mesh: Mesh):
    assert found(source, target, mesh) is None


def test_other_devices_have_no_common_refinement():
    a, b = Mesh(x=4), Mesh({"x": 4}, device_ids=[0, 2, 1, 3])
    assert refine(Layout.parse("f32[{x}2]", a), Layout.parse("f32[{x}2]", b)) is None
    assert not same_devices(a, b)
    assert same_devices(a, Mesh(p=2, q=2))


def test_padding_is_stretched_to_fit_both():
    refinement = found("f32[{x}3/10]", "f32[10]", X4Y2)
    assert refinement is not None
    assert (refinement.padded, refinement.exact) == ((12,), False)
