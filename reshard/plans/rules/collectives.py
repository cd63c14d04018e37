"""The judgement `kind : operand -> result`, and the table of the rules that make it.

Checking a plan, its bytes, launches and peak memory are folds over `check_step`; nothing else knows what a
collective does. `step_loads` has the same figures device by device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import StepError, quoted
from reshard.geometry.figures import (
    MOST_DEVICES,
    ByDevice,
    even_rounds,
    exchange_figures,
    most_sent,
    needs_other_digit,
    received_by_device,
    sent_by_device,
)
from reshard.geometry.holders import count_copies
from reshard.geometry.refine import refine
from reshard.geometry.relay import gathering_figures
from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.rules import tile_view
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.rules.split_steps import split_step
from reshard.plans.rules.step_mode import (
    FREE,
    PLAIN,
    Cost,
    StepMode,
    refuse_step,
    require_refinement,
    require_same_partial,
    wire_layout,
)
from reshard.plans.rules.tile_view import scatter_order
from reshard.plans.rules.view_steps import check_cast, check_put, check_take, check_view, view_of
from reshard.types.index_set import IndexSet
from reshard.types.layout import Layout
from reshard.types.reductions import all_reduce_elements, identity
from reshard.types.whole import check_deadline

# `split_sum`: an array becomes partial; one summand keeps the data, the others are zero. Nothing is sent.
#
#     mesh <x=4, y=2>, f32[{x}4] -> f32[16] + sum{x}{y}
#
#     dim   radix   before   after
#      0      4     x        local    the summand at x=2 has the elements 8 to 11, those at other x have zeros there
#      0      4     local    local
#                   -        y        y held nothing: the summand at y=0 keeps the data, the one at y=1 is all zeros
#
# It undoes a reduction: all_reduce(split_sum(a)) = a where the sub-axes held nothing, as Shardy's
# `replicated_to_unreduced`, and all_reduce(split_sum(a)) = all_gather(a) where they held digits, as its
# `sharded_to_unreduced`. For a maximum, a minimum or a product, the identity of the operation stands for the zeros.
#
#     digit before -> after    who has data                                      with x becoming partial
#     x     -> local           the device whose coordinate is the digit's value
#     x     -> z               devices with equal coordinates along x and z      z held nothing before
#     local -> z               every device, its own part, as in a slice         z held nothing before


def check_split_sum(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Sub-axes become partial; digits that change were held by these, or local."""
    r = require_refinement("split_sum", operand, result)
    started = {factor.stride for factor in r.started}
    moved = {d.src for d in r.digits if d.src != d.dst and d.src is not None}
    if not started or r.reduced or not moved <= started:
        why = "sub-axes must become partial, and only digits that they held, or local ones, may change"
        raise refuse_step("split_sum", operand, result, why)
    if identity(result.dtype, str(result.reduction)) is None:
        why = f"no value of {result.dtype} leaves a {result.reduction} as it is, so nothing can fill the other summands"
        raise refuse_step("split_sum", operand, result, why)
    return FREE


# `slice`: each device keeps its share of a local digit. Nothing is sent.
#
#     mesh <x=4>, f32[16, 4] -> f32[{x}4, 4]
#
#     dim   radix   before   after
#      0      4     local    x        each device keeps one of the four values
#      0      4     local    local
#      1      4     local    local
#
# The sub-axes that take digits must be unused before: along a used one, devices hold different elements already.


