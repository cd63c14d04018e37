"""The exchange between devices that have memory of their own: pack, carry, write, a few rounds at a time.

    stack of source tiles     pack, one program on the source's mesh, returns one message a device for each round
    messages                  are carried to their receivers, by `InProcess` or `BetweenProcesses`
    stack of target tiles     write, one program on the target's mesh, which updates the tiles in place

What a relay passes on is packed from the stack of target tiles instead, once what it received is written.

Rounds run together while their messages are small. Large ones run one after another: a round waits until the one
before has been written, so that a device has one message at a time beside its tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.jax import placement
from reshard.jax.placement import devices_of
from reshard.jax.running import start_program
from reshard.lower.exchange_rounds import Exchange, Transfer
from reshard.lower.to_shard_map import run_exchange as messages
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_exchange import MessageBatch
from reshard.runtime.on_jax import spell_stack_spec
from reshard.types.layout import Layout

TOGETHER = 256 << 10
"""Rounds run together while their messages have at most this many bytes on a device."""
MOST_ROUNDS = 16
"""The most rounds that run together: a program has some operations for each of them."""
AXIS = "device"


@dataclass(frozen=True, eq=False)
class Stage:
    """Rounds that run together: the programs that pack and write them, and the numbers of these in their batch.

    `relayed` ones are packed from the target's tiles.
    """

    pack: Callable[..., tuple[jax.Array, ...]]
    write: Callable[..., jax.Array]
    numbers: np.ndarray[Any, Any]
    rounds: tuple[Round, ...]
    elements: int
    message_bytes: int
    relayed: bool


@dataclass(frozen=True, eq=False)
class StagedExchange:
    """An exchange, compiled: its stages, and what makes the target's tiles before anything is in them."""

    stages: tuple[Stage, ...]
    start: Callable[[], jax.Array]
    transport: InProcess | BetweenProcesses


def flatten_mesh(mesh: placement.AnyMesh) -> JaxMesh:
    """The devices of a mesh on one axis, of no explicit type."""
    return JaxMesh(np.array(devices_of(mesh)), (AXIS,))


def stack_shards(shards: Sequence[jax.Array], mesh: JaxMesh, layout: Layout, dtype: Any) -> jax.Array:
    """The stack of tiles of this process's devices: their order on the mesh does not matter."""
    return jax.make_array_from_single_device_arrays(
        stack_shape(layout), NamedSharding(mesh, spell_stack_spec(mesh, layout)), shards, dtype=dtype
    )


def stack_shape(layout: Layout) -> tuple[int, ...]:
    """The shape of the layout's tiles one after another along dim 0; a scalar's are not stacked."""
    tile = layout.tile_shape
    return (layout.mesh.size * tile[0], *tile[1:]) if tile else ()


