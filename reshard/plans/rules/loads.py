"""What each device receives and sends in a step, in bytes: the figures of `check_step`, device by device.

    mesh <x=2, y=2>, permute f32[{x}{y}2] -> f32[{y}{x}2]      devices 1 and 2 swap tiles, 0 and 3 receive nothing

In a collective all devices receive the same. In a permute, and in an exchange, some may have more to receive than
others, and between uneven layouts some have more to send.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from reshard.geometry import device_loads
from reshard.geometry.crossing import received_by_device, sent_by_device
from reshard.geometry.exchange_stats import MOST_DEVICES, ByDevice, lacking, moves
from reshard.geometry.refine import refine
from reshard.geometry.remesh import one_set
from reshard.geometry.view_messages import view_stats
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.cost import PLAIN, StepMode
from reshard.plans.rules.exchange import sent
from reshard.types.layout import Layout

_MOST_LISTED = 1 << 10
"""The messages of an uneven exchange are listed on meshes of at most this many devices."""


class Loads(NamedTuple):
    """The bytes that each device receives and sends."""

    received: ByDevice
    sent: ByDevice


@lru_cache(maxsize=8192)
def loads(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Loads:
    """What each device receives and sends in a well-typed step.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> loads("permute", Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)).received.listed
    {0: 0, 1: 8, 2: 8, 3: 0}
    """
    if kind == "permute":
        one = _permute(operand, result, mode)
        return Loads(one, one)
    if kind == "exchange" and not mode.relay:
        return _exchange(operand, result)
    received = ByDevice(check_step(kind, operand, result, mode).received)
    if kind == "exchange":
        return Loads(received, ByDevice(operand.nbytes(sent(operand, result, mode))))
    if kind == "view_exchange" and mode.view is not None:
        return Loads(received, ByDevice(operand.nbytes(view_stats(operand, result, mode.view).sent)))
    return Loads(received, received)


def _permute(operand: Layout, result: Layout, mode: StepMode) -> ByDevice:
    r = refine(operand, result)
    tile = check_step("permute", operand, result, mode).received
    if r is None or not operand.partial_as(result) or operand.mesh.size > MOST_DEVICES:
        return ByDevice(tile)
    return ByDevice(0, {d: tile * moves(operand.mesh, r, at) for at, d in enumerate(operand.mesh.devices)})


def _exchange(operand: Layout, result: Layout) -> Loads:
    """In an even exchange every round is a bijection of the devices, so each device sends what it receives."""
    if not one_set(operand.mesh, result.mesh):
        ends = received_by_device(operand, result), sent_by_device(operand, result)
        return Loads(*(ByDevice(0, each).scaled(operand) for each in ends))
    received = lacking(operand, result).scaled(operand)
    r = refine(operand, result)
    if (r is not None and r.exact) or operand.mesh.size > _MOST_LISTED:
        return Loads(received, received)
    return Loads(received, ByDevice(0, device_loads.sent_by_device(operand, result)).scaled(operand))
