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
from reshard.jax.eager import EagerProgram, Pending, move_now, prepare_move, put_by_jax
from reshard.jax.primitive import pin_sharding
from reshard.jax.request import ReshardRequest, plan_request
from reshard.jax.targets import ViewOptions
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
    if placement.sharding_of(x) is None:  # On one device: the source that is given says where it starts.
        x = put_by_jax(x, before, donate=False)
    return prepare_move(x, request, None if request.plain else lambda program: place_beside(given, program))


def read_jax_view(x: Any, sharding: Any, source: Any, given: ViewOptions, options: PlanOptions) -> ReshardRequest:
    """What a call asks for one array, checked; its source is known."""
    if not isinstance(x, jax.Array) or placement.is_key_dtype(x.dtype):
        raise PlanError(
            f"{quoted(x)} is a {type(x).__name__}; a view is of one jax array of numbers; for a tree of them give "
            f"reshard.jax.Target(sharding, view=...) for each leaf"
        )
    _check_view_options(x, given)
    before = placement.resolve_sharding(source, x, "source") if source is not None else placement.sharding_of(x)
    if before is None:
        raise PlanError(f"the sharding of the array of shape {x.shape} is not known while it is traced; give source=")
    view = _read_einops(x.shape, given, sharding)
    dtype = x.dtype if given.dtype is None else jnp.dtype(dtypes.canonical(given.dtype))
    after = _target_of_view(jax.ShapeDtypeStruct(view.target_shape, dtype), sharding, before)
    moves = given.view is not None or given.take or given.into
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
    scale = None if given.scale is None else _place_scale(given.scale, program.scale_on)
    return _place_out(given.out, program.request.target), scale


def _place_out(out: jax.Array | None, target: NamedSharding) -> jax.Array | None:
    if out is None or isinstance(out, Tracer):
        return out
    return move_now(out, ReshardRequest(target)) if placement.is_spread(out) else put_by_jax(out, target, donate=False)


def _place_scale(scale: Any, there: NamedSharding) -> jax.Array:
    """The scale on all devices of a mesh."""
    target = NamedSharding(there.mesh, PartitionSpec())
    if isinstance(scale, jax.Array) and not placement.is_unsharded(scale):
        return move_now(scale, ReshardRequest(target))
    values = np.asarray(scale)
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    shards = [jax.device_put(values.astype(dtype), device) for device in target.addressable_devices]
    return jax.make_array_from_single_device_arrays(values.shape, target, shards, dtype=dtype)


# ---- what was given --------------------------------------------------------------------------------


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


def _read_einops(shape: tuple[int, ...], given: ViewOptions, sharding: object) -> View:
    """The view of a call; its target has the shape of `out`, or of a layout, or the one that follows from the
    pattern.
    """
    target = given.out.shape if given.out is not None else sharding.shape if isinstance(sharding, Layout) else None
    if given.view is None and not given.take and not given.into:
        return View.identity(shape)
    text = given.view if given.view is not None else " -> ".join([" ".join(f"d{at}" for at in range(len(shape)))] * 2)
    take, into = (
        {f"d{name}" if given.view is None else name: part for name, part in (parts or {}).items()}
        for parts in (given.take, given.into)
    )
    return einops.resolve(einops.parse(text), (shape, target), given.sizes, take, into)


def _target_of_view(aval: Any, sharding: Any, before: NamedSharding) -> NamedSharding:
    if not isinstance(sharding, NamedSharding):
        with_mesh = sharding.to_jax(before.mesh) if isinstance(sharding, Layout) else sharding
        if isinstance(with_mesh, jax.sharding.PartitionSpec):
            with_mesh = NamedSharding(before.mesh, with_mesh)
        sharding = with_mesh
    return placement.resolve_sharding(sharding, aval, "target")
