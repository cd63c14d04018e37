"""The planner: prices the routes, keeps those within the budget, returns the best, checked.

Without a network the best route has the fewest bytes on the worst device, then the fewest
launches, then the least memory, the messages of an exchange counted as buffers whether it stages
them or not. With a network it has the least predicted seconds, then those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import SupportsIndex, cast

from reshard.errors import BudgetError, PlanError
from reshard.synth import cost
from reshard.synth.network import Network
from reshard.synth.routes import boxes, permute_first, reduction
from reshard.synth.routes.normal import Atoms, Route, minimal, priced
from reshard.types.layout import Layout
from reshard.types.mesh import primes
from reshard.types.pair.refine import Refinement, refine
from reshard.types.pair.remesh import common_mesh, remesh
from reshard.types.plan import Plan, Step, StepSpec, chain, floor
from reshard.types.rules.checker import check_step
from reshard.types.rules.cost import StepMode
from reshard.types.rules.exchange import exchange_size
from reshard.types.rules.parts import counts

BRIDGED = 4096
"""Devices up to which layouts that do nest are priced over bridges too: on more it takes too long."""


def plan(
    source: Layout,
    target: Layout,
    budget: int | None = None,
    network: Network | str | None = None,
    donate: bool = False,
) -> Plan:
    """The best checked plan from source to target.

    `budget` is in bytes a device and counts everything live during the move, source and target
    included; `network` is a `Network`, or the name of a preset; `donate` lets the source be given
    up once its data has moved on. Plans are cached.

    Raises `PlanError` for layouts of different arrays or devices, or a target that is partial where
    the source is not, and `BudgetError`, with the smallest budget that works, for one that cannot be met.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> p = plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    >>> [s.kind for s in p.steps], p.received_bytes, p.lower_bound_bytes
    (['all_to_all'], 1792, 1792)
    """
    if isinstance(network, str):
        network = Network.load(network)
    _check_request(source, target, budget, network)
    return _plan(source, target, budget, network, bool(donate))


@lru_cache(maxsize=4096)
def _plan(source: Layout, target: Layout, budget: int | None, network: Network | None, donate: bool) -> Plan:
    start, end = _on_one_mesh(source, target)
    links = None if network is None else network.links(start.mesh)
    routes: Sequence[Sequence[StepSpec]] = list(dict.fromkeys(_routes(start, end, links)))
    if links is not None and budget is None:
        routes = cost.fastest(routes, start, links)
    if links is None:
        routes = _slim(start, end, routes)
    found: list[Plan] = []
    for route in routes:
        found.append(_timed(chain(start, end, route, donate), links))
        if budget is None and links is None and _settles(found[-1]):
            break
    within = found if budget is None else [p for p in found if p.peak_bytes <= budget]
    if budget is not None:
        cut = [p for f in dict.fromkeys(found) for p in _chunked(f, budget, links)]
        if donate and _overwrites(start, end):
            cut.append(_in_place(start, end, budget, links))
        within += [p for p in cut if p.peak_bytes <= budget]
    if not within:
        _refuse(found, budget or 0)
    return min(within, key=_objective)


def _slim(source: Layout, target: Layout, found: Sequence[Sequence[StepSpec]]) -> Sequence[Sequence[StepSpec]]:
    """The routes whose tiles are never larger than the larger end; all, should none be so."""
    most = max(source.tile_bytes, target.tile_bytes)
    return [r for r in found if all(move.result.tile_bytes <= most for move in r)] or found


def _settles(found: Plan) -> bool:
    """Whether a plan for uneven layouts is good enough not to tally the exchange that rivals it."""
    even = found.source.even and found.target.even
    return not even and found.launches <= 1 and found.received_bytes == found.lower_bound_bytes


def _objective(found: Plan) -> tuple[float, int, int, int, int]:
    """What the best plan is least in; the last entry prefers a collective to an exchange of boxes."""
    time = 0.0 if found.seconds is None else found.seconds
    boxed = sum(step.kind == "exchange" for step in found.steps)
    return (time, found.received_bytes, found.launches, _memory(found), boxed)


def _memory(found: Plan) -> int:
    """The peak where messages have buffers of their own: XLA's always do, and the tie is with its own collectives."""
    return max([found.peak_bytes, *(step.live_bytes + _message(step) for step in found.steps)])


