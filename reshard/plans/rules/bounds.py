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
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from reshard.geometry.exchange_stats import fewest_received
from reshard.geometry.figures import MOST_DEVICES, ByDevice, lacked_by_device, received_by_device
from reshard.geometry.holders import fewest_through, least_received_across, list_leaving
from reshard.geometry.messages import fewest_beside, list_leaving_beside
from reshard.geometry.overlap import fullest_piece
from reshard.geometry.refine import PartialChange, partial_change, refine, release_digits
from reshard.geometry.remesh import disjoint, one_set
from reshard.geometry.view_layouts import view_stages
from reshard.types import dtypes
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, merged_spans
from reshard.types.reductions import has_reduction
from reshard.types.view import View


@lru_cache(maxsize=4096)
def lower_bound(source: Layout, target: Layout, view: View | None = None, holding: Holding | None = None) -> int:
    """Bytes that some device must receive in any redistribution from source to target; padding is not counted.

    Of a move that reduces and whose view has no common units, it says 0. What devices of the target hold already, and
    is not stale, they need not receive.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> lower_bound(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[16, {x}2]", mesh))
    96
    >>> lower_bound(Layout.parse("f32[{x}4]", mesh), Layout.parse("bf16[16]", mesh))
    24
    """
    ends = plain_ends(source, target, view) if holding is None else None
    if ends is None:
        return _listed_receipts(source, target, view, holding).most
    return ends[0].nbytes(_bound_elements(*ends))


@lru_cache(maxsize=4096)
def endpoint_bound(source: Layout, target: Layout, view: View | None = None, holding: Holding | None = None) -> int:
    """Bytes that some device must send or receive, in total, in any redistribution; padding is not counted.

    Where a tile has few holders, these must send: what some device lacks of it leaves them at least once.

    >>> from reshard.types import Mesh
    >>> trainer, server = Mesh(x=2), Mesh({"d": 8}, device_ids=range(2, 10))
    >>> source, target = Layout.parse("f32[{x}4]", trainer), Layout.parse("f32[{d}1]", server)
    >>> lower_bound(source, target), endpoint_bound(source, target)
    (4, 16)
    """
    received = lower_bound(source, target, view, holding)
    if holding is not None:
        return _narrower_layout(source, target).nbytes(fewest_beside(source, target, view, holding))
    ends = plain_ends(source, target, view)
    if source.partial or target.partial or (ends is not None and _receivers_bound(*ends)):
        return received
    if ends is None:
        return _narrower_layout(source, target).nbytes(fewest_through(source, target, view))
    return ends[0].nbytes(fewest_through(*ends))


def sums_stay(source: Layout, target: Layout) -> bool:
    """Whether summands, if there are any, stay on their devices: partial along the same devices in the same order."""
    if not source.partial_as(target):
        return False
    if not source.partial or source.mesh == target.mesh:
        return True
    spans = [[layout.mesh.span(axis) for axis in layout.partial] for layout in (source, target)]
    return source.mesh.device_ids == target.mesh.device_ids and spans[0] == spans[1]


def _receivers_bound(source: Layout, target: Layout) -> bool:
    """Whether no device must send more than the busiest one receives: each sends as much as it receives."""
    return one_set(source.mesh, target.mesh) and source.even and target.even


