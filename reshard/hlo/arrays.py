"""The large arrays that a device makes while a module runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from reshard.hlo.module import Computation, Instruction, Module
from reshard.hlo.shapes import Array

_VIEWS = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier")
_PASSES_ON = ("parameter", "while", "conditional", "call", *_VIEWS)


class ArrayDefinition(NamedTuple):
    """The largest array of an instruction's result, with the instruction and its computation."""

    array: Array
    instruction: Instruction
    computation: Computation


def largest(module: Module, fused: bool = False) -> ArrayDefinition | None:
    """The largest array, by elements, that an instruction yields; None if there is none.

    Arguments count. Intermediate values of a fusion are never stored as a whole and count only if `fused`. Views do
    not count: on TPU, a bitcast may reinterpret an array as bytes and so have more elements.

    >>> from reshard.hlo import parse
    >>> module = parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = f32[8]{0} parameter(0)
    ...   %wide = f32[8,64]{1,0} broadcast(%p), dimensions={0}
    ...   ROOT %sum = f32[64]{0} custom-call(%wide)
    ... }''')
    >>> largest(module).array.dims, largest(module).instruction.name
    ((8, 64), 'wide')
    """
    definitions = (one for one in _definitions(module, fused) if one.instruction.opcode not in _VIEWS)
    return max(definitions, key=lambda one: one.array.elements, default=None)


def large_arrays(module: Module, elements: int) -> tuple[ArrayDefinition, ...]:
    """The instructions that make an array of at least `elements` elements, in the order of the text.

    Views, tuples, arguments and -done instructions make no array. Intermediate values of a fusion are not stored.

    >>> from reshard.hlo import parse
    >>> module = parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = f32[8]{0} parameter(0)
    ...   %wide = f32[8,64]{1,0} broadcast(%p), dimensions={0}
    ...   ROOT %sum = f32[64]{0} custom-call(%wide)
    ... }''')
    >>> [definition.instruction.name for definition in large_arrays(module, 64)]
    ['wide', 'sum']
    """
    return tuple(
        one for one in _definitions(module) if one.array.elements >= elements and _makes_array(one.instruction.opcode)
    )


def _makes_array(opcode: str) -> bool:
    return opcode not in _PASSES_ON and not opcode.endswith(("-done", "-update"))


def _definitions(module: Module, fused: bool = False) -> Iterator[ArrayDefinition]:
    """The largest array of each instruction that yields any."""
    for computation in _computations(module, fused):
        for instruction in computation.instructions:
            if results := instruction.results:
                yield ArrayDefinition(max(results, key=lambda array: array.elements), instruction, computation)


def _computations(module: Module, fused: bool) -> Iterator[Computation]:
    """The computations of a module, without the bodies of fusions unless `fused`."""
    bodies: set[str] = set()
    if not fused:
        for computation in module.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode == "fusion":
                    bodies.update(instruction.called)
    yield from (computation for name, computation in module.computations.items() if name not in bodies)
