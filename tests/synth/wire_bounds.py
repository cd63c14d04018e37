"""What the wires of a fabric need at least for a move: cuts and distances, of elements and devices, not of digits.

Nothing here knows steps, digits or formulas: a graph of devices, which elements each has and needs, and two bounds.

    cut        what a set of devices lacks together has to come in over the wires into it
    distance   an element that one device needs takes up as many wires as its nearest holder is away
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from reshard.types import Layout
from reshard.types.meaning import meaning

MOST_SETS = 1 << 12

Bits = NDArray[np.bool_]


class Needs(NamedTuple):
    """Elements that are needed where they are not: how many, which devices have them, which need them."""

    elements: NDArray[np.float64]
    has: Bits
    wants: Bits


class Graph:
    """Devices on a torus, counted row-major, several of them on a switch if there are more devices.

    A wire to one neighbour has half the bandwidth of its physical axis. `switches` are (devices that share it, bytes a
    second and device): a device reaches all others of its domain.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        wraps: Sequence[bool],
        bandwidth: float = 1.0,
        switches: Sequence[tuple[int, float]] = (),
        count: int = 0,
    ) -> None:
        self.sizes, self.wraps, self.wire, self.switches = tuple(sizes), tuple(wraps), bandwidth / 2, tuple(switches)
        self.torus = math.prod(sizes)
        self.count = count or self.torus
        numbers = np.arange(self.count).reshape(-1, *sizes)
        wires: list[tuple[int, int, int]] = []
        for axis, (size, wrap) in enumerate(zip(sizes, wraps, strict=True)):
            there = np.roll(numbers, -1, axis + 1)
            keep = np.arange(self.count).reshape(numbers.shape)
            pairs = zip(keep.ravel().tolist(), there.ravel().tolist(), strict=True)
            at = (keep // math.prod(sizes[axis + 1 :]) % size).ravel().tolist()
            for (a, b), place in zip(pairs, at, strict=True):
                if size > 1 and (wrap or place < size - 1):
                    wires += [(a, b, axis), (b, a, axis)]
        self.wires = np.array(wires, dtype=np.int64).reshape(-1, 3)

    def sets(self) -> Iterator[Bits]:
        """Sets of devices: all if few, else boxes, domains, single devices, those outside, and some random ones."""
        if self.count <= 12:
            yield from (((number >> np.arange(self.count)) & 1) == 1 for number in range(1, (1 << self.count) - 1))
            return
        places = np.arange(self.count)
        domains = {self.count, *([self.torus] if self.sizes else []), 1, *(size for size, _ in self.switches)}
        kept = [places // size == number for size in domains for number in range(self.count // size)]
        kept += [(places // size == one // size) & (places != one) for size, _ in self.switches for one in places]
        spans = [[(a, n) for n in range(1, size + 1) for a in range(size if n < size else 1)] for size in self.sizes]
        boxes = list(product(*spans))
        if len(boxes) > MOST_SETS:  # Planes only: along one axis.
            full = [axis[-1] for axis in spans]
            boxes = [(*full[:at], each, *full[at + 1 :]) for at, axis in enumerate(spans) for each in axis]
        for box in boxes:
            inside = np.ones(self.count, dtype=np.bool_)
            for at, ((a, n), size) in enumerate(zip(box, self.sizes, strict=True)):
                inside &= (places // math.prod(self.sizes[at + 1 :]) % size - a) % size < n
            kept.append(inside)
            if self.torus < self.count:
                kept.append(inside & (places < self.torus))
        choose = random.Random(self.count)
        if self.count <= 16:
            kept += [np.array([choose.random() < 0.5 for _ in range(self.count)]) for _ in range(MOST_SETS)]
        for each in kept:
            if 0 < each.sum() < self.count:
                yield each
                yield ~each

    def room(self, sets: Bits) -> NDArray[np.float64]:
        """Bytes a second into each of some sets of devices, over all wires."""
        a, b = self.wires[:, 0], self.wires[:, 1]
        room = self.wire * (~sets[:, a] & sets[:, b]).sum(axis=1)
        for size, bandwidth in self.switches:
            inside = sets.reshape(len(sets), -1, size).sum(axis=2)  # Ports that receive; the others of a domain send.
            room = room + bandwidth * np.minimum(inside, size - inside).sum(axis=1)
        return room.astype(np.float64)

    def distances(self, axis: int | None) -> NDArray[np.int64]:
        """Wires between every two devices; of one axis only, if given."""
        places, total = np.arange(self.count), np.zeros((self.count, self.count), dtype=np.int64)
        for at, (size, wrap) in enumerate(zip(self.sizes, self.wraps, strict=True)):
            on = places // math.prod(self.sizes[at + 1 :]) % size
            apart = np.abs(on[:, None] - on[None, :])
            total += (np.minimum(apart, size - apart) if wrap else apart) if axis in (None, at) else 0
        return total


def least_seconds(graph: Graph, source: Layout, target: Layout) -> float:
    """Seconds that every way to turn the source into the target takes on the wires of a graph, latencies aside."""
    needs = list_needs(source, target)
    if not len(needs.elements):
        return 0.0
    size, axes = source.nbytes(1), [axis for axis, length in enumerate(graph.sizes) if length > 1]
    hops = [_hops(graph, needs, axis) for axis in (None, *axes)] if axes and graph.torus == graph.count else []
    return max(_cuts(graph, needs), *hops, 0.0) * size


def list_needs(source: Layout, target: Layout) -> Needs:
    """The elements that some devices need and do not have, those alike as one."""
    has, wants = (_holders(layout) for layout in (source, target))
    both = np.packbits(np.concatenate([has, wants & ~has], axis=1), axis=1)
    kinds, first, count = np.unique(both, axis=0, return_index=True, return_counts=True)
    del kinds
    needed = (wants & ~has)[first].any(axis=1)
    return Needs(count[needed].astype(np.float64), has[first][needed], (wants & ~has)[first][needed])


def _holders(layout: Layout) -> Bits:
    """Which devices, by position, have each element."""
    bits = np.zeros((*layout.shape, layout.mesh.size), dtype=np.bool_)
    for position, device in enumerate(layout.mesh.devices):
        index = ([i for i in dim if i < size] for dim, size in zip(meaning(layout, device), layout.shape, strict=True))
        bits[(*np.ix_(*index), position)] = True
    return bits.reshape(-1, layout.mesh.size)


def _cuts(graph: Graph, needs: Needs) -> float:
    sets = np.array(list(graph.sets()))
    room = graph.room(sets)
    brought = np.zeros(len(sets))
    for low in range(0, len(needs.elements), 1 << 10):
        part = slice(low, low + (1 << 10))
        has, wants = (each[part].astype(np.float32) @ sets.T.astype(np.float32) for each in needs[1:])
        brought += needs.elements[part] @ ((has == 0) & (wants > 0))
    return float((brought / np.maximum(room, 1e-12)).max())


def _hops(graph: Graph, needs: Needs, axis: int | None) -> float:
    """The wires that single needs take up, over all there are."""
    far, used = graph.distances(axis), 0.0
    owners, which = np.unique(needs.has, axis=0, return_inverse=True)
    for number, has in enumerate(owners):
        near, here = far[has].min(axis=0), which.ravel() == number
        used += float(needs.elements[here] @ np.where(needs.wants[here], near, 0).max(axis=1))
    there = len(graph.wires) if axis is None else int((graph.wires[:, 2] == axis).sum())
    return used / (there * graph.wire)


def flow_seconds(graph: Graph, source: Layout, target: Layout) -> float | None:
    """Seconds of the best way, by a linear program of flows; None if some elements are needed by several devices.

    A commodity is what the holders of some elements have: it starts at any of them, and ends where it is needed.
    """
    needs = list_needs(source, target)
    if not len(needs.elements) or (needs.wants.sum(axis=1) != 1).any() or graph.switches:
        return None
    owners, which = np.unique(needs.has, axis=0, return_inverse=True)
    wires, groups = len(graph.wires), len(owners)
    # Every wire carries all commodities in the time; where a commodity has no holder, what comes in and does not go out
    # is what is needed there.
    each, own = np.arange(groups * wires), np.repeat(np.arange(groups), wires)
    load = coo_matrix((np.ones(len(each)), (each % wires, each)), (wires, groups * wires + 1)).tolil()
    load[:, -1] = -graph.wire
    ends = np.concatenate([own * graph.count + np.tile(graph.wires[:, side], groups) for side in (0, 1)])
    signs = np.concatenate([np.full(len(each), sign) for sign in (-1.0, 1.0)])
    shape = groups * graph.count, groups * wires + 1
    balance = coo_matrix((signs, (ends, np.concatenate([each, each]))), shape).tocsr()
    needed = np.zeros((groups, graph.count))
    np.add.at(needed, (which.ravel(), needs.wants.argmax(axis=1)), needs.elements)
    free = ~owners.ravel()
    goal = np.zeros(groups * wires + 1)
    goal[-1] = 1
    solved = linprog(goal, load.tocsr(), np.zeros(wires), balance[free], needed.ravel()[free])
    assert solved.status == 0, solved.message
    return float(solved.fun) * source.nbytes(1)
