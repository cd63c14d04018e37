"""A move to other devices, compiled once: by one copy on the host, by whole tiles, or by messages.

    CPU devices of one process       `host`: the tiles are copied once, from memory to memory; by `jax.device_put` if
                                     they stay as they are and are small
    tiles that stay as they are      `jax.device_put` of each, one call
    everything else                  `stages`, with the transport that the processes need

Before and after, steps of the plan run on the source's and on the target's mesh like any other move.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from reshard.errors import LayoutError
from reshard.jax.crossing.host import THREADED, HostExchange, exchanged, host_exchange, shards_of
from reshard.jax.crossing.pipeline import pipeline_across, run_pipeline
from reshard.jax.crossing.plans import Leg, Legs, in_messages, legs, numbered, plan_across, pulled
from reshard.jax.crossing.stages import flat, run_stages, stack_shape, stacked, staged
from reshard.jax.crossing.transports import BetweenProcesses, InProcess
from reshard.jax.placement import devices_of
from reshard.jax.request import ReshardRequest
from reshard.jax.starting import started
from reshard.jax.weak_types import weakened
from reshard.lower import lower_plan
from reshard.lower.program import Exchange, Permute
from reshard.lower.to_shard_map import messages
from reshard.lower.views import ViewExchange
from reshard.runtime import on_jax
from reshard.types.layout import Layout
from reshard.types.pipeline import Pipeline
from reshard.types.plan import Plan

Moving = Callable[..., jax.Array]
"""Moves an array; beside it takes the array of which a part is filled, and the scale of a cast."""


def crosses(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether source and target are on different sets of devices."""
    return source.device_set != target.device_set


