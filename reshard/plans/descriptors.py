"""Plans as lists of transfers, for transports of others: NIXL, Mooncake, torch's `batch_isend_irecv`, Ray.

    f32[{x}4] on <x=2>  ->  f32[8] on <x=2>

    step  source  target  source offset  target offset  extents  strides
    0     0       0       0              0              (4,)     (1,) (1,)     a copy that stays on the device
    0     1       0       0              4              (4,)     (1,) (1,)
    ...

Offsets and strides count elements of flat row-major tiles, padding included. A step of a plan reads the tiles that the
step before it left, and every element that a tile needs is written once in each step. `reshard.verify` proves such a
list, whoever made it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from reshard.errors import PlanError, quoted
from reshard.geometry.blocks import Axis, Block, fuse_axes, merge_blocks
from reshard.geometry.messages import Message, exchange_messages, messages_of
from reshard.geometry.relay import read_from_result, relay_messages
from reshard.geometry.remesh import one_set
from reshard.plans.rules.view_steps import keeps_memory
from reshard.plans.step import Step
from reshard.types.json_fields import Fields
from reshard.types.layout import Layout
from reshard.types.view import View
from reshard.types.whole import MOST, read_items, whole


class Descriptor(NamedTuple):
    """A transfer as data: the elements that one device copies to another.

    They are nested loops over `extents`, outermost first, by strides in both flat tiles; offsets and strides count
    elements. `step` is the number of the turn, from 0.

    >>> Descriptor(0, 1, 0, 4, (2, 3), (6, 1), (3, 1)).elements
    6
    """

    source_device: int
    target_device: int
    source_offset: int
    target_offset: int
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    step: int = 0

    @property
    def elements(self) -> int:
        """How many elements it copies."""
        return math.prod(self.extents)


class Descriptors(tuple[Descriptor, ...]):
    """The transfers of a plan, in the order of its steps; `to_json` writes them for other programs."""

    __slots__ = ()

    def to_json(self) -> str:
        """The transfers as a JSON object, each as the list of its fields; `from_json` reads it back.

        >>> made = Descriptors([Descriptor(0, 1, 0, 4, (2,), (1,), (1,))])
        >>> made.to_json()
        '{"format": 1, "transfers": [[0, 1, 0, 4, [2], [1], [1], 0]]}'
        >>> Descriptors.from_json(made.to_json()) == made
        True
        """
        return json.dumps({"format": 1, "transfers": [list(each) for each in self]})

    @classmethod
    def from_json(cls, text: str) -> Descriptors:
        """Reads what `to_json` writes; raises `PlanError` for anything else."""
        fields = Fields.read(text, "a list of transfers")
        if fields.get("format", int) != 1:
            raise fields.error(f"format is {fields.data['format']}, not 1")
        return cls(map(read_transfer, cast("list[object]", fields.get("transfers", list))))

    def to_columns(self) -> dict[str, list[Any]]:
        """The transfers as columns by the names of the fields, for whatever makes tables: `pyarrow.table(...)`.

        `reshard.verify` reads such a table, from any library with Arrow's C interface.

        >>> Descriptors([Descriptor(0, 1, 0, 4, (2,), (1,), (1,))]).to_columns()["extents"]
        [(2,)]
        """
        return {field: [each[at] for each in self] for at, field in enumerate(Descriptor._fields)}


class DeviceStep(NamedTuple):
    """What one device does in a turn: what it sends and receives, and what it copies within its own memory.

    The last turn of a plan writes the target's tile, and one before it a tile of `room` elements, which the next reads.
    """

    sends: tuple[Descriptor, ...]
    receives: tuple[Descriptor, ...]
    copies: tuple[Descriptor, ...]
    last: bool

    @property
    def room(self) -> int:
        """How far into the flat tile it writes, in elements."""
        written = [each for each in (*self.receives, *self.copies) if each.elements]
        loops = [zip(each.extents, each.target_strides, strict=True) for each in written]
        reach = [sum((extent - 1) * stride for extent, stride in axes) for axes in loops]
        return max((each.target_offset + far + 1 for each, far in zip(written, reach, strict=True)), default=0)


def read_transfer(given: object) -> Descriptor:
    """A transfer from the list of its fields; raises `PlanError` for anything else.

    One list of (source, target) pairs may stand for the two lists of strides, and a length alone for a run of
    neighbours:

    >>> read_transfer((0, 1, 0, 4, [2, 3], [(6, 3), (1, 1)])) == Descriptor(0, 1, 0, 4, (2, 3), (6, 1), (3, 1))
    True
    >>> read_transfer((0, 1, 0, 4, 5)) == Descriptor(0, 1, 0, 4, (5,), (1,), (1,))
    True
    """
    fields = read_items(given) or ()
    if len(fields) == 5:
        fields = (*fields[:4], [fields[4]], [1], [1])
    elif len(fields) == 6:
        pairs = [read_items(pair) for pair in read_items(fields[5]) or ()]
        sides = [[pair[side] for pair in pairs if pair is not None and len(pair) == 2] for side in (0, 1)]
        fields = (*fields[:5], *sides)
    fields = fields if len(fields) in (7, 8) else (None,) * 7
    numbers = [whole(field) for field in (*fields[:4], *fields[7:])]
    least = (0, -MOST, -MOST)  # Strides may fall, extents may not.
    lists = [[whole(at, low) for at in read_items(field) or ()] for low, field in zip(least, fields[4:7], strict=True)]
    if None in (*numbers, *lists[0], *lists[1], *lists[2]) or len(set(map(len, lists))) > 1:
        raise PlanError(
            f"{quoted(given)} is not a transfer: give (source device, target device, source offset, target offset, "
            f"extents, source strides, target strides), in whole numbers and as many strides as extents"
        )
    made: Any = (*numbers[:4], *map(tuple, lists), *numbers[4:])
    return Descriptor(*made)


def describe_steps(
    ends: tuple[Layout, Layout, View | None], steps: Sequence[Step], device: int | None = None
) -> list[list[Descriptor]]:
    """The transfers of each turn of the steps from source to target; only those of one device, if it is given.

    Raises `PlanError` for steps that compute: sums and casts are not copies.
    """
    moves: list[Step] = []
    for step in steps:
        if step.kind in ("reduce_scatter", "all_reduce", "split_sum", "cast"):
            raise PlanError(
                f"step {step.kind} of {step.operand} -> {step.result} computes, and transfers only copy: describe each "
                f"other step by itself, rs.plan(step.operand, step.result).to_descriptors(); summands move as one more "
                f"dim, such as f32[{{x}}1, 16] -> f32[4, {{x}}4], and are added then"
            )
        if not keeps_memory(*step.judgement):  # Else the flat tile stays as it is, under other dims.
            moves.append(step)
    # What only copies within devices, before all messages or behind them, is done by these messages themselves.
    first = _map_local_step(moves[0], moves[1].operand.tile_shape, True) if len(moves) > 1 else None
    moves = moves[1:] if first else moves
    last = _map_local_step(moves[-1], moves[-2].result.tile_shape, False) if len(moves) > 1 else None
    turns = [turn for step in (moves[:-1] if last else moves) for turn in _list_step_turns(step, device)]
    # Where nothing moves, what a device needs is still copied into its tile of the target.
    turns = turns or [exchange_messages(*ends)]
    return [
        [
            made
            for each in messages
            if device in (None, each.sender, each.receiver)
            for made in _describe_message(each, at, first if at == 0 else None, last if at == len(turns) - 1 else None)
        ]
        for at, messages in enumerate(turns)
    ]


def _map_local_step(step: Step, between: tuple[int, ...], first: bool) -> dict[int, Block] | None:
    """Where the elements of the tile between a step that stays on devices and its neighbour are on the step's far side.

    One block for each device, of all of the tile, with axes that are whole dims of it: blocks that move, whose axes
    stay within a dim each, can then move from or to the far side at once. None for any other step.
    """
    if step.launches or not one_set(step.operand.mesh, step.result.mesh):
        return None
    maps: dict[int, Block] = {}
    strides = {math.prod(between[at:]) for at in range(len(between) + 1)}
    for message in exchange_messages(step.operand, step.result, step.mode.view, step.mode.holding):
        blocks = merge_blocks(map(fuse_axes, message.blocks))
        if len(blocks) != 1 or message.sender != message.receiver or message.receiver in maps:
            return None
        block = fuse_axes(blocks[0].reversed if first else blocks[0])
        if block.elements != math.prod(between) or not strides.issuperset(axis.src for axis in block.axes):
            return None
        maps[message.receiver] = Block(block.src, block.dst, tuple(sorted(block.axes, key=lambda axis: -axis.src)))
    between_mesh = step.result.mesh if first else step.operand.mesh
    return maps if len(maps) == between_mesh.size else None  # A device may have nothing but padding on the far side.


def _map_offset(maps: Block, offset: int) -> int:
    """The offset, or the stride, on the far side of a step that stays on its device."""
    mapped = 0
    for _, src, dst in maps.axes:
        mapped, offset = mapped + offset // src * dst, offset % src
    return mapped


def _map_block(block: Block, first: Block | None, last: Block | None) -> Block:
    if first is not None:
        axes = tuple([axis._replace(src=_map_offset(first, axis.src)) for axis in block.axes])
        block = Block(first.dst + _map_offset(first, block.src), block.dst, axes)
    if last is not None:
        axes = tuple([axis._replace(dst=_map_offset(last, axis.dst)) for axis in block.axes])
        block = Block(block.src, last.dst + _map_offset(last, block.dst), axes)
    return block


def _list_step_turns(step: Step, device: int | None) -> Iterator[Iterable[Message]]:
    operand, result, view, holding = step.operand, step.result, step.mode.view, step.mode.holding
    if step.mode.relay:
        first, second = relay_messages(operand, result, view, holding, gathers=step.mode.gathers)
        yield first
        # The second turn reads what the first left in tiles of the result, which stays where it is.
        kept = (Message(to, to, tuple(map(read_from_result, products))) for _, to, products in first)
        yield (*kept, *second)
    elif (
        device is not None
        and view is holding is None
        and one_set(operand.mesh, result.mesh)
        and device in operand.mesh.devices
    ):
        yield messages_of(operand, result, device)
    else:
        yield exchange_messages(operand, result, view, holding)


def _describe_message(
    message: Message, turn: int, first: Mapping[int, Block] | None, last: Mapping[int, Block] | None
) -> Iterator[Descriptor]:
    sender, receiver, _ = message
    blocks = list(message.blocks)
    if first is not None or last is not None:
        before, after = None if first is None else first[sender], None if last is None else last[receiver]
        blocks = [_map_block(block, before, after) for block in blocks]
    if len(blocks) > 1:
        blocks = merge_blocks(map(fuse_axes, blocks))
    for src, dst, axes in blocks:
        yield Descriptor(sender, receiver, src, dst, *_split_axes(axes), turn)


@lru_cache(maxsize=4096)
def _split_axes(axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    # Most transfers of a plan differ in their offsets alone.
    extents, sources, targets = zip(*axes, strict=True) if (axes := fuse_axes(Block(0, 0, axes)).axes) else ((), (), ())
    return extents, sources, targets


def split_by_role(turns: Sequence[Sequence[Descriptor]], device: int) -> Iterator[DeviceStep]:
    """The transfers of a device in each turn, by what it does in them."""
    for at, turn in enumerate(turns):
        copies = tuple(each for each in turn if each.source_device == each.target_device == device)
        others = [each for each in turn if each.source_device != each.target_device]
        sends = tuple(each for each in others if each.source_device == device)
        receives = tuple(each for each in others if each.target_device == device)
        yield DeviceStep(sends, receives, copies, at == len(turns) - 1)
