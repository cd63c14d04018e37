"""Redistributions that people reported in public threads: each planned at full size, and run scaled down.

`data/user_cases.json` gives for each its mesh, shape, dtype and axes per dim before and after, and where
the report has them, the HLO shardings.
"""

from __future__ import annotations

import json
from math import lcm, prod
from pathlib import Path
from typing import Any

import pytest

import reshard as rs
from reshard.types import Layout, Mesh
from tests.oracle import check

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "user_cases.json").read_text("utf-8"))
IDS = [case["id"] for case in CASES]


def ends(case: dict[str, Any], shape: tuple[int, ...] | None = None) -> tuple[Layout, Layout]:
    mesh = Mesh(case["mesh"])
    source, target = (
        Layout.from_spec(mesh, shape or case["shape"], case["dtype"], case[side]) for side in ("src", "dst")
    )
    return source, target


def small(case: dict[str, Any]) -> tuple[int, ...]:
    """The shape with each dim cut to at most two elements a piece and the same remainder."""
    shape = []
    for size, *sides in zip(case["shape"], case["src"], case["dst"], strict=True):
        pieces = lcm(*(prod(case["mesh"][axis] for axis in axes) for axes in sides))
        shape.append(min(size, pieces * min(size // pieces, 2) + size % pieces))
    return tuple(shape)


def complete(text: str | None) -> bool:
    """Whether the report gives the sharding in full."""
    return text is not None and "..." not in text and ("<=" in text)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_planned_at_full_size(case: dict[str, Any]):
    source, target = ends(case)
    plan = rs.plan(source, target)
    fewest = rs.plan(source, target, slack=0)
    assert fewest.received_bytes == plan.lower_bound_bytes
    assert plan.received_bytes <= fewest.received_bytes * 1.05 and plan.launches <= fewest.launches
    assert plan.launches <= len(set(source.mesh.devices))
    largest = max(source.tile_bytes, target.tile_bytes)
    assert all(step.result.tile_bytes <= largest for step in plan.steps)
    assert rs.Plan.from_json(plan.to_json()) == plan
    # At the floor nothing is needed beside the two tiles, and no byte more is received.
    tight = rs.plan(source, target, budget=plan.floor_bytes, slack=0)
    assert tight.peak_bytes <= plan.floor_bytes == source.tile_bytes + target.tile_bytes
    assert tight.received_bytes == plan.lower_bound_bytes
    # Source, operand, result and staging: at most five of the larger tile.
    assert plan.peak_bytes <= 5 * largest


@pytest.mark.fast(5)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_run_scaled_down(case: dict[str, Any]):
    shape = small(case)
    assert prod(shape) < 1_000_000
    full, (source, target) = ends(case), ends(case, shape)
    assert [[d.axis for d in dim.digits if d.axis] for dim in source.dims] == [
        [d.axis for d in dim.digits if d.axis] for dim in full[0].dims
    ], "scaled down, the same axes hold the same dims"
    plan = rs.plan(source, target)
    check(plan)
    assert plan.received_bytes == plan.lower_bound_bytes
    at_full_size = rs.plan(*full)
    if source.even and target.even:
        assert [step.kind for step in plan.steps] == [step.kind for step in at_full_size.steps]
        assert plan.launches == at_full_size.launches
    for donate in (False, True):
        tight = rs.plan(source, target, budget=plan.floor_bytes, donate=donate)
        assert check(tight).peak_bytes <= plan.floor_bytes


@pytest.mark.parametrize("case", [c for c in CASES if complete(c.get("hlo_src"))], ids=lambda case: case["id"])
def test_the_reporter_s_own_sharding_plans_the_same(case: dict[str, Any]):
    source, target = ends(case)
    plan = rs.plan(source, target)
    before = Layout.from_hlo(case["hlo_src"], case["shape"], case["dtype"])
    assert (before.shape, before.tile_shape) == (source.shape, source.tile_shape)
    pairs = [(before, target)]
    if complete(case.get("hlo_dst")):
        after = Layout.from_hlo(case["hlo_dst"], case["shape"], case["dtype"])
        assert after.tile_shape == target.tile_shape
        pairs += [(source, after), (before, after)]
    for pair in pairs:
        other = rs.plan(*pair)
        figures = ("received_bytes", "lower_bound_bytes", "launches", "peak_bytes")
        assert [getattr(other, name) for name in figures] == [getattr(plan, name) for name in figures]
        assert [s.kind for s in other.steps] == [s.kind for s in plan.steps]


def test_enough_cases_have_whole_hlo_shardings():
    assert sum(complete(c.get("hlo_src")) and complete(c.get("hlo_dst")) for c in CASES) >= 6
    assert len(CASES) == len(set(IDS)) >= 23


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("jax-21562", ["all_to_all"]),
        ("psgd-kron", ["slice", "all_gather"]),
        ("lorrax-face2batch-p16-4032", ["all_to_all"]),
        ("reshard1-blog", ["slice", "permute"]),
        ("pt-165712a", ["permute"]),
        ("autoparallel-126", ["all_gather"]),
        ("costa-10", ["all_to_all"]),
        ("lorrax-uneven-668", ["exchange"]),
    ],
)
def test_steps_of_known_cases(name: str, kinds: list[str]):
    (case,) = (c for c in CASES if c["id"] == name)
    assert [step.kind for step in rs.plan(*ends(case)).steps] == kinds
