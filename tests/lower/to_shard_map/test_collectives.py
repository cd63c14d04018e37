"""Each collective on a tile: what it moves, and that XLA compiles it to one collective of the promised bytes."""

from __future__ import annotations

import jax
import pytest

from reshard import hlo
from reshard.lower.to_shard_map import run_collectives
from reshard.plans.rules.collectives import RULES
from tests.lower.to_shard_map.on_xla import check_on_xla, one_step

STEPS = [
    # Along rows and columns; of strided digits; over parts of axes and axes in either order; padded.
    ("slice", "f32[16, 8]", "f32[16, {x}2]"),
    ("slice", "f32[16, 8]", "f32[{y}{x}2, 8]"),
    ("slice", "f32[16, 8]", "f32[2{x}2, {y}4]"),
    ("slice", "f32[10, 8]", "f32[{x}3/10, 8]"),
    ("slice", "f32[{x:(1)2}8, 8]", "f32[{x:(1)2}8, {x:(2)2}4]"),
    ("all_gather", "f32[{x}4, 8]", "f32[16, 8]"),
    ("all_gather", "f32[16, {y}4]", "f32[16, 8]"),
    ("all_gather", "f32[{y}{x}2, 8]", "f32[16, 8]"),
    ("all_gather", "f32[{x}4, {y}4]", "f32[16, 8]"),
    ("all_gather", "f32[2{x}2, 8]", "f32[16, 8]"),
    ("all_gather", "f32[{x}3/10, 8]", "f32[10, 8]"),
    ("all_gather", "f32[{x}4, 8]", "f32[{x:(1)2}8, 8]"),
    ("all_to_all", "f32[{x}4, 8]", "f32[16, {x}2]"),
    ("all_to_all", "f32[{x}{y}2, 16]", "f32[16, {y}{x}2]"),
    ("all_to_all", "f32[{x}4, {y}8, 16]", "f32[16, 16, {y}{x}2]"),
    ("all_to_all", "f32[2{x}2, 8]", "f32[16, {x}2]"),
    ("all_to_all", "f32[{x}4, 8]", "f32[{x:(1)2}8, {x:(2)2}4]"),
    ("permute", "f32[{x}{y}2, 8]", "f32[{y}{x}2, 8]"),
    ("permute", "f32[{x:(1)2}8, {y}4]", "f32[{y}8, {x:(2)2}4]"),
    ("reduce_scatter", "f32[16, 8] + sum{x}", "f32[{x}4, 8]"),
    ("reduce_scatter", "f32[16, 8] + mean{x}{y}", "f32[{y}{x}2, 8]"),
    ("reduce_scatter", "f32[{y}8, 8] + max{x}", "f32[{y}8, {x}2]"),
    ("reduce_scatter", "f32[16, 8] + min{x:(2)2}", "f32[16, {x:(2)2}4]"),
    ("reduce_scatter", "s32[16, 8] + product{y}", "s32[{y}8, 8]"),
    ("all_reduce", "f32[{y}8, 8] + sum{x}", "f32[{y}8, 8]"),
    ("all_reduce", "f32[16, 8] + mean{x}{y}", "f32[16, 8]"),
    ("all_reduce", "f32[16, 8] + max{x:(1)2}", "f32[16, 8]"),
    ("all_reduce", "s32[16, 8] + min{y}", "s32[16, 8]"),
    ("all_reduce", "f32[16, 8] + product{x}", "f32[16, 8]"),
    # Replicated, held, passed on and sliced; strided, padded, over parts of axes.
    ("split_sum", "f32[16, 8]", "f32[16, 8] + sum{x}"),
    ("split_sum", "f32[{x}4, 8]", "f32[16, 8] + sum{x}{y}"),
    ("split_sum", "f32[{y}8, {x}2]", "f32[16, 8] + max{x}{y}"),
    ("split_sum", "f32[16, {x}2]", "f32[{y}8, 8] + min{x}"),
    ("split_sum", "f32[{x:(1)2}8, 8]", "f32[{y}8, 8] + sum{x:(1)2}"),
    ("split_sum", "f32[2{x}2, 8]", "f32[16, 8] + sum{x}{y}"),
    ("split_sum", "f32[{x}3/10, 8]", "f32[10, 8] + sum{x}"),
    ("split_sum", "s32[16, 8] + product{y}", "s32[16, 8] + product{x}{y}"),
]


