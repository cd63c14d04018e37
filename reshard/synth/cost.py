"""Predicted seconds of a step: the alpha-beta model, peer by peer, and on wires what the wires carry.

A device gets one block from every peer, charged to the slowest fabric on which the two differ: an axis with a switch of
its own, or the wires that rings, lines and tori share.

    seconds of a switch = messages * latency + blocks * block bytes / bandwidth

For example, an all-gather of tiles of t bytes over <dcn=2, x=4>, dcn the slower one, both with switches:

    axis   peers                     blocks   messages
    dcn    4 of the 7 differ in it   4        1            2 devices: one doubling
    x      the other 3               3        1 + 1        4 devices: two doublings

In an all-to-all or an exchange each block is a message. Gathers and reductions pass blocks on, doubling again and
again: p - 1 messages for each prime p of an axis. Therefore a gather staged over the slow axis first sends fewer bytes
over it than one over both axes at once, and an all-to-all of small blocks over many peers is slow for its latency.

On wires (`wires`) several physical axes carry a step together, what passes by takes up wires too, and nothing arrives
before it has passed all wires on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise

from reshard.errors import MeshError
from reshard.geometry.figures import even_rounds
from reshard.geometry.refine import Factor, RefinedDigit, Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.plans.plan import Plan, StepSpec
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import PLAIN, Cost, wire_layout
from reshard.plans.step import Step
from reshard.synth.network import Links as Links
from reshard.synth.network import Network
from reshard.synth.wires import Link, Wires
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.whole import primes

_Factors = Sequence[tuple[int, int]]
"""(stride, size) factors of the device positions."""

Origins = Mapping[tuple[int, int], int | None]
"""The factors of the positions along which the senders of messages differ from their receivers, with the stride along
which the receiver has the sender's coordinate, None if the receiver meets senders of every coordinate."""


class StepTime(tuple[tuple[tuple[float, float], ...], ...]):
    """The seconds of a step, whatever the size of its array: of several ways the fastest, each of which takes as long
    as the slowest of its parts, which are (seconds, further seconds for all the bytes).

    >>> two_ways = StepTime((((2.0, 1.0), (0.0, 2.0)), ((1.0, 5.0),)))
    >>> [two_ways.at(scale) for scale in (0.0, 0.5, 1.0, 4.0)]
    [1.0, 2.5, 3.0, 8.0]
    """

    __slots__ = ()

    def at(self, scale: float = 1.0) -> float:
        """Seconds where the array has so many times the bytes."""
        if len(self) == 1 == len(self[0]):
            (wait, bytes_seconds) = self[0][0]
            return wait + scale * bytes_seconds
        return min(max(wait + scale * bytes_seconds for wait, bytes_seconds in way) for way in self)

    def scaled(self, scale: float) -> StepTime:
        """The seconds of a step on so many times the bytes."""
        return StepTime(tuple((wait, seconds * scale) for wait, seconds in way) for way in self)


_NO_TIME = StepTime((((0.0, 0.0),),))


def predict_seconds(step: StepSpec, operand: Layout, links: Links) -> float:
    """Predicted seconds of one step from an operand on a mesh with these links.

    >>> from reshard.synth.wires import Link
    >>> links = {"dcn": Link(1e-5, 1e9), "x": Link(1e-6, 1e11)}
    >>> held, whole = (Layout.parse(text, Mesh(dcn=2, x=4)) for text in ("f32[{x}1024]", "f32[4096]"))
    >>> f"{predict_seconds(StepSpec('all_gather', whole), held, links) * 1e6:.3f} us"
    '2.123 us'
    """
    check_step(step.kind, operand, step.result, step.mode)
    return predict_time(step, operand, links).at()


