"""Integers of a module that depend on nothing but the device: the offsets at which a partition slices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.doctor.flow import Flow, Value

Numbers = NDArray[np.int64]


class Opaque(Enum):
    """A value that depends on the device alone, but is not known: XLA's text leaves long constants out."""

    UNKNOWN = "unknown"


UNKNOWN = Opaque.UNKNOWN
Result = Numbers | Opaque | None

_MOST = 1 << 22  # Elements, over all devices, of what is worth computing.
_LITERAL = re.compile(r"-?\d+|true|false")
_WORDS = {"true": 1, "false": 0}
_INTEGRAL = re.compile(r"[su]\d+|pred")


def _divided(a: Numbers, b: Numbers) -> Any:
    return np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b)))


def _rest(a: Numbers, b: Numbers) -> Any:
    return np.where(b == 0, 0, np.fmod(a, np.where(b == 0, 1, b)))


_Binary = Callable[[Numbers, Numbers], Any]
_BINARY: Mapping[str, _Binary] = MappingProxyType(
    {
        "add": np.add,
        "subtract": np.subtract,
        "multiply": np.multiply,
        "divide": _divided,
        "remainder": _rest,
        "minimum": np.minimum,
        "maximum": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "shift-left": np.left_shift,
        "shift-right-logical": np.right_shift,
        "shift-right-arithmetic": np.right_shift,
    }
)
_COMPARE: Mapping[str, _Binary] = MappingProxyType(
    {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}
)


class Scalars:
    """The integers of a module by device: an array of shape (devices, *shape), None for what depends on data."""

    def __init__(self, flow: Flow, devices: int) -> None:
        self.flow = flow
        self.devices = devices
        self._replicas = flow.module.replica_count or 1
        self._known: dict[Value, Result] = {}

    def at(self, value: Value) -> Result:
        """The numbers of a value for each device; `UNKNOWN` if they depend on the device alone but are not written."""
        value = self.flow.origin(value)
        if value not in self._known:
            self._known[value] = None  # what depends on itself, through a loop, depends on more than the device
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: Value) -> Result:
        array = value.array
        if array is None or not _INTEGRAL.fullmatch(array.dtype) or array.elements * self.devices > _MOST:
            return None
        found = self._computed(value)
        if not isinstance(found, np.ndarray):
            return found
        if array.dtype.startswith("u") and (found < 0).any():
            found = found % (1 << int(array.dtype[1:]))
        return found.reshape(self.devices, *array.dims)

    def _computed(self, value: Value) -> Result:
        devices = np.arange(self.devices, dtype=np.int64)
        partitions = max(1, self.devices // self._replicas)
        match value.opcode:
            case "partition-id":
                return devices % partitions
            case "replica-id":
                return devices // partitions
            case "constant":
                return self._constant(value)
            case "iota":
                return self._iota(value)
            case "parameter":
                outer = self._invariant(value)
                return None if outer is None else self.at(outer)
            case _:
                return self._applied(value, [self.at(operand) for operand in self.flow.operands(value)])

    def _applied(self, value: Value, operands: list[Result]) -> Result:
        if not operands or any(operand is None for operand in operands):
            return None
        known = [operand for operand in operands if isinstance(operand, np.ndarray)]
        if len(known) < len(operands):
            return UNKNOWN
        if (binary := _BINARY.get(value.opcode)) is not None:
            return np.asarray(binary(known[0], known[1])).astype(np.int64)
        match value.opcode:
            case "convert" | "copy" | "bitcast" | "reshape":
                return known[0]
            case "broadcast":
                return self._broadcast(value, known[0])
            case "clamp":
                return np.clip(known[1], known[0], known[2])
            case "negate":
                return -known[0]
            case "not":
                return (known[0] == 0).astype(np.int64)
            case "compare":
                compare = _COMPARE[value.instruction.attributes.get("direction", "EQ")]
                return np.asarray(compare(known[0], known[1])).astype(np.int64)
            case "select":
                picked = known[0].reshape(known[0].shape + (1,) * (known[1].ndim - known[0].ndim))
                return np.where(picked != 0, known[1], known[2])
            case "dynamic-slice":
                return self._sliced(value, known)
            case _:
                return None

    def _constant(self, value: Value) -> Result:
        text = value.instruction.rest.partition(")")[0]
        if "..." in text:
            return UNKNOWN
        words = _LITERAL.findall(text)
        numbers = [_WORDS[word] if word in _WORDS else int(word) for word in words]
        if value.array is None or len(numbers) != value.array.elements:
            return None
        return np.broadcast_to(np.array(numbers, np.int64), (self.devices, len(numbers)))

    def _iota(self, value: Value) -> Result:
        dims = () if value.array is None else value.array.dims
        at = int(value.instruction.attributes.get("iota_dimension", "0"))
        line = np.arange(dims[at] if dims else 1, dtype=np.int64)
        shape = [-1 if dim == at else 1 for dim in range(len(dims))]
        return np.broadcast_to(line.reshape(shape), (self.devices, *dims))

    def _broadcast(self, value: Value, operand: Numbers) -> Result:
        dims = () if value.array is None else value.array.dims
        kept = {int(at) for at in re.findall(r"\d+", value.instruction.attributes.get("dimensions", ""))}
        shape = [size if at in kept else 1 for at, size in enumerate(dims)]
        return np.broadcast_to(operand.reshape(self.devices, *shape), (self.devices, *dims))

    def _sliced(self, value: Value, operands: list[Numbers]) -> Result:
        dims = () if value.array is None else value.array.dims
        table, *offsets = operands
        rows: list[Numbers] = []
        for device, row in enumerate(table):
            starts = [int(offset[device].reshape(())) for offset in offsets]
            clamped = [max(0, min(at, have - size)) for at, have, size in zip(starts, row.shape, dims, strict=True)]
            rows.append(row[tuple(slice(at, at + size) for at, size in zip(clamped, dims, strict=True))])
        return np.stack(rows)

    def _invariant(self, value: Value) -> Value | None:
        """What a loop's or a branch's parameter is outside, where the loop passes it on unchanged."""
        caller = value.scope.caller
        if caller is None:
            return None
        outer = caller.instruction
        if outer.opcode == "conditional" and value.scope.computation.name in outer.called:
            branch = outer.called.index(value.scope.computation.name)
            return Value(caller.scope, outer.operands[branch + 1], value.path)
        if outer.opcode == "while" and self._kept(value):
            return Value(caller.scope, outer.operands[0], value.path)
        return None

    def _kept(self, value: Value) -> bool:
        """Whether the loop's body yields this part of its parameter unchanged."""
        body = self.flow.body(value.scope)
        if body is None or body.computation.root is None or not value.path:
            return False
        yielded = self.flow.origin(Value(body, body.computation.root.name, value.path))
        return yielded.scope is body and yielded.opcode == "parameter" and yielded.path == value.path
