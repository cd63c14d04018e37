"""Layouts: equal meaning is equal object, text, shapes, and the constructor from axes per dim."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh, SubAxis
from tests.layouts import MESHES, layouts, random_layout

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