def predict_time(step: StepSpec, operand: Layout, links: Links) -> StepTime:
    """Predicted seconds of one step that its rule accepts, for arrays of any size that lie as the operand does."""
    kind, result, mode = step
    wires, moved = Wires.of(links, operand.mesh), wire_layout(operand, result)
    # Through a view, and beside what is held, messages are of any size.
    refinement = None if mode.view is not None or mode.holding is not None else refine(moved, result)
    repeat = 1
    if refinement is None or not refinement.exact or mode != PLAIN or moved is not operand:
        cost = check_step(kind, operand, result, mode)
        if not cost.launches:
            return _NO_TIME
        if refinement is None or (kind == "exchange" and not refinement.exact):
            return _predict_boxes(cost, moved, result, wires)
        rounds = refinement.pieces if refinement.swapped else refinement.pieces - 1
        repeat = cost.launches // max(1, rounds) if kind in ("exchange", "permute") else 1
    elif kind in ("slice", "split_sum") or (kind == "exchange" and not even_rounds(refinement)):
        return _NO_TIME
    # The digits that change say it all, and many steps change the same ones. What is even is checked as part of a plan.
    changed = tuple(digit[1:] for digit in refinement.digits if digit.src != digit.dst)
    try:
        time = time_change(kind, changed, moved.mesh, wires, refinement.reduced, repeat)
    except MeshError:  # The result's mesh cuts the positions where no sub-axis of the operand's ends.
        return _predict_boxes(check_step(kind, operand, result, mode), moved, result, wires)
    return time.scaled(moved.tile_bytes)


@lru_cache(maxsize=1 << 14)
def time_change(
    kind: str,
    changed: tuple[tuple[int, int | None, int | None], ...],
    mesh: Mesh,
    wires: Wires,
    reduced: tuple[Factor, ...] = (),
    repeat: int = 1,
) -> StepTime:
    """Predicted seconds of a step, for a byte of a tile of its operand: in it these digits, as (radix, before, after),
    change and these factors are reduced, and each message is cut into so many."""
    if kind == "slice":
        return _NO_TIME
    digits = tuple(RefinedDigit(0, *each) for each in changed)
    refinement = Refinement(digits, (), True, (), reduced)
    match kind:
        case "all_reduce":
            peers = [(factor.stride, factor.size) for factor in reduced]
            scatter = _predict_gather(peers, 1 / math.prod(size for _, size in peers), mesh, wires)
            return StepTime(tuple((2 * wait, 2 * seconds) for wait, seconds in way) for way in scatter)
        case "reduce_scatter":
            peers = [(digit.dst, digit.radix) for digit in refinement.sliced if digit.dst is not None]
            return _predict_scatter(peers, mesh, wires)
        case "all_gather":
            return _predict_gather(_gathered_factors(refinement), 1.0, mesh, wires)
        case "all_to_all":
            peers = _gathered_factors(refinement)
            return _predict_blocks(peers, 1 / math.prod(size for _, size in peers), mesh, wires)
        case _:
            # An even exchange, or a permute, which is one of a single round.
            in_turn, crossed, origins = _exchange_peers(refinement)
            block = 1 / math.prod(digit.radix for digit in refinement.sliced)
            return _predict_blocks(in_turn, block / repeat, mesh, wires, crossed, repeat, origins)


Known = dict[tuple[Layout, StepSpec], StepTime]
"""The seconds of steps that are priced already."""


def keep_fastest(
    routes: Iterable[Sequence[StepSpec]], source: Layout, links: Links, known: Known | None = None, ties: bool = True
) -> list[Sequence[StepSpec]]:
    """The routes of least predicted seconds, without `ties` the first of equal ones; steps that several routes share
    are priced once.

    On links for arrays of several sizes (`Wires.for_sizes`), those that are the fastest at one of them.
    """
    known = {} if known is None else known
    listed = list(routes)
    every = [list_times(route, source, links, known) for route in listed]
    return [listed[at] for at in pick_fastest(every, *list_scales(source, links), ties)]


def pick_fastest(every: Sequence[Sequence[StepTime]], low: float, high: float, ties: bool = True) -> list[int]:
    """The numbers of those sums of times that are the least at some scale, without `ties` the first of equal ones.

    >>> flat, steep, never = ([StepTime((((wait, seconds),),))] for wait, seconds in ((4, 1), (0, 2), (3, 2)))
    >>> pick_fastest([flat, steep, never], 1, 9), pick_fastest([flat, steep, never], 1, 2)
    ([0, 1], [1])
    """
    # Most steps take one line: these are summed once. The others turn where two of their lines meet.
    lines: list[tuple[float, float, list[StepTime]]] = []
    for times in every:
        bent = [time for time in times if len(time) > 1 or len(time[0]) > 1]
        straight = [time[0][0] for time in times if len(time) == 1 == len(time[0])]
        lines.append((sum(wait for wait, _ in straight), sum(seconds for _, seconds in straight), bent))

    def list_seconds(scale: float) -> list[float]:
        return [wait + scale * each + sum(time.at(scale) for time in bent) for wait, each, bent in lines]

    parts = {tuple(part for way in time for part in way) for _, _, bent in lines for time in bent}
    pairs = (pair for each in parts for pair in combinations(each, 2))
    turns = {(b[0] - a[0]) / (a[1] - b[1]) for a, b in pairs if a[1] != b[1]}
    # Between turns all are linear: from the fastest at one end, the next one is that which crosses it first.
    scales = [low]
    for start, end in pairwise([low, *sorted(turn for turn in turns if low < turn < high), high]):
        first, last = list_seconds(start), list_seconds(end)
        at = min(range(len(lines)), key=lambda n: (first[n], last[n]))
        while steeper := [n for n in range(len(lines)) if last[n] < last[at] * (1 - 1e-9)]:
            saved = [(first[n] - first[at], last[at] - last[n], n) for n in steeper]
            least, _, at = min((more / (more + less), -less, n) for more, less, n in saved)
            scales.append(start + (end - start) * least)
        scales.append(end)
    kept: set[int] = set()
    for scale in dict.fromkeys(scales):
        seconds = list_seconds(scale)
        least = min(seconds)
        fastest = [at for at, time in enumerate(seconds) if is_as_fast(time, least)]
        kept.update(fastest if ties else fastest[:1])
    return sorted(kept)


