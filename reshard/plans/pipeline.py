"""Pipelines: a plan to other devices in parts, each of which is gathered while the next one crosses.

    f32[{fsdp}8, 128] -> f32[128, {tp}16], from <fsdp=16> to <tp=8, rep=16>, in 4 parts

    exchange      part 0   part 1   part 2   part 3
    all_gather             part 0   part 1   part 2   part 3

A part has one value of a factor of a digit that is local in all layouts of the plan. It is a plan of its own on a
smaller array, so the rules, the messages and the lowering of its steps are those of any plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from reshard.errors import PlanError
from reshard.geometry.remesh import disjoint, one_set
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.split_steps import Cut, split_layouts
from reshard.plans.rules.step_mode import PLAIN
from reshard.plans.step import checked_seconds
from reshard.types.units import bytes_text, counted, seconds_text
from reshard.types.whole import whole

IN_FLIGHT = 2
"""Parts that a device has at once: one that crosses, and one that is gathered."""


@dataclass(frozen=True)
class Pipeline:
    """A plan whose first step crosses to other devices, in `parts` parts that overlap.

    The other steps are on the target's devices. `seconds` is what the schedule takes on the network that it is for,
    where what arrives and what is gathered meanwhile share one link. JAX runs one where copies run beside programs, on
    the accelerators of one process, or where `network=` says that it is faster, and without a budget.
    Raises `PlanError` for a plan that does not split so.
    """

    plan: Plan
    parts: int
    seconds: float

    def __post_init__(self) -> None:
        checked_seconds(self.seconds)
        source, target, steps = self.plan.source, self.plan.target, self.plan.steps
        plain = self.plan.view is None and not source.partial and all(step.mode == PLAIN for step in steps)
        crosses = len(steps) > 1 and disjoint(source.mesh, target.mesh)
        overlaps = plain and crosses and all(one_set(step.operand.mesh, target.mesh) for step in steps[1:])
        if whole(self.parts, 2) is None or not overlaps or self._split is None:
            raise PlanError(
                f"{source} -> {target} does not go in {self.parts} parts that overlap: it takes a step to other "
                f"devices, steps among these, and a digit that is local in all layouts"
            )

    @cached_property
    def _split(self) -> tuple[tuple[object, Cut], ...] | None:
        plan = self.plan
        return split_layouts([plan.source, *(step.result for step in plan.steps)], self.parts)

    @cached_property
    def each(self) -> Plan:
        """The plan of one part."""
        return plan_part(self.plan, self.parts)

    @cached_property
    def cuts(self) -> tuple[Cut, Cut]:
        """The parts of a source's tile, and of a target's."""
        cuts = [cut for _, cut in self._split or ()]
        return cuts[0], cuts[-1]

    @property
    def received_bytes(self) -> int:
        """What the busiest device receives in all."""
        return self.parts * self.each.received_bytes

    @property
    def sent_bytes(self) -> int:
        """What the busiest device sends in all."""
        return self.parts * self.each.sent_bytes

    @property
    def launches(self) -> int:
        """Collective calls in total."""
        return self.parts * self.each.launches

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes live on one device: its tile, and the parts in flight with their messages."""
        first, *later = self.each.steps
        near = self.plan.source.tile_bytes + IN_FLIGHT * (self.each.source.tile_bytes + first.sent_bytes)
        crossing = IN_FLIGHT * (first.result.tile_bytes + first.received_bytes)
        result = self.each.target.tile_bytes
        gathered = max(step.live_bytes - first.result.tile_bytes for step in later) + result * (len(later) > 1)
        return max(near, self.plan.target.tile_bytes + crossing + max(gathered, result))

    def __str__(self) -> str:
        each = str(self.each).splitlines()
        plan = self.plan
        head = f"{plan.source} -> {plan.target} on {plan.source.mesh} to {plan.target.mesh}"
        total = (
            f"sent {bytes_text(self.sent_bytes)}, received {bytes_text(self.received_bytes)}, "
            f"{counted(self.launches, 'launch')}, peak {bytes_text(self.peak_bytes)} a device, "
            f"{seconds_text(self.seconds)} predicted"
        )
        return "\n".join(
            [f"{head}, in {self.parts} parts, each gathered while the next one crosses:", *each[1:-1], total]
        )


def plan_part(plan: Plan, parts: int) -> Plan:
    """The plan of one of `parts` parts; `PlanError` where the plan does not split so, or a step does not."""
    split = split_layouts([plan.source, *(step.result for step in plan.steps)], parts)
    if split is None:
        raise PlanError(f"{plan.source} -> {plan.target} has no digit that is local in all layouts for {parts} parts")
    (source, _), *results = split
    specs = [StepSpec(step.kind, result) for step, (result, _) in zip(plan.steps, results, strict=True)]
    return chain(source, results[-1][0], specs, donate=True)
