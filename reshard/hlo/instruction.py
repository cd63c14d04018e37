"""An instruction, the arrays that it yields, and what else its line of text says: operands, attributes, numbers.

Most instructions of a module are never looked at, and a constant may be megabytes long. So an instruction keeps its
text, and reads its shape, its operands and its attributes when they are first asked for. Names are without their `%`,
and attributes are spelled as XLA prints them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import NotationError

NO_OPERANDS = ("constant", "parameter")
CALLS = (
    "calls", "to_apply", "condition", "body", "true_computation", "false_computation", "branch_computations",
    "called_computations", "select", "scatter",
)  # fmt: skip
STRING = r'"(?:[^"\\]|\\.)*+"'
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=?\s]*)\](?:\{([^}]*)\})?")
_MARK = re.compile(rf"{STRING}|[{{(\[]|[}})\]]|,")
_BLANK = re.compile(rf"({STRING})|\s*(<=|->|[,:])\s*|([{{(\[])\s+|\s+(?=[}})\]]|T\()|(\s+)")
_QUOTED = re.compile(STRING)
_CALLED = re.compile(rf"\b({'|'.join(CALLS)})=(?:%?([\w.\-]+)|\{{([^}}]*)\}})")
_NAME = re.compile(r"%([\w.\-]+)")
_INDEX_COMMENT = re.compile(r"/\*.*?\*/")
_SHAPE_PART = re.compile(rf"{ARRAY.pattern}|(b?\()|(\))")


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
        if self.dtype in ("token", "opaque"):
            return 0
        bits = re.search(r"\d+", "pred8" if self.dtype == "pred" else self.dtype)  # HLO's names of types state it.
        if bits is None:
            raise NotationError(
                f"HLO dtype {self.dtype!r}: its size is not known; names like f32, bf16, s4 and pred state it"
            )
        return -(-self.elements * int(bits[0]) // 8)


Shape = Array | tuple["Shape", ...]
"""What an instruction yields: an array or a tuple of shapes."""


def flatten_shape(shape: Shape) -> tuple[Array, ...]:
    """The arrays of a shape, in order.

    >>> [array.dtype for array in flatten_shape(((Array("f32", (8,)),), Array("u32", ())))]
    ['f32', 'u32']
    """
    arrays: list[Array] = []
    parts = [shape]
    while parts:  # No recursion: damaged text may nest tuples without end.
        part = parts.pop()
        if isinstance(part, Array):
            arrays.append(part)
        else:
            parts += reversed(part)
    return tuple(arrays)


class SumPart(NamedTuple):
    """Which array of a combined sum an opened one is, and the bytes of those before it; see `hlo.combined`."""

    at: int
    bytes_before: int


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, its opcode, whether it is its computation's root, and the text of the rest.

    `shape_text` is that of its shape, `rest` all that stands after the parenthesis that opens its operands. Both are
    read when they are first asked for. `part` is set if it is one array of a combined sum.
    """

    name: str
    opcode: str
    root: bool
    shape_text: str = field(repr=False)
    rest: str = field(repr=False)
    part: SumPart | None = field(default=None, repr=False)

    @property
    def is_array(self) -> bool:
        """Whether the result is one array, and no tuple."""
        return not self.shape_text.startswith("(")

    @cached_property
    def shape(self) -> Shape:
        """The shape of the result."""
        if not self.shape_text:
            raise NotationError(f"HLO text: the shape of a {self.opcode} is left out; write it, as XLA does")
        return read_shape(self.shape_text)

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the result, in order, without their tuples."""
        return flatten_shape(self.shape)

    @property
    def results(self) -> tuple[Array, ...]:
        """The arrays that the instruction makes.

        A `-start` also yields its operands, before the results; both a `-start` and a `recv` yield contexts, after
        them. Neither counts.
        """
        shape = self.shape
        if isinstance(shape, Array) or len(shape) < 2:
            return self.arrays
        if self.opcode == "recv":
            return flatten_shape(shape[0])
        if not self.opcode.endswith("-start"):
            return self.arrays
        plain = self.opcode == "all-reduce-start" and all(isinstance(part, Array) for part in shape)
        return self.arrays if plain else flatten_shape(shape[1])

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        if self.opcode in NO_OPERANDS:
            return ()
        text = _INDEX_COMMENT.sub("", self.rest[: find_close(self.rest)])
        if text.count("%") > text.count(","):
            return tuple(_NAME.findall(text))
        # Shapes have commas as well, and only some of the names may have their %.
        return tuple(part.split()[-1].lstrip("%") for part in ARRAY.sub("", text).split(",") if part.strip(" ()"))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """The attributes after the operands, values as text: `{"channel_id": "1", "dimensions": "{0}", ...}`."""
        return MappingProxyType(dict(list_attributes(self.rest[find_close(self.rest) + 1 :])))

    @property
    def sharding(self) -> str | None:
        """The text of the `sharding=` attribute, which `Layout.from_hlo` reads."""
        return self.attributes.get("sharding")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that the instruction calls, in the order of its attributes."""
        if "=" not in self.rest:
            return ()
        found = _CALLED.findall(_QUOTED.sub("", self.rest) if '"' in self.rest else self.rest)
        listed = sorted(found, key=lambda one: CALLS.index(one[0])) if len(found) > 1 else found
        names = (name for _, one, several in listed for name in ([one] if one else several.split(",")))
        return tuple(name.strip().lstrip("%") for name in names if name.strip())

    @cached_property
    def literal(self) -> str:
        """The numbers of a constant or the number of a parameter, as text; empty for other instructions.

        Numbers that the text leaves out are `...`.
        """
        return self.rest[: find_close(self.rest)].strip() if self.opcode in NO_OPERANDS else ""

    @property
    def metadata(self) -> str | None:
        """The text of the `metadata` attribute; looked for before the others are read."""
        return self.attributes.get("metadata") if "metadata=" in self.rest else None


