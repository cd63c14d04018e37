"""A compiled module: computations, their instructions, and the arrays that these yield.

It has one form, whatever it is read from: `text` reads what XLA prints, `proto_reader` what XLA serializes. Names are
without their `%`, and attributes are spelled as XLA prints them.

Most instructions of a module are never looked at, and a constant may be megabytes long. So an instruction has an
`InstructionSource`, which reads its shape, its operands and its attributes when they are first asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

from reshard.errors import NotationError
from reshard.hlo.frames import Tables

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
        return -(-self.elements * _bits_of_dtype(self.dtype) // 8)


Shape = Array | tuple["Shape", ...]
"""What an instruction yields: an array or a tuple of shapes."""


def flatten_shape(shape: Shape) -> tuple[Array, ...]:
    """The arrays of a shape, in order.

    >>> [array.dtype for array in flatten_shape(((Array("f32", (8,)),), Array("u32", ())))]
    ['f32', 'u32']
    """
    return (shape,) if isinstance(shape, Array) else tuple(array for part in shape for array in flatten_shape(part))


def _bits_of_dtype(dtype: str) -> int:
    """The size of an element, which HLO's names of types state."""
    if dtype in _NO_BYTES:
        return 0
    if dtype == "pred":
        return 8
    bits = re.search(r"\d+", dtype)
    if bits is None:
        raise NotationError(f"HLO dtype {dtype!r}: its size is not known; names like f32, bf16, s4 and pred state it")
    return int(bits[0])


class InstructionSource(Protocol):
    """What an instruction is read from, on first use."""

    @property
    def is_array(self) -> bool:
        """Whether the result is one array, and no tuple."""
        ...

    def shape(self) -> Shape:
        """The shape of the result."""
        ...

    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        ...

    def attributes(self) -> Mapping[str, str]:
        """The attributes by their names."""
        ...

    def called(self) -> tuple[str, ...]:
        """The names of the computations that the instruction calls."""
        ...

    def literal(self) -> str:
        """The text in the parentheses of an instruction without operands."""
        ...

    def metadata(self) -> str | None:
        """The text of the `metadata` attribute."""
        ...


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, its opcode, whether it is its computation's root, and where the rest is read from."""

    name: str
    opcode: str
    root: bool
    source: InstructionSource = field(repr=False)

    @cached_property
    def shape(self) -> Shape:
        """The shape of the result."""
        return self.source.shape()

    @property
    def is_array(self) -> bool:
        """Whether the result is one array, and no tuple."""
        return self.source.is_array

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
        return self.source.operands()

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """The attributes after the operands, values as text: `{"channel_id": "1", "dimensions": "{0}", ...}`."""
        return self.source.attributes()

    @property
    def sharding(self) -> str | None:
        """The text of the `sharding=` attribute, which `Layout.from_hlo` reads."""
        return self.attributes.get("sharding")

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that the instruction calls, in the order of its attributes."""
        return self.source.called()

    @cached_property
    def literal(self) -> str:
        """The numbers of a constant or the number of a parameter, as text; empty for other instructions.

        Numbers that the source leaves out are `...`.
        """
        return self.source.literal()

    @property
    def metadata(self) -> str | None:
        """The text of the `metadata` attribute; looked at more often than any other, so without reading the others."""
        return self.source.metadata()


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of the text, which is the schedule if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return MappingProxyType({instruction.name: instruction for instruction in self.instructions})

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """For each name, the instructions of this computation that take it as an operand."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return MappingProxyType({name: tuple(instructions) for name, instructions in users.items()})

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction that yields the result of the computation."""
        return next((instruction for instruction in reversed(self.instructions) if instruction.root), None)


@dataclass(frozen=True)
class Module:
    """A compiled program; `num_partitions` and `replica_count` are None if its header leaves them out.

    On several TPU slices, both count the devices of one slice.
    """

    name: str
    computations: Mapping[str, Computation] = field(repr=False)
    entry: Computation
    num_partitions: int | None
    replica_count: int | None
    frames: Tables = field(repr=False)

    @property
    def devices(self) -> int | None:
        """How many devices run the module, None if its header does not say."""
        if self.num_partitions is None and self.replica_count is None:
            return None
        return (self.num_partitions or 1) * (self.replica_count or 1)

    def computation(self, name: str) -> Computation:
        """Returns the computation of that name; raises `NotationError` if the text does not define it."""
        try:
            return self.computations[name]
        except KeyError:
            raise NotationError(
                f"HLO module {self.name}: an instruction calls {name}, which the text does not define; "
                "give the whole module"
            ) from None
