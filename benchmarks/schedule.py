"""Seconds of a compiled module by its schedule: copies run beside a collective between its start and its done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reshard import hlo
from reshard.hlo.module import Computation, Instruction, Module

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


def clock(module: Module, bandwidth: float, copying: Local) -> Clock:
    """The clock at the end of a module; what a device receives takes so many bytes a second."""
    wires = {f"{each.computation}/{each.name}": each.received_bytes / bandwidth for each in hlo.collectives(module)}
    clock = Clock(wires, copying)
    clock.run(module, module.entry)
    return clock
