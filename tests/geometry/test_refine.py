"""Common refinements: the refined digits mean what both layouts mean; layouts that do not nest have none."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.refine import Factor, Refinement, prime_digits, refine, release_digits
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import layouts, pairs, random_pair


def refined(source: str, target: str, mesh: Mesh) -> Refinement | None:
    return refine(Layout.parse(source, mesh), Layout.parse(target, mesh))


def rebuilt(refinement: Refinement, rank: int, position: int, after: bool) -> list[list[int]]:
    """Per dim, the global indices on the device at a position, straight from the refined digits."""
    indices: list[list[int]] = [[0] for _ in range(rank)]
    for dim, radix, src, dst in refinement.digits:
        stride = dst if after else src
        values = range(radix) if stride is None else (position // stride % radix,)
        indices[dim] = [at * radix + value for at in indices[dim] for value in values]
    return indices


def holds(source: Layout, target: Layout, refinement: Refinement) -> None:
    assert prod(refinement.padded) == prod(a.radix for a in refinement.digits)
    assert refinement.exact == (refinement.padded == source.shape)
    for layout, after in ((source, False), (target, True)):
        for device in layout.mesh.devices:
            indices = rebuilt(refinement, len(layout.shape), layout.mesh.position(device), after)
            for mine, theirs, size in zip(indices, meaning(layout, device), layout.shape, strict=True):
                # The common padding may be larger than a layout's own; the true elements are the same.
                assert [i for i in mine if i < size] == [i for i in theirs if i < size], f"{layout}: {refinement}"
                assert tuple(mine[: len(theirs)]) == theirs


@settings(max_examples=150)
@given(pairs())
def test_refined_digits_mean_what_both_layouts_mean(pair: tuple[Layout, Layout]):
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
    ("source", "target", "mesh"),
    [
        ("f32[2{x:(1)2}3]", "f32[3{x:(1)2}2]", Mesh(x=4)),  # 2 then 3 against 3 then 2
        ("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3)),
        ("f32[{x:(1)2}6]", "f32[{x:(2)3}4]", Mesh(x=6)),
        ("f32[{x:(1)4}3, 1]", "f32[{x:(2)6}2, 1]", Mesh(x=12)),
    ],
)
def test_no_common_refinement(source: str, target: str, mesh: Mesh):
    assert refined(source, target, mesh) is None


@pytest.mark.parametrize(
    ("source", "target", "size", "padded"),
    [
        ("f32[{x}3/10]", "f32[10]", 4, 12),
        ("f32[3{x}2/20]", "f32[2{x}3/20]", 4, None),  # blocks of 2 against blocks of 3
        ("f32[3{x}2/20]", "f32[{x}5]", 4, None),
        ("f32[5{x}/13]", "f32[13]", 3, 15),
        ("f32[0]", "f32[0]", 4, 0),
    ],
)
def test_the_common_padded_size(source: str, target: str, size: int, padded: int | None):
    refinement = refined(source, target, Mesh(x=size))
    assert (None if refinement is None else refinement.padded) == (None if padded is None else (padded,))


def test_prime_digits_split_held_digits_and_keep_the_meaning():
    choose, split = random.Random(9), 0
    for _ in range(200):
        source, target = random_pair(choose)
        refinement = refine(source, target)
        if refinement is None:
            continue
        primes = replace(refinement, digits=prime_digits(refinement))
        for digit in primes.digits:
            held = digit.src is not None or digit.dst is not None
            assert not held or all(digit.radix % k for k in range(2, digit.radix))
        split += len(primes.digits) > len(refinement.digits)
        holds(source, target, primes)
    assert split > 5


def test_the_common_padding_is_the_least_that_fits_both():
    """Rounds of 4 and of 8: 12 and 16 elements are both padded to 16, not to a multiple of 4 x 8."""
    refinement = refined("f32[3{x}2/11]", "f32[2{y}{x}2/11]", Mesh(x=2, y=2))
    assert refinement is not None
    assert refinement.padded == (16,)


@pytest.mark.parametrize(
    ("operand", "result", "kept", "reduced", "started"),
    [
        ("f32[8] + sum{x}", "f32[8] + sum{y}", [], [(2, 4)], [(1, 2)]),
        ("f32[8]", "f32[8] + sum{x}{y}", [], [], [(2, 4), (1, 2)]),
        ("f32[8] + sum{x:(1)2}", "f32[8] + sum{x}", [(4, 2)], [], [(2, 2)]),
        # Another operation: nothing is kept.
        ("f32[8] + sum{x}", "f32[8] + max{x}{y}", [], [(2, 4)], [(2, 4), (1, 2)]),
        # A factor is cut where a digit is.
        ("f32[{x:(1)2}4]", "f32[8] + sum{x}", [], [], [(4, 2), (2, 2)]),
    ],
)
def test_what_becomes_of_partial_axes(operand: str, result: str, kept: list, reduced: list, started: list):
    refinement = refined(operand, result, X4Y2)
    assert refinement is not None
    for factors, wanted in ((refinement.kept, kept), (refinement.reduced, reduced), (refinement.started, started)):
        assert sorted(factors) == sorted(wanted)


# Sub-axes released: what remains of a layout's digits, and what the devices along them have together.


def test_a_factor_that_does_not_nest_with_a_holder_releases_all_of_its_digit():
    """On x=6, positions 0 and 1 differ along x:(3)2, and 2 and 3 also along x:(1)2."""
    layout = Layout.parse("f32[{x:(1)2}3]", Mesh(x=6))
    assert str(release_digits(layout, [Factor(1, 2)])) == "f32[6]"


@settings(max_examples=100)
@given(layouts(), st.data())
def test_a_group_has_no_more_than_its_released_tile(layout: Layout, data: st.DataObject):
    mesh = layout.mesh
    axes = data.draw(st.lists(st.sampled_from(sorted(mesh.axes) or ["none"]), unique=True))
    factors = [Factor(mesh.stride(mesh.sub_axis(a)), mesh.axes[a]) for a in axes if a in mesh.axes]
    whole = release_digits(layout, factors)
    for device in mesh.devices:
        own, shared = meaning(layout, device), meaning(whole, device)
        for size, some, more in zip(layout.shape, own, shared, strict=True):
            assert {i for i in some if i < size} <= set(more)
