"""Plans in batches that share launches, and the order in which batches run.

alike       plans whose steps share launches, by `plans.plan.lanes`
batch       as many of them as the buffers of a batch may take: 32 MiB, or a sixteenth of the tree
order       batches that leave less than they take first, least `during - before` first; then the others,
            largest `during - after` first: no order of arrays that do not depend on each other peaks lower
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from reshard.plans.memory import DeviceKinds, Footprint
from reshard.plans.plan import Batch, Plan, StepSpec, buffer_bytes, lanes
from reshard.synth import cost
from reshard.synth.network import Network

LEAST_BUFFERS = 32 << 20
"""Bytes on a device that a batch may always take for its buffers."""

SHARE = 16
"""The buffers of a batch take at most one part in this many of all sources and targets."""

_FAST = 1e300
"""A bandwidth, in bytes/second, at which only latency is left."""


def batches_of(plans: Mapping[str, Plan], network: Network | None) -> list[Batch]:
    """Plans that can share launches together, as many as the buffers of a batch may take.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> plans = {"a": rs.plan(rows, whole), "b": rs.plan(whole, rows), "c": rs.plan(rows, whole)}
    >>> [batch.names for batch in batches_of(plans, None)]
    [('a', 'c'), ('b',)]
    """
    tiles = sum(plan.source.tile_bytes + plan.target.tile_bytes for plan in plans.values())
    most = max(LEAST_BUFFERS, tiles // SHARE)
    batches: list[Batch] = []
    for names in _alike(plans):
        group: list[str] = []
        used = 0
        for name in names:
            need = buffer_bytes(plans[name])
            if group and used + need > most:
                batches.append(batch_of(group, plans, network))
                group, used = [], 0
            group.append(name)
            used += need
        batches.append(batch_of(group, plans, network))
    return batches


def _alike(plans: Mapping[str, Plan]) -> Iterator[list[str]]:
    """The names of the plans that can share launches; a plan that cannot is alone in its group."""
    groups: dict[object, list[str]] = {}
    keys: dict[Plan, object] = {}
    for name, each in plans.items():
        if each not in keys:
            keys[each] = lanes(each)
        groups.setdefault(name if keys[each] is None else keys[each], []).append(name)
    yield from groups.values()


def batch_of(names: Sequence[str], plans: Mapping[str, Plan], network: Network | None) -> Batch:
    """The batch of these arrays, with its predicted seconds: messages are sent once, with the bytes of all plans."""
    members = tuple(plans[name] for name in names)
    times = [plan.seconds for plan in members if plan.seconds is not None]
    if len(times) != len(members):
        return Batch(tuple(names), members)
    saved = sum(_latency(plan, network) for plan in members[1:])
    return Batch(tuple(names), members, max(0.0, sum(times) - saved))


def _latency(plan: Plan, network: Network | None) -> float:
    """The part of a plan's time that does not depend on its bytes."""
    if network is None:
        return 0.0
    total = 0.0
    for step in plan.steps:
        links = network.links(step.operand.mesh).with_bandwidth(_FAST)
        total += cost.seconds(StepSpec(step.kind, step.result, step.mode), step.operand, links)
    return total


def in_order(batches: Sequence[Batch], kinds: DeviceKinds) -> list[Batch]:
    """The batches in the order in which the peak is lowest."""
    return sorted(batches, key=lambda batch: rank(batch.footprint(kinds)))


def rank(footprint: Footprint) -> tuple[bool, int]:
    """Sorts what frees memory before what takes it, and each so that the peak is lowest.

    >>> rank(Footprint((8,), (10,), (4,))) < rank(Footprint((8,), (12,), (4,))) < rank(Footprint((8,), (20,), (20,)))
    True
    """
    before, during, after = (sum(figure) for figure in footprint)
    frees = after <= before
    return not frees, during - before if frees else after - during
