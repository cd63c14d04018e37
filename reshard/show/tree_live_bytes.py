"""What a device's live bytes consist of before, during and after each batch of a tree.

    w: f32[{x}4, 8] -> f32[16, 8]      b: f32[{x}2] -> f32[8]      on <x=4>, in two batches

    before      sources 136 B
    batch 1     sources   8 B                   w's source and target  640 B      648 B
    batch 2     sources 128 B, results 512 B    b's source and target   40 B      680 B
    after       sources 136 B, results 544 B                                      680 B

Where the arrays lie on several sets of devices, these are the devices whose peak is highest.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.show.live_bytes import RESULT, RUNNING, SOURCE, Moment, Timeline
from reshard.types.batch import Batch
from reshard.types.plan_tree import TreePlan, device_kinds

_MOST = 10  # Bars of batches that a picture has room for.


def tree_timeline(tree: TreePlan) -> Timeline:
    """The moments of a tree. Neighbours among many batches share the moment with the most bytes live.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> rows, whole = rs.Layout.parse("f32[{x}4, 8]", mesh), rs.Layout.parse("f32[16, 8]", mesh)
    >>> tree = rs.plan_tree({"w": (rows, whole), "v": (rows, rows)})
    >>> shown = tree_timeline(tree)
    >>> [moment.name for moment in shown.moments], shown.peak_bytes == tree.peak_bytes
    (['before', 'batch 1', 'batch 2', 'after'], True)
    """
    every = _moments(tree)
    before, *batches, after = every
    each = -(-len(batches) // _MOST) or 1
    groups = [batches[start : start + each] for start in range(0, len(batches), each)]
    floor = max(before.live_bytes, after.live_bytes)
    return Timeline((before, *map(_shared, groups), after), max(moment.live_bytes for moment in every), floor)


def _moments(tree: TreePlan) -> list[Moment]:
    """The moments before, during each batch, and after, on the kind of device that has the peak."""
    kinds, worst = device_kinds(tree.plans.values()), tree.peaks.index(tree.peak_bytes)
    prints = [kinds.footprint(batch) for batch in tree.batches]
    source, result = sum(each.before[worst] for each in prints), 0
    moments = [Moment("before", ((SOURCE, source),))]
    for number, (batch, (before, during, after)) in enumerate(zip(tree.batches, prints, strict=True), 1):
        source -= before[worst]
        parts = ((SOURCE, source), (RESULT, result), (RUNNING, during[worst]))
        moments.append(Moment(f"batch {number}", parts))
        made = kinds.total(kinds.tile(plan.target) for plan in batch.plans)[worst] if _moves(batch) else 0
        source, result = source + after[worst] - made, result + made
    return [*moments, Moment("after", ((SOURCE, source), (RESULT, result)))]


def _moves(batch: Batch) -> bool:
    """Whether the batch has steps; if not, its sources are its results and stay what they are."""
    return bool(batch.plans[0].steps)


def _shared(group: Sequence[Moment]) -> Moment:
    most = max(group, key=lambda moment: moment.live_bytes)
    first, last = (moment.name.removeprefix("batch ") for moment in (group[0], group[-1]))
    return most if len(group) == 1 else Moment(f"batches {first}-{last}", most.parts)
