"""Predicted seconds of a step: the alpha-beta model, peer by peer.

A device gets one block from every peer, charged to the slowest axis on which the two differ:

    seconds = sum over axes of messages * latency + blocks * block bytes / bandwidth

For example, an all-gather of tiles of t bytes over <dcn=2, x=4>, dcn the slower one:

    axis   peers                     blocks   messages
    dcn    4 of the 7 differ in it   4        1            2 devices: one doubling
    x      the other 3               3        1 + 1        4 devices: two doublings

In an all-to-all or an exchange each block is a message. Gathers and reductions pass blocks on, doubling again and
again: p - 1 messages for each prime p of an axis. Therefore a gather staged over the slow axis first sends fewer bytes
over it than one over both axes at once, and an all-to-all of small blocks over many peers is slow for its latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from reshard.synth.network import Link, Network
from reshard.synth.network import Links as Links
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair.device_sets import one_set
from reshard.types.pair.refine import Refinement, refine
from reshard.types.plan import Plan, Step, StepSpec
from reshard.types.primes import primes
from reshard.types.rules.checker import check_step
from reshard.types.rules.cost import Cost

_Factors = list[tuple[int, int]]
"""(stride, size) factors of the device positions."""


def seconds(step: StepSpec, operand: Layout, links: Links) -> float:
    """Predicted seconds of one step from an operand on a mesh with these links.

    >>> links = {"dcn": Link(1e-5, 1e9), "x": Link(1e-6, 1e11)}
    >>> held, whole = (Layout.parse(text, Mesh(dcn=2, x=4)) for text in ("f32[{x}1024]", "f32[4096]"))
    >>> f"{seconds(StepSpec('all_gather', whole), held, links) * 1e6:.3f} us"
    '2.123 us'
    """
    kind, result, mode = step
    cost = check_step(kind, operand, result, mode)
    if not cost.launches:
        return 0.0
    if kind == "view_exchange":
        return _boxes(cost.launches, cost.received, _slowest(operand, result, links))
    refinement = refine(operand, result)
    if refinement is None or (kind == "exchange" and not refinement.exact):
        return _boxes(cost.launches, cost.received, _slowest(operand, result, links))
    match kind:
        case "all_reduce":
            return 2 * _reduce_scatter(operand, refinement, links)
        case "reduce_scatter":
            return _reduce_scatter(operand, refinement, links)
        case "all_gather":
            return _blocks(_gathered(refinement), operand.tile_bytes, operand.mesh, links, doubling=True)
        case "all_to_all":
            peers = _gathered(refinement)
            return _blocks(peers, operand.tile_bytes / math.prod(size for _, size in peers), operand.mesh, links)
        case _:
            return _exchange(step, operand, refinement, cost, links)


def fastest(routes: Iterable[Sequence[StepSpec]], source: Layout, links: Links) -> list[Sequence[StepSpec]]:
    """The routes of least predicted seconds; steps that several routes share are priced once."""
    known: dict[tuple[Layout, StepSpec], float] = {}
    times: list[tuple[float, Sequence[StepSpec]]] = []
    for route in routes:
        total, at = 0.0, source
        for step in route:
            if (at, step) not in known:
                known[at, step] = seconds(step, at, links)
            total += known[at, step]
            at = step.result
        times.append((total, route))
    least = min(time for time, _ in times)
    return [route for time, route in times if as_fast(time, least)]


def as_fast(time: float, least: float) -> bool:
    """Whether predicted seconds are no more than the least, up to the rounding of sums made in another order.

    >>> as_fast(0.1 + 0.2, 0.3), as_fast(0.3001, 0.3)
    (True, False)
    """
    return time <= least * (1 + 1e-9)


def timed(plan: Plan, links: Links | None) -> Plan:
    """The plan with its predicted seconds, step by step; the plan itself without links."""
    if links is None:
        return plan
    times = [seconds(StepSpec(s.kind, s.result, s.mode), s.operand, links) for s in plan.steps]
    steps = tuple(replace(step, seconds=time) for step, time in zip(plan.steps, times, strict=True))
    return replace(plan, steps=steps, seconds=sum(times))


def timed_across(plan: Plan, network: Network | None) -> Plan:
    """A plan to other devices with its predicted seconds: each step on the links of its mesh, or between the two."""
    if network is None:
        return plan
    steps = tuple(replace(step, seconds=_across(step, network)) for step in plan.steps)
    return replace(plan, steps=steps, seconds=sum(step.seconds or 0.0 for step in steps))


def _across(step: Step, network: Network) -> float:
    if one_set(step.operand.mesh, step.result.mesh):
        return seconds(StepSpec(step.kind, step.result, step.mode), step.operand, network.links(step.operand.mesh))
    return _boxes(step.launches, step.endpoint_bytes, network.crossing)


def _reduce_scatter(operand: Layout, refinement: Refinement, links: Links) -> float:
    peers = [(f.stride, f.size) for f in refinement.reduced]
    block = operand.tile_bytes / math.prod(size for _, size in peers)
    return _blocks(peers, block, operand.mesh, links, doubling=True)


def _gathered(refinement: Refinement) -> _Factors:
    return [(d.src, d.radix) for d in refinement.gathered if d.src is not None]


def _exchange(step: StepSpec, operand: Layout, refinement: Refinement, cost: Cost, links: Links) -> float:
    """An even exchange, or a permute, which is one of a single round."""
    in_turn, crossed = _exchange_peers(refinement)
    rounds = refinement.pieces
    per_round = cost.launches // max(1, rounds if crossed else rounds - 1)
    block = operand.tile_bytes if step.kind == "permute" else operand.nbytes(refinement.common)
    return _blocks(in_turn, block / per_round, operand.mesh, links, crossed, per_round)


def _exchange_peers(refinement: Refinement) -> tuple[_Factors, set[int]]:
    """The factors whose peers an exchange meets in turn, and the strides that messages of any round may cross.

    A digit that changes holders sends every message across both of them.
    """
    by_dst = {d.dst: d for d in refinement.digits if d.dst is not None}
    crossed = {s for d in refinement.swapped for s in (d.src, d.dst) if s is not None}
    in_turn: _Factors = []
    for digit in refinement.gathered:
        stride = digit.src or 0
        before = by_dst.get(stride)
        if before is not None and before.src is not None:
            crossed.add(stride)
        in_turn.append((stride, digit.radix))
    return in_turn, crossed


def _blocks(
    in_turn: Iterable[tuple[int, int]],
    block: float,
    mesh: Mesh,
    links: Links,
    crossed: Iterable[int] = (),
    repeat: int = 1,
    *,
    doubling: bool = False,
) -> float:
    """Seconds for one block from every peer along the factors `in_turn` of the device positions, `repeat` times.

    Every message may cross the strides `crossed`, so once the axis of one of these is the slowest left, all blocks
    that remain are charged to it.
    """
    sizes: dict[str, int] = {}
    total = 1
    for stride, size in in_turn:
        for sub in mesh.sub_axes(stride, size):
            sizes[sub.axis] = sizes.get(sub.axis, 1) * sub.size
        total *= size
    crossing = {mesh.axis_at(stride) for stride in crossed}
    time, left = 0.0, total
    # In the mesh's order where links are equal: that of a set differs by process, and so would the sum's last digit.
    axes = [axis for axis in mesh.axes if axis in sizes or axis in crossing]
    for axis in sorted(axes, key=lambda a: (links[a].bandwidth, -links[a].latency)):
        link = links[axis]
        near = 0 if axis in crossing else left // sizes[axis]
        blocks = (left - near) * repeat
        messages = sum(p - 1 for p in primes(sizes[axis])) if doubling else blocks
        time += messages * link.latency + blocks * block / link.bandwidth
        left = near
    return time


def _slowest(operand: Layout, result: Layout, links: Links) -> Link:
    """The slowest link that an exchange of boxes can cross: that of an axis that one of the layouts uses."""
    axes = {s.axis for s in (*operand.held, *result.held) if s.axis in links} or set(links)
    return min((links[a] for a in axes), key=lambda link: (link.bandwidth, -link.latency))


def _boxes(rounds: int, received: int, link: Link) -> float:
    return rounds * link.latency + received / link.bandwidth
