"""Shapes and the bytes of their arrays."""

import pytest

from reshard.errors import NotationError
from reshard.hlo import Array
from reshard.hlo.module import flatten_shape
from reshard.hlo.text import read_arrays, read_shape
from tests.hlo.fragments import module


def instruction(line):
    return module(line).entry.instructions[0]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("f32[]", Array("f32", ())),
        ("bf16[8,4]{1,0:T(8,128)(2,1)S(1)}", Array("bf16", (8, 4), "1,0:T(8,128)(2,1)S(1)")),
        ("f32[<=8,2]{1,0}", Array("f32", (8, 2), "1,0")),
        ("()", ()),
        ("(f32[2]{0}, /*index=1*/s32[])", (Array("f32", (2,), "0"), Array("s32", ()))),
        ("((f32[2]{0:T(256)}, ()), u32[]{:S(2)})", ((Array("f32", (2,), "0:T(256)"), ()), Array("u32", (), ":S(2)"))),
    ],
)
def test_a_shape(text, shape):
    assert instruction(f"%a = {text} custom-call()").shape == read_shape(text) == shape


def test_the_arrays_of_a_shape_in_order():
    text = "((f32[2]{0:T(256)}, ()), (u32[]{:S(2)}, (bf16[3,5])))"
    assert [array.dtype for array in flatten_shape(read_shape(text))] == ["f32", "u32", "bf16"]
    assert flatten_shape(read_shape(text)) == read_arrays(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[3,5]", 60),
        ("f8e4m3fn[7]", 56 // 8),
        ("bf16[7]", 14),
        ("pred[3]", 3),
        ("s4[3]", 2),
        ("u1[9]", 2),
        ("c64[2]", 16),
        ("token[]", 0),
    ],
)
def test_bytes(text, nbytes):
    assert [array.nbytes for array in instruction(f"%a = {text} custom-call()").arrays] == [nbytes]


@pytest.mark.parametrize("shape", ["(f32[2]", "[2]{0}", "f32[2] f32[2]"])
def test_a_shape_that_cannot_be_read_is_refused(shape):
    with pytest.raises(NotationError, match="give one array"):
        _ = instruction(f"%a = {shape} custom-call()").shape


def test_a_dtype_of_unknown_size_is_refused():
    with pytest.raises(NotationError, match="dtype 'strange'"):
        _ = instruction("%a = strange[2] custom-call()").arrays[0].nbytes
