"""How often the body of a while loop runs.

XLA writes it into `backend_config` on CPU and GPU. On TPU it does not; there it is inferred from the form that a
counted loop has: the condition compares element k of the loop's tuple with a constant, the tuple starts with a
constant at k, and the body adds a constant to it. The constants may have been copied, or be carried in the tuple.
"""

from __future__ import annotations

import re

from reshard.hlo.text import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
_INTEGER = re.compile(r"\s*(-?\d+)\s*\)")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_INCLUSIVE = {"LT": 0, "LE": 1, "GT": 0, "GE": 1}


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often the body of `loop`, a while in computation `inside`, runs; None where that is not known."""
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    return _Loop(module, inside, loop).count()


class _Loop:
    """A while loop: its tuple at the start, its condition and its body."""

    def __init__(self, module: Module, inside: Computation, loop: Instruction) -> None:
        self.inside = inside
        self.condition, self.body = (
            module.computation(loop.attributes.get(key, "").lstrip("%")) for key in ("condition", "body")
        )
        self.start = inside.by_name.get(loop.operands[0]) if loop.operands else None

    def count(self) -> int | None:
        root = _origin(self.condition, self.condition.root)
        if root is None or root.opcode != "compare" or len(root.operands) != 2:
            return None
        direction = root.attributes.get("direction", "")
        left, right = (_origin(self.condition, self.condition.by_name.get(name)) for name in root.operands)
        if direction not in _INCLUSIVE or left is None or right is None:
            return None
        return self._steps(left, right, direction)

    def _steps(self, counter: Instruction, bound: Instruction, direction: str) -> int | None:
        at = _index(self.condition, counter)
        limit = self._constant(self.condition, bound)
        if at is None or limit is None:
            return None
        first, step = self._initial(at), self._step(at)
        if first is None or not step or (step > 0) != (direction in ("LT", "LE")):
            return None
        ahead = (limit - first if step > 0 else first - limit) + _INCLUSIVE[direction]
        return max(0, -(-ahead // abs(step)))

    def _constant(self, computation: Computation, instruction: Instruction | None) -> int | None:
        """The integer that an instruction of the condition or the body always yields."""
        found = _origin(computation, instruction)
        value = _integer(found)
        at = _index(computation, found)
        return self._initial(at) if value is None and at is not None and self._kept(at) else value

    def _initial(self, at: int) -> int | None:
        return _integer(_origin(self.inside, self._element(self.inside, self.start, at)))

    def _next(self, at: int) -> Instruction | None:
        return _origin(self.body, self._element(self.body, self.body.root, at))

    def _kept(self, at: int) -> bool:
        """Whether the body passes the element on unchanged."""
        return _index(self.body, self._next(at)) == at

    def _step(self, at: int) -> int | None:
        """What the body adds to the element."""
        found = self._next(at)
        if found is None or found.opcode not in ("add", "subtract") or len(found.operands) != 2:
            return None
        left, right = (_origin(self.body, self.body.by_name.get(name)) for name in found.operands)
        if _index(self.body, left) != at:
            left, right = right, left if found.opcode == "add" else None
        step = self._constant(self.body, right)
        if _index(self.body, left) != at or step is None:
            return None
        return step if found.opcode == "add" else -step

    @staticmethod
    def _element(computation: Computation, found: Instruction | None, at: int) -> Instruction | None:
        if found is None or found.opcode != "tuple" or at >= len(found.operands):
            return None
        return computation.by_name.get(found.operands[at])


def _origin(computation: Computation, found: Instruction | None) -> Instruction | None:
    """The instruction whose value this one has, through copies."""
    while found is not None and found.opcode in _SAME and found.operands:
        found = computation.by_name.get(found.operands[0])
    return found


def _integer(found: Instruction | None) -> int | None:
    literal = _INTEGER.match(found.rest) if found is not None and found.opcode == "constant" else None
    return int(literal[1]) if literal else None


def _index(computation: Computation, found: Instruction | None) -> int | None:
    """Which element of the computation's parameter this is."""
    if found is None or found.opcode != "get-tuple-element":
        return None
    source = computation.by_name.get(found.operands[0]) if found.operands else None
    return int(found.attributes["index"]) if source is not None and source.opcode == "parameter" else None
