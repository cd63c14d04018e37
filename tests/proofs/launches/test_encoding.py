"""The conditions that z3 gets are the typing rules, on all pairs of small layouts."""

from __future__ import annotations

import itertools

import pytest

from reshard.errors import StepError
from reshard.plans.plan import Plan
from reshard.plans.rules.collectives import check_step
from reshard.proofs import launches as encoding
from reshard.proofs.launches import Hold, PlaceSpan, space_of
from reshard.types import Layout, Mesh
from tests.proofs.launches.small import FOUR, SIX, every_layout

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")


def figures(kind: str, one: Layout, other: Layout) -> tuple[int, int, int] | None:
    try:
        return tuple(check_step(kind, one, other))
    except StepError:
        return None


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("mesh", "shape", "partial"),
    [
        pytest.param(FOUR, (4, 4), False, marks=pytest.mark.slow),
        pytest.param(SIX, (6, 6), False, marks=pytest.mark.slow),
        (SIX, (12,), False),
        (FOUR, (4,), True),
        (SIX, (6,), True),
    ],
    ids=str,
)
def test_the_conditions_are_the_typing_rules(mesh: Mesh, shape: tuple[int, ...], partial: bool):
    """For all pairs of layouts and all kinds: typed if and only if the rule says so, at the rule's price."""
    layouts = every_layout(mesh, shape, partial)
    summed = max(layouts, key=lambda layout: len(layout.partial))
    space, solver = space_of(Plan(summed, summed, ())), z3.Solver()
    ends = [encoding.UnknownLayout(space, name, solver.add) for name in "ab"]
    between = encoding.Between(*ends, "t")
    rules = {kind: rule(between) for kind, rule in encoding.RULES.items() if kind in encoding.step_kinds(space)}
    for one, other in itertools.product(layouts, layouts):
        solver.push()
        solver.add(*ends[0].equals(space.state(one)), *ends[1].equals(space.state(other)))
        free = solver.check(encoding.slice_condition(between)) == z3.sat
        assert free == (figures("slice", one, other) is not None)
        prices = {kind: price_of(solver, *rule) for kind, rule in rules.items()}
        boxes = prices.pop("boxes", None)
        real = {kind: figures(kind, one, other) for kind in prices}
        if boxes is not None:
            assert prices.pop("exchange") is None
            assert all(a <= b for a, b in zip(boxes, real.pop("exchange"), strict=True))
        assert prices == real, f"{one} -> {other}"
        solver.pop()


def price_of(solver, typed, price) -> tuple[int, int, int] | None:
    solver.push()
    solver.add(typed)
    fits = solver.check() == z3.sat
    model = solver.model() if fits else None
    solver.pop()
    return tuple(model.eval(z3.IntVal(0) + p, model_completion=True).as_long() for p in price) if fits else None


@pytest.mark.parametrize(
    ("one", "other", "nests"),
    [
        (PlaceSpan(0, 1, 2), PlaceSpan(0, 2, 4), True),
        (PlaceSpan(0, 2, 4), PlaceSpan(0, 6, 12), False),  # 6 is not a multiple of 4
        (PlaceSpan(0, 1, 2), PlaceSpan(0, 3, 6), False),
        (PlaceSpan(0, 2, 4), PlaceSpan(1, 3, 6), True),
        (PlaceSpan(0, 1, 3), PlaceSpan(0, 6, 12), True),
    ],
)
def test_digits_nest_if_the_higher_starts_at_a_multiple_of_the_lower_ones_end(
    one: PlaceSpan, other: PlaceSpan, nests: bool
):
    assert encoding.can_nest(one, other) == encoding.can_nest(other, one) == nests


def test_kinds_that_cannot_occur_are_left_out():
    """Without partial factors there are no reductions, and without two primes in one dim no boxes."""
    four = space_of(Plan(*[Layout.parse("int8[{x}{y}]", FOUR)] * 2, ()))
    six = space_of(Plan(*[Layout.parse("int8[6] + sum{x}", SIX)] * 2, ()))
    assert encoding.step_kinds(four) == ["all_gather", "all_to_all", "permute", "exchange"]
    assert encoding.step_kinds(six) == [*encoding.step_kinds(four), "boxes", "reduce_scatter", "all_reduce"]


def test_unknown_layouts_are_exactly_the_layouts():
    """As many solutions as there are layouts, each with the tile of its layout."""
    layouts = every_layout(SIX, (12,))
    space, solver = space_of(Plan(layouts[0], layouts[0], ())), z3.Solver()
    unknown = encoding.UnknownLayout(space, "s", solver.add)
    states = {}
    while solver.check() == z3.sat:
        state = unknown.read(solver.model())
        states[state] = solver.model().eval(unknown.tile).as_long()
        solver.add(z3.Not(z3.And(*unknown.equals(state))))
    assert states == {space.state(layout): layout.tile_shape[0] for layout in layouts}
    assert encoding.order_holds(space)[0] == Hold(0, 6)
