"""What the live bytes of a step are made of."""

from __future__ import annotations

from typing import NamedTuple

from reshard.types.plan import Plan, Step

SOURCE, OPERAND, RESULT, SCRATCH = "source", "operand", "result", "scratch"
IN_PLACE = "operand and result in one place"


class Moment(NamedTuple):
    """A time at which bytes are live on a device: before, in a step, or after."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def live_bytes(self) -> int:
        """All of it."""
        return sum(size for _, size in self.parts)


def parts(step: Step) -> tuple[tuple[str, int], ...]:
    """What is live on a device while a step runs, by name, in bytes; together `step.live_bytes`.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> parts(Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)))
    (('source', 0), ('operand', 16), ('result', 64), ('scratch', 0))
    """
    scratch = (SCRATCH, step.cost.scratch)
    if step.mode.in_place:
        return (IN_PLACE, max(step.operand.tile_bytes, step.result.tile_bytes)), scratch
    return (SOURCE, step.retained_bytes), (OPERAND, step.operand.tile_bytes), (RESULT, step.result.tile_bytes), scratch


def moments(plan: Plan) -> list[Moment]:
    """The source before the first step, each step, and what is left after the last one."""
    before = Moment("before", ((SOURCE, plan.source.tile_bytes),))
    if not plan.steps:
        return [before]
    kept = () if plan.donate else ((SOURCE, plan.source.tile_bytes),)
    after = Moment("after", (*kept, (RESULT, plan.target.tile_bytes)))
    return [before, *(Moment(f"{n} {s.kind}", parts(s)) for n, s in enumerate(plan.steps, 1)), after]
