"""Layouts as choices, and the plans whose layouts are not such choices."""

from __future__ import annotations

import itertools
import random

import pytest

from reshard.errors import UndecidedError
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.proofs import launches as encoding
from reshard.proofs.launches import PARTIAL, UNUSED, Hold, PlaceSpan, Space, State, space_of
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim
from tests.proofs.launches.small import FOUR, SIX, every_layout


def space(text: str, mesh: Mesh) -> Space:
    return space_of(Plan(*[Layout.parse(text, mesh)] * 2, ()))


def test_the_example_of_the_docstring():
    layouts = [Layout.parse(text, SIX) for text in ("f32[{x}3, {y}2]", "f32[3{x}, 6]")]
    choices = space("f32[6, 6]", SIX)
    assert [f.size for f in choices.factors] == [2, 3]
    assert [choices.state(layout) for layout in layouts] == [(Hold(0, 3), Hold(1, 2)), (Hold(0, 1), UNUSED)]
    assert choices.holds[0] == (Hold(0, 3), Hold(0, 1), Hold(1, 3), Hold(1, 1))


def test_cells_are_cut_wherever_a_digit_may_begin_or_end():
    """Of 12: x (2) may hold places 1, 2, 3 or 6, and y (3) places 1, 2 or 4."""
    choices = space("f32[12]", SIX)
    assert choices.cells == tuple(PlaceSpan(0, *ends) for ends in ((6, 12), (4, 6), (3, 4), (2, 3), (1, 2)))
    assert choices.covered(0, Hold(0, 3)) == [1, 2]
    assert choices.span(1, Hold(0, 2)) == PlaceSpan(0, 2, 6)


@pytest.mark.parametrize(("mesh", "shape"), [(FOUR, (4, 4)), (SIX, (6, 6)), (SIX, (12,))], ids=str)
def test_every_layout_is_one_state(mesh: Mesh, shape: tuple[int, ...]):
    layouts = every_layout(mesh, shape, partial=True)
    summed = max(layouts, key=lambda layout: len(layout.partial))
    choices = space_of(Plan(summed, summed, ()))
    assert len({choices.state(layout) for layout in layouts}) == len(layouts)
    assert [choices.layout(choices.state(layout)) for layout in layouts] == layouts


@pytest.mark.parametrize(("mesh", "shape"), [(SIX, (6, 12)), (Mesh(x=4, y=2), (8, 8)), (Mesh(x=6), (12, 6))], ids=str)
def test_choices_are_layouts(mesh: Mesh, shape: tuple[int, ...]):
    """A layout is read back as the choice that made it, with sub-axes and strided digits too."""
    choose = random.Random(0)
    for _ in range(60):
        choices = space_of(Plan(*[Layout(mesh, tuple(Dim((Digit(n, None),), n) for n in shape), "int8")] * 2, ()))
        state = random_state(choose, choices)
        assert choices.state(choices.layout(state)) == state


def random_state(choose: random.Random, choices: Space) -> State:
    while True:
        state = tuple(choose.choice([UNUSED, *holds]) for holds in choices.holds)
        spans = [choices.span(at, hold) for at, hold in enumerate(state) if hold.dim >= 0]
        if all(a.dim != b.dim or encoding.can_nest(a, b) for a, b in itertools.combinations(spans, 2)):
            return state


def test_partial_factors():
    choices = space("f32[6] + sum{x}", SIX)
    assert choices.summed == {choices.factors[0]}
    assert choices.state(Layout.parse("f32[6] + sum{x}", SIX)) == (PARTIAL, UNUSED)


@pytest.mark.parametrize(
    ("source", "target", "meshes", "why"),
    [
        ("f32[{x}2]", "f32[{y}2]", (Mesh(x=4), Mesh(y=4)), "several meshes"),
        ("f32[{x}3/10]", "f32[10]", (Mesh(x=4),) * 2, "even"),
        ("f32[0]", "f32[0]", (Mesh(x=4),) * 2, "not empty"),
        ("int4[{x}2]", "int4[8]", (Mesh(x=4),) * 2, "below a byte"),
        ("f32[{x:(1)2}3]", "f32[{x:(1)3}2]", (Mesh(x=6),) * 2, "overlap"),
    ],
)
def test_layouts_that_are_no_such_choices_are_refused(source: str, target: str, meshes: tuple[Mesh, Mesh], why: str):
    ends = [Layout.parse(text, mesh) for text, mesh in zip((source, target), meshes, strict=True)]
    plan = Plan(*ends, ()) if source == target else chain(*ends, [StepSpec("exchange", ends[1])])
    with pytest.raises(UndecidedError, match=why):
        space_of(plan)
