"""What padding adds in a TPU's memory; that a compiler agrees is tested in `test_redistribute_tpu`."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.plans.plan import StepSpec, chain
from reshard.runtime import on_jax, tpu_memory
from reshard.types import Layout, Mesh


def planned(source: str, target: str) -> rs.Plan:
    mesh = Mesh(x=4, y=2)
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))


@pytest.mark.parametrize(
    ("shape", "times"),
    [
        ((64,), 1),  # one dim is not padded to lanes
        ((8, 128), 1),
        ((4, 128), 1),  # four rows are a tile of their own
        ((5, 128), 8 / 5),
        ((16, 100, 256), 1),  # 16 and 256 are the minor dims
        ((3, 64, 96), 4 / 3),  # 96 lanes of 128
        ((7, 5), 8 * 128 / 35),
        ((0, 5), 1),
    ],
)
def test_the_least_padding_of_any_order_of_dims(shape: tuple[int, ...], times: float):
    elements = 1
    for size in shape:
        elements *= size
    assert tpu_memory.padded_bytes(shape, "bfloat16") == pytest.approx(2 * elements * times)
    assert tpu_memory.padded_bytes(shape, "float32") == 2 * tpu_memory.padded_bytes(shape, "bfloat16")


def test_a_plan_of_full_tiles_needs_nothing_more():
    plan = planned("f32[{x}64, 512]", "f32[256, {x}128]")
    assert on_jax.peak_bytes(plan, padded=True) == on_jax.peak_bytes(plan)


def test_all_that_lives_at_once_is_padded():
    """An exchange, then a gather: source and intermediate tile have 64 lanes of 128; the target has full ones."""
    plan = planned("bf16[64, {x}32, {y}64, 64]", "bf16[64, 128, {x}32, 64]")
    assert [step.kind for step in plan.steps] == ["exchange", "all_gather"]
    narrow = plan.source.tile_bytes + plan.steps[0].result.tile_bytes
    scratch = max(step.cost.scratch for step in plan.steps)
    more = on_jax.peak_bytes(plan, padded=True) - on_jax.peak_bytes(plan)
    assert narrow <= more <= narrow + scratch
    assert tpu_memory.padding_bytes(rs.plan(plan.source, plan.source)) == plan.source.tile_bytes


def test_a_slice_with_another_minor_dim_is_copied():
    """Of 512 lanes it takes 64, and dim 1 becomes minor: the copy in the operand's order has 128 lanes."""
    mesh = Mesh(x=8)
    whole = Layout.parse("bf16[512, 512, 512]", mesh)
    plan = rs.plan(whole, Layout.parse("bf16[512, 512, {x}64]", mesh))
    assert on_jax.peak_bytes(plan, padded=True) - on_jax.peak_bytes(plan) == 2 * plan.target.tile_bytes
    rows = rs.plan(whole, Layout.parse("bf16[512, {x}64, 512]", mesh))
    assert on_jax.peak_bytes(rows, padded=True) == on_jax.peak_bytes(rows)


TORUS = {"x": 8, "y": 8, "z": 16}


@pytest.mark.parametrize(
    ("sizes", "before", "after", "compiled"),
    [
        # As wide as the tiles; 32 of 128 lanes at one end or both; 4 lanes, so that the result takes their order.
        (TORUS, "bf16[4096, {y}{x}{z}4, 4096]", "bf16[{x}512, {y}{z}32, 4096]", 1.063),
        (TORUS, "bf16[{y}{x}64, 4096, {z}256]", "bf16[{y}512, 4096, {x}{z}32]", 1.313),
        (TORUS, "bf16[4096, 4096, {y}{x}64]", "bf16[4096, {z}{y}32, {x}512]", 1.037),
        (TORUS, "bf16[4096, 4096, {z}{y}32]", "bf16[{z}256, 4096, {y}512]", 1.156),
        (TORUS, "bf16[{z}256, 4096, {x}{y}64]", "bf16[{y}512, {x}{z}32, 4096]", 1.016),
        ({"x": 32, "y": 32}, "bf16[4096, 4096, {x}{y}4]", "bf16[4096, {x}128, {y}128]", 1.516),
    ],
)
def test_messages_of_an_exchange_at_once_are_padded(sizes: dict[str, int], before: str, after: str, compiled: float):
    """The peaks over source and target that libtpu 0.0.51 gave for v5p."""
    source, target = (Layout.parse(text, Mesh(sizes)) for text in (before, after))
    plan = chain(source, target, [StepSpec("exchange", target)])
    promise = on_jax.peak_bytes(plan, padded=True) / (source.tile_bytes + target.tile_bytes)
    assert compiled - 0.002 <= promise <= 1.06 * compiled
