"""Checks of tiles and whole arrays, and layouts derived from others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reshard.errors import LayoutError, PlanError, TileError
from reshard.mpi import tiles
from reshard.types import Layout, Mesh

ROWS = Layout.parse("f32[{x}3/5, 7]", Mesh(x=2))
TILE = np.zeros((3, 7), np.float32)
WORDS = Layout.parse("u64[{x}4]", Mesh(x=2))


def test_a_tile_that_fits_is_returned_as_an_array() -> None:
    assert tiles.check_tile(TILE, ROWS, "tile") is TILE
    assert tiles.check_tile(np.zeros((7, 3), np.float32).T, ROWS, "tile").shape == (3, 7)


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (
            np.zeros((5, 7), np.float32),
            "the tile has shape (5, 7), but tiles of f32[{x}3/5, 7] (global (5, 7), mesh <x=2>)",
        ),
        (np.zeros((3, 7)), "the tile is float64, but f32[{x}3/5, 7] is float32; cast it first"),
        (np.zeros((3, 7), ">f4"), "cast it first"),
        (0.0, "the tile has shape ()"),
    ],
)
def test_a_tile_that_does_not_fit(tile: Any, text: str) -> None:
    with pytest.raises(TileError) as caught:
        tiles.check_tile(tile, ROWS, "tile")
    assert text in str(caught.value)


def read_only() -> np.ndarray:
    array = np.zeros((3, 7), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ([[0.0]], "out is a list; give a numpy array"),
        (np.zeros((7, 3), np.float32), "the out has shape (7, 3)"),
        (read_only(), "out is read-only"),
        (TILE, "out overlaps the tile"),
        (TILE[::-1], "out overlaps the tile"),
    ],
)
def test_results_that_cannot_be_written_to(out: Any, text: str) -> None:
    with pytest.raises(TileError) as caught:
        tiles.check_out(out, ROWS, TILE)
    assert text in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_tiles_without_padding_are_copied_to_padded_ones(rank: int) -> None:
    own = np.arange(21, dtype=np.float32).reshape(3, 7)[: 3 - rank]
    given = tiles.check_given_tile(own, ROWS, rank)
    assert given.shape == (3, 7) and np.array_equal(given[: 3 - rank], own) and not given[3 - rank :].any()
    assert (given is own) == (rank == 0)
    assert np.array_equal(tiles.true_part(given, ROWS, rank), own)
    with pytest.raises(TileError, match=r"the tile has shape \(2, 7\), but tiles of"):
        tiles.check_given_tile(np.zeros((2, 7), np.float32), ROWS, 0)


def test_no_copy_beside_a_budget() -> None:
    assert tiles.check_given_tile(TILE, ROWS, 1, budget=100) is TILE
    for tile in (TILE[:2], TILE.astype(">f4")):
        assert tiles.check_given_tile(tile, ROWS, 1).dtype == np.float32
        with pytest.raises(TileError, match=r"copied beside the budget; give one of shape \(3, 7\)"):
            tiles.check_given_tile(tile, ROWS, 1, budget=100)


def test_results_without_padding() -> None:
    own = np.zeros((2, 7), np.float32)
    assert tiles.check_true_out(own, ROWS, 1, TILE, None) is own
    wrong: list[tuple[Any, str]] = [
        (np.zeros((3, 7), np.float32), "the out has shape (3, 7), but without padding this rank's tile of"),
        (own.astype(">f4"), "out is >f4, the tile float32; give one dtype"),
        (own.tolist(), "out is a list; give a numpy array"),
        (read_only()[:2], "out is read-only"),
        (TILE[:2], "out overlaps the tile"),
    ]
    for out, text in wrong:
        with pytest.raises(TileError) as caught:
            tiles.check_true_out(out, ROWS, 1, TILE, None)
        assert text in str(caught.value)
    with pytest.raises(TileError, match="copied beside the budget; give no out"):
        tiles.check_true_out(own, ROWS, 1, TILE, 100)


def test_a_result_has_the_dtype_of_the_tile() -> None:
    """Both stand for words of 8 bytes, but are not the same."""
    dates = np.zeros(4, "M8[s]")
    with pytest.raises(TileError, match=r"out is datetime64\[D\], the tile datetime64\[s\]"):
        tiles.check_out(np.zeros(4, "M8[D]"), WORDS, dates)
    out = np.zeros(4, "M8[s]")
    assert tiles.check_out(out, WORDS, dates) is out


@pytest.mark.parametrize(
    ("dtype", "fits"),
    [
        ("u8", True),
        ("M8[D]", True),
        ("V8", True),
        ("i4,f4", True),
        ("f8", False),
        ("i8", False),
        ("O", False),
        ("V4", False),
    ],
)
def test_dtypes_without_a_name_are_words_of_their_size(dtype: str, fits: bool) -> None:
    assert tiles.represents(WORDS, np.dtype(dtype)) == fits
    if fits:
        assert tiles.element_dtype(WORDS, dtype) == np.dtype(dtype)
    else:
        with pytest.raises(TileError, match="does not fit"):
            tiles.element_dtype(WORDS, dtype)


def test_dtypes_of_the_other_byte_order_say_so() -> None:
    with pytest.raises(TileError, match=r"dtype >f4 does not fit .* byte order of this machine"):
        tiles.element_dtype(ROWS, ">f4")
    assert tiles.element_dtype(ROWS, "f4") == tiles.element_dtype(ROWS, "<f4") == np.float32


def test_the_dtype_of_a_layout_without_one_given() -> None:
    assert tiles.element_dtype(ROWS, None) == np.float32
    assert tiles.element_dtype(Layout.parse("bf16[4]", Mesh()), None).name == "bfloat16"


@pytest.mark.parametrize("root", [-1, 3, 100])
def test_roots_that_are_not_ranks(root: int) -> None:
    with pytest.raises(PlanError, match=f"root {root} is not a rank of a communicator of 3; give 0 to 2"):
        tiles.check_root(root, 3)
    for fine in (0, 2, None):
        tiles.check_root(fine, 3)


@pytest.mark.parametrize(
    ("array", "text"),
    [(None, "the array is None"), (np.zeros((5, 7)), "dtype float64"), (np.zeros((3, 7), np.float32), "shape (3, 7)")],
)
def test_whole_arrays_that_do_not_fit(array: Any, text: str) -> None:
    for code in ("<f4", ">f4"):
        tiles.check_global(np.zeros((5, 7), code), ROWS, np.dtype("float32"))
    with pytest.raises(TileError) as caught:
        tiles.check_global(array, ROWS, np.dtype("float32"))
    assert text in str(caught.value)


def test_partial_layouts() -> None:
    assert tiles.check_not_partial(ROWS) is ROWS
    with pytest.raises(LayoutError, match="is still to be summed"):
        tiles.check_not_partial(Layout.from_spec(Mesh(x=2), (4,), "float32", [[]], unreduced=["x"]))


def test_replicated() -> None:
    assert str(tiles.replicated(ROWS, ROWS.mesh)) == "f32[5, 7]" and tiles.replicated(ROWS, Mesh(x=5)).mesh == Mesh(x=5)


@pytest.mark.parametrize(
    ("before", "dim", "after"),
    [
        ("f32[{x}4, {y}8, 16]", 0, "f32[16, {y}8, {x}4]"),
        ("f32[{x}4, {y}8, 16]", 1, "f32[{x}4, 16, {y}8]"),
        ("f32[{x}4, {y}8, 16]", 2, "f32[{x}4, {y}8, 16]"),
        ("f32[{x}4, {y}8, 16]", -3, "f32[16, {y}8, {x}4]"),
        ("f32[{x}{y}2, 16, 3]", 0, "f32[16, 16, {x}{y}1/3]"),
        ("f32[{x}4, 5, 6, 7]", 0, "f32[16, 5, 6, {x}2/7]"),
    ],
)
def test_a_dim_made_local(before: str, dim: int, after: str) -> None:
    assert str(tiles.with_local_dim(Layout.parse(before, Mesh(x=4, y=2)), dim)) == str(
        Layout.parse(after, Mesh(x=4, y=2))
    )


def test_dims_that_cannot_be_made_local() -> None:
    full = Layout.parse("f32[{x}4, {y}8]", Mesh(x=4, y=2))
    with pytest.raises(LayoutError, match=r"dim 2 of .* which has 2 dims"):
        tiles.with_local_dim(full, 2)
    with pytest.raises(LayoutError, match=r"dim -3 of .* which has 2 dims"):
        tiles.with_local_dim(full, -3)


@pytest.mark.parametrize(
    ("before", "dim", "after"),
    [
        ("f32[{x}4, {y}8]", 0, "f32[16, {y}{x}2]"),
        ("f32[{x}4, {y}8]", 1, "f32[{x}{y}2, 16]"),
        ("f32[{x}3/10]", 0, "f32[10]"),
        ("f32[{x}4] + sum{y}", 0, "f32[16] + sum{y}"),
    ],
)
def test_without_a_local_dim_the_axes_join_another_one(before: str, dim: int, after: str) -> None:
    mesh = Mesh(x=4, y=2)
    assert str(tiles.with_local_dim(Layout.parse(before, mesh), dim)) == after
