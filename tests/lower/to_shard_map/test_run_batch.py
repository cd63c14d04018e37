"""Batches on JAX's tiles: one collective for all arrays, checked against the oracle."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower.program import lower_batch
from reshard.lower.to_shard_map import batch_function, exchange
from reshard.plans.plan import Batch, StepSpec, chain
from reshard.runtime.on_jax import apply_batch
from tests.jax.oracle import mesh_of, on
from tests.oracle import tiles_of

SIZES = {"x": 4, "y": 2}
MESH = rs.Mesh(SIZES)
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute")
CASES = {
    "gather": ("s32[{x}2, 8]", "s32[8, 8]", "all_gather"),
    "all-to-all": ("s32[{x}2, 8]", "s32[8, {x}2]", "all_to_all"),
    "permute": ("s32[{x}{y}1, 8]", "s32[{y}{x}1, 8]", "permute"),
    "permute and gather": ("s32[{x}2, {y}4]", "s32[{y}4, 8]", "permute all_gather"),
}


@pytest.mark.parametrize("name", CASES)
def test_arrays_of_several_shapes_share_a_collective(name: str) -> None:
    source, target, steps = CASES[name]
    ends = _ends(source, target)
    (batch,) = rs.plan_tree({str(n): pair for n, pair in enumerate(ends)}).batches
    assert [step.kind for step in batch.plans[0].steps] == steps.split()
    assert _collectives(batch) == batch.launches


@pytest.mark.parametrize("platform", ["cpu", "default"])
def test_exchanges_share_a_message_a_round(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.lax, "platform_dependent", lambda *tiles, **ways: ways[platform](*tiles))
    plans = tuple(chain(*pair, [StepSpec("exchange", pair[1])]) for pair in _ends("s32[{x}2, 8]", "s32[{y}4, 8]"))
    batch = Batch(("a", "b", "c"), plans)
    assert _collectives(batch) == batch.launches == plans[0].launches


def _ends(source: str, target: str) -> list[tuple[rs.Layout, rs.Layout]]:
    return [(_sized(source, shape), _sized(target, shape)) for shape in ((8, 8), (16, 8), (8, 24))]


def _collectives(batch: Batch) -> int:
    """The collectives of a compiled batch, whose results are the oracle's."""
    mesh = mesh_of(SIZES)
    arrays = [jax.device_put(_filled(plan.source), on(mesh, plan.source)) for plan in batch.plans]
    targets = [plan.target for plan in batch.plans]
    move = jax.jit(lambda *xs: apply_batch(batch, mesh, xs), out_shardings=[on(mesh, each) for each in targets])
    for moved, layout in zip(move(*arrays), targets, strict=True):
        wanted = tiles_of(layout)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.device.id])
    text = move.lower(*arrays).compile().as_text()
    return sum(text.count(f" {name}(") for name in COLLECTIVES)


def _sized(text: str, shape: tuple[int, ...]) -> rs.Layout:
    """The layout of this text for another global shape: the same axes in each dim."""
    like = rs.Layout.parse(text, MESH)
    axes = [[digit.axis for digit in dim.digits if digit.axis is not None] for dim in like.dims]
    return rs.Layout.tiled(MESH, shape, "int32", axes)


def _filled(layout: rs.Layout) -> np.ndarray:
    return np.arange(np.prod(layout.shape), dtype="int32").reshape(layout.shape)


def test_another_number_of_devices_is_refused() -> None:
    rows, whole = (rs.Layout.parse(text, MESH) for text in ("s32[{x}2]", "s32[8]"))
    batch = rs.plan_tree({"a": (rows, whole)}).batches[0]
    with pytest.raises(PlanError, match="have 2 devices, not 8"):
        batch_function(lower_batch(batch), {"x": 2})
