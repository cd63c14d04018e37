"""An exchange of boxes as one device runs it, without the messages of the others.

Turn k sends to the k-th next device and receives from the k-th previous one, which both ends know without colouring the
messages of all devices. The boxes of a message stay the product of the runs of each dim.
"""

from __future__ import annotations

import itertools

from reshard.lower.to_mpi.blocks import Block, of_runs
from reshard.types.pair.device_sets import one_set
from reshard.types.pair.own_messages import messages_of
from reshard.types.pair.refine import refine
from reshard.types.plan import Step
from reshard.types.rules.exchange import exchange_size

Sides = tuple[list[tuple[int, tuple[Block, ...]]], list[tuple[int, tuple[Block, ...]]]]
"""The peers and blocks of the messages that a device sends, and of those that it receives."""


def is_closed(step: Step, device: int) -> bool:
    """Whether the messages of a device follow from its own tiles: boxes, not cut, among one set of devices."""
    mode, before, after = step.mode, step.operand, step.result
    if step.kind != "exchange" or mode.in_place or mode.relay or mode.parts > 1:
        return False
    if not one_set(before.mesh, after.mesh) or device not in before.mesh.devices:
        return False
    r = refine(before, after)
    if r is not None and r.exact:
        return False
    return mode.chunk is None or mode.chunk >= exchange_size(before, after).message


def own_boxes(step: Step, device: int) -> tuple[tuple[Block, ...], Sides]:
    """The local copies of a device, and its messages in the order of the turns."""
    mesh = step.operand.mesh
    local: list[Block] = []
    sent: dict[int, tuple[int, tuple[Block, ...]]] = {}
    received: dict[int, tuple[int, tuple[Block, ...]]] = {}
    for sender, receiver, products in messages_of(step.operand, step.result, device):
        blocks = tuple(itertools.chain.from_iterable(of_runs(runs) for runs in products))
        turn = (mesh.position(receiver) - mesh.position(sender)) % mesh.size
        if sender == receiver:
            local += blocks
        elif sender == device:
            sent[turn] = (receiver, blocks)
        else:
            received[turn] = (sender, blocks)
    return tuple(local), ([sent[at] for at in sorted(sent)], [received[at] for at in sorted(received)])
