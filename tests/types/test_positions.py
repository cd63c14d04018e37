"""The coordinates of all positions, against taking each position apart."""

from __future__ import annotations

import pytest

from reshard.types.dims import numbers_along


@pytest.mark.parametrize(
    ("positions", "factors"),
    [
        (6, []),
        (6, [(1, 6)]),
        (30, [(5, 3)]),
        (30, [(15, 2), (1, 5), (5, 3)]),
        (24, [(2, 3), (12, 2)]),  # parts of an axis
    ],
)
def test_one_number_of_the_coordinates_along_factors(positions: int, factors: list[tuple[int, int]]):
    expected: list[int] = []
    for position in range(positions):
        number = 0
        for stride, size in factors:
            number = number * size + position // stride % size
        expected.append(number)
    assert numbers_along(positions, factors) == expected
