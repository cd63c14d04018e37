"""The figures of a program before and after the pass: its collectives, its memory and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reshard import hlo


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


@dataclass(frozen=True)
class Decision:
    """Whether the program runs our collectives, "reshard", or is XLA's own, "plain", and why.

    The figures of the other program are None: it was not made, because there is nothing to replace or, with `failed`,
    because the pass could not handle the program.
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