def list_attributes(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values in `, key=value, key=value`: commas that are outside of all brackets and quotes part them."""
    depth = start = 0
    ends: list[int] = []
    for mark in _MARK.finditer(text):
        if mark[0] == "," and depth == 0:
            ends.append(mark.start())
        elif mark[0] in "{([":
            depth += 1
        elif mark[0] in "})]":
            depth -= 1
    for end in (*ends, len(text)):
        key, _, value = text[start:end].partition("=")
        start, value = end + 1, value.strip()
        if key.strip():
            if (" " in value or not value.isprintable()) and '"' not in value and "backend_config" not in key:
                # As XLA prints it: no blanks at commas and inside of brackets, elsewhere one, also where a line ends.
                value = _BLANK.sub(lambda found: found[1] or found[2] or found[3] or (" " if found[4] else ""), value)
            yield key.strip(), value


def find_close(text: str, start: int = 0) -> int:
    """The index of the parenthesis that closes the one just before `start`."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(mark[0], 0)
        if depth < 0:
            return mark.start()
    return len(text)


def spell_shape(shape: Shape) -> str:
    """The text of a shape, as `read_shape` reads it."""
    if isinstance(shape, tuple):
        return f"({','.join(map(spell_shape, shape))})"
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]" + (f"{{{shape.layout}}}" if shape.layout else "")


def read_shape(text: str) -> Shape:
    """Reads a shape; raises `NotationError` for text that is not exactly one.

    >>> read_shape("(f32[8,4]{1,0}, s32[])")
    (Array(dtype='f32', dims=(8, 4), layout='1,0'), Array(dtype='s32', dims=(), layout=''))
    """
    stack: list[list[Shape]] = [[]]
    buffers: list[bool] = []
    for part in _SHAPE_PART.finditer(text):
        if part[4]:
            stack.append([])
            buffers.append(part[4] == "b(")
        elif part[5] and len(stack) > 1:
            inside = stack.pop()
            # A buffer is an array in memory that may be changed.
            stack[-1].append(inside[0] if buffers.pop() and len(inside) == 1 else tuple(inside))
        elif part[1]:
            stack[-1].append(_make_array(part[1], part[2], part[3] or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise NotationError(f"HLO shape {text[:120]!r}: give one array, as in f32[8,4]{{1,0}}, or a tuple of shapes")
    return stack[0][0]


@lru_cache(maxsize=1 << 14)  # A module has few shapes, and names each of them often.
def _make_array(dtype: str, dims: str, layout: str) -> Array:
    try:
        return Array(
            dtype, tuple(int(size.lstrip("<= ")) for size in dims.split(",") if size.strip()), "".join(layout.split())
        )
    except ValueError:
        raise NotationError(
            f"HLO shape {dtype}[{dims[:80]}]: its sizes are not numbers, or not bounded; write f32[8,4]"
        ) from None
