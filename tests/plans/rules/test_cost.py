"""What the rules share: the error of a refused step, and what several of them require."""

from __future__ import annotations

import pytest

from reshard.errors import StepError
from reshard.plans.rules.step_mode import (
    FREE,
    PLAIN,
    Cost,
    StepMode,
    refuse_step,
    require_refinement,
    require_same_partial,
)
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh


def pair(source: str, target: str, mesh: Mesh, other: Mesh | None = None) -> tuple[Layout, Layout]:
    return Layout.parse(source, mesh), Layout.parse(target, other or mesh)


def test_a_refusal_names_the_step_and_its_shapes():
    error = refuse_step("permute", *pair("f32[{x}3/10, 7]", "f32[10, 7]", Mesh(x=4)), "because")
    assert isinstance(error, StepError)
    assert str(error) == (
        "permute: f32[{x}3/10, 7] -> f32[10, 7] (global (10, 7), tile (3, 7) -> (10, 7), mesh <x=4>): because"
    )


def test_a_refusal_names_both_meshes_if_they_differ():
    error = refuse_step("permute", *pair("f32[{x}3]", "f32[{a}{b}2]", Mesh(x=4), Mesh(a=3, b=2)), "because")
    assert "mesh <x=4> to <a=3, b=2>): because" in str(error)


def test_the_refinement_that_a_rule_requires():
    assert require_refinement("slice", *pair("f32[12]", "f32[{x}4]", Mesh(x=3))).common == 4
    with pytest.raises(StepError, match=r"slice: .*the two have no common refinement; use an exchange"):
        require_refinement("slice", *pair("f32[{x}3]", "f32[{y}2]", Mesh(x=2, y=3)))


def test_a_step_that_reduces_nothing_keeps_what_is_partial():
    mesh = Mesh(x=3, y=2)
    require_same_partial("slice", *pair("f32[6] + sum{x}", "f32[{y}3] + sum{x}", mesh))
    for target in ("f32[6]", "f32[6] + sum{y}", "f32[6] + sum{x}{y}"):
        with pytest.raises(StepError, match="this step reduces nothing; partial sub-axes must stay"):
            require_same_partial("slice", *pair("f32[6] + sum{x}", target, mesh))


def test_the_plain_mode_and_the_free_cost():
    assert StepMode(chunk=None, in_place=False, parts=1) == PLAIN
    assert Cost(received=0, launches=0, scratch=0) == FREE
