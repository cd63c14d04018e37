"""Cuts: the least time of one collective on wires, what crosses the worst cut of a physical axis.

Programs of XLA run collectives one after another. Rounds of an exchange, each of which may load other wires, share
none of their time, so that an exchange takes the sum of its rounds where `cost` has all of them at once:

    an exchange in the place of an all-to-all, v5p 2x2x2, 7 blocks of b bytes, links of W bytes/second
    at once      4 blocks cross a link                                    4 b / W
    in turn      1 block in each round, whichever axes it goes along      7 b / W
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reshard.synth.wires import PhysicalAxis, Wires
from reshard.types.mesh import Mesh

Positions = NDArray[np.int_]
Placed = list[tuple[PhysicalAxis, Positions]]
"""The physical axes, with the coordinates of all devices."""


def bound_round(wires: Wires, mesh: Mesh, senders: Positions) -> float | None:
    """Seconds for each byte of a message, where the device at each position gets one from the one at `senders`; None
    unless all axes of the mesh are wired.

    >>> from reshard.synth import Network
    >>> ring = Network.of({"x": (0.0, 2.0, "ring")}).links(Mesh(x=4))
    >>> [bound_round(Wires.of(ring, Mesh(x=4)), Mesh(x=4), (np.arange(4) + far) % 4) for far in range(3)]
    [0.0, 0.5, 1.0]
    """
    placed = _place_devices(wires, mesh)
    if placed is None:
        return None
    moving = senders != np.arange(mesh.size)
    busy = moving | np.isin(np.arange(mesh.size), senders[moving])
    most = 1 / _list_speeds(placed)[busy].min() if busy.any() else 0.0
    for side, speed in _list_wire_cuts(placed):
        most = max(most, float((side & ~side[senders]).sum()) / speed, float((~side & side[senders]).sum()) / speed)
    return float(most)


def bound_groups(wires: Wires, mesh: Mesh, groups: Positions, swaps: bool) -> float | None:
    """Seconds for each byte of a block that devices of the same row of `groups` send each other: a block of their own
    to each if the collective `swaps`, else one for all, which crosses a cut once."""
    placed = _place_devices(wires, mesh)
    if placed is None:
        return None
    size = groups.shape[1]
    most = (size - 1) / _list_speeds(placed).min() if size > 1 else 0.0
    for side, speed in _list_wire_cuts(placed):
        here = side[groups].sum(axis=1)
        there, split = size - here, (here > 0) & (here < size)
        crossing = (here * there).sum() if swaps else max((here * split).sum(), (there * split).sum())
        most = max(most, float(crossing) / speed)
    return float(most)


def _place_devices(wires: Wires, mesh: Mesh) -> Placed | None:
    # `Wires` has lists, since planning needs the standard library alone.
    placed = wires.place_devices(mesh)
    return None if placed is None else [(axis, np.array(at)) for axis, at in placed]


def _list_speeds(placed: Placed) -> NDArray[np.float64]:
    """Bytes a second of all links of each device, one way."""
    total = np.zeros(len(placed[0][1]))
    for axis, at in placed:
        ends = 2 * (axis.size > 1) if axis.wraps else (at > 0).astype(int) + (at < axis.size - 1)
        total += ends * axis.link.bandwidth / 2
    return total


def _list_wire_cuts(placed: Placed) -> Iterator[tuple[NDArray[np.bool_], float]]:
    """The devices on one side of each cut, and the bytes a second that cross it one way: what lies before a place of a
    line, or on an arc of a ring."""
    for axis, at in placed:
        rows, wraps = len(at) // axis.size, axis.wraps
        speed = rows * (1 + wraps) * axis.link.bandwidth / 2
        for length in range(1, axis.size // 2 + 1 if wraps else axis.size):
            for start in range(axis.size if wraps else 1):
                yield (at - start) % axis.size < length, speed
