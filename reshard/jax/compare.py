"""Which of two compiled programs is better, by their own collectives, memory and arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reshard import hlo
from reshard.synth import Network

LAUNCH = 128 << 10
"""Bytes that take as long as starting one collective, where no network says so: about 1 us at 100 GB/s."""
SLACK = 16 << 10
"""Bytes of memory, besides 1%, by which two programs may differ in alignment alone."""


FLOPS = 100
"""Operations that are worth it to receive a byte less: accelerators do thousands in that time."""


@dataclass(frozen=True)
class Figures:
    """What one device does in one run of a compiled program, by the program's own text and the compiler's analysis.

    `loop_bytes` are those received in one turn of loops whose length depends on data; they are also in
    `received_bytes`, once.
    `peak_bytes` is arguments + outputs + temporaries - what is aliased; `by_line` has bytes and launches for each of
    the user's lines.
    """

    received_bytes: int
    launches: int
    temp_bytes: int
    peak_bytes: int
    flops: float
    loop_bytes: int = 0
    by_line: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]], repr=False)

    def cost(self, launch: int) -> int:
        """Bytes received, and those that starting the collectives is worth."""
        return self.received_bytes + self.launches * launch

    def cost_of(self, line: str, launch: int) -> int:
        """The same of a line's collectives alone."""
        received, launches = self.by_line.get(line, (0, 0))
        return received + launches * launch


@dataclass(frozen=True)
class Decision:
    """Which program was kept, "reshard" or "plain", and why.

    The figures are None where there was nothing to compare: no reshard to take, or, if `failed`, because the pass
    could not do the program.
    """

    chosen: str
    why: str
    failed: bool = False
    plain: Figures | None = None
    ours: Figures | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.chosen}: {self.why}"


def figures(compiled: Any) -> Figures:
    """The figures of a `jax.stages.Compiled`; raises `NotationError` for a text that is not understood."""
    found = hlo.collectives(hlo.parse(compiled.as_text()))
    traffic = hlo.traffic(found)
    memory: Any = compiled.memory_analysis()
    temp = int(memory.temp_size_in_bytes)
    live = int(memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    loops = sum(one.received_bytes for one in found if one.times is None)
    flops = _flops(compiled)
    return Figures(traffic.received_bytes, traffic.launches, temp, live + temp, flops, loops, _by_line(found))


def idle(plain: Figures, ours: Figures, taken: Iterable[str], launch: int) -> tuple[frozenset[str], frozenset[str]]:
    """The lines that it may be better to leave: those whose reshards lose, and all that do not gain.

    What a line's collectives cost is their bytes, and those that starting them is worth. Not of every collective
    XLA says the line: a line of which it has none is held to have had those that are of no line with a reshard.
    """
    lines = frozenset(taken)
    others = plain.cost(launch) - ours.cost(launch)
    others -= sum(plain.cost_of(line, launch) - ours.cost_of(line, launch) for line in lines)
    gains = {line: (plain.cost_of(line, launch) or others) - ours.cost_of(line, launch) for line in lines}
    lose = frozenset(line for line, gain in gains.items() if gain < 0)
    same = frozenset(line for line, gain in gains.items() if gain <= 0)
    return lose, same


def worse(plain: Figures, ours: Figures, launch: int = LAUNCH) -> str:
    """Why our program is not better than the plain one; empty if it is.

    Better is: no more bytes received, no more memory beyond rounding, no more arithmetic than that is worth, and
    sooner done with its collectives, or at least with less memory; starting a collective costs `launch` bytes.
    """
    slack = SLACK + plain.peak_bytes // 100
    if ours.received_bytes > plain.received_bytes:
        return f"it would receive {ours.received_bytes} B instead of {plain.received_bytes} B"
    if ours.loop_bytes > plain.loop_bytes:
        return f"it would receive {ours.loop_bytes} B instead of {plain.loop_bytes} B in each turn of a loop"
    if ours.temp_bytes > plain.temp_bytes + slack:
        return f"it would need {ours.temp_bytes} B of temporary memory instead of {plain.temp_bytes} B"
    if ours.flops > plain.flops * 1.01 + FLOPS * (plain.received_bytes - ours.received_bytes + launch):
        return f"it would compute {ours.flops:.3g} operations instead of {plain.flops:.3g}"
    before, after = plain.cost(launch), ours.cost(launch)
    if after > before:
        return f"it would start {ours.launches} collectives instead of {plain.launches}"
    if after == before and ours.temp_bytes + slack > plain.temp_bytes:
        return "it would receive as much, in as many collectives"
    return ""


def saved(plain: Figures, ours: Figures) -> str:
    """What our program saves."""
    return (
        f"{ours.received_bytes} B received instead of {plain.received_bytes} B, in {ours.launches} collectives instead "
        f"of {plain.launches}; {ours.temp_bytes} B of temporary memory instead of {plain.temp_bytes} B"
    )


def launch_bytes(network: Network | None) -> int:
    """What starting a collective costs on a network's slowest link, in bytes."""
    if network is None:
        return LAUNCH
    links = [link for link in (network.inner, network.outer, *(link for _, link in network.axes)) if link is not None]
    return int(max(link.latency * link.bandwidth for link in links))


def _flops(compiled: Any) -> float:
    """0 where the backend has no cost analysis."""
    try:
        found: dict[str, float] = compiled.cost_analysis() or {}
    except (NotImplementedError, RuntimeError):
        return 0.0
    return found.get("flops", 0.0)


def _by_line(found: Iterable[hlo.Collective]) -> dict[str, tuple[int, int]]:
    lines: dict[str, tuple[int, int]] = {}
    for one in found:
        line = f"{one.source.file}:{one.source.line}" if one.source.file else ""
        times = 1 if one.times is None else one.times
        received, launches = lines.get(line, (0, 0))
        lines[line] = received + times * one.received_bytes, launches + times
    return lines
