"""Layouts: their invariants, each with rejections under its name, equality, text, shapes and dtypes."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import LayoutError, ReshardError
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.reductions import REDUCTIONS
from tests.layouts import MESHES, layouts, random_layout

MESH = Mesh(x=4, y=2)
ALL_DTYPES = sorted({dtypes.canonical(name) for name in dtypes._ALIASES})


def rejects(text: str, *words: str, mesh: Mesh = MESH) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, mesh)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- exact cover: the padded size is the smallest multiple that fits -----------------------------


@pytest.mark.parametrize(
    ("text", "radices", "best"),
    [
        ("f32[{x}3/13]", 12, 16),  # an element too many
        ("f32[{x}4/12]", 16, 12),  # pieces of 4 where pieces of 3 do
        ("f32[16/12]", 16, 12),
        ("f32[3{x}2/16]", 24, 16),  # a round too many
        ("f32[2{x}2/20]", 16, 24),
        ("f32[0{x}/3]", 0, 4),
        ("f32[5/0, {x}2/9]", 8, 12),
    ],
)
def test_exact_cover(text: str, radices: int, best: int):
    rejects(text, f"multiply to {radices}", f"product is {best}", "exact cover")


def test_exact_cover_accepts_the_smallest_multiple_only():
    for size, tile in product(range(1, 30), range(1, 12)):
        fits = tile == -(-size // 4)
        try:
            found = Layout.parse(f"f32[{{x}}{tile}/{size}]", MESH)
        except LayoutError as error:
            assert "exact cover" in str(error)
            assert not fits
        else:
            assert fits
            assert found.padded_shape == (4 * tile,)


def test_exact_cover_with_one_round_of_blocks():
    # The deal's unit is one round of 4 x 2; a leading 1 says that the blocks are of 2, however few are full.
    for size in range(1, 9):
        found = Layout.parse(f"f32[1{{x}}2/{size}]", MESH)
        assert (found.padded_shape, found.tile_shape) == ((8,), (2,))
    rejects("f32[1{x}2/9]", "multiply to 8", "exact cover")


# ---- single use: no part of an axis twice, partial axes included ---------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "f32[{x}4, {x}4]",
        "f32[{x}{x}]",
        "f32[{x}4] + sum{x}",
        "f32[{x:(1)2}4, {x}4]",
        "f32[{x:(2)2}4, {x}4]",
        "f32[{x:(1)2}4] + sum{x}",
        "f32[16] + sum{x}{x}",
        "f32[16] + sum{x,x:(2)2}",
    ],
)
def test_single_use(text: str):
    rejects(text, "axis 'x'", "overlap", "(single use)")


def test_single_use_of_factors_that_do_not_nest():
    rejects("f32[{x:(1)4}3, {x:(2)6}2]", "x:(1)4", "x:(2)6", "single use", mesh=Mesh(x=12))
    kept = Layout.parse("f32[{x:(1)2}3, {x:(4)3}2, {x:(2)2}2]", Mesh(x=12))
    assert [d.tile for d in kept.dims] == [3, 2, 2]


# ---- radix match: a held digit's radix is its sub-axis's size ------------------------------------


@pytest.mark.parametrize(("radix", "axis"), [(2, SubAxis("x", 1, 4)), (4, SubAxis("x", 1, 2)), (1, SubAxis("y", 1, 2))])
def test_radix_match(radix: int, axis: SubAxis):
    with pytest.raises(LayoutError) as caught:
        Layout(MESH, (Dim((Digit(radix, axis), Digit(4, None)), 4 * radix),), "f32")
    assert f"radix {radix}" in str(caught.value)
    assert "(radix match)" in str(caught.value)


def test_radix_match_in_an_empty_dim():
    with pytest.raises(LayoutError, match="radix match"):
        Layout(MESH, (Dim((Digit(3, SubAxis("x", 1, 4)), Digit(0, None)), 0),), "f32")


def test_axes_must_be_the_mesh_s():
    with pytest.raises(ReshardError, match=r"unknown axis 'z'"):
        Layout(MESH, (Dim((Digit(2, SubAxis("z", 1, 2)),), 2),), "f32")


# ---- one reduction: one operation that the dtype has ---------------------------------------------


def test_one_reduction():
    axis = (SubAxis("x", 1, 4),)
    dims = (Dim((Digit(8, None),), 8),)
    for reduction in (None, "xor", "SUM"):
        with pytest.raises(LayoutError, match="use one of sum, max, min, product, mean"):
            Layout(MESH, dims, "float32", reduction, axis)
    for dtype, reduction in (
        ("bool", "sum"),
        ("bool", "mean"),
        ("complex64", "max"),
        ("int32", "mean"),
        ("int4", "mean"),
    ):
        with pytest.raises(LayoutError, match=f"{dtype} has no {reduction} reduction"):
            Layout(MESH, dims, dtype, reduction, axis)


def test_one_reduction_is_none_where_nothing_is_partial():
    dims = (Dim((Digit(8, None),), 8),)
    assert Layout(MESH, dims, "float32", "sum", ()) == Layout(MESH, dims, "float32")
    unit = Mesh(x=4, u=1)
    assert Layout(unit, dims, "float32", "sum", (SubAxis("u", 1, 1),)) == Layout(unit, dims, "float32")


def test_order_and_spelling_of_partial_axes_have_no_meaning():
    same = {Layout.parse(f"f32[8] + max{axes}", MESH) for axes in ("{x}{y}", "{y,x}", "{y}{x:(2)2}{x:(1)2}")}
    assert {str(layout) for layout in same} == {"f32[8] + max{x}{y}"}
    assert len({Layout.parse(f"f32[8] + {op}{{x}}", MESH) for op in REDUCTIONS}) == 5


# ---- canonical form: equal meaning, equal object -------------------------------------------------


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("f32[2 3]", "f32[6]"),
        ("f32[1 6 1]", "f32[6]"),
        ("f32[{x:(1)2}{x:(2)2}4]", "f32[{x}4]"),
        ("f32[{x:(2)2}{x:(1)2}4]", "f32[{x:(2)2}{x:(1)2}4]"),  # not consecutive: the minor one leads
        ("f32[{x:(1)2}1{x:(2)2}4]", "f32[{x}4]"),
        ("f32[{x,y}4]", "f32[{x}{y}4]"),
        ("f32[{u}4{u}2]", "f32[8]"),
        ("f32[1{x}2]", "f32[{x}2]"),
        ("f32[1{x}2/5]", "f32[{x}2/5]"),
        ("f32[1{x}2/4]", "f32[1{x}2/4]"),  # {x}2/4 is no cover, so the 1 says something
        ("f32[{x}0]", "f32[0]"),
        ("f32[{x}]", "f32[{x}]"),
        ("f32[1]", "f32[1]"),
        ("f32[]", "f32[]"),
        ("f32[8/8]", "f32[8]"),
        ("F32[8]", None),
    ],
)
def test_canonical_form(written: str, canonical: str | None):
    mesh = Mesh(x=4, y=2, u=1)
    if canonical is None:
        with pytest.raises(LayoutError, match="unknown dtype"):
            Layout.parse(written, mesh)
    else:
        assert str(Layout.parse(written, mesh)) == canonical


def test_canonical_form_leaves_no_neighbours_to_merge():
    for text in ("f32[2 2{x:(1)2}{x:(2)2}{y}1 3]", "f32[{y}{x:(1)2}1 1{x:(2)2}2 2]"):
        (dim,) = Layout.parse(text, MESH).dims
        for a, b in pairwise(dim.digits):
            assert a.axis or b.axis
            if a.axis and b.axis:
                assert a.axis.axis != b.axis.axis
        assert all(d.radix != 1 for d in dim.digits)


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
                    found = Layout(mesh, (Dim(digits, size),), "f32")
                except LayoutError:
                    continue
                count += 1
                key = size, everything(found)
                assert meanings.setdefault(key, found) == found, f"{meanings[key]} and {found} mean the same"
                assert objects.setdefault(found, key) == key, f"{found} means two things"
                assert hash(meanings[key]) == hash(found)
                assert str(meanings[key]) == str(found)
    assert count > 100


@settings(max_examples=300)
@given(st.randoms(), st.sampled_from(MESHES), st.lists(st.integers(0, 6), max_size=2))
def test_equal_meaning_is_equal_object(choose: object, mesh: Mesh, shape: list[int]):
    one, other = (random_layout(choose, mesh, shape) for _ in range(2))  # type: ignore[arg-type]
    assert (one == other) == (everything(one) == everything(other))
    assert (str(one) == str(other)) == (one == other)


@settings(max_examples=300)
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


@settings(max_examples=400)
@given(st.sampled_from(ALL_DTYPES).flatmap(lambda dtype: layouts(dtype, partial=True)))
def test_text_round_trip(layout: Layout):
    assert Layout.parse(str(layout), layout.mesh) == layout
    assert eval(repr(layout), {"Layout": Layout, "Mesh": Mesh}) == layout


# ---- shapes and dtypes ---------------------------------------------------------------------------


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


BITS = {
    "bool": 8,
    "int2": 2,
    "uint4": 4,
    "int4": 4,
    "int8": 8,
    "uint16": 16,
    "int64": 64,
    "float4_e2m1fn": 4,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 8,
    "float16": 16,
    "bfloat16": 16,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
}


@pytest.mark.parametrize(("name", "size"), BITS.items())
def test_bytes_of_dtypes(name: str, size: int):
    layout = Layout.tiled(MESH, (4, 9), name, [[MESH.sub_axis("x")], []])
    assert layout.dtype == name
    assert layout.tile_bytes == -(-9 * size // 8)
    assert [layout.nbytes(n) for n in (0, 1, 8)] == [0, -(-size // 8), size]


def test_int4_is_packed():
    assert [Layout.parse(f"s4[{n}]", MESH).tile_bytes for n in (0, 1, 2, 3, 9)] == [0, 1, 1, 2, 5]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_dtype_names_are_numpy_s(name: str):
    np = pytest.importorskip("numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = np.dtype(getattr(ml_dtypes, name, name))
    assert found.name == name
    assert dtypes.canonical(found) == dtypes.canonical(found.type) == dtypes.canonical(dtypes.short(name)) == name
    assert found.itemsize == max(1, dtypes.bits(name) // 8)


def test_dtype_spellings():
    same = {Layout.parse(f"{name}[{{x}}4]", MESH) for name in ("f32", "float32")}
    assert len(same) == 1
    assert str(Layout.parse("bool[4]", MESH)) == str(Layout.parse("pred[4]", MESH)) == "pred[4]"
    assert Layout.parse("i4[4]", MESH) == Layout.parse("s4[4]", MESH) == Layout.parse("int4[4]", MESH)
    with pytest.raises(LayoutError, match=r"unknown dtype 'float31'.*float32"):
        Layout.parse("float31[4]", MESH)


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
    found = Layout.from_spec(MESH, shape, "float32", spec)  # type: ignore[arg-type]
    assert str(found) == text
    assert found.shape == shape


def test_from_spec_partial():
    found = Layout.from_spec(MESH, (8,), "f32", [["x"]], unreduced=["y"], reduction="max")
    assert str(found) == "f32[{x}2] + max{y}"


def test_from_spec_refuses_more_entries_than_dims():
    with pytest.raises(LayoutError, match="at most one entry per dim"):
        Layout.from_spec(MESH, (8,), "f32", [["x"], ["y"]])
