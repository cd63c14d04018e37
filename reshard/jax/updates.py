"""Arrays that devices hold already, brought up to date: `redistribute(x, sharding, have=..., changed=...)`.

CPU devices of this process     copies into new memory, from the shards of both arrays; casts, and what is held in
                                another sharding, by the plan on numpy: nothing is compiled, so that every update
                                may be of other elements
accelerators, other processes   the plan's exchange, as for any move that fills an array: a program for each `changed`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from reshard.errors import PlanError, quoted
from reshard.jax import placement
from reshard.jax.crossing.host import HostPart, plan_host_exchange, run_host_exchanges, shards_of
from reshard.jax.eager import on_devices, prepare_move, run_pending
from reshard.jax.placement import ViewOptions
from reshard.jax.request import check_even, number_devices, numbered_move
from reshard.jax.view_moves import place_beside, read_jax_view
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime.on_numpy import simulate
from reshard.synth.options import PlanOptions
from reshard.types.index_set import IndexSet
from reshard.types.move import Move


def update_array(
    x: Any, sharding: Any, source: Any, given: ViewOptions, options: PlanOptions, have: Any, changed: Any
) -> jax.Array:
    """The target's array, made of what its devices hold already, `have`, and of what of `x` they lack or hold stale."""
    if not isinstance(have, jax.Array):
        raise PlanError(f"have={quoted(have)}: give the jax array that is there, of which changed= says what is stale")
    if isinstance(x, Tracer) or isinstance(have, Tracer) or placement.is_tracing():
        raise PlanError("have= and changed= are of concrete arrays: bring these up to date outside of jit, grad, vmap")
    if given.out is not None:
        raise PlanError("out= beside have=: the array that is there is given once, as have=")
    placement.check_not_deleted((x, have))
    request = read_jax_view(x, sharding, source, replace(given, out=have if given.fills else None), options)
    before, after = request.ends
    after = on_devices(after, before)
    shape, dtype = request.target_shape(x.shape), request.target_dtype(x.dtype.name)
    if (have.shape, have.dtype.name) != (shape, dtype):
        raise PlanError(f"have= is {have.dtype.name}{list(have.shape)}, and the target {dtype}{list(shape)}")
    held, stale = _sharding_of_held(have), IndexSet.read(changed, x.shape)
    numbers = number_devices(before.mesh, after.mesh, held.mesh)
    whole = numbered_move(replace(request, target=after), numbers, x.shape, x.dtype.name)
    ids = tuple(numbers[device] for device in placement.devices_of(held.mesh))
    layout = placement.layout_of(held, shape, dtype, numbers=ids)
    move = Move(whole.source, whole.target, whole.view, cast=True, have=layout, changed=stale)
    check_even(move.target, request)
    if is_on_host(before, after, held):
        # One memory: nobody passes anything on.
        view = None if move.view.plain else move.view
        step = StepSpec("exchange", move.target, StepMode(view=view, holding=move.holding))
        plan = chain(move.source, move.target, [step], view=view)
        updated = _update_on_host(plan, numbers, (x, have), after, given.scale)
    elif layout == move.target:
        asked = replace(request, target=after, source=None, changed=stale)
        updated = run_pending(prepare_move(x, asked, partial(place_beside, replace(given, out=have))))
    else:
        raise PlanError(
            f"have= is sharded as {held.spec} on {dict(held.mesh.shape)}, the target as {after.spec} on "
            f"{dict(after.mesh.shape)}: only between CPU devices of this process may they differ; bring it there "
            f"first, by redistribute(have, target)"
        )
    if options.donate and not x.is_deleted():
        x.delete()
    return updated


def is_on_host(*ends: NamedSharding) -> bool:
    """Whether all devices are CPUs of this process, whose shards numpy reads where they are."""
    platforms = {device.platform for end in ends for device in placement.devices_of(end.mesh)}
    return platforms == {"cpu"} and all(end.is_fully_addressable for end in ends)


def _sharding_of_held(have: jax.Array) -> NamedSharding:
    """The sharding of what is held; an array on one device is whole there."""
    known: Any = have.sharding
    if isinstance(known, SingleDeviceSharding):
        (device,) = known.device_set
        return NamedSharding(JaxMesh(np.array([device]), ("device",)), PartitionSpec())
    found = placement.sharding_of(have)
    if found is None:
        raise PlanError(f"have= has a {type(known).__name__}, whose layout is not known; give one with a NamedSharding")
    return found


def _update_on_host(
    plan: Plan, numbers: Mapping[Any, int], arrays: tuple[jax.Array, jax.Array], target: NamedSharding, scale: Any
) -> jax.Array:
    """Runs the plan on the shards of the array and of what is held, which stay as they are, into new memory."""
    x, have = arrays
    (step,) = plan.steps
    if not plan.spreads and step.operand.dtype == step.result.dtype:  # Copies, in memory that JAX takes as it is.
        exchange = plan_host_exchange(step.operand, step.result, step.mode.view, step.mode.holding)
        shards = shards_of(have)
        old = [shards[exchange.tile_at.index(each)] for each in range(exchange.tiles)]
        tiles = run_host_exchanges([HostPart(exchange, x)], {0: old})[0]
        indices = target.devices_indices_map(have.shape)
        numbered = zip(placement.devices_of(target.mesh), exchange.tile_at, strict=True)
        tile_at: dict[Any, int] = {indices[device]: at for device, at in numbered}
        return jax.make_array_from_callback(have.shape, target, lambda index: tiles[tile_at[index]])
    if scale is not None and np.ndim(scale):
        raise PlanError(f"a scale of shape {np.shape(scale)} beside have=: give one number, or move all of the array")
    near, held = ({numbers[s.device]: np.asarray(s.data) for s in each.addressable_shards} for each in arrays)
    moved = simulate(plan, near, have=held, scale=None if scale is None else float(scale))
    devices = placement.devices_of(target.mesh)
    made = [jax.device_put(moved[numbers[device]], device) for device in devices]
    return jax.make_array_from_single_device_arrays(plan.target.shape, target, made)
