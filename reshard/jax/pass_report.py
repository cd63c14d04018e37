"""What a program's reshards are, and what became of them: plain data for people and tools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from reshard.types.layout import Layout
from reshard.types.plan import Plan


@dataclass(frozen=True)
class Reshard:
    """One place where a program's data changes layout.

    `where` is the user's `file:line`, empty where the module does not say, and `operation` JAX's name stack there.
    `asked`: the user wrote the constraint; else the shardings around it demand the move. Layouts and plan are None
    where the move cannot be planned. `why` says why it was left to XLA, if it was.
    """

    where: str
    operation: str
    asked: bool
    source: Layout | None
    target: Layout | None
    plan: Plan | None
    taken: bool
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: texts, bytes a device, and the plan's own figures."""
        named = {"where": self.where, "operation": self.operation, "asked": self.asked}
        layouts = {"source": str(self.source or ""), "target": str(self.target or "")}
        plan = None if self.plan is None else self.plan.to_dict()
        return {**named, **layouts, "plan": plan, "taken": self.taken, "why": self.why}

    def __str__(self) -> str:
        moved = f"{self.source} -> {self.target}" if self.source else "cannot be planned"
        steps = ", ".join(step.kind for step in self.plan.steps) if self.plan else ""
        return f"{self.where or self.operation or '(unknown)'}: {moved}: {steps if self.taken else f'left, {self.why}'}"


@dataclass(frozen=True)
class Report:
    """Every reshard of a program, in order, and whether the pass took it."""

    reshards: tuple[Reshard, ...] = ()

    @property
    def taken(self) -> tuple[Reshard, ...]:
        """Those that run our collectives."""
        return tuple(found for found in self.reshards if found.taken)

    @property
    def left(self) -> tuple[Reshard, ...]:
        """Those that are XLA's, where data moves."""
        return tuple(r for r in self.reshards if not r.taken and (r.source is None or r.source != r.target))

    def given_up(self, why: str) -> Report:
        """The report of a program that is compiled as it was, for a reason."""
        return Report(tuple(replace(r, taken=False, why=why) if r.taken else r for r in self.reshards))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"reshards": [found.to_dict() for found in self.reshards]}

    def __str__(self) -> str:
        moved = (*self.taken, *self.left)
        return "\n".join([f"reshards taken: {len(self.taken)} of {len(moved)}", *(f"  {found}" for found in moved)])
