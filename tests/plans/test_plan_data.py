"""The lines of plans in JSON: views come back, figures that do not fit are refused."""

import json

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.plans.plan_data import check_format, compare_figures, read_view, view_data
from reshard.types.json_fields import Fields
from reshard.types.view import View

MESH = rs.Mesh(x=2)
PLAN = rs.plan(rs.Move(rs.Layout.parse("f32[{x}2, 6]", MESH), rs.Layout.parse("f32[6, {x}2]", MESH), view="a b -> b a"))


def test_a_view_comes_back():
    for view in (View.identity((2,)), None):
        assert read_view(Fields.of(view_data(view), "a plan")) == view
    assert rs.Plan.from_json(PLAN.to_json()) == PLAN


def test_a_plan_without_a_view_writes_none():
    layout = rs.Layout.parse("f32[{x}2]", MESH)
    assert "view" not in json.loads(rs.plan(layout, layout).to_json())


@pytest.mark.parametrize(
    "view",
    [None, {"atoms": [["a", 4, None, None], ["b", 6, None, None]], "source": [[0], [1]], "target": [[0], [1]]}, {}, 3],
)
def test_another_view_is_refused(view):
    data = json.loads(PLAN.to_json())
    data["view"] = view
    with pytest.raises(PlanError):
        rs.Plan.from_json(json.dumps(data))
    data = json.loads(PLAN.to_json())
    data["steps"][0]["view"] = view
    with pytest.raises(rs.errors.ReshardError):
        rs.Plan.from_json(json.dumps(data))


def test_figures_and_formats():
    with pytest.raises(PlanError, match="launches"):
        compare_figures({"launches": 2}, {"launches": 1}, "the plan")
    with pytest.raises(PlanError, match="format 2"):
        check_format(2)
