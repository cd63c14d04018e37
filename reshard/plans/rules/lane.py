"""The lane of a step: which devices exchange blocks, and in which order. Steps of one lane can share a launch.

    mesh <x=4>      w: all_gather f32[{x}4, 8] -> f32[16, 8]      block of 32 elements to each other device
                    b: all_gather f32[{x}2]    -> f32[8]          block of 2, to the same devices in the same order
                    together: one all_gather of 34 elements, w's block and b's one after the other

Shapes and sizes do not matter to a lane, only the groups of devices, the order of their members, and the dtype. An
exchange or a permute without a common refinement has a lane that it shares with equal steps alone; to other devices or
through a view, one that it shares with those that have the same senders and receivers. A step that is cut, in parts, in
place or relayed has none. What a step does with a tile where it is, such as to take or to put a part, it does beside
the others, which then need not be alike in it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.figures import exchange_figures
from reshard.geometry.holders import Tile, tiles
from reshard.geometry.messages import exchange_messages
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.geometry.view_layouts import settle_windows
from reshard.plans.rules import tile_view
from reshard.plans.rules.collectives import CROSSING, check_step, count_buffers
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.types.layout import Layout
from reshard.types.view import View

_MOST_LISTED = 1 << 10
"""Pairs of devices: between more, only equal exchanges share a launch."""


class Lane(NamedTuple):
    """What steps that share a launch have in common, and this step's part of the buffers, in elements.

    `packed` elements are copied to the buffer that leaves a device, `arrived` is what the buffer that arrives has room
    for; in an exchange, whose rounds need less, whole tiles, and through a view, messages.
    """

    key: Hashable
    packed: int
    arrived: int


@lru_cache(maxsize=8192)
def step_lane(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Lane | None:
    """The lane of a step; None for one that shares its launches with no other.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> w, b = (step_lane("all_gather", *(Layout.parse(end, mesh) for end in ends))
    ...         for ends in (("f32[{x}4, 8]", "f32[16, 8]"), ("f32[{x}2]", "f32[8]")))
    >>> w.key == b.key, w.packed, b.packed, b.arrived
    (True, 32, 2, 8)
    """
    cost, view = check_step(kind, operand, result, mode), mode.view
    if mode != PLAIN and mode != StepMode(view=view):
        return None
    where = (kind, operand.mesh.size, operand.mesh.device_ids, operand.dtype, result.dtype)
    if not cost.launches:
        return Lane(where, 0, 0)
    r = refine(operand, result) if view is None else None
    if kind in CROSSING:
        both = math.prod(operand.tile_shape), math.prod(result.tile_shape)
        if view is not None:  # Of a fused array, a message has what its view takes: at most one each way in a round.
            message = exchange_figures(operand, result, view).message
            both = message, message * (count_buffers(operand, result, mode) - 1)
        return Lane((where, *_who_sends_to_whom(kind, (operand, result, view), r)), *both)
    if r is None:
        return None
    sent, arrived = tile_view.before(operand, r), tile_view.after(result, r)
    if kind == "all_reduce":
        return Lane((*where, r.reduced, operand.reduction), sent.elements, arrived.elements)
    # The order of a group's members, with their numbers; partial sub-axes that stay partial do not matter.
    order = tile_view.gather_order(r) if kind == "all_gather" else tile_view.scatter_order(r)
    radix = {stride: d.radix for d in (*r.sliced, *r.gathered) for stride in (d.src, d.dst) if stride is not None}
    factors = tuple((stride, radix[stride]) for stride in order)
    reduction = operand.reduction if kind == "reduce_scatter" else None
    return Lane((*where, factors, reduction), sent.elements, arrived.elements)


def _who_sends_to_whom(
    kind: str, ends: tuple[Layout, Layout, View | None], r: Refinement | None
) -> tuple[Hashable, ...]:
    """What decides the senders and receivers of a permute or an exchange; its two ends where nothing less does."""
    operand, result, view = ends
    if view is not None or not one_set(operand.mesh, result.mesh):
        if kind == "permute":
            # Who sends to whom depends on which tiles are the same, and on nothing else.
            numbers: dict[Tile, int] = {}
            held = [numbers.setdefault(tile, len(numbers)) for end in (operand, result) for tile in tiles(end).values()]
            return result.mesh.devices, tuple(held)
        if operand.mesh.size * result.mesh.size <= _MOST_LISTED:
            alike = None if view is None else settle_windows(operand, result, view)
            messages = exchange_messages(operand, result, alike)
            return result.mesh.devices, tuple((m.sender, m.receiver) for m in messages if m.sender != m.receiver)
    if r is None or not (r.exact if kind == "exchange" else operand.partial_as(result)):
        return ends
    # The refined digits that change holders; an exchange goes over them in their order, round by round.
    changed = [(d.radix, d.src, d.dst) for d in r.digits if d.src != d.dst]
    return (tuple(changed) if kind == "exchange" else frozenset(changed),)
