"""Which values are equal: compilers compute one value again inside of every fusion that needs it."""

from __future__ import annotations

from reshard.doctor.flow import Flow, Value
from reshard.hlo import Instruction

_IGNORED = (
    "metadata",
    "frontend_attributes",
    "backend_config",
    "sharding",
    "calls",
    "channel_id",
    "control-predecessors",
)
_OWN = ("parameter", "while", "conditional", "custom-call", "rng", "rng-bit-generator", "infeed", "recv", "call")
_MOVES = ("bitcast", "reshape", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "constant")


class Numbering:
    """Numbers values so that those with equal numbers are equal, as copies in another memory layout are.

    What is computed outside of fusions is not compared, only what is moved: there, compilers leave nothing twice.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._known: dict[Value, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, value: Value) -> int:
        """The number of a value."""
        value = self.flow.origin(value)
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: Value) -> int:
        instruction = value.instruction
        if instruction.opcode == "copy":
            return self.of(Value(value.scope, instruction.operands[0]))
        return self._numbers.setdefault(self._key(value, instruction), len(self._numbers))

    def _key(self, value: Value, instruction: Instruction) -> tuple[object, ...]:
        opcode = instruction.opcode
        if opcode in _OWN or not (value.scope.opened or opcode in _MOVES):
            return value.scope, value.name, value.path
        kept = [(key, text) for key, text in instruction.attributes.items() if key not in _IGNORED]
        literal = instruction.rest.partition(")")[0] if instruction.opcode == "constant" else ""
        shape = tuple((array.dtype, array.dims) for array in instruction.arrays)
        operands = tuple(self.of(Value(value.scope, name)) for name in instruction.operands)
        return instruction.opcode, value.path, shape, literal, tuple(kept), operands
