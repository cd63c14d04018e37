"""The lane of a step: which devices exchange blocks, and in which order. Steps of one lane can share a launch.

    mesh <x=4>      w: all_gather f32[{x}4, 8] -> f32[16, 8]      block of 32 elements to each other device
                    b: all_gather f32[{x}2]    -> f32[8]          block of 2, to the same devices in the same order
                    together: one all_gather of 34 elements, w's block and b's one after the other

Shapes and sizes do not matter to a lane, only the groups of devices, the order of their members, and the dtype. An
exchange among the same devices without a common refinement has a lane that it shares with equal steps alone, and so has
a permute. A step that is cut, in parts, in place or relayed has none, unless its relay gathers. What a step does with a
tile where it is, such as to take or to put a part, it does beside the others, which then need not be alike in it.

Exchanges to other devices, or through a view, share launches whoever sends to whom. Between two devices the messages of
all of them are one, and the rounds are those of all pairs together:

    a    0 -> 4, 1 -> 5, 2 -> 6         1 round
    b    1 -> 4, 2 -> 5, 3 -> 6         1 round
    both                                2 rounds: device 4 receives from 0 and 1
    c    0 -> 4, 2 -> 5                 2 rounds for all three

Their rounds are never more than those of each alone, together, and few where senders have few receivers, as they do in
relays that gather (`geometry.relay`): these share launches if they gather in the same groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.figures import exchange_figures
from reshard.geometry.holders import Tile, count_copies, tiles
from reshard.geometry.messages import exchange_messages
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.relay import (
    count_gathered_rounds,
    count_overlap,
    find_replica_groups,
    gathering_figures,
    list_given,
)
from reshard.geometry.remesh import one_set
from reshard.plans.rules import tile_view
from reshard.plans.rules.collectives import CROSSING, check_step, count_buffers
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.types.layout import Layout
from reshard.types.mesh import is_chain
from reshard.types.view import View

_MOST_LISTED = 1 << 10
"""Pairs of devices: between more, messages are listed only where tiles have one holder each."""

_MESSAGES_AT_ONCE = 4
"""Messages to other devices that buffers have room for, each way. With room for one, MPI, which sends to all peers at
once, cuts what goes to two of them into six messages; with room for all, a thousand arrays with hundreds of peers each
do not fit in one launch."""

_MOST_MESSAGES = 1 << 20
"""Messages of an exchange: of more, none is listed, and only equal exchanges share a launch."""


class Lane(NamedTuple):
    """What steps that share a launch have in common, and this step's part of the buffers, in elements.

    `packed` elements are copied to the buffer that leaves a device, `arrived` is what the buffer that arrives has room
    for; in an exchange, whose rounds need less, whole tiles, to other devices a few messages, and through a view one.
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
    if mode != PLAIN and mode != StepMode(view=view, relay=mode.gathers, gathers=mode.gathers):
        return None
    where = (kind, operand.mesh.size, operand.mesh.device_ids, operand.dtype, result.dtype)
    if not cost.launches:
        return Lane(where, 0, 0)
    r = refine(operand, result) if view is None else None
    if kind in CROSSING:
        both = math.prod(operand.tile_shape), math.prod(result.tile_shape)
        shares = kind == "exchange" and not mode.gathers and _shares_pairs(operand, result, view, cost.launches)
        if view is not None:  # A device has a message of an array at most, each way in a round.
            message = exchange_figures(operand, result, view).message
            both = message, message * (count_buffers(operand, result, mode) - 1)
        elif shares:
            room = _MESSAGES_AT_ONCE * exchange_figures(operand, result).message
            both = min(both[0], room), min(both[1], room)
        if mode.gathers:
            figures = gathering_figures(operand, result, view)
            # A device sends and receives a message, or has what it passes on and all else that its group gathers.
            both = figures.message, max(figures.message, figures.gathered - figures.message)
            # Devices are of one group where they do not differ in what holds digits, whatever the digits.
            ends = sorted(end for span in map(result.mesh.span, result.held) for end in span)
            groups = tuple(end for end in ends if ends.count(end) == 1) if is_chain(ends) else result
            return Lane((kind, *where[3:], result.mesh.size, result.mesh.device_ids, groups), *both)
        if shares:
            return Lane((kind, *where[3:]), *both)
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


