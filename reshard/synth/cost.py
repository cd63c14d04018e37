"""Predicted seconds of a step: the alpha-beta model, peer by peer.

A device gets one block from every peer, charged to the slowest axis on which the two differ:

    seconds = sum over axes of messages * latency + blocks * block bytes / bandwidth

In an all-to-all or an exchange each block is a message. A gather or a reduction passes blocks on,
doubling and doubling again, and takes sum(p - 1) messages over the primes p of the axis. So a gather
staged over the slow axis first sends fewer bytes over it than one over both axes at once, and an
all-to-all of small blocks over many peers is slow for its latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from reshard.synth.network import Link
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, primes
from reshard.types.pair.refine import Refinement, refine
from reshard.types.plan import StepSpec
from reshard.types.rules.checker import check_step

Links = Mapping[str, Link]


def seconds(move: StepSpec, operand: Layout, links: Links) -> float:
    """Predicted seconds of one move from an operand."""
    kind, result, mode = move
    cost = check_step(kind, operand, result, mode)
    if not cost.launches:
        return 0.0
    r = refine(operand, result)
    if r is None or (kind == "exchange" and not r.exact):
        return _boxes(cost.launches, cost.received, _slowest(operand, result, links))
    mesh = operand.mesh
    if kind == "all_reduce":
        peers = [(f.stride, f.size) for f in r.reduced]
        return 2 * _blocks(peers, operand.tile_bytes / math.prod(s for _, s in peers), mesh, links, doubling=True)
    if kind == "reduce_scatter":
        peers = [(f.stride, f.size) for f in r.reduced]
        return _blocks(peers, operand.tile_bytes / math.prod(s for _, s in peers), mesh, links, doubling=True)
    peers = [(a.src, a.radix) for a in r.gathered if a.src is not None]
    if kind == "all_gather":
        return _blocks(peers, operand.tile_bytes, mesh, links, doubling=True)
    if kind == "all_to_all":
        return _blocks(peers, operand.tile_bytes / math.prod(s for _, s in peers), mesh, links)
    pure, twisted, rounds = _exchange(r)
    per_round = cost.launches // max(1, rounds if twisted else rounds - 1)
    block = operand.tile_bytes if kind == "permute" else operand.nbytes(r.common)
    return _blocks(pure, block / per_round, mesh, links, twisted, per_round)


def fastest(routes: Iterable[Sequence[StepSpec]], source: Layout, links: Links) -> list[Sequence[StepSpec]]:
    """The routes of least predicted seconds; moves that several routes share are priced once."""
    known: dict[tuple[Layout, StepSpec], float] = {}
    times: list[tuple[float, Sequence[StepSpec]]] = []
    for route in routes:
        total, at = 0.0, source
        for move in route:
            if (at, move) not in known:
                known[at, move] = seconds(move, at, links)
            total += known[at, move]
            at = move.result
        times.append((total, route))
    least = min(time for time, _ in times)
    return [route for time, route in times if time <= least * (1 + 1e-9)]


def _blocks(
    pure: Iterable[tuple[int, int]],
    block: float,
    mesh: Mesh,
    links: Links,
    twisted: Iterable[int] = (),
    repeat: int = 1,
    *,
    doubling: bool = False,
) -> float:
    """Seconds for one block from every peer along the `pure` factors of the device positions.

    Along a `twisted` stride every message may cross, whatever its number, so once one of those
    is the slowest axis left, all that remains is charged to it.
    """
    sizes: dict[str, int] = {}
    total = 1
    for stride, size in pure:
        for sub in mesh.sub_axes(stride, size):
            sizes[sub.axis] = sizes.get(sub.axis, 1) * sub.size
        total *= size
    crossing = {mesh.axis_at(stride) for stride in twisted}
    time, left = 0.0, total
    for axis in sorted(sizes.keys() | crossing, key=lambda a: (links[a].bandwidth, -links[a].latency)):
        link = links[axis]
        near = 0 if axis in crossing else left // sizes[axis]
        blocks = (left - near) * repeat
        messages = sum(p - 1 for p in primes(sizes[axis])) if doubling else blocks
        time += messages * link.latency + blocks * block / link.bandwidth
        left = near
    return time


def _exchange(r: Refinement) -> tuple[list[tuple[int, int]], set[int], int]:
    """The factors whose peers an exchange meets in turn, the strides it twists, and its rounds."""
    by_dst = {a.dst: a for a in r.digits if a.dst is not None}
    twisted = {s for a in r.swapped for s in (a.src, a.dst) if s is not None}
    pure: list[tuple[int, int]] = []
    for atom in r.gathered:
        stride = atom.src or 0
        before = by_dst.get(stride)
        if before is not None and before.src is not None:
            twisted.add(stride)
        pure.append((stride, atom.radix))
    return pure, twisted, r.pieces


def _slowest(operand: Layout, result: Layout, links: Links) -> Link:
    """The slowest link that an exchange of boxes can cross: that of an axis that some layout uses."""
    axes = {s.axis for s in (*operand.held, *result.held) if s.axis in links} or set(links)
    return min((links[a] for a in axes), key=lambda link: (link.bandwidth, -link.latency))


def _boxes(rounds: int, received: int, link: Link) -> float:
    return rounds * link.latency + received / link.bandwidth
