"""Plans that fit a budget: steps whose scratch memory is too large are cut, at the same bytes and more launches.

For example, a step that lives on 1.0 GiB of tiles and 512 MiB of scratch, under a budget of 1.25 GiB:

    as it is                     1 launch      1.5 GiB
    in 2 parts, one by one       2 launches    1.25 GiB
    an exchange in chunks        28 launches   1.0 GiB and two chunks

Of the ways that fit, the one with the fewest launches is taken. Tiles cannot be cut: source and target together are
the floor, or the larger of the two where an exchange overwrites a donated source.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import BudgetError
from reshard.geometry.figures import exchange_figures
from reshard.geometry.refine import refine
from reshard.plans.plan import Plan, Step, StepSpec, chain, floor_bytes
from reshard.plans.rules.collectives import check_step, count_buffers
from reshard.plans.rules.split_steps import possible_counts
from reshard.plans.rules.step_mode import StepMode, wire_layout
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.view import View


def fit_plans(plans: Sequence[Plan], budget: int, links: Links | None) -> list[Plan]:
    """The plans that fit a budget of bytes a device, as they are and cut.

    Raises `BudgetError`, with the smallest budget that works, if none does.
    """
    source, target, donate = plans[0].source, plans[0].target, plans[0].donate
    candidates = list(plans)
    for plan in dict.fromkeys(plans):
        steps = [_cut_step(step, budget) for step in plan.steps]
        if None not in steps:
            made = [step for step in steps if step is not None]
            candidates.append(cost.time_plan(chain(source, target, made, donate), links))
    refinement = refine(source, target)
    even = refinement is not None and refinement.exact
    if overwrites := donate and even and source != target and source.partial_as(target):
        # The exchange that overwrites a donated source, in the largest chunks that fit the budget.
        spare = budget - max(source.tile_bytes, target.tile_bytes)
        mode = StepMode(max(1, spare // (2 * max(1, source.nbytes(1)))), in_place=True)
        made = chain(source, target, [StepSpec("exchange", target, mode)], donate=True)
        candidates.append(cost.time_plan(made, links))
    if fitting := [plan for plan in candidates if plan.peak_bytes <= budget]:
        return fitting
    smallest = floor_bytes(source, target, donate=True) if overwrites else min(map(_smallest_peak, plans))
    meshes = str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} to {target.mesh}"
    raise BudgetError(
        f"budget {budget} B is too small for {source} -> {target} (global {source.shape}, tiles "
        f"{source.tile_shape} and {target.tile_shape} of {source.tile_bytes} and {target.tile_bytes} B, mesh "
        f"{meshes}); the smallest that works is {smallest} B",
        smallest,
    )


def _cut_step(step: Step, budget: int) -> StepSpec | None:
    """The step as it is if it fits, else in parts or as an exchange in chunks, whichever takes fewer launches; None if
    neither fits."""
    spare = budget - step.live_bytes + step.cost.scratch
    if step.cost.scratch <= spare:
        return step.spec
    fitting: list[tuple[int, StepSpec]] = []
    if step.kind != "exchange":
        # A collective goes in the fewest parts whose scratch fits: at least the copies of one part.
        copies = step.operand.tile_bytes + step.result.tile_bytes
        for count in (count for count in possible_counts(step.operand, step.result) if copies <= spare * count):
            mode = StepMode(parts=count)
            cut = check_step(step.kind, step.operand, step.result, mode)
            if cut.scratch <= spare:
                fitting.append((cut.launches, StepSpec(step.kind, step.result, mode)))
                break
    if spare >= 0 and step.operand.partial_as(step.result):
        mode = cut_exchange(step.operand, step.result, spare, relay=step.mode.relay)
        launches = check_step("exchange", step.operand, step.result, mode).launches
        fitting.append((launches, StepSpec("exchange", step.result, mode)))
    return min(fitting, key=lambda each: each[0])[1] if fitting else None


def cut_exchange(
    operand: Layout,
    result: Layout,
    spare: int,
    view: View | None = None,
    *,
    relay: bool = False,
    holding: Holding | None = None,
) -> StepMode:
    """An exchange in chunks whose buffers fit in `spare` bytes: in the fewest rounds, and of the smallest chunks then.

    A chunk is at least a run of elements that lie side by side, which need no buffer; where not even that fits, the
    caller drops the plan by its peak.
    """
    figures = exchange_figures(operand, result, view, relayed=relay, holding=holding)
    buffers = count_buffers(operand, result, StepMode(relay=relay, view=view))
    # What is cast has no long runs: it is staged, but for single elements.
    least = max(1, figures.run) if operand.dtype == result.dtype else 1
    chunk = max(least, min(spare // (buffers * max(1, wire_layout(operand, result).nbytes(1))), figures.message))
    rounds = figures.cut(chunk)[0]
    # Rounds never rise with the chunk, so the least one of as many is found by halving: messages of devices that are
    # not the busiest can often be cut further for nothing.
    while least < chunk:
        middle = (least + chunk) // 2
        if figures.cut(middle)[0] == rounds:
            chunk = middle
        else:
            least = middle + 1
    return StepMode(chunk, relay=relay, view=view, holding=holding)


def _smallest_peak(plan: Plan) -> int:
    """The peak of the plan with every step cut as small as it can be."""
    most = plan.source.tile_bytes
    for step in plan.steps:
        scratch = step.cost.scratch
        if step.operand.partial_as(step.result):
            scratch = 0  # An exchange in chunks: at the limit, of no bytes.
        else:
            # A reduction in its smallest parts, whose copies say of most others that they are larger.
            copies = step.operand.tile_bytes + step.result.tile_bytes
            for count in reversed(possible_counts(step.operand, step.result)):
                if copies < scratch * count:
                    mode = StepMode(parts=count)
                    scratch = min(scratch, check_step(step.kind, step.operand, step.result, mode).scratch)
        most = max(most, step.live_bytes - step.cost.scratch + scratch)
    return most
