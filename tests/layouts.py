"""Layouts for tests and benchmarks: every contiguous layout of a mesh, seeded pairs of them, and random digit layouts.

Random layouts take a `random.Random`. Hypothesis can supply one, and then also shrinks the layouts. It is imported
where it is used: hundreds of processes need the layouts without it, the ranks of MPI's tests among them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise, permutations
from math import prod
from typing import TYPE_CHECKING

from reshard.geometry.remesh import one_set
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.reductions import REDUCTIONS, has_reduction

if TYPE_CHECKING:
    from hypothesis import strategies as st

MESHES = (
    Mesh(x=2, y=2),
    Mesh(x=4, y=2),
    Mesh(x=2, y=3),
    Mesh(x=6),
    Mesh(x=8),
    Mesh(x=4, y=3),
    Mesh(x=2, y=2, z=2),
    Mesh(x=5),
    Mesh(x=3, y=1, z=2),
    Mesh(x=12),
    Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4]),
    Mesh({"x": 4, "y": 2}, device_ids=[0, 4, 2, 6, 1, 5, 3, 7]),
    Mesh({"x": 4}, device_ids=[10, 3, 7, 20]),
    Mesh(),
)
"""Small meshes of all kinds: prime, composite and unit axes, a single device, devices in other orders."""

DEVICE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 24)


def divisible_shape(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The smallest shape that any axes of the mesh divide evenly, in any dim."""
    return (mesh.size,) * rank


def contiguous_layouts(mesh: Mesh, shape: tuple[int, ...], dtype: str = "float32") -> Iterator[Layout]:
    """Every layout of contiguous tiles on whole axes, once: each axis is unused or in one dim, in every order.

    Axes of size 1 make no difference and are left out.
    """
    axes = [SubAxis(name, 1, size) for name, size in mesh.axes.items() if size > 1]
    for used in range(len(axes) + 1):
        for order in permutations(axes, used):
            for split in _splits(order, len(shape)):
                yield Layout.tiled(mesh, shape, dtype, split)


def _splits(order: tuple[SubAxis, ...], parts: int) -> Iterator[list[tuple[SubAxis, ...]]]:
    """All ways to cut a sequence into `parts` parts, empty ones included."""
    if parts == 0:
        if not order:
            yield []
        return
    for cuts in combinations_with_replacement(range(len(order) + 1), parts - 1):
        bounds = (0, *cuts, len(order))
        yield [order[low:high] for low, high in pairwise(bounds)]


