"""Integers that depend only on the device: the offsets at which the partitioner slices.

    %id = u32[] partition-id()                  0, 1, 2, 3 on four devices
    %two = u32[] constant(2)
    %at = u32[] multiply(%id, %two)             0, 2, 4, 6
    %d = f32[8,2] dynamic-slice(%g, %zero, %at)

A small interpreter evaluates such instructions for all devices at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.doctor.dataflow.flow import Flow, HloValue, loop_body
from reshard.hlo import Instruction

Numbers = NDArray[np.int64]


class Opaque(Enum):
    """A value that depends only on the device but is not in the text: XLA leaves long constants out."""

    UNKNOWN = "unknown"


UNKNOWN = Opaque.UNKNOWN
Scalar = Numbers | Opaque | None
"""The numbers of a value for all devices; `UNKNOWN` if they are not in the text, None if they depend on data."""

_MOST = 1 << 22  # elements, over all devices, that are worth computing
_LITERAL = re.compile(r"-?\d+|true|false")
_BOOLEANS = {"true": 1, "false": 0}
_INTEGRAL = re.compile(r"[su]\d+|pred")


def _divide_numbers(a: Numbers, b: Numbers) -> Any:
    return np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b)))


def _take_remainder(a: Numbers, b: Numbers) -> Any:
    return np.where(b == 0, 0, np.fmod(a, np.where(b == 0, 1, b)))


def _clamp_numbers(low: Numbers, a: Numbers, high: Numbers) -> Any:
    return np.clip(a, low, high)


def _select_numbers(predicate: Numbers, a: Numbers, b: Numbers) -> Any:
    return np.where(predicate.reshape(predicate.shape + (1,) * (a.ndim - predicate.ndim)) != 0, a, b)


_ELEMENTWISE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": np.add,
        "subtract": np.subtract,
        "multiply": np.multiply,
        "divide": _divide_numbers,
        "remainder": _take_remainder,
        "minimum": np.minimum,
        "maximum": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shift-left": np.left_shift,
        "shift-right-logical": np.right_shift,
        "shift-right-arithmetic": np.right_shift,
        "negate": np.negative,
        "not": np.logical_not,
        "clamp": _clamp_numbers,
        "select": _select_numbers,
        **dict.fromkeys(("convert", "copy", "bitcast", "reshape"), np.asarray),
    }
)
_COMPARE: Mapping[str, Callable[[Numbers, Numbers], Any]] = MappingProxyType(
    {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}
)


def evaluate_elementwise(instruction: Instruction, numbers: list[Numbers]) -> Numbers | None:
    """The numbers of an elementwise instruction, from those of its operands; None for any other instruction."""
    if instruction.opcode == "compare":
        return np.asarray(_COMPARE[instruction.attributes.get("direction", "EQ")](*numbers)).astype(np.int64)
    elementwise = _ELEMENTWISE.get(instruction.opcode)
    return None if elementwise is None else np.asarray(elementwise(*numbers)).astype(np.int64, copy=False)


class Scalars:
    """The integers of a module by device: arrays of shape (devices, *shape)."""

    def __init__(self, flow: Flow, devices: int) -> None:
        self.flow = flow
        self.devices = devices
        self._replicas = flow.module.replica_count or 1
        self._known: dict[HloValue, Scalar] = {}

    def at(self, value: HloValue) -> Scalar:
        """The numbers of a value, for every device."""
        value = self.flow.origin(value)
        if value not in self._known:
            self._known[value] = None  # a value that depends on itself, through a loop, depends on data
            self._known[value] = self._evaluate(value)
        return self._known[value]

    def _evaluate(self, value: HloValue) -> Scalar:
        array = value.array
        if array is None or not _INTEGRAL.fullmatch(array.dtype) or array.elements * self.devices > _MOST:
            return None
        numbers = self._compute(value, array.dims)
        if not isinstance(numbers, np.ndarray):
            return numbers
        if numbers.size != array.elements * self.devices:
            return None  # a damaged text
        if array.dtype.startswith("u") and (numbers < 0).any():
            numbers = numbers % (1 << int(array.dtype[1:]))  # as unsigned numbers wrap around
        return numbers.reshape(self.devices, *array.dims)

    def _compute(self, value: HloValue, dims: tuple[int, ...]) -> Scalar:
        devices = np.arange(self.devices, dtype=np.int64)
        partitions = max(1, self.devices // self._replicas)
        match value.opcode:
            case "partition-id":
                return devices % partitions
            case "replica-id":
                return devices // partitions
            case "constant":
                text = value.instruction.literal
                if "..." in text:
                    return UNKNOWN
                found = _LITERAL.findall(text)
                # Longer ones do not fit into 64 bits, and are nobody's offset.
                numbers = [_BOOLEANS[one] if one in _BOOLEANS else int(one) for one in found if len(one) < 20]
                if len(numbers) != math.prod(dims) or not all(-(1 << 63) <= one < 1 << 63 for one in numbers):
                    return None
                return np.broadcast_to(np.array(numbers, np.int64), (self.devices, len(numbers)))
            case "iota":
                at = int(value.instruction.attributes.get("iota_dimension", "0"))
                line = np.arange(dims[at] if dims else 1, dtype=np.int64)
                shape = [-1 if dim == at else 1 for dim in range(len(dims))]
                return np.broadcast_to(line.reshape(shape), (self.devices, *dims))
            case "parameter":
                outer = self._find_outer(value)
                return None if outer is None else self.at(outer)
            case _:
                return self._apply(value, dims)

    def _apply(self, value: HloValue, dims: tuple[int, ...]) -> Scalar:
        """The result of an instruction, by the numbers of its operands."""
        operands = [self.at(operand) for operand in self.flow.operands(value)]
        if not operands or any(operand is None for operand in operands):
            return None
        numbers = [operand for operand in operands if isinstance(operand, np.ndarray)]
        if len(numbers) < len(operands):
            return UNKNOWN
        if (result := evaluate_elementwise(value.instruction, numbers)) is not None:
            return result
        attributes = value.instruction.attributes
        match value.opcode:
            case "broadcast":
                kept = {int(at) for at in re.findall(r"\d+", attributes.get("dimensions", ""))}
                shape = [size if at in kept else 1 for at, size in enumerate(dims)]
                return np.broadcast_to(numbers[0].reshape(self.devices, *shape), (self.devices, *dims))
            case "dynamic-slice":
                table, *offsets = numbers
                if not len(offsets) == table.ndim - 1 == len(dims):
                    return None  # a damaged text
                rows: list[Numbers] = []
                for device, row in enumerate(table):
                    starts = [int(offset[device].reshape(())) for offset in offsets]
                    # HLO moves a slice that would reach beyond the array back into it.
                    inside = [
                        max(0, min(at, have - size)) for at, have, size in zip(starts, row.shape, dims, strict=True)
                    ]
                    rows.append(row[tuple(slice(at, at + size) for at, size in zip(inside, dims, strict=True))])
                return np.stack(rows)
            case _:
                return None

    def _find_outer(self, value: HloValue) -> HloValue | None:
        """The value outside that a parameter of a branch has, or one of a loop that passes it on unchanged."""
        if value.scope.caller is None or value.scope.caller.instruction.opcode != "while" or not value.path:
            return self.flow.branch_operand(value)
        scope, outer = value.scope.caller
        body = next((one for one in self.flow.regions if one.computation.name == loop_body(outer)), None)
        if body is None or body.computation.root is None:
            return None
        yielded = self.flow.origin(HloValue(body, body.computation.root.name, value.path))
        unchanged = yielded.scope is body and yielded.opcode == "parameter" and yielded.path == value.path
        return HloValue(scope, outer.operands[0], value.path) if unchanged else None