def _shares_pairs(operand: Layout, result: Layout, view: View | None, rounds: int) -> bool:
    """Whether an exchange shares launches with others whoever sends to whom: its messages can be listed."""
    sizes = operand.mesh.size, result.mesh.size
    if view is None and one_set(operand.mesh, result.mesh):
        return False
    listed = view is None and count_copies(operand) == 1 and rounds * max(sizes) <= _MOST_MESSAGES
    return listed or math.prod(sizes) <= _MOST_LISTED


def list_pairs(operand: Layout, result: Layout, mode: StepMode) -> Iterator[tuple[Sequence[int], int]]:
    """Who sends to whom in an exchange to other devices, or through a view: senders, and the devices to which each of
    them sends, itself perhaps, as the bits of a number.

    >>> from reshard.types import Mesh
    >>> source = Layout.parse("f32[{x}4]", Mesh(x=3))
    >>> list(list_pairs(source, Layout.parse("f32[{tp}6]", Mesh(tp=2)), PLAIN))
    [([0], 1), ([1], 3), ([2], 2)]
    """
    if mode.view is None and count_copies(operand) == 1:
        groups = [sum(1 << device for device in members) for members in find_replica_groups(result).members]
        for senders, parts in list_given(operand, result):
            receivers = 0
            for group, _ in parts:
                receivers |= groups[group]
            yield senders, receivers
    else:
        for message in exchange_messages(operand, result, mode.view):
            yield (message.sender,), 1 << message.receiver


def count_joint_rounds(steps: Sequence[tuple[str, Layout, Layout, StepMode]]) -> int:
    """The launches of some steps of one lane together, whose kinds, layouts and modes are given.

    >>> from reshard.types import Mesh
    >>> target = Layout.parse("f32[{tp}2]", Mesh({"tp": 3}, device_ids=[4, 5, 6]))
    >>> sources = (Layout.parse("f32[{x}2]", Mesh({"x": 3}, device_ids=range(at, at + 3))) for at in (0, 1))
    >>> count_joint_rounds([("exchange", source, target, PLAIN) for source in sources])
    2
    """
    kind, operand, result, mode = first = steps[0]
    if kind != "exchange" or (mode.view is None and one_set(operand.mesh, result.mesh)):
        return check_step(*first).launches
    each = dict.fromkeys(steps)
    if len(each) == 1:
        return check_step(*first).launches
    if mode.gathers:
        gathered = any(gathering_figures(one, other, mode.view).gathered for _, one, other, mode in each)
        return count_gathered_rounds((one, other, mode.view) for _, one, other, mode in each) + gathered
    # The receivers of a device are the bits of one number: a thousand arrays have millions of pairs.
    bits = defaultdict[int, int](int)
    for step in each:
        for senders, receivers in list_pairs(*step[1:]):
            for sender in senders:
                bits[sender] |= receivers & ~(1 << sender)
    return max([count_overlap(bits.values()), *(receivers.bit_count() for receivers in bits.values())])


def _who_sends_to_whom(
    kind: str, ends: tuple[Layout, Layout, View | None], r: Refinement | None
) -> tuple[Hashable, ...]:
    """What decides the senders and receivers of a permute, or of an exchange that shares launches with none that sends
    to others; its two ends where nothing less does."""
    operand, result, _ = ends
    if kind == "permute" and not one_set(operand.mesh, result.mesh):
        # Who sends to whom depends on which tiles are the same, and on nothing else.
        numbers: dict[Tile, int] = {}
        held = [numbers.setdefault(tile, len(numbers)) for end in (operand, result) for tile in tiles(end).values()]
        return result.mesh.devices, tuple(held)
    if r is None or not (r.exact if kind == "exchange" else operand.partial_as(result)):
        return ends
    # The refined digits that change holders; an exchange goes over them in their order, round by round.
    changed = [(d.radix, d.src, d.dst) for d in r.digits if d.src != d.dst]
    return (tuple(changed) if kind == "exchange" else frozenset(changed),)
