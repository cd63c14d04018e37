"""How views group the digits of tiles, and lists of devices: compared with coordinates and with meaning."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.errors import UndecidedError
from reshard.lower.groups import groups_along
from reshard.plans.rules.split_steps import Cut
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.contract import (
    StepContract,
    check_blocks,
    check_groups,
    count_values,
    find_positions,
    held_factors,
    match_digits,
    offset_of_held,
    open_view,
    pair_digits,
    read_rows,
)
from reshard.proofs.symbolic.form import FormDigit
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import MESHES, random_layout
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


# ---- lists of devices


LISTED = Mesh({"x": 3, "y": 2}, device_ids=[5, 3, 1, 0, 2, 4])


def test_positions_are_where_the_mesh_lists_the_devices():
    ids = np.array([4, 0, 5, 5])
    assert find_positions(LISTED, ids).tolist() == [LISTED.position(d) for d in ids.tolist()] == [5, 3, 0, 0]
    for unknown in (6, -1):
        with pytest.raises(UndecidedError, match="unknown devices"):
            find_positions(LISTED, np.array([unknown]))


def test_rows_of_one_length_become_an_array():
    assert read_rows([(1, 2), (3, 4)], 2, "pairs").tolist() == [[1, 2], [3, 4]]
    assert read_rows([], 3, "pairs").shape == (0, 3)
    for rows in ([(1,), (2, 3)], [("a", "b")], [(1, 2, 3)], [1, 2]):
        with pytest.raises(UndecidedError, match="pairs"):
            read_rows(rows, 2, "pairs")


def test_held_offsets_are_the_first_elements():
    """What the held digits add is the global index of local index 0."""
    choose = random.Random(0)
    for _ in range(60):
        mesh = choose.choice(MESHES)
        layout = random_layout(choose, mesh, (choose.randint(1, 24),))
        offsets = offset_of_held(layout.dims[0], layout, np.arange(mesh.size))
        assert offsets.tolist() == [meaning(layout, d)[0][0] for d in mesh.devices]


def test_factors_of_held_digits():
    held = FormDigit(0, 1, 3, 2, 6, None)
    assert (held_factors([held], "src"), held_factors([held], "dst")) == ([(2, 3)], [(6, 3)])
    with pytest.raises(UndecidedError, match="held by no device"):
        held_factors([held, FormDigit(0, 3, 5, None, 6, None)], "src")


@pytest.mark.parametrize("along", [[(2, 3)], [(1, 2)], [(2, 3), (1, 2)], [(1, 2), (2, 3)], []])
def test_groups_are_the_devices_that_differ_along_the_factors(along: list[tuple[int, int]]):
    groups = groups_along(LISTED, along)
    check_groups(LISTED, groups[::-1], along, ordered=True)
    other = [(2, 3)] if along != [(2, 3)] else [(1, 2)]
    with pytest.raises(UndecidedError):
        check_groups(LISTED, groups, other, ordered=True)


def test_groups_by_hand():
    """Positions 0 to 5 are devices 5, 3, 1, 0, 2, 4; those of x are 2 apart."""
    groups = [(5, 1, 2), (3, 0, 4)]
    check_groups(LISTED, groups, [(2, 3)], ordered=True)
    check_groups(LISTED, [(1, 5, 2), (4, 3, 0)], [(2, 3)], ordered=False)
    for wrong in (
        [(1, 5, 2), (3, 0, 4)],  # another order
        [(5, 1, 2)],  # a group is missing
        [(5, 1, 2), (5, 1, 2)],  # a group twice
        [(5, 0, 2), (3, 1, 4)],  # two groups traded a member
    ):
        with pytest.raises(UndecidedError):
            check_groups(LISTED, wrong, [(2, 3)], ordered=True)


def test_blocks_are_numbered_by_coordinates():
    blocks = {5: 0, 3: 0, 1: 1, 0: 1, 2: 2, 4: 2}
    check_blocks(LISTED, blocks, [(2, 3)])
    for wrong in ({**blocks, 4: 1}, {d: b for d, b in blocks.items() if d != 4}):
        with pytest.raises(UndecidedError):
            check_blocks(LISTED, wrong, [(2, 3)])
    check_blocks(LISTED, {d: x * 2 + y for (d, x), y in zip(blocks.items(), [0, 1] * 3, strict=True)}, [(2, 3), (1, 2)])
