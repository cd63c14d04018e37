"""An exchange of boxes as one device runs it, without the messages of the others.

Turn k sends to the k-th next device and receives from the k-th previous one, which both ends know without colouring the
messages of all devices. The boxes of a message stay the product of the runs of each dim. A message that is cut into
chunks takes as many turns, one after another, before those of the next device:

    chunks of 2 elements     turn 1           turn 1           turn 2
    device 0                 0:2 to 1         2:3 to 1         0:2 to 2

Between two sets of devices, the devices of both are counted together, by ascending id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.blocks import cut_block
from reshard.geometry.figures import exchange_figures
from reshard.geometry.messages import Message, messages_of
from reshard.geometry.refine import refine
from reshard.geometry.relay import relay_messages
from reshard.geometry.remesh import one_set
from reshard.lower.to_mpi.blocks import Block, blocks_of_products, unravel_block
from reshard.lower.to_mpi.direct import messages_across
from reshard.plans.plan import Step
from reshard.types.layout import Layout

Blocks = tuple[Block, ...]

Sides = tuple[list[tuple[int, Blocks]], list[tuple[int, Blocks]]]
"""The peers and blocks of the messages that a device sends, and of those that it receives."""


class OwnBoxes(NamedTuple):
    """A device's local copies, its messages in the order of the turns, and those of the second turn of a relay."""

    local: Blocks
    messages: Sides
    passed: Sides = ([], [])


def is_closed(step: Step, device: int) -> bool:
    """Whether the messages of a device follow from its own tiles: boxes that go straight from tile to tile."""
    mode, before, after = step.mode, step.operand, step.result
    if step.kind != "exchange" or mode.in_place or mode.parts > 1 or mode.view is not None:
        return False
    if not one_set(before.mesh, after.mesh):
        return True
    r = refine(before, after)
    return device in before.mesh.devices and (r is None or not r.exact)


def own_boxes(step: Step, device: int) -> OwnBoxes:
    """What a device copies, sends and receives in an exchange of boxes."""
    before, after, chunk = step.operand, step.result, step.mode.chunk
    if step.mode.relay:
        # The plan has listed the messages of all devices.
        first, second = (
            [message for message in turn if device in message[:2]] for turn in relay_messages(before, after)
        )
    else:
        across = not one_set(before.mesh, after.mesh)
        first, second = [*(messages_across if across else messages_of)(before, after, device)], []
    largest = exchange_figures(before, after, relayed=step.mode.relay).message
    cap = None if chunk is None or chunk >= largest else chunk
    numbers = number_devices(before, after)
    shapes = before.tile_shape, after.tile_shape
    kept = (blocks_of_products(each.products, *shapes) for each in first if each.sender == each.receiver)
    # What a relay passes on lies in tiles of the result at both ends.
    passed = after.tile_shape, after.tile_shape
    return OwnBoxes(
        tuple(itertools.chain.from_iterable(kept)),
        _split_sides(first, device, numbers, cap, shapes),
        _split_sides(second, device, numbers, cap, passed),
    )


class _Turn(NamedTuple):
    """A message or one chunk of it; turns are taken in ascending order."""

    turn: int
    chunk: int
    peer: int
    blocks: Blocks


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of a sender's tile and of a receiver's."""


def _split_sides(
    messages: Iterable[Message], device: int, place: Mapping[int, int], cap: int | None, shapes: Shapes
) -> Sides:
    sent: list[_Turn] = []
    received: list[_Turn] = []
    for message in messages:
        sender, receiver, _ = message
        if sender != receiver:
            into, peer = (sent, receiver) if sender == device else (received, sender)
            turn = (place[receiver] - place[sender]) % len(place)
            into += [_Turn(turn, at, peer, blocks) for at, blocks in enumerate(_cut_message(message, cap, shapes))]
    return _in_order(sent), _in_order(received)


def _in_order(turns: list[_Turn]) -> list[tuple[int, Blocks]]:
    return [(each.peer, each.blocks) for each in sorted(turns, key=lambda each: each[:2])]


@lru_cache(maxsize=64)
def number_devices(before: Layout, after: Layout) -> Mapping[int, int]:
    """The number of each device among those of both layouts, by which turns are counted.

    >>> from reshard.types import Mesh
    >>> here, there = Mesh(x=2), Mesh({"y": 2}, device_ids=[7, 1])
    >>> dict(number_devices(Layout.parse("f32[4]", here), Layout.parse("f32[4]", there)))
    {0: 0, 1: 1, 7: 2}
    """
    devices = before.mesh.devices
    if not one_set(before.mesh, after.mesh):
        devices = tuple(sorted({*devices, *after.mesh.devices}))
    return {device: at for at, device in enumerate(devices)}


def _cut_message(message: Message, cap: int | None, shapes: Shapes) -> Iterator[Blocks]:
    """The blocks of a message, or of one chunk after another."""
    if cap is None:
        yield tuple(blocks_of_products(message.products, *shapes))
        return
    for block in message.blocks:
        yield from ((unravel_block(piece, *shapes),) for piece in cut_block(block, cap))
