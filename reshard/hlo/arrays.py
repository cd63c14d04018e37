"""The arrays that a device holds while a module runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from reshard.hlo.text import Array, Computation, Instruction, Module

_VIEWS = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier")  # a bitcast counts otherwise
_PASSES_ON = ("parameter", "while", "conditional", "call", *_VIEWS)


class Held(NamedTuple):
    """An array, the largest of its instruction's result, and where it is made."""

    array: Array
    instruction: Instruction
    computation: Computation


def largest(module: Module, fused: bool = False) -> Held | None:
    """The largest array, by elements, that any instruction yields, arguments included; None if there is no array.

    What stands inside of fusions is never stored as a whole, and counts only if `fused`. Views do not count: on TPU
    they may be of bytes.
    """
    found = (held for held in _held(module, fused) if held.instruction.opcode not in _VIEWS)
    return max(found, key=lambda held: held.array.elements, default=None)


def large_arrays(module: Module, elements: int) -> tuple[Held, ...]:
    """Each instruction that makes an array of at least so many elements, in the order of the text.

    Views, tuples, arguments and -done instructions make none, and what stands inside of fusions is not stored.
    """
    return tuple(
        held for held in _held(module) if held.array.elements >= elements and _makes_array(held.instruction.opcode)
    )


def _makes_array(opcode: str) -> bool:
    return opcode not in _PASSES_ON and not opcode.endswith(("-done", "-update"))


def _held(module: Module, fused: bool = False) -> Iterator[Held]:
    """The largest array of each instruction that yields any."""
    for computation in _computations(module, fused):
        for instruction in computation.instructions:
            if results := instruction.results:
                yield Held(max(results, key=lambda array: array.elements), instruction, computation)


def _computations(module: Module, fused: bool) -> Iterator[Computation]:
    inside: set[str] = set()
    if not fused:
        for computation in module.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode == "fusion":
                    inside.update(instruction.called)
    yield from (computation for name, computation in module.computations.items() if name not in inside)
