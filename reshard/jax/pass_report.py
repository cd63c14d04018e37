"""`PassReport`: the reshards of a program, and what the pass did with each; plain data for people and tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
        """The reshards that run our collectives."""
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
