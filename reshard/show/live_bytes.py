"""What a device's live bytes consist of before, during and after each step of a plan."""

from __future__ import annotations

from typing import NamedTuple

from reshard.types.pair.device_sets import disjoint
from reshard.types.plan import Plan, Step

SOURCE, OPERAND, RESULT, SCRATCH = "source", "operand", "result", "scratch"
IN_PLACE = "operand and result in one place"
RUNNING = "running batch"


class Moment(NamedTuple):
    """A point of a plan, such as "1 all_gather", and the bytes live on a device at it, by what they are."""

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def live_bytes(self) -> int:
        """The sum of the parts."""
        return sum(size for _, size in self.parts)


class Timeline(NamedTuple):
    """What is live on a device from the first moment to the last, its peak, and the floor, which no plan goes below."""

    moments: tuple[Moment, ...]
    peak_bytes: int
    floor_bytes: int


def live_parts(step: Step) -> tuple[tuple[str, int], ...]:
    """The bytes live on a device while a step runs, by what they are; they add up to `step.live_bytes`.

    The source is a part of its own where it is neither donated nor the operand. Between disjoint sets of devices they
    are those of a sender or of a receiver, whichever has more.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> live_parts(Step("all_gather", Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)))
    (('source', 0), ('operand', 16), ('result', 64), ('scratch', 0))
    """
    scratch = (SCRATCH, step.cost.scratch)
    if step.mode.in_place:
        return (IN_PLACE, max(step.operand.tile_bytes, step.result.tile_bytes)), scratch
    source, operand = (SOURCE, step.retained_bytes), (OPERAND, step.operand.tile_bytes)
    result = (RESULT, step.result.tile_bytes)
    if not disjoint(step.operand.mesh, step.result.mesh):
        return source, operand, result, scratch
    sends = source[1] + operand[1] >= result[1]
    return (source, operand, scratch) if sends else (result, scratch)


def moments(plan: Plan) -> list[Moment]:
    """The moments of a plan: the source before the first step, each step, and what remains after the last.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> gather = plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    >>> [(moment.name, moment.live_bytes) for moment in moments(gather)]
    [('before', 16), ('1 all_gather', 80), ('after', 80)]
    """
    before = Moment("before", ((SOURCE, plan.source.tile_bytes),))
    if not plan.steps:
        return [before]
    elsewhere = disjoint(plan.source.mesh, plan.target.mesh)
    kept = () if plan.donate or elsewhere else ((SOURCE, plan.source.tile_bytes),)
    after = Moment("after", (*kept, (RESULT, plan.target.tile_bytes)))
    during = (Moment(f"{number} {step.kind}", live_parts(step)) for number, step in enumerate(plan.steps, 1))
    return [before, *during, after]