def sample_pairs(mesh: Mesh, rank: int, count: int, seed: int) -> list[tuple[Layout, Layout]]:
    """`count` different pairs of contiguous layouts of a float32 array of `divisible_shape`, or all if there are fewer.

    The source and the target of a pair differ. The same seed gives the same pairs.
    """
    layouts = list(contiguous_layouts(mesh, divisible_shape(mesh, rank)))
    others = len(layouts) - 1
    picked = random.Random(seed).sample(range(len(layouts) * others), min(count, len(layouts) * others))
    # Pair number n has source n // others, and as target layout n % others of those that are not the source.
    pairs = ((n // others, n % others) for n in picked)
    return [(layouts[source], layouts[rest + (rest >= source)]) for source, rest in pairs]


def random_layout(
    choose: random.Random, mesh: Mesh, shape: Sequence[int], dtype: str = "int32", partial: bool = False
) -> Layout:
    """Any layout of the language.

    The axes are factored into random sub-axes. Some of these hold digits of random dims, in any order among local
    digits (contiguous, strided or block-cyclic, perhaps padded); with `partial`, some are partial.
    """
    axes = _factored(choose, mesh)
    choose.shuffle(axes)
    axes = axes[: choose.randint(0, len(axes))]
    summed = [axes.pop() for _ in range(choose.randint(1, min(2, len(axes))))] if partial and axes else []
    held: list[list[SubAxis]] = [[] for _ in shape]
    for axis in axes if shape else ():
        choose.choice(held).append(axis)
    dims = tuple(
        _random_dim(choose, size, [Digit(a.size, a) for a in on]) for size, on in zip(shape, held, strict=True)
    )
    reduction = choose.choice([r for r in REDUCTIONS if has_reduction(dtype, r)]) if summed else None
    return Layout(mesh, dims, dtype, reduction, tuple(summed))


def _factored(choose: random.Random, mesh: Mesh) -> list[SubAxis]:
    """Every axis as a product of random sub-axes."""
    axes: list[SubAxis] = []
    for name, size in mesh.axes.items():
        pre = 1
        for radix in _factors(choose, size):
            axes.append(SubAxis(name, pre, radix))
            pre *= radix
    return axes


def _factors(choose: random.Random, size: int) -> list[int]:
    factors: list[int] = []
    while size > 1:
        factors.append(choose.choice([k for k in range(2, size + 1) if size % k == 0]))
        size //= factors[-1]
    return factors


def _random_dim(choose: random.Random, size: int, held: list[Digit]) -> Dim:
    """A dim of contiguous pieces, or of such pieces with their ceil(size / pieces) elements cut into digits among the
    held ones, or of blocks of any size dealt in rounds."""
    pieces = prod(d.radix for d in held)
    kind = choose.choice(("contiguous", "strided", "blocks"))
    if kind == "contiguous":
        return Dim((*held, Digit(-(-size // pieces), None)), size)
    digits = list(held)
    tile = -(-size // pieces)
    radices = _factors(choose, tile) or [tile] if kind == "strided" else [choose.randint(1, 3) for _ in range(2)]
    for radix in radices:
        digits.insert(choose.randint(0, len(digits)), Digit(radix, None))
    if kind == "strided":
        return Dim((Digit(1, None), *digits), size)
    while digits and digits[0].axis is None:
        del digits[0]
    return Dim((Digit(-(-size // prod(d.radix for d in digits)), None), *digits), size)


def random_pair(
    choose: random.Random, dtype: str = "int32", partial: bool = False, most_rank: int = 3
) -> tuple[Layout, Layout]:
    """Two random layouts of one array, mostly on one mesh, otherwise on two with the same devices.

    With `partial`, the source is usually partial and the target never.
    """
    mesh = choose.choice(MESHES)
    same = [m for m in MESHES if set(m.devices) == set(mesh.devices)]
    other = mesh if partial or choose.randint(0, 4) else choose.choice(same)
    shape = [choose.choice(SIZES) for _ in range(choose.randint(0, most_rank))]
    return random_layout(choose, mesh, shape, dtype, partial), random_layout(choose, other, shape, dtype)


def layouts(dtype: str = "int32", partial: bool = False) -> st.SearchStrategy[Layout]:
    """Random digit layouts on `MESHES`."""
    from hypothesis import strategies as st

    return st.randoms().map(lambda choose: random_pair(choose, dtype, partial)[0])


def pairs(dtype: str = "int32", partial: bool = False, most_rank: int = 3) -> st.SearchStrategy[tuple[Layout, Layout]]:
    """Random pairs of a source and a target; see `random_pair`."""
    from hypothesis import strategies as st

    return st.randoms().map(lambda choose: random_pair(choose, dtype, partial, most_rank))


def random_crossing(
    choose: random.Random, dtype: str = "int32", partial: bool = False, counts: Sequence[int] = DEVICE_COUNTS
) -> tuple[Layout, Layout]:
    """Two random layouts of one array on two sets of devices, which may overlap; either may be partial."""
    source, target = _random_mesh(choose, counts), _random_mesh(choose, counts)
    while one_set(source, target):
        target = _random_mesh(choose, counts)
    shape = [choose.choice(SIZES) for _ in range(choose.randint(0, 3))]
    summed = partial and choose.random() < 0.5
    started = partial and choose.random() < 0.3
    return random_layout(choose, source, shape, dtype, summed), random_layout(choose, target, shape, dtype, started)


def _random_mesh(choose: random.Random, counts: Sequence[int]) -> Mesh:
    """Devices on up to 5 axes, numbered from 0 or from elsewhere, in order or not."""
    size = choose.choice(counts)
    factors = _factors(choose, size)
    first, spare = choose.choice([0, 0, 4, 20]), choose.choice([0, 0, 3])
    ids = list(range(first, first + size + spare))
    picked = choose.sample(ids, size) if choose.random() < 0.4 else ids[:size]
    return Mesh(zip("vwxyz", factors, strict=False), device_ids=picked)
