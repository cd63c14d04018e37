"""Compares two compiled programs by their collectives, their memory and their arithmetic.

`jit` compiles a function twice, as XLA does it and with our collectives. `figures` reads both programs, and `why_worse`
says why ours should be dropped, if it should.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reshard import hlo
from reshard.synth.network import LAUNCH_BYTES

SLACK_BYTES = 16 << 10
"""Two programs may differ by this much memory, and by 1%, because of alignment alone."""
FLOPS_PER_BYTE = 100
"""Operations worth spending to receive one byte less: an accelerator does thousands in that time."""


@dataclass(frozen=True)
class ProgramFigures:
    """What one device does in one run of a compiled program, from its HLO text and the compiler's own analysis.

    `peak_bytes` is arguments + outputs + temporaries - aliased buffers. `received_bytes` counts a loop whose trip count
    depends on data as one turn, and `loop_bytes` is the part of it that such loops receive. `by_line` has the bytes and
    launches of each line of user code. Memory and arithmetic are None for a module that was not compiled.
    """

    received_bytes: int
    launches: int
    temp_bytes: int | None
    peak_bytes: int | None
    flops: float | None
    loop_bytes: int = 0
    by_line: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]], repr=False)

    def cost(self, launch: int) -> int:
        """Received bytes, plus `launch` bytes for every collective that is started."""
        return self.received_bytes + self.launches * launch

    def cost_of(self, line: str, launch: int) -> int:
        """The cost of the collectives of one line."""
        received, launches = self.by_line.get(line, (0, 0))
        return received + launches * launch


@dataclass(frozen=True)
class Decision:
    """Which program is kept, "reshard" or "plain", and why.

    The figures are None if only the plain program was compiled: the program has no reshard to take over, or, with
    `failed`, the pass could not handle it.
    """

    chosen: str
    why: str
    failed: bool = False
    plain: ProgramFigures | None = None
    ours: ProgramFigures | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.chosen}: {self.why}"


def figures(compiled: Any) -> ProgramFigures:
    """The figures of a `jax.stages.Compiled`. Raises `NotationError` if its HLO text cannot be parsed."""
    memory: Any = compiled.memory_analysis()
    temp = int(memory.temp_size_in_bytes)
    live = int(memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    traffic = module_figures(compiled.as_text())
    return replace(traffic, temp_bytes=temp, peak_bytes=live + temp, flops=_flops(compiled))


def module_figures(text: str) -> ProgramFigures:
    """The figures of HLO text: its traffic alone."""
    collectives = hlo.collectives(hlo.parse(text))
    traffic = hlo.traffic(collectives)
    loops = sum(one.received_bytes for one in collectives if one.times is None)
    return ProgramFigures(traffic.received_bytes, traffic.launches, None, None, None, loops, _by_line(collectives))


def unprofitable_lines(
    plain: ProgramFigures, ours: ProgramFigures, taken: Iterable[str], launch: int
) -> tuple[frozenset[str], frozenset[str]]:
    """The lines whose reshards cost more after the pass, and those whose reshards do not cost less.

    XLA does not name a line for every collective. A line without any in the plain program is credited with all the
    collectives there that belong to none of the lines.
    """
    lines = frozenset(taken)
    others = plain.cost(launch) - ours.cost(launch)
    others -= sum(plain.cost_of(line, launch) - ours.cost_of(line, launch) for line in lines)
    gains = {line: (plain.cost_of(line, launch) or others) - ours.cost_of(line, launch) for line in lines}
    losing = frozenset(line for line, gain in gains.items() if gain < 0)
    not_gaining = frozenset(line for line, gain in gains.items() if gain <= 0)
    return losing, not_gaining


def why_worse(plain: ProgramFigures, ours: ProgramFigures, launch: int = LAUNCH_BYTES, prefer: str = "bytes") -> str:
    """The reason why our program is not better than the plain one; empty if it is better.

    Better means: it receives no more bytes, needs no more memory (up to rounding), computes no more than the saved
    bytes are worth, and either its collectives finish sooner or it needs less memory: both if memory is preferred, and
    the first if time is. `launch` is the cost of starting a collective, in bytes.
    """
    slack = SLACK_BYTES + (plain.peak_bytes or 0) // 100
    temp, more = plain.temp_bytes or 0, ours.temp_bytes or 0
    flops, computed = plain.flops or 0.0, ours.flops or 0.0
    if ours.received_bytes > plain.received_bytes:
        return f"it would receive {ours.received_bytes} B instead of {plain.received_bytes} B"
    if ours.loop_bytes > plain.loop_bytes:
        return f"it would receive {ours.loop_bytes} B instead of {plain.loop_bytes} B in each turn of a loop"
    if more > temp + slack:
        return f"it would need {more} B of temporary memory instead of {temp} B"
    if computed > flops * 1.01 + FLOPS_PER_BYTE * (plain.received_bytes - ours.received_bytes + launch):
        return f"it would compute {computed:.3g} operations instead of {flops:.3g}"
    before, after = plain.cost(launch), ours.cost(launch)
    if after > before:
        return f"it would start {ours.launches} collectives instead of {plain.launches}"
    return _why_not_preferred(prefer, after < before, more + slack <= temp)


def _why_not_preferred(prefer: str, sooner: bool, smaller: bool) -> str:
    """The reason why a program that is never worse is not better either; empty if it is."""
    if prefer == "memory" and not smaller:
        return "it would need as much temporary memory"
    if prefer == "time" and not sooner:
        return "its collectives would take as long"
    return "" if sooner or smaller else "it would receive as much, in as many collectives"


def savings(plain: ProgramFigures, ours: ProgramFigures) -> str:
    """One line that compares bytes, collectives and temporary memory of both programs, as far as they are known."""
    before = (
        " (XLA's own program was not compiled)" if plain.temp_bytes is None else f" instead of {plain.temp_bytes} B"
    )
    return (
        f"{ours.received_bytes} B received instead of {plain.received_bytes} B, in {ours.launches} collectives instead "
        f"of {plain.launches}; {ours.temp_bytes} B of temporary memory{before}"
    )


def _flops(compiled: Any) -> float:
    """0 if the backend has no cost analysis."""
    try:
        analysis: dict[str, float] = compiled.cost_analysis() or {}
    except (NotImplementedError, RuntimeError):
        return 0.0
    return analysis.get("flops", 0.0)


def _by_line(collectives: Iterable[hlo.Collective]) -> dict[str, tuple[int, int]]:
    lines: dict[str, tuple[int, int]] = {}
    for one in collectives:
        line = f"{one.source.file}:{one.source.line}" if one.source.file else ""
        times = 1 if one.times is None else one.times
        received, launches = lines.get(line, (0, 0))
        lines[line] = received + times * one.received_bytes, launches + times
    return lines
