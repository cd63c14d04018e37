"""What carries packed messages from one set of devices to the other.

InProcess          `jax.device_put` of the messages, one call for all of a stage
BetweenProcesses   one program on the union of both sets, with a `ppermute` a round; every process that has a device of
                   either set runs it, and devices that send nothing give it an empty message

A stack of messages has one of equal size for each device of a mesh of one axis.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.jax.placement import devices_of
from reshard.jax.starting import started
from reshard.lower.exchange import Transfer
from reshard.lower.views import StridedTransfer

Turn = Sequence[Transfer] | Sequence[StridedTransfer]
Pairs = tuple[tuple[int, int], ...]
"""Positions of senders and receivers."""


class Transport(Protocol):
    """Carries messages; `receives` says whether this process has devices of the target."""

    @property
    def receives(self) -> bool: ...

    def carried(
        self, packed: Sequence[jax.Array], turns: Sequence[Turn], elements: int, relayed: bool
    ) -> list[jax.Array]:
        """For each round, the stack of messages on the target's mesh, from that on the source's, or on the target's if
        a relay passes them on.

        Nothing is packed in a process without devices that send, and nothing is returned in one without devices of the
        target.
        """
        ...


class InProcess:
    """Both meshes are of this process; `numbers` are the devices by their numbers."""

    receives = True

    def __init__(self, meshes: tuple[JaxMesh, JaxMesh], numbers: Sequence[Any]) -> None:
        self.numbers = numbers
        self.target = _stack_sharding(meshes[1])
        self.positions = [{device: at for at, device in enumerate(devices_of(mesh))} for mesh in meshes]

    def carried(
        self, packed: Sequence[jax.Array], turns: Sequence[Turn], elements: int, relayed: bool
    ) -> list[jax.Array]:
        """For each round, the messages where they are wanted; devices that receive none get zeros."""
        rounds = list(zip(packed, turns, strict=True))
        position = self.positions[relayed]
        sent = [stack.addressable_data(position[self.numbers[t.sender]]) for stack, turn in rounds for t in turn]
        moved = iter(jax.device_put(sent, [self.numbers[t.receiver] for _, turn in rounds for t in turn]))
        by_device = [{self.numbers[t.receiver]: next(moved) for t in turn} for turn in turns]
        return [_stack(received, self.target, elements, packed[0].dtype) for received in by_device]


class BetweenProcesses:
    """Some devices are of other processes. The union has every device once, in the order of the numbers."""

    def __init__(self, meshes: tuple[JaxMesh, JaxMesh], numbers: Sequence[Any], dtype: Any) -> None:
        self.target = _stack_sharding(meshes[1])
        self.union = _stack_sharding(JaxMesh(np.array(numbers), meshes[1].axis_names))
        self.dtype = dtype
        self.receives = bool(self.target.addressable_devices)

    def carried(
        self, packed: Sequence[jax.Array], turns: Sequence[Turn], elements: int, relayed: bool
    ) -> list[jax.Array]:
        """For each round, the messages of this process's devices of the target."""
        if not self.union.addressable_devices:
            return []
        pairs = tuple(tuple((t.sender, t.receiver) for t in turn) for turn in turns)
        shards = [_by_device(stack) for stack in packed] or [{}] * len(turns)
        stacks = [_stack(messages, self.union, elements, self.dtype) for messages in shards]
        arrived = started(_permuted(self.union, pairs), *stacks)
        if not self.receives:
            return []
        here = self.target.addressable_devices
        wanted = ({d: m for d, m in _by_device(stack).items() if d in here} for stack in arrived)
        return [_stack(messages, self.target, elements, self.dtype) for messages in wanted]


@lru_cache(maxsize=1024)
def _permuted(union: NamedSharding, rounds: tuple[Pairs, ...]) -> Callable[..., tuple[jax.Array, ...]]:
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


def _devices(sharding: NamedSharding) -> list[Any]:
    """This process's devices of a mesh, by position."""
    return [device for device in devices_of(sharding.mesh) if device in sharding.addressable_devices]


def _stack(messages: Mapping[Any, jax.Array], sharding: NamedSharding, elements: int, dtype: Any) -> jax.Array:
    """The messages of this process's devices in one array; devices that have none get zeros."""
    devices = _devices(sharding)
    missing = tuple(device for device in devices if device not in messages)
    empty = dict(messages) | (_by_device(_zeros(missing, elements, dtype)()) if missing else {})
    shape = (elements * sharding.mesh.size,)
    return jax.make_array_from_single_device_arrays(shape, sharding, [empty[device] for device in devices], dtype=dtype)


@lru_cache(maxsize=1024)
def _zeros(devices: tuple[Any, ...], elements: int, dtype: Any) -> Callable[[], jax.Array]:
    """The program that makes an empty message on each of these devices of this process."""
    sharding = _stack_sharding(JaxMesh(np.array(devices), ("device",)))
    return jax.jit(lambda: jnp.zeros((elements * len(devices),), dtype), out_shardings=sharding)
