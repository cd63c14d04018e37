"""Fused copies against a copy element by element."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from reshard.runtime.on_mpi.fused_copies import ByteCopy, fused, strides_like


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


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 1, 12), (6, 4)])
def test_what_a_copy_reads_lies_like_the_result(shape: tuple[int, ...]):
    """Three axes of 2, 3 and 4 in every order: the strides, if there are any, say what the copy does."""
    memory, told = np.arange(24, dtype="u4"), 0
    for order in itertools.permutations(range(3)):
        source = memory.reshape([(2, 3, 4)[at] for at in order]).transpose(np.argsort(order))
        target = np.zeros((2, 3, 4), "u4")
        strides = strides_like(ByteCopy(0, 0, (2, 3, 4), source.strides, target.strides), shape, 4)
        target[...] = source
        if strides is not None:
            told += 1
            assert np.array_equal(np.ndarray(shape, "u4", memory, 0, strides), target.reshape(shape))
    assert told or shape == (4, 6)  # Cut within the axis of 4.
