"""Lower bounds on the bytes that the busiest device receives, or sends or receives, whatever the plan.

    mesh <x=4, y=2>, f32[{x}4, 8] -> f32[16, {x}2]    tile T of 32 elements, from V = 4 source tiles
    each device holds a quarter of its target tile and must receive 3/4 of 32 elements: 96 bytes

A sum that is started needs no more than that the devices of a group, among them, have each element once:

    mesh <x=4, y=2>, f32[{x}4] -> f32[16] + sum{y}      two devices share a target tile, and hold 4 of its 16 elements:
                                                        one of them must receive half of the other 12, 24 bytes

A sum that stays unfinished is bounded among the plans that move each summand as it is. To finish it on the way and to
start it anew can receive fewer bytes, but gives other summands, which round otherwise: no plan does that on one mesh.

For even layouts, let V be the product of the radices that are held before and local after: a target tile has elements
of V source tiles. If a digit moves from one holder to another, some device holds nothing that it needs and receives
|T|. Otherwise every device holds 1 / V of its target tile and receives |T| (1 - 1 / V). No device is enumerated. For
uneven layouts, the bound is the maximum over devices d of |T_d minus S_d|.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from reshard.types.layout import Layout
from reshard.types.mesh import merged_spans
from reshard.types.pair import crossing, exchange_stats
from reshard.types.pair.device_sets import disjoint, one_set
from reshard.types.pair.overlap import fullest
from reshard.types.pair.refine import PartialChange, Refinement, partial_change, refine
from reshard.types.pair.released import released


@lru_cache(maxsize=4096)
def lower_bound(source: Layout, target: Layout) -> int:
    """Bytes that some device must receive in any redistribution from source to target; padding is not counted.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> lower_bound(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[16, {x}2]", mesh))
    96
    """
    return source.nbytes(_elements(source, target))


@lru_cache(maxsize=4096)
def endpoint_bound(source: Layout, target: Layout) -> int:
    """Bytes that some device must send or receive, in total, in any redistribution; padding is not counted.

    Where a tile has few holders, these must send: what some device lacks of it leaves them at least once.

    >>> from reshard.types import Mesh
    >>> trainer, server = Mesh(x=2), Mesh({"d": 8}, device_ids=range(2, 10))
    >>> source, target = Layout.parse("f32[{x}4]", trainer), Layout.parse("f32[{d}1]", server)
    >>> lower_bound(source, target), endpoint_bound(source, target)
    (4, 16)
    """
    received = lower_bound(source, target)
    if source.partial or target.partial:
        return received
    if receivers_bound(source, target):
        return received
    return source.nbytes(crossing.fewest_through(source, target))


def sums_stay(source: Layout, target: Layout) -> bool:
    """Whether summands, if there are any, stay on their devices: partial along the same devices in the same order.

    >>> from reshard.types import Mesh
    >>> a, b = (Layout.parse("f32[4] + sum{x}", Mesh({"x": 2, "y": 2}, device_ids=ids)) for ids in (None, [0, 2, 1, 3]))
    >>> sums_stay(a, a), sums_stay(a, b)
    (True, False)
    """
    if not source.partial_as(target):
        return False
    if not source.partial or source.mesh == target.mesh:
        return True
    spans = [[layout.mesh.span(axis) for axis in layout.partial] for layout in (source, target)]
    return source.mesh.device_ids == target.mesh.device_ids and spans[0] == spans[1]


def receivers_bound(source: Layout, target: Layout) -> bool:
    """Whether no device must send more than the busiest one receives: each sends as much as it receives."""
    return one_set(source.mesh, target.mesh) and source.even and target.even


def _elements(source: Layout, target: Layout) -> int:
    """The bound in elements."""
    if not one_set(source.mesh, target.mesh):
        return _crossing(source, target)
    if not sums_stay(source, target):
        change = partial_change(source, target) if source.mesh == target.mesh else None
        if change is not None and not change.reduced:
            return _started(source, target, change)
        return _reduction(source, target, change)
    refinement = refine(source, target)
    if refinement is None or not refinement.exact:
        return exchange_stats.fewest_received(source, target)
    return _even(refinement)


def _crossing(source: Layout, target: Layout) -> int:
    """The bound between two sets of devices.

    No device has a finished element of a sum before it receives something; the summands of a tile can be shared among
    the devices that have them.
    """
    if not source.partial and not target.partial:
        return crossing.fewest_received(source, target)
    tile = math.prod(fullest(dim) for dim in target.dims)
    if source.partial or disjoint(source.mesh, target.mesh):
        return -(-tile // math.prod(axis.size for axis in target.partial))
    return 0


def _started(source: Layout, target: Layout, change: PartialChange) -> int:
    """The bound where sub-axes become partial, and none is reduced.

    Along these, the devices of a group have the parts of one tile. They must receive what the whole group lacks of it,
    so that one of them receives an equal share at least.
    """
    group = math.prod(size for _, size in change.started)
    have = released(source, change.started)
    return -(-_elements(have, replace(target, partial=have.partial, reduction=have.reduction)) // group)


def _even(refinement: Refinement) -> int:
    """The bound in elements for layouts without padding."""
    shares = refinement.pieces if refinement.swapped else refinement.pieces - 1
    return refinement.common * shares


def _reduction(source: Layout, target: Layout, change: PartialChange | None) -> int:
    """The bound for a reduction over f devices, in elements: the larger of an average and a maximum.

    Without a change, all partial sub-axes of the source are reduced and all of the target's are started.

    Average: to combine the summands of an element, devices receive f - 1 of them in total, and each further holder of
    the result receives it once. So the average device, and the busiest one, receives at least
    (f - 1 + holders - 1) / devices of the array. With one holder, that is a reduce-scatter's (f - 1) / f of a tile.

    Maximum: a device has no finished element of its target tile before it has received something for it.

    Where the target is partial along other sub-axes, the holder of a tile is a group of devices along these, and what
    it receives is shared among them.

    Devices along axes that neither layout uses form groups that reduce separately: plans over idle axes share that work
    between the groups and can receive less, (f - 1 + holders - 1) / devices of the mesh. If the two meshes order their
    devices differently, there are no such axes, and all devices are one group.
    """
    mesh = source.mesh
    axes = [*source.held, *source.partial, *target.held, *target.partial]
    together = mesh.size if mesh != target.mesh else 0
    used = together or math.prod(high // low for low, high in merged_spans(map(mesh.span, axes)))
    partial, left = (math.prod(s.size for s in lay.partial) for lay in (source, target))
    kept = math.prod(factor.size for factor in change.kept) if change is not None else 1
    group = left // kept
    devices = used // kept
    holders = devices // math.prod(s.size for s in target.held) // group
    receipts = (partial // kept - 1) + (holders - 1)
    average = -(-math.prod(source.shape) * receipts // devices)
    tile = math.prod(fullest(dim) for dim in target.dims)
    if not source.partial:  # On another mesh: its tiles may be among those of the group.
        return max(0, -(-(tile - group * math.prod(fullest(dim) for dim in source.dims)) // group))
    return max(average, -(-tile // group))
