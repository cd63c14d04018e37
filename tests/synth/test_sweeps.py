"""Tables of plans, beside the plans themselves; the cheapest way through alternatives, beside all other ways."""

from __future__ import annotations

import csv
import io
from itertools import pairwise, product
from pathlib import Path

import pytest

import reshard as rs
from reshard.errors import BudgetError, NotationError, PlanError, ReshardError

PAIRS = [("f32[{x}4, 8]", "P(None, 'x')"), ("f32[{x}4, 8]", "P()"), ("f32[{y}4, 8]", "f32[8, 8]")]
MESHES = [rs.Mesh(x=4), {"x": 2, "y": 2}]
NETWORKS = ["h100", None]


def test_each_row_is_of_a_plan_or_of_an_error():
    table = rs.sweep(PAIRS, MESHES, NETWORKS, ["1KiB", None, 100])
    assert len(table) == 3 * 2 * 2 * 3
    wanted = product(PAIRS, map(rs.Mesh, MESHES), NETWORKS, [1024, None, 100])
    for row, ((source, target), mesh, network, budget) in zip(table, wanted, strict=True):
        assert (row["mesh"], row["network"], row["budget"]) == (str(mesh), network or "none", budget)
        try:
            plan = rs.plan(source, target, budget, network, mesh=mesh)
        except ReshardError as error:
            assert row["error"] == str(error) and row["steps"] is row["launches"] is row["seconds"] is None
            continue
        assert row["error"] is None and (row["source"], row["target"]) == (str(plan.source), str(plan.target))
        figures = (", ".join(step.kind for step in plan.steps), plan.launches, plan.received_bytes, plan.peak_bytes)
        assert (row["steps"], row["launches"], row["received_bytes"], row["peak_bytes"]) == figures
        assert (row["bound_bytes"], row["seconds"]) == (plan.lower_bound_bytes, plan.seconds)
    # An axis that a mesh lacks, and a budget below the source.
    assert sum(row["error"] is not None for row in table) == 2 * 3 + 5 * 2


def test_a_table_is_text_csv_html_and_a_data_frame(tmp_path: Path):
    table = rs.sweep(PAIRS, MESHES[1:], NETWORKS)
    text = table.to_csv(tmp_path / "plans.csv")
    assert (tmp_path / "plans.csv").read_text() == text
    read = list(csv.DictReader(io.StringIO(text)))
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in table] == read
    lines = str(table).splitlines()
    assert lines[0].split() == [
        "source",
        "target",
        "mesh",
        "network",
        "steps",
        "launches",
        "received",
        "bound",
        "peak",
        "seconds",
    ]
    assert len(lines) == 7 and "all_to_all" in lines[1] and lines[1].endswith("600 ns")
    html = table._repr_html_()
    assert html.count("<tr>") == 7 and "&lt;x=2, y=2&gt;" in html
    assert repr(table) == "<SweepTable of 6 rows>" and len(table[1:3]) == 2 and table[-1] == table[5]
    assert str(rs.sweep([])) == "no rows" and rs.sweep([]).to_csv().startswith("source,target,mesh")
    pandas = pytest.importorskip("pandas")
    assert isinstance(table.to_pandas(), pandas.DataFrame) and list(table.to_pandas()["launches"]) == [
        row["launches"] for row in table
    ]


def test_layouts_with_meshes_of_their_own_need_none_and_specs_a_shape():
    ends = tuple(rs.Layout.parse(text, "x=4") for text in ("f32[{x}4]", "f32[16]"))
    assert [row["received_bytes"] for row in rs.sweep([ends])] == [48]
    table = rs.sweep([("P('x')", "P()"), (["x"], [])], "x=4", shape=(16,), dtype="f32")
    assert [row["received_bytes"] for row in table] == [48, 48]
    assert rs.sweep([("rows", "P()")], "x=4")[0]["error"].startswith("cannot tell the notation of 'rows'")


@pytest.mark.parametrize("wrong", [["f32[4]"], [("f32[4]",)], [7]])
def test_what_is_no_pair_is_refused(wrong: list[object]):
    with pytest.raises(PlanError, match=r"is not a pair; give a list of \(source, target\) pairs"):
        rs.sweep(wrong, "x=4")  # type: ignore[arg-type]
    with pytest.raises(ReshardError, match="cannot write the table to"):
        rs.sweep([]).to_csv("/no/such/folder/plans.csv")


STAGES = [
    "f32[{x}4, {y}8, 16]",
    ["f32[16, {x}{y}2, 16]", "f32[16, {y}8, {x}4]", "f32[16, 16, {x}{y}2]"],
    ["f32[{x}4, 16, {y}8]", "f32[{x}{y}2, 16, 16]", "f32[{y}8, 16, {x}4]"],
    ["f32[{x}4, {y}8, 16]", "f32[{x}{y}2, 16, 16]"],
]


@pytest.mark.parametrize("network", [None, "h100", "tpu-v5p"])
@pytest.mark.parametrize("budget", [None, "16KiB"])
def test_no_other_way_is_cheaper(network: str | None, budget: str | None):
    mesh = rs.Mesh(x=4, y=2)
    way = rs.path(STAGES, budget, network, mesh=mesh)
    ways = product(*([stage] if isinstance(stage, str) else stage for stage in STAGES))
    costs = []
    for texts in ways:
        plans = [rs.plan(*pair, budget, network, mesh=mesh) for pair in pairwise(texts)]
        costs.append((sum(plan.seconds or 0.0 for plan in plans), sum(plan.received_bytes for plan in plans)))
    assert (way.seconds or 0.0, way.received_bytes) == min(costs) < max(costs)
    assert [(plan.source, plan.target) for plan in way.plans] == list(pairwise(way.layouts))
    for layout, stage in zip(way.layouts, STAGES, strict=True):
        assert str(layout) in ([stage] if isinstance(stage, str) else stage)


def test_alternatives_that_cannot_be_reached_are_left_out():
    mesh = rs.Mesh(x=4)
    way = rs.path(["f32[{x}4, 8]", ["f32[16, 8]", "f32[16, {x}2]"]], budget=500, mesh=mesh)
    assert str(way.layouts[1]) == "f32[16, {x}2]" and way.launches == 1 and way.seconds is None
    with pytest.raises(BudgetError):
        rs.path(["f32[{x}4, 8]", ["f32[16, 8]"]], budget=500, mesh=mesh)
    alone = rs.path([rs.Layout.parse("f32[{x}4]", mesh)])
    assert (len(alone.layouts), alone.plans, alone.received_bytes) == (1, (), 0)
    for wrong in ([], ["f32[4]", []]):
        with pytest.raises(PlanError, match="give a list of layouts"):
            rs.path(wrong, mesh=mesh)
    with pytest.raises(NotationError, match="give the mesh"):
        rs.path(["f32[4]", "f32[4]"])
