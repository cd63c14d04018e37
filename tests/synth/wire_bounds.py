"""What the wires of a torus need at least for a move: cuts and distances, of elements and devices, not of digits.

Nothing here knows steps, digits or formulas: a graph of devices, which elements each has and needs, and two bounds.

    cut        what a set of devices lacks together has to come in over the wires into it
    distance   an element that one device needs takes up as many wires as its nearest holder is away
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

from reshard.types import Layout
from reshard.types.meaning import meaning

Wire = tuple[int, int]
"""From one device to another."""

MOST_SETS = 1 << 12


class Graph:
    """The devices of a torus, counted row-major; every wire to one neighbour has half of `bandwidth`."""

    def __init__(self, sizes: Sequence[int], wraps: Sequence[bool], bandwidth: float = 1.0) -> None:
        self.sizes = tuple(sizes)
        self.count = math.prod(sizes)
        self.wires: Counter[Wire] = Counter()
        self.axes: dict[Wire, int] = {}
        for at in product(*map(range, sizes)):
            for axis, (size, wrap) in enumerate(zip(sizes, wraps, strict=True)):
                for step in (1, -1):
                    if size > 1 and (wrap or 0 <= at[axis] + step < size):
                        to = (*at[:axis], (at[axis] + step) % size, *at[axis + 1 :])
                        self.wires[self._number(at), self._number(to)] += 1
                        self.axes[self._number(at), self._number(to)] = axis
        self.wire = bandwidth / 2

    def _number(self, at: Sequence[int]) -> int:
        return int(np.ravel_multi_index(tuple(at), self.sizes))

    def sets(self) -> Iterator[int]:
        """Sets of devices as bits: all of them if few, else all boxes and some random ones."""
        if self.count <= 12:
            yield from range(1, (1 << self.count) - 1)
            return
        spans = [[(a, n) for n in range(1, size + 1) for a in range(size if n < size else 1)] for size in self.sizes]
        for box in product(*spans):
            places = product(
                *([(a + i) % size for i in range(n)] for (a, n), size in zip(box, self.sizes, strict=True))
            )
            yield sum(1 << self._number(at) for at in places)
        choose = random.Random(self.count)
        yield from (choose.randrange(1, (1 << self.count) - 1) for _ in range(MOST_SETS))

    def distances(self, start: Iterable[int], axis: int | None) -> list[int]:
        """Wires from the nearest of some devices to each; of one axis only, if given."""
        far = [self.count * 2] * self.count
        queue = deque(start)
        for device in queue:
            far[device] = 0
        while queue:
            device = queue.popleft()
            for (a, b), along in self.axes.items():
                length = int(axis is None or along == axis)
                if a == device and far[a] + length < far[b]:
                    far[b] = far[a] + length
                    queue.append(b)
        return far


def least_seconds(graph: Graph, source: Layout, target: Layout) -> float:
    """Seconds that every way to turn the source into the target takes on the wires of a graph, latencies aside."""
    moved = _elements(source, target)
    size = source.nbytes(1)
    return max([0.0, _cuts(graph, moved) * size, *(_hops(graph, moved, a) * size for a in _lengths(graph))])


def _elements(source: Layout, target: Layout) -> Counter[tuple[int, int]]:
    """How many elements have these holders and are needed by these devices that lack them, as bits of positions."""
    has, wants = (_bits(layout) for layout in (source, target))
    return Counter((int(h), int(w) & ~int(h)) for h, w in zip(has, wants, strict=True) if int(w) & ~int(h))


def _bits(layout: Layout) -> np.ndarray:
    bits = np.zeros(layout.shape, dtype=np.int64)
    for position, device in enumerate(layout.mesh.devices):
        index = ([i for i in dim if i < size] for dim, size in zip(meaning(layout, device), layout.shape, strict=True))
        bits[np.ix_(*index)] |= 1 << position
    return bits.ravel()


def _cuts(graph: Graph, moved: Counter[tuple[int, int]]) -> float:
    sets = np.fromiter(graph.sets(), dtype=np.int64)
    room = np.zeros(len(sets))
    for (a, b), count in graph.wires.items():
        room += count * graph.wire * (((sets >> a) & 1 == 0) & ((sets >> b) & 1 == 1))
    brought = np.zeros(len(sets))
    for (has, wants), count in moved.items():
        brought += count * (((sets & has) == 0) & ((sets & wants) != 0))
    return float((brought / np.maximum(room, 1e-12)).max())


def _lengths(graph: Graph) -> list[int | None]:
    return [None, *(axis for axis, size in enumerate(graph.sizes) if size > 1)]


def _hops(graph: Graph, moved: Counter[tuple[int, int]], axis: int | None) -> float:
    """The wires that single needs take up, over all there are."""
    near = {has: graph.distances([p for p in range(graph.count) if has >> p & 1], axis) for has, _ in moved}
    used = sum(
        count * max(near[has][p] for p in range(graph.count) if wants >> p & 1) for (has, wants), count in moved.items()
    )
    there = sum(count for wire, count in graph.wires.items() if axis is None or graph.axes[wire] == axis)
    return used / (there * graph.wire)


def flow_seconds(graph: Graph, source: Layout, target: Layout) -> float | None:
    """Seconds of the best way, by a linear program of flows; None if some elements are needed by several devices.

    A commodity is what the holders of some elements have: it starts at any of them, and ends where it is needed.
    """
    moved = _elements(source, target)
    if not moved or any(wants.bit_count() != 1 for _, wants in moved):
        return None
    wires, commodities = list(graph.wires), sorted({has for has, _ in moved})
    columns = len(wires) * len(commodities) + 1
    upper = lil_matrix((len(wires), columns))
    for number, wire in enumerate(wires):
        upper[number, -1] = -graph.wires[wire] * graph.wire
        for group in range(len(commodities)):
            upper[number, group * len(wires) + number] = 1
    rows: list[tuple[int, dict[int, int], int]] = []
    for group, has in enumerate(commodities):
        for device in range(graph.count):
            if not has >> device & 1:
                ends = {n: (b == device) - (a == device) for n, (a, b) in enumerate(wires)}
                rows.append((group, ends, moved.get((has, 1 << device), 0)))
    balance = lil_matrix((len(rows), columns))
    for row, (group, ends, _) in enumerate(rows):
        for number, sign in ends.items():
            if sign:
                balance[row, group * len(wires) + number] = sign
    goal = np.zeros(columns)
    goal[-1] = 1
    solved = linprog(goal, upper.tocsr(), np.zeros(len(wires)), balance.tocsr(), [need for *_, need in rows])
    assert solved.status == 0, solved.message
    return float(solved.fun) * source.nbytes(1)
