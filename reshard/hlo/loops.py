"""The trip counts of while loops.

On CPU and GPU, XLA writes the trip count into `backend_config`. On TPU it does not; there it is inferred for loops of
the form

    start     %t = (s32[], f32[8]) tuple(%zero, %v)                                 counter: element 0, from 0
    condition %i = get-tuple-element(%p), index=0; compare(%i, %twelve), direction=LT       while it is below 12
    body      %next = add(%i, %one); tuple(%next, ...)                              by 1: 12 iterations

The three constants may have been copied, or be carried along as another element of the tuple.
"""

from __future__ import annotations

import re

from reshard.hlo.module import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)')
_INTEGER = re.compile(r"\s*(-?\d+)\s*\)")
_SAME = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done")
_INCLUSIVE = {"LT": 0, "LE": 1, "GT": 0, "GE": 1}


def trip_count(module: Module, inside: Computation, loop: Instruction) -> int | None:
    """How often the body of `loop`, a while in the computation `inside`, runs; None if that is not known.

    >>> from reshard.hlo import parse
    >>> module = parse('''HloModule m
    ...
    ... %condition {
    ...   %p = (s32[], f32[8]) parameter(0)
    ...   %i = s32[] get-tuple-element(%p), index=0
    ...   %twelve = s32[] constant(12)
    ...   ROOT %less = pred[] compare(%i, %twelve), direction=LT
    ... }
    ...
    ... %body {
    ...   %q = (s32[], f32[8]) parameter(0)
    ...   %j = s32[] get-tuple-element(%q), index=0
    ...   %v = f32[8] get-tuple-element(%q), index=1
    ...   %five = s32[] constant(5)
    ...   %next = s32[] add(%j, %five)
    ...   ROOT %t = (s32[], f32[8]) tuple(%next, %v)
    ... }
    ...
    ... ENTRY %main {
    ...   %zero = s32[] constant(0)
    ...   %v = f32[8] parameter(0)
    ...   %start = (s32[], f32[8]) tuple(%zero, %v)
    ...   ROOT %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
    ... }''')
    >>> trip_count(module, module.entry, module.entry.by_name["loop"])
    3
    """
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    return _Loop(module, inside, loop).count()


class _Loop:
    """A while loop: the tuple that it starts with, its condition and its body."""

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
        return self._iterations(left, right, direction)

    def _iterations(self, counter: Instruction, bound: Instruction, direction: str) -> int | None:
        """How often the counter steps until `compare(counter, bound)` fails."""
        at = _index(self.condition, counter)
        limit = self._constant(self.condition, bound)
        if at is None or limit is None:
            return None
        first, step = self._initial(at), self._step(at)
        if first is None or not step or (step > 0) != (direction in ("LT", "LE")):
            return None
        distance = (limit - first if step > 0 else first - limit) + _INCLUSIVE[direction]
        return max(0, -(-distance // abs(step)))

    def _constant(self, computation: Computation, instruction: Instruction | None) -> int | None:
        """The integer that an instruction of the condition or the body yields in every iteration."""
        origin = _origin(computation, instruction)
        value = _integer(origin)
        at = _index(computation, origin)
        return self._initial(at) if value is None and at is not None and self._is_invariant(at) else value

    def _initial(self, at: int) -> int | None:
        """The integer in element `at` of the tuple that the loop starts with."""
        return _integer(_origin(self.inside, self._element(self.inside, self.start, at)))

    def _next(self, at: int) -> Instruction | None:
        """The instruction that computes element `at` for the next iteration."""
        return _origin(self.body, self._element(self.body, self.body.root, at))

    def _is_invariant(self, at: int) -> bool:
        """Whether the body passes the element on unchanged."""
        return _index(self.body, self._next(at)) == at

    def _step(self, at: int) -> int | None:
        """The constant that the body adds to the element."""
        update = self._next(at)
        if update is None or update.opcode not in ("add", "subtract") or len(update.operands) != 2:
            return None
        left, right = (_origin(self.body, self.body.by_name.get(name)) for name in update.operands)
        if _index(self.body, left) != at:
            left, right = right, left if update.opcode == "add" else None
        step = self._constant(self.body, right)
        if _index(self.body, left) != at or step is None:
            return None
        return step if update.opcode == "add" else -step

    @staticmethod
    def _element(computation: Computation, made: Instruction | None, at: int) -> Instruction | None:
        """The instruction that a tuple has as its element `at`."""
        if made is None or made.opcode != "tuple" or at >= len(made.operands):
            return None
        return computation.by_name.get(made.operands[at])


def _origin(computation: Computation, instruction: Instruction | None) -> Instruction | None:
    """The instruction that made the value, behind any copies."""
    while instruction is not None and instruction.opcode in _SAME and instruction.operands:
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _integer(instruction: Instruction | None) -> int | None:
    """The value of an integer constant; None for any other instruction."""
    if instruction is None or instruction.opcode != "constant":
        return None
    literal = _INTEGER.match(instruction.rest)
    return int(literal[1]) if literal else None


def _index(computation: Computation, instruction: Instruction | None) -> int | None:
    """The element of the computation's parameter that an instruction reads; None if it reads none."""
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    source = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
    return int(instruction.attributes["index"]) if source is not None and source.opcode == "parameter" else None
