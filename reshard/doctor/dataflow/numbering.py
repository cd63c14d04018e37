"""Value numbering: equal values get equal numbers. Compilers recompute a value inside every fusion that needs it."""

from __future__ import annotations

from reshard.doctor.dataflow.flow import Flow, HloValue
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
_UNIQUE = ("parameter", "while", "conditional", "custom-call", "rng", "rng-bit-generator", "infeed", "recv", "call")
_MOVES = ("bitcast", "reshape", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "constant")


class Numbering:
    """Numbers values so that equal values get equal numbers; a copy in another memory layout is equal.

    Outside of fusions only moves are compared. There, compilers have removed duplicate computations.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._known: dict[HloValue, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, value: HloValue) -> int:
        """The number of a value."""
        value = self.flow.origin(value)
        if value not in self._known:
            self._known[value] = self._number(value)
        return self._known[value]

    def _number(self, value: HloValue) -> int:
        instruction = value.instruction
        if instruction.opcode == "copy":
            return self.of(HloValue(value.scope, instruction.operands[0]))
        return self._numbers.setdefault(self._key(value, instruction), len(self._numbers))

    def _key(self, value: HloValue, instruction: Instruction) -> tuple[object, ...]:
        """What makes two values equal: opcode, shape, attributes and the numbers of the operands."""
        opcode = instruction.opcode
        if opcode in _UNIQUE or not (value.scope.opened or opcode in _MOVES):
            return value.scope, value.name, value.path
        kept = [(key, text) for key, text in instruction.attributes.items() if key not in _IGNORED]
        literal = instruction.rest.partition(")")[0] if instruction.opcode == "constant" else ""
        shape = tuple((array.dtype, array.dims) for array in instruction.arrays)
        operands = tuple(self.of(HloValue(value.scope, name)) for name in instruction.operands)
        return instruction.opcode, value.path, shape, literal, tuple(kept), operands
