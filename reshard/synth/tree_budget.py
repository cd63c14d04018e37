"""Trees within a budget: arrays in the order of the least room, cut where they do not fit, and then in batches.

    1  the least plan of each array, in the best order for these      its peak is the floor: no lower budget can be met
    2  each array's own plan where it fits at its place, else cut     within the budget, array by array
    3  arrays whose steps share launches, brought forward             as many as leave room for all that follow

What an array leaves behind does not depend on its plan, so step 2 makes no later place smaller. Step 3 brings targets
forward, and so looks ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from reshard.errors import BudgetError
from reshard.synth.batches import batch_of, rank
from reshard.synth.network import Network
from reshard.types.batch import Batch, lanes
from reshard.types.deadline import check_deadline
from reshard.types.plan import Plan
from reshard.types.tree_memory import Bytes, DeviceKinds, Footprint, peaks
from reshard.types.units import counted

Replan = Callable[[str, int], Plan]
"""The plan of an array, by name, within a budget in bytes."""


def within(
    plans: Mapping[str, Plan], replan: Replan, kinds: DeviceKinds, budget: int, network: Network | None
) -> list[Batch]:
    """Batches whose peak is within the budget.

    Raises `BudgetError`, with the smallest budget that works, if there are none.
    """
    least = _least(plans, replan)
    order = sorted(plans, key=lambda name: rank(_alone(least[name], kinds)))
    floor = max(peaks([_alone(least[name], kinds) for name in order]))
    if floor > budget:
        raise BudgetError(
            f"budget {budget} B is too small for {counted(len(plans), 'array')}, whose sources and targets live on a "
            f"device together; the smallest that works is {floor} B",
            floor,
        )
    fitted = _fitted(order, plans, least, replan, kinds, budget)
    return _Batcher(order, fitted, kinds, budget, network).batches()


def _least(plans: Mapping[str, Plan], replan: Replan) -> dict[str, Plan]:
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
    return kinds.footprint(Batch(("",), (plan,)))


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
        self, order: Sequence[str], plans: Mapping[str, Plan], kinds: DeviceKinds, budget: int, network: Network | None
    ) -> None:
        self._plans, self._kinds, self._budget, self._network = plans, kinds, budget, network
        self._rest: list[str] = list(order)
        self._needs = {name: _alone(plans[name], kinds) for name in order}
        self._live = _Live(list(self._needs.values()))

    def batches(self) -> list[Batch]:
        """All arrays, in batches."""
        made: list[Batch] = []
        while self._rest:
            check_deadline()
            made.append(self._next())
            self._live.move(self._kinds.footprint(made[-1]))
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
        needs = self._kinds.footprint(batch)
        if not self._live.fits(needs, self._budget):
            return False
        taken = set(batch.names)
        rest = [self._needs[name] for name in self._rest if name not in taken]
        waiting = _Live([needs, *rest]).now
        moved = tuple(now - before for now, before in zip(self._live.now, waiting, strict=True))
        return max(peaks([needs, *rest], moved)) <= self._budget
