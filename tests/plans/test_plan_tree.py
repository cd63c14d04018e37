"""`TreePlan`: the constructor's checks, JSON that is checked again, and what is printed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.plans.plan import Batch
from tests.trees import llama

MESH = rs.Mesh(x=4, y=2)
TREE = rs.plan_tree(llama(MESH), network="tpu-v5p")


def test_json_is_read_back():
    assert rs.TreePlan.from_json(TREE.to_json()) == TREE
    assert rs.TreePlan.from_json(TREE.to_json(indent=1)) == TREE
    assert len(json.loads(TREE.to_json())["plans"]) < len(TREE.names)


def test_json_names_its_format():
    data = TREE.to_dict()
    assert data["format"] == 1
    with pytest.raises(PlanError, match="format 2"):
        rs.TreePlan.from_json(json.dumps(data | {"format": 2}))


@pytest.mark.parametrize("figure", ["received_bytes", "sent_bytes", "lower_bound_bytes", "launches", "peak_bytes"])
def test_a_figure_that_the_batches_do_not_make_is_refused(figure: str):
    data = TREE.to_dict()
    with pytest.raises(PlanError, match=figure):
        rs.TreePlan.from_json(json.dumps(data | {figure: data[figure] + 1}))


def _without(data: dict, key: str) -> dict:
    return {name: value for name, value in data.items() if name != key}


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: _without(d, "plans"),
        lambda d: _without(d, "format"),
        lambda d: d | {"names": d["names"][1:]},
        lambda d: d | {"names": [*d["names"], d["names"][0]]},
        lambda d: d | {"names": 7},
        lambda d: d | {"batches": d["batches"][1:]},
        lambda d: d | {"batches": [d["batches"][0] | {"seconds": -1}, *d["batches"][1:]]},
        lambda d: d | {"batches": [d["batches"][0] | {"plans": [99]}]},
        lambda d: d | {"batches": [{"names": d["names"], "plans": [0] * len(d["names"])}]},
        lambda d: d | {"plans": [{}]},
        lambda d: [d],
        lambda d: None,
    ],
)
def test_damaged_json_is_refused(damage):
    with pytest.raises(PlanError):
        rs.TreePlan.from_json(json.dumps(damage(TREE.to_dict())))


@pytest.mark.parametrize("text", ["", "{", "[" * 100000, None, 7])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(PlanError):
        rs.TreePlan.from_json(text)


@pytest.mark.parametrize(
    ("names", "batches"),
    [
        (TREE.names[1:], TREE.batches),
        ((*TREE.names, "more"), TREE.batches),
        (TREE.names, TREE.batches[1:]),
        (TREE.names, (*TREE.batches, TREE.batches[0])),
        (TREE.names, list(TREE.batches)),
        (list(TREE.names), TREE.batches),
        (TREE.names, (None,)),
    ],
)
def test_an_unchecked_tree_cannot_exist(names, batches):
    with pytest.raises(PlanError):
        rs.TreePlan(names, batches)


def test_received_bytes_are_those_of_one_device():
    """Each array has another device that receives the most: the sum of the maxima is what none receives."""
    meshes = (rs.Mesh({"x": 2, "y": 2}, device_ids=ids) for ids in ([0, 1, 2, 3], [1, 0, 3, 2]))
    ends = [tuple(rs.Layout.parse(t, mesh) for t in ("f32[{x}{y}2]", "f32[{y}{x}2]")) for mesh in meshes]
    tree = rs.plan_tree({"a": ends[0], "b": ends[1]})
    assert tree.received_bytes == tree.sent_bytes == tree.lower_bound_bytes == 8
    assert sum(plan.received_bytes for plan in tree.plans.values()) == 16


def test_the_order_of_batches_does_not_change_what_is_received():
    turned = replace(TREE, batches=TREE.batches[::-1])
    assert (turned.received_bytes, turned.launches) == (TREE.received_bytes, TREE.launches)
    assert turned.plans == TREE.plans


def test_one_array_has_the_figures_of_its_plan():
    plan = rs.plan(*(rs.Layout.parse(text, MESH) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]")))
    tree = rs.TreePlan(("w",), (Batch(("w",), (plan,)),))
    for figure in ("received_bytes", "lower_bound_bytes", "launches", "peak_bytes", "seconds"):
        assert getattr(tree, figure) == getattr(plan, figure)


def test_a_tree_prints_a_line_for_each_batch():
    lines = str(TREE).splitlines()
    assert lines[0] == "20 arrays in 2 batches"
    assert len(lines) == 1 + 1 + len(TREE.batches) + 2
    assert "largest load of a device: memory" in lines[-1]
    assert "20 arrays" in TREE._repr_html_()
