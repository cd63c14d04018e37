"""The shipped oracle against the oracle of the tests, which shares no code with it, and against figures by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from reshard.runtime import oracle
from reshard.runtime.oracle import combine, combine_summands, cut_tiles, first_mismatch, summand, summands
from reshard.types import Layout, Mesh
from tests.layouts import layouts
from tests.oracle import PADDING, finished, tiles_of


def indices(layout: Layout) -> np.ndarray:
    return np.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape)


def cut(layout: Layout, arrays) -> dict[int, np.ndarray]:
    dtype = next(iter(arrays.values())).dtype
    return cut_tiles(layout, arrays, lambda: np.full(layout.tile_shape, PADDING, dtype))


@settings(max_examples=80)
@given(layouts())
def test_tiles_are_those_of_the_other_oracle(layout: Layout):
    """Strided, block-cyclic and padded layouts, scalars, empty arrays, and devices in any order."""
    tiles = cut(layout, {(): indices(layout)})
    wanted = tiles_of(layout)
    assert set(tiles) == set(wanted)
    for device, tile in tiles.items():
        assert np.array_equal(tile, wanted[device])
        assert first_mismatch(layout, device, tile, {(): indices(layout)}, np.equal) is None


@settings(max_examples=100)
@given(layouts("float64", partial=True))
def test_summands_combine_to_what_the_other_oracle_combines(layout: Layout):
    """A partial array of random summands, combined globally here and tile by tile there."""
    rng = np.random.default_rng(0)
    arrays = {at: rng.integers(1, 4, layout.shape).astype(float) for at in summands(layout)}
    target = Layout(layout.mesh, layout.dims, layout.dtype)
    wanted = cut(target, combine_summands(layout, target, arrays))
    for device, tile in finished(layout, cut(layout, arrays)).items():
        real = tiles_of(layout)[device] != PADDING
        assert np.allclose(tile[real], wanted[device][real], rtol=1e-12)


def test_padding_is_left_as_it_is_made():
    layout = Layout.parse("int64[{x}3/7, 2]", Mesh(x=3))
    tiles = cut_tiles(layout, {(): indices(layout)}, lambda: np.full((3, 2), 99))
    assert tiles[2].tolist() == [[12, 13], [99, 99], [99, 99]]


def test_which_summand_a_device_holds():
    mesh = Mesh({"x": 2, "y": 3}, device_ids=[5, 3, 1, 0, 2, 4])
    layout = Layout.parse("f32[4] + sum{y}", mesh)
    assert {device: summand(layout, device) for device in mesh.devices} == {
        5: (0,), 3: (1,), 1: (2,), 0: (0,), 2: (1,), 4: (2,)
    }  # fmt: skip
    assert summands(layout) == [(0,), (1,), (2,)]
    assert summands(Layout.parse("f32[4] + sum{x}{y}", mesh)) == [(a, b) for a in range(2) for b in range(3)]
    assert summands(Layout.parse("f32[4]", mesh)) == [()]


def test_a_target_that_stays_partial_combines_in_part():
    mesh = Mesh(x=2, y=3)
    source, target = Layout.parse("f32[1] + sum{x}{y}", mesh), Layout.parse("f32[1] + sum{x}", mesh)
    arrays = {(x, y): np.array([10.0 * x + y]) for x in range(2) for y in range(3)}
    assert {at: array.tolist() for at, array in combine_summands(source, target, arrays).items()} == {
        (0,): [0 + 1 + 2],
        (1,): [10 + 11 + 12],
    }


@pytest.mark.parametrize(
    ("reduction", "total"), [("sum", 12), ("mean", 4), ("max", 7), ("min", 2), ("product", 42), (None, 12)]
)
def test_combinations(reduction: str | None, total: float):
    assert combine(reduction, [np.array([3.0]), np.array([2.0]), np.array([7.0])]).tolist() == [total]


def test_one_part_is_not_touched():
    part = np.array([1, 2], np.int8)
    assert combine("mean", [part]) is part


def test_the_first_mismatch_and_their_number():
    layout = Layout.parse("int64[2{x}2, 3]", Mesh(x=2))  # device 1 has rows 2, 3, 6, 7
    arrays = {(): indices(layout)}
    tile = cut(layout, arrays)[1]
    tile[2, 1], tile[3, 0] = -5, -6
    wrong = first_mismatch(layout, 1, tile, arrays, np.equal)
    assert wrong is not None
    assert wrong == (2, (2, 1), (6, 1), -5, 19)


def test_a_mismatch_in_a_scalar():
    layout = Layout.parse("int64[]", Mesh(x=2))
    wrong = first_mismatch(layout, 0, np.array(4), {(): np.array(5)}, np.equal)
    assert wrong == (1, (), (), 4, 5)


def test_padding_is_not_compared():
    layout = Layout.parse("int64[{x}3/5]", Mesh(x=2))
    assert first_mismatch(layout, 1, np.array([3, 4, 1000]), {(): np.arange(5)}, np.equal) is None


def test_a_sum_that_is_started_is_finished_before_it_is_compared():
    """However it is split into summands: those of the reference runtime, or others."""
    mesh = Mesh(x=2)
    source, target = Layout.parse("int64[{x}2]", mesh), Layout.parse("int64[4] + sum{x}", mesh)
    layout, tiles = oracle.finished(source, target, {0: np.array([1, 2, 7, 0]), 1: np.array([0, 0, -4, 4])})
    assert str(layout) == "s64[4]"
    assert all(tiles[device].tolist() == [1, 2, 3, 4] for device in (0, 1))


def test_a_sum_that_stays_is_compared_summand_by_summand():
    mesh = Mesh(x=2, y=2)
    source, target = Layout.parse("int64[{y}2] + sum{x}", mesh), Layout.parse("int64[4] + sum{x}", mesh)
    tiles = {device: np.arange(4) for device in range(4)}
    assert oracle.finished(source, target, tiles) == (target, tiles)
