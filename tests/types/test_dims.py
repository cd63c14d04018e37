"""Digits and dims: padded sizes, tiles, and rounds fitted to a size."""

from __future__ import annotations

from itertools import product

import pytest

from reshard.errors import LayoutError
from reshard.types.dims import (
    Digit,
    Dim,
    canonical_dim,
    canonical_partial,
    check_single_use,
    fit_digits,
    true_extent,
)
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.reductions import REDUCTIONS

X3 = Digit(3, SubAxis("x", 1, 3))


def test_fitted_takes_the_fewest_rounds():
    for rounds, block, size in product((1, 4, 9), (1, 2, 5), range(1, 60, 7)):
        dim = fit_digits((Digit(rounds, None), X3, Digit(block, None)), size)
        assert dim.digits[1:] == (X3, Digit(block, None))
        assert dim.size == size
        assert dim.padded >= size > dim.padded - 3 * block


def test_fitted_gives_a_round_to_digits_that_start_with_a_held_one():
    assert fit_digits((X3, Digit(4, None)), 12) == Dim((Digit(1, None), X3, Digit(4, None)), 12)
    assert fit_digits((X3, Digit(4, None)), 13).digits[0] == Digit(2, None)


def test_fitted_without_held_digits_is_the_size():
    assert fit_digits((Digit(2, None), Digit(3, None)), 7) == Dim((Digit(7, None),), 7)


@pytest.mark.parametrize("order", ["2x3y2", "xy4", "4xy", "1x5y2", "x2y", "3x", "x", "6", ""])
def test_elements_come_before_padding(order: str):
    """By counting: every local index in order, and whether its global index is below the size."""
    axes = {"x": SubAxis("x", 1, 3), "y": SubAxis("y", 1, 2)}
    digits = tuple(Digit(axes[d].size, axes[d]) if d in axes else Digit(int(d), None) for d in order)
    for size in range(Dim(digits, 0).padded + 1):
        dim = Dim(digits, size)
        for x, y in product(range(3), range(2)):
            values = [range(d.radix) if d.axis is None else [x if d.axis == axes["x"] else y] for d in digits]
            real = []
            for local in product(*values):
                index = 0
                for digit, value in zip(digits, local, strict=True):
                    index = index * digit.radix + value
                real.append(index < size)
            assert real == sorted(real, reverse=True)
            assert true_extent(dim, Mesh(x=3, y=2), 2 * x + y) == sum(real)


def test_the_extent_of_a_huge_dim_is_counted_at_once():
    dim = Dim((Digit(1 << 40, None), X3, Digit(1 << 20, None)), (3 << 60) - 5)
    assert true_extent(dim, Mesh(x=3), 2) == dim.tile - 5
    assert true_extent(Dim((Digit(0, None),), 0), Mesh(x=3), 0) == 0


# The coordinates of all positions, against taking each position apart.


# The invariants of layouts: what each refuses under its name, and what is rewritten to the canonical form.


MESH = Mesh(x=4, y=2)


def rejects(text: str, *words: str, mesh: Mesh = MESH) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, mesh)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- exact cover: the padded size is the smallest multiple that fits -----------------------------


@pytest.mark.parametrize(
    ("text", "radices", "best"),
    [
        ("f32[{x}3/13]", 12, 16),  # one element too many
        ("f32[{x}4/12]", 16, 12),  # pieces of 3 suffice
        ("f32[16/12]", 16, 12),
        ("f32[3{x}2/16]", 24, 16),  # one round too many
        ("f32[2{x}2/20]", 16, 24),
        ("f32[0{x}/3]", 0, 4),
        ("f32[5/0, {x}2/9]", 8, 12),
    ],
)
def test_exact_cover(text: str, radices: int, best: int):
    rejects(text, f"multiply to {radices}", f"product is {best}", "exact cover")


def test_exact_cover_with_one_round_of_blocks():
    # A leading 1 is one round of 4 blocks of 2, however few of them are full.
    for size in range(1, 9):
        layout = Layout.parse(f"f32[1{{x}}2/{size}]", MESH)
        assert (layout.padded_shape, layout.tile_shape) == ((8,), (2,))
    rejects("f32[1{x}2/9]", "multiply to 8", "exact cover")


# ---- single use: no part of an axis twice, partial axes included ---------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "f32[{x}4, {x}4]",
        "f32[{x}{x}]",
        "f32[{x}4] + sum{x}",
        "f32[{x:(1)2}4, {x}4]",
        "f32[{x:(2)2}4, {x}4]",
        "f32[{x:(1)2}4] + sum{x}",
        "f32[16] + sum{x}{x}",
        "f32[16] + sum{x,x:(2)2}",
    ],
)
def test_single_use(text: str):
    rejects(text, "axis 'x'", "overlap", "(single use)")


def test_single_use_of_factors_that_do_not_nest():
    rejects("f32[{x:(1)4}3, {x:(2)6}2]", "x:(1)4", "x:(2)6", "single use", mesh=Mesh(x=12))
    # Strides 3 and 1: the second lies after the first, yet 2 does not divide 3.
    rejects("f32[{x:(1)4}3, {x:(6)2}2]", "x:(1)4", "x:(6)2", "single use", mesh=Mesh(x=12))
    rejects("f32[{x:(1)4}3] + sum{x:(6)2}", "x:(1)4", "x:(6)2", "single use", mesh=Mesh(x=12))
    kept = Layout.parse("f32[{x:(1)2}3, {x:(4)3}2, {x:(2)2}2]", Mesh(x=12))
    assert [d.tile for d in kept.dims] == [3, 2, 2]


