"""Routes for a network over axes that neither layout uses: along them the array is replicated, and their wires idle.

A worked example: f32[{dcn}8192] -> f32[16384] on <dcn=2, x=8, y=8>, tiles of t = 32 KiB, dcn far slower than x and y:

    as it is       all_gather over dcn         t over dcn
    over x and y   slice                       nothing; every device keeps t / 64
                   all_gather over dcn         t / 64 over dcn
                   all_gather over x and y     the rest, over x and y

Devices receive more bytes than the lower bound, in less time. The idle axes are taken in the order of their bandwidth,
the fastest first: each prefix of them is tried.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from reshard.errors import LayoutError
from reshard.geometry.refine import Refinement
from reshard.plans.plan import StepSpec
from reshard.synth import cost
from reshard.synth.network import Links
from reshard.synth.routes import normal, reduction
from reshard.synth.routes.route import Pair, Route, hold_digits
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis


def routes(pair: Pair, links: Links, least: float) -> Iterator[Route]:
    """The fastest routes over each prefix of the idle axes; those that cannot take less than `least` seconds are left.

    >>> from reshard.synth.network import Network
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(dcn=2, x=8)
    >>> pair = Pair(Layout.parse("f32[{dcn}8192]", mesh), Layout.parse("f32[16384]", mesh))
    >>> links = Network.preset("tpu-v5p").links(mesh)
    >>> [[step.kind for step in route] for route in routes(pair, links, least=1.0)]
    [['slice', 'all_gather', 'all_gather']]
    """
    refinement = pair.refinement
    if pair.crosses or pair.starts or refinement is None or not refinement.exact or not pair.source.tile_bytes:
        return
    wires = sum(link.bandwidth for link in links.values())
    used = [axis for layout in (pair.source, pair.target) for axis in (*layout.held, *layout.partial)]
    prefixes = accumulate([axis] for axis in sort_idle_axes(pair.source.mesh, used, links))
    for sliced in dict.fromkeys(_slice_idle(pair.source, refinement, axes) for axes in prefixes):
        if sliced is None or sliced == pair.source:
            continue
        peers = pair.source.tile_bytes // sliced.tile_bytes
        if (1 - 1 / peers) * pair.target.tile_bytes / wires >= least:
            return
        rest = Pair(sliced, pair.target)
        after = reduction.routes(rest, links) if pair.reduces else normal.routes(rest, links)
        first = StepSpec("slice", sliced)
        yield from ((first, *route) for route in cost.keep_fastest(after, sliced, links))


def sort_idle_axes(mesh: Mesh, used: Sequence[SubAxis], links: Links) -> list[SubAxis]:
    """The sub-axes that are not used, the fastest first."""
    free: list[SubAxis] = []
    for name in reversed(list(mesh.axes)):
        # What sub-axes leave of an axis, where it is a factor of it.
        pre = 1
        for axis in sorted((axis for axis in used if axis.axis == name), key=lambda axis: axis.pre):
            if axis.pre > pre and axis.pre % pre == 0:
                free.append(SubAxis(name, pre, axis.pre // pre))
            pre = max(pre, axis.pre * axis.size)
        if mesh.axes[name] > pre and mesh.axes[name] % pre == 0:
            free.append(SubAxis(name, pre, mesh.axes[name] // pre))
    return sorted(free, key=lambda axis: links[axis.axis].speed, reverse=True)


def _slice_idle(source: Layout, refinement: Refinement, axes: list[SubAxis]) -> Layout | None:
    """The source cut by axes along digits that are local in both layouts, those that have room; None where the
    sub-axes cannot coexist in one layout."""
    left = [digit.radix if digit.src is None and digit.dst is None else 1 for digit in refinement.digits]
    held: list[list[SubAxis]] = [[] for _ in left]
    for axis in axes:
        at = next((n for n, radix in enumerate(left) if radix and radix % axis.size == 0), None)
        if at is None:
            # Of an axis that no digit has room for, the major part that one has: 2 of 6.
            most, at = max(((math.gcd(radix, axis.size), -n) for n, radix in enumerate(left) if radix), default=(1, 0))
            if most == 1:
                continue
            axis, at = axis._replace(size=most), -at
        left[at] //= axis.size
        held[at].append(axis)
    digits: list[tuple[int, int, int | None]] = []
    for (dim, radix, src, dst), new, rest in zip(refinement.digits, held, left, strict=True):
        if src is None:
            digits += [(dim, axis.size, source.mesh.stride(axis)) for axis in new]
        digits.append((dim, radix if src is not None or dst is not None else rest, src))
    with contextlib.suppress(LayoutError):
        return hold_digits(source, digits)
    return None
