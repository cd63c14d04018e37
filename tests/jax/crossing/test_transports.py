"""Messages between the devices of one process; `test_redistribute_processes` has those between processes."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax.crossing import stages
from reshard.jax.crossing.stages import BetweenProcesses, InProcess
from reshard.lower.exchange_rounds import Transfer
from tests.jax.crossing.cases import mesh

SENDERS, RECEIVERS = mesh([2, 0], a=2), mesh([5, 2, 7], t=3)
NUMBERS = [jax.devices()[at] for at in (2, 0, 5, 7)]
"""Numbers 0 and 1 are the source's devices; 2, 0 and 3 the target's."""
TURNS = [[Transfer(0, 2, ()), Transfer(1, 3, ())], [Transfer(1, 0, ())], [Transfer(0, 0, ())]]


def packed() -> list[jax.Array]:
    flat = stages.flatten_mesh(SENDERS)
    messages = [np.arange(6, dtype="float32") + 10 * number for number in range(len(TURNS))]
    return [jax.device_put(message, NamedSharding(flat, P(stages.AXIS))) for message in messages]


def received(transport: InProcess | BetweenProcesses) -> list[dict[int, list[float]]]:
    stacks = transport.carried(packed(), TURNS, 3, relayed=False)
    assert all([device.id for device in stack.sharding.mesh.devices.flat] == [5, 2, 7] for stack in stacks)
    return [{shard.device.id: shard.data.tolist() for shard in stack.addressable_shards} for stack in stacks]


WANTED = [
    {5: [0, 1, 2], 2: [0, 0, 0], 7: [3, 4, 5]},
    {5: [0, 0, 0], 2: [13, 14, 15], 7: [0, 0, 0]},
    {5: [0, 0, 0], 2: [20, 21, 22], 7: [0, 0, 0]},
]


def test_in_a_process() -> None:
    assert received(InProcess((stages.flatten_mesh(SENDERS), stages.flatten_mesh(RECEIVERS)), NUMBERS)) == WANTED


def test_the_program_between_processes_does_the_same_in_one() -> None:
    meshes = stages.flatten_mesh(SENDERS), stages.flatten_mesh(RECEIVERS)
    transport = BetweenProcesses(meshes, NUMBERS, np.dtype("float32"))
    assert transport.receives and received(transport) == WANTED
