"""What the pass did with a chain of collectives, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard.doctor.chains import Chain
from reshard.types.plan import Plan


@dataclass(frozen=True)
class ChainFate:
    """A chain of collectives, and what the pass did with it.

    `where` is the user's `file:line`, `does` its collectives in short. Bytes are those that a device receives in one
    run, `planned_bytes` those of the plans as compiled, None without one. `why` is the reason why it was left, empty if
    replaced.
    `collectives` has the names of its instructions, and `permutes` counts those of shifts, which have no plan.
    """

    where: str
    computation: str
    does: str
    received_bytes: int
    planned_bytes: int | None
    plans: tuple[Plan, ...] = ()
    why: str = ""
    collectives: frozenset[str] = field(default=frozenset(), repr=False)
    permutes: int = 0

    @property
    def replaced(self) -> bool:
        """Whether a plan took its place."""
        return not self.why

    @property
    def steps(self) -> tuple[str, ...]:
        """The collectives of its plans, in short."""
        return (*(step.kind for plan in self.plans for step in plan.steps), *("permute",) * self.permutes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "where": self.where,
            "computation": self.computation,
            "does": self.does,
            "received_bytes": self.received_bytes,
            "planned_bytes": self.planned_bytes,
            "plans": [plan.to_dict() for plan in self.plans],
            "permutes": self.permutes,
            "replaced": self.replaced,
            "why": self.why,
        }

    def __str__(self) -> str:
        what = f"{self.where or self.computation}: {self.does}, {self.received_bytes} B received"
        if self.why:
            return f"{what}: left, {self.why}"
        return f"{what}: replaced by {', '.join(self.steps) or 'nothing'}, {self.planned_bytes} B"


def fate_of(chain: Chain) -> ChainFate:
    """The fate of a chain before anything is decided."""
    sources = [one.source for one in chain.collectives]
    source = next((one for one in sources if one.exact and one.file), sources[0])
    where = f"{source.file}:{source.line}" if source.file else source.op_name or ""
    does = ", ".join(_counted(one.kind for one in chain.collectives))
    received = sum(one.received_bytes for one in chain.collectives)
    names = frozenset(one.name for one in chain.collectives)
    return ChainFate(where, chain.region.computation.name, does, received, None, collectives=names)


def _counted(kinds: Iterable[str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    yield from (kind if count == 1 else f"{count} {kind}" for kind, count in counts.items())