def numerals(size: int) -> list[list[int]]:
    """The place values of all numerals of a size: every chain of divisors from 1 to it."""
    if size == 1:
        return [[1]]
    return [[*chain, size] for below in range(1, size) if size % below == 0 for chain in numerals(below)]


@pytest.mark.parametrize("size", [7, 8, 12, 30])
def test_single_use_is_for_digits_of_one_numeral(size: int):
    """Two sub-axes are accepted if some numeral of the axis has both as digits, or as ranges of its digits."""
    mesh = Mesh(x=size)
    axes = [SubAxis("x", p, s) for p in range(1, size + 1) for s in range(2, size + 1) if size % (p * s) == 0]
    for one, other in product(axes, axes):
        ends = {*mesh.span(one), *mesh.span(other)}
        apart = one.pre >= other.pre * other.size or other.pre >= one.pre * one.size
        if apart and any(ends <= set(places) for places in numerals(size)):
            check_single_use(mesh, [one, other])
        else:
            with pytest.raises(LayoutError, match="single use"):
                check_single_use(mesh, [one, other])


# ---- one reduction: one operation that the dtype has ---------------------------------------------


def test_without_partial_axes_the_reduction_is_none():
    dims = (Dim((Digit(8, None),), 8),)
    assert Layout(MESH, dims, "float32", "sum", ()) == Layout(MESH, dims, "float32")
    unit = Mesh(x=4, u=1)
    assert Layout(unit, dims, "float32", "sum", (SubAxis("u", 1, 1),)) == Layout(unit, dims, "float32")


def test_order_and_spelling_of_partial_axes_have_no_meaning():
    same = {Layout.parse(f"f32[8] + max{axes}", MESH) for axes in ("{x}{y}", "{y,x}", "{y}{x:(2)2}{x:(1)2}")}
    assert {str(layout) for layout in same} == {"f32[8] + max{x}{y}"}
    assert len({Layout.parse(f"f32[8] + {op}{{x}}", MESH) for op in REDUCTIONS}) == 5


# ---- canonical form: equal meaning, equal object -------------------------------------------------


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("f32[2 3]", "f32[6]"),
        ("f32[1 6 1]", "f32[6]"),
        ("f32[{x:(1)2}{x:(2)2}4]", "f32[{x}4]"),
        ("f32[{x:(2)2}{x:(1)2}4]", "f32[{x:(2)2}{x:(1)2}4]"),  # not consecutive: the minor half comes first
        ("f32[{x:(1)2}1{x:(2)2}4]", "f32[{x}4]"),
        ("f32[{x,y}4]", "f32[{x}{y}4]"),
        ("f32[{u}4{u}2]", "f32[8]"),
        ("f32[1{x}2]", "f32[{x}2]"),
        ("f32[1{x}2/5]", "f32[{x}2/5]"),
        ("f32[1{x}2/4]", "f32[1{x}2/4]"),  # without the 1, {x}2/4 would be refused
        ("f32[{x}0]", "f32[0]"),
        ("f32[{x}]", "f32[{x}]"),
        ("f32[1]", "f32[1]"),
        ("f32[]", "f32[]"),
        ("f32[8/8]", "f32[8]"),
        ("F32[8]", None),
    ],
)
def test_canonical_form(written: str, canonical: str | None):
    mesh = Mesh(x=4, y=2, u=1)
    if canonical is None:
        with pytest.raises(LayoutError, match="unknown dtype"):
            Layout.parse(written, mesh)
    else:
        assert str(Layout.parse(written, mesh)) == canonical


def test_partial_axes_are_sorted_and_merged():
    mesh = Mesh(x=12, y=2, u=1)
    axes = [SubAxis("y", 1, 2), SubAxis("x", 4, 3), SubAxis("u", 1, 1), SubAxis("x", 2, 2)]
    assert canonical_partial(axes, mesh) == (SubAxis("x", 2, 6), SubAxis("y", 1, 2))
    apart = [SubAxis("x", 4, 3), SubAxis("x", 1, 2)]
    assert canonical_partial(apart, mesh) == (SubAxis("x", 1, 2), SubAxis("x", 4, 3))


# ---- the checks by themselves --------------------------------------------------------------------


def test_a_dim_names_itself_by_its_number():
    with pytest.raises(LayoutError, match=r"^dim 3: the radices multiply to 16"):
        canonical_dim(Dim((Digit(4, SubAxis("x", 1, 4)), Digit(4, None)), 10), MESH, 3)


def test_blocks_dealt_along_an_axis_of_one_device_are_not_padded():
    mesh = Mesh(x=4, u=1)
    unit = Digit(1, SubAxis("u", 1, 1))
    for size in range(1, 15):
        rounds = -(-size // 2)
        dim = Dim((Digit(rounds, None), unit, Digit(2, None)), size)
        assert canonical_dim(dim, mesh, 0) == (Dim((Digit(size, None),), size) if size > 1 else Dim((), 1))
