"""Lower bounds on the bytes of the busiest device when several arrays move, whatever the plans.

    f32[{x}3/5] -> f32[5]          device 0    device 1
    a, on <x=2>                    lacks 2     lacks 3
    b, on <x=2> reversed           lacks 3     lacks 2
    both                           5           5            the sum of the maxima is 6

The bound is the maximum over devices of the sum over arrays. It can be less than the sum of the maxima, since the
busiest device for one array need not be the busiest for another. Senders are bounded in the same way: what devices lack
of the tiles that a group of devices holds must leave the group once, for all arrays together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair import crossing
from reshard.types.pair.lacking import MOST_DEVICES, ByDevice, lacking
from reshard.types.pair.refine import partial_change, refine
from reshard.types.rules.bounds import lower_bound, receivers_bound, sums_stay
from reshard.types.rules.view_bounds import plain_ends, view_bound, view_endpoint_bound, view_receipts
from reshard.types.view import View

Ends = tuple[Layout, Layout, View | None]
"""Source, target and view of one array's move."""


def joint_lower_bound(moves: Iterable[Ends]) -> int:
    """Bytes that some device must receive, whatever the plans for these arrays.

    >>> from reshard.types import Mesh
    >>> meshes = Mesh(x=2), Mesh({"x": 2}, device_ids=[1, 0])
    >>> a, b = ([Layout.parse(text, mesh) for text in ("f32[{x}3/5]", "f32[5]")] for mesh in meshes)
    >>> view_bound(*a), view_bound(*b), joint_lower_bound([(*a, None), (*b, None)])
    (12, 12, 20)
    """
    counts = Counter(moves)
    alone = max((view_bound(*ends) for ends in counts), default=0)
    per_device = busiest((ends[1].mesh, _must_receive(*ends), n) for ends, n in counts.items())
    return max(alone, per_device, _average(counts))


def joint_endpoint_bound(moves: Iterable[Ends]) -> int:
    """Bytes that some device must send or receive, whatever the plans: what leaves its holders, shared evenly.

    >>> from reshard.types import Mesh
    >>> trainer, server = Mesh(x=2), Mesh({"d": 8}, device_ids=range(2, 10))
    >>> ends = Layout.parse("f32[{x}4]", trainer), Layout.parse("f32[{d}1]", server), None
    >>> joint_lower_bound([ends, ends]), joint_endpoint_bound([ends, ends])
    (8, 32)
    """
    counts = Counter(moves)
    alone = max((view_endpoint_bound(*ends) for ends in counts), default=0)
    leaving: Counter[frozenset[int]] = Counter()
    for ends, count in counts.items():
        for holders, nbytes in _must_leave(*ends).items():
            leaving[holders] += count * nbytes
    together = frozenset[int]().union(*leaving)
    groups = {**leaving, together: sum(leaving.values())} if together else leaving
    return max([alone, *(-(-nbytes // len(holders)) for holders, nbytes in groups.items())])


def busiest(loads: Iterable[tuple[Mesh, ByDevice, int]]) -> int:
    """The most bytes on one device, given the figures of several arrays on their meshes, and how often each occurs.

    >>> mesh = Mesh(x=2)
    >>> busiest([(mesh, ByDevice(8), 2), (mesh, ByDevice(0, {0: 4, 1: 0}), 3)])
    28
    """
    given = list(loads)
    one_set = len({mesh.size if mesh.device_ids is None else frozenset(mesh.devices) for mesh, _, _ in given}) <= 1
    everywhere = 0
    by_device: Counter[int] = Counter()
    for mesh, load, count in given:
        if load.listed is None and (one_set or mesh.size > MOST_DEVICES):
            everywhere += load.each * count
        else:
            for device, nbytes in (load.listed or dict.fromkeys(mesh.devices, load.each)).items():
                by_device[device] += nbytes * count
    return everywhere + max(by_device.values(), default=0)


def _average(counts: Counter[Ends]) -> int:
    """The bound for the average device: of a reduction, it is known where the busiest one's share is not."""
    plain: Counter[tuple[Layout, Layout]] = Counter()
    for move, count in counts.items():
        if (ends := plain_ends(*move)) is not None:
            plain[ends] += count
    if len({(target.mesh.size, target.mesh.device_ids) for _, target in plain}) != 1:
        return 0
    size = next(iter(plain))[1].mesh.size
    total = 0
    for (source, target), count in plain.items():
        if sums_stay(source, target):
            each, listed = _must_receive(source, target, None)
            total += count * (each * size if listed is None else sum(listed.values()))
        elif _reduces_evenly(source, target):
            total += count * lower_bound(source, target) * size
    return -(-total // size)


@lru_cache(maxsize=4096)
def _must_receive(source: Layout, target: Layout, view: View | None) -> ByDevice:
    """What each device receives at least; nothing where only the worst device's figure is known.

    Of a sum that is finished no device has an element before it has received something for it.
    """
    ends = plain_ends(source, target, view)
    if ends is None:
        return view_receipts(source, target, view)
    source, target = ends
    if not sums_stay(source, target):
        even = not target.partial and _reduces_evenly(source, target)
        return ByDevice(target.tile_bytes if even else 0)
    if target.mesh.size > MOST_DEVICES:
        return lacking(source, target).scaled(target) if _alike(source, target) else ByDevice(0)
    return lacking(source, target).scaled(target)


@lru_cache(maxsize=4096)
def _must_leave(source: Layout, target: Layout, view: View | None) -> Mapping[frozenset[int], int]:
    """The bytes that each group of devices with one tile must send; none of sums, or where receivers bound as much."""
    ends = plain_ends(source, target, view)
    if ends is None:
        return {}
    source, target = ends
    if source.partial or target.partial or receivers_bound(source, target):
        return {}
    if max(source.mesh.size, target.mesh.size) > MOST_DEVICES:
        return {}
    leaving: Counter[frozenset[int]] = Counter()
    for holders, elements in crossing.leaving(source, target):
        leaving[frozenset(holders)] += source.nbytes(elements)
    return leaving


def _alike(source: Layout, target: Layout) -> bool:
    """Whether all devices lack the same, in closed form."""
    r = refine(source, target)
    return r is not None and r.exact and not r.swapped


def _reduces_evenly(source: Layout, target: Layout) -> bool:
    """Whether something is reduced between even layouts of one mesh, and nothing started.

    Then the bound of the busiest device holds for the average one.
    """
    if source.mesh != target.mesh or not source.even or not target.even:
        return False
    change = partial_change(source, target)
    return change is not None and bool(change.reduced) and not change.started
