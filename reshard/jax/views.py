"""Moves with a view or a cast of JAX arrays: `redistribute(x, sharding, view=...)`.

concrete      a compiled program for each source, target and view
traced        the same program's operations, whose derivatives are those of reshapes, slices and permutes
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from reshard.errors import LayoutError, MeshError, PlanError, quoted
from reshard.jax import placement
from reshard.jax.platform_network import network_of_mesh
from reshard.jax.primitive import pinned
from reshard.jax.request import orders_differ
from reshard.runtime import on_jax
from reshard.synth import Network, plan
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.notation import einops
from reshard.types.plan import Plan
from reshard.types.view import View


class ViewOptions(NamedTuple):
    """What a call says beside the array and the sharding."""

    view: str | None
    take: Mapping[Any, Any] | None
    into: Mapping[Any, Any] | None
    out: jax.Array | None
    dtype: Any
    sizes: Mapping[str, int]

    @property
    def plain(self) -> bool:
        """Whether the array, its dims and its dtype stay as they are."""
        return self == ViewOptions(None, None, None, None, None, {})


def moved(x: Any, sharding: Any, source: Any, given: ViewOptions, options: Mapping[str, Any]) -> jax.Array:
    """Moves one array by a view, a part or a cast.

    Raises `PlanError` for a tree of arrays or an unknown source, and what `Move` raises.
    """
    if not isinstance(x, jax.Array) or placement.is_key_dtype(x.dtype):
        raise PlanError(f"{quoted(x)} is a {type(x).__name__}; a view is of one jax array of numbers")
    _check_options(x, given)
    before = placement.resolve(source, x, "source") if source is not None else placement.sharding_of(x)
    if before is None:
        raise PlanError(f"the sharding of the array of shape {x.shape} is not known while it is traced; give source=")
    view = _view(x.shape, given, sharding)
    dtype = x.dtype if given.dtype is None else jax.numpy.dtype(dtypes.canonical(given.dtype))
    after = _target(jax.ShapeDtypeStruct(view.target_shape, dtype), sharding, before)
    if orders_differ(before, after) or before.mesh.size != after.mesh.size:
        raise MeshError(
            f"source {before.spec} on {dict(before.mesh.shape)}, target {after.spec} on {dict(after.mesh.shape)}: the "
            f"two have other devices, or list them in another order; move the array there first, then by its view"
        )
    made = _plan(before, after, view, x.dtype.name, dtype.name, options["budget"], options["network"])
    out = _existing(made, given.out, after)
    if isinstance(x, Tracer) or placement.manual_mesh() is not None:
        with placement.without_context_mesh():
            return pinned(on_jax.apply(made, placement.manual_mesh() or before.mesh, x, out), after)
    if not made.target.even:
        raise LayoutError(f"the target {after.spec} does not divide {view.target_shape}: pad it, or move it under jit")
    run = _compiled(made, before, after)
    with placement.without_context_mesh():
        result = run(x) if out is None else run(x, out)
    if options["donate"]:
        x.delete()  # XLA keeps the buffer until the move has read it.
    return result


def _check_options(x: jax.Array, given: ViewOptions) -> None:
    if given.sizes and given.view is None:
        name = min(given.sizes)
        raise PlanError(f"unknown argument {quoted(name)}; sizes of atoms need a view, as in '(a b) -> b a'")
    for name, parts in (("take", given.take), ("into", given.into)):
        if not (parts is None or isinstance(parts, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f'{name} {quoted(parts)}: give a dict of atom to index or slice, such as {{"three": 0}}')
    if not (given.out is None or isinstance(given.out, jax.Array)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"out {quoted(given.out)} is a {type(given.out).__name__}; give the jax array to fill")
    if bool(given.into) != (given.out is not None):
        need = "fills part of the target: give its array with out=" if given.into else "fills all of it: give no out="
        raise PlanError(f"the move of the array of shape {x.shape} {need}")


def _view(shape: tuple[int, ...], given: ViewOptions, sharding: object) -> View:
    """The view of a call, whose target has the shape of `out`, or of a layout, or the one that follows."""
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
def _plan(
    before: NamedSharding,
    after: NamedSharding,
    view: View,
    dtype: str,
    target_dtype: str,
    budget: int | None,
    network: Network | str | None,
) -> Plan:
    source = placement.layout_of(before, view.source_shape, dtype)
    target = placement.layout_of(after, view.target_shape, target_dtype)
    made = plan(Move(source, target, view, cast=True), None, budget, network_of_mesh(after.mesh, network))
    if placement.platform_of(after.mesh) == "cpu" or budget is not None:
        return made
    return on_jax.in_parts(made)


def _existing(made: Plan, out: jax.Array | None, after: NamedSharding) -> jax.Array | None:
    """The target's array before a move that fills part of it, on the target's sharding."""
    if out is None:
        return None
    if (out.shape, out.dtype.name) != (made.target.shape, made.target.dtype):
        raise PlanError(f"out is {out.dtype.name}{list(out.shape)}, the target {made.target}; give one like the target")
    return out if isinstance(out, Tracer) else jax.device_put(out, after)


@lru_cache(maxsize=1024)
def _compiled(made: Plan, before: NamedSharding, after: NamedSharding) -> Any:
    def run(x: jax.Array, out: jax.Array | None = None) -> jax.Array:
        return on_jax.apply(made, before.mesh, x, out)

    fills = made.view is not None and made.view.into
    shardings = cast("Any", (before, after) if fills else (before,))
    return jax.jit(run, in_shardings=shardings, out_shardings=after)
