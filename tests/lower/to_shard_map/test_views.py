"""Views inside `jax.shard_map`: every instruction on tiles of indices, against the view's oracle."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import Beside, tile_function
from tests.synth.test_moves import MODELS
from tests.view_oracle import KEPT, PADDING, Case, cut, random_case


def on_xla(plan: rs.Plan, tiles: list[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """The plan's program on tiles, and on the target's where it fills a part, stacked by device."""
    program = lower_plan(plan)
    axes = dict(plan.source.mesh.axes) or {"one": 1}
    grid = np.array(jax.devices()[: len(program.devices)]).reshape(tuple(axes.values()))
    sharding = NamedSharding(jax.sharding.Mesh(grid, tuple(axes)), P(tuple(axes)))
    run = tile_function(program, axes)
    whole = jax.shard_map(
        lambda tile, *into: run(tile[0], Beside(*(each[0] for each in into)))[None],
        mesh=sharding.mesh,
        in_specs=tuple(sharding.spec for _ in tiles),
        out_specs=sharding.spec,
        check_vma=False,
    )
    given = [jax.device_put(np.stack([each[d] for d in program.devices]), sharding) for each in tiles]
    return dict(zip(program.devices, np.asarray(jax.jit(whole)(*given)), strict=True))


def check(move: rs.Move, reference, plan: rs.Plan | None = None) -> None:
    index = np.arange(int(np.prod(move.source.shape)), dtype=np.int32).reshape(move.source.shape)
    tiles = [cut(move.source, index)]
    if move.view.into:
        held = np.arange(KEPT, KEPT + int(np.prod(move.target.shape)), dtype=np.int32)
        tiles.append(cut(move.target, held.reshape(move.target.shape)))
    moved = on_xla(plan or rs.plan(move), tiles)
    wanted = cut(move.target, np.asarray(reference(index)).astype(np.int32))
    for device, tile in moved.items():
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device][real]), f"device {device} of {move}"


def narrow(move: rs.Move) -> rs.Move:
    layouts = (rs.Layout.parse("s32" + str(each)[3:], each.mesh) for each in (move.source, move.target))
    return rs.Move(*layouts, move.view)


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", ["llama qkv split", "fused qkv, straddling", "deepseek kv_b", "12 heads over 8"])
def test_model_shapes(name):
    move, reference = MODELS[name]
    check(narrow(move), reference)


def cases(count: int, kind: str) -> list[Case]:
    """Random cases whose plans have a step of this kind."""
    drawn: list[Case] = []
    for seed in range(10_000):
        case = random_case(random.Random(seed), "int32", most=96)
        if case.move.source.mesh.size <= 8 and kind in {step.kind for step in rs.plan(case.move).steps}:
            drawn.append(case)
        if len(drawn) == count:
            break
    return drawn


@pytest.mark.fast(2)
@pytest.mark.parametrize("kind", ["view", "take", "put", "exchange"])
def test_random_views(kind):
    for case in cases(2, kind):
        check(case.move, case.reference)


def test_a_cast():
    layouts = [rs.Layout.parse(text, rs.Mesh(x=4)) for text in ("f32[{x}4]", "bf16[16]")]
    plan = rs.plan(rs.Move(*layouts, cast=True))
    moved = on_xla(plan, [cut(plan.source, np.arange(16, dtype="float32"))])
    assert moved[2].dtype.name == "bfloat16" and list(moved[2]) == list(range(16))


def test_a_target_to_fill_is_needed():
    move = rs.Move(*(rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("s32[4]", "s32[6]")), into={0: slice(0, 4)})
    with pytest.raises(PlanError, match="fills part"):
        on_xla(rs.plan(move), [cut(move.source, np.arange(4, dtype=np.int32))])
