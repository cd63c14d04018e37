"""Lists of devices: compared with what coordinates say, and with the layouts' meaning."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.errors import UndecidedError
from reshard.lower.groups import groups_along
from reshard.proofs.symbolic.contract import (
    check_blocks,
    check_groups,
    find_positions,
    held_factors,
    offset_of_held,
    read_rows,
    require,
)
from reshard.proofs.symbolic.form import FormDigit
from reshard.types import Mesh
from reshard.types.meaning import meaning
from tests.layouts import MESHES, random_layout

MESH = Mesh({"x": 3, "y": 2}, device_ids=[5, 3, 1, 0, 2, 4])


def test_positions_are_where_the_mesh_lists_the_devices():
    ids = np.array([4, 0, 5, 5])
    assert find_positions(MESH, ids).tolist() == [MESH.position(d) for d in ids.tolist()] == [5, 3, 0, 0]
    for unknown in (6, -1):
        with pytest.raises(UndecidedError, match="unknown devices"):
            find_positions(MESH, np.array([unknown]))


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


FACTORS = [[(2, 3)], [(1, 2)], [(2, 3), (1, 2)], [(1, 2), (2, 3)], []]


@pytest.mark.parametrize("along", FACTORS)
def test_groups_are_the_devices_that_differ_along_the_factors(along: list[tuple[int, int]]):
    groups = groups_along(MESH, along)
    check_groups(MESH, groups, along, ordered=True)
    check_groups(MESH, groups[::-1], along, ordered=True)
    for other in FACTORS:
        if groups_along(MESH, other) != groups:
            with pytest.raises(UndecidedError):
                check_groups(MESH, groups, other, ordered=True)


def test_groups_by_hand():
    """Positions 0 to 5 are devices 5, 3, 1, 0, 2, 4; those of x are 2 apart."""
    groups = [(5, 1, 2), (3, 0, 4)]
    check_groups(MESH, groups, [(2, 3)], ordered=True)
    check_groups(MESH, [(1, 5, 2), (4, 3, 0)], [(2, 3)], ordered=False)
    for wrong in (
        [(1, 5, 2), (3, 0, 4)],  # another order
        [(5, 1, 2)],  # a group is missing
        [(5, 1, 2), (5, 1, 2)],  # a group twice
        [(5, 0, 2), (3, 1, 4)],  # two groups traded a member
    ):
        with pytest.raises(UndecidedError):
            check_groups(MESH, wrong, [(2, 3)], ordered=True)


def test_blocks_are_numbered_by_coordinates():
    blocks = {5: 0, 3: 0, 1: 1, 0: 1, 2: 2, 4: 2}
    check_blocks(MESH, blocks, [(2, 3)])
    for wrong in ({**blocks, 4: 1}, {d: b for d, b in blocks.items() if d != 4}):
        with pytest.raises(UndecidedError):
            check_blocks(MESH, wrong, [(2, 3)])
    check_blocks(MESH, {d: x * 2 + y for (d, x), y in zip(blocks.items(), [0, 1] * 3, strict=True)}, [(2, 3), (1, 2)])


def test_a_condition_that_does_not_hold_stops_the_proof():
    require(True, "fine")
    with pytest.raises(UndecidedError, match="not fine"):
        require(np.bool_(False), "not fine")
