"""The lane of a step: which devices exchange blocks, and in which order. Steps of one lane can share a launch.

    mesh <x=4>      w: all_gather f32[{x}4, 8] -> f32[16, 8]      block of 32 elements to each other device
                    b: all_gather f32[{x}2]    -> f32[8]          block of 2, to the same devices in the same order
                    together: one all_gather of 34 elements, w's block and b's one after the other

Shapes and sizes do not matter to a lane, only the groups of devices, the order of their members, and the dtype. An
exchange or a permute without a common refinement has a lane that it shares with equal steps alone; to other devices,
one that it shares with those that have the same senders and receivers. A step that is cut,
in parts, in place or relayed has none, and neither has one through a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.holders import Tile, tiles
from reshard.geometry.messages import exchange_messages
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.plans.rules import tile_view
from reshard.plans.rules.collectives import RULES, check_step
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.plans.rules.tile_view import TileView
from reshard.types.layout import Layout


class Lane(NamedTuple):
    """What steps that share a launch have in common, and this step's part of the buffers, in elements.

    `packed` elements are copied to the buffer that leaves a device, `arrived` is what the buffer that arrives has room
    for; in an exchange, whose rounds need less, whole tiles.
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
    cost = check_step(kind, operand, result, mode)
    if mode != PLAIN or kind not in RULES:
        return None
    where = (kind, operand.mesh.size, operand.mesh.device_ids, operand.dtype)
    if not cost.launches:
        return Lane(where, 0, 0)
    refinement = refine(operand, result)
    if kind == "permute":
        return _permute_lane(where, operand, result, refinement)
    if kind == "exchange":
        return _exchange_lane(where, operand, result, refinement)
    form = _FORMS.get(kind)
    if form is None or refinement is None:
        return None
    order, sent, arrived = form(operand, result, refinement)
    return Lane((*where, order), sent.elements, arrived.elements)


_Form = tuple[Hashable, TileView, TileView]
"""The order of a group's members, and both tiles as the collective sees them."""


def _lane_factors(r: Refinement, order: tuple[int, ...]) -> Hashable:
    radix = {stride: d.radix for d in (*r.sliced, *r.gathered) for stride in (d.src, d.dst) if stride is not None}
    return tuple((stride, radix[stride]) for stride in order)


def _form_of_gather(operand: Layout, result: Layout, r: Refinement) -> _Form:
    order = tile_view.gather_order(r)
    return _lane_factors(r, order), tile_view.before(operand, r), tile_view.after(result, r, order)


def _form_of_all_to_all(operand: Layout, result: Layout, r: Refinement) -> _Form:
    order = tile_view.scatter_order(r)
    return _lane_factors(r, order), tile_view.before(operand, r, order), tile_view.after(result, r, order)


def _form_of_scatter(operand: Layout, result: Layout, r: Refinement) -> _Form:
    order = tile_view.scatter_order(r)
    form = (_lane_factors(r, order), operand.reduction)
    return form, tile_view.before(operand, r, order), tile_view.after(result, r)


def _form_of_all_reduce(operand: Layout, result: Layout, r: Refinement) -> _Form:
    whole = tile_view.before(operand, r)
    return (r.reduced, operand.reduction), whole, whole


_FORMS: dict[str, Callable[[Layout, Layout, Refinement], _Form]] = {
    "all_gather": _form_of_gather,
    "all_to_all": _form_of_all_to_all,
    "reduce_scatter": _form_of_scatter,
    "all_reduce": _form_of_all_reduce,
}


_MOST_LISTED = 1 << 10
"""Pairs of devices: between more, only equal exchanges share a launch."""


def _permute_lane(where: Hashable, operand: Layout, result: Layout, r: Refinement | None) -> Lane:
    elements = math.prod(operand.tile_shape)
    if not one_set(operand.mesh, result.mesh):
        numbers: dict[Tile, int] = {}  # Who sends to whom depends on which tiles are the same, and on nothing else.
        held = [numbers.setdefault(tile, len(numbers)) for end in (operand, result) for tile in tiles(end).values()]
        return Lane((where, result.mesh.devices, tuple(held)), elements, elements)
    if r is None or not operand.partial_as(result):
        return Lane((where, operand, result), elements, elements)
    return Lane((where, frozenset(_changed_digits(r))), elements, elements)


def _exchange_lane(where: Hashable, operand: Layout, result: Layout, r: Refinement | None) -> Lane:
    both = math.prod(operand.tile_shape), math.prod(result.tile_shape)
    if not one_set(operand.mesh, result.mesh) and operand.mesh.size * result.mesh.size <= _MOST_LISTED:
        ends = tuple((m.sender, m.receiver) for m in exchange_messages(operand, result) if m.sender != m.receiver)
        return Lane((where, result.mesh.devices, ends), *both)
    if r is None or not r.exact:
        return Lane((where, operand, result), *both)
    return Lane((where, tuple(_changed_digits(r))), *both)


def _changed_digits(r: Refinement) -> list[tuple[int, int | None, int | None]]:
    """The refined digits that change holders, in order: they alone decide who sends to whom."""
    return [(d.radix, d.src, d.dst) for d in r.digits if d.src != d.dst]
