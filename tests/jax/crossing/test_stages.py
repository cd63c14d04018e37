"""Exchanges in stages: how many rounds run together, and what waits for what."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.jax.crossing import stages
from reshard.jax.crossing.stages import InProcess
from reshard.lower import lower_plan
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from tests.jax.crossing.cases import mesh
from tests.oracle import tiles_of

SOURCE = rs.Layout.parse("s32[{x}2, 12]", rs.Mesh(x=4))
TARGET = rs.Layout.parse("s32[8, {y}4]", rs.Mesh({"y": 3}, device_ids=[5, 4, 6]))


def compiled(chunk: int | None = None) -> stages.StagedExchange:
    spec = StepSpec("exchange", TARGET, StepMode(chunk=chunk))
    (step,) = lower_plan(chain(SOURCE, TARGET, [spec])).instructions
    meshes = stages.flatten_mesh(mesh(range(4), x=4)), stages.flatten_mesh(mesh([5, 4, 6], y=3))
    return stages.compile_stages(step, SOURCE, TARGET, meshes, InProcess(meshes, jax.devices()), np.dtype("int32"))


def source_stack() -> jax.Array:
    tiles = [tiles_of(SOURCE)[device].astype("int32") for device in SOURCE.mesh.devices]
    shards = jax.device_put(tiles, jax.devices()[:4])
    return stages.stack_shards(shards, stages.flatten_mesh(mesh(range(4), x=4)), SOURCE, np.dtype("int32"))


def check(exchange: stages.StagedExchange) -> None:
    far = stages.run_stages(exchange, source_stack(), donate=False)
    assert far is not None
    wanted = tiles_of(TARGET)
    for shard in far.addressable_shards:
        assert np.array_equal(shard.data, wanted[shard.device.id])


def test_small_rounds_run_together() -> None:
    exchange = compiled()
    assert [len(stage.rounds) for stage in exchange.stages] == [4]
    check(exchange)


@pytest.mark.parametrize("together", [0, 64])
def test_rounds_of_large_messages_run_one_after_another(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(stages, "TOGETHER", together)
    exchange = compiled()
    rounds = 1 if together == 0 else 2
    assert [len(stage.rounds) for stage in exchange.stages] == [rounds] * (4 // rounds)
    check(exchange)


@pytest.mark.slow
def test_pieces_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = compiled(chunk=3)
    assert max(stage.elements for stage in exchange.stages) <= 3
    check(exchange)


def test_a_donated_stack_is_deleted() -> None:
    near = source_stack()
    stages.run_stages(compiled(), near, donate=True)
    assert near.is_deleted()


def test_scalars_are_not_stacked() -> None:
    scalar = rs.Layout.parse("s32[]", rs.Mesh(x=4))
    assert stages.stack_shape(scalar) == ()
    flat = stages.flatten_mesh(mesh(range(4), x=4))
    shards = jax.device_put([np.int32(7)] * 4, jax.devices()[:4])
    assert stages.stack_shards(shards, flat, scalar, np.dtype("int32")).sharding == NamedSharding(flat, P())


@pytest.fixture
def few_objects_to_collect() -> Iterator[None]:
    """What is there already is left alone by the collections of the test, of which there are many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.fast(1)
@pytest.mark.usefixtures("few_objects_to_collect")
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_device_has_one_message_beside_its_tiles(monkeypatch: pytest.MonkeyPatch, chunk: int | None) -> None:
    """What is live, counted before and after every program and every message."""
    monkeypatch.setattr(stages, "TOGETHER", 0)
    exchange, near = compiled(chunk), source_stack()
    live: list[int] = []

    def counted(function: Callable[..., Any], *arrays: Any) -> Any:
        result = jax.block_until_ready(function(*arrays))
        live.append(_most_live())
        return result

    monkeypatch.setattr(stages, "start_program", counted)
    message = 4 * max(stage.elements for stage in exchange.stages)
    before = _most_live()
    far = stages.run_stages(exchange, near, donate=False)
    other = before - SOURCE.tile_bytes  # What tests before this one have left on the busiest device.
    tiles = max(SOURCE.tile_bytes, TARGET.tile_bytes)
    assert len(live) == 1 + 2 * len(exchange.stages) and far is not None
    assert max(live) <= other + tiles + message


def _most_live() -> int:
    """The bytes on the busiest device."""
    gc.collect()
    held: dict[Any, dict[int, int]] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held.setdefault(shard.device, {})[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return max(sum(sizes.values()) for sizes in held.values())
