"""Seconds of a compiled module: what its collectives take on wires, and its schedule, in which copies run beside a
collective between its start and its done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard import hlo
from reshard.hlo.instruction import Instruction
from reshard.hlo.module import Computation, Module
from reshard.synth.network import Network

# ---- wires -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fabric:
    """Where devices are on a torus, in the order of a module's partitions, and the bytes a second of one link one way.

    `wraps` says which axes are rings; others are lines. Without axes it is a switch, with one link for each device.
    """

    coordinates: tuple[tuple[int, ...], ...]
    wraps: tuple[bool, ...]
    link: float

    @classmethod
    def of(cls, devices: Sequence[Any], network: Network) -> Fabric:
        """That of a network's inner fabric: TPUs say where they are."""
        inner, torus = network.inner, network.torus
        assert inner is not None
        if torus is None:
            return cls(tuple((n,) for n in range(len(devices))), (), inner.bandwidth)
        coordinates = tuple(tuple(device.coords) for device in devices)
        sizes = tuple(1 + max(each) - min(each) for each in zip(*coordinates, strict=True))
        return cls(coordinates, torus.wraps(sizes), inner.bandwidth / 2)

    @cached_property
    def cuts(self) -> tuple[tuple[NDArray[np.bool_], int], ...]:
        """Sides of cuts across an axis, as flags of the devices, with the links that join a side to the rest: of a
        line what lies before a place, of a ring its arcs."""
        at = np.array(self.coordinates)
        cuts: list[tuple[NDArray[np.bool_], int]] = []
        for axis, wraps in enumerate(self.wraps):
            size = len(set(at[:, axis]))
            rows = len(at) // size
            first = range(size) if wraps else range(1)
            arcs = ((start, length) for start in first for length in range(1, size // 2 + 1 if wraps else size))
            cuts += [((at[:, axis] - start) % size < length, rows * (1 + wraps)) for start, length in arcs]
        return tuple(cuts)

    @cached_property
    def degrees(self) -> NDArray[np.int_]:
        """The links of each device."""
        at, degrees = np.array(self.coordinates), np.zeros(len(self.coordinates), int)
        for axis, wraps in enumerate(self.wraps):
            last = at[:, axis].max()
            degrees += 2 * (last > 0) if wraps else (at[:, axis] > 0).astype(int) + (at[:, axis] < last)
        return degrees if self.wraps else np.ones_like(degrees)

    def seconds(self, one: hlo.Collective) -> float:
        """The least time in which the wires carry one run of a collective: what crosses the worst cut, or the busiest
        device's links."""
        size, results = one.group_size, sum(array.nbytes for array in one.results)
        if one.kind == "permute":
            ends = np.array([pair for pair in one.pairs if pair[0] != pair[1]], int).reshape(-1, 2)
            most = results / self.degrees[ends].min() if len(ends) else 0.0
            for side, links in self.cuts:
                sides = side[ends]
                out, into = sides[:, 0] & ~sides[:, 1], ~sides[:, 0] & sides[:, 1]
                most = max(most, results * int(max(out.sum(), into.sum())) / links)
            return float(most) / self.link
        groups = [np.array(group) for group in one.groups.lists if len(group) > 1] if one.groups else []
        most = one.received_bytes / self.degrees[np.concatenate(groups)].min() if groups else 0.0
        block = results if one.kind == "reduce_scatter" else results / size
        for side, links in self.cuts:
            halves = [(here, len(group) - here) for group in groups for here in [int(side[group].sum())]]
            split = [(here, there) for here, there in halves if here and there]
            # A block of an all-to-all goes to one device; a gathered tile, or the sum of a side, crosses once for all.
            crossing = (
                sum(here * there for here, there in split)
                if one.kind in ("all_to_all", "ragged_all_to_all")
                else max(map(sum, zip(*split, strict=True)), default=0) * (1 + (one.kind == "all_reduce"))
            )
            most = max(most, crossing * block / links)
        return float(most) / self.link


def wire_seconds(collectives: Iterable[hlo.Collective], fabric: Fabric) -> Iterator[tuple[str, float]]:
    """The place of each collective in its module, and what the wires need for one run of it."""
    known: dict[tuple[object, ...], float] = {}
    for one in collectives:
        key = one.kind, one.results, one.pairs, one.instruction.attributes.get("replica_groups")
        if key not in known:
            known[key] = fabric.seconds(one)
        yield f"{one.computation}/{one.name}", known[key]


# ---- the schedule ----------------------------------------------------------------------------------------

SHORT = 1e-6
"""Seconds of kernels that count as none: a loop adds to its counter beside everything."""
Local = Callable[[Module, Computation, Instruction], float]


@dataclass
class Clock:
    """The time so far, when memory and the network are free again, and what has started and is not yet waited for.

    `wires` are the seconds of each collective, by its computation and name, and `copying` what an instruction takes
    otherwise.
    """

    wires: Mapping[str, float]
    copying: Local
    now: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    local: float = 0.0
    sent: float = 0.0
    overlapped: int = 0
    copies: list[tuple[float, float]] = field(default_factory=list)
    started: dict[str, tuple[float, float]] = field(default_factory=dict)

    def copy(self, name: str, seconds: float) -> None:
        """Starts a kernel, after those before it."""
        begin = max(self.now, self.memory)
        self.memory = begin + seconds
        self.local += seconds
        self.copies.append((begin, self.memory))
        self.started[name] = self.copies[-1]

    def send(self, name: str, wire: str) -> None:
        """Starts a collective, after those before it."""
        begin = max(self.now, self.network)
        self.network = begin + self.wires[wire]
        self.sent += self.wires[wire]
        self.started[name] = (begin, self.network)

    def wait(self, name: str) -> tuple[float, float]:
        """Waits for a kernel or a collective."""
        begin, end = self.started.pop(name)
        self.now = max(self.now, end)
        return begin, end

    def received(self, name: str) -> None:
        """Waits for a collective, and counts it if kernels ran meanwhile."""
        begin, end = self.wait(name)
        beside = sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self.copies[-16:])
        self.overlapped += beside > SHORT

    def run(self, module: Module, computation: Computation) -> None:
        """Runs a computation in the order of its text."""
        for one in computation.instructions:
            if one.opcode == "while":
                body = module.computation(one.attributes["body"].lstrip("%"))
                for _ in range(hlo.trip_count(module, computation, one) or 1):
                    self.run(module, body)
            elif one.opcode == "conditional":
                self.run(module, module.computation(one.called[0]))  # Branches differ in who sends to whom.
            elif one.opcode.removesuffix("-start") in hlo.KINDS:
                self.send(one.name, _at(computation, one))
                if not one.opcode.endswith("-start"):
                    self.received(one.name)
            elif one.opcode.removesuffix("-done") in hlo.KINDS:
                self.received(one.operands[0])
            elif one.opcode.endswith("-done"):
                self.wait(one.operands[0])
            else:
                self.copy(one.name, self.copying(module, computation, one))
                if not one.opcode.endswith("-start"):
                    self.wait(one.name)


def _at(computation: Computation, one: Instruction) -> str:
    return f"{computation.name}/{one.name}"


def clock(module: Module, fabric: Fabric, copying: Local) -> Clock:
    """The clock at the end of a module."""
    clock = Clock(dict(wire_seconds(hlo.collectives(module, every_branch=True), fabric)), copying)
    clock.run(module, module.entry)
    return clock
