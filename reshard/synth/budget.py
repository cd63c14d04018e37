"""Plans that fit a budget: steps whose scratch memory is too large are cut, at the same bytes and more launches.

For example, a step that lives on 1.0 GiB of tiles and 512 MiB of scratch, under a budget of 1.25 GiB:

    as it is                     1 launch      1.5 GiB
    in 2 parts, one by one       2 launches    1.25 GiB
    an exchange in chunks        28 launches   1.0 GiB and two chunks

Of the ways that fit, the one with the fewest launches is taken. Tiles cannot be cut: source and target together are
the floor, or the larger of the two where an exchange overwrites a donated source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from reshard.errors import BudgetError
from reshard.geometry.figures import exchange_figures
from reshard.geometry.refine import refine
from reshard.plans.memory import Bytes, DeviceKinds, Footprint, peaks
from reshard.plans.plan import Batch, Plan, Step, StepSpec, chain, floor, lanes
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.cost import StepMode
from reshard.plans.rules.parts import counts
from reshard.synth import cost
from reshard.synth.batches import batch_of, rank
from reshard.synth.network import Links
from reshard.synth.options import PlanOptions
from reshard.types.units import counted
from reshard.types.whole import check_deadline


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
    run = 1 if relay else exchange_figures(step.operand, step.result).run
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


# Trees within a budget: arrays in the order of the least room, cut where they do not fit, and then in batches.
#
#   1  the least plan of each array, in the best order for these      its peak is the floor: no lower budget can be met
#   2  each array's own plan where it fits at its place, else cut     within the budget, array by array
#   3  arrays whose steps share launches, brought forward             as many as leave room for all that follow
#
# What an array leaves behind does not depend on its plan, so step 2 makes no later place smaller. Step 3 brings targets
# forward, and so looks ahead.


Replan = Callable[[str, int], Plan]
"""The plan of an array, by name, within a budget in bytes."""


def plan_tree_within(
    plans: Mapping[str, Plan], replan: Replan, kinds: DeviceKinds, options: PlanOptions
) -> list[Batch]:
    """Batches whose peak is within the budget of the options.

    Raises `BudgetError`, with the smallest budget that works, if there are none.
    """
    budget, least = options.budget or 0, _least_tree(plans, replan)
    order = sorted(plans, key=lambda name: rank(_alone(least[name], kinds)))
    floor = max(peaks([_alone(least[name], kinds) for name in order]))
    if floor > budget:
        raise BudgetError(
            f"budget {budget} B is too small for {counted(len(plans), 'array')}, whose sources and targets live on a "
            f"device together; the smallest that works is {floor} B",
            floor,
        )
    fitted = _fitted(order, plans, least, replan, kinds, budget)
    return _Batcher(order, fitted, kinds, options).batches()


def _least_tree(plans: Mapping[str, Plan], replan: Replan) -> dict[str, Plan]:
    """For each array, the plan of the least peak."""
    known: dict[Plan, Plan] = {}
    for name, plan in plans.items():
        if plan in known:
            continue
        try:
            known[plan] = replan(name, 0)
        except BudgetError as error:
            known[plan] = replan(name, error.smallest)
    return {name: known[plan] for name, plan in plans.items()}


def _alone(plan: Plan, kinds: DeviceKinds) -> Footprint:
    return Batch(("",), (plan,)).footprint(kinds)


def _fitted(
    order: Sequence[str],
    plans: Mapping[str, Plan],
    least: Mapping[str, Plan],
    replan: Replan,
    kinds: DeviceKinds,
    budget: int,
) -> dict[str, Plan]:
    """The plans, those that do not fit at their place in the order replaced by ones that do.

    Between two sets of devices, a plan's own peak may be that of no device, so its least plan may be the one that fits.
    """
    live = _Live([_alone(plans[name], kinds) for name in order])
    fitted: dict[str, Plan] = {}
    for name in order:
        check_deadline()
        plan = plans[name]
        needs = _alone(plan, kinds)
        if not live.fits(needs, budget):
            with suppress(BudgetError):
                plan = replan(name, live.room(needs, budget))
        fitted[name] = plan if live.fits(_alone(plan, kinds), budget) else least[name]
        live.move(needs)
    return fitted


class _Live:
    """The bytes live on a device of each kind, between batches."""

    def __init__(self, footprints: Sequence[Footprint]) -> None:
        self.now: Bytes = tuple(map(sum, zip(*(each.before for each in footprints), strict=True)))

    def fits(self, needs: Footprint, budget: int) -> bool:
        """Whether what has these needs can run next."""
        return all(n - b + d <= budget for n, b, d in zip(self.now, needs.before, needs.during, strict=True))

    def room(self, needs: Footprint, budget: int) -> int:
        """The bytes that what runs next may take on the devices that it needs, its source included."""
        each = zip(self.now, needs.before, needs.during, strict=True)
        return min(budget - n + b for n, b, during in each if during)

    def move(self, needs: Footprint) -> None:
        """Goes on to what is live after it."""
        self.now = tuple(n - b + a for n, b, a in zip(self.now, needs.before, needs.after, strict=True))


class _Batcher:
    """Brings arrays forward to batches, as many as leave room for the arrays that follow."""

    def __init__(
        self, order: Sequence[str], plans: Mapping[str, Plan], kinds: DeviceKinds, options: PlanOptions
    ) -> None:
        self._plans, self._kinds, self._budget, self._network = plans, kinds, options.budget or 0, options.network
        self._rest: list[str] = list(order)
        self._needs = {name: _alone(plans[name], kinds) for name in order}
        self._live = _Live(list(self._needs.values()))

    def batches(self) -> list[Batch]:
        """All arrays, in batches."""
        made: list[Batch] = []
        while self._rest:
            check_deadline()
            made.append(self._next())
            self._live.move(made[-1].footprint(self._kinds))
            taken = set(made[-1].names)
            self._rest = [name for name in self._rest if name not in taken]
        return made

    def _next(self) -> Batch:
        first, *others = self._rest
        key = lanes(self._plans[first])
        alike = [first] if key is None else [first, *(n for n in others if lanes(self._plans[n]) == key)]
        count = len(alike)
        while count > 1:
            batch = batch_of(alike[:count], self._plans, self._network)
            if self._fits(batch):
                return batch
            count //= 2
        return batch_of([first], self._plans, self._network)

    def _fits(self, batch: Batch) -> bool:
        """Whether a batch fits now, and each of the other arrays after it."""
        needs = batch.footprint(self._kinds)
        if not self._live.fits(needs, self._budget):
            return False
        taken = set(batch.names)
        rest = [self._needs[name] for name in self._rest if name not in taken]
        waiting = _Live([needs, *rest]).now
        moved = tuple(now - before for now, before in zip(self._live.now, waiting, strict=True))
        return max(peaks([needs, *rest], moved)) <= self._budget
