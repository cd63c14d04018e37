"""A step in a loop over parts: cutting and filling tiles, against numpy."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reshard.lower.program import InParts, Permute, Plain
from reshard.lower.to_shard_map import parts
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.plans.rules.parts import Cut

PLACE = MeshPlace((0,), {})
CUTS = [
    ((6, 5), Cut(0, 1, 3, 2)),  # rows in one run
    ((6, 5), Cut(0, 3, 2, 1)),  # every second row
    ((3, 12, 2), Cut(1, 2, 3, 2)),
    ((2, 7), Cut(1, 1, 7, 1)),
]


def part_of(tile: np.ndarray, cut: Cut, number: int) -> np.ndarray:
    """Part `number`: the indices of the cut axis whose middle digit is `number`."""
    indices = [i for i in range(tile.shape[cut.axis]) if i // cut.inner % cut.parts == number]
    return tile.take(indices, cut.axis)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.parametrize(("shape", "cut"), CUTS)
def test_a_part_is_one_value_of_the_middle_digit(shape: tuple[int, ...], cut: Cut):
    tile = numbered(shape)
    for number in range(cut.parts):
        part = parts._part(cut, jnp.asarray(tile), jnp.asarray(number))
        assert np.array_equal(part, part_of(tile, cut, number))


@pytest.mark.parametrize(("shape", "cut"), CUTS)
def test_parts_fill_the_tile_again(shape: tuple[int, ...], cut: Cut):
    tile = numbered(shape)
    filled = jnp.zeros(shape, int)
    for number in reversed(range(cut.parts)):
        filled = parts._with_part(cut, filled, jnp.asarray(part_of(tile, cut, number)), jnp.asarray(number))
    assert np.array_equal(filled, tile)


def in_parts(take: Cut, put: Cut) -> InParts:
    return InParts(Permute(()), take, put)


@pytest.mark.parametrize("order", [None, (0, 2, 1), (2, 0, 1)])
def test_each_part_goes_where_it_belongs(order: tuple[int, ...] | None):
    """The step doubles rows: part c of the operand, of 4 rows, becomes part c of a result with 8."""
    tile, take, put = numbered((12, 2, 3)), Cut(0, 2, 3, 2), Cut(0, 4, 3, 2)

    def run(step: Plain, place: MeshPlace, part: jax.Array, shape: Sequence[int]) -> jax.Array:
        return jnp.concatenate([part, -part])

    loop = parts.PartLoop([in_parts(take, put)], [(24, 2, 3)], PLACE, run)
    looped = loop.by_parts(jnp.asarray(tile), order)
    for number in range(3):
        part = part_of(tile, take, number)
        assert np.array_equal(part_of(np.asarray(looped), put, number), np.concatenate([part, -part]))


def test_each_step_of_a_loop_gets_the_shape_of_its_part():
    shapes: list[tuple[int, ...]] = []

    def run(step: Plain, place: MeshPlace, part: jax.Array, shape: Sequence[int]) -> jax.Array:
        shapes.append(tuple(shape))
        return jnp.zeros(shape)

    steps = [in_parts(Cut(1, 1, 2, 3), Cut(1, 1, 2, 6)), in_parts(Cut(1, 1, 2, 6), Cut(1, 2, 2, 2))]
    loop = parts.PartLoop(steps, [(2, 12), (2, 8)], PLACE, run)
    assert loop.on(jnp.zeros((2, 6))).shape == (2, 8)
    assert shapes == [(2, 6), (2, 4)]
