"""What moves between which devices: a fold over the lowered program, as the reference runtime runs it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from reshard.errors import ReshardError
from reshard.lower import Program, lower
from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.groups import Groups
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    ReduceScatter,
    Slice,
)
from reshard.types import dtypes
from reshard.types.plan import Plan

MOST_DEVICES = 512
MOST_TRANSFERS = 1 << 18

Pairs = Counter[tuple[int, int]]
"""Elements by (sender, receiver), device ids."""


class Moved(NamedTuple):
    """What a plan moves: elements by (sender, receiver), no device with itself, of this dtype."""

    devices: tuple[int, ...]
    dtype: str
    elements: Pairs

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each device receives."""
        return self._sums(1)

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each device sends."""
        return self._sums(0)

    def _sums(self, end: int) -> dict[int, int]:
        sums = dict.fromkeys(self.devices, 0)
        for pair, count in self.elements.items():
            sums[pair[end]] += count
        return {device: self.nbytes(count) for device, count in sums.items()}

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements."""
        return dtypes.nbytes(elements, self.dtype)


def moved(plan: Plan) -> Moved:
    """Who sends how much to whom in all steps together.

    Raises `ReshardError` for more devices or transfers than can be counted one by one.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> dict(moved(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh))).elements)
    {(0, 1): 4, (1, 0): 4}
    """
    _check_size(plan)
    return _fold(lower(plan))


def _check_size(plan: Plan) -> None:
    size = plan.source.mesh.size
    if size > MOST_DEVICES:
        raise ReshardError(
            f"{size} devices on mesh {plan.source.mesh} are too many for a matrix of who sends to whom (at most "
            f"{MOST_DEVICES}); draw the same plan on smaller axes, or use draw('memory')"
        )
    if size * plan.launches > MOST_TRANSFERS:
        raise ReshardError(
            f"{plan.launches} launches on {size} devices are too many to count one by one (at most "
            f"{MOST_TRANSFERS // size} on so many devices); plan with a larger budget, or use draw('memory')"
        )


def _fold(program: Program) -> Moved:
    found: Pairs = Counter()
    before = math.prod(program.tile_shape)
    for instruction, shape in zip(program.instructions, program.tile_shapes, strict=True):
        for sender, receiver, count in _transfers(instruction, before):
            if sender != receiver and count:
                found[sender, receiver] += count
        before = math.prod(shape)
    return Moved(program.devices, program.dtype, found)


Transfers = Iterator[tuple[int, int, int]]
"""(sender, receiver, elements); a device with itself counts for nothing."""


def _transfers(instruction: Instruction, tile: int) -> Transfers:
    """What an instruction moves, given the elements of a tile before it."""
    return _OF[type(instruction)](instruction, tile)


def _among(groups: Groups, block: int) -> Transfers:
    for group in groups:
        for sender, receiver in itertools.permutations(group, 2):
            yield sender, receiver, block


def _slice(step: Slice, tile: int) -> Transfers:
    return iter(())


def _all_gather(step: AllGather, tile: int) -> Transfers:
    return _among(step.groups, math.prod(step.receive.block_shape))


def _blocks(step: AllToAll | ReduceScatter, tile: int) -> Transfers:
    return _among(step.groups, math.prod(step.send.block_shape))


def _all_reduce(step: AllReduce, tile: int) -> Transfers:
    """As a reduce-scatter and an all-gather: 2 (f - 1) / f of a tile, in equal parts from all the others."""
    for group in step.groups:
        others = len(group) - 1
        total = -(-2 * others * tile // len(group))
        for at, receiver in enumerate(group):
            for number in range(others):
                share = total // others + (number < total % others)
                yield group[(at + number + 1) % len(group)], receiver, share


def _permute(step: Permute, tile: int) -> Transfers:
    for sender, receiver in step.pairs:
        yield sender, receiver, tile


def _exchange(step: Exchange, tile: int) -> Transfers:
    for transfer in itertools.chain(*step.rounds):
        yield transfer.sender, transfer.receiver, transfer.elements


def _exchange_in_place(step: ExchangeInPlace, tile: int) -> Transfers:
    for transfer in itertools.chain(*step.rounds):
        yield transfer.sender, transfer.receiver, transfer.length


def _in_parts(step: InParts, tile: int) -> Transfers:
    for sender, receiver, count in _transfers(step.each, tile // step.take.parts):
        yield sender, receiver, count * step.take.parts


_OF: dict[type[Instruction], Callable[[Any, int], Transfers]] = {
    Slice: _slice,
    AllGather: _all_gather,
    AllToAll: _blocks,
    ReduceScatter: _blocks,
    AllReduce: _all_reduce,
    Permute: _permute,
    Exchange: _exchange,
    ExchangeInPlace: _exchange_in_place,
    InParts: _in_parts,
}
