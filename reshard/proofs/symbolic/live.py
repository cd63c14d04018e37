"""What lives on a device while a program runs, from its own buffers, as multiples of the sizes that vary.

The figures are those of `runtime.on_numpy`'s allocations, of the fullest device. Every buffer has each free
digit whole, so it is its size here divided by the product of the free sizes, times that product for
any others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Plain,
    Program,
    ReduceScatter,
)
from reshard.lower.traffic import instruction_traffic
from reshard.proofs.symbolic.formulas import ByFormula
from reshard.proofs.symbolic.correctness import Outline

Buffers = tuple[int, ...]
"""Elements of all that lives at one moment."""


class Wire(NamedTuple):
    """Elements that the worst device receives, and collective calls."""

    elements: int
    launches: int


def moments(program: Program | Outline) -> list[list[Buffers]]:
    """Per step, the buffers that live together on a device at the moments that may be the fullest."""
    source = math.prod(program.tile_shape)
    found: list[list[Buffers]] = []
    before = source
    for number, (instruction, shape) in enumerate(zip(program.instructions, program.tile_shapes, strict=True)):
        retained = (source,) if program.keep_source and number else ()
        found.append([(*retained, *m) for m in _moments(instruction, before, math.prod(shape))])
        before = math.prod(shape)
    return found


def wire(instruction: Instruction | ByFormula, before: int) -> Wire:
    """What the worst device receives in an instruction, from its lists or from the formula that stands for them."""
    if isinstance(instruction, ByFormula):
        return Wire(instruction.rounds * instruction.message, instruction.rounds)
    traffic = instruction_traffic(instruction, before)
    return Wire(traffic.received, traffic.launches)


def _moments(instruction: Instruction | ByFormula, before: int, after: int) -> Iterator[Buffers]:
    if isinstance(instruction, InParts):
        parts = before // instruction.take.parts, after // instruction.put.parts
        yield from ((before, after, *m) for m in _plain(instruction.each, *parts))
        return
    yield from _plain(instruction, before, after)


def _plain(instruction: Plain | ByFormula, before: int, after: int) -> Iterator[Buffers]:
    match instruction:
        case AllGather():
            yield from _arriving(instruction.receive.elements, instruction.receive.in_place, before, after)
        case AllToAll():
            packed = () if instruction.send.in_place else (instruction.send.elements,)
            yield (before, *packed, instruction.receive.elements)
            yield from _arriving(instruction.receive.elements, instruction.receive.in_place, before, after)
        case ReduceScatter():
            packed = () if instruction.send.in_place else (instruction.send.elements,)
            yield (before, *packed, after)
        case Exchange():
            staged = _staged(instruction) if instruction.staged else ()
            yield (before, after, *staged)
        case ByFormula():
            yield (before, after, *((2 * instruction.message,) if instruction.staged else ()))
        case ExchangeInPlace():
            longest = max((t.length for turn in instruction.rounds for t in turn), default=0)
            staged = (2 * longest,) if instruction.staged and longest else ()
            yield (max(instruction.slot * instruction.slots, before), *staged)
        case _:
            yield (before, after)


def _arriving(elements: int, in_place: bool, before: int, after: int) -> Iterator[Buffers]:
    """Blocks arrive in the result itself, or in a buffer beside it."""
    yield (before, elements) if in_place else (before, elements, after)


def _staged(step: Exchange) -> Buffers:
    """The messages that one device sends and receives in a round, in the round and on the device that has most."""
    most = 0
    for turn in step.rounds:
        busy = Counter[int]()
        for t in turn:
            if t.sender != t.receiver:
                busy[t.sender] += t.elements
                busy[t.receiver] += t.elements
        most = max(most, *busy.values(), 0)
    return (most,) if most else ()
