"""The text of a layout: parsed into what was written, read back for every layout, and refused where it is wrong."""

from __future__ import annotations

import re

import pytest

from reshard.errors import NotationError
from reshard.types.notation.text import RawDim, RawLayout, parse_layout


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        ("f32[]", RawLayout("f32", (), None, ())),
        ("f32[16]", RawLayout("f32", (RawDim((16,), None),), None, ())),
        ("f32[{x}8, 3]", RawLayout("f32", (RawDim(("x", 8), None), RawDim((3,), None)), None, ())),
        ("f32[16{x}4{y}2]", RawLayout("f32", (RawDim((16, "x", 4, "y", 2), None),), None, ())),
        ("f32[{x}{y}3/10]", RawLayout("f32", (RawDim(("x", "y", 3), 10),), None, ())),
        ("f32[{x, y}3]", RawLayout("f32", (RawDim(("x", "y", 3), None),), None, ())),
        ("f32[{y:(2)4}8]", RawLayout("f32", (RawDim(("y:(2)4", 8), None),), None, ())),
        ("f32[8] + sum{x}", RawLayout("f32", (RawDim((8,), None),), "sum", ("x",))),
        ("pred[8]+max{x}{y:(1)2}", RawLayout("pred", (RawDim((8,), None),), "max", ("x", "y:(1)2"))),
        ("  bf16 [ {x} 8 , 5 / 5 ]  +  mean {x, y} ", None),
    ],
)
def test_text_is_parsed_into_what_was_written(text: str, raw: RawLayout | None):
    spaced = RawLayout("bf16", (RawDim(("x", 8), None), RawDim((5,), 5)), "mean", ("x", "y"))
    assert parse_layout(text) == (raw or spaced)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read layout ''; write dtype[dims]"),
        ("f32", "write dtype[dims]"),
        ("f32[8", "write dtype[dims]"),
        ("[8]", "write dtype[dims]"),
        ("f32[8] + ", "write dtype[dims]"),
        ("f32[8] + sum", "write dtype[dims]"),
        ("f32[8] + xor{x}", "unknown reduction 'xor'; use one of sum"),
        ("f32[8, ]", "an empty dim; write its size, e.g. 16, or 1"),
        ("f32[,]", "an empty dim"),
        ("f32[8 x 3]", "cannot read 'x 3'; a dim is digits like {x}4 or 16"),
        ("f32[-8]", "cannot read '-8'"),
        ("f32[{x]", "cannot read '{x'"),
        ("f32[{x}3/ten]", "cannot read the true size 'ten'; write it last, as in {x}3/10"),
        ("f32[{x}3/10{y}]", "cannot read the true size '10{y}'"),
        ("f32[{x}3/]", "cannot read the true size ''"),
    ],
)
def test_refused(text: str, message: str):
    with pytest.raises(NotationError, match=re.escape(message)):
        parse_layout(text)
