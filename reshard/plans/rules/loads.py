"""What each device receives and sends in a step, in bytes: the figures of `check_step`, device by device.

    mesh <x=2, y=2>, permute f32[{x}{y}2] -> f32[{y}{x}2]      devices 1 and 2 swap tiles, 0 and 3 receive nothing

In a collective all devices receive the same. In a permute, and in an exchange, some may have more to receive than
others, and between uneven layouts some have more to send.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.exchange_stats import MOST_DEVICES, ByDevice, needs_other_digit
from reshard.geometry.figures import most_sent, received_by_device, sent_by_device
from reshard.geometry.refine import refine
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.cost import PLAIN, StepMode
from reshard.types.layout import Layout


class Loads(NamedTuple):
    """The bytes that each device receives and sends."""

    received: ByDevice
    sent: ByDevice


@lru_cache(maxsize=8192)
def step_loads(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Loads:
    """What each device receives and sends in a well-typed step.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> step_loads("permute", Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)).received.listed
    {0: 0, 1: 8, 2: 8, 3: 0}
    """
    if kind == "exchange" and not mode.relay:
        ends = received_by_device(operand, result, mode.view), sent_by_device(operand, result, mode.view)
        return Loads(*(each.scaled(operand) for each in ends))
    received = ByDevice(check_step(kind, operand, result, mode).received)
    if kind == "exchange":  # Of a relay, only the busiest device is known.
        return Loads(received, ByDevice(operand.nbytes(most_sent(operand, result, relayed=True))))
    if kind == "permute" and operand.partial_as(result) and operand.mesh.size <= MOST_DEVICES:
        r, tile = refine(operand, result), received.each
        if r is not None:
            devices = enumerate(operand.mesh.devices)
            received = ByDevice(0, {device: tile * needs_other_digit(operand.mesh, r, at) for at, device in devices})
    return Loads(received, received)