@pytest.mark.fast(8)
@pytest.mark.parametrize(("kind", "source", "target"), STEPS)
def test_a_step_is_one_collective(kind: str, source: str, target: str):
    """Also over parts of axes, in any order of the axes, and of several dims; or none.

    `jax.lax` has a reduce-scatter for sums only, and no all-reduce of products, which receives more.
    """
    plan = one_step(kind, source, target)
    module = hlo.parse(check_on_xla(plan).as_text())
    compiled = [(each.kind, each.received_bytes) for each in hlo.collectives(module)]
    if kind in ("slice", "split_sum"):
        assert compiled == []
    elif "product" in source and kind == "all_reduce":
        assert [each for each, _ in compiled] == ["all_gather"]
    else:
        other = kind == "reduce_scatter" and not any(op in source for op in ("sum", "mean"))
        assert compiled == [("all_to_all" if other else kind, plan.received_bytes)]


@pytest.mark.parametrize(
    ("source", "target"),
    [step[1:] for step in STEPS if step[0] == "reduce_scatter" and ("sum" in step[1] or "mean" in step[1])]
    + [
        ("f32[16, 8] + sum{x}{y}", "f32[{x}{y}2, 8]"),
        ("f32[16, 8] + sum{x}{y}", "f32[16, {y}{x}]"),
        ("f32[16, 8] + sum{x}{y}", "f32[{y}8, {x}2]"),
        ("f32[{y}8, 8] + sum{x}", "f32[{y}8, {x}2]"),
        ("f32[10, 7] + sum{x}", "f32[10, {x}2/7]"),
        ("f32[16, 8] + sum{x}{y}", "f32[2{x}{y}, 8]"),
        # Blocks as columns of rows, the last of which is not full; whole tiles of memory; and no floats.
        ("f32[2064, 4] + sum{x}", "f32[{x}516, 4]"),
        ("f32[32, 8, 128] + sum{x}", "f32[{x}8, 8, 128]"),
        ("f32[3, 8, 8] + sum{x}{y}", "f32[3, {x}2, {y}4]"),
        ("s32[16, 8] + sum{x}{y}", "s32[{x}{y}2, 8]"),
    ],
)
def test_a_reduce_scatter_as_spelled_for_a_tpu(source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_collectives.lax, "platform_dependent", lambda *tiles, tpu, default: tpu(*tiles))
    check_on_xla(one_step("reduce_scatter", source, target))


@pytest.mark.fast(5)
@pytest.mark.parametrize(
    ("source", "target"),
    [step[1:] for step in STEPS if step[0] == "all_gather"]
    + [
        ("f32[{x}{y}2, 8]", "f32[16, 8]"),
        ("f32[16, {y}{x}1]", "f32[16, 8]"),
        ("f32[{x}4, {y}4]", "f32[16, 8]"),
        ("f32[{x}{y}2/15, 8]", "f32[15, 8]"),
        ("f32[2{x}{y}, 8]", "f32[16, 8]"),
        # Tiles that lie apart in dim 1: where full rows of lanes are received in their place, and where they are not.
        ("f32[4, 2{x}{y}128]", "f32[4, 2048]"),
        ("f32[4, 2{x}{y}3]", "f32[4, 48]"),
    ],
)
def test_an_all_gather_as_spelled_for_a_whole_slice_of_tpus(source: str, target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_collectives, "_WHOLE_SLICE", 2)
    monkeypatch.setattr(run_collectives.lax, "platform_dependent", lambda *tiles, tpu, default: tpu(*tiles))
    check_on_xla(one_step("all_gather", source, target))


def test_a_share_is_placed_where_jax_has_numbers_of_64_bits():
    with jax.enable_x64(True):
        check_on_xla(one_step("split_sum", "f64[{y}8, {x}2]", "f64[16, 8] + sum{x}{y}"))


def test_all_collectives_are_here():
    assert {kind for kind, _, _ in STEPS} == set(RULES) - {"exchange"}
