"""Results that start unfilled, as on a TPU: whatever memory held before, each element is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from reshard.lower.to_shard_map import block_writes, exchange, parts, parts_in_place, tiles, tpu_layout
from reshard.lower.to_shard_map import block_writes as lane_pairs
from reshard.lower.to_shard_map import exchange as boxes
from reshard.lower.to_shard_map import exchange as joining
from reshard.plans.rules.cost import StepMode
from tests.lower.to_shard_map.on_xla import check_on_xla, one_step

STEPS = [
    ("all_to_all", "f32[16, 16, {x}3]", "f32[16, {x}4, 12]", StepMode(parts=2)),  # staged, then into the result
    ("all_gather", "f32[16, {x}4, {y}8]", "f32[16, 16, 16]", StepMode(parts=2)),
    ("all_gather", "f32[8, 12, {x}2]", "f32[8, 12, 8]", StepMode(parts=2)),  # two rows of two lanes side by side
    ("all_to_all", "f32[16, 12, {y}{x}2]", "f32[{x}4, 12, {y}8]", StepMode(parts=2)),
    ("exchange", "f32[16, 16, {x}{y}2]", "f32[16, {x}4, 16]", StepMode(parts=2)),  # in loops, its lanes in dim 1
    ("exchange", "f32[{x}4, 8, 3]", "f32[16, {x}2, 3]", StepMode(2)),  # in rounds, in pieces
    ("exchange", "f32[16, {y}4, {x}4]", "f32[16, {x}2, {y}8]", StepMode()),  # messages are narrow at both ends
    ("exchange", "f32[{x}{y}2, 8, 24]", "f32[16, 8, {y}{x}3]", StepMode()),  # too narrow for the order of the result
    ("exchange", "f32[24, 8, {x}{y}1]", "f32[{y}12, 8, {x}2]", StepMode()),  # another dim is minor in the operand
    ("all_to_all", "f32[16, 16, {x}3]", "f32[16, {x}4, 12]", StepMode(parts=4, overlap=True)),
    ("permute", "f32[16, 8, {x}{y}3]", "f32[16, 8, {y}{x}3]", StepMode(parts=4, overlap=True)),  # in the result's order
    ("exchange", "f32[{y}16, 8, 16]", "f32[32, {y}4, {x}4]", StepMode(parts=2)),  # reads little of a part
    ("all_to_all", "f32[16, {x}8, 8]", "f32[{x}4, 32, 8]", StepMode(parts=2, in_place=True)),  # slots change places
]


def on_a_tpu(*arrays: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    return branches.get("tpu", default)(*arrays)


def used_memory(shape: Sequence[int], dtype: Any) -> jax.Array:
    used.append(tuple(shape))
    return jnp.full(tuple(shape), jnp.nan, dtype)


used: list[tuple[int, ...]] = []


@pytest.mark.fast(1)
@pytest.mark.parametrize(("kind", "source", "target", "mode"), STEPS)
def test_each_element_is_written(kind: str, source: str, target: str, mode: StepMode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lax, "platform_dependent", on_a_tpu)
    monkeypatch.setattr(joining, "find_message_orders", lambda step: None)
    for module, name, value in ((tpu_layout, "LANES", 4), (tpu_layout, "SUBLANES", 2), (block_writes, "UNROLLED", 8)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(exchange, "LOOPED", 2)
    for module in (parts, parts_in_place, block_writes, exchange):
        monkeypatch.setattr(module, "unfilled", used_memory)
    for module in (parts, parts_in_place, block_writes, boxes, exchange, lane_pairs, tiles):
        monkeypatch.setattr(module, "laid_out", lambda tile, order=None: tile)  # layouts are a TPU's
    used.clear()
    check_on_xla(one_step(kind, source, target, mode, donate=mode.in_place))
    assert used
