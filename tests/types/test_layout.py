"""Layouts: equal meaning is equal object, text, shapes, and the constructor from axes per dim."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import LayoutError, TileError
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.reductions import has_reduction
from tests.layouts import MESHES, layouts, random_layout
from tests.oracle import PADDING, tiles_of

MESH = Mesh(x=4, y=2)
ALL_DTYPES = sorted({dtypes.canonical(name) for name in dtypes._ALIASES})

# ---- equal meaning, equal object -----------------------------------------------------------------


def everything(layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The whole meaning: every device's indices, padding included."""
    return tuple(meaning(layout, device) for device in layout.mesh.devices)


@pytest.mark.parametrize("mesh", [Mesh(x=4), Mesh(x=2, y=2), Mesh(x=6), Mesh(x=2, u=1)], ids=str)
def test_equal_meaning_is_equal_object_for_all_short_numerals(mesh: Mesh):
    choices = [Digit(r, None) for r in (1, 2, 3)]
    for name, axis in mesh.axes.items():
        factors = [(p, s) for p in range(1, axis + 1) for s in range(1, axis + 1) if axis % (p * s) == 0]
        choices += [Digit(s, SubAxis(name, p, s)) for p, s in factors if s > 1 or axis == 1]
    meanings: dict[object, Layout] = {}
    objects: dict[Layout, object] = {}
    count = 0
    for length in range(4):
        for digits in product(choices, repeat=length):
            padded = prod(d.radix for d in digits)
            for size in range(max(1, padded - 4), padded + 1):
                try:
                    layout = Layout(mesh, (Dim(digits, size),), "f32")
                except LayoutError:
                    continue
                count += 1
                key = size, everything(layout)
                assert meanings.setdefault(key, layout) == layout, f"{meanings[key]} and {layout} mean the same"
                assert objects.setdefault(layout, key) == key, f"{layout} means two things"
                assert hash(meanings[key]) == hash(layout)
                assert str(meanings[key]) == str(layout)
    assert count > 100


@settings(max_examples=200)
@given(st.randoms(), st.sampled_from(MESHES), st.lists(st.integers(0, 6), max_size=2))
def test_equal_meaning_is_equal_object(choose: object, mesh: Mesh, shape: list[int]):
    one, other = (random_layout(choose, mesh, shape) for _ in range(2))  # type: ignore[arg-type]
    assert (one == other) == (everything(one) == everything(other))
    assert (str(one) == str(other)) == (one == other)


@settings(max_examples=200)
@given(layouts())
def test_every_random_layout_covers_each_element_and_is_rebuilt_by_its_parts(layout: Layout):
    assert Layout(layout.mesh, layout.dims, layout.dtype) == layout
    held = {
        index
        for device in layout.mesh.devices
        for index in product(*meaning(layout, device))
        if all(i < n for i, n in zip(index, layout.shape, strict=True))
    }
    assert len(held) == prod(layout.shape)


# ---- text ----------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.sampled_from(ALL_DTYPES).flatmap(lambda dtype: layouts(dtype, partial=True)))
def test_text_round_trip(layout: Layout):
    assert Layout.parse(str(layout), layout.mesh) == layout
    assert eval(repr(layout), {"Layout": Layout, "Mesh": Mesh}) == layout


# ---- shapes ---------------------------------------------------------------------------


def test_shapes():
    layout = Layout.parse("bf16[{y}8, 3{x}2/23, 5]", MESH)
    assert layout.shape == (16, 23, 5)
    assert layout.padded_shape == (16, 24, 5)
    assert layout.tile_shape == (8, 6, 5)
    assert layout.tile_bytes == 8 * 6 * 5 * 2
    assert not layout.even
    assert Layout.parse("bf16[{y}8, 3{x}2, 5]", MESH).even
    assert layout.held == (SubAxis("y", 1, 2), SubAxis("x", 1, 4))
    assert Layout.parse("f32[]", MESH).tile_bytes == 4


