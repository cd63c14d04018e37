"""The stops of a hand that transposes slots where they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.lower.program import transposing_stops


def carried(slots: np.ndarray, stops: Sequence[int]) -> np.ndarray:
    """The slots after a hand that puts down what it has and takes up what is there, stop by stop."""
    slots, hand = slots.copy(), -1
    for at in stops:
        hand, slots[at] = slots[at], hand
    return slots


def test_every_small_matrix_is_transposed():
    for rows in range(1, 10):
        for columns in range(1, 10):
            matrix = np.arange(rows * columns)
            moved = carried(matrix, transposing_stops(rows, columns))
            assert np.array_equal(moved, matrix.reshape(rows, columns).T.reshape(-1)), (rows, columns)


def test_what_lies_right_is_not_touched():
    for rows, columns in ((1, 7), (7, 1)):
        assert not transposing_stops(rows, columns)
    assert 0 not in transposing_stops(4, 6) and 23 not in transposing_stops(4, 6)
    assert len(transposing_stops(8, 8)) == 28 * 3  # pairs that change places, each with a stop to come back to
