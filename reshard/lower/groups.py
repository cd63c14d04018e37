"""Replica groups and permutation pairs, from the device strides that a step moves."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import PlanError
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair.overlap import piece
from reshard.types.pair.refine import Refinement, refine

Groups = tuple[tuple[int, ...], ...]
"""Device ids, group by group, each in the order that numbers its blocks."""

Factors = Sequence[tuple[int, int]]
"""(stride, size) factors of the device positions, major to minor."""


def groups_along(mesh: Mesh, factors: Factors) -> Groups:
    """The groups of devices that differ only along these factors, members counted major to minor.

    >>> groups_along(Mesh(x=4, y=2), [(2, 4)])
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    offsets = [0]
    for stride, size in factors:
        offsets = [at + stride * value for at in offsets for value in range(size)]
    firsts = [p for p in range(mesh.size) if all(p // stride % size == 0 for stride, size in factors)]
    ids = mesh.devices
    return tuple(tuple(ids[first + offset] for offset in offsets) for first in firsts)


def coordinates(mesh: Mesh, factors: Factors) -> dict[int, int]:
    """The block number of each device along these factors, major to minor."""
    found: dict[int, int] = {}
    for position, device in enumerate(mesh.devices):
        number = 0
        for stride, size in factors:
            number = number * size + position // stride % size
        found[device] = number
    return found


def permutation(operand: Layout, result: Layout) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) for every receiver: who holds before what it must hold after.

    Where several devices hold the same tile, the senders are chosen so that each sends once.
    """
    r = refine(operand, result)
    if r is not None and operand.partial == result.partial:
        chains = Chains(r)
        ids = operand.mesh.devices
        return tuple((ids[chains.sender(at, ())], ids[at]) for at in range(operand.mesh.size))
    return _matched(operand, result)


def _matched(operand: Layout, result: Layout) -> tuple[tuple[int, int], ...]:
    """Devices matched by the piece they hold, a device with itself where it can be."""
    waiting: dict[tuple[int, ...], list[int]] = {}
    pairs: list[tuple[int, int]] = []
    wants = {d: _tile(result, d) for d in operand.mesh.devices}
    for device in operand.mesh.devices:
        held = _tile(operand, device)
        if held == wants[device]:
            pairs.append((device, device))
            del wants[device]
        else:
            waiting.setdefault(held, []).append(device)
    for device, wanted in wants.items():
        if not waiting.get(wanted):
            raise PlanError(f"permute: no device is left that holds what device {device} of {result} needs")
        pairs.append((waiting[wanted].pop(), device))
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def _tile(layout: Layout, device: int) -> tuple[int, ...]:
    position = layout.mesh.position(device)
    summand = layout.mesh.coordinates(position, layout.partial)
    return (*(piece(dim, layout.mesh, position) for dim in layout.dims), *summand)


class Chains:
    """Who sends to whom in round j of an even exchange, in closed form.

    The receiver fixes the sender's coordinate along every stride that holds a digit before: the
    receiver's coordinate along the digit's holder after, or, where the digit becomes local, the
    number of the share, counted from the receiver's own coordinate at the head of the chain so
    that every round is a bijection. A stride that held nothing takes the coordinate that its
    chain leaves over.
    """

    def __init__(self, r: Refinement) -> None:
        self._after = {a.dst: a for a in r.digits if a.dst is not None}
        self.shares = [(a, self._head(a.src or 0)) for a in r.gathered]
        radix = {s: a.radix for a in r.digits for s in (a.src, a.dst) if s is not None}
        self._fixed = [(a.src, a.dst, a.radix) for a in r.digits if a.src is not None and a.dst is not None]
        free = [s for s in self._after if s not in r.used_before]
        self._fixed += [(s, self._head(s), radix[s]) for s in free]

    def _head(self, stride: int) -> int:
        """The coordinate that the chain through a stride leaves over, found from its end."""
        while (atom := self._after.get(stride)) is not None and atom.src is not None:
            stride = atom.src
        return stride

    def share(self, position: int, turn: Sequence[int]) -> list[int]:
        """Which share, along each digit that becomes local, a receiver gets in a turn."""
        return [(position // head % a.radix + j) % a.radix for (a, head), j in zip(self.shares, turn, strict=True)]

    def sender(self, position: int, turn: Sequence[int]) -> int:
        """The position that sends to `position` in a turn."""
        found = position
        for src, dst, radix in self._fixed:
            found += (position // dst % radix - position // src % radix) * src
        for (atom, _), value in zip(self.shares, self.share(position, turn), strict=True):
            stride = atom.src or 0
            found += (value - position // stride % atom.radix) * stride
        return found
