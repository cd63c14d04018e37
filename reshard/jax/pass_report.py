"""`PassReport`: the reshards of a program, and what the pass did with each; plain data for people and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reshard import hlo
from reshard.doctor import Known
from reshard.plans.plan import Plan
from reshard.types.layout import Layout


@dataclass(frozen=True)
class Reshard:
    """One place where an array of a program changes its layout.

    `where` is the user's `file:line`, empty if the module does not name one, and `operation` is JAX's name stack there.
    `explicit` is True if the user wrote the constraint, False if the shardings of the operations around it require the
    move. Layouts and plan are None if the move cannot be planned. `why` is the reason why it was left to XLA, empty if
    it was `taken`. `near` has the lines that make and that use the data, since XLA gives collectives one of these.
    `does` is what XLA does there, if the pass has seen its collectives.
    """

    where: str
    operation: str
    explicit: bool
    source: Layout | None
    target: Layout | None
    plan: Plan | None
    taken: bool
    why: str = ""
    near: frozenset[str] = field(default=frozenset(), repr=False)
    does: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: layouts as text, sizes in bytes per device, and the plan's own figures."""
        named = {"where": self.where, "operation": self.operation, "explicit": self.explicit}
        layouts = {"source": str(self.source or ""), "target": str(self.target or "")}
        plan = None if self.plan is None else self.plan.to_dict()
        return {**named, **layouts, "plan": plan, "taken": self.taken, "why": self.why, "does": self.does}

    def __str__(self) -> str:
        moved = f"{self.source} -> {self.target}" if self.source else "" if self.does else "cannot be planned"
        moved = ": ".join(part for part in (self.does, moved) if part)
        steps = ", ".join(step.kind for step in self.plan.steps) if self.plan else ""
        return f"{self.where or self.operation or '(unknown)'}: {moved}: {steps if self.taken else f'left, {self.why}'}"


@dataclass(frozen=True)
class PassReport:
    """Every reshard of a program, in program order, and whether the pass took it over.

    `moves` are the moves that the program asks for, where the reshards are known by XLA's collectives alone.
    """

    reshards: tuple[Reshard, ...] = ()
    moves: tuple[Known, ...] = ()

    @property
    def taken(self) -> tuple[Reshard, ...]:
        """The reshards that run the collectives of plans."""
        return tuple(reshard for reshard in self.reshards if reshard.taken)

    @property
    def left(self) -> tuple[Reshard, ...]:
        """The reshards that XLA carries out and that move data."""
        return tuple(r for r in self.reshards if not r.taken and (r.source is None or r.source != r.target))

    @property
    def known(self) -> tuple[Known, ...]:
        """The moves that the program asks for, as the doctor takes them."""
        return self.moves or tuple(
            Known(one.where, one.source, one.target, one.near)
            for one in self.reshards
            if one.source is not None and one.target is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"reshards": [reshard.to_dict() for reshard in self.reshards]}

    def __str__(self) -> str:
        moved = (*self.taken, *self.left)
        rows = (f"  {reshard}" for reshard in moved)
        return "\n".join([f"reshards taken: {len(self.taken)} of {len(moved)}", *rows])


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
    """Whether the program runs the collectives of plans, "reshard", or is XLA's own, "plain", and why.

    `ours` has the figures of the compiled program, `plain` those of the module before the pass, whose memory nobody
    measured. Where there is no second program, because nothing can be replaced or the pass `failed`, its figures are
    None. Of a program that jax took from its cache on disk, it is not known what was replaced.
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


def read_figures(compiled: Any) -> ProgramFigures:
    """The figures of a `jax.stages.Compiled`. Raises `NotationError` if its HLO text cannot be parsed."""
    memory: Any = compiled.memory_analysis()
    temp = int(memory.temp_size_in_bytes)
    live = int(memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    try:
        analysis: dict[str, float] = compiled.cost_analysis() or {}
    except (NotImplementedError, RuntimeError):  # The backend has none.
        analysis = {}
    traffic = module_figures(compiled.as_text())
    return replace(traffic, temp_bytes=temp, peak_bytes=live + temp, flops=analysis.get("flops", 0.0))


def module_figures(text: str) -> ProgramFigures:
    """The figures of HLO text: its traffic alone."""
    collectives = hlo.collectives(hlo.parse(text))
    traffic = hlo.traffic(collectives)
    loops = sum(one.received_bytes for one in collectives if one.times is None)
    lines: dict[str, tuple[int, int]] = {}
    for one in collectives:
        line = f"{one.source.file}:{one.source.line}" if one.source.file else ""
        times = 1 if one.times is None else one.times
        received, launches = lines.get(line, (0, 0))
        lines[line] = received + times * one.received_bytes, launches + times
    return ProgramFigures(traffic.received_bytes, traffic.launches, None, None, None, loops, lines)


def describe_savings(plain: ProgramFigures, ours: ProgramFigures) -> str:
    """One line that compares bytes, collectives and temporary memory of both programs, as far as they are known."""
    before = (
        " (XLA's own program was not compiled)" if plain.temp_bytes is None else f" instead of {plain.temp_bytes} B"
    )
    return (
        f"{ours.received_bytes} B received instead of {plain.received_bytes} B, in {ours.launches} collectives instead "
        f"of {plain.launches}; {ours.temp_bytes} B of temporary memory{before}"
    )
