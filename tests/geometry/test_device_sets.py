"""Which devices two meshes have in common."""

from __future__ import annotations

import pytest

from reshard.geometry.remesh import disjoint, one_set
from reshard.types.mesh import Mesh

EIGHT = Mesh(x=8)


@pytest.mark.parametrize(
    ("other", "same", "apart"),
    [
        (Mesh(x=4, y=2), True, False),
        (Mesh({"x": 8}, device_ids=[7, 6, 5, 4, 3, 2, 1, 0]), True, False),
        (Mesh(x=4), False, False),
        (Mesh({"x": 8}, device_ids=range(7, 15)), False, False),
        (Mesh({"x": 8}, device_ids=range(8, 16)), False, True),
    ],
    ids=["other axes", "other order", "subset", "overlapping", "disjoint"],
)
def test_device_sets(other: Mesh, same: bool, apart: bool):
    assert one_set(EIGHT, other) == one_set(other, EIGHT) == same
    assert disjoint(EIGHT, other) == disjoint(other, EIGHT) == apart
