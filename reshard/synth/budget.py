"""Plans that fit a budget: steps whose scratch memory is too large are cut, at the same bytes and more launches.

For example, a step that lives on 1.0 GiB of tiles and 512 MiB of scratch, under a budget of 1.25 GiB:

    as it is                     1 launch      1.5 GiB
    in 2 parts, one by one       2 launches    1.25 GiB
    an exchange in chunks        28 launches   1.0 GiB and two chunks

Of the ways that fit, the one with the fewest launches is taken. Tiles cannot be cut: source and target together are
the floor, or the larger of the two where an exchange overwrites a donated source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.errors import BudgetError
from reshard.geometry.figures import exchange_figures
from reshard.geometry.refine import refine
from reshard.plans.plan import Plan, Step, StepSpec, chain, floor_bytes
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.split_steps import possible_counts
from reshard.plans.rules.step_mode import StepMode
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.types.layout import Layout


def fit_plans(plans: Sequence[Plan], budget: int, links: Links | None) -> list[Plan]:
    """The plans that fit a budget of bytes a device, as they are and cut.

    Raises `BudgetError`, with the smallest budget that works, if none does.
    """
    fitting = [plan for plan in plans if plan.peak_bytes <= budget]
    cut = [small for plan in dict.fromkeys(plans) for small in _cut_plan(plan, budget, links)]
    source, target, donate = plans[0].source, plans[0].target, plans[0].donate
    if overwrites := donate and _can_overwrite(source, target):
        # The exchange that overwrites a donated source, in the largest chunks that fit the budget.
        spare = budget - max(source.tile_bytes, target.tile_bytes)
        mode = StepMode(max(1, spare // (2 * max(1, source.nbytes(1)))), in_place=True)
        cut.append(cost.time_plan(chain(source, target, [StepSpec("exchange", target, mode)], donate=True), links))
    fitting += [plan for plan in cut if plan.peak_bytes <= budget]
    if fitting:
        return fitting
    smallest = floor_bytes(source, target, donate=True) if overwrites else min(_smallest_peak(plan) for plan in plans)
    meshes = str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} to {target.mesh}"
    raise BudgetError(
        f"budget {budget} B is too small for {source} -> {target} (global {source.shape}, tiles "
        f"{source.tile_shape} and {target.tile_shape} of {source.tile_bytes} and {target.tile_bytes} B, mesh "
        f"{meshes}); the smallest that works is {smallest} B",
        smallest,
    )


def _cut_plan(plan: Plan, budget: int, links: Links | None) -> Iterator[Plan]:
    """The plan with the steps that are too large cut; nothing if one cannot be cut enough."""
    steps: list[StepSpec] = []
    for step in plan.steps:
        small = _cut_step(step, budget)
        if small is None:
            return
        steps.append(small)
    yield cost.time_plan(chain(plan.source, plan.target, steps, plan.donate), links)


def _cut_step(step: Step, budget: int) -> StepSpec | None:
    """The step as it is if it fits, else in parts or as an exchange in chunks, whichever takes fewer launches."""
    spare = budget - step.live_bytes + step.cost.scratch
    if step.cost.scratch <= spare:
        return StepSpec(step.kind, step.result, step.mode)
    fitting: list[tuple[int, StepSpec]] = []
    if step.kind != "exchange":
        # A collective goes in the fewest parts whose scratch fits.
        for count in possible_counts(step.operand, step.result):
            mode = StepMode(parts=count)
            cut = check_step(step.kind, step.operand, step.result, mode)
            if cut.scratch <= spare:
                fitting.append((cut.launches, StepSpec(step.kind, step.result, mode)))
                break
    if spare >= 0 and step.operand.partial_as(step.result):
        # Two buffers of a chunk must fit. A chunk is at least a run of elements that lie side by side: where not even
        # that fits, the plan is dropped by its peak.
        relay = step.mode.relay
        run = 1 if relay else exchange_figures(step.operand, step.result).run
        mode = StepMode(max(spare // (2 * max(1, step.operand.nbytes(1))), run, 1), relay=relay)
        launches = check_step("exchange", step.operand, step.result, mode).launches
        fitting.append((launches, StepSpec("exchange", step.result, mode)))
    return min(fitting, key=lambda each: each[0])[1] if fitting else None


def _can_overwrite(source: Layout, target: Layout) -> bool:
    """Whether an exchange can put the target where the source was."""
    refinement = refine(source, target)
    return source != target and source.partial_as(target) and refinement is not None and refinement.exact


def _smallest_peak(plan: Plan) -> int:
    """The peak of the plan with every step cut as small as it can be."""
    most = plan.source.tile_bytes
    for step in plan.steps:
        scratch = step.cost.scratch
        if step.operand.partial_as(step.result):
            scratch = 0  # An exchange in chunks: at the limit, of no bytes.
        else:
            # A reduction in its smallest parts.
            modes = (StepMode(parts=count) for count in possible_counts(step.operand, step.result))
            cut = (check_step(step.kind, step.operand, step.result, mode).scratch for mode in modes)
            scratch = min([scratch, *cut])
        most = max(most, step.live_bytes - step.cost.scratch + scratch)
    return most
