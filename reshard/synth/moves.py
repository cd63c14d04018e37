"""Plans of moves with a view, a part or a cast: what leads to an ordinary move between two layouts, and on from it.

    f32[3{x}2, 5] -> bf16[{y}4, 5], view "(three h) d -> h d", take three=0, cast, on <x=4, y=2>

    cast             bf16[3{x}2, 5]        first, since fewer bytes move
    view, take       bf16[1, {x}2, 5]      the dim is opened and its part taken in each tile
    view             bf16[{x}2, 5]
    ...              bf16[{y}4, 5]         planned as any move between two layouts

Steps before and after send nothing. Where tiles have to be transposed, this is tried at every place between the steps.
Where no common units exist, one `exchange` through the view does it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from reshard.errors import BudgetError, PlanError, StepError
from reshard.geometry.view_layouts import Stages, fuse_atoms, invert_view, view_stages
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import StepMode
from reshard.synth.options import PlanOptions
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import Atom, View

Between = Callable[[Layout, Layout, "int | None"], Plan]
"""The planner of a move between two layouts of one array, within a budget."""

Specs = list[StepSpec]


def plan_candidates(move: Move, between: Between, options: PlanOptions) -> list[Plan]:
    """All candidates, within the budget if there is one.

    Raises `PlanError` for a move that no steps make, and `BudgetError` with the least peak among the candidates.
    """
    budget, made = options.budget, list[Plan]()
    for specs in _routes_with_cast(move, between, budget):
        with suppress(StepError):  # A transposition does not fit every place.
            made.append(chain(move.source, move.target, specs, options.donate, None, move.view))
    if not made:
        raise PlanError(
            f"{move}: a sum is finished by collectives, for which digits must end where the atoms of the view end; "
            f"finish the sum in a move of its own first"
        )
    fitting = made if budget is None else [plan for plan in made if plan.peak_bytes <= budget]
    if fitting:
        return fitting
    smallest = min(plan.peak_bytes for plan in made)
    raise BudgetError(
        f"budget {budget} B is too small for {move} (global {move.source.shape} -> {move.target.shape}, tiles of "
        f"{move.source.tile_bytes} and {move.target.tile_bytes} B); the smallest that works is {smallest} B",
        smallest,
    )


def _routes_with_cast(move: Move, between: Between, budget: int | None) -> Iterator[Specs]:
    """Every route, with its cast: before all steps if that makes fewer bytes, else as late as necessary."""
    for specs in _routes_without_cast(_in_dtype(move), between, budget):
        yield _with_cast(move, specs) if move.casts else specs


def _in_dtype(move: Move) -> Move:
    """The move without its cast, in the dtype that travels: the narrower one, or the source's while it is a sum."""
    if not move.casts:
        return move
    if _casts_first(move):
        return Move(replace(move.source, dtype=move.target.dtype), move.target, move.view)
    return Move(move.source, replace(move.target, dtype=move.source.dtype), move.view)


def _casts_first(move: Move) -> bool:
    return not move.source.partial and dtypes.bits(move.target.dtype) < dtypes.bits(move.source.dtype)


def _with_cast(move: Move, specs: Specs) -> Specs:
    """The steps with the cast: first, or after the last reduction if it narrows, or last; before a part is filled.

    What the target's other parts hold is neither cast nor scaled.
    """
    if _casts_first(move):
        return [StepSpec("cast", replace(move.source, dtype=move.target.dtype)), *specs]
    narrows = dtypes.bits(move.target.dtype) < dtypes.bits(move.source.dtype)
    sums = [n for n, spec in enumerate([StepSpec("", move.source), *specs]) if spec.result.partial]
    last = next((n for n, spec in enumerate(specs) if spec.mode.view is not None and spec.mode.view.into), len(specs))
    at = sums[-1] + 1 if narrows and sums else last
    end = specs[at - 1].result if at else move.source
    cast = StepSpec("cast", replace(end, dtype=move.target.dtype))
    rest = [spec._replace(result=replace(spec.result, dtype=move.target.dtype)) for spec in specs[at:]]
    return [*specs[:at], cast, *rest]


