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
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.types.pair.refine import refine
from reshard.types.plan import Plan, Step, StepSpec, chain, floor
from reshard.types.rules.checker import check_step
from reshard.types.rules.cost import StepMode
from reshard.types.rules.exchange import exchange_size
from reshard.types.rules.parts import counts


def within(plans: Sequence[Plan], budget: int, links: Links | None) -> list[Plan]:
    """The plans that fit a budget of bytes a device, as they are and cut.

    Raises `BudgetError`, with the smallest budget that works, if none does.
    """
    fitting = [plan for plan in plans if plan.peak_bytes <= budget]
    cut = [small for plan in dict.fromkeys(plans) for small in _cut(plan, budget, links)]
    if plans[0].donate and _overwrites(plans[0]):
        cut.append(_in_place(plans[0], budget, links))
    fitting += [plan for plan in cut if plan.peak_bytes <= budget]
    if not fitting:
        _refuse(plans, budget)
    return fitting


def _cut(plan: Plan, budget: int, links: Links | None) -> Iterator[Plan]:
    """The plan with the steps that are too large cut; nothing if one cannot be cut enough."""
    steps: list[StepSpec] = []
    for step in plan.steps:
        small = _fit(step, budget)
        if small is None:
            return
        steps.append(small)
    yield cost.timed(chain(plan.source, plan.target, steps, plan.donate), links)


def _fit(step: Step, budget: int) -> StepSpec | None:
    """The step as it is if it fits, else in parts or as an exchange in chunks, whichever takes fewer launches."""
    spare = budget - step.live_bytes + step.cost.scratch
    if step.cost.scratch <= spare:
        return StepSpec(step.kind, step.result, step.mode)
    fitting = [small for small in (_in_parts(step, spare), _in_chunks(step, spare)) if small is not None]
    return min(
        fitting, key=lambda small: check_step(small.kind, step.operand, small.result, small.mode).launches, default=None
    )


def _in_parts(step: Step, spare: int) -> StepSpec | None:
    """A collective in the fewest parts whose scratch fits in `spare` bytes."""
    if step.kind == "exchange":
        return None  # It goes in chunks instead.
    for count in counts(step.operand, step.result):
        mode = StepMode(parts=count)
        if check_step(step.kind, step.operand, step.result, mode).scratch <= spare:
            return StepSpec(step.kind, step.result, mode)
    return None


def _in_chunks(step: Step, spare: int) -> StepSpec | None:
    """An exchange in the largest chunks whose two buffers fit in `spare` bytes; None for a reduction."""
    if spare < 0 or not step.operand.partial_as(step.result):
        return None
    relay = step.mode.relay
    run = 1 if relay else exchange_size(step.operand, step.result).run
    element = max(1, step.operand.nbytes(1))
    return StepSpec("exchange", step.result, StepMode(max(spare // (2 * element), run, 1), relay=relay))


def _overwrites(plan: Plan) -> bool:
    """Whether an exchange can put the target where the source was."""
    source, target = plan.source, plan.target
    refinement = refine(source, target)
    return source != target and source.partial_as(target) and refinement is not None and refinement.exact


def _in_place(plan: Plan, budget: int, links: Links | None) -> Plan:
    """The exchange that overwrites a donated source, in the largest chunks that fit the budget."""
    source, target = plan.source, plan.target
    spare = budget - max(source.tile_bytes, target.tile_bytes)
    element = max(1, source.nbytes(1))
    step = StepSpec("exchange", target, StepMode(max(1, spare // (2 * element)), in_place=True))
    return cost.timed(chain(source, target, [step], donate=True), links)


# ---- budgets that cannot be met --------------------------------------------------------------------


def _refuse(plans: Sequence[Plan], budget: int) -> None:
    """Raises `BudgetError` with the smallest budget that one of the plans meets."""
    source, target = plans[0].source, plans[0].target
    smallest = min(_smallest(plan) for plan in plans)
    if plans[0].donate and _overwrites(plans[0]):
        smallest = floor(source, target, donate=True)
    meshes = str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} to {target.mesh}"
    raise BudgetError(
        f"budget {budget} B is too small for {source} -> {target} (global {source.shape}, tiles "
        f"{source.tile_shape} and {target.tile_shape} of {source.tile_bytes} and {target.tile_bytes} B, mesh "
        f"{meshes}); the smallest that works is {smallest} B",
        smallest,
    )


def _smallest(plan: Plan) -> int:
    """The peak of the plan with every step cut as small as it can be."""
    return max([plan.source.tile_bytes, *(step.live_bytes - step.cost.scratch + _least(step) for step in plan.steps)])


def _least(step: Step) -> int:
    """The least scratch of a step: none for an exchange in chunks, that of the smallest parts for a reduction."""
    if step.operand.partial_as(step.result):
        return 0
    modes = (StepMode(parts=count) for count in counts(step.operand, step.result))
    return min([step.cost.scratch, *(check_step(step.kind, step.operand, step.result, mode).scratch for mode in modes)])
