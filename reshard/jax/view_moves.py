"""Moves with a view or a cast of JAX arrays: `redistribute(x, sharding, view=...)`.

read_jax_view  what a call asks for, checked: a `ReshardRequest` like that of any move
prepare_view   a concrete array's move, by `eager`; or that of a traced one, whose derivatives are those of reshapes,
               slices and permutes
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import MeshError, PlanError, quoted
from reshard.jax import placement
from reshard.jax.eager import (
    EagerProgram,
    Pending,
    check_given_source,
    discard_donated,
    move_now,
    prepare_move,
    put_by_jax,
    run_pending,
)
from reshard.jax.placement import ViewOptions
from reshard.jax.request import ReshardRequest, plan_request
from reshard.jax.traced import pin_sharding
from reshard.lower.to_shard_map.run_program import check_scale
from reshard.runtime import on_jax
from reshard.synth.options import PlanOptions
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.notation import einops
from reshard.types.view import View


def prepare_view(x: Any, sharding: Any, source: Any, given: ViewOptions, options: PlanOptions) -> Pending:
    """The move of one array by a view, a part or a cast, checked and planned; a concrete array does not move yet.

    Raises `PlanError` for a tree of arrays or an unknown source, and what `Move` raises.
    """
    request = read_jax_view(x, sharding, source, given, options)
    before, after = request.ends
    if not request.crosses and before.mesh.size != after.mesh.size:
        raise MeshError(
            f"source {before.spec} on {dict(before.mesh.shape)}, target {after.spec} on {dict(after.mesh.shape)}: one "
            f"of the meshes is abstract, and they have {before.mesh.size} and {after.mesh.size} devices; give meshes "
            f"of devices"
        )
    if isinstance(x, Tracer) or placement.manual_mesh() is not None:
        return partial(_move_traced, x, request, given)
    beside = None if request.plain else partial(place_beside, given)
    if placement.sharding_of(x) is not None:
        return prepare_move(x, request, beside)
    # On one device: the source that is given says where it starts. What is donated is the caller's array as well.
    move = prepare_move(put_by_jax(x, before, donate=False), request, beside)

    def moved() -> jax.Array:
        result = run_pending(move)
        discard_donated(x, [result])
        return result

    return moved if options.donate else move


def read_jax_view(x: Any, sharding: Any, source: Any, given: ViewOptions, options: PlanOptions) -> ReshardRequest:
    """What a call asks for one array, checked; its source is known."""
    if not isinstance(x, jax.Array) or placement.is_key_dtype(x.dtype):
        raise PlanError(
            f"{quoted(x)} is a {type(x).__name__}; a view is of one jax array of numbers; for a tree of them give "
            f"reshard.jax.Target(sharding, view=...) for each leaf"
        )
    _check_view_options(x, given)
    known = placement.sharding_of(x)
    before = known if source is None else placement.resolve_sharding(source, x, "source")
    if before is None:
        raise PlanError(f"the sharding of the array of shape {x.shape} is not known while it is traced; give source=")
    if source is not None and known is not None and not isinstance(x, Tracer):
        check_given_source(x, before, known)
        before = known  # A source on an abstract mesh has no devices.
    # The target has the shape of `out`, or of a layout, or the one that follows from the pattern.
    shape = given.out.shape if given.out is not None else sharding.shape if isinstance(sharding, Layout) else None
    moves = given.view is not None or given.take or given.into
    view = View.identity(x.shape)
    if moves:
        named = given.view is not None  # Without a pattern, the atoms are dims: `take={0: ...}` is of `d0`.
        dims = " ".join(f"d{at}" for at in range(x.ndim))
        take, into = (
            {name if named else f"d{name}": part for name, part in (parts or {}).items()}
            for parts in (given.take, given.into)
        )
        pattern = einops.parse_pattern(given.view if given.view is not None else f"{dims} -> {dims}")
        view = einops.resolve_pattern(pattern, (x.shape, shape), given.sizes, take, into)
    dtype = x.dtype if given.dtype is None else jnp.dtype(dtypes.canonical(given.dtype))
    if isinstance(sharding, Layout):
        sharding = sharding.to_jax(before.mesh)
    if isinstance(sharding, PartitionSpec):
        sharding = NamedSharding(before.mesh, sharding)
    after = placement.resolve_sharding(sharding, jax.ShapeDtypeStruct(view.target_shape, dtype), "target")
    cast = None if dtype == x.dtype else dtype.name
    request = ReshardRequest(after, before, options, view if moves else None, cast)
    _check_jax_scale(x, request, given)
    if given.out is not None and (given.out.shape, given.out.dtype.name) != (view.target_shape, dtype.name):
        raise PlanError(
            f"out is {given.out.dtype.name}{list(given.out.shape)}, the target {dtype.name}{list(view.target_shape)}; "
            f"give one like the target"
        )
    return request


def _move_traced(x: jax.Array, request: ReshardRequest, given: ViewOptions) -> jax.Array:
    """The move inside a trace, on one set of devices in one order."""
    before, after = request.ends
    if request.crosses or request.reorders:
        differ = "different devices" if request.crosses else "the same devices in another order"
        raise PlanError(
            f"source {before.spec} on {dict(before.mesh.shape)}, target {after.spec} on {dict(after.mesh.shape)} have "
            f"{differ}, and a traced program (jit, grad, vmap, scan) runs on one set of devices in one order: move a "
            f"concrete array of shape {x.shape} outside of it"
        )
    made = plan_request(request, x.shape, x.dtype.name)
    out = _place_out(given.out, after)
    scale = None if given.scale is None else jnp.asarray(given.scale)
    with placement.without_context_mesh():
        return pin_sharding(on_jax.apply_plan(made, placement.manual_mesh() or before.mesh, x, out, scale), after)


def place_beside(given: ViewOptions, program: EagerProgram) -> tuple[jax.Array | None, jax.Array | None]:
    """The array of which a part is filled and the scale of the cast, where the program reads them."""
    scale = given.scale
    if scale is not None:
        target = NamedSharding(program.scale_on.mesh, PartitionSpec())  # On all devices of a mesh.
        if isinstance(scale, jax.Array) and not placement.is_unsharded(scale):
            scale = move_now(scale, ReshardRequest(target))
        else:
            values = np.asarray(scale)
            dtype = jax.dtypes.canonicalize_dtype(values.dtype)
            shards = [jax.device_put(values.astype(dtype), device) for device in target.addressable_devices]
            scale = jax.make_array_from_single_device_arrays(values.shape, target, shards, dtype=dtype)
    return _place_out(given.out, program.request.target), scale


def _place_out(out: jax.Array | None, target: NamedSharding) -> jax.Array | None:
    if out is None or isinstance(out, Tracer):
        return out
    return move_now(out, ReshardRequest(target)) if placement.is_spread(out) else put_by_jax(out, target, donate=False)


def _check_view_options(x: jax.Array, given: ViewOptions) -> None:
    if given.sizes and given.view is None:
        name = min(given.sizes)
        raise PlanError(f"unknown argument {quoted(name)}; sizes of atoms need a view, as in '(a b) -> b a'")
    for name, parts in (("take", given.take), ("into", given.into)):
        if not (parts is None or isinstance(parts, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f'{name} {quoted(parts)}: give a dict of atom to index or slice, such as {{"three": 0}}')
    if not (given.out is None or isinstance(given.out, jax.Array)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"out {quoted(given.out)} is a {type(given.out).__name__}; give the jax array to fill")
    placement.check_not_deleted((given.out, given.scale))
    if bool(given.into) != (given.out is not None):
        need = "fills part of the target: give its array with out=" if given.into else "fills all of it: give no out="
        raise PlanError(f"the move of the array of shape {x.shape} {need}")


def _check_jax_scale(x: jax.Array, request: ReshardRequest, given: ViewOptions) -> None:
    """Refuses a scale without a cast, of a sum, or whose dims do not divide those of the wider array."""
    if given.scale is None:
        return
    if request.dtype is None:
        raise PlanError(f"scale {quoted(given.scale)}: the move casts nothing; give dtype=, or leave scale out")
    source, _ = request.ends
    if source.spec.unreduced:
        raise PlanError(f"the source {source.spec} is a sum; finish it first, then scale and cast it")
    try:
        shape = np.shape(given.scale)
    except ValueError as error:
        raise PlanError(f"scale {quoted(given.scale)}: {error}; give a number or an array of numbers") from None
    narrows = request.narrows(x.dtype.name)
    if given.into and not narrows and any(size > 1 for size in shape):
        raise PlanError(f"a scale of shape {shape} for an array that fills part of another: give one number")
    check_scale(shape, x.shape if narrows else request.target_shape(x.shape))