def _message(step: Step) -> int:
    """The bytes of a message that an exchange has no scratch for."""
    staged = step.kind != "exchange" or step.mode.in_place or step.cost.scratch > 0
    return 0 if staged or not step.launches else -(-step.received_bytes // step.launches)


def _routes(source: Layout, target: Layout, links: cost.Links | None) -> Iterator[Route]:
    if source.partial == target.partial:
        yield from _moves(source, target, links)
        return
    for reduced, now in reduction.starts(source, target):
        yield from ((*reduced, *rest) for rest in _moves(now, target, links))


def _moves(source: Layout, target: Layout, links: cost.Links | None) -> Iterator[Route]:
    """Routes between layouts that are partial alike."""
    if source == target:
        yield ()
        return
    refinement = refine(source, target)
    if refinement is None:
        yield from boxes.routes(source, target)
        yield from _exchanged(source, target, links)
        yield from _bridged(source, target, links, thorough=True)
        return
    yield from _structured(source, target, refinement, links)
    if links is not None and source.mesh.size <= BRIDGED and (refinement.swapped or refinement.gathered):
        yield from _bridged(source, target, links, thorough=False)


def _exchanged(source: Layout, target: Layout, links: cost.Links | None) -> Iterator[Route]:
    """Routes with an exchange of fewer rounds than the one to the target, between layouts that do not nest."""
    for between in permute_first.before_gathers(source, target):
        kind = "permute" if boxes.permutes(source, between) else "exchange"
        yield (StepSpec(kind, between), StepSpec("all_gather", target))
    first, last = boxes.dealt(source, target), boxes.dealt(target, source)
    if first is not None and (r := refine(first, target)) is not None:
        yield from ((StepSpec("exchange", first), *rest) for rest in _structured(first, target, r, links))
    if last is not None and (r := refine(source, last)) is not None:
        yield from ((*rest, StepSpec("exchange", target)) for rest in _structured(source, last, r, links))


def _structured(source: Layout, target: Layout, r: Refinement, links: cost.Links | None) -> Iterator[Route]:
    atoms = Atoms(source, target, r)
    if links is None:
        yield from minimal(atoms)
    else:
        slow_first = sorted(links, key=lambda axis: (links[axis].bandwidth, -links[axis].latency))
        yield from priced(atoms, slow_first)


def _bridged(source: Layout, target: Layout, links: cost.Links | None, thorough: bool) -> Iterator[Route]:
    """Routes whose permutes make the numerals nest, each stretch between them as good as can be."""
    for path in permute_first.paths(source, target, thorough):
        moves: list[StepSpec] = []
        for before, after in pairwise([source, *path]):
            refinement = refine(before, after)
            if boxes.permutes(before, after):
                moves.append(StepSpec("permute", after))
            elif refinement is None:
                break
            else:
                stretch = _structured(before, after, refinement, links)
                moves += next(stretch) if links is None else cost.fastest(stretch, before, links)[0]
        else:
            yield tuple(moves)


def _timed(found: Plan, links: cost.Links | None) -> Plan:
    """The plan with its predicted seconds, step by step."""
    if links is None:
        return found
    steps = tuple(replace(s, seconds=cost.seconds(_move(s), s.operand, links)) for s in found.steps)
    return replace(found, steps=steps, seconds=sum(s.seconds or 0.0 for s in steps))


def _move(step: Step) -> StepSpec:
    return StepSpec(step.kind, step.result, step.mode)


def _chunked(found: Plan, budget: int, links: cost.Links | None) -> Iterator[Plan]:
    """The plan with exchanges for its all-to-alls and gathers, cut so that they fit the budget."""
    moves: list[StepSpec] = []
    for step in found.steps:
        move = _fit(step, budget)
        if move is None:
            return
        moves.append(move)
    yield _timed(chain(found.source, found.target, moves, found.donate), links)


def _fit(step: Step, budget: int) -> StepSpec | None:
    """The step as it is if it fits, else in as few launches as parts or an exchange in pieces take."""
    spare = budget - step.live_bytes + step.cost.scratch
    if step.cost.scratch <= spare:
        return _move(step)
    fitting = [move for move in (_in_parts(step, spare), _cut(step, spare)) if move is not None]
    return min(
        fitting, key=lambda move: check_step(move.kind, step.operand, move.result, move.mode).launches, default=None
    )


def _in_parts(step: Step, spare: int) -> StepSpec | None:
    """A collective in the fewest parts whose buffers fit."""
    if step.kind == "exchange":
        return None  # Cut in smaller pieces instead.
    for count in counts(step.operand, step.result):
        mode = StepMode(parts=count)
        if check_step(step.kind, step.operand, step.result, mode).scratch <= spare:
            return StepSpec(step.kind, step.result, mode)
    return None


def _cut(step: Step, spare: int) -> StepSpec | None:
    """An exchange in the largest pieces that fit; a reduction has none."""
    if spare < 0 or step.operand.partial != step.result.partial:
        return None
    size = exchange_size(step.operand, step.result)
    one = max(1, step.operand.nbytes(1))
    return StepSpec("exchange", step.result, StepMode(max(spare // (2 * one), size.run, 1)))


def _overwrites(source: Layout, target: Layout) -> bool:
    """Whether an exchange can put the target where the source was."""
    refinement = refine(source, target)
    return source != target and source.partial == target.partial and refinement is not None and refinement.exact


def _in_place(source: Layout, target: Layout, budget: int, links: cost.Links | None) -> Plan:
    """The exchange that overwrites a donated source, in the largest pieces that fit the budget."""
    spare = budget - max(source.tile_bytes, target.tile_bytes)
    one = max(1, source.nbytes(1))
    move = StepSpec("exchange", target, StepMode(max(1, spare // (2 * one)), in_place=True))
    return _timed(chain(source, target, [move], donate=True), links)


def _refuse(found: list[Plan], budget: int) -> None:
    """Raises with the smallest budget that some plan meets."""
    source, target = found[0].source, found[0].target
    smallest = min(_smallest(p) for p in found)
    if found[0].donate and _overwrites(source, target):
        smallest = floor(source, target, donate=True)
    raise BudgetError(
        f"budget {budget} B is too small for {source} -> {target} (global {source.shape}, tiles "
        f"{source.tile_shape} and {target.tile_shape} of {source.tile_bytes} and {target.tile_bytes} B, mesh "
        f"{source.mesh}); the smallest that works is {smallest} B",
        smallest,
    )


def _smallest(found: Plan) -> int:
    """The least peak that the plan has when its moves are cut as small as need be."""
    return max([found.source.tile_bytes, *(step.live_bytes - step.cost.scratch + _least(step) for step in found.steps)])


def _least(step: Step) -> int:
    """The least scratch of a step: none for an exchange in pieces, for a reduction that of its parts."""
    if step.operand.partial == step.result.partial:
        return 0
    modes = (StepMode(parts=count) for count in counts(step.operand, step.result))
    return min([step.cost.scratch, *(check_step(step.kind, step.operand, step.result, mode).scratch for mode in modes)])


def _check_request(source: object, target: object, budget: object, network: object) -> None:
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise PlanError(
                f"the {name} {layout!r} is a {type(layout).__name__}, no Layout; read it with Layout.parse(text, mesh)"
            )
    check_options(budget, network)
    _check_arrays(cast(Layout, source), cast(Layout, target))


def check_options(budget: object, network: object) -> None:
    """Raises `PlanError` for a budget or a network that `plan` would refuse whatever the layouts."""
    if network is not None and not isinstance(network, Network):
        raise PlanError(f"network {network!r} is no Network; give one, the name of a preset, or None")
    if budget is not None and (
        not isinstance(budget, SupportsIndex) or isinstance(budget, bool) or budget.__index__() < 0
    ):
        raise PlanError(f"budget {budget!r}: give bytes a device as a whole number of at least 0, or None for no limit")


def _check_arrays(source: Layout, target: Layout) -> None:
    if source.shape != target.shape:
        raise PlanError(
            f"source {source} has global shape {source.shape}, target {target} has {target.shape}; a "
            f"redistribution keeps the array, so give both the same global shape"
        )
    if source.dtype != target.dtype:
        raise PlanError(
            f"source {source} is {source.dtype}, target {target} is {target.dtype}; a redistribution keeps the "
            f"dtype, so cast before or after it"
        )
    if _devices_differ(source, target):
        raise PlanError(
            f"mesh {source.mesh} of the source and mesh {target.mesh} of the target have different devices "
            f"({source.mesh.size} and {target.mesh.size}); put both layouts on the same devices"
        )


def _devices_differ(source: Layout, target: Layout) -> bool:
    a, b = source.mesh, target.mesh
    if a.size != b.size:
        return True
    return a.device_ids != b.device_ids and set(a.devices) != set(b.devices)


def _on_one_mesh(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts on one mesh if they have spellings there; else as they are, for an exchange."""
    if source.mesh == target.mesh:
        pair = (source, target)
    else:
        shared = common_mesh(source.mesh, target.mesh)
        pair = next(
            (
                (s, t)
                for mesh in (source.mesh, target.mesh, shared)
                if mesh is not None
                and (s := remesh(source, mesh)) is not None
                and (t := remesh(target, mesh)) is not None
            ),
            (source, target),
        )
    _check_partial(*pair)
    return pair


def _check_partial(source: Layout, target: Layout) -> None:
    """A redistribution reduces or keeps partial sub-axes; it cannot make or change them."""
    if source.partial == target.partial and source.reduction == target.reduction:
        return
    made = set(_strides(target)) - set(_strides(source))
    if made or (target.partial and source.reduction != target.reduction) or source.mesh != target.mesh:
        raise PlanError(
            f"target {target} is partial where source {source} is not (mesh {target.mesh}); a redistribution can "
            f"only finish a reduction, so give a target that is partial over fewer of the same sub-axes"
        )


def _strides(layout: Layout) -> Iterator[int]:
    """The prime places of the partial sub-axes: comparable whatever their spelling."""
    for sub in layout.partial:
        place = layout.mesh.stride(sub)
        for prime in primes(sub.size):
            yield place
            place *= prime
