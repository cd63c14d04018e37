"""The two halves of a `view_exchange`: messages that numpy carries, against the view's meaning."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import view_messages
from reshard.lower.views import ViewExchange
from reshard.types.plan import StepSpec, chain
from reshard.types.rules.cost import StepMode
from tests.lower.to_shard_map.test_messages import on_each
from tests.view_oracle import cut

NEAR = rs.Mesh(x=4)


FAR = {"others": rs.Mesh({"t": 2}, [6, 7]), "one in both": rs.Mesh({"t": 3}, [5, 1, 7])}


@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
@pytest.mark.parametrize("chunk", [None, pytest.param(12, marks=pytest.mark.slow)])
def test_messages_carried_by_hand(far: rs.Mesh, chunk: int | None) -> None:
    operand = rs.Layout.parse("s32[{x}6, 5]", NEAR)
    result = rs.Layout.parse(f"s32[3, 5, {{t}}{8 // far.size}]" if far.size == 2 else "s32[{t}, 5, 8]", far)
    view = rs.Move(operand, result, view="(three h) d -> three d h", three=3).view
    spec = StepSpec("view_exchange", result, StepMode(chunk, view=view))
    (step,) = lower_plan(chain(operand, result, [spec], view=view)).instructions
    assert isinstance(step, ViewExchange)
    values = np.arange(120, dtype="int32").reshape(24, 5)
    tiles = cut(operand, values)
    near = np.stack([tiles[device] for device in operand.mesh.devices])
    filled = np.full((result.mesh.size, *result.tile_shape), -1, "int32")
    for batch in view_messages.batches(step):
        assert chunk is None or batch.elements <= chunk
        for number, turn in enumerate(batch.turns):
            sent = on_each(operand, partial(_packed, step, batch, number), near)
            arrived = np.full((result.mesh.size, batch.elements), -9, "int32")
            for t in turn:
                arrived[result.mesh.position(t.receiver)] = sent[operand.mesh.position(t.sender)]
            filled = on_each(result, partial(_filled, step, batch, number), filled, arrived)
    wanted = cut(result, values.reshape(3, 8, 5).transpose(0, 2, 1))
    for device, tile in wanted.items():
        assert np.array_equal(filled[result.mesh.position(device)], tile)


def _packed(step, batch, number, place, tile):
    return view_messages.packed(step, batch, place, np.int32(number), tile)


def _filled(step, batch, number, place, tile, message):
    return view_messages.filled(step, batch, place, np.int32(number), tile, message)
