"""Plans of many arrays: what shares launches, what lives on the devices meanwhile, JSON that is checked again."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.program_traffic import program_traffic
from reshard.plans.plan import Batch, buffer_bytes, list_lanes
from reshard.plans.plan_data import flatten_tree
from reshard.plans.rules.step_mode import StepMode
from reshard.plans.step import DeviceKinds, Footprint, find_peaks
from tests.trees import live_peak, llama, random_moves

MESH = rs.Mesh(x=4, y=2)


def plan(source: str, target: str, mesh: rs.Mesh = MESH, **options: object) -> rs.Plan:
    return rs.plan(rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh), **options)


ROWS = plan("f32[{x}4, 16]", "f32[16, {x}4]")

NOT_ALIKE = {
    "other groups": plan("f32[{y}8, 16]", "f32[16, {y}8]"),
    "another order of members": plan("f32[{y}{x}2, 16]", "f32[16, {y}{x}2]"),
    "another dtype": plan("s32[{x}4, 16]", "s32[16, {x}4]"),
    "another kind": plan("f32[{x}4]", "f32[16]"),
    "more steps": plan("f32[{x}4, 16] + sum{y}", "f32[16, {x}4]"),
    "donated": plan("f32[{x}4, 16]", "f32[16, {x}4]", donate=True),
    "other devices": plan("f32[{x}4, 16]", "f32[16, {x}4]", rs.Mesh({"x": 4, "y": 2}, device_ids=range(8, 16))),
    "a devices' order": plan("f32[{x}4, 16]", "f32[16, {x}4]", rs.Mesh({"x": 4, "y": 2}, device_ids=[*range(8)][::-1])),
}


@pytest.mark.parametrize("other", NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_plans_that_cannot_share_launches_are_refused(other: rs.Plan):
    with pytest.raises(PlanError, match="cannot share launches"):
        Batch(("a", "b"), (ROWS, other))


def test_shapes_and_names_of_axes_do_not_matter():
    renamed = rs.Mesh(p=4, q=2)
    other = plan("f32[8, {p}2, 4]", "f32[8, 8, {p}1]", renamed)
    batch = Batch(("a", "b"), (ROWS, other))
    assert batch.launches == 1
    assert batch.received_bytes == ROWS.received_bytes + other.received_bytes


def test_what_is_cut_shares_no_launch():
    small = plan("f32[{x}4, 16]", "f32[16, {x}4]", budget=512 + 32)
    assert any(step.mode != StepMode() for step in small.steps)
    assert list_lanes(small) is None
    assert Batch(("a",), (small,)).launches == small.launches
    with pytest.raises(PlanError, match="shares its launches with no other"):
        Batch(("a", "b"), (small, small))


def test_buffers_hold_the_blocks_of_all_arrays():
    gather = plan("f32[{x}4, 8]", "f32[16, 8]")
    assert Batch(("a",), (gather,)).scratch_bytes == (0,)
    assert Batch(("a", "b"), (gather, gather)).scratch_bytes == (2 * buffer_bytes(gather),)
    assert buffer_bytes(gather) == gather.source.tile_bytes + gather.target.tile_bytes


@pytest.mark.parametrize(
    ("names", "plans"),
    [
        ((), ()),
        (("a",), ()),
        (("a",), (None,)),
        (("a",), [ROWS]),
        (["a"], (ROWS,)),
        ((1,), (ROWS,)),
        (("a", "b"), (ROWS,)),
    ],
)
def test_what_is_not_a_batch_is_refused(names: object, plans: object):
    with pytest.raises(PlanError):
        Batch(names, plans)


# ---- `TreePlan`: the constructor's checks, JSON that is checked again, and what is printed ----

TREE = rs.plan_tree(llama(MESH), network="tpu-v5p")


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


def test_the_second_turn_of_a_relay_is_sent_by_devices_of_the_result():
    """Three arrays are relayed from two pairs of devices to all six; who passes on what came sends, too."""
    everywhere = rs.Mesh(t=6)
    pairs = [rs.Mesh({"s": 2}, device_ids=ids) for ids in ([2, 0], [2, 0], [4, 3])]
    ends = [(rs.Layout.parse("f64[{s}4]", pair), rs.Layout.parse("f64[8]", everywhere)) for pair in pairs]
    tree = rs.plan_tree({name: move for name, move in zip("abc", ends, strict=True)})
    assert all(step.mode.relay for plan in tree.plans.values() for step in plan.steps)
    sent = Counter[int]()
    for plan in tree.plans.values():
        for (sender, _), elements in program_traffic(lower_plan(plan)).elements.items():
            sent[sender] += elements * 8
    assert max(sent.values()) <= tree.sent_bytes <= sum(plan.sent_bytes for plan in tree.plans.values())


def test_one_array_has_the_figures_of_its_plan():
    plan = rs.plan(*(rs.Layout.parse(text, MESH) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]")))
    tree = rs.TreePlan(("w",), (Batch(("w",), (plan,)),))
    for figure in ("received_bytes", "lower_bound_bytes", "launches", "peak_bytes", "seconds"):
        assert getattr(tree, figure) == getattr(plan, figure)


@pytest.mark.parametrize("times", [0.1, 1.5, None], ids=["less than one plan", "more than all", "none"])
def test_seconds_of_a_batch_that_its_plans_cannot_make_are_refused(times: float | None):
    ends = [rs.Layout.parse(text, MESH) for text in ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]")]
    tree = rs.plan_tree({"a": ends, "b": ends, "c": ends}, network="h100")
    data = json.loads(tree.to_json())
    (batch,) = data["batches"]
    assert rs.TreePlan.from_json(tree.to_json()) == tree and len(batch["names"]) == 3
    (plan,) = data["plans"]
    batch["seconds"] = None if times is None else times * (plan["seconds"] if times < 1 else 3 * plan["seconds"])
    data["seconds"] = batch["seconds"]
    with pytest.raises(PlanError, match="of the batch of"):
        rs.TreePlan.from_json(json.dumps(data))


def test_a_tree_prints_a_line_for_each_batch():
    lines = str(TREE).splitlines()
    assert lines[0] == "20 arrays in 2 batches"
    assert len(lines) == 1 + 1 + len(TREE.batches) + 2
    assert "largest load of a device: memory" in lines[-1]
    assert "20 arrays" in TREE._repr_html_()


# ---- Memory of trees: kinds of devices, and the fold over batches ----

TREE_MEMORY_MESH = rs.Mesh(x=4)


def test_no_device_holds_more_than_a_tree_says():
    """Of arrays on other devices, to others, and of targets that are filled in part, which are there from the start."""
    for seed in range(250):
        choose = random.Random(seed)
        tree = rs.plan_tree(random_moves(choose), donate=choose.random() < 0.5)
        assert live_peak(tree) <= tree.peak_bytes, seed
        assert tree.lower_bound_bytes <= tree.received_bytes, seed


def test_devices_count_what_they_hold_themselves():
    other = rs.Mesh({"x": 4}, device_ids=[4, 5, 6, 7])
    plans = [rs.plan(rs.Layout.parse("f32[{x}4]", m), rs.Layout.parse("f32[16]", m)) for m in (TREE_MEMORY_MESH, other)]
    kinds = DeviceKinds([TREE_MEMORY_MESH, other])
    first, second = (Batch((str(n),), (plan,)).footprint(kinds) for n, plan in enumerate(plans))
    assert (first.before, second.before) == ((16, 0), (0, 16))
    assert max(find_peaks([first, second])) == plans[0].peak_bytes


def test_meshes_that_no_memory_lists_have_kinds_too():
    huge, other = rs.Mesh(x=1 << 50), rs.Mesh({"x": 3}, device_ids=[0, 7, 1 << 60])
    kinds = DeviceKinds([huge, other, rs.Mesh(x=1 << 51), rs.Mesh(x=1)])
    assert [kinds.of(mesh) for mesh in (huge, other)] == [(1, 1, 1, 0, 0), (1, 0, 1, 0, 1)]


def test_the_last_batch_sees_all_targets():
    steps = [Footprint((1,), (12,), (3,)), Footprint((2,), (9,), (8,))]
    assert find_peaks(steps) == (14,)
    assert find_peaks(steps[::-1]) == (20,)
    assert find_peaks(steps, (103,)) == (114,)


def test_what_stays_where_it_is_counts_once():
    same = rs.Layout.parse("f32[{x}4]", TREE_MEMORY_MESH)
    kinds = DeviceKinds([TREE_MEMORY_MESH])
    assert Batch(("a",), (rs.plan(same, same),)).footprint(kinds) == Footprint((16,), (16,), (16,))


# ---- Names of arrays in nested trees ----

A = rs.Layout.parse("f32[8]", rs.Mesh(x=2))


def test_a_pair_of_layouts_is_a_leaf_and_other_tuples_are_not():
    assert flatten_tree(((A, A), [A, A])) == {"0": (A, A), "1": [A, A]}
    assert flatten_tree({"a": ((A, A), (A, A))}) == {"a.0": (A, A), "a.1": (A, A)}


def test_what_is_no_container_is_a_leaf():
    assert flatten_tree({"a": "move"}) == {"a": "move"}


@pytest.mark.parametrize("key", [None, True, 1.5, ("a",)])
def test_other_keys_are_refused(key: object):
    with pytest.raises(PlanError, match="the key"):
        flatten_tree({"top": {key: (A, A)}})
