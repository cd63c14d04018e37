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
    AllReduce,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Plain,
    Program,
    ReduceScatter,
    Slice,
)
from reshard.proofs.symbolic.formulas import Written
from reshard.proofs.symbolic.symbolic import Outline
from reshard.types.reductions import all_reduce_elements

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


def wire(instruction: Instruction | Written, before: int) -> Wire:
    """What an instruction has the worst device receive, counted from its lists."""
    match instruction:
        case InParts():
            one = wire(instruction.each, before // instruction.take.parts)
            return Wire(one.elements * instruction.take.parts, one.launches * instruction.take.parts)
        case Slice():
            return Wire(0, 0)
        case Written():
            return Wire(instruction.rounds * instruction.message, instruction.rounds)
        case AllGather():
            return Wire((len(instruction.groups[0]) - 1) * before, 1)
        case AllToAll() | ReduceScatter():
            share = instruction.send.elements // instruction.send.count
            return Wire((len(instruction.groups[0]) - 1) * share, 1)
        case AllReduce():
            count = len(instruction.groups[0])
            return Wire(all_reduce_elements(before, count), 1)
        case Permute():
            return Wire(before if any(a != b for a, b in instruction.pairs) else 0, 1)
        case Exchange():
            got = Counter[int]()
            for t in (t for turn in instruction.rounds for t in turn if t.sender != t.receiver):
                got[t.receiver] += t.elements
        case ExchangeInPlace():
            got = Counter[int]()
            for t in (t for turn in instruction.rounds for t in turn):
                got[t.receiver] += t.length
    return Wire(max(got.values(), default=0), len(instruction.rounds))


def _moments(instruction: Instruction | Written, before: int, after: int) -> Iterator[Buffers]:
    if isinstance(instruction, InParts):
        parts = before // instruction.take.parts, after // instruction.put.parts
        yield from ((before, after, *m) for m in _plain(instruction.each, *parts))
        return
    yield from _plain(instruction, before, after)


def _plain(instruction: Plain | Written, before: int, after: int) -> Iterator[Buffers]:
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
        case Written():
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
