"""How views group the digits of tiles."""

from __future__ import annotations

import pytest

from reshard.errors import UndecidedError
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.contract import StepContract, count_values, match_digits, open_view, pair_digits
from reshard.proofs.symbolic.form import FormDigit
from reshard.types import Layout, Mesh
from tests.proofs.contracts import contract_of

MESH = Mesh(x=3, y=5)


def digits(*radices: int) -> list[FormDigit]:
    """Local digits of dim 0, major first."""
    made, low = [], 1
    for radix in reversed(radices):
        made.append(FormDigit(0, low, radix, None, None, None))
        low *= radix
    return made[::-1]


@pytest.mark.parametrize(
    ("radices", "view", "groups"),
    [
        ((2, 3, 5), (6, 5), [(2, 3), (5,)]),
        ((2, 3, 5), (2, 15), [(2,), (3, 5)]),
        ((7,), (1, 7, 1), [(), (7,), ()]),
        ((2, 1, 3), (2, 3), [(2, 1), (3,)]),
        ((), (1,), [()]),
    ],
)
def test_a_view_groups_digits_by_its_radices(radices: tuple, view: tuple, groups: list[tuple]):
    assert [tuple(d.radix for d in group) for group in match_digits(view, digits(*radices))] == groups


@pytest.mark.parametrize(("radices", "view"), [((2, 3), (3, 2)), ((4,), (2, 2)), ((2, 3), (2,)), ((2,), (2, 3))])
def test_a_view_that_cuts_elsewhere_is_refused(radices: tuple, view: tuple):
    with pytest.raises(UndecidedError):
        match_digits(view, digits(*radices))


def test_the_sides_of_a_contract():
    """x moves from dim 0 to dim 1 and y keeps dim 2: of the local digits, x's old place comes and its new one goes."""
    contract = contract_of(*(Layout.parse(t, MESH) for t in ("f32[{x}2, 6, {y}7]", "f32[6, {x}2, {y}7]")))
    assert [(d.dim, d.radix) for d in contract.before] == [(0, 2), (1, 3), (1, 2), (2, 7)]
    assert [(d.dim, d.radix) for d in contract.after] == [(0, 3), (0, 2), (1, 2), (2, 7)]
    assert count_values(contract.nested) == 6 * 6 * 35
    summed = contract_of(*(Layout.parse(t, MESH) for t in ("f32[7] + sum{x}{y}", "f32[7] + sum{x}")))
    assert summed.partial(summed.operand) == [(5, 3), (1, 5)]


def test_numerals_that_do_not_nest_have_no_digits():
    contract = contract_of(*(Layout.parse(t, MESH) for t in ("f32[{x}5]", "f32[{y}3]")))
    with pytest.raises(UndecidedError, match="step 1: the two layouts do not nest"):
        _ = contract.before


def parts() -> StepContract:
    """A gather of dim 0 that runs in two parts of dim 1: 6 as 2 parts of 3."""
    contract = contract_of(*(Layout.parse(t, MESH) for t in ("f32[{x}2, 6]", "f32[6, 6]")))
    two = FormDigit(1, 3, 2, None, None, None), FormDigit(1, 1, 3, None, None, None)
    cut = tuple(d for d in contract.nested if d.dim == 0) + two
    return StepContract("step 1", contract.operand, contract.result, cut, contract.tiles)


def test_a_part_leaves_out_the_digit_that_numbers_parts():
    part = parts().of_part(Cut(1, 1, 2, 3), Cut(1, 1, 2, 3), frozenset({(1, 3)}))
    assert part.tiles == ((2, 3), (6, 3))
    assert [(d.dim, d.low) for d in part.before] == [(0, 1), (1, 1)]


def test_parts_of_other_digits_are_refused():
    with pytest.raises(UndecidedError, match="parts of other digits"):
        parts().of_part(Cut(1, 1, 2, 3), Cut(1, 2, 3, 1), frozenset({(1, 3)}))
    with pytest.raises(UndecidedError, match="do not divide"):
        parts().of_part(Cut(1, 1, 4, 3), Cut(1, 1, 2, 3), frozenset({(1, 3)}))


def view(tile: tuple, padded: tuple, radices: tuple, blocks: tuple) -> TileView:
    """A view whose last digit is of dim 1, and the others of dim 0."""
    return TileView(tile, padded, radices, (*(0,) * (len(radices) - 1), 1), blocks)


def test_a_view_opens_a_tile_to_blocks_and_the_rest():
    tile = (6, 5)
    local = [*digits(2, 3), FormDigit(1, 1, 5, None, None, None)]
    blocks, rest = open_view(view(tile, tile, (2, 3, 5), (2, 0)), local, tile, 2)
    assert [d.radix for d in blocks] == [5, 2] and [d.radix for d in rest] == [3]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (view((5, 6), (5, 6), (2, 3, 5), (0,)), "a view of tiles of shape"),
        (view((6, 5), (6, 10), (2, 3, 10), (0,)), "a view padded to"),
        (view((6, 5), (6, 5), (2, 3, 5), (0, 0)), "block axes are not axes"),
        (view((6, 5), (6, 5), (2, 3, 5), (3,)), "block axes are not axes"),
    ],
)
def test_a_wrong_view_is_refused(wrong: TileView, what: str):
    with pytest.raises(UndecidedError, match=what):
        open_view(wrong, [*digits(2, 3), FormDigit(1, 1, 5, None, None, None)], (6, 5), 2)


def test_reshaping_pairs_equal_strings():
    """Digits of radix 1 do not count; named digits pair only with digits of the same name."""
    one, other = digits(2, 1, 3), digits(2, 3)
    assert [(a.radix, b.radix) for a, b in pair_digits(one, other)] == [(2, 2), (3, 3)]
    with pytest.raises(UndecidedError, match="different strings"):
        pair_digits(digits(2, 3), digits(3, 2))
    with pytest.raises(UndecidedError, match="different strings"):
        pair_digits([one[0]._replace(name="n0")], [other[0]._replace(name="n1")])
