"""Moves with a view or a cast of JAX arrays: `redistribute(x, sharding, view=...)`.

checked      what a call asks for: source and target shardings, the view, the dtypes, all checked
prepared     a concrete array's move, planned and compiled: on one mesh, or to other devices (`crossing`)
traced       the same program's operations, whose derivatives are those of reshapes, slices and permutes
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import LayoutError, MeshError, PlanError, quoted
from reshard.jax import crossing, placement
from reshard.jax.eager import move_now, put, reordered_program
from reshard.jax.platform_network import best_plan_on
from reshard.jax.primitive import pinned
from reshard.jax.request import PlanArguments, ReshardRequest, orders_differ
from reshard.jax.starting import started
from reshard.jax.targets import ViewOptions
from reshard.lower.to_shard_map.scales import check_scale
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.synth import Network
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.notation import einops
from reshard.types.view import View


class ViewRequest(NamedTuple):
    """A move with a view, checked, but not planned."""

    before: NamedSharding
    after: NamedSharding
    view: View
    dtype: str
    target_dtype: str

    @property
    def crosses(self) -> bool:
        """Whether its ends are on different devices; those of abstract meshes are the same."""
        known = isinstance(self.before.mesh, JaxMesh) and isinstance(self.after.mesh, JaxMesh)
        return known and crossing.crosses(self.before, self.after)

    @property
    def reorders(self) -> bool:
        """Whether its ends are on the same devices in another order."""
        return not self.crosses and orders_differ(self.before, self.after)


def moved(x: Any, sharding: Any, source: Any, given: ViewOptions, arguments: PlanArguments) -> jax.Array:
    """Moves one array by a view, a part or a cast; see `prepared`."""
    return prepared(x, sharding, source, given, arguments)()


def prepared(
    x: Any, sharding: Any, source: Any, given: ViewOptions, arguments: PlanArguments
) -> Callable[[], jax.Array]:
    """The move of one array by a view, a part or a cast, checked and planned; a concrete array does not move yet.

    Raises `PlanError` for a tree of arrays or an unknown source, and what `Move` raises.
    """
    what = checked(x, sharding, source, given)
    if isinstance(x, Tracer) or placement.manual_mesh() is not None:
        return partial(traced, x, what, given, arguments)
    if what.crosses:
        shape = what.view.source_shape
        whole = crossing.plan_across(
            what.before, what.after, shape, what.dtype, arguments, what.view, what.target_dtype
        )
    else:
        whole = _plan(what, arguments.budget, arguments.network)
    run = program(whole, what, arguments.budget, arguments.donate)
    return running(x, what, given, whole, run, donate=arguments.donate)


def checked(x: Any, sharding: Any, source: Any, given: ViewOptions) -> ViewRequest:
    """What a call with a view asks for, checked."""
    what = ends(x, sharding, source, given)
    before, after = what.before, what.after
    if not what.crosses and before.mesh.size != after.mesh.size:
        raise MeshError(
            f"source {before.spec} on {dict(before.mesh.shape)}, target {after.spec} on {dict(after.mesh.shape)}: one "
            f"of the meshes is abstract, and they have {before.mesh.size} and {after.mesh.size} devices; give meshes "
            f"of devices"
        )
    return what


def ends(x: Any, sharding: Any, source: Any, given: ViewOptions) -> ViewRequest:
    """Where a move of one array starts and ends, checked."""
    if not isinstance(x, jax.Array) or placement.is_key_dtype(x.dtype):
        raise PlanError(
            f"{quoted(x)} is a {type(x).__name__}; a view is of one jax array of numbers; for a tree of them give "
            f"reshard.jax.Target(sharding, view=...) for each leaf"
        )
    _check_options(x, given)
    before = placement.resolve(source, x, "source") if source is not None else placement.sharding_of(x)
    if before is None:
        raise PlanError(f"the sharding of the array of shape {x.shape} is not known while it is traced; give source=")
    view = _view(x.shape, given, sharding)
    dtype = x.dtype if given.dtype is None else jnp.dtype(dtypes.canonical(given.dtype))
    after = _target(jax.ShapeDtypeStruct(view.target_shape, dtype), sharding, before)
    what = ViewRequest(before, after, view, x.dtype.name, dtype.name)
    _check_scale(what, given)
    if given.out is not None and (given.out.shape, given.out.dtype.name) != (view.target_shape, dtype.name):
        raise PlanError(
            f"out is {given.out.dtype.name}{list(given.out.shape)}, the target {dtype.name}{list(view.target_shape)}; "
            f"give one like the target"
        )
    return what


def traced(x: jax.Array, what: ViewRequest, given: ViewOptions, arguments: PlanArguments) -> jax.Array:
    """The move inside a trace, on one set of devices in one order."""
    if what.crosses or what.reorders:
        differ = "different devices" if what.crosses else "the same devices in another order"
        raise PlanError(
            f"source {what.before.spec} on {dict(what.before.mesh.shape)}, target {what.after.spec} on "
            f"{dict(what.after.mesh.shape)} have {differ}, and a traced program (jit, grad, vmap, scan) runs "
            f"on one set of devices in one order: move a concrete array of shape {x.shape} outside of it"
        )
    made = _plan(what, arguments.budget, arguments.network)
    out = _existing(what, given.out)
    scale = None if given.scale is None else jnp.asarray(given.scale)
    with placement.without_context_mesh():
        mesh = placement.manual_mesh() or what.before.mesh
        return pinned(on_jax.apply(made, mesh, x, out, scale), what.after)


def program(
    whole: Plan, what: ViewRequest, budget: int | None, donate: bool, devices: tuple[Any, ...] | None = None
) -> Callable[..., jax.Array]:
    """The compiled move by a plan, whose devices are these by their numbers if it leads to other ones.

    `budget` bounds the messages. Raises `LayoutError` for a target that does not divide the array.
    """
    if not whole.target.even:
        raise LayoutError(
            f"the target {what.after.spec} does not divide {what.view.target_shape}: pad it, or move it under jit"
        )
    if what.crosses:
        return crossing.moving(whole, what.before, what.after, devices, budget, donate)
    if what.reorders:
        return reordered_program(whole, what.before, what.after)
    return _compiled(whole, what)


def running(
    x: jax.Array, what: ViewRequest, given: ViewOptions, whole: Plan, run: Callable[..., jax.Array], *, donate: bool
) -> Callable[[], jax.Array]:
    """The move of a concrete array by a compiled program, not started."""
    if not x.size and not what.view.into:
        return lambda: put(np.zeros(what.view.target_shape, jnp.dtype(what.target_dtype)), what.after, donate=False)

    two_meshes = what.crosses or what.reorders

    def start() -> jax.Array:
        out = _existing(what, given.out)
        near = crossing.casts_before(whole) if what.crosses else what.reorders and on_jax.narrows(whole.steps)
        scale = None if given.scale is None else _scale_on(what.before if near else what.after, given.scale)
        with placement.without_mesh() if two_meshes else placement.without_context_mesh(), placement.unguarded():
            result = run(x, out, scale) if two_meshes else started(run, x, out, scale)
        if donate and not x.is_deleted():
            x.delete()  # XLA keeps the buffer until the move has read it.
        return result

    return start


# ---- what was given --------------------------------------------------------------------------------


def _check_options(x: jax.Array, given: ViewOptions) -> None:
    if given.sizes and given.view is None:
        name = min(given.sizes)
        raise PlanError(f"unknown argument {quoted(name)}; sizes of atoms need a view, as in '(a b) -> b a'")
    for name, parts in (("take", given.take), ("into", given.into)):
        if not (parts is None or isinstance(parts, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f'{name} {quoted(parts)}: give a dict of atom to index or slice, such as {{"three": 0}}')
    if not (given.out is None or isinstance(given.out, jax.Array)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"out {quoted(given.out)} is a {type(given.out).__name__}; give the jax array to fill")
    placement.check_alive((given.out, given.scale))
    if bool(given.into) != (given.out is not None):
        need = "fills part of the target: give its array with out=" if given.into else "fills all of it: give no out="
        raise PlanError(f"the move of the array of shape {x.shape} {need}")


def _check_scale(what: ViewRequest, given: ViewOptions) -> None:
    """Refuses a scale without a cast, of a sum, or whose dims do not divide those of the wider array."""
    if given.scale is None:
        return
    if what.dtype == what.target_dtype:
        raise PlanError(f"scale {quoted(given.scale)}: the move casts nothing; give dtype=, or leave scale out")
    if what.before.spec.unreduced:
        raise PlanError(f"the source {what.before.spec} is a sum; finish it first, then scale and cast it")
    try:
        shape = np.shape(given.scale)
    except ValueError as error:
        raise PlanError(f"scale {quoted(given.scale)}: {error}; give a number or an array of numbers") from None
    narrows = _narrows(what)
    if what.view.into and not narrows and any(size > 1 for size in shape):
        raise PlanError(f"a scale of shape {shape} for an array that fills part of another: give one number")
    check_scale(shape, what.view.source_shape if narrows else what.view.target_shape)


def _narrows(what: ViewRequest) -> bool:
    return dtypes.bits(what.target_dtype) < dtypes.bits(what.dtype)


def _scale_on(there: NamedSharding, scale: Any) -> jax.Array:
    """The scale on all devices of a mesh."""
    target = NamedSharding(there.mesh, PartitionSpec())
    if isinstance(scale, jax.Array) and not placement.is_unsharded(scale):
        return move_now(scale, ReshardRequest(target))
    values = np.asarray(scale)
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    shards = [jax.device_put(values.astype(dtype), device) for device in target.addressable_devices]
    return jax.make_array_from_single_device_arrays(values.shape, target, shards, dtype=dtype)


def _view(shape: tuple[int, ...], given: ViewOptions, sharding: object) -> View:
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


def _target(aval: Any, sharding: Any, before: NamedSharding) -> NamedSharding:
    if not isinstance(sharding, NamedSharding):
        with_mesh = sharding.to_jax(before.mesh) if isinstance(sharding, Layout) else sharding
        if isinstance(with_mesh, jax.sharding.PartitionSpec):
            with_mesh = NamedSharding(before.mesh, with_mesh)
        sharding = with_mesh
    return placement.resolve(sharding, aval, "target")


@lru_cache(maxsize=1024)
def _plan(what: ViewRequest, budget: int | None, network: Network | str | None) -> Plan:
    before, after, view = what.before, what.after, what.view
    ids = orders_differ(before, after)
    source = placement.layout_of(before, view.source_shape, what.dtype, ids=ids)
    target = placement.layout_of(after, view.target_shape, what.target_dtype, ids=ids)
    made = best_plan_on(after.mesh, Move(source, target, view, cast=True), network, budget)
    platform = placement.platform_of(after.mesh)
    if platform == "cpu" or budget is not None:
        return made
    return on_jax.in_parts(made, overlap=platform == "gpu", lanes=platform == "tpu")


def _existing(what: ViewRequest, out: jax.Array | None) -> jax.Array | None:
    """The target's array before a move that fills part of it, on the target's sharding."""
    if out is None or isinstance(out, Tracer):
        return out
    return move_now(out, ReshardRequest(what.after)) if placement.is_spread(out) else put(out, what.after, donate=False)


@lru_cache(maxsize=1024)
def _compiled(made: Plan, what: ViewRequest) -> Any:
    def run(x: jax.Array, out: jax.Array | None, scale: jax.Array | None) -> jax.Array:
        return on_jax.apply(made, what.before.mesh, x, out, scale)

    return jax.jit(run, out_shardings=what.after)