# ---- from axes per dim ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "spec", "text"),
    [
        ((16, 16, 16), [["y"], [], ["x"]], "f32[{y}8, 16, {x}4]"),
        ((16, 16), ["y"], "f32[{y}8, 16]"),
        ((16, 16), [None, ("x", "y")], "f32[16, {x}{y}2]"),
        ((10,), [["x"]], "f32[{x}3/10]"),
        ((1,), [["x", "y"]], "f32[{x}{y}/1]"),
        ((0, 3), [["x"], ["y"]], "f32[0, {y}2/3]"),
        ((16, 8), [["x:(1)2"], ["x:(2)2"]], "f32[{x:(1)2}8, {x:(2)2}4]"),
        ((), [], "f32[]"),
    ],
)
def test_from_spec(shape: tuple[int, ...], spec: list[object], text: str):
    layout = Layout.from_spec(MESH, shape, "float32", spec)  # type: ignore[arg-type]
    assert str(layout) == text
    assert layout.shape == shape


def test_from_spec_partial():
    layout = Layout.from_spec(MESH, (8,), "f32", [["x"]], unreduced=["y"], reduction="max")
    assert str(layout) == "f32[{x}2] + max{y}"


# ---- contiguous tiles ----------------------------------------------------------------------------


def test_tiled_pads_each_dim_to_whole_pieces():
    mesh = Mesh(x=3, y=2)
    x, y = mesh.sub_axis("x"), mesh.sub_axis("y")
    for size in range(20):
        layout = Layout.tiled(mesh, (size, 5), "f32", [[x, y], []])
        assert (layout.shape, layout.tile_shape) == ((size, 5), (-(-size // 6), 5))


def test_tiled_needs_axes_for_every_dim():
    with pytest.raises(LayoutError, match=r"1 dims of axes for global shape .* give one list of axes per dim"):
        Layout.tiled(MESH, (8, 8), "f32", [[]])


def test_tiled_has_a_sum_unless_another_reduction_is_given():
    axis = MESH.sub_axis("x")
    assert str(Layout.tiled(MESH, (8,), "f32", [[]], [axis])) == "f32[8] + sum{x}"
    assert str(Layout.tiled(MESH, (8,), "f32", [[]], [axis], "min")) == "f32[8] + min{x}"
    assert Layout.tiled(MESH, (8,), "f32", [[]], [], "min").reduction is None


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda layout: layout.nbytes("x"), "'x' elements"),
        (lambda layout: layout.partial_as(3), "3 is a int, not a Layout"),
    ],
)
def test_arguments_of_the_wrong_kind_are_said(call, given: str):
    with pytest.raises(LayoutError, match=given):
        call(Layout.parse("f32[{x}4]", Mesh(x=2)))


# ---- whole arrays, cut and put together


@settings(max_examples=150, deadline=None)
@given(layouts("int64"))
def test_tiles_are_what_the_meaning_says_and_assemble_to_the_array(layout: Layout):
    array = np.arange(prod(layout.shape)).reshape(layout.shape)
    cut, wanted = layout.tiles(array), tiles_of(layout)
    assert list(cut) == list(wanted)
    for device, tile in cut.items():
        assert np.array_equal(tile, np.where(wanted[device] == PADDING, 0, wanted[device]))
        assert tile.flags.c_contiguous
    without = layout.tiles(array, padded=False)
    assert all(tile.shape == layout.tile_shape_of(device) for device, tile in without.items())
    for tiles in (cut, without):
        assert np.array_equal(layout.assemble(tiles), array)


@pytest.mark.parametrize("dtype", ["int64", "float32", "bfloat16", "bool"])
@pytest.mark.parametrize("reduction", ["sum", "max", "min", "product", "mean"])
def test_summands_combine_to_the_array(dtype: str, reduction: str):
    if not has_reduction(dtype, reduction):
        return
    layout = Layout.parse(f"{dtypes.short(dtype)}[{{y}}3/5, 2] + {reduction}{{x}}", MESH)
    array = np.arange(-4, 6).reshape(5, 2).astype(numpy_dtype(dtype))
    whole = layout.assemble(layout.tiles(array))
    assert np.array_equal(whole, array) and whole.dtype == array.dtype
    by_hand = {device: tile + np.ones((), tile.dtype) for device, tile in layout.tiles(array).items()}
    # One more in each of the four summands: that many times one, or one more.
    expected = {"sum": array + np.asarray(4, array.dtype), "max": array + np.ones((), array.dtype)}
    if reduction in expected and dtype != "bool":
        assert np.array_equal(layout.assemble(by_hand), expected[reduction])