def compile_stages(
    step: Exchange,
    operand: Layout,
    result: Layout,
    meshes: tuple[JaxMesh, JaxMesh],
    transport: InProcess | BetweenProcesses,
    dtype: Any,
) -> StagedExchange:
    """Compiles an exchange between these layouts, each on its own mesh of one axis."""
    stages: list[Stage] = []
    for batch in messages.batch_rounds(step):
        size = max(1, operand.nbytes(batch.elements))
        together = max(1, min(TOGETHER // size, MOST_ROUNDS, len(batch.rounds)))
        # One pair of programs for all stages of as many rounds, whose numbers it is given.
        compiled = lru_cache(partial(_compile_stage, step, batch, operand, result, meshes))
        for start in range(0, len(batch.rounds), together):
            rounds = batch.rounds[start : start + together]
            numbers = np.arange(start, start + len(rounds), dtype=np.int32)
            programs = compiled(len(rounds))
            stages.append(Stage(*programs, numbers, rounds, batch.elements, size * len(rounds), batch.relayed))
    sharding = NamedSharding(meshes[1], spell_stack_spec(meshes[1], result))
    begin = jax.jit(lambda: jnp.zeros(stack_shape(result), dtype), out_shardings=sharding)
    return StagedExchange(tuple(stages), begin, transport)


def _compile_stage(
    step: Exchange, batch: MessageBatch, operand: Layout, result: Layout, meshes: tuple[JaxMesh, JaxMesh], count: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What packs, and what writes, this many rounds of a batch, of given numbers."""
    sender, receiver = (MeshPlace(end.mesh.devices, {AXIS: end.mesh.size}) for end in (operand, result))
    stacks, each = tuple(map(spell_stack_spec, meshes, (operand, result))), (PartitionSpec(AXIS),) * count
    if batch.relayed:
        sender, stacks, meshes = receiver, (stacks[1], stacks[1]), (meshes[1], meshes[1])

    def pack(tile: jax.Array, numbers: jax.Array) -> tuple[jax.Array, ...]:
        here = sender.anew()
        return tuple(messages.pack_message(step, batch, here, numbers[at], tile) for at in range(count))

    def write(tile: jax.Array, numbers: jax.Array, *arrived: jax.Array) -> jax.Array:
        here = receiver.anew()
        for at, message in enumerate(arrived):
            tile = messages.write_message(step, batch, here, numbers[at], tile, message)
        return tile

    on = partial(jax.shard_map, check_vma=False)
    packing = on(pack, mesh=meshes[0], in_specs=(stacks[0], PartitionSpec()), out_specs=each)
    writing = on(write, mesh=meshes[1], in_specs=(stacks[1], PartitionSpec(), *each), out_specs=stacks[1])
    return jax.jit(packing), jax.jit(writing, donate_argnums=0)


def run_stages(
    exchange: StagedExchange, near: jax.Array | None, donate: bool, into: jax.Array | None = None
) -> jax.Array | None:
    """The stack of the target's tiles from that of the source's, each None in a process that has none of its devices.

    With `donate`, the source's is deleted once its last messages are packed. `into` is a stack of the target's tiles
    of which the exchange fills a part, and which it overwrites.
    """
    transport = exchange.transport
    last = max((number for number, stage in enumerate(exchange.stages) if not stage.relayed), default=-1)
    far = into if into is not None else start_program(exchange.start) if transport.receives else None
    waiting = 0
    for number, stage in enumerate(exchange.stages):
        if waiting and waiting + stage.message_bytes > TOGETHER:
            if far is not None:
                far.block_until_ready()
            waiting = 0
        held = far if stage.relayed else near
        packed = start_program(stage.pack, held, stage.numbers) if held is not None else ()
        if donate and number == last and near is not None and not near.is_deleted():
            near.delete()
        arrived = transport.carried(packed, stage.rounds, stage.elements, stage.relayed)
        if far is not None:
            far = start_program(stage.write, far, stage.numbers, *arrived)
        del packed, arrived
        waiting += stage.message_bytes
    if donate and near is not None and not near.is_deleted():  # Nothing was packed from it.
        near.delete()
    return far


# What carries packed messages from one set of devices to the other: `carried` makes, for each round, the stack of
# messages on the target's mesh from that on the source's, or on the target's if a relay passes them on. A stack has one
# message of equal size for each device of a mesh of one axis. `receives` says whether this process has devices of the
# target.
#
# InProcess          `jax.device_put` of the messages, one call for all of a stage
# BetweenProcesses   one program on the union of both sets, with a `ppermute` a round; every process with a device of
#                    either set runs it, and devices that send nothing give it an empty message


Round = Sequence[Transfer]
Pairs = tuple[tuple[int, int], ...]
"""Positions of senders and receivers."""


class InProcess:
    """Both meshes are of this process; `numbers` are the devices by their numbers."""

    receives = True

    def __init__(self, meshes: tuple[JaxMesh, JaxMesh], numbers: Sequence[Any]) -> None:
        self.numbers = numbers
        self.target = _stack_sharding(meshes[1])
        self.positions = [{device: at for at, device in enumerate(devices_of(mesh))} for mesh in meshes]

    def carried(
        self, packed: Sequence[jax.Array], rounds: Sequence[Round], elements: int, relayed: bool
    ) -> list[jax.Array]:
        """For each round, the messages where they are wanted; devices that receive none get zeros."""
        paired = list(zip(packed, rounds, strict=True))
        position = self.positions[relayed]
        sent = [stack.addressable_data(position[self.numbers[t.sender]]) for stack, each in paired for t in each]
        moved = iter(jax.device_put(sent, [self.numbers[t.receiver] for _, each in paired for t in each]))
        by_device = [{self.numbers[t.receiver]: next(moved) for t in each} for each in rounds]
        return [_stack_messages(received, self.target, elements, packed[0].dtype) for received in by_device]


class BetweenProcesses:
    """Some devices are of other processes. The union has every device once, in the order of the numbers."""

    def __init__(self, meshes: tuple[JaxMesh, JaxMesh], numbers: Sequence[Any], dtype: Any) -> None:
        self.target = _stack_sharding(meshes[1])
        self.union = _stack_sharding(JaxMesh(np.array(numbers), meshes[1].axis_names))
        self.dtype = dtype
        self.receives = bool(self.target.addressable_devices)

    def carried(
        self, packed: Sequence[jax.Array], rounds: Sequence[Round], elements: int, relayed: bool
    ) -> list[jax.Array]:
        """For each round, the messages of this process's devices of the target.

        Nothing is packed in a process without devices that send, and nothing is returned in one without devices of
        the target.
        """
        if not self.union.addressable_devices:
            return []
        pairs = tuple(tuple((t.sender, t.receiver) for t in each) for each in rounds)
        shards = [_by_device(stack) for stack in packed] or [{}] * len(rounds)
        stacks = [_stack_messages(messages, self.union, elements, self.dtype) for messages in shards]
        arrived = start_program(_permute_program(self.union, pairs), *stacks)
        if not self.receives:
            return []
        here = self.target.addressable_devices
        wanted = ({d: m for d, m in _by_device(stack).items() if d in here} for stack in arrived)
        return [_stack_messages(messages, self.target, elements, self.dtype) for messages in wanted]


@lru_cache(maxsize=1024)
def _permute_program(union: NamedSharding, rounds: tuple[Pairs, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """The program that sends the messages of some rounds, each from senders to receivers."""
    (axis,) = union.mesh.axis_names

    def permuted(*messages: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lax.ppermute(message, axis, pairs) for message, pairs in zip(messages, rounds, strict=True))

    each = (union.spec,) * len(rounds)
    return jax.jit(jax.shard_map(permuted, mesh=union.mesh, in_specs=each, out_specs=each, check_vma=False))


def _stack_sharding(mesh: JaxMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names))


def _by_device(stack: jax.Array) -> dict[Any, jax.Array]:
    return {shard.device: shard.data for shard in stack.addressable_shards}


def _stack_messages(messages: Mapping[Any, jax.Array], sharding: NamedSharding, elements: int, dtype: Any) -> jax.Array:
    """The messages of this process's devices in one array; devices that have none get zeros."""
    devices = [device for device in devices_of(sharding.mesh) if device in sharding.addressable_devices]
    missing = tuple(device for device in devices if device not in messages)
    empty = dict(messages) | (_by_device(_zeros_program(missing, elements, dtype)()) if missing else {})
    shape = (elements * sharding.mesh.size,)
    return jax.make_array_from_single_device_arrays(shape, sharding, [empty[device] for device in devices], dtype=dtype)


@lru_cache(maxsize=1024)
def _zeros_program(devices: tuple[Any, ...], elements: int, dtype: Any) -> Callable[[], jax.Array]:
    """The program that makes an empty message on each of these devices of this process."""
    sharding = _stack_sharding(JaxMesh(np.array(devices), (AXIS,)))
    return jax.jit(lambda: jnp.zeros((elements * len(devices),), dtype), out_shardings=sharding)
