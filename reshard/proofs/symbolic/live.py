"""What a program has live on a device while it runs, and what it receives, in elements.

The buffers are counted from the program's own instructions, as `runtime.on_numpy` allocates them, on the fullest
device. Every buffer contains each free digit whole. At other sizes it is therefore its size here, divided by the
product of the free sizes here and multiplied by their product there.

What is received comes from `lower.program_traffic`, which only adds up the lists of an instruction; that the lists
themselves are right is proved elsewhere (`element_sources`, `transfers`, `slots`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import (
    AllGather,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Program,
    ReduceScatter,
)
from reshard.lower.program_traffic import instruction_traffic
from reshard.proofs.symbolic.correctness import Outline, devices_after
from reshard.proofs.symbolic.formulas import ByFormula

Buffers = tuple[int, ...]
"""The elements of each buffer that is live at one moment."""


class Wire(NamedTuple):
    """Elements that the worst device receives, and collective calls."""

    elements: int
    launches: int


def moments(program: Program | Outline) -> list[list[Buffers]]:
    """Per step, the buffers that are live together on a device at the moments that may be the fullest."""
    source = math.prod(program.tile_shape)
    steps: list[list[Buffers]] = []
    before = source
    home = here = frozenset(program.devices)
    for number, (instruction, shape) in enumerate(zip(program.instructions, program.tile_shapes, strict=True)):
        there = devices_after(instruction, here)
        elsewhere = home.isdisjoint(here) and home.isdisjoint(there)
        retained = (source,) if program.keep_source and number and not elsewhere else ()
        if here.isdisjoint(there):
            steps.append([*_ends(instruction, (*retained, before), math.prod(shape))])
        else:
            steps.append([(*retained, *m) for m in _moments(instruction, before, math.prod(shape))])
        before, here = math.prod(shape), there
    return steps


def _ends(instruction: Instruction | ByFormula, before: Buffers, after: int) -> Iterator[Buffers]:
    """The buffers of senders, and those of receivers, where no device is both."""
    staged = _staged(instruction) if isinstance(instruction, Exchange) and instruction.staged else 0
    yield (*before, staged)
    yield (after, staged)


def wire(instruction: Instruction | ByFormula, before: int) -> Wire:
    """What the worst device receives in an instruction, from its lists or from the formula that stands for them."""
    if isinstance(instruction, ByFormula):
        return Wire(instruction.rounds * instruction.message, instruction.rounds)
    traffic = instruction_traffic(instruction, before)
    return Wire(traffic.received, traffic.launches)


def _moments(instruction: Instruction | ByFormula, before: int, after: int) -> Iterator[Buffers]:
    """The whole tiles stay live while a step runs part by part; of parts that overlap, there are two."""
    if isinstance(instruction, InParts):
        parts = before // instruction.take.parts, after // instruction.put.parts
        tiles = (before,) if instruction.in_place else (before, after)
        next_one = parts if instruction.overlap else ()
        yield from ((*tiles, *next_one, *m) for m in _plain(instruction.each, *parts))
        return
    yield from _plain(instruction, before, after)


def _plain(instruction: Instruction | ByFormula, before: int, after: int) -> Iterator[Buffers]:
    rule = _MOMENTS.get(type(instruction))
    return rule(instruction, before, after) if rule else iter([(before, after)])


def _all_gather(step: AllGather, before: int, after: int) -> Iterator[Buffers]:
    """Blocks arrive in the result itself, or in a buffer beside it."""
    yield (before, step.receive.elements) if step.receive.in_place else (before, step.receive.elements, after)


def _all_to_all(step: AllToAll, before: int, after: int) -> Iterator[Buffers]:
    """The packed blocks are freed before the arrived ones are unpacked."""
    packed = () if step.send.in_place else (step.send.elements,)
    yield (before, *packed, step.receive.elements)
    yield (before, step.receive.elements) if step.receive.in_place else (before, step.receive.elements, after)


def _reduce_scatter(step: ReduceScatter, before: int, after: int) -> Iterator[Buffers]:
    packed = () if step.send.in_place else (step.send.elements,)
    yield (before, *packed, after)


def _exchange(step: Exchange, before: int, after: int) -> Iterator[Buffers]:
    staged = _staged(step) if step.staged else 0
    yield (before, after, staged) if staged else (before, after)


def _by_formula(step: ByFormula, before: int, after: int) -> Iterator[Buffers]:
    yield (before, after, 2 * step.message) if step.staged else (before, after)


def _exchange_in_place(step: ExchangeInPlace, before: int, after: int) -> Iterator[Buffers]:
    longest = max((t.length for transfers in step.rounds for t in transfers), default=0)
    buffer = max(step.slot * step.slots, before)
    yield (buffer, 2 * longest) if step.staged and longest else (buffer,)


_MOMENTS: dict[type[Any], Callable[[Any, int, int], Iterator[Buffers]]] = {
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    ReduceScatter: _reduce_scatter,
    Exchange: _exchange,
    ByFormula: _by_formula,
    ExchangeInPlace: _exchange_in_place,
}
"""The kinds of instruction that have buffers beside the operand and the result."""


def _staged(step: Exchange) -> int:
    """The messages that one device sends and receives in a round, for the round and the device that have the most."""
    most = 0
    for transfers in step.rounds:
        busy = Counter[int]()
        for t in transfers:
            if t.sender != t.receiver:
                busy[t.sender] += t.elements
                busy[t.receiver] += t.elements
        most = max(most, *busy.values(), 0)
    return most
