"""The harness reads what Shardy really prints: kinds, layouts, sub-axes, refusals."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("jax.extend.mlir", reason="the peer planner runs inside jaxlib; install jax")

from benchmarks.shardy_peer import Steps, shardy_many, shardy_steps
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import sample_pairs

MESH = Mesh(x=4, y=2)
SIX = Mesh(x=6)
# No sub-axes of 6 can slice this source for that target: if a release manages, take another pair.
REFUSED = ("f32[{x:(1)3}2, 6]", "f32[{x:(2)3}{x:(1)2}, 6]")


def steps(source: str, target: str, mesh: Mesh = MESH) -> list[tuple[str, str]] | None:
    plan = shardy_steps(Layout.parse(source, mesh), Layout.parse(target, mesh))
    return None if plan is None else [(kind, str(layout)) for kind, layout in plan]


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("f32[16, 16]", "f32[{x}4, 16]", "slice"),
        ("f32[{x}4, 16]", "f32[16, 16]", "all_gather"),
        ("f32[{x}4, 16]", "f32[16, {x}4]", "all_to_all"),
        ("f32[{x}{y}2, 16]", "f32[{y}{x}2, 16]", "permute"),
        ("f32[16, 16] + sum{x}", "f32[16, 16]", "all_reduce"),
        ("f32[16, 16] + sum{x}", "f32[{x}4, 16]", "reduce_scatter"),
    ],
)
def test_every_kind_has_our_name(source: str, target: str, kind: str) -> None:
    assert steps(source, target) == [(kind, target)]


def test_partial_targets_and_sums_on_the_way() -> None:
    assert steps("f32[16, 16] + sum{x}{y}", "f32[16, 16] + sum{y}") == [("all_reduce", "f32[16, 16] + sum{y}")]
    assert steps("f32[16, {y}8] + sum{x}", "f32[{y}{x}2, 16]") == [
        ("reduce_scatter", "f32[16, {y}{x}2]"),
        ("all_to_all", "f32[{y}{x}2, 16]"),
    ]


def test_every_dtype_has_an_mlir_type() -> None:
    names = ["bool", "int4", "uint8", "bfloat16", "float8_e4m3b11fnuz", "float4_e2m1fn", "complex128"]
    for name in map(dtypes.canonical, names):
        assert steps(f"{name}[{{x}}4]", f"{name}[16]") == [("all_gather", f"{dtypes.short(name)}[16]")]


def test_a_refused_pair_does_not_lose_its_neighbours() -> None:
    refused = (Layout.parse(REFUSED[0], SIX), Layout.parse(REFUSED[1], SIX))
    good = (Layout.parse("f32[{x}, 6]", SIX), Layout.parse("f32[6, {x}]", SIX))
    other = (Layout.parse("f32[{y}8]", MESH), Layout.parse("f32[16]", MESH))
    assert shardy_many([good, refused, other, good]) == [
        [("all_to_all", good[1])],
        None,
        [("all_gather", other[1])],
        [("all_to_all", good[1])],
    ]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 5), (8, 10), (16, 16, 2)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_steps_lead_to_the_target_by_tiles_that_fit(sizes: tuple[int, ...], rank: int) -> None:
    pairs = sample_pairs(Mesh(zip("xyz", sizes, strict=False)), rank, 60, seed=rank)
    for (source, target), plan in zip(pairs, shardy_many(pairs), strict=True):
        assert plan is not None, f"{source} -> {target}: Shardy plans every pair of these meshes"
        assert plan[-1][1] == target
        assert_tiles_fit(source, plan)


def assert_tiles_fit(source: Layout, plan: Steps) -> None:
    before = math.prod(source.tile_shape)
    for kind, layout in plan:
        after = math.prod(layout.tile_shape)
        assert (after > before) - (after < before) == {"slice": -1, "all_gather": 1}.get(kind, 0), (kind, str(layout))
        before = after


def test_many_is_as_one_by_one() -> None:
    pairs = sample_pairs(Mesh(x=4, y=6, z=2), 2, 20, seed=0)  # Shardy refuses some of these.
    assert shardy_many(pairs) == [shardy_steps(*pair) for pair in pairs]
