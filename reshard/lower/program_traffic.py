"""Who sends how much to whom: the one fold over lowered instructions.

    f32[{x}2, 4] -> f32[4, {x}2] on <x=2>, one all_to_all

    sender  receiver  elements
         0         1         4
         1         0         4

Everything that reports the traffic of a plan without running it reads it here: the traffic matrix that is drawn,
and the received elements that the prover compares with the bound. The runtimes do not: each counts what it really
receives (`runtime.account`), and the tests compare that independent measurement with this fold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.groups import Groups
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    CastTiles,
    Exchange,
    InParts,
    Instruction,
    Permute,
    Program,
    PutPart,
    ReduceScatter,
    Reorder,
    Slice,
    SplitSum,
    TakePart,
    dtype_after,
    wire_dtype,
)
from reshard.types import dtypes
from reshard.types.reductions import all_reduce_elements

Flow = tuple[int, int, int]
"""(sender, receiver, elements), device ids."""


@dataclass(frozen=True)
class InstructionTraffic:
    """The traffic of one instruction.

    A collective is described by its `groups`: every member receives `share` elements, in parts as equal as possible
    from all the others. Everything else lists its `flows`. Both happen `repeats` times, once for each part.
    """

    launches: int
    groups: Groups = ()
    share: int = 0
    flows: tuple[Flow, ...] = ()
    repeats: int = 1

    @property
    def received(self) -> int:
        """Elements that the busiest device receives."""
        sums: Counter[int] = Counter()
        for _, receiver, elements in self.flows:
            sums[receiver] += elements
        return max(self.share, *sums.values(), 0) * self.repeats

    def __iter__(self) -> Iterator[Flow]:
        """The flows between different devices; a group's are listed pair by pair."""
        for sender, receiver, elements in self.flows:
            yield sender, receiver, elements * self.repeats
        for group in self.groups if self.share else ():
            # The first of the others, in turn, have the elements that are left over.
            each, rest = divmod(self.share, len(group) - 1)
            for at, receiver in enumerate(group):
                for after in range(1, len(group)):
                    yield group[(at + after) % len(group)], receiver, (each + (after <= rest)) * self.repeats


class TrafficMatrix(NamedTuple):
    """What a program moves: elements by (sender, receiver), never from a device to itself.

    Where a program casts, elements of the wider dtype count as several of the narrower one.
    """

    devices: tuple[int, ...]
    dtype: str
    elements: Counter[tuple[int, int]]
    launches: int

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each device receives."""
        return self._bytes_by(1)

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each device sends."""
        return self._bytes_by(0)

    @property
    def busiest_receiver(self) -> int:
        """The device that receives the most bytes; the first of several in the mesh's order."""
        received = self.received
        return max(received, key=received.__getitem__)

    def nbytes(self, elements: int) -> int:
        """The bytes of a number of elements."""
        return dtypes.nbytes(elements, self.dtype)

    def _bytes_by(self, end: int) -> dict[int, int]:
        sums = dict.fromkeys(self.devices, 0)
        for pair, elements in self.elements.items():
            sums[pair[end]] += elements
        return {device: self.nbytes(elements) for device, elements in sums.items()}


def program_traffic(program: Program) -> TrafficMatrix:
    """The traffic of all instructions of a program together.

    It lists every pair of devices that communicate, so its size is quadratic in the mesh.

    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> both = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> matrix = program_traffic(lower_plan(plan(*both)))
    >>> dict(matrix.elements), matrix.received
    ({(1, 0): 4, (0, 1): 4}, {0: 16, 1: 16})
    """
    elements: Counter[tuple[int, int]] = Counter()
    launches = 0
    tile = math.prod(program.tile_shape)
    dtype = program.dtype
    narrow = dtype
    for instruction in program.instructions:
        narrow = min(narrow, dtype_after(instruction, dtype), key=dtypes.bits)
    for instruction, shape in zip(program.instructions, program.tile_shapes, strict=True):
        moved = instruction_traffic(instruction, tile)
        before, dtype = dtype, dtype_after(instruction, dtype)
        wire = wire_dtype(before, dtype)
        launches += moved.launches
        for sender, receiver, count in moved:
            elements[sender, receiver] += count * dtypes.bits(wire) // dtypes.bits(narrow)
        tile = math.prod(shape)
    devices = dict.fromkeys([*program.devices, *(device for pair in elements for device in pair)])
    return TrafficMatrix(tuple(devices), narrow, elements, launches)


def instruction_traffic(instruction: Instruction, tile: int) -> InstructionTraffic:
    """The traffic of one instruction, given the number of elements in a tile before it."""
    match instruction:
        case AllGather(groups=groups):
            return InstructionTraffic(1, groups, (len(groups[0]) - 1) * tile)
        case AllToAll(groups=groups, send=send) | ReduceScatter(groups=groups, send=send):
            return InstructionTraffic(1, groups, (len(groups[0]) - 1) * math.prod(send.block_shape))
        case AllReduce(groups=groups):
            return InstructionTraffic(1, groups, all_reduce_elements(tile, len(groups[0])))
        case InParts(each=each, take=take):
            one = instruction_traffic(each, tile // take.parts)
            return replace(one, launches=one.launches * take.parts, repeats=take.parts)
        case Permute(pairs=pairs):
            launches, flows = 1, [(sender, receiver, tile) for sender, receiver in pairs]
        case Exchange(rounds=rounds):
            launches = instruction.launches
            flows = [(t.sender, t.receiver, t.elements) for turn in rounds for t in turn]
        case ExchangeInPlace(rounds=rounds):
            launches, flows = len(rounds), [(t.sender, t.receiver, t.length) for turn in rounds for t in turn]
        case Slice() | SplitSum() | Reorder() | TakePart() | PutPart() | CastTiles():
            launches, flows = 0, []  # Every device makes its tile of its own.
    return InstructionTraffic(launches, flows=tuple(flow for flow in flows if flow[0] != flow[1] and flow[2]))