@lru_cache(maxsize=4096)
def program_across(request: ReshardRequest, source: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Moving:
    """The compiled move of arrays of this shape and dtype to other devices; it deletes a donated source.

    Raises `LayoutError` for a target that does not divide the shape, `BudgetError` if no plan keeps to the budget.
    """
    target = request.target
    whole = plan_across(source, target, shape, dtype.name, request.arguments)
    pipeline = _pipeline(request, source, shape, dtype.name)
    if pipeline is not None and pipeline.seconds < (whole.seconds or 0.0):
        _check_even(whole.target, target)
        return run_pipeline(pipeline, source, target, request.donate)
    return moving(whole, source, target, None, request.budget, request.donate)


def _pipeline(request: ReshardRequest, source: NamedSharding, shape: tuple[int, ...], dtype: str) -> Pipeline | None:
    """The pipeline of a move, where what crosses runs beside the programs: on accelerators of one process.

    Within a budget, one step runs after the other.
    """
    target = request.target
    if request.budget is not None or between_processes(source, target) or on_host(source, target):
        return None
    return pipeline_across(source, target, shape, dtype, request.network)


def casts_before(whole: Plan) -> bool:
    """Whether a plan casts on the source's devices."""
    return legs(whole).before.casts


@lru_cache(maxsize=4096)
def moving(
    whole: Plan,
    source: NamedSharding,
    target: NamedSharding,
    devices: tuple[Any, ...] | None,
    budget: int | None,
    donate: bool,
) -> Moving:
    """The compiled move by a plan whose devices are these, by their numbers; None for those of source and target."""
    _check_even(whole.target, target)
    ends = Ends(source, target, devices or tuple(numbered(source.mesh, target.mesh)))
    if between_processes(source, target):
        parts = in_messages(legs(_parted(whole, ends)), budget, buffers=2, pieces=True)
        return _by_messages(parts, ends, donate, between=True)
    if on_host(source, target):
        return _by_host(pulled(whole), ends, donate)
    parts = in_messages(legs(_parted(whole, ends)), budget, buffers=1, pieces=False)
    pairs = _whole_tiles(parts.across)
    if pairs is not None:
        return _by_tiles(parts, pairs, ends, donate)
    return _by_messages(parts, ends, donate, between=False)


class Ends(NamedTuple):
    """Where a move starts and ends; the devices by their numbers in its plan."""

    source: NamedSharding
    target: NamedSharding
    devices: tuple[Any, ...]

    @property
    def near(self) -> list[Any]:
        """The devices of the source, by position."""
        return devices_of(self.source.mesh)

    @property
    def far(self) -> list[Any]:
        """The devices of the target, by position."""
        return devices_of(self.target.mesh)


def between_processes(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether some device is of another process."""
    return not (source.is_fully_addressable and target.is_fully_addressable)


def on_host(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether all devices are CPUs, so that their memory is the process's."""
    return {device.platform for device in (*devices_of(source.mesh), *devices_of(target.mesh))} == {"cpu"}


@lru_cache(maxsize=1024)
def weakened_on(target: Sharding) -> Moving:
    """The compiled change of an array's type to a weak one."""
    return jax.jit(weakened, out_shardings=target, donate_argnums=0)


def _check_even(layout: Layout, target: NamedSharding) -> None:
    if not layout.even:
        raise LayoutError(
            f"the target {target.spec} on mesh {dict(target.mesh.shape)} does not divide the shape {layout.shape}; "
            f"outside of jit JAX shards only what divides evenly: pad the array"
        )


def _parted(whole: Plan, ends: Ends) -> Plan:
    """The plan in parts on accelerators, like every plan there."""
    platforms = {device.platform for device in (*ends.near, *ends.far)}
    return whole if platforms == {"cpu"} else on_jax.in_parts(whole, lanes="tpu" in platforms)


def _by_host(parts: Legs, ends: Ends, donate: bool) -> Moving:
    (step,) = parts.across.steps
    view = step.mode.view
    exchange = host_exchange(step.operand, step.result, view)
    if _copies_tiles(exchange, parts, ends):
        return partial(_copied, ends.target, donate)
    before, finish = _before(parts.before, ends.source, donate), _finish(parts.after, ends.target)
    target, shape = ends.target, parts.after.target.shape
    indices = {} if parts.after.steps else target.devices_indices_map(shape)
    tile_of_index = {
        _key(index): exchange.tile_at[at] for at, index in enumerate(map(indices.get, ends.far)) if index is not None
    }

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        near = before(x, scale)
        old = _old_tiles(exchange, into) if exchange.fills and into is not None else None
        tiles = exchanged(exchange, near, donate or near is not x, old)
        if not parts.after.steps:
            return jax.make_array_from_callback(shape, target, lambda at: tiles[tile_of_index[_key(at)]])
        return finish(jax.device_put([tiles[number] for number in exchange.tile_at], ends.far), into, scale)

    return moved


def _copies_tiles(exchange: HostExchange, parts: Legs, ends: Ends) -> bool:
    """Whether a move copies each device's tile, as it is, to another device at the same position, and no other device.

    `jax.device_put` does this at once, in threads that it has, and takes less time than numpy. Large tiles stay with
    numpy, which has huge pages for them.
    """
    across = parts.across
    steps = (*parts.before.steps, *parts.after.steps)
    if (
        steps
        or across.view is not None
        or across.source.partial
        or across.target.tile_bytes * exchange.tiles >= THREADED
    ):
        return False
    if across.source.tile_shape != exchange.tile_shape or not exchange.tiles == len(ends.near) == len(ends.far):
        return False
    each = [(at, at) for at in range(exchange.tiles)]
    others = all(near != far for near, far in zip(ends.near, ends.far, strict=True))
    return others and [(copy.sender, copy.receiver) for copy in exchange.copies] == each


def _copied(
    target: NamedSharding,
    donate: bool,
    x: jax.Array,
    into: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    moved = jax.device_put(x, target)
    if donate:
        x.delete()
    return moved


def _old_tiles(exchange: HostExchange, into: jax.Array) -> list[jax.Array]:
    """The tiles of an array on the target's devices, by their numbers."""
    shards = shards_of(into)
    return [shards[exchange.tile_at.index(number)] for number in range(exchange.tiles)]


def _key(index: Any) -> tuple[tuple[Any, Any], ...]:
    """The spans of an index, since slices are no keys; JAX gives None for the ends of a dim that is not split."""
    return tuple((each.start, each.stop) for each in index)


def _by_tiles(parts: Legs, pairs: dict[int, int], ends: Ends, donate: bool) -> Moving:
    """Whole tiles; `pairs` is the number of the device that sends, by that of each that receives."""
    before, finish = _before(parts.before, ends.source, donate), _finish(parts.after, ends.target)
    senders = [ends.devices[pairs[number]] for number in parts.across.target.mesh.devices]
    positions = [ends.near.index(device) for device in senders]

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        near = before(x, scale)
        held = shards_of(near)
        sent = [held[at] for at in positions]
        shards = jax.device_put(sent, ends.far)
        shards = [one.copy() if one.device == other.device else one for one, other in zip(shards, sent, strict=True)]
        if donate or near is not x:
            near.delete()
        return finish(shards, into, scale)

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


def _by_messages(parts: Legs, ends: Ends, donate: bool, *, between: bool) -> Moving:
    (step,) = lower_plan(parts.across).instructions
    if not isinstance(step, Exchange | ViewExchange):
        raise LayoutError(f"{parts.across} does not go in messages; report this")
    near_layout, far_layout = parts.across.source, parts.across.target
    dtype = jnp.dtype(near_layout.dtype)
    meshes = flat(ends.source.mesh), flat(ends.target.mesh)
    transport = BetweenProcesses(meshes, ends.devices, dtype) if between else InProcess(meshes, ends.devices)
    exchange = staged(step, near_layout, far_layout, meshes, transport, dtype)
    before, finish = _before(parts.before, ends.source, donate), _finish(parts.after, ends.target)
    sends = bool(ends.source.addressable_devices)
    fills = isinstance(step, ViewExchange) and step.fills and transport.receives

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        near = before(x, scale) if sends else x
        stack = stacked(_shards(near), meshes[0], near_layout, dtype) if sends else None
        old = stacked(_shards(into), meshes[1], far_layout, dtype).copy() if fills and into is not None else None
        far = run_stages(exchange, stack, donate or near is not x, old)
        if donate and not x.is_deleted():
            x.delete()
        return finish([] if far is None else _shards(far), into, scale)

    return moved


def _shards(x: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in x.addressable_shards]


def _before(leg: Leg, source: NamedSharding, donate: bool) -> Moving:
    """The steps on the source's devices, to tiles of which each is a shard."""
    if not leg.steps:
        return _as_it_is
    run = on_jax.to_stack(leg.source, leg.steps, source.mesh)

    def before(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        near = started(run, x, scale) if leg.casts and scale is not None else started(run, x)
        if donate:
            x.delete()
        return near

    return before


def _as_it_is(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x


def _joined(
    end: Layout, target: NamedSharding, shards: list[jax.Array], into: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """The tiles as shards of the target."""
    return jax.make_array_from_single_device_arrays(end.shape, target, shards, dtype=jnp.dtype(end.dtype))


def _finish(leg: Leg, target: NamedSharding) -> Moving:
    """The steps on the target's devices, from this process's tiles; none if there are none."""
    if not leg.steps or not target.addressable_devices:
        return partial(_joined, leg.target, target)
    run, sharding = on_jax.from_stack(leg.source, leg.steps, target.mesh, target)
    fills = any(step.mode.view is not None and step.mode.view.into for step in leg.steps)

    def finish(shards: list[jax.Array], into: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        stack = jax.make_array_from_single_device_arrays(stack_shape(leg.source), sharding, shards)
        return started(run, stack, into if fills else None, scale if leg.casts else None)

    return finish
