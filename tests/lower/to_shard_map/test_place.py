"""A device's place on the mesh, the digits of its tile, and how that lies in a TPU's memory."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from reshard.lower.to_shard_map import place
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tile_memory import (
    choose_memory_order,
    count_padded_elements,
    join_blocks,
    number_blocks,
    resize_tile,
    write_box,
)
from reshard.plans.rules.tile_view import TileView


def test_groups_along_whole_axes_are_named():
    """XLA then keeps the axes, instead of lists."""
    place = MeshPlace(range(8), {"x": 4, "y": 2})
    assert place.group(((0, 2, 4, 6), (1, 3, 5, 7))) == {"axis_name": ("x",)}
    assert place.group(((0, 1), (2, 3), (4, 5), (6, 7))) == {"axis_name": ("y",)}
    assert place.group((tuple(range(8)),)) == {"axis_name": ("x", "y")}
    assert place.group(((0, 2, 4, 6, 1, 3, 5, 7),)) == {"axis_name": ("y", "x")}


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 4), (1, 5), (2, 6), (3, 7)),  # the major half of x
        ((0, 2), (1, 3), (4, 6), (5, 7)),  # the minor half
        ((0, 4, 1, 5), (2, 6, 3, 7)),
        ((0, 2, 4, 6), (1, 3, 7, 5)),  # one group in another order
    ],
)
def test_groups_of_parts_of_axes_are_listed(groups: tuple[tuple[int, ...], ...]):
    place = MeshPlace(range(8), {"x": 4, "y": 2})
    assert place.group(groups) == {"axis_name": ("x", "y"), "axis_index_groups": groups}


def test_axes_of_one_device_are_left_out():
    place = MeshPlace(range(4), {"x": 4, "one": 1})
    assert place.group(((0, 1, 2, 3),)) == {"axis_name": ("x",)}


def on_each_device(entry) -> list[int]:
    """What a function of the place returns on each of eight devices, by position."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def tile() -> jax.Array:
        return jnp.asarray(entry(MeshPlace(range(8), {"x": 4, "y": 2}))).reshape(1)

    mapped = jax.shard_map(tile, mesh=mesh, in_specs=(), out_specs=P(("x", "y")), check_vma=False)
    return np.asarray(jax.jit(mapped)()).tolist()


def test_tables_are_looked_up_by_position():
    assert on_each_device(lambda place: place.here) == list(range(8))
    for entries in ([3, 1, 4, 1, 5, 9, 2, 6], [0, 900, 0, 900, 7, 907, 7, 907], [5, -700, 123456789, -9, 0, 0, 1, -1]):
        assert on_each_device(lambda place, entries=entries: place.look_up(entries)) == entries
    turns = [[0] * 8, list(range(10, 18))]
    assert on_each_device(lambda place: place.look_up(np.array(turns), jnp.asarray(1))) == turns[1]
    assert on_each_device(lambda place: place.by_device({d: 7 - d for d in range(8)})) == list(range(7, -1, -1))
    assert on_each_device(lambda place: place.flag([2, 5]).astype(int)) == [0, 0, 1, 0, 0, 1, 0, 0]
    assert on_each_device(lambda place: place.anew().here) == list(range(8))
    # A table of equal entries is a constant, outside of any `shard_map`: the position is not needed.
    assert int(MeshPlace(range(8), {"x": 8}).look_up([4] * 8)) == 4


