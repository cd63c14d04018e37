"""Plans of moves with a view, a part or a cast: what leads to an ordinary move between two layouts, and on from it.

    f32[3{x}2, 5] -> bf16[{y}4, 5], view "(three h) d -> h d", take three=0, cast, on <x=4, y=2>

    cast             bf16[3{x}2, 5]        first, since fewer bytes move
    view, take       bf16[1, {x}2, 5]      the dim is opened and its part taken in each tile
    view             bf16[{x}2, 5]
    ...              bf16[{y}4, 5]         planned as any move between two layouts

Steps before and after send nothing. Where tiles have to be transposed, this is tried at every place between the steps.
Where no common units exist, one `exchange` through the view does it all, or one to a target that is cut further, from
which devices gather what it replicates. Where all of these load a device with more than the bound, the exchange is
relayed as well. What the busiest device sends counts as what it receives does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from reshard.errors import BudgetError, PlanError, StepError
from reshard.geometry.remesh import disjoint
from reshard.geometry.view_layouts import Opened, Stages, fuse_atoms, invert_view, open_target, view_stages
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import StepMode
from reshard.synth.budget import cut_exchange
from reshard.synth.options import SLACK, PlanOptions
from reshard.synth.routes import crossing
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import Atom, View

Between = Callable[[Layout, Layout, PlanOptions], Plan]
"""The planner of a move between two layouts of one array."""

Specs = list[StepSpec]


def plan_candidates(move: Move, between: Between, options: PlanOptions, *, gathers: bool = False) -> list[Plan]:
    """All candidates, within the budget if there is one. If it `gathers`, an exchange is a relay that does, and nothing
    else is tried to load its senders less.

    Raises `PlanError` for a move that no steps make, and `BudgetError` with the least peak among the candidates.
    """
    budget = options.budget
    if move.holding is not None:
        return _plan_update(move, options)
    # A cast that narrows runs first, so that fewer bytes move; one that widens, or that waits for a sum, runs last.
    first = not move.source.partial and dtypes.bits(move.target.dtype) < dtypes.bits(move.source.dtype)
    inner = move
    if move.casts and first:
        inner = Move(replace(move.source, dtype=move.target.dtype), move.target, move.view)
    elif move.casts:
        inner = Move(move.source, replace(move.target, dtype=move.source.dtype), move.view)
    made: list[Plan] = []

    def add_plans(routes: Iterable[Specs]) -> None:
        for specs in routes:
            for route in _place_cast(move, specs, first, budget) if move.casts else [specs]:
                with suppress(StepError):  # A transposition does not fit every place.
                    made.append(chain(move.source, move.target, route, options.donate, None, move.view))

    def load(plan: Plan) -> int:
        return max(plan.sent_bytes, plan.received_bytes)

    add_plans(_list_routes(inner, between, options, gathers))
    if gathers and made:
        return made
    cast = [chain(move.source, move.target, [s], options.donate, None, move.view) for s in _cast_on_way(move, budget)]
    enough = 1 + (options.slack if options.network is None else SLACK)
    # What passes elements on takes more bytes in all, and a relay more launches: only where the busiest device gains by
    # it. Gathers may save launches as well, where one exchange takes more than the two or three that these do.
    for relay in (False, True):
        loads = (load(plan) / max(1, plan.endpoint_bound_bytes) for plan in [*made, *cast])
        many = not relay and any(step.mode.view and step.launches > 2 for plan in made for step in plan.steps)
        if min(loads, default=math.inf) > enough or many:
            add_plans(_pass_on(inner, options, relay=relay))
            for specs in _pass_on_narrow(move, inner) if relay else ():
                cast.append(chain(move.source, move.target, specs, options.donate, None, move.view))
    if not made:
        raise PlanError(
            f"{move}: a sum is finished by collectives, for which digits must end where the atoms of the view end; "
            f"finish the sum in a move of its own first"
        )
    # A cast in the messages is for where a tile in both dtypes has no room, or more bytes to move.
    fitting = [plan for plan in made if budget is None or plan.peak_bytes <= budget]
    least = min(map(load, fitting), default=math.inf)
    made += cast
    fitting += [plan for plan in cast if (budget is None or plan.peak_bytes <= budget) and load(plan) < least]
    return fitting or _refuse_budget(move, made, budget)


def _plan_update(move: Move, options: PlanOptions) -> list[Plan]:
    """One exchange of what devices lack or hold stale, as it is, or in chunks where its buffers leave the budget.

    Each device receives what it needs, once, and holders share what is asked of them; where that loads them far beyond
    the bound, since many devices lack the same, these pass it on to each other.
    """
    view = None if move.view.plain else move.view
    routes: list[Specs] = [[StepSpec("exchange", move.target, StepMode(view=view, holding=move.holding))]]
    straight = chain(move.source, move.target, routes[0], options.donate, None, view)
    enough = 1 + (options.slack if options.network is None else SLACK)
    widens = dtypes.bits(move.target.dtype) > dtypes.bits(move.source.dtype)
    if straight.sent_bytes > enough * straight.endpoint_bound_bytes and not widens:
        relay = StepSpec("exchange", move.target, StepMode(relay=True, view=view, holding=move.holding))
        cast = StepSpec("cast", replace(move.source, dtype=move.target.dtype))  # Relays cast nothing on the way.
        routes.append([cast, relay] if move.casts else [relay])
    if options.budget is not None:
        routes += [[spec] for spec in _cut_exchanges(move, view, options.budget)]
    made = [straight, *(chain(move.source, move.target, route, options.donate, None, view) for route in routes[1:])]
    fitting = [plan for plan in made if options.budget is None or plan.peak_bytes <= options.budget]
    return fitting or _refuse_budget(move, made, options.budget)


def _refuse_budget(move: Move, made: Sequence[Plan], budget: int | None) -> NoReturn:
    smallest = min(plan.peak_bytes for plan in made)
    raise BudgetError(
        f"budget {budget} B is too small for {move} (global {move.source.shape} -> {move.target.shape}, tiles of "
        f"{move.source.tile_bytes} and {move.target.tile_bytes} B); the smallest that works is {smallest} B",
        smallest,
    )


def _place_cast(move: Move, specs: Specs, first: bool, budget: int | None) -> Iterator[Specs]:
    """The steps with the cast where the fewest bytes move, and where that needs less memory at no bytes more, later.

    A part is filled after it: what the target's other parts hold is neither cast nor scaled.
    """
    path = [move.source, *(spec.result for spec in specs)]
    fills = (n for n, spec in enumerate(specs) if spec.mode.fills)
    last = next(fills, len(specs))
    legal = [at for at in range(last + 1) if not path[at].partial]  # A sum is finished before it is cast.
    sums = [at for at, layout in enumerate(path) if layout.partial]
    narrows = dtypes.bits(move.target.dtype) < dtypes.bits(move.source.dtype)
    places = [0 if first else sums[-1] + 1 if narrows and sums and sums[-1] < last else max(legal, default=last)]
    if first:
        # After the steps that send nothing, where tiles are smaller: of f32[16] to bf16[{x}4], a quarter is cast.
        free = next((at for at, spec in enumerate(specs[:last]) if spec.kind not in ("slice", "view", "take")), last)
        places += [
            at for at in range(1, free + 1) if math.prod(path[at].tile_shape) < math.prod(path[at - 1].tile_shape)
        ]
    if budget is not None:  # Wherever it fits, at more bytes if it must.
        places += [at for at in legal if at not in places]
    for at in places:
        before = [spec._replace(result=replace(spec.result, dtype=move.source.dtype)) for spec in specs[:at]]
        after = [spec._replace(result=replace(spec.result, dtype=move.target.dtype)) for spec in specs[at:]]
        end = before[-1].result if before else move.source
        yield [*before, StepSpec("cast", replace(end, dtype=move.target.dtype)), *after]


def _list_routes(move: Move, between: Between, options: PlanOptions, gathers: bool) -> Iterator[Specs]:
    """The routes of a move that keeps its dtype."""
    budget = options.budget
    parts = None if move.plain else view_stages(move.source, move.target, move.view)
    if move.plain:
        same = View.identity(move.source.shape)
        for inner in _list_middles(move.source, move.target, between, options):
            # The middle may spell its two ends on another mesh.
            steps = [_view_step(inner.source, same), *_specs_of(inner), _view_step(move.target, same)]
            yield _drop_idle(move.source, steps)
        return
    if parts is not None:
        at_once = _view_step(move.target, fuse_atoms(move.view))
        with suppress(StepError):
            check_step(at_once.kind, move.source, at_once.result, at_once.mode)
            yield [at_once]
            return
        for inner in _list_middles(parts.middle.source, parts.middle.target, between, options):
            yield from _routes_around(move, parts, inner)
    if parts is None or budget is not None:
        yield [StepSpec("exchange", move.target, StepMode(relay=gathers, view=move.view, gathers=gathers))]
    if budget is not None and move.source.partial_as(move.target):
        for spec in _cut_exchanges(move, move.view, budget):
            yield [spec]


def _pass_on(move: Move, options: PlanOptions, *, relay: bool) -> Iterator[Specs]:
    """One exchange through the view, after which devices gather what the target replicates, or which is a relay.

    A part is filled on the way, or after it, where all of it lies in each tile.
    """
    ends: list[tuple[Layout, View, Specs]] = [(move.target, move.view, [])]
    part = open_target(move.target, move.view) if move.view.into else None
    if part is not None:
        ends.append((part[0].part, part[1], _fill_steps(part[0], move.target)))
    for target, view, fill in ends:
        if not relay:
            if not fill:  # Where the move stages, requests are cut here that stay whole there.
                yield [StepSpec("exchange", target, StepMode(view=view))]
            for far, gathers in crossing.list_landings(target, options.network):
                if gathers and not view.into:
                    yield [StepSpec("exchange", far, StepMode(view=view)), *gathers, *fill]
            continue
        for spec in itertools.chain(*crossing.list_relays(move.source, target, view)):
            yield [spec, *fill]
            if options.budget is not None:
                between = Move(move.source, target, view)
                yield from ([cut, *fill] for cut in _cut_exchanges(between, view, options.budget, relay=True))


def _pass_on_narrow(move: Move, narrow: Move) -> Iterator[Specs]:
    """A relay to tiles of their own in the narrower dtype, out of which part of a target of a wider one is filled.

    What is passed on is read from the tiles that receive it, which therefore are not those of the wider dtype.
    """
    view = move.view
    if not view.into or move.source.partial or dtypes.bits(move.target.dtype) <= dtypes.bits(move.source.dtype):
        return
    number = {at: n for n, at in enumerate(itertools.chain(*view.target))}
    atoms = tuple(Atom(a.name, a.size, a.into, a.into) for a in map(view.atoms.__getitem__, number))
    dims = tuple(tuple(number[at] for at in dim) for dim in view.target)
    within = View(atoms, dims, dims)
    for spec in itertools.chain(*crossing.list_relays(narrow.source, narrow.target, view)):
        fresh = spec._replace(mode=spec.mode._replace(fresh=True))
        yield [fresh, StepSpec("exchange", move.target, StepMode(view=within))]


def _cut_exchanges(move: Move, view: View | None, budget: int, *, relay: bool = False) -> Iterator[StepSpec]:
    """One exchange, of messages that what the budget leaves for buffers has room for, or of the smallest ones."""
    # Between disjoint sets, no device has both tiles.
    held = 0 if move.have in (None, move.target) else move.have.tile_bytes
    tiles = move.source.tile_bytes, move.target.tile_bytes + held
    spare = budget - (max(tiles) if disjoint(move.source.mesh, move.target.mesh) else sum(tiles))
    for room in dict.fromkeys((max(0, spare), 0)):
        mode = cut_exchange(move.source, move.target, room, view, relay=relay, holding=move.holding)
        yield StepSpec("exchange", move.target, mode)


def _cast_on_way(move: Move, budget: int | None) -> Iterator[StepSpec]:
    """The move as one exchange that casts what it packs or unpacks, where no tile may be there in both dtypes.

    That is so under a budget, and where the cast widens and part of a target is filled after it.
    """
    if not move.casts or move.source.partial:
        return
    view = None if move.view.plain else move.view
    if move.view.into and dtypes.bits(move.target.dtype) > dtypes.bits(move.source.dtype):
        yield StepSpec("exchange", move.target, StepMode(view=view))
    if budget is not None:
        yield from _cut_exchanges(move, view, budget)


def _list_middles(source: Layout, target: Layout, between: Between, options: PlanOptions) -> Iterator[Plan]:
    """Plans between two layouts: the best, and under a budget the best within it and that of least memory."""
    yield between(source, target, options._replace(budget=None))
    if options.budget is None:
        return
    with suppress(BudgetError):
        yield between(source, target, options)
    try:
        yield between(source, target, options._replace(budget=0))
    except BudgetError as error:
        yield between(source, target, options._replace(budget=error.smallest))


def _routes_around(move: Move, parts: Stages, plan: Plan) -> Iterator[Specs]:
    """The steps of the middle between those of the two sides, with the transposition at every place."""
    middle, inner = parts.middle, _specs_of(plan)
    before: Specs = []
    after: Specs = []
    if parts.before is not None:
        opened = parts.before
        before = [_view_step(opened.whole, opened.opening), StepSpec("take", opened.part, StepMode(view=opened.taking))]
    if parts.after is not None:
        after = _fill_steps(parts.after, move.target)
    start, end = plan.source, move.target if parts.after is None else parts.after.part
    straight = middle.order == tuple(range(len(middle.order)))
    for at in range(1 if straight else len(inner) + 1):
        turned = [spec._replace(result=middle.turned(spec.result)) for spec in inner[at:]]
        if at == 0:
            steps = [_view_step(middle.turned(start), middle.first(True)), *turned, _view_step(end, middle.last(True))]
        elif at == len(inner):
            steps = [_view_step(start, middle.first(False)), *inner, _view_step(end, middle.last(False))]
        else:
            here = inner[at - 1].result
            atoms = tuple(Atom(f"d{dim}", size) for dim, size in enumerate(here.shape))
            order = View(atoms, tuple((dim,) for dim in range(len(atoms))), tuple((dim,) for dim in middle.order))
            head = [_view_step(start, middle.first(False)), *inner[:at], _view_step(middle.turned(here), order)]
            steps = [*head, *turned, _view_step(end, middle.last(True))]
        yield _drop_idle(move.source, [*before, *steps, *after])


def _fill_steps(opened: Opened, target: Layout) -> Specs:
    """The steps that fill a target with its part."""
    put = StepSpec("put", opened.whole, StepMode(view=invert_view(opened.taking)))
    return [put, _view_step(target, invert_view(opened.opening))]


def _view_step(result: Layout, view: View) -> StepSpec:
    return StepSpec("view", result, StepMode(view=view))


def _drop_idle(source: Layout, specs: Specs) -> Specs:
    """The steps without views that change nothing."""
    needed: Specs = []
    at = source
    for spec in specs:
        idle = spec.result == at and spec.mode.view is not None and spec.mode.view.plain
        needed += [] if idle else [spec]
        at = spec.result
    return needed


def _specs_of(plan: Plan) -> Specs:
    return [step.spec for step in plan.steps]
