"""Plans in batches that share launches, and the order in which batches run.

alike       plans whose steps share launches, by `plans.plan.lanes`
batch       as many of them as the buffers of a batch may take: 32 MiB, or a sixteenth of the tree (a tenth, of relays
            that gather)
order       batches that leave less than they take first, least `during - before` first; then the others,
            largest `during - after` first: no order of arrays that do not depend on each other peaks lower
together    batches that read one array, or fill parts of one, in a row, as if they were one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from reshard.errors import BudgetError
from reshard.plans.plan import Batch, LiveArrays, Plan, buffer_bytes, list_lanes
from reshard.plans.step import Bytes, DeviceKinds, Footprint, find_peaks
from reshard.synth import cost
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.types.units import counted
from reshard.types.whole import check_deadline

LEAST_BUFFERS = 32 << 20
"""Bytes on a device that a batch may always take for its buffers."""

SHARE = 16
"""The buffers of a batch take at most one part in this many of all sources and targets."""

GATHERED_SHARE = 10
"""The same for relays that gather: a batch of these takes as many launches as a device has groups to send to."""

_FAST = 1e300
"""A bandwidth, in bytes/second, at which only latency is left."""


def group_plans(plans: Mapping[str, Plan], network: Network | None, tile_bytes: int) -> list[Batch]:
    """Plans that can share launches together, as many as the buffers of a batch may take beside so many bytes of
    arrays on a device."""
    shares = [max(LEAST_BUFFERS, tile_bytes // share) for share in (SHARE, GATHERED_SHARE)]
    alike: dict[object, list[str]] = {}
    keys: dict[Plan, object] = {}
    for name, each in plans.items():
        if each not in keys:
            keys[each] = list_lanes(each)
        # A plan that shares its launches with no other is alone under its own name.
        alike.setdefault(name if keys[each] is None else keys[each], []).append(name)
    batches: list[Batch] = []
    for names in alike.values():
        group: list[str] = []
        used, most = 0, shares[any(step.mode.gathers for step in plans[names[0]].steps)]
        for name in names:
            need = buffer_bytes(plans[name])
            if group and used + need > most:
                batches.append(make_batch(group, plans, network))
                group, used = [], 0
            group.append(name)
            used += need
        batches.append(make_batch(group, plans, network))
    return batches


def make_batch(names: Sequence[str], plans: Mapping[str, Plan], network: Network | None) -> Batch:
    """The batch of these arrays, with its predicted seconds: messages are sent once, with the bytes of all plans."""
    members = tuple(plans[name] for name in names)
    times = [plan.seconds for plan in members if plan.seconds is not None]
    if len(times) != len(members):
        return Batch(tuple(names), members)
    saved = 0.0
    if network is not None:
        # What does not depend on bytes, all latency of the others, is spent once.
        for plan in members[1:]:
            saved += sum((cost.time_step(step, network, _FAST) for step in plan.steps), 0.0)
    return Batch(tuple(names), members, max(0.0, sum(times) - saved))


def sort_batches(batches: Sequence[Batch], kinds: DeviceKinds, arrays: LiveArrays) -> list[Batch]:
    """The batches in the order in which the peak is lowest, if those that share an array are in a row."""
    if not arrays.any_shared:
        return sorted(batches, key=lambda batch: rank_footprint(batch.footprint(kinds, arrays)))
    rows: list[tuple[tuple[bool, int], list[Batch]]] = []
    for row in _join_rows(batches, arrays):
        there = arrays.within(row)
        order = sorted(row, key=lambda batch: rank_footprint(batch.footprint(kinds)))
        start = there.live_bytes(kinds)
        needs = [there.run(batch, kinds) for batch in order]
        rows.append((rank_footprint(Footprint(start, find_peaks(needs, live=start), there.live_bytes(kinds))), order))
    return [batch for _, row in sorted(rows, key=lambda each: each[0]) for batch in row]


def _join_rows(batches: Sequence[Batch], arrays: LiveArrays) -> list[list[Batch]]:
    """The batches that share an array with one another, directly or through others."""
    parents, first = list(range(len(batches))), dict[str, int]()

    def find_root(at: int) -> int:
        while parents[at] != at:
            parents[at] = at = parents[parents[at]]
        return at

    for at, batch in enumerate(batches):
        for name in batch.names:
            for end in arrays.ends_of(name):
                parents[find_root(at)] = find_root(first.setdefault(end, at))
    rows: dict[int, list[Batch]] = {}
    for at, batch in enumerate(batches):
        rows.setdefault(find_root(at), []).append(batch)
    return [*rows.values()]


def rank_footprint(footprint: Footprint) -> tuple[bool, int]:
    """Sorts what frees memory before what takes it, and each so that the peak is lowest."""
    before, during, after = (sum(figure) for figure in footprint)
    frees = after <= before
    return not frees, during - before if frees else after - during


# Many arrays within a budget: arrays in the order of the least room, cut where they do not fit, and then in batches.
#
#   1  the least plan of each array, in the best order for these      its peak is the floor: no lower budget can be met
#   2  each array's own plan where it fits at its place, else cut     within the budget, array by array
#   3  arrays whose steps share launches, brought forward             as many as leave room for all that follow
#
# What an array leaves behind does not depend on its plan, so step 2 makes no later place smaller. Step 3 brings targets
# forward, and so looks ahead.


Replan = Callable[[str, int], Plan]
"""The plan of an array, by name, within a budget in bytes."""


def fit_batches(
    plans: Mapping[str, Plan], replan: Replan, kinds: DeviceKinds, options: PlanOptions, arrays: LiveArrays
) -> list[Batch]:
    """Batches whose peak is within the budget of the options.

    Raises `BudgetError`, with the smallest budget that works, if there are none.
    """
    budget, known = options.budget or 0, dict[Plan, Plan]()
    for name, plan in plans.items():
        if plan not in known:  # Equal moves have one plan of the least peak.
            try:
                known[plan] = replan(name, 0)
            except BudgetError as error:
                known[plan] = replan(name, error.smallest)
    least = [Batch((name,), (known[plan],)) for name, plan in plans.items()]
    order = sort_batches(least, kinds, arrays)
    start, there = arrays.live_bytes(kinds), arrays.within(order)
    floor = max(find_peaks([there.run(batch, kinds) for batch in order], live=start))
    if floor > budget:
        raise BudgetError(
            f"budget {budget} B is too small for {counted(len(plans), 'array')}, whose sources and targets live on a "
            f"device together; the smallest that works is {floor} B",
            floor,
        )
    live, there = _LiveBytes(start), arrays.within(order)
    fitted: dict[str, Plan] = {}
    for own in order:
        check_deadline()
        (name,), (smallest,) = own.names, own.plans
        plan = plans[name]
        needs = Batch((name,), (plan,)).footprint(kinds, there)
        if not live.fits(needs, budget):
            with suppress(BudgetError):
                plan = replan(name, live.room(needs, budget))
        # Between two sets of devices, a plan's own peak may be that of no device, so its least plan may fit instead.
        if not live.fits(Batch((name,), (plan,)).footprint(kinds, there), budget):
            plan = smallest
        fitted[name] = plan
        live.move(there.run(own, kinds))  # What an array leaves does not depend on its plan.
    return _join_in_order([own.names[0] for own in order], fitted, kinds, options, arrays)


class _LiveBytes:
    """The bytes live on a device of each kind, between batches."""

    def __init__(self, now: Bytes) -> None:
        self.now = now

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


def _join_in_order(
    order: Sequence[str], plans: Mapping[str, Plan], kinds: DeviceKinds, options: PlanOptions, arrays: LiveArrays
) -> list[Batch]:
    """Batches of arrays that share launches: they are brought forward, as many as leave room for all that follow."""
    alone = {name: Batch((name,), (plans[name],)) for name in order}
    keys = {name: list_lanes(plans[name]) for name in order}
    # What a move needs where no array is shared does not depend on what ran before it.
    fixed = None if arrays.any_shared else {name: batch.footprint(kinds, arrays) for name, batch in alone.items()}
    there, rest, made = arrays.within(alone.values()), list(order), list[Batch]()
    live = _LiveBytes(there.live_bytes(kinds))
    while rest:
        check_deadline()
        key = keys[rest[0]]
        alike = [rest[0], *(name for name in rest[1:] if key is not None and keys[name] == key)]
        count = len(alike)
        while True:
            batch = make_batch(alike[:count], plans, options.network)
            needed, taken = batch.footprint(kinds, there), set(batch.names)
            later = [name for name in rest if name not in taken]
            if count == 1:
                break
            if live.fits(needed, options.budget or 0):
                # Each of the other arrays must fit after it, beside what is live by then.
                if fixed is not None:
                    following = [needed, *(fixed[name] for name in later)]
                else:
                    ahead = there.within(alone.values())
                    following = [ahead.run(one, kinds) for one in (batch, *(alone[name] for name in later))]
                if max(find_peaks(following, live=live.now)) <= (options.budget or 0):
                    break
            count //= 2
        made.append(batch)
        live.move(there.run(batch, kinds))
        rest = later
    return made
