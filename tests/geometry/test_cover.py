"""Parts of one target: whether two meet, and the first index that none fills, against numpy's masks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.errors import PlanError
from reshard.geometry.cover import find_overlap, find_uncovered
from reshard.types.view import Atom, View, Window


def random_factors(choose: random.Random, size: int) -> list[int]:
    """Factors of a size, in some order."""
    factors: list[int] = []
    while size > 1:
        factors.append(choose.choice([each for each in range(2, size + 1) if size % each == 0]))
        size //= factors[-1]
    choose.shuffle(factors)
    return factors


def random_part(choose: random.Random, shape: tuple[int, ...]) -> tuple[View, np.ndarray]:
    """A view that fills part of a target, and a mask of what it fills."""
    atoms: list[Atom] = []
    groups: list[tuple[int, ...]] = []
    mask = np.ones((), bool)
    for size in shape:
        factors, along = random_factors(choose, size), np.ones(1, bool)
        groups.append(tuple(range(len(atoms), len(atoms) + len(factors))))
        for factor in factors:
            count = choose.randint(1, factor) if choose.random() < 0.6 else factor
            start = choose.randint(0, factor - count)
            window = Window(start, factor) if count < factor or choose.random() < 0.2 else None
            atoms.append(Atom(f"a{len(atoms)}", count, into=window))
            along = np.outer(along, (np.arange(factor) >= start) & (np.arange(factor) < start + count)).reshape(-1)
        mask = np.multiply.outer(mask, along)
    return View(tuple(atoms), tuple((at,) for at in range(len(atoms))), tuple(groups)), mask


def test_parts_meet_where_their_masks_do() -> None:
    choose, uncovered = random.Random(5), 0
    for _ in range(3000):
        shape = tuple(choose.choice([1, 5, 6, 8, 12, 24, 30]) for _ in range(choose.randint(0, 3)))
        parts = [random_part(choose, shape) for _ in range(choose.randint(1, 4))]
        views, masks = tuple(view for view, _ in parts), [mask for _, mask in parts]
        total = sum(mask.astype(int) for mask in masks)
        found = find_overlap(views)
        assert (found is not None) == bool((total > 1).any()), (shape, views)
        if found is not None:
            one, other, index = found
            assert masks[one][index] and masks[other][index]
            continue
        first = None if total.all() else tuple(int(at) for at in np.unravel_index(int(np.argmin(total)), shape))
        assert find_uncovered(views) == first, (shape, views)
        uncovered += first is not None
    assert uncovered > 300


def test_parts_that_meet_in_the_middle_of_a_range_only() -> None:
    thirds = View((Atom("n", 3), Atom("d", 1, into=Window(2, 6))), ((0,),), ((0, 1),))  # 2, 8 and 14 of 18.
    between = View((Atom("n", 11, into=Window(3, 18)),), ((0,),), ((0,),))
    assert find_overlap((thirds, between)) == (0, 1, (8,))


@pytest.mark.parametrize("inner", [False, True])
def test_large_stacks_are_compared_at_once(inner: bool) -> None:
    atoms = [(Atom("e", 1, into=Window(at, 256)), Atom("i", 10000), Atom("o", 10000)) for at in range(256)]
    target = ((1,), (2, 0)) if inner else ((0,), (1,), (2,))
    views = tuple(View(each, ((1,), (2,)), target) for each in atoms)
    assert find_overlap(views) is None and find_uncovered(views) is None
    assert find_uncovered(views[:-1]) == ((0, 255) if inner else (255, 0, 0))
    assert find_overlap((*views, views[7])) == (7, 256, (0, 7) if inner else (7, 0, 0))


def test_what_would_take_too_long_is_refused() -> None:
    def stripes(size: int, start: int) -> View:
        """One of each `size` of 60 million indices."""
        atoms = (Atom("n", 60 * 10**6 // size), Atom("d", 1, into=Window(start, size)))
        return View(atoms, ((0,),), ((0, 1),))

    assert find_overlap((stripes(3, 0), stripes(5, 1))) == (0, 1, (6,))
    assert find_overlap((stripes(4, 0), stripes(8, 5))) is None
    # These never meet, which the digits 4 and 6 do not show.
    with pytest.raises(PlanError, match="digits that do not nest"):
        find_overlap((stripes(4, 0), stripes(6, 1)))
