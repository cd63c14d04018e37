"""Layouts to test and to measure with: every contiguous one of a mesh, and seeded pairs of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise, permutations

from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis


def divisible_shape(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The smallest shape of which any axes of the mesh, in any dim, cut even tiles."""
    return (mesh.size,) * rank


def contiguous_layouts(mesh: Mesh, shape: tuple[int, ...], dtype: str = "float32") -> Iterator[Layout]:
    """Every layout that holds whole axes in leading digits, once: each axis unused or in one dim,
    in every order within a dim. Axes of size 1 hold nothing, and are left out.
    """
    axes = [SubAxis(name, 1, size) for name, size in mesh.axes.items() if size > 1]
    for used in range(len(axes) + 1):
        for order in permutations(axes, used):
            for split in _splits(order, len(shape)):
                yield Layout.tiled(mesh, shape, dtype, split)


def _splits(order: tuple[SubAxis, ...], parts: int) -> Iterator[list[tuple[SubAxis, ...]]]:
    """The ways to cut a sequence into so many parts, empty ones included."""
    if parts == 0:
        if not order:
            yield []
        return
    for cuts in combinations_with_replacement(range(len(order) + 1), parts - 1):
        bounds = (0, *cuts, len(order))
        yield [order[low:high] for low, high in pairwise(bounds)]


def sample_pairs(mesh: Mesh, rank: int, count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """So many different (source, target) pairs of different contiguous layouts of float32 arrays of
    `divisible_shape`, or all there are if they are fewer; the same ones for the same seed.
    """
    layouts = list(contiguous_layouts(mesh, divisible_shape(mesh, rank)))
    others = len(layouts) - 1
    picked = random.Random(seed).sample(range(len(layouts) * others), min(count, len(layouts) * others))
    # Number `n` is the pair of source n // others and the n % others-th layout that is not the source.
    pairs = ((n // others, n % others) for n in picked)
    return [(layouts[source], layouts[rest + (rest >= source)]) for source, rest in pairs]