@pytest.mark.parametrize("sizes", [(8,), (4, 2), (2, 2, 2), (6, 4), (16, 16)])
@pytest.mark.parametrize(
    ("entry", "spelled"),
    [
        (lambda p: 3 - 5 * p, True),
        (lambda p: (p + 1) % 2 * 96, True),
        (lambda p: p // 2 % 2 * 7 - p % 2 * 40, True),  # two digits, one of them downwards
        (lambda p: (1 << 30) * (p % 2), True),
        (lambda p: p * p * 65521 % 4099, False),  # more than 32 bits, and no sum
    ],
)
def test_tables_are_computed_by_digits_of_the_position(sizes: tuple[int, ...], entry, spelled: bool):
    """As a device computes them: a TPU takes 2,123 cycles for an entry that is read."""
    table = np.array([entry(p) for p in range(math.prod(sizes))])
    terms = place.spell_table(table, sizes)
    assert (terms is not None) == spelled
    for position in range(len(table) if terms else 0):
        found = terms[0]
        for (stride, radix), unit, bits, packed in terms[1]:
            value = position // stride % radix
            found += unit * (value if packed is None else packed >> bits * value & (1 << bits) - 1)
        assert found == table[position]


@pytest.mark.parametrize(
    ("entry", "digits"),
    [
        (lambda p: p, ((1, 24),)),
        (lambda p: p // 4, ((4, 6),)),
        (lambda p: p % 4, ((1, 4),)),
        (lambda p: p // 4 % 3 * 10, ((4, 3),)),
        (lambda p: p // 12 * 7 + p % 2, ((12, 2), (1, 2))),  # part of an axis
        (lambda p: p // 2 % 6, ((2, 6),)),  # across an axis's end
        (lambda p: 5, ()),
    ],
)
@pytest.mark.parametrize("turns", [1, 3])
def test_tables_are_cut_to_the_digits_that_they_depend_on(entry, digits: tuple, turns: int):
    """On axes of 2, 3 and 4."""
    table = np.array([[(turn + 1) * entry(p) for p in range(24)] for turn in range(turns)])
    small, kept = place.narrow_table(table, (2, 3, 4))
    assert kept == digits and small.shape == (turns, math.prod(radix for _, radix in digits))
    for position in range(24):
        at = 0
        for stride, radix in kept:
            at = at * radix + position // stride % radix
        assert small[:, at].tolist() == table[:, position].tolist()


def test_large_tables_are_looked_up_by_digits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(place, "LARGE", 1)
    for entry in (lambda p: p // 2 % 2, lambda p: p // 4 * 9 + p % 2):
        table = np.array([[entry(p) for p in range(8)], [3] * 8])
        assert on_each_device(lambda here, table=table: here.look_up(table[0])) == table[0].tolist()
        for turn in (0, 1):
            turned = on_each_device(lambda here, table=table, turn=turn: here.look_up(table, jnp.asarray(turn)))
            assert turned == on_each_device(lambda here, table=table, turn=turn: here.look_up(table, turn))
            assert turned == table[turn].tolist()


def test_a_permute_takes_the_pairs_of_its_turn():
    """Two lists of pairs for three turns."""
    pairs = [[(0, 1), (1, 0)], [(2, 3)], [(0, 1), (1, 0)]]
    for turn, expected in enumerate([[11, 10, 0, 0], [0, 0, 0, 12], [11, 10, 0, 0]]):
        for given in (turn, jnp.asarray(turn)):
            moved = on_each_device(lambda here, at=given: here.permute_in_turn(here.here + 10, pairs, at))
            assert moved == [*expected, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("entries", "dtype", "unit"),
    [
        ([0, 512, 130560], "uint8", 512),
        ([0, 1, 256], "uint16", 1),
        ([-6, 3], "int16", 3),
        ([0, 0], "uint8", 1),
        ([7, 70001], "int32", 1),
        ([2**31 - 1, 2], "int32", 1),
        ([-(2**31), 2**31 - 1], "int32", 1),
    ],
)
def test_tables_in_narrow_integers(entries: list[int], dtype: str, unit: int):
    units, of = place.divide_table(np.array(entries, np.int32))
    assert (units.dtype, of) == (dtype, unit)
    assert (units.astype(np.int32) * np.int32(of)).tolist() == entries


# ---- digits of tiles --------------------------------------------------------------------------------

VIEWS = [
    TileView((6, 5), (6, 5), (2, 3, 5), (0, 0, 1), (0,)),  # blocks lie one after another
    TileView((6, 5), (6, 5), (2, 3, 5), (0, 0, 1), (1,)),
    TileView((6, 10), (6, 10), (2, 3, 5, 2), (0, 0, 1, 1), (3, 0)),  # numbered minor dim first
    TileView((5, 7), (6, 8), (2, 3, 8), (0, 0, 1), (0,)),  # padded
]


def tile_of(view: TileView) -> np.ndarray:
    return np.arange(1, np.prod(view.tile) + 1).reshape(view.tile)


def numbered_blocks(view: TileView) -> np.ndarray:
    """Element by element: the block's number from its digits, and its place from the others."""
    padded = np.zeros(view.padded, int)
    padded[tuple(slice(extent) for extent in view.tile)] = tile_of(view)
    digits = padded.reshape(view.digits)
    blocks = np.zeros((view.count, *view.block_shape), int)
    rest = [axis for axis in range(digits.ndim) if axis not in view.blocks]
    for index in itertools.product(*map(range, view.digits)):
        number = 0
        for axis in view.blocks:
            number = number * view.digits[axis] + index[axis]
        blocks[(number, *(index[axis] for axis in rest))] = digits[index]
    return blocks


@pytest.mark.parametrize("view", VIEWS)
def test_blocks_are_numbered_and_make_up_the_tile(view: TileView):
    assert np.array_equal(number_blocks(view, jnp.asarray(tile_of(view))), numbered_blocks(view))
    assert np.array_equal(join_blocks(view, jnp.asarray(numbered_blocks(view))), tile_of(view))


def test_resizing_pads_with_zeros_and_cuts_the_high_end():
    tile = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    assert resize_tile(tile, (3, 2)).tolist() == [[1, 2], [4, 5], [0, 0]]
    assert resize_tile(tile, (2, 3)) is tile


def test_content_is_written_on_devices_that_get_it():
    filled, content = jnp.zeros((3, 4), int), jnp.ones((2, 2), int)
    starts = [jnp.asarray(1), jnp.asarray(2)]
    there = np.zeros((3, 4), int)
    there[1:, 2:] = 1
    assert np.array_equal(write_box(filled, content, starts, None), there)
    assert np.array_equal(write_box(filled, content, starts, jnp.asarray(True)), there)
    assert not write_box(filled, content, starts, jnp.asarray(False)).any()
    assert np.array_equal(write_box(filled, jnp.ones((3, 4), int), [jnp.asarray(0)] * 2, None), np.ones((3, 4)))


# ---- a TPU's memory, as libtpu 0.0.51 chose it for the arguments of programs on v5p -------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "elements"),
    [
        ((8, 128), "bfloat16", (0, 1), 8 * 128),
        ((128, 8), "bfloat16", (1, 0), 8 * 128),  # full lanes in dim 0: it becomes the minor one
        ((512, 512, 64), "bfloat16", (0, 2, 1), 512 * 512 * 64),
        ((4096, 4096, 12), "bfloat16", (2, 0, 1), 4096 * 4096 * 12),  # not 12 rows of 16
        ((64, 128, 32, 32), "bfloat16", (0, 2, 3, 1), 64 * 128 * 32 * 32),
        ((64, 64, 32, 64), "bfloat16", (0, 1, 2, 3), 64 * 64 * 32 * 128),  # whichever is minor, it has 64 lanes
        ((4096, 4, 4096), "int8", (0, 1, 2), 4 * 4096**2),  # four rows are a tile of their own
        ((4096, 1, 4096), "float32", (0, 1, 2), 4096**2),  # one is, too, but of elements of 32 bits only
        ((4096, 1, 4096), "bfloat16", (1, 0, 2), 4096**2),
        ((4096, 2, 4096), "int8", (1, 0, 2), 2 * 4096**2),
        ((256, 2, 3, 5), "bfloat16", (2, 3, 1, 0), 256 * 2 * 3 * 5),
        ((256, 2, 3, 5), "int8", (1, 3, 2, 0), 256 * 2 * 4 * 5),
        ((3, 5, 7), "float32", (1, 0, 2), 5 * 4 * 128),
        ((20, 1000), "bfloat16", (0, 1), 24 * 1024),
        ((1, 1024), "int8", (0, 1), 4 * 1024),
        ((7,), "float32", (0,), 7),
        ((0, 5), "float32", (0, 1), 0),
    ],
)
def test_the_order_of_least_padding(shape: tuple[int, ...], dtype: str, order: tuple[int, ...], elements: int):
    assert choose_memory_order(shape, dtype) == order
    assert count_padded_elements([shape[dim] for dim in order], dtype) == elements
