"""A move to other devices, compiled once: by one copy on the host, by whole tiles, or by messages.

    CPU devices of one process       `host`: the tiles are copied once, from memory to memory
    tiles that stay as they are      `jax.device_put` of each, one call
    everything else                  `stages`, with the transport that the processes need

Before and after, steps of the plan run on the source's and on the target's mesh like any other move.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from reshard.errors import LayoutError
from reshard.jax.crossing.host import exchanged, host_exchange, shards_of
from reshard.jax.crossing.plans import Legs, devices_of, in_messages, legs, numbered, plan_across, pulled
from reshard.jax.crossing.stages import flat, run_stages, stack_shape, stacked, staged
from reshard.jax.crossing.transports import BetweenProcesses, InProcess
from reshard.jax.request import ReshardRequest
from reshard.jax.starting import started
from reshard.jax.weak_types import weakened
from reshard.lower import lower_plan
from reshard.lower.program import Exchange, Permute
from reshard.lower.to_shard_map import messages
from reshard.runtime import on_jax
from reshard.types.layout import Layout
from reshard.types.plan import Plan

Move = Callable[[jax.Array], jax.Array]


def crosses(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether source and target are on different sets of devices."""
    return source.device_set != target.device_set


@lru_cache(maxsize=4096)
def program_across(request: ReshardRequest, source: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Move:
    """The compiled move of arrays of this shape and dtype to other devices; it deletes a donated source.

    Raises `LayoutError` for a target that does not divide the shape, `BudgetError` if no plan keeps to the budget.
    """
    target = request.target
    whole = plan_across(source, target, shape, dtype.name, request.budget, request.network, request.donate)
    _check_even(whole.target, target)
    if between_processes(source, target):
        parts = in_messages(legs(whole), request.budget, buffers=2, pieces=True)
        return _by_messages(parts, source, target, dtype, request.donate, between=True)
    if on_host(source, target):
        return _by_host(pulled(legs(whole)), source, target, request.donate)
    parts = in_messages(legs(whole), request.budget, buffers=1, pieces=False)
    pairs = _whole_tiles(parts.across)
    if pairs is not None:
        return _by_tiles(parts, pairs, source, target, request.donate)
    return _by_messages(parts, source, target, dtype, request.donate, between=False)


def between_processes(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether some device is of another process."""
    return not (source.is_fully_addressable and target.is_fully_addressable)


def on_host(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether all devices are CPUs, so that their memory is the process's."""
    return {device.platform for device in (*devices_of(source.mesh), *devices_of(target.mesh))} == {"cpu"}


@lru_cache(maxsize=1024)
def weakened_on(target: Sharding) -> Move:
    """The compiled change of an array's type to a weak one."""
    return jax.jit(weakened, out_shardings=target, donate_argnums=0)


def _check_even(layout: Layout, target: NamedSharding) -> None:
    if not layout.even:
        raise LayoutError(
            f"the target {target.spec} on mesh {dict(target.mesh.shape)} does not divide the shape {layout.shape}; "
            f"outside of jit JAX shards only what divides evenly: pad the array"
        )


def _by_host(parts: Legs, source: NamedSharding, target: NamedSharding, donate: bool) -> Move:
    devices = devices_of(target.mesh)
    exchange = host_exchange(parts.across.source, parts.across.target)
    before, finish = _before(parts.before, source, donate), _finish(parts.after, target)
    indices = {} if parts.after.steps else target.devices_indices_map(parts.after.target.shape)
    tile_of_index = {
        _key(index): exchange.tile_at[at] for at, index in enumerate(map(indices.get, devices)) if index is not None
    }

    def moved(x: jax.Array) -> jax.Array:
        near = before(x)
        tiles = exchanged(exchange, near, donate or near is not x)
        if not parts.after.steps:
            return jax.make_array_from_callback(x.shape, target, lambda at: tiles[tile_of_index[_key(at)]])
        return finish(jax.device_put([tiles[number] for number in exchange.tile_at], devices))

    return moved


def _key(index: Any) -> tuple[tuple[Any, Any], ...]:
    """The spans of an index, since slices are no keys; JAX gives None for the ends of a dim that is not split."""
    return tuple((each.start, each.stop) for each in index)


def _by_tiles(parts: Legs, pairs: dict[int, int], source: NamedSharding, target: NamedSharding, donate: bool) -> Move:
    """Whole tiles; `pairs` is the number of the device that sends, by that of each that receives."""
    before, finish = _before(parts.before, source, donate), _finish(parts.after, target)
    numbers = list(numbered(source.mesh, target.mesh))
    senders = [numbers[pairs[number]] for number in parts.across.target.mesh.devices]
    positions = [devices_of(source.mesh).index(device) for device in senders]

    def moved(x: jax.Array) -> jax.Array:
        near = before(x)
        held = shards_of(near)
        sent = [held[at] for at in positions]
        shards = jax.device_put(sent, devices_of(target.mesh))
        shards = [one.copy() if one.device == other.device else one for one, other in zip(shards, sent, strict=True)]
        if donate or near is not x:
            near.delete()
        return finish(shards)

    return moved


def _whole_tiles(across: Plan) -> dict[int, int] | None:
    """Who sends to whom, if only whole tiles go from one device to another; else None."""
    (instruction,) = lower_plan(across).instructions
    if isinstance(instruction, Permute):
        return {receiver: sender for sender, receiver in instruction.pairs}
    if not isinstance(instruction, Exchange) or not messages.is_whole(instruction):
        return None
    transfers = [*instruction.local, *(t for turn in instruction.rounds for t in turn)]
    return {t.receiver: t.sender for t in transfers}


def _by_messages(
    parts: Legs, source: NamedSharding, target: NamedSharding, dtype: Any, donate: bool, *, between: bool
) -> Move:
    (step,) = lower_plan(parts.across).instructions
    if not isinstance(step, Exchange):
        raise LayoutError(f"{parts.across} does not go in messages; report this")
    near_layout, far_layout = parts.across.source, parts.across.target
    meshes = flat(source.mesh), flat(target.mesh)
    numbers = list(numbered(source.mesh, target.mesh))
    transport = BetweenProcesses(meshes, numbers, dtype) if between else InProcess(meshes, numbers)
    exchange = staged(step, near_layout, far_layout, meshes, transport, dtype)
    before, finish = _before(parts.before, source, donate), _finish(parts.after, target, dtype)
    sends = bool(source.addressable_devices)

    def moved(x: jax.Array) -> jax.Array:
        near = before(x) if sends else x
        shards = [shard.data for shard in near.addressable_shards]
        stack = stacked(shards, meshes[0], near_layout, dtype) if sends else None
        far = run_stages(exchange, stack, donate or near is not x)
        if donate and not x.is_deleted():
            x.delete()
        return finish([] if far is None else [shard.data for shard in far.addressable_shards])

    return moved


def _before(plan: Plan, source: NamedSharding, donate: bool) -> Move:
    """The steps on the source's devices, to tiles of which each is a shard."""
    if not plan.steps:
        return lambda x: x
    run = on_jax.to_stack(_parted(plan, source), source.mesh)

    def before(x: jax.Array) -> jax.Array:
        near = started(run, x)
        if donate:
            x.delete()
        return near

    return before


def _finish(plan: Plan, target: NamedSharding, dtype: Any = None) -> Callable[[list[jax.Array]], jax.Array]:
    """The steps on the target's devices, from this process's tiles; none if there are none."""
    layout = plan.source
    if not plan.steps or not target.addressable_devices:
        return lambda shards: jax.make_array_from_single_device_arrays(
            plan.target.shape, target, shards, dtype=dtype or shards[0].dtype
        )
    run, sharding = on_jax.from_stack(_parted(plan, target), target.mesh, target)

    def finish(shards: list[jax.Array]) -> jax.Array:
        return started(run, jax.make_array_from_single_device_arrays(stack_shape(layout), sharding, shards))

    return finish


def _parted(plan: Plan, sharding: NamedSharding) -> Plan:
    """The plan in parts on accelerators, like every plan there."""
    return plan if devices_of(sharding.mesh)[0].platform == "cpu" else on_jax.in_parts(plan)
