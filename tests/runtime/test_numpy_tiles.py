"""Tiles in numpy's terms: dtypes, ufuncs and blocks, padding and byte orders, and one tile for each device."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from reshard.errors import ReshardError, TileError
from reshard.plans.rules.tile_view import TileView
from reshard.runtime.numpy_tiles import (
    checked_tiles,
    in_native_order,
    numpy_dtype,
    tile_per_device,
    ufunc,
    with_padding,
    without_padding,
)
from reshard.runtime.on_numpy import merge_tile_blocks, number_tile_blocks
from reshard.types import Layout, Mesh, dtypes
from reshard.types.reductions import REDUCTIONS
from tests.oracle import PADDING, tiles_of


@pytest.mark.parametrize("name", ["bool", "int8", "uint64", "float16", "float64", "complex128"])
def test_dtypes_of_numpy(name: str):
    assert numpy_dtype(name) == np.dtype(name)
    assert numpy_dtype(name).itemsize == dtypes.nbytes(1, name)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4"])
def test_dtypes_of_ml_dtypes(name: str):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert numpy_dtype(name) == np.dtype(getattr(ml_dtypes, name))
    assert numpy_dtype(name).name == name


def test_advice_where_ml_dtypes_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numpy_dtype.cache_clear()
    with pytest.raises(ReshardError, match="numpy alone has no bfloat16; install ml_dtypes"):
        numpy_dtype("bfloat16")
    assert numpy_dtype("float32") == np.float32


def test_advice_where_ml_dtypes_is_too_old(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", ModuleType("ml_dtypes"))
    with pytest.raises(ReshardError, match="this ml_dtypes has no int2; install a newer one"):
        numpy_dtype("int2")


def test_a_ufunc_for_each_reduction():
    """By a pair of values; a mean is divided by the caller."""
    combined = {reduction: float(ufunc(reduction)(3.0, 5.0)) for reduction in REDUCTIONS}
    assert combined == {"sum": 8.0, "mean": 8.0, "max": 5.0, "min": 3.0, "product": 15.0}


# ---- tiles as they are given ------------------------------------------------------------

LAYOUT = Layout.parse("s64[2{x}2/9, {y}4/7]", Mesh(x=3, y=2))


@pytest.mark.parametrize("order", ["C", "F"])
def test_padding_is_added_at_the_end(order: str) -> None:
    for device, tile in tiles_of(LAYOUT).items():
        rows, columns = LAYOUT.tile_shape_of(device)
        given = np.array(tile[:rows, :columns], order=order)
        assert PADDING not in given and (tile != PADDING).sum() == given.size
        padded = with_padding(LAYOUT, device, given)
        assert np.array_equal(padded, np.where(tile == PADDING, 0, tile))
        assert (padded is given) == (given.shape == LAYOUT.tile_shape)
        view = without_padding(LAYOUT, device, padded)
        assert np.array_equal(view, given) and np.shares_memory(view, padded) == (given.size > 0)


def test_tiles_of_other_shapes_stay_for_the_check_that_follows() -> None:
    for shape in ((1, 4), (4, 1), (4,), (2, 3)):
        tile = np.zeros(shape)
        assert with_padding(LAYOUT, 0, tile) is tile


@pytest.mark.parametrize("code", ["i2", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_numbers_in_the_other_byte_order_are_copied(code: str) -> None:
    for order in "<>":
        given = np.arange(5).astype(order + code)
        native = in_native_order(given)
        assert native.dtype == np.dtype(code) and native.dtype.isnative
        assert native.tolist() == given.tolist()
        assert (native is given) == given.dtype.isnative


@pytest.mark.parametrize("code", ["M8[s]", [("a", ">i4"), ("b", "<i4")], "V8", "?", "S3"])
def test_what_is_moved_as_plain_words_keeps_its_byte_order(code: Any) -> None:
    given = np.zeros(3, np.dtype(code).newbyteorder("S"))
    assert in_native_order(given) is given


class Endless(Mapping[int, Any]):
    """A mapping with a tile for every number."""

    def __getitem__(self, key: int) -> Any:
        return [key]

    def __len__(self) -> int:
        return 10**12

    def __iter__(self) -> Iterator[int]:
        return iter(range(10**12))


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (None, "tiles are a NoneType; give a dict"),
        ([1, 2], "tiles are a list; give a dict"),
        ({7: [1]}, r"for 1 devices, the plan has 2 \(missing \[3\], unknown \[\]\)"),
        ({7: [1], 3: [1], "x": [2]}, r"missing \[\], unknown \['x'\]"),
        (Endless(), r"for 1000000000000 devices, the plan has 2 \(missing \[\], unknown \[0, 1, 2, 4, 5, 6, 8, 9\]"),
    ],
)
def test_there_is_one_tile_for_each_device(tiles: Any, message: str) -> None:
    with pytest.raises(TileError, match=message):
        tile_per_device((7, 3), tiles)


def test_shapes_and_dtypes_are_checked() -> None:
    fits = {0: np.zeros(2, ">f4")}
    assert checked_tiles((0,), (2,), "float32", fits)[0].dtype == np.dtype("f4")
    with pytest.raises(TileError, match="shape"):
        checked_tiles((0,), (3,), "float32", fits)
    with pytest.raises(TileError, match="is float32, the source is float64; cast it first"):
        checked_tiles((0,), (2,), "float64", fits)


# ---- blocks -----------------------------------------------------------------------------

COLUMNS = TileView(tile=(2, 4), padded=(2, 4), digits=(2, 2, 2), dims=(0, 1, 1), blocks=(1,))
PADDED = TileView(tile=(3,), padded=(4,), digits=(2, 2), dims=(0, 0), blocks=(0,))


def test_blocks_of_columns_are_numbered_along_a_new_axis():
    blocks = number_tile_blocks(COLUMNS, np.arange(8).reshape(2, 4))
    assert blocks.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert merge_tile_blocks(COLUMNS, blocks).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_tile_is_padded_when_it_is_opened_and_cut_when_it_is_closed():
    blocks = number_tile_blocks(PADDED, np.array([1, 2, 3]))
    assert blocks.tolist() == [[1, 2], [3, 0]]
    assert merge_tile_blocks(PADDED, blocks).tolist() == [1, 2, 3]