def list_scales(layout: Layout, links: Links) -> tuple[float, float]:
    """How many times the bytes of a layout arrays have for which these links are, at least and at most."""
    if not isinstance(links, Wires) or links.sizes is None:
        return 1.0, 1.0
    nbytes = layout.nbytes(math.prod(layout.shape))
    return links.sizes[0] / nbytes, links.sizes[1] / nbytes


def list_times(route: Sequence[StepSpec], source: Layout, links: Links, known: Known) -> list[StepTime]:
    """Predicted seconds of the steps of a route, of which `known` has those that were priced before."""
    times: list[StepTime] = []
    at = source
    for step in route:
        time = known.get((at, step))
        if time is None:
            wires = Wires.of(links, at.mesh)
            time = known[at, step] = _time_on_wires(step, at, wires)
        times.append(time)
        at = step.result
    return times


# Moves between the same few layouts of an array have most of their steps in common.
_time_on_wires = lru_cache(maxsize=1 << 14)(predict_time)


def route_seconds(route: Sequence[StepSpec], source: Layout, links: Links, known: Known) -> float:
    """Predicted seconds of a route."""
    return sum(time.at() for time in list_times(route, source, links, known))


def is_as_fast(time: float, least: float) -> bool:
    """Whether predicted seconds are no more than the least, up to the rounding of sums made in another order."""
    return time <= least * (1 + 1e-9)


def time_plan(plan: Plan, links: Links | None) -> Plan:
    """A plan on one mesh with its predicted seconds, step by step; the plan itself without links."""
    if links is None:
        return plan
    times = [predict_seconds(step.spec, step.operand, links) for step in plan.steps]
    steps = tuple(replace(step, seconds=time) for step, time in zip(plan.steps, times, strict=True))
    return replace(plan, steps=steps, seconds=sum(times, 0.0))


def time_on_network(plan: Plan, network: Network | None) -> Plan:
    """The plan with its predicted seconds: each step on the links of its own mesh, or of those between two sets."""
    if network is None:
        return plan
    times = [time_step(step, network) for step in plan.steps]
    steps = tuple(replace(step, seconds=time) for step, time in zip(plan.steps, times, strict=True))
    return replace(plan, steps=steps, seconds=sum(times, 0.0))


def predict_collective(kind: str, factors: _Factors, nbytes: int, mesh: Mesh, links: Links) -> float:
    """Predicted seconds of a collective of a compiled program, by the model of steps.

    Devices of a group differ in these (stride, size) factors of their positions, and so do the ends of a permute's
    messages. `nbytes` are those of its operand on a device.

    >>> from reshard.synth.wires import Link
    >>> links = {"dcn": Link(1e-5, 1e9), "x": Link(1e-6, 1e11)}
    >>> f"{predict_collective('all_gather', [(1, 4)], 4096, Mesh(dcn=2, x=4), links) * 1e6:.3f} us"
    '2.123 us'
    """
    wires, peers = Wires.of(links, mesh), math.prod(size for _, size in factors)
    if peers == 1:
        return 0.0
    match kind:
        case "all_reduce" | "reduce_scatter":
            scatter = _predict_gather(factors, nbytes / peers, mesh, wires).at()
            return 2 * scatter if kind == "all_reduce" else scatter
        case "all_to_all":
            return _predict_blocks(factors, nbytes / peers, mesh, wires).at()
        case "permute":
            return _predict_blocks((), nbytes, mesh, wires, factors, origins=dict.fromkeys(factors)).at()
        case _:
            return _predict_gather(factors, nbytes, mesh, wires).at()