def check_slice(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Local digits become held by sub-axes that are not in use."""
    r = require_refinement("slice", operand, result)
    if r.gathered or r.swapped or set(scatter_order(r)) & r.used_before:
        raise refuse_step("slice", operand, result, "only local digits may change, and only to sub-axes not in use")
    require_same_partial("slice", operand, result)
    return FREE


# `reduce_scatter` and `all_reduce`: the devices along partial sub-axes combine their summands.
#
#     mesh <x=4>, f32[16, 4] + sum{x} -> f32[{x}4, 4]           reduce_scatter
#
#     dim   radix   before   after
#      0      4     local    x        each device combines the summands of its own four rows
#      0      4     local    local
#      1      4     local    local
#
#     mesh <x=4>, f32[16, 4] + sum{x} -> f32[16, 4]             all_reduce: no digit changes
#
# An all-reduce costs a reduce-scatter followed by an all-gather.


def check_reduce_scatter(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Partial sub-axes come to hold local digits: with f devices in a group, each receives (f - 1) / f of a tile."""
    r = require_refinement("reduce_scatter", operand, result)
    order = tile_view.scatter_order(r)
    scattered = set(order) == {factor.stride for factor in r.reduced}
    if r.gathered or r.swapped or r.started or not order or not scattered:
        raise refuse_step(
            "reduce_scatter", operand, result, "partial sub-axes must come to hold local digits, and nothing else"
        )
    sent = tile_view.before(operand, r, order)
    block = sent.elements // sent.count
    return Cost(operand.nbytes(sent.elements - block), 1, 0 if sent.in_place else operand.nbytes(sent.elements))


def check_all_reduce(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Partial sub-axes become replicated."""
    r = require_refinement("all_reduce", operand, result)
    if r.sliced or r.gathered or r.swapped or r.started or not r.reduced:
        raise refuse_step("all_reduce", operand, result, "partial sub-axes must become replicated, and nothing else")
    members = math.prod(factor.size for factor in r.reduced)
    elements = math.prod(operand.tile_shape)
    return Cost(operand.nbytes(all_reduce_elements(elements, members)), 1, 0)


# `permute`: whole tiles change devices.
#
#     mesh <x=4, y=2>, f32[{x}{y}2] -> f32[{y}{x}2]
#
#     dim   radix   before   after
#      0      2     x:(1)2   y
#      0      2     x:(2)2   x:(1)2
#      0      2     y        x:(2)2
#      0      2     local    local
#
# No digit changes between local and held, so every tile of the result is a tile of the operand. The two meshes may
# also list the same devices in different orders, or be two sets of equally many devices.


def check_permute(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """The tiles stay the same; the busiest device receives one."""
    if (operand.ragged or result.ragged) and refine(operand, result) is None:
        raise refuse_step("permute", operand, result, "pieces of any size that change are moved by an exchange only")
    if _local_places(operand) != _local_places(result) or not operand.partial_as(result):
        raise refuse_step("permute", operand, result, "the tiles must be the same ones, only on other devices")
    if not one_set(operand.mesh, result.mesh):
        # Every device of one set must have a partner in the other.
        if operand.mesh.size != result.mesh.size:
            sizes = f"from {operand.mesh.size} devices to {result.mesh.size}"
            raise refuse_step("permute", operand, result, f"{sizes}: use an exchange between sets of different sizes")
        if operand.partial:
            raise refuse_step("permute", operand, result, "a sum cannot stay partial on other devices; finish it first")
    return Cost(operand.tile_bytes, 1, 0)


def _local_places(layout: Layout) -> list[tuple[int, list[tuple[int, int]]]]:
    """The padded size of each dim with its local digits as (place value, radix): the shape of its tiles."""
    shapes: list[tuple[int, list[tuple[int, int]]]] = []
    for dim in layout.dims:
        place, local = 1, list[tuple[int, int]]()
        for radix, axis in reversed(dim.digits):
            if axis is None and radix != 1:
                local.append((place, radix))
            place *= radix
        shapes.append((place, local))
    return shapes


# `all_to_all`: sub-axes release digits and hold local ones instead; each device sends one block to each other one.
#
#     mesh <x=4>, f32[{x}4, 16] -> f32[16, {x}4]
#
#     dim   radix   before   after
#      0      4     x        local    released
#      0      4     local    local
#      1      4     local    x        taken by the same sub-axis
#      1      4     local    local
#
# Each device keeps 1 of its 4 blocks and receives 3 of the same size. Here the blocks that leave are columns of the
# tile, so they are packed before; the blocks that arrive are rows, so they arrive in place.


def check_all_to_all(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Held digits become local, and local digits become held by the same sub-axes."""
    r = require_refinement("all_to_all", operand, result)
    order = tile_view.scatter_order(r)
    if r.swapped or set(order) != {digit.src for digit in r.gathered}:
        raise refuse_step(
            "all_to_all", operand, result, "the sub-axes that release digits must be those that take local ones"
        )
    require_same_partial("all_to_all", operand, result)
    sent, received = tile_view.before(operand, r, order), tile_view.after(result, r, order)
    block = sent.elements // sent.count
    packed = 0 if sent.in_place else operand.nbytes(sent.elements)
    unpacked = 0 if received.in_place else operand.nbytes(received.elements)
    # Without unpacking, blocks arrive in the result itself, and only the packed operand is extra. With unpacking, the
    # packed operand is freed before the result is made.
    scratch = max(packed + unpacked - result.tile_bytes, unpacked) if unpacked else packed
    return Cost(operand.nbytes(sent.elements - block), 1, scratch)


# `all_gather`: the devices of a group collect each other's tiles.
#
#     mesh <x=4>, f32[{x}4, 4] -> f32[16, 4]
#
#     dim   radix   before   after
#      0      4     x        local    each device receives the other three values
#      0      4     local    local
#      1      4     local    local
#
# Blocks arrive one after another. If the gathered digits lead the result's tile, as here, they arrive where they
# belong; otherwise they arrive in a buffer as large as the result and are copied into place.


def check_all_gather(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Held digits become local: with f devices in a group, each receives f - 1 tiles."""
    r = require_refinement("all_gather", operand, result)
    if r.sliced or r.swapped:
        raise refuse_step("all_gather", operand, result, "only held digits may change, and only to local")
    require_same_partial("all_gather", operand, result)
    tile = tile_view.before(operand, r).elements
    received = tile_view.after(result, r, tile_view.gather_order(r))
    scratch = 0 if received.in_place else operand.nbytes(received.elements)
    return Cost(operand.nbytes((r.pieces - 1) * tile), 1, scratch)


# `exchange`: from any layout to any other of the same array, as point-to-point messages in rounds.
#
#     mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]
#
#     device   holds   needs   receives
#     x=0 y=0  0-2     0-4     3-4
#     x=0 y=1  0-2     5-9     5, 6-8, 9      the busiest: 5 elements in 3 messages
#     x=3 y=1  9       5-9     5, 6-8
#     ...
#
# In a round, each device sends and receives at most one message, so the rounds are the most messages that any device
# sends or receives. A message may be cut into chunks: more rounds, less scratch. Two even layouts with a common
# refinement exchange equal messages, and their figures have a closed form.
#
# The two layouts may be on different sets of devices (`geometry.dealing`): then a device that is in one set only has
# no tile of the other layout, and no buffer for what it never does, to send or to receive.
#
# They may also be of different arrays, with a view between the indices of the two:
#
#     mesh <x=8>, view "(three h) d -> three h d", f32[{x}12, 64] -> f32[3, {x}4, 64], three=3, h=32
#
#     device   holds indices   = three, h             wants
#     x=0      0-11              0, 0-11              h 0-3 of all three
#     x=2      24-35             0, 24-31; 1, 0-3     h 8-11 of all three
#
# Where dtypes differ, messages are cast as they are packed or unpacked, whichever lets fewer bytes travel, so that no
# tile is there in both dtypes:
#
#     mesh <x=4>, f32[{x}4, 16] -> bf16[16, {x}4]      3 messages of 32 B, cast to bf16 as they leave
#
# A message of several elements then always lies in buffers, at both ends.
#
# Beside what receivers hold already, only what they lack or is stale moves, into tiles that are there:
#
#     mesh <x=2>, f32[8] -> f32[8], device 1 on, that hold f32[8] of which element 3 changed       1 element each
#
# Views serve where no layout on common units leads from one side to the other: digits that lie across atoms of both
# sides, and parts that are taken from, or put into, dims that are spread over devices.


def check_exchange(operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Any layout to any other; each device receives exactly the elements that it needs and does not hold."""
    across, view, holding = not one_set(operand.mesh, result.mesh), mode.view, mode.holding
    if view is not None:
        view_of("exchange", operand, result, StepMode(view=view))
    if holding is not None:
        _check_holding(operand, result, mode)
    if not operand.partial_as(result):
        raise refuse_step("exchange", operand, result, "an exchange moves data and reduces nothing")
    if operand.partial and (across or (view is not None and operand.mesh != result.mesh)):
        raise refuse_step("exchange", operand, result, "a sum cannot stay partial on other devices; finish it first")
    casts = operand.dtype != result.dtype
    if casts and (operand.partial or mode.in_place or mode.relay):
        why = "only an exchange of what is no sum, neither in place nor relayed, casts on the way"
        raise refuse_step("exchange", operand, result, why)
    wire = wire_layout(operand, result)
    if mode.in_place:
        if across or view is not None:
            why = "only an exchange among the same devices, without a view, goes in place"
            raise refuse_step("exchange", operand, result, why)
        # Each message arrives where the last one left; a single element needs no buffer.
        r = refine(operand, result)
        if r is None or not r.exact:
            raise refuse_step("exchange", operand, result, "only even layouts with a common refinement go in place")
        rounds = even_rounds(r)
        chunks, largest = in_place_cut(r.common, mode.chunk)
        scratch = 2 * operand.nbytes(largest) if rounds and largest > 1 else 0
        return Cost(lower_bound(operand, result), rounds * chunks, scratch)
    if mode.fresh and (view is None or not view.into or holding is not None):
        raise refuse_step("exchange", operand, result, "only what fills part of an array has a fresh one around it")
    unlike = across or view is not None or holding is not None or operand.ragged or result.ragged
    if mode.relay and (operand.partial or not unlike):
        why = "an exchange of no sum is relayed, to other devices, through a view, beside what is held or of pieces"
        raise refuse_step("exchange", operand, result, why)
    if mode.gathers:
        # Buffers have what a device sends and is sent in a round, or what it passes on and gathers.
        ends = operand, result, mode.view
        if not mode.relay or mode.chunk is not None or mode.holding is not None or count_copies(operand) > 1:
            why = "only a relay of whole messages gathers, of tiles with one holder each, to devices that hold nothing"
            raise refuse_step("exchange", operand, result, why)
        figures = gathering_figures(*ends)
        scratch = max(2 * figures.message, figures.gathered)
        return Cost(operand.nbytes(figures.received), figures.rounds + (figures.gathered > 0), operand.nbytes(scratch))
    figures = exchange_figures(operand, result, view, relayed=mode.relay, holding=holding)
    cap = figures.message if mode.chunk is None else min(mode.chunk, figures.message)
    rounds, chunk = figures.cut(cap)
    # A chunk that is one run of memory in both tiles is sent and received where it lies; what stays needs no buffer. So
    # is a single element, but no longer run where elements are cast.
    direct = 1 if casts else figures.run
    scratch = 0 if cap <= direct or not rounds else count_buffers(operand, result, mode) * wire.nbytes(chunk)
    if view is None and holding is None:
        return Cost(lower_bound(operand, result), rounds, scratch)
    return Cost(wire.nbytes(received_by_device(operand, result, view, holding).most), rounds, scratch)


def _check_holding(operand: Layout, result: Layout, mode: StepMode) -> None:
    """Refuses what devices are said to hold if it is not of the result's array, and modes that fill no tiles."""
    layout, stale = mode.holding or (result, IndexSet(operand.shape))
    if operand.partial or mode.in_place:
        why = "only an exchange of what is no sum, and not in place, leaves what receivers hold"
        raise refuse_step("exchange", operand, result, why)
    same = (layout.shape, layout.dtype, layout.partial) == (result.shape, result.dtype, ())
    if not same or stale.shape != operand.shape:
        why = f"what is held, {layout}, must be of the result's array, and what is stale of it of the operand's"
        raise refuse_step("exchange", operand, result, why)
    if mode.view is not None and mode.view.into and layout != result:
        why = f"what is held, {layout}, must lie as the result does where only part of that is filled"
        raise refuse_step("exchange", operand, result, why)


def count_buffers(operand: Layout, result: Layout, mode: StepMode) -> int:
    """The buffers of a chunk that a device has in an exchange: one to send from, and one to receive in.

    A device of one set only sends or receives. In a relay, receivers pass on in the same round as they receive.
    """
    return 1 if disjoint(operand.mesh, result.mesh) and not mode.relay else 2


def in_place_cut(message: int, chunk: int | None) -> tuple[int, int]:
    """How many chunks of at most `chunk` elements a message is sent in, and the elements of the largest."""
    count = -(-message // min(chunk or message, message)) if message else 0
    return count, -(-message // count) if count else 0


Rule = Callable[[Layout, Layout, StepMode], Cost]

RULES: dict[str, Rule] = {
    "slice": check_slice,
    "all_gather": check_all_gather,
    "all_to_all": check_all_to_all,
    "permute": check_permute,
    "exchange": check_exchange,
    "reduce_scatter": check_reduce_scatter,
    "all_reduce": check_all_reduce,
    "split_sum": check_split_sum,
}
"""The steps of one array, which keep its shape and its dtype."""

VIEW_RULES: dict[str, Rule] = {"view": check_view, "take": check_take, "put": check_put, "cast": check_cast}
"""The steps of a move with a view or a cast, which change the array's shape or its dtype."""

OVERLAPPING = ("all_gather", "all_to_all", "permute", "reduce_scatter")
"""The kinds of which a part can be copied into the result while the next one is on its way."""

CROSSING = ("permute", "exchange")
"""The kinds whose result may be on other devices than their operand."""


@lru_cache(maxsize=8192)
def check_step(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Cost:
    """The cost of a well-typed step.

    Raises `StepError` for a step that the rule of its kind does not derive.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> check_step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    Cost(received=48, launches=1, scratch=0)
    """
    check_deadline()
    rule = RULES.get(kind) or VIEW_RULES.get(kind) if isinstance(kind, str) else None  # pyright: ignore
    if rule is None:
        raise StepError(f"unknown step {quoted(kind)}; the steps are {', '.join((*RULES, *VIEW_RULES))}")
    keeps_array = kind in RULES
    if kind != "exchange" or mode.view is None:  # Through a view, shapes differ, and devices may.
        if keeps_array and (operand.shape != result.shape or (operand.dtype != result.dtype and kind != "exchange")):
            raise refuse_step(
                kind, operand, result, "a step keeps the global shape and the dtype, which an exchange may cast"
            )
        if kind not in CROSSING and not one_set(operand.mesh, result.mesh):
            raise refuse_step(kind, operand, result, f"only {', '.join(CROSSING)} lead to other devices")
        if keeps_array and operand.partial and result.partial and operand.reduction != result.reduction:
            raise refuse_step(kind, operand, result, "a step keeps the reduction of what stays partial")
    if mode == PLAIN or not keeps_array:
        return rule(operand, result, mode)
    if mode.parts != 1 or mode.overlap:
        return _check_in_parts(kind, operand, result, mode)
    if kind != "exchange" or (mode.chunk is not None and mode.chunk < 1):
        why = f"{mode}: only an exchange is chunked, by at least 1 element, in place, relayed, or through a view"
        raise refuse_step(kind, operand, result, why)
    return rule(operand, result, mode)


def _check_in_parts(kind: str, operand: Layout, result: Layout, mode: StepMode) -> Cost:
    """Each part is a step on a smaller array, copied out of the operand before and into the result after.

    If parts overlap, there are two at a time; parts in place of each other do not.
    """
    overlap = mode.overlap and kind in OVERLAPPING and not mode.in_place
    only_parts = mode == StepMode(parts=mode.parts, in_place=mode.in_place, overlap=overlap)
    only_parts = only_parts and mode.parts > 1 and operand.dtype == result.dtype
    part = split_step(operand, result, mode.parts, in_place=mode.in_place) if only_parts else None
    if part is None:
        why = "it does not split so; parts.counts() lists the possible numbers of parts"
        in_place = "; in place, tiles are even and equally large, on the same devices" if mode.in_place else ""
        raise refuse_step(kind, operand, result, f"{mode}: {why}{in_place}")
    one = check_step(kind, part.operand, part.result)
    copies = part.operand.tile_bytes + part.result.tile_bytes
    return Cost(one.received * mode.parts, one.launches * mode.parts, one.scratch + copies * (1 + mode.overlap))


class Loads(NamedTuple):
    """The bytes that each device receives and sends."""

    received: ByDevice
    sent: ByDevice


def received_in_step(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> ByDevice:
    """What each device receives in a well-typed step; of a relay that gathers, what is sent takes longer to count."""
    if not mode.gathers:
        return step_loads(kind, operand, result, mode).received
    return received_by_device(operand, result, mode.view).scaled(operand)


@lru_cache(maxsize=8192)
def step_loads(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Loads:
    """What each device receives and sends in a well-typed step.

    In a collective all devices receive the same. In a permute, and in an exchange, some may have more to receive than
    others, and between uneven layouts some have more to send.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> step_loads("permute", Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)).received.listed
    {0: 0, 1: 8, 2: 8, 3: 0}
    """
    if kind == "exchange" and (not mode.relay or mode.gathers):
        move = operand, result, mode.view, mode.holding
        sent = ByDevice(most_sent(*move[:3], relayed=True, gathers=True)) if mode.gathers else sent_by_device(*move)
        ends = received_by_device(*move), sent
        return Loads(*(each.scaled(wire_layout(operand, result)) for each in ends))
    received = ByDevice(check_step(kind, operand, result, mode).received)
    if kind == "exchange":  # Of a relay, only the busiest device is known.
        sent = most_sent(operand, result, mode.view, relayed=True, holding=mode.holding)
        return Loads(received, ByDevice(operand.nbytes(sent)))
    if kind == "permute" and operand.partial_as(result) and operand.mesh.size <= MOST_DEVICES:
        r, tile = refine(operand, result), received.each
        if r is not None:
            devices = enumerate(operand.mesh.devices)
            received = ByDevice(0, {device: tile * needs_other_digit(r, at) for at, device in devices})
    return Loads(received, received)
