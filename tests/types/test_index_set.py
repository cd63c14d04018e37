"""Sets of indices: every form that is taken is the mask that numpy makes of it, and equal sets are equal objects."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.fuzz_moves import random_changes
from reshard.errors import PlanError
from reshard.types.index_set import IndexSet
from tests.sampling import for_each


def as_mask(given: IndexSet) -> np.ndarray:
    """The elements one by one; each must be in one box only."""
    mask = np.zeros(given.shape, int)
    for box in given.boxes:
        mask[tuple(slice(*run) for run in box)] += 1
    assert mask.max(initial=0) <= 1
    return mask.astype(bool)


@for_each(range(150))
def test_what_changed_is_what_numpy_says(seed: int):
    choose = random.Random(seed)
    shape = tuple(choose.choice((0, 1, 2, 3, 5, 8)) for _ in range(choose.randint(0, 3)))
    changed, mask = random_changes(choose, shape)
    made = IndexSet.read(changed, shape)
    assert np.array_equal(as_mask(made), mask)
    assert made.elements == mask.sum() and bool(made) == mask.any()
    # In whatever form it is given, it is the same object, and so it is element by element.
    one_by_one = [tuple(map(int, index)) for index in np.argwhere(mask)]
    choose.shuffle(one_by_one)
    same = [IndexSet.read(mask, shape), IndexSet.read(one_by_one, shape), IndexSet.from_json(made.to_json())]
    assert [(hash(other), other) for other in same] == [(hash(made), made)] * 3


def test_rows_of_a_mask_that_are_alike_are_one_product():
    mask = np.zeros((1000, 8), bool)
    mask[::2, 3] = mask[::3, 3] = True
    assert len(IndexSet.read(mask, mask.shape).products) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ((slice(0, 2), 3), "give a list of boxes"),
        ("rows", "give a list of boxes"),
        ({2: 3}, "give a list of boxes"),
        (7, "give a list of boxes"),
        ([8], "no index of a dim of 8"),
        ([-9], "no index of a dim of 8"),
        ([True], "no index of a dim of 8"),
        ([(0, 0, 0)], "has 3 dims"),
        ([slice(0, 4, -1)], "a step of at least 1"),
        ([slice(0, 4, 0)], "a step of at least 1"),
        ([slice(0.5, 4)], "whole numbers"),
        (np.ones((8, 5), bool), r"has the shape \(8, 5\)"),
        (np.ones((8, 6, 1), bool), r"has the shape \(8, 6, 1\)"),
        (IndexSet.read([1], (6, 8)), r"is of an array \(6, 8\)"),
    ],
)
def test_what_is_no_set_of_elements_is_refused(changed: Any, message: str):
    with pytest.raises(PlanError, match=message):
        IndexSet.read(changed, (8, 6))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"shape": [8]}',
        '{"shape": [8], "products": [[]]}',
        '{"shape": [8], "products": [[[1]]]}',
        '{"shape": [8], "products": [[[7, 2]]]}',
        '{"shape": [8], "products": [[[-1, 2]]]}',
        '{"shape": [8], "products": [[true]]}',
        '{"shape": [true], "products": []}',
    ],
)
def test_json_that_is_no_set_is_refused(text: str):
    with pytest.raises(PlanError):
        IndexSet.from_json(text)
