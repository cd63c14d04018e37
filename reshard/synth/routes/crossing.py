"""Routes to other devices: finish sums, cross, gather what the target replicates.

    f32[{fsdp}8, 128] on <fsdp=16>  ->  f32[128, {tp}16] on <tp=8, rep=16>, other devices

    step         result                   a trainer's device sends   a server's receives
    exchange     f32[{rep}8, {tp}16]      4 KiB                      512 B
    all_gather   f32[128, {tp}16]                                    7.5 KiB

    exchange     f32[128, {tp}16]         64 KiB                     8 KiB         each replica asks for itself

Where the target replicates, the first route sends each element across once, and the target's devices pass it on among
themselves. Its target is cut along the idle axes, in one dim or another: which one decides how many messages cross,
here 8 from every device, or 128 if dim 1 is cut. Holders of one source tile need no slices before the exchange, since
they share what is asked of them.

With a network, a cut along the idle axes of the fastest links only is tried too: elements cross once for each domain.
So is a turn on either side, since pieces that nest cross in few messages: rows on 8 devices to columns on 4 others are
2 launches and an all-to-all among the 4, where each of them would ask all 8 for itself.

A partial source is reduced on its own devices first, scattered if it can be. A partial target is started from tiles
that its summands hold in parts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from reshard.errors import MeshError
from reshard.geometry.holders import count_copies
from reshard.geometry.refine import refine
from reshard.plans.plan import StepSpec
from reshard.plans.rules.step_mode import StepMode
from reshard.synth import cost
from reshard.synth.network import Network
from reshard.synth.routes import list_routes, permute_first, reduction
from reshard.synth.routes.route import Pair, Route
from reshard.types.layout import Digit, Layout, fit_digits
from reshard.types.mesh import Mesh, SubAxis, merged_spans, prime_places
from reshard.types.view import View

MOST_RELAYED = 1 << 14
"""Pairs of devices: more are not listed to see whether a relay is better."""


def routes(pair: Pair, network: Network | None) -> Iterator[Route]:
    """One step across, after the source's sum is finished, and before what the target replicates is gathered.

    >>> trainer, server = Mesh(fsdp=4), Mesh({"tp": 2, "rep": 2}, device_ids=[4, 5, 6, 7])
    >>> source, target = Layout.parse("f32[{fsdp}4, 8]", trainer), Layout.parse("f32[16, {tp}4]", server)
    >>> [[step.kind for step in route] for route in routes(Pair(source, target), None)]
    [['exchange'], ['exchange', 'all_gather'], ['exchange', 'all_gather']]
    """
    if not pair.crosses:
        return
    source, ends = pair.source, [*list_landings(pair.target, network)]
    # Steps that finish the source's sum, and what they reach; the source itself if there is none to finish.
    starts: list[tuple[Route, Layout]] = [] if source.partial else [((), source)]
    if source.partial:
        whole = replace(source, partial=(), reduction=None)
        for near in dict.fromkeys([*_list_cuts(whole, source.partial), whole]):
            # Starts are right for any pair on one mesh; the first is the one with the fewest bytes.
            route = next(reduction.routes(Pair(source, near), None), None)
            if route is not None:
                starts.append((route, near))
    if network is not None and not (source.partial or pair.target.partial):
        # The fastest way on its own mesh to turn, or to turn back.
        for near in _list_turns(source, pair.target):
            links = network.links(source.mesh)
            turn = cost.keep_fastest(list_routes(Pair(source, near), links), source, links)[0]
            starts.append((tuple(turn), near))
        for far in _list_turns(pair.target, source):
            links = network.links(far.mesh)
            turn = cost.keep_fastest(list_routes(Pair(far, pair.target), links), far, links)[0]
            ends.append((far, tuple(turn)))
    for before, near in starts:
        for far, after in ends:
            yield (*before, StepSpec("permute" if permute_first.is_permute(near, far) else "exchange", far), *after)


def list_relays(source: Layout, target: Layout, view: View | None = None) -> Iterator[Route]:
    """One exchange in two turns, where the target replicates: for what the other routes send too much of."""
    replicas = target.mesh.size // math.prod(axis.size for axis in target.held)
    if view is None and (source.ragged or target.ragged):  # Among the same devices, only a relay cuts requests.
        replicas = max(replicas, count_copies(source))
    partial = source.partial or target.partial
    if partial or replicas == 1 or target.mesh.size * max(replicas, source.mesh.size) > MOST_RELAYED:
        return
    yield (StepSpec("exchange", target, StepMode(relay=True, view=view)),)


def relays_pieces(source: Layout, target: Layout) -> bool:
    """Whether a relay may be worth it among the same devices: of pieces of any size, some device may have most of what
    all replicas lack. Tables of many runs, whose messages would have to be listed, are left out."""
    tables = [dim.pieces for layout in (source, target) for dim in layout.dims if dim.pieces is not None]
    runs = math.prod(len(pieces.lengths) for pieces in tables)
    return bool(tables) and runs <= MOST_RELAYED and next(list_relays(source, target), None) is not None


def list_landings(target: Layout, network: Network | None) -> Iterator[tuple[Layout, Route]]:
    """Layouts to cross to, and the steps from there to the target."""
    whole = replace(target, partial=(), reduction=None)
    for start in dict.fromkeys([*_list_cuts(whole, target.partial), whole]):
        last = next(reduction.routes(Pair(start, target), None)) if target.partial else ()
        yield start, last
        idle = _list_idle(start.mesh, (*target.held, *target.partial))
        gathered = [idle]
        if network is not None:
            # Also those with the fastest links only: elements cross once for each domain that needs them, and no
            # gather runs between domains.
            links = network.links(start.mesh)
            for slowest in sorted({links[axis.axis].bandwidth for axis in idle})[1:]:
                gathered.append([axis for axis in idle if links[axis.axis].bandwidth >= slowest])
        for far in dict.fromkeys(cut for axes in gathered for cut in _list_cuts(start, axes)):
            # Padded pieces may not nest in the target's.
            gather = "exchange" if refine(far, start) is None else "all_gather"
            yield far, (StepSpec(gather, start), *last)


def _list_turns(layout: Layout, other: Layout) -> Iterator[Layout]:
    """The layout with the axes of one dim on another one, which the other layout splits, where that stays even."""
    split, wanted = ([any(d.axis for d in dim.digits) for dim in each.dims] for each in (layout, other))
    for at, to in itertools.permutations(range(len(split)), 2):
        if split[at] and wanted[to] and not wanted[at]:
            turned = layout.with_local(at, to)
            if layout.even and turned.even:
                yield turned


def _list_cuts(layout: Layout, axes: Sequence[SubAxis]) -> Iterator[Layout]:
    """The layout cut further along these sub-axes: as far as possible in one dim, then in the next ones.

    A prime of a sub-axis that no dim is long enough for is left out.
    """
    primes = [prime for axis in axes for prime in prime_places(layout.mesh, axis)]
    # For each dim its longest local digit, the last one among equals: its number, and what is left of it. Pieces of any
    # size are not cut.
    local = [
        [(d.radix, at) for at, d in enumerate(dim.digits) if d.axis is None and dim.pieces is None]
        for dim in layout.dims
    ]
    longest = [max(digits, default=(1, None)) for digits in local]
    cuts: list[Layout] = []
    for first in range(len(layout.dims)):
        order = [*range(first, len(layout.dims)), *range(first)]
        rest, held = [radix for radix, _ in longest], [list[Digit]() for _ in longest]
        for stride, prime in primes:
            # To the first dim whose digit the prime divides, or else to the first whose last digit is long enough:
            # only there can pieces be padded.
            whole = [at for at in order if rest[at] and rest[at] % prime == 0]
            padded = [at for at in order if longest[at][1] == len(layout.dims[at].digits) - 1 and rest[at] >= prime]
            for at in [*whole, *padded][:1]:
                held[at] += [Digit(axis.size, axis) for axis in layout.mesh.sub_axes(stride, prime)]
                rest[at] = -(-rest[at] // prime)
        dims = list(layout.dims)
        for number, (dim, (_, at)) in enumerate(zip(layout.dims, longest, strict=True)):
            if at is not None and held[number]:
                digits = (*dim.digits[:at], *held[number], Digit(rest[number], None), *dim.digits[at + 1 :])
                dims[number] = fit_digits(digits, dim.size)
        if dims != list(layout.dims):
            cuts.append(replace(layout, dims=tuple(dims)))
    yield from dict.fromkeys(cuts)


def _list_idle(mesh: Mesh, used: Iterable[SubAxis]) -> list[SubAxis]:
    """The sub-axes of a mesh that these do not overlap: a layout is replicated along them."""
    idle: list[SubAxis] = []
    end = 1
    for start, after in [*merged_spans(mesh.span(axis) for axis in used), (mesh.size, mesh.size)]:
        if start > end and start % end == 0:
            with contextlib.suppress(MeshError):  # a gap that is not a product of sub-axes
                idle += mesh.sub_axes(end, start // end)
        end = after
    return idle
