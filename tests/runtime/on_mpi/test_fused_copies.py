"""Fused copies against a copy element by element."""

from __future__ import annotations

import itertools
import random

import pytest

from reshard.runtime.on_mpi.fused_copies import ByteCopy, fused


def listed(copies: list[ByteCopy]) -> list[tuple[int, int]]:
    """(source, target) of every element."""
    return sorted(
        (
            each.source + sum(i * step for i, step in zip(at, each.source_strides, strict=True)),
            each.target + sum(i * step for i, step in zip(at, each.target_strides, strict=True)),
        )
        for each in copies
        for at in itertools.product(*map(range, each.extents))
    )


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(40))
def test_the_same_elements_are_copied(seed: int):
    choose = random.Random(seed)
    shapes = [((2, 3), (24, 8), (64, 8)), ((2,), (8,), (16,)), ((), (), ())]
    copies = [
        ByteCopy(256 * choose.randrange(4), 8 * choose.randrange(6), *choose.choice(shapes))
        for _ in range(choose.randrange(9))
    ]
    made = fused(copies)
    assert listed(made) == listed(copies)
    assert len(made) <= len(copies)


def test_a_grid_of_blocks_is_one_copy():
    copies = [ByteCopy(1000 * a + 100 * b, 80 * a + 8 * b, (4,), (8,), (160,)) for a in range(3) for b in range(2)]
    assert [each.extents for each in fused(copies)] == [(3, 2, 4)]