def test_pieces_and_runs_in_any_order_are_cut():
    layout = Layout.parse("int64[{x}(2@1,3@0,1@1,2@3), {y}2]", MESH)
    array = np.arange(32).reshape(8, 4)
    assert layout.tiles(array, padded=False)[2].tolist() == [[0, 1], [4, 5], [20, 21]]
    assert np.array_equal(layout.assemble(layout.tiles(array)), array)


def test_copies_that_differ_and_tiles_that_do_not_fit_are_refused():
    layout = Layout.parse("f32[{x}2]", MESH)
    array = np.array([0, 1, np.nan, 3, 4, 5, 6, 7], "f4")
    tiles = layout.tiles(array)
    assert np.array_equal(layout.assemble(tiles), array, equal_nan=True)
    with pytest.raises(TileError, match=r"devices 2 and 3 both hold tile \(1,\)"):
        layout.assemble({**tiles, 3: tiles[3] + 1})
    with pytest.raises(TileError, match=r"missing \[0, 1\]"):
        layout.assemble({device: tiles[device] for device in range(2, 8)})
    with pytest.raises(TileError, match=r"device 7's tile is float64\[2\]; give float32\[2\]"):
        layout.assemble({**tiles, 7: tiles[7].astype("f8")})
    for wrong in (array[:7], array.astype("f8"), "text", [[1], [2, 3]]):
        with pytest.raises(TileError, match=r"give (float32\[8\]|an array)"):
            layout.tiles(wrong)


@pytest.mark.parametrize(
    ("before", "dim", "after"),
    [
        ("f32[{x}4, {y}8, 16]", 0, "f32[16, {y}8, {x}4]"),
        ("f32[{x}4, {y}8, 16]", 1, "f32[{x}4, 16, {y}8]"),
        ("f32[{x}4, {y}8, 16]", 2, "f32[{x}4, {y}8, 16]"),
        ("f32[{x}4, {y}8, 16]", -3, "f32[16, {y}8, {x}4]"),
        ("f32[{x}{y}2, 16, 3]", 0, "f32[16, {x}{y}2, 3]"),
        ("f32[{x}4, 5, 6, 7]", 0, "f32[16, 5, 6, {x}2/7]"),
        ("f32[{x}4, 5, 8, 7]", 0, "f32[16, 5, {x}2, 7]"),
        ("f32[{x}4, {y}12, 9]", 1, "f32[{x}4, 24, {y}5/9]"),  # pencils stay pencils
        ("f32[{x}4, {y}8]", 0, "f32[16, {y}{x}2]"),
        # Other dims stay as they are.
        ("f32[{x}4, 2{y}4, 16]", 0, "f32[16, 2{y}4, {x}4]"),
        # Without a local dim, the axes join another one.
        ("f32[{x}4, {y}8]", 0, "f32[16, {y}{x}2]"),
        ("f32[{x}4, 3{y}8]", 0, "f32[16, 3{y}{x}2]"),
        ("f32[{x}4, {y}8]", 1, "f32[{x}{y}2, 16]"),
        ("f32[{x}3/10]", 0, "f32[10]"),
        ("f32[{x}(1,2,3,4), 8]", 0, "f32[10, {x}2]"),
        ("f32[{y}2, {x}(1,2,3,2)]", 0, "f32[4, {x}{y}1]"),
        ("f32[{x}4] + sum{y}", 0, "f32[16] + sum{y}"),
    ],
)
def test_a_dim_made_local(before: str, dim: int, after: str):
    assert Layout.parse(before, MESH).with_local(dim) == Layout.parse(after, MESH)


def test_the_dim_that_takes_the_axes_may_be_given():
    pencils = Layout.parse("f32[{x}4, {y}8, 16]", MESH)
    assert str(pencils.with_local(0, 1)) == str(pencils.with_local(np.int64(-3), to=-2)) == "f32[16, {y}{x}2, 16]"
    for dims in [(3,), (-4,), (0, 0), (0, 3), ("x",), (True,), (0, -3)]:
        with pytest.raises(LayoutError, match="give the numbers of two of its 3 dims"):
            pencils.with_local(*dims)
