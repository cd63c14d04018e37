"""The shapes of HLO text: arrays, and nested tuples of them.

shape = array | "(" [shape {"," shape}] ")"
array = dtype "[" [size {"," size}] "]" ["{" layout "}"]         f32[8,4]{1,0:T(8,128)(2,1)S(1)}
size  = number | "<=" number                                     a bound counts as the size
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import NotationError

ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_SHAPE_PART = re.compile(rf"{ARRAY.pattern}|([()])")
_NO_BYTES = ("token", "opaque")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape; `dtype` is HLO's name (`bf16`), `layout` the text in its braces."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def elements(self) -> int:
        """The number of elements.

        >>> Array("bf16", (8, 4)).elements
        32
        """
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """The size in bytes, without the padding of tiled layouts. Types below a byte are packed; tokens take none.

        >>> Array("bf16", (8, 4)).nbytes, Array("s4", (3,)).nbytes, Array("token", ()).nbytes
        (64, 2, 0)
        """
        return -(-self.elements * _bits(self.dtype) // 8)


Shape = Array | tuple["Shape", ...]
"""What an instruction yields: an array or a tuple of shapes."""


def parse_shape(text: str) -> Shape:
    """Reads a shape; raises `NotationError` for text that is not exactly one.

    >>> parse_shape("(f32[8,4]{1,0}, s32[])")
    (Array(dtype='f32', dims=(8, 4), layout='1,0'), Array(dtype='s32', dims=(), layout=''))
    """
    stack: list[list[Shape]] = [[]]
    for part in _SHAPE_PART.finditer(text):
        if part[4] == "(":
            stack.append([])
        elif part[4] == ")" and len(stack) > 1:
            shape = tuple(stack.pop())
            stack[-1].append(shape)
        elif part[1]:
            stack[-1].append(_array(part[1], part[2], part[3] or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise NotationError(f"HLO shape {text[:120]!r}: give one array, as in f32[8,4]{{1,0}}, or a tuple of shapes")
    return stack[0][0]


def parse_arrays(text: str) -> tuple[Array, ...]:
    """Reads the arrays of a shape in order, without their tuples: faster than `parse_shape`, and unchecked.

    >>> [array.dtype for array in parse_arrays("((f32[8]), u32[])")]
    ['f32', 'u32']
    """
    return tuple(_array(*parts) for parts in ARRAY.findall(text))


def flatten(shape: Shape) -> tuple[Array, ...]:
    """The arrays of a shape, in order.

    >>> [array.dtype for array in flatten(parse_shape("((f32[8]), u32[])"))]
    ['f32', 'u32']
    """
    return (shape,) if isinstance(shape, Array) else tuple(array for part in shape for array in flatten(part))


@lru_cache(maxsize=1 << 14)  # A module has few shapes, and names each of them often.
def _array(dtype: str, dims: str, layout: str) -> Array:
    return Array(dtype, tuple(int(size.lstrip("<= ")) for size in dims.split(",") if size.strip()), layout)


def _bits(dtype: str) -> int:
    """The size of an element, which HLO's names of types state."""
    if dtype in _NO_BYTES:
        return 0
    if dtype == "pred":
        return 8
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise NotationError(f"HLO dtype {dtype!r}: its size is not known; names like f32, bf16, s4 and pred state it")
    return int(bits[0])
