"""Many arrays to other devices in few programs, whichever devices each of them comes from.

    a    on devices 0 1    ->  devices 0 to 7        one program on all devices: a device that has no tile of an array
    b    on device 5       ->  devices 0 to 7        gives it an empty one; messages between two devices are one, and
    c    on devices 2 3 4  ->  devices 0 to 7        groups of devices that need the same gather it (`geometry.relay`)

One by one, each would take programs of its own to pack, to carry and to write, a round after another. Arrays are as
small as those that share programs on one mesh, since every device has room for a tile of each; larger ones move alone.
A process of a source has to be one of the target, too: then all processes of one array are those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.jax.agreement import agree_on_moves
from reshard.jax.crossing import across
from reshard.jax.crossing.stages import AXIS, flatten_mesh
from reshard.jax.placement import AnyMesh, devices_of
from reshard.jax.request import ReshardRequest, check_even, number_devices, numbered_move
from reshard.jax.running import start_program
from reshard.lower.program import Exchange, join_launches, lower_batch
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_exchange import run_exchange
from reshard.plans.plan import Batch, Plan, StepSpec, chain, list_lanes
from reshard.plans.rules.step_mode import StepMode
from reshard.synth import FEW_SENDERS, may_gather

MOST_TILES = 4 << 20
"""Bytes of the tiles of an array, before and after: a larger one moves alone."""

MOST_TOGETHER = 32 << 20
"""Bytes of the tiles of all arrays of a program."""

MOST_ARRAYS = 100
"""The most arrays of a program: each is some operations more to compile."""

Asked = tuple[ReshardRequest, tuple[int, ...], str]
"""A request, and the shape and dtype of its array."""


class JointProgram(NamedTuple):
    """Arrays that move together, by their places; the compiled program from their tiles to those of the results, on all
    devices; and for each its target."""

    places: tuple[int, ...]
    run: Callable[..., tuple[jax.Array, ...]]
    sharding: NamedSharding
    tiles: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def find_joint_moves(asked: Mapping[int, Asked]) -> tuple[int, ...]:
    """Which of some moves to other devices go together; none if they come from few sets of devices."""
    found: dict[int, AnyMesh] = {}
    for at, (request, shape, dtype) in asked.items():
        source, target = request.ends
        if across.on_host(source, target):
            continue  # Copies on the host are one exchange in any case.
        processes = [{device.process_index for device in devices_of(end.mesh)} for end in (source, target)]
        if not request.crosses or not processes[0] <= processes[1] or not shape or 0 in shape:
            continue
        move = numbered_move(request, number_devices(source.mesh, target.mesh), shape, dtype)
        small = move.source.tile_bytes + move.target.tile_bytes <= MOST_TILES
        if small and move.target.even and may_gather(move.source, move.target):
            found[at] = source.mesh
    # Processes of other targets need not make this call.
    targets = {frozenset(device.process_index for device in devices_of(asked[at][0].target.mesh)) for at in found}
    return tuple(found) if len({*found.values()}) >= FEW_SENDERS and len(targets) == 1 else ()


def run_joint_moves(arrays: Sequence[jax.Array], asked: Sequence[Asked]) -> list[jax.Array]:
    """The moved arrays; all processes of their devices make this call for all of them."""
    moved: dict[int, jax.Array] = {}
    for program in _compile_joint(tuple(asked)):
        stacks: list[jax.Array] = []
        devices = [d for d in devices_of(program.sharding.mesh) if d in program.sharding.addressable_devices]
        for at, (before, _) in zip(program.places, program.tiles, strict=True):
            shards = {shard.device: shard.data for shard in arrays[at].addressable_shards}
            missing = [device for device in devices if device not in shards]
            # What these devices give is never read.
            empty = np.zeros(before, arrays[at].dtype)
            shards.update(zip(missing, jax.device_put([empty] * len(missing), missing), strict=True))
            shape = (program.sharding.mesh.size * before[0], *before[1:])
            stacks.append(
                jax.make_array_from_single_device_arrays(
                    shape, program.sharding, [shards[device] for device in devices], dtype=arrays[at].dtype
                )
            )
        for at, stack in zip(program.places, start_program(program.run, *stacks), strict=True):
            request, shape, _ = asked[at]
            wanted = request.target.addressable_devices
            tiles = [shard.data for shard in stack.addressable_shards if shard.device in wanted]
            moved[at] = jax.make_array_from_single_device_arrays(shape, request.target, tiles, dtype=stack.dtype)
    return [moved[at] for at in range(len(asked))]


@lru_cache(maxsize=64)
def _compile_joint(asked: tuple[Asked, ...]) -> tuple[JointProgram, ...]:
    agree_on_moves(list(asked), "together")
    numbers = number_devices(*(end.mesh for request, _, _ in asked for end in request.ends))
    plans: list[Plan] = []
    groups: dict[object, list[int]] = {}
    for at, (request, shape, dtype) in enumerate(asked):
        move = numbered_move(request, numbers, shape, dtype)
        check_even(move.target, request)
        spec = StepSpec("exchange", move.target, StepMode(relay=True, gathers=True))
        plans.append(chain(move.source, move.target, [spec]))
        groups.setdefault(list_lanes(plans[-1]), []).append(at)
    sharding = NamedSharding(flatten_mesh(JaxMesh(np.array(list(numbers)), (AXIS,))), PartitionSpec(AXIS))
    programs: list[JointProgram] = []
    for places in groups.values():
        some: list[int] = []
        room = MOST_TOGETHER
        for at in places:
            need = plans[at].source.tile_bytes + plans[at].target.tile_bytes
            if some and (need > room or len(some) == MOST_ARRAYS):
                programs.append(_compile_group(some, plans, sharding))
                some, room = [], MOST_TOGETHER
            some.append(at)
            room -= need
        programs.append(_compile_group(some, plans, sharding))
    return tuple(programs)


def _compile_group(places: Sequence[int], plans: Sequence[Plan], sharding: NamedSharding) -> JointProgram:
    """The program of some arrays; devices are positions on its mesh."""
    own = [plans[at] for at in places]
    lowered = lower_batch(Batch(tuple(map(str, places)), tuple(own)))
    (joint,) = join_launches(lowered)
    steps = joint if isinstance(joint, tuple) else [each.instructions[0] for each in lowered]
    exchanges = [step for step in steps if isinstance(step, Exchange)]
    size = sharding.mesh.size

    def run(*tiles: jax.Array) -> tuple[jax.Array, ...]:
        shapes = [plan.target.tile_shape for plan in own]
        return tuple(run_exchange(exchanges, MeshPlace(range(size), {AXIS: size}), tiles, shapes))

    each = (sharding.spec,) * len(own)
    spread: Any = jax.shard_map(run, mesh=sharding.mesh, in_specs=each, out_specs=each, check_vma=False)
    tiles = tuple((plan.source.tile_shape, plan.target.tile_shape) for plan in own)
    return JointProgram(tuple(places), jax.jit(spread), sharding, tiles)
