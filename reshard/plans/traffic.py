"""What each device sends and receives in the steps of a plan between two sets of devices, and the busiest one.

    trainer <fsdp=4> -> server <tp=2, rep=4>, f32[{fsdp}4, 8] -> f32[16, {tp}4]

    step         sent by a trainer's device     received, sent by a server's device
    exchange     128 B                          64 B     0 B
    all_gather                                  192 B    192 B
    in all       128 B                          256 B    192 B

All devices of a collective send and receive as much as the busiest one; in an exchange, each is counted by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from reshard.geometry.exchange_stats import ByDevice
from reshard.geometry.figures import received_by_device, sent_by_device
from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.step import Step


class BusiestBytes(NamedTuple):
    """Bytes that the busiest device receives, and that the busiest device sends, in all steps together."""

    received: int
    sent: int


def count_busiest_bytes(steps: Sequence[Step]) -> BusiestBytes:
    """The busiest devices of a plan's steps."""
    if all(one_set(s.operand.mesh, s.result.mesh) or disjoint(s.operand.mesh, s.result.mesh) for s in steps):
        return _count_by_side(steps)
    received, sent = Counter[int](), Counter[int]()
    for step in steps:
        received.update(_count_received(step))
        sent.update(_count_sent(step))
    return BusiestBytes(max(received.values(), default=0), max(sent.values(), default=0))


def _count_by_side(steps: Sequence[Step]) -> BusiestBytes:
    """Between disjoint sets, what one step loads each device of a side with adds up, and no device is listed."""
    received, sent = Counter[bool](), Counter[bool]()
    crossed = False
    for step in steps:
        for side in {crossed, crossed or step.mode.relay}:  # A relay's second turn is on the other side.
            sent[side] += step.sent_bytes
        crossed = crossed or not one_set(step.operand.mesh, step.result.mesh)
        received[crossed] += step.received_bytes
    return BusiestBytes(max(received.values(), default=0), max(sent.values(), default=0))


def _count_received(step: Step) -> dict[int, int]:
    if step.kind != "exchange" or _is_even_load(step):
        return dict.fromkeys(step.result.mesh.devices, step.received_bytes)
    return _in_bytes(step, received_by_device(step.operand, step.result, step.mode.view))


def _count_sent(step: Step) -> dict[int, int]:
    if step.mode.relay:
        return dict.fromkeys({*step.operand.mesh.devices, *step.result.mesh.devices}, step.sent_bytes)
    if step.kind != "exchange" or _is_even_load(step):
        return dict.fromkeys(step.operand.mesh.devices, step.sent_bytes)
    return _in_bytes(step, sent_by_device(step.operand, step.result, step.mode.view))


def _is_even_load(step: Step) -> bool:
    """Whether the busiest device of an exchange stands for all."""
    return step.mode.view is None and one_set(step.operand.mesh, step.result.mesh)


def _in_bytes(step: Step, each: ByDevice) -> dict[int, int]:
    return {device: step.operand.nbytes(count) for device, count in (each.listed or {}).items()}