def time_step(step: Step, network: Network, bandwidth: float | None = None) -> float:
    """Predicted seconds of a step; with a `bandwidth` in bytes/second, those with it on every link."""
    if one_set(step.operand.mesh, step.result.mesh):
        links = network.links(step.operand.mesh)
        return predict_seconds(step.spec, step.operand, links if bandwidth is None else links.with_bandwidth(bandwidth))
    link = network.crossing
    return link.wait(step.launches) + step.endpoint_bytes / (bandwidth or link.bandwidth)


def _predict_scatter(peers: _Factors, mesh: Mesh, wires: Wires) -> StepTime:
    """Seconds of a reduce-scatter of a byte among these peers, members counted major to minor.

    Among all devices on wires it runs in two levels (`MeshPlace.levels`), since libtpu has no reduce-scatter over all
    axes of a torus, but an all-reduce. So not all wires carry it at once: on 2x2x2 that takes 12/7 of the time.
    """
    *most, (stride, size) = peers
    block, inner = 1 / math.prod(size for _, size in peers), primes(size)[0]
    outer = [*most, (stride * inner, size // inner)] if inner < size else most
    if math.prod(size for _, size in peers) < mesh.size or not outer or not any(map(wires.wired, mesh.axes)):
        return _predict_gather(peers, block, mesh, wires)
    levels = (outer, inner * block), ([(stride, inner)], block)
    times = [_predict_gather(among, nbytes, mesh, wires)[0][0] for among, nbytes in levels]
    return StepTime((((sum(wait for wait, _ in times), sum(seconds for _, seconds in times)),),))


def _gathered_factors(refinement: Refinement) -> _Factors:
    return [(d.src, d.radix) for d in refinement.gathered if d.src is not None]


def _exchange_peers(refinement: Refinement) -> tuple[_Factors, _Factors, Origins]:
    """The factors whose peers an exchange meets in turn, those that messages of any round may cross, and where senders
    are: see `Origins`.

    A digit that changes holders sends every message across both of them.
    """
    by_dst = {d.dst: d for d in refinement.digits if d.dst is not None}
    crossed = {(s, d.radix) for d in refinement.swapped for s in (d.src, d.dst) if s is not None}
    origins: dict[tuple[int, int], int | None] = {(d.src or 0, d.radix): d.dst for d in refinement.swapped}
    in_turn: list[tuple[int, int]] = []
    for digit in refinement.gathered:
        stride = digit.src or 0
        before = by_dst.get(stride)
        if before is not None and before.src is not None:
            crossed.add((stride, digit.radix))
        in_turn.append((stride, digit.radix))
        origins[stride, digit.radix] = None
    for stride, digit in by_dst.items():
        if stride not in refinement.used_before:
            # A stride that held nothing: the coordinate that is left over where the chain of its digit starts.
            head = stride
            while (passed := by_dst.get(head)) is not None and passed.src is not None:
                head = passed.src
            if head != stride:
                origins[stride, digit.radix] = head
    return in_turn, sorted(crossed), origins


def _predict_blocks(
    in_turn: _Factors,
    block: float,
    mesh: Mesh,
    wires: Wires,
    crossed: _Factors = (),
    repeat: int = 1,
    origins: Origins | None = None,
) -> StepTime:
    """Seconds for one block from every peer along the factors `in_turn` of the device positions, `repeat` times.

    Every message may cross the factors `crossed`, so once the fabric of one of these is the slowest left, all blocks
    that remain are charged to it. All fabrics work at once. On wires blocks go where `origins` say, by default to all.
    """
    met, crossing = _by_fabric(in_turn, mesh, wires), _by_fabric(crossed, mesh, wires)
    total = left = math.prod(size for _, size in in_turn)
    sent: dict[Link, int] = {}
    parts: list[tuple[float, float]] = []
    for fabric in _sort_fabrics({*met, *crossing}, mesh, wires):
        turn, over = met.get(fabric, ()), crossing.get(fabric, ())
        near = 0 if over else left // math.prod(sub.size for sub in turn)
        if fabric != _WIRES:
            # Axes of one link are one fabric.
            sent[wires[fabric]] = sent.get(wires[fabric], 0) + (left - near) * repeat
        else:
            blocks = left or total
            every = wires.spans(mesh, (*turn, *over))
            loads = [wires.spans(mesh, turn).swap(1) + wires.spans(mesh, over).permute(1), every.permute(1)]
            # One stretch of each physical axis is priced exactly so.
            known = not over and all(len(span.runs) == 1 and not span.rough for span in every)
            routed = None if known else wires.route(mesh, origins or dict.fromkeys(in_turn))
            load = min(loads if routed is None else [*loads, routed])
            waited = wires.slowest.wait((left - near or total) * repeat, 0) + every.latency
            parts.append((waited, blocks * block * repeat * load))
        left = near
    parts += [(link.wait(count), count * block / link.bandwidth) for link, count in sent.items()]
    return StepTime((tuple(parts),)) if parts else _NO_TIME


def _predict_gather(peers: _Factors, block: float, mesh: Mesh, wires: Wires) -> StepTime:
    """Seconds of a gather of blocks along factors of the device positions, or of a scatter of sums.

    Fabric by fabric, the slowest first, doubling. Or, over switches, in rings through all devices, as many as a domain
    has, so that its devices all send to the next one at once: so does NCCL, by whose model (`src/graph/tuning.cc`) the
    ports of all devices carry a gather together, and n - 1 of its p - 1 steps wait for the network between n nodes.
    """
    by_fabric = _by_fabric(peers, mesh, wires)
    left = total = math.prod(size for _, size in peers)
    latency, staged, waited = 0.0, 0.0, 0.0
    rings: dict[Link, float] = {}
    for fabric in _sort_fabrics(by_fabric, mesh, wires):
        turn = by_fabric[fabric]
        near = left // math.prod(sub.size for sub in turn)
        if fabric == _WIRES:
            spans = wires.spans(mesh, turn)
            latency += spans.latency
            staged += spans.gather(near * block)
        else:
            link = wires[fabric]
            rounds = sum(p - 1 for sub in turn for p in primes(sub.size))
            latency += rounds * link.latency
            staged += (left - near) * block / link.bandwidth
            # Of the steps along a ring, one in `near` leaves as many devices, and one in `left` more than these.
            share = 1 / near - (1 / left if left < total else 0)
            rings[link] = rings.get(link, 0.0) + share * (total - 1) * block / link.bandwidth
            waited += (total // near - total // left) * link.latency
        left = near
    doubling = ((latency, staged),)
    if _WIRES in by_fabric or len(rings) < 2:
        return StepTime((doubling,))
    return StepTime((doubling, tuple((waited, seconds) for seconds in rings.values())))


_WIRES = ""
"""The fabric of all axes that lie on wires; others are their own."""


def _sort_fabrics(fabrics: Iterable[str], mesh: Mesh, wires: Wires) -> list[str]:
    """Fabrics from slow to fast, in the mesh's order where they are equal: the order of a set differs by process, and
    so would the last digit of a sum."""
    ordered = [axis for axis in (_WIRES, *mesh.axes) if axis in fabrics]
    return sorted(ordered, key=lambda axis: (wires.slowest if axis == _WIRES else wires[axis]).speed)


def _by_fabric(factors: _Factors, mesh: Mesh, wires: Wires) -> dict[str, list[SubAxis]]:
    """The sub-axes that factors of the device positions consist of, by fabric."""
    by_fabric: dict[str, list[SubAxis]] = {}
    for stride, size in factors:
        for sub in mesh.sub_axes(stride, size):
            by_fabric.setdefault(_WIRES if wires.wired(sub.axis) else sub.axis, []).append(sub)
    return by_fabric


def _predict_boxes(cost: Cost, operand: Layout, result: Layout, wires: Wires) -> StepTime:
    """Seconds of an exchange of boxes: on the slowest link that it can cross, that of an axis that a layout uses.

    On wires any message may go to any device of these axes.
    """
    used = {s.axis for s in (*operand.held, *result.held) if s.axis in wires} or set(wires)
    links = [wires[axis] for axis in used if not wires.wired(axis)]
    parts = [(link.wait(cost.launches), cost.received / link.bandwidth) for link in links]
    mesh = operand.mesh
    spans = wires.spans(mesh, (SubAxis(axis, 1, mesh.axes[axis]) for axis in mesh.axes if axis in used))
    if spans:
        parts.append((spans.latency + wires.slowest.wait(cost.launches, 0), spans.permute(cost.received)))
    return StepTime((tuple(parts),)) if parts else _NO_TIME