def _routes_without_cast(move: Move, between: Between, budget: int | None) -> Iterator[Specs]:
    """The routes of a move that keeps its dtype."""
    if move.plain:
        for inner in _plan_between(move.source, move.target, between, budget):
            same = View.identity(move.source.shape)
            steps = [_view_step(inner.source, same), *_specs_of(inner), _view_step(move.target, same)]
            yield _drop_idle(move.source, steps)
        return
    parts = view_stages(move.source, move.target, move.view)
    at_once = StepSpec("view", move.target, StepMode(view=fuse_atoms(move.view)))
    if parts is not None and _is_derivable(move.source, at_once):
        yield [at_once]
        return
    if parts is not None:
        for inner in _plan_between(parts.middle.source, parts.middle.target, between, budget):
            yield from _routes_around(move, parts, inner)
    if parts is None or budget is not None:
        yield [StepSpec("exchange", move.target, StepMode(view=move.view))]
    if budget is not None and move.source.partial_as(move.target):
        # The elements of the largest message that fits twice beside both tiles.
        spare = budget - move.source.tile_bytes - move.target.tile_bytes
        for chunk in dict.fromkeys((max(1, spare // max(1, 2 * move.source.nbytes(1))), 1)):
            yield [StepSpec("exchange", move.target, StepMode(chunk, view=move.view))]


def _plan_between(source: Layout, target: Layout, between: Between, budget: int | None) -> Iterator[Plan]:
    """Plans between two layouts: the best, and under a budget the best within it and that of least memory.

    They may spell the two on another mesh.
    """
    yield between(source, target, None)
    if budget is None:
        return
    with suppress(BudgetError):
        yield between(source, target, budget)
    try:
        yield between(source, target, 0)
    except BudgetError as error:
        yield between(source, target, error.smallest)


def _routes_around(move: Move, parts: Stages, plan: Plan) -> Iterator[Specs]:
    """The steps of the middle between those of the two sides, with the transposition at every place."""
    middle, inner = parts.middle, _specs_of(plan)
    before: Specs = []
    after: Specs = []
    if parts.before is not None:
        opened = parts.before
        before = [_view_step(opened.whole, opened.opening), StepSpec("take", opened.part, StepMode(view=opened.taking))]
    if parts.after is not None:
        opened = parts.after
        put = StepSpec("put", opened.whole, StepMode(view=invert_view(opened.taking)))
        after = [put, _view_step(move.target, invert_view(opened.opening))]
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
            transposition = _view_step(middle.turned(here), _transposing_view(here, middle.order))
            head = [_view_step(start, middle.first(False)), *inner[:at], transposition]
            steps = [*head, *turned, _view_step(end, middle.last(True))]
        yield _drop_idle(move.source, [*before, *steps, *after])


def _view_step(result: Layout, view: View) -> StepSpec:
    return StepSpec("view", result, StepMode(view=view))


def _transposing_view(layout: Layout, order: Sequence[int]) -> View:
    atoms = tuple(Atom(f"d{at}", size) for at, size in enumerate(layout.shape))
    return View(atoms, tuple((at,) for at in range(len(atoms))), tuple((at,) for at in order))


def _drop_idle(source: Layout, specs: Specs) -> Specs:
    """The steps without views that change nothing."""
    needed: Specs = []
    at = source
    for spec in specs:
        idle = spec.result == at and spec.mode.view is not None and spec.mode.view.plain
        needed += [] if idle else [spec]
        at = spec.result
    return needed


def _is_derivable(operand: Layout, spec: StepSpec) -> bool:
    with suppress(StepError):
        check_step(spec.kind, operand, spec.result, spec.mode)
        return True
    return False


def _specs_of(plan: Plan) -> Specs:
    return [StepSpec(step.kind, step.result, step.mode) for step in plan.steps]
