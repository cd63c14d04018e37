"""The two halves of an exchange between sets of devices: batches of rounds, and messages that numpy carries."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map import exchange as messages
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.cost import StepMode
from tests.oracle import tiles_of
from tests.view_oracle import cut

SIX = rs.Mesh(x=3, y=2)
PAIRS = [
    ("s32[{x}4, {y}6]", "s32[12, {t}3]", rs.Mesh({"t": 4}, [6, 7, 8, 9]), None),
    ("s32[{x}4, {y}6]", "s32[12, {t}3]", rs.Mesh({"t": 4}, [6, 7, 8, 9]), 5),
    ("s32[{x}4, 12]", "s32[{t}6, {u}6]", rs.Mesh({"t": 2, "u": 2}, [5, 1, 7, 2]), None),
    ("s32[{x}4, 12]", "s32[{t}6, {u}6]", rs.Mesh({"t": 2, "u": 2}, [5, 1, 7, 2]), 7),
    ("s32[{x}{y}2/11]", "s32[{t}4/11]", rs.Mesh({"t": 3}, [0, 7, 8]), None),
    ("s32[7]", "s32[7]", rs.Mesh({"t": 2}, [8, 9]), None),
]


def exchange(source: str, target: str, mesh: rs.Mesh, chunk: int | None) -> tuple[rs.Layout, rs.Layout, Exchange]:
    operand, result = rs.Layout.parse(source, SIX), rs.Layout.parse(target, mesh)
    (step,) = lower_plan(chain(operand, result, [StepSpec("exchange", result, StepMode(chunk=chunk))])).instructions
    assert isinstance(step, Exchange)
    return operand, result, step


def on_each(layout: rs.Layout, function: object, *stacks: np.ndarray) -> np.ndarray:
    """A function of tiles on every device of a layout's mesh; stacks have a first dim of devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: layout.mesh.size]), ("d",))

    def one(*tiles: jax.Array) -> jax.Array:
        place = MeshPlace(layout.mesh.devices, {"d": layout.mesh.size})
        return function(place, *(tile[0] for tile in tiles))[None]

    return np.asarray(
        jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))(*stacks)
    )


@pytest.mark.fast(1)
@pytest.mark.parametrize("case", PAIRS, ids=lambda case: f"{case[0]} to {case[1]} by {case[3]}")
def test_messages_carried_by_hand(case: tuple[str, str, rs.Mesh, int | None]) -> None:
    operand, result, step = exchange(*case)
    near = np.stack([tiles_of(operand)[device].astype("int32") for device in operand.mesh.devices])
    far = np.full((result.mesh.size, *result.tile_shape), -1, "int32")
    for batch in messages.batches(step):
        for number, turn in enumerate(batch.turns):
            at = jax.numpy.int32(number)
            sent = on_each(operand, partial(_packed, step, batch, at), near)
            assert sent.shape == (operand.mesh.size, batch.elements)
            arrived = np.full((result.mesh.size, batch.elements), -9, "int32")
            for t in turn:
                arrived[result.mesh.position(t.receiver)] = sent[operand.mesh.position(t.sender)]
            far = on_each(result, partial(_filled, step, batch, at), far, arrived)
    for device, wanted in tiles_of(result).items():
        real = wanted >= 0
        assert np.array_equal(far[result.mesh.position(device)][real], wanted[real])


def _packed(step: Exchange, batch: messages.Batch, number: object, place: MeshPlace, tile: jax.Array) -> jax.Array:
    return messages.packed(step, batch, place, number, tile)


def _filled(
    step: Exchange, batch: messages.Batch, number: object, place: MeshPlace, tile: jax.Array, message: jax.Array
) -> jax.Array:
    return messages.filled(step, batch, place, number, tile, message)


def test_local_copies_are_no_larger_than_messages() -> None:
    _, _, step = exchange(*PAIRS[3])
    largest = max(t.elements for turn in step.rounds for t in turn)
    assert max(t.elements for t in step.local) > largest
    assert all(batch.elements <= largest for batch in messages.batches(step))


def test_whole_tiles_need_no_packing() -> None:
    assert messages.is_whole(exchange(*PAIRS[5])[2])
    assert not messages.is_whole(exchange(*PAIRS[0])[2])
    assert not messages.is_whole(exchange(*PAIRS[4])[2])


NEAR = rs.Mesh(x=4)


FAR = {"others": rs.Mesh({"t": 2}, [6, 7]), "one in both": rs.Mesh({"t": 3}, [5, 1, 7])}


@pytest.mark.fast(1)
@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
@pytest.mark.parametrize("chunk", [None, pytest.param(12, marks=pytest.mark.slow)])
def test_strided_messages_carried_by_hand(far: rs.Mesh, chunk: int | None) -> None:
    operand = rs.Layout.parse("s32[{x}6, 5]", NEAR)
    result = rs.Layout.parse(f"s32[3, 5, {{t}}{8 // far.size}]" if far.size == 2 else "s32[{t}, 5, 8]", far)
    view = rs.Move(operand, result, view="(three h) d -> three d h", three=3).view
    spec = StepSpec("exchange", result, StepMode(chunk, view=view))
    (step,) = lower_plan(chain(operand, result, [spec], view=view)).instructions
    assert isinstance(step, Exchange) and step.strided
    values = np.arange(120, dtype="int32").reshape(24, 5)
    tiles = cut(operand, values)
    near = np.stack([tiles[device] for device in operand.mesh.devices])
    filled = np.full((result.mesh.size, *result.tile_shape), -1, "int32")
    for batch in messages.batches(step):
        assert chunk is None or batch.elements <= chunk
        for number, turn in enumerate(batch.turns):
            sent = on_each(operand, partial(_packed, step, batch, jax.numpy.int32(number)), near)
            arrived = np.full((result.mesh.size, batch.elements), -9, "int32")
            for t in turn:
                arrived[result.mesh.position(t.receiver)] = sent[operand.mesh.position(t.sender)]
            filled = on_each(result, partial(_filled, step, batch, jax.numpy.int32(number)), filled, arrived)
    wanted = cut(result, values.reshape(3, 8, 5).transpose(0, 2, 1))
    for device, tile in wanted.items():
        assert np.array_equal(filled[result.mesh.position(device)], tile)