def _bound_elements(source: Layout, target: Layout) -> int:
    """The bound in elements."""
    if not one_set(source.mesh, target.mesh):
        if not source.partial and not target.partial:
            return least_received_across(source, target)
        # No device has a finished element of a sum before it receives something; the summands of a tile can be shared
        # among the devices that have them.
        tile = math.prod(fullest_piece(dim) for dim in target.dims)
        nothing_finished = source.partial or disjoint(source.mesh, target.mesh)
        return -(-tile // math.prod(axis.size for axis in target.partial)) if nothing_finished else 0
    if not sums_stay(source, target):
        change = partial_change(source, target) if source.mesh == target.mesh else None
        if change is not None and not change.reduced:
            # The bound where sub-axes become partial, and none is reduced.
            group = math.prod(size for _, size in change.started)
            have = release_digits(source, change.started)
            return -(-_bound_elements(have, replace(target, partial=have.partial, reduction=have.reduction)) // group)
        return _bound_of_reduction(source, target, change)
    refinement = refine(source, target)
    if refinement is None or not refinement.exact:
        return fewest_received(source, target)
    # The bound in elements for layouts without padding.
    shares = refinement.pieces if refinement.swapped else refinement.pieces - 1
    return refinement.common * shares


def _bound_of_reduction(source: Layout, target: Layout, change: PartialChange | None) -> int:
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
    tile = math.prod(fullest_piece(dim) for dim in target.dims)
    if not source.partial:  # On another mesh: its tiles may be among those of the group.
        return max(0, -(-(tile - group * math.prod(fullest_piece(dim) for dim in source.dims)) // group))
    return max(average, -(-tile // group))


# Lower bounds on the bytes of the busiest device when several arrays move, whatever the plans.
#
#     f32[{x}3/5] -> f32[5]          device 0    device 1
#     a, on <x=2>                    lacks 2     lacks 3
#     b, on <x=2> reversed           lacks 3     lacks 2
#     both                           5           5            the sum of the maxima is 6
#
# The bound is the maximum over devices of the sum over arrays. It can be less than the sum of the maxima, since the
# busiest device for one array need not be the busiest for another. Senders are bounded in the same way: what devices
# lack of the tiles that a group of devices holds must leave the group once, for all arrays together.


Ends = tuple[Layout, Layout, View | None, Holding | None]
"""Source, target and view of one array's move, and what is held of its target."""


def joint_lower_bound(moves: Iterable[Ends]) -> int:
    """Bytes that some device must receive, whatever the plans for these arrays.

    >>> from reshard.types import Mesh
    >>> meshes = Mesh(x=2), Mesh({"x": 2}, device_ids=[1, 0])
    >>> a, b = ([Layout.parse(text, mesh) for text in ("f32[{x}3/5]", "f32[5]")] for mesh in meshes)
    >>> lower_bound(*a), lower_bound(*b), joint_lower_bound([(*a, None, None), (*b, None, None)])
    (12, 12, 20)
    """
    counts = Counter(moves)
    alone = max((lower_bound(*ends) for ends in counts), default=0)
    per_device = busiest_bytes((ends[1].mesh, _must_receive(*ends), n) for ends, n in counts.items())
    return max(alone, per_device, _average_bound(counts))


def joint_endpoint_bound(moves: Iterable[Ends]) -> int:
    """Bytes that some device must send or receive, whatever the plans: what leaves its holders, shared evenly."""
    counts = Counter(moves)
    alone = max((endpoint_bound(*ends) for ends in counts), default=0)
    leaving: Counter[frozenset[int]] = Counter()
    for ends, count in counts.items():
        for holders, nbytes in _must_leave(*ends).items():
            leaving[holders] += count * nbytes
    together = frozenset[int]().union(*leaving)
    groups = {**leaving, together: sum(leaving.values())} if together else leaving
    return max([alone, *(-(-nbytes // len(holders)) for holders, nbytes in groups.items())])


def busiest_bytes(loads: Iterable[tuple[Mesh, ByDevice, int]]) -> int:
    """The most bytes on one device, given the figures of several arrays on their meshes, and how often each occurs."""
    # What all devices of a mesh have is added up mesh by mesh, and what a few have more or less than that by device.
    each, totals = Counter[Mesh](), Counter[int]()
    for mesh, load, count in loads:
        each[mesh] += load.each * count
        for device, nbytes in (load.listed or {}).items():
            totals[device] += (nbytes - load.each) * count
    sets, everywhere = Counter[range | frozenset[int]](), 0
    for mesh, nbytes in each.items():
        sets[range(mesh.size) if mesh.device_ids is None else frozenset(mesh.devices)] += nbytes
    for devices, nbytes in sets.items():
        if len(sets) == 1 or len(devices) > MOST_DEVICES:
            everywhere += nbytes
        else:
            totals.update(dict.fromkeys(devices, nbytes))
    unlisted = [0] if any(len(devices) > len(totals) for devices in sets) else []
    return everywhere + max([*unlisted, *totals.values()], default=0)


def _average_bound(counts: Counter[Ends]) -> int:
    """The bound for the average device: of a reduction, it is known where the busiest one's share is not."""
    plain: Counter[tuple[Layout, Layout]] = Counter()
    for (*move, holding), count in counts.items():
        if holding is None and (ends := plain_ends(*move)) is not None:
            plain[ends] += count
    if len({(target.mesh.size, target.mesh.device_ids) for _, target in plain}) != 1:
        return 0
    size = next(iter(plain))[1].mesh.size
    total = 0
    for (source, target), count in plain.items():
        if sums_stay(source, target):
            each, listed = _must_receive(source, target, None, None)
            total += count * (each * (size - len(listed or {})) + sum((listed or {}).values()))
        elif _reduces_evenly(source, target):
            total += count * lower_bound(source, target) * size
    return -(-total // size)


@lru_cache(maxsize=4096)
def _must_receive(source: Layout, target: Layout, view: View | None, holding: Holding | None) -> ByDevice:
    """What each device receives at least; nothing where only the worst device's figure is known.

    Of a sum that is finished no device has an element before it has received something for it.
    """
    ends = plain_ends(source, target, view) if holding is None else None
    if ends is None:
        return _listed_receipts(source, target, view, holding)
    source, target = ends
    if not sums_stay(source, target):
        even = not target.partial and _reduces_evenly(source, target)
        return ByDevice(target.tile_bytes if even else 0)
    if target.mesh.size > MOST_DEVICES:
        r = refine(source, target)
        if r is None or not r.exact or r.swapped:
            return ByDevice(0)  # Only where all devices lack the same, in closed form, is what each lacks known.
    return lacked_by_device(source, target).scaled(target)


@lru_cache(maxsize=4096)
def _must_leave(
    source: Layout, target: Layout, view: View | None, holding: Holding | None
) -> Mapping[frozenset[int], int]:
    """The bytes that each group of devices with one tile must send; none of sums, or where receivers bound as much."""
    if holding is not None:
        narrow = _narrower_layout(source, target)
        each = list_leaving_beside(source, target, view, holding)
        return {frozenset(holders): narrow.nbytes(elements) for holders, elements in each}
    ends = plain_ends(source, target, view)
    narrow = _narrower_layout(source, target)
    if ends is not None:
        (source, target), view = ends, None
    listed = max(source.mesh.size, target.mesh.size) <= MOST_DEVICES
    if source.partial or target.partial or not listed or (ends is not None and _receivers_bound(source, target)):
        return {}
    leaving: Counter[frozenset[int]] = Counter()
    for holders, elements in list_leaving(source, target, view):
        leaving[frozenset(holders)] += narrow.nbytes(elements)
    return leaving


def _reduces_evenly(source: Layout, target: Layout) -> bool:
    """Whether something is reduced between even layouts of one mesh, and nothing started.

    Then the bound of the busiest device holds for the average one.
    """
    if source.mesh != target.mesh or not source.even or not target.even:
        return False
    change = partial_change(source, target)
    return change is not None and bool(change.reduced) and not change.started


# A move with a view, a part or a cast is bounded as one without.
#
# view "(a b) -> b a": f32[{x}4, ...]    both layouts written on the same units: the bound of these two
# no common units                        what each device needs and does not hold, counted through the view
# a cast                                 the smaller of the two dtypes


@lru_cache(maxsize=4096)
def plain_ends(source: Layout, target: Layout, view: View | None = None) -> tuple[Layout, Layout] | None:
    """Two layouts between which a move without view or cast has the same bounds; None without common units."""
    if source.dtype != target.dtype:
        dtype = _narrower_layout(source, target).dtype
        # Only the width counts, and not every dtype has every reduction: bool has no sum, an integer no mean.
        kept = source.reduction if source.reduction is None or has_reduction(dtype, source.reduction) else "max"
        source, target = replace(source, dtype=dtype, reduction=kept), replace(target, dtype=dtype)
    if view is None:
        return source, target
    parts = view_stages(source, target, view)
    return None if parts is None else (parts.middle.source, parts.middle.target)


def _listed_receipts(source: Layout, target: Layout, view: View | None, holding: Holding | None) -> ByDevice:
    """The bytes that each device lacks, counted through a view without common units, or beside what is held; nothing
    of a reduction."""
    if (view is None and holding is None) or not source.partial_as(target):
        return ByDevice(0)
    return received_by_device(source, target, view, holding).scaled(_narrower_layout(source, target))


def _narrower_layout(source: Layout, target: Layout) -> Layout:
    return min(source, target, key=lambda layout: dtypes.bits(layout.dtype))
