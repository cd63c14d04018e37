"""Moves with a view or a cast of JAX arrays: `redistribute(x, sharding, view=...)`.

read_jax_view  what a call asks for, checked: a `ReshardRequest` like that of any move
prepare_view   a concrete array's move, by `eager`; or that of a traced one, whose derivatives are those of reshapes,
               slices and permutes
prepare_parts  the same of several arrays that fill one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from reshard.errors import MeshError, NamedErrors, NotationError, PlanError, quoted
from reshard.geometry.cover import find_overlap, find_uncovered
from reshard.geometry.detect import as_layout
from reshard.jax import placement
from reshard.jax.agreement import agree_on_moves
from reshard.jax.eager import (
    EagerMove,
    EagerProgram,
    Pending,
    check_given_source,
    discard_donated,
    find_device_memory,
    move_now,
    on_devices,
    prepare_move,
    program_of,
    put_by_jax,
    run_pending,
)
from reshard.jax.placement import Target, ViewOptions
from reshard.jax.request import ReshardRequest, plan_request
from reshard.jax.running import start_program
from reshard.jax.traced import pin_sharding
from reshard.lower.to_shard_map.run_program import check_scale
from reshard.runtime import on_jax
from reshard.synth.options import PlanOptions
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.move import refuse_sizes
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


def read_jax_view(
    x: Any, sharding: Any, source: Any, given: ViewOptions, options: PlanOptions, *, part: bool = False
) -> ReshardRequest:
    """What a call asks for one array, checked; its source is known. A `part` is one of several that fill a target."""
    if not isinstance(x, jax.Array) or placement.is_key_dtype(x.dtype):
        raise PlanError(
            f"{quoted(x)} is a {type(x).__name__}; a view is of one jax array of numbers; for a tree of them give "
            f"reshard.jax.Target(sharding, view=...) for each leaf"
        )
    _check_view_options(x, given, part)
    known = placement.sharding_of(x)
    before = known if source is None else placement.resolve_sharding(source, x, "source")
    if before is None:
        raise PlanError(f"the sharding of the array of shape {x.shape} is not known while it is traced; give source=")
    if source is not None and known is not None and not isinstance(x, Tracer):
        check_given_source(x, before, known)
        before = known  # A source on an abstract mesh has no devices.
    if isinstance(sharding, str):
        sharding = as_layout(sharding, before.mesh, given.shape, x.dtype if given.dtype is None else given.dtype)
    # The target has the shape that is given, of `out`, or of a layout, or the one that follows from the pattern.
    filled = given.out if given.out is not None else sharding if isinstance(sharding, Layout) else None
    shape = given.shape if given.shape is not None or filled is None else filled.shape
    moves = given.view is not None or given.take or given.into
    view = resolve_given_view(given, x.shape, shape)
    dtype = x.dtype if given.dtype is None else jnp.dtype(dtypes.canonical(given.dtype))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise PlanError(f"the dtype {dtype} is one that JAX has with jax.config.update('jax_enable_x64', True) alone")
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


_Given = tuple[tuple[str, type, Any], ...]


def resolve_given_view(given: ViewOptions, shape: tuple[int, ...], target: tuple[int, ...] | None) -> View:
    """The view that a caller gave for an array of this shape, to one of the `target` shape if that is known."""
    if isinstance(given.view, View):
        view = given.view
        if view.source_shape != shape or target not in (None, view.target_shape):
            raise PlanError(
                f"the view {view} leads from shape {view.source_shape} to {view.target_shape}, the array has {shape}"
                f"{'' if target is None else f' and the target {target}'}; give the view of these"
            )
        return view
    if given.view is None and not given.take and not given.into:
        return View.identity(shape)
    named = given.view is not None  # Without a pattern, the atoms are dims: `take={0: ...}` is of `d0`.
    dims = " ".join(f"d{at}" for at in range(len(shape)))
    text = given.view if given.view is not None else f"{dims} -> {dims}"
    take, into = (
        tuple([(name if named else f"d{name}", type(part), part) for name, part in (parts or {}).items()])
        for parts in (given.take, given.into)
    )
    sizes = tuple([(name, type(size), size) for name, size in given.sizes.items()])
    try:
        return _resolve_jax_view(text, shape, target, sizes, take, into)
    except TypeError:  # An unhashable argument cannot be a key of the cache: it is refused, or read anew.
        return _resolve_jax_view.__wrapped__(text, shape, target, sizes, take, into)


@lru_cache(maxsize=4096)
def _resolve_jax_view(
    text: str, shape: tuple[int, ...], target: tuple[int, ...] | None, sizes: _Given, take: _Given, into: _Given
) -> View:
    """The view of a pattern; what is given comes with its types, since `True` equals 1 and is refused."""
    given = ({name: value for name, _, value in each} for each in (sizes, take, into))
    return einops.resolve_pattern(einops.parse_pattern(text), (shape, target), *given)


# Several arrays that fill one.
#
#     q, k, v on one set of devices    one program: each plan writes its part of the tiles, which nothing filled before
#     on CPUs of this process          copies into one memory, those of all parts in one list (`run_moves`)
#     on others, or in another order   part after part, each by its own program


class PartMove(NamedTuple):
    """An array that fills a part of a target, what is asked of it, and what it needs beside."""

    x: Any
    request: ReshardRequest
    given: ViewOptions


def read_parts(
    name: str, arrays: Sequence[Any], target: Target, sources: Sequence[Any], options: Sequence[PlanOptions]
) -> list[PartMove]:
    """What is asked of each array that fills a part of the target of this name, checked: all together fill all of it.

    Raises `PlanError` for parts that overlap or leave something out, or of different dtypes.
    """
    out, dtype = target.options.out, target.options.dtype
    kinds = {str(each.dtype): part.source for each, part in zip(arrays, target.parts, strict=True)}
    if dtype is None and out is None and len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        raise PlanError(f"the target {name!r}: {first!r} has dtype {one} and {second!r} {other}; give dtype=")
    moves: list[PartMove] = []
    for part, x, source, its in zip(target.parts, arrays, sources, options, strict=True):
        kind = dtype if dtype is not None or out is None else out.dtype
        given = replace(part.options, out=out, dtype=kind, shape=target.options.shape)
        with NamedErrors(f"the target {name!r}, part {part.source!r}"):
            try:
                moves.append(PartMove(x, read_jax_view(x, target.sharding, source, given, its, part=True), given))
            except NotationError as error:
                hint = "; or give shape=, that of the target" if given.shape is None else ""
                raise NotationError(f"{error}{hint}") from None
    ends = {(move.request.target, move.request.target_shape(move.x.shape)) for move in moves}
    if len(ends) > 1:
        shown = " and ".join(f"{list(shape)} on {end.spec} of {dict(end.mesh.shape)}" for end, shape in list(ends)[:2])
        raise PlanError(f"the target {name!r}: its parts lead to {shown}; give shape= and a NamedSharding")
    views = tuple(request.view or View.identity(x.shape) for x, request, _ in moves)
    check_parts_cover(name, [part.source for part in target.parts], views, complete=out is None)
    return moves


def check_parts_cover(name: str, sources: Sequence[str], views: Sequence[View], *, complete: bool) -> None:
    """Raises `PlanError` for parts of a target that overlap, or where all of it must be filled leave something out."""
    shape = list(views[0].target_shape)
    overlap = find_overlap(tuple(views))
    if overlap is not None:
        one, other = (f"{at} ({sources[at]!r})" for at in overlap[:2])
        raise PlanError(
            f"the target {name!r} of shape {shape}: its parts {one} and {other} both fill element {list(overlap[2])}; "
            f"give parts that do not overlap"
        )
    missing = find_uncovered(tuple(views)) if complete else None
    if missing is not None:
        count = sum(math.prod(atom.size for atom in view.atoms) for view in views)
        raise PlanError(
            f"the target {name!r} of shape {shape}: no part fills element {list(missing)}; its parts fill {count} of "
            f"{math.prod(shape)} elements, so give the part that is missing, or out= the array that has the rest"
        )


def prepare_parts(moves: Sequence[PartMove], inside: bool) -> list[Pending]:
    """The moves of several arrays that fill one, checked and planned; concrete ones do not move yet.

    They are one, unless they are to be run as moves with one number (`run_moves`).
    """
    if inside:
        return [partial(_fill_traced, moves)]
    # Programs work in the devices' own memory: what is in another one is brought there, and the result back.
    target = on_devices(moves[0].request.target, moves[0].x.sharding)
    there = target.with_memory_kind(find_device_memory(target))
    near = [move.x.sharding.with_memory_kind(find_device_memory(move.x.sharding)) for move in moves]
    requests = [replace(each.request, source=at, target=there) for each, at in zip(moves, near, strict=True)]
    programs = [
        program_of(request, x.shape, x.dtype, x.weak_type) for request, (x, _, _) in zip(requests, moves, strict=True)
    ]
    # Written into the target's memory by copies of this process, which nothing follows.
    copied = all(each.host is not None and each.host.join is not None for each in programs)
    if copied and there == target and near == [move.x.sharding for move in moves]:
        each = zip(moves, programs, strict=True)
        return [EagerMove(move.x, program, None, partial(place_beside, move.given)) for move, program in each]
    fill = fill_in_turn if any(each.crosses or each.reorders for each in requests) else fill_together

    def filled() -> jax.Array:
        brought = [
            move
            if move.x.sharding == at
            else move._replace(x=put_by_jax(move.x, at, donate=move.request.options.donate))
            for move, at in zip(moves, near, strict=True)
        ]
        made = fill(brought, programs)
        return made if there == target else put_by_jax(made, target, donate=True)

    return [filled]


def fill_together(moves: Sequence[PartMove], programs: Sequence[EagerProgram]) -> jax.Array:
    """The target of several arrays on its devices, filled by one program."""
    scales = [place_beside(move.given, each)[1] for move, each in zip(moves, programs, strict=True)]
    out = _place_out(moves[0].given.out, programs[0].request.target)
    made = start_program(_parts_program(tuple(programs)), [move.x for move in moves], scales, out)
    for move in moves:
        if move.request.options.donate and not move.x.is_deleted():
            move.x.delete()
    return made


@lru_cache(maxsize=1024)
def _parts_program(programs: tuple[EagerProgram, ...]) -> Callable[..., jax.Array]:
    """The program in which several arrays fill one."""
    agree_on_moves([(each.request, each.plan.source.shape, each.plan.source.dtype) for each in programs], "into one")

    def filled(arrays: list[jax.Array], scales: list[jax.Array | None], out: jax.Array | None) -> jax.Array:
        for number, (each, x, scale) in enumerate(zip(programs, arrays, scales, strict=True)):
            source, _ = each.request.ends
            if number:  # Else XLA would start all parts at once, and keep the messages of all.
                x, out = lax.optimization_barrier((x, out))
            out = on_jax.make_unfilled_array(each.plan.target, source.mesh) if out is None else out
            out = on_jax.apply_plan(each.plan, source.mesh, x, out, scale)
        assert out is not None
        return out

    return jax.jit(filled, out_shardings=programs[0].request.target)


def fill_in_turn(moves: Sequence[PartMove], programs: Sequence[EagerProgram]) -> jax.Array:
    """The target of several arrays, filled by a program for each."""
    filled = None
    for move, program in zip(moves, programs, strict=True):
        filled = fill_part(move, program, filled)
        if move.request.options.donate and not move.x.is_deleted():
            move.x.delete()
    assert filled is not None
    return filled


def fill_part(move: PartMove, program: EagerProgram, filled: jax.Array | None) -> jax.Array:
    """The target with one more part, which may be in the memory of what is `filled` so far: None before the first."""
    out, scale = place_beside(move.given, program)
    if filled is None and out is not None:
        return program.start(move.x, out, scale)  # The caller's, and still so when the move is over.
    copied = program.request.crosses and program.host is not None and program.host.join is not None
    if filled is None and not copied:
        goal, target = program.plan.target, program.request.target
        dtype = jnp.dtype(goal.dtype)
        here = bool(target.addressable_devices)
        filled = (
            jnp.zeros(goal.shape, dtype, device=target)
            if here
            else jax.make_array_from_single_device_arrays(goal.shape, target, [], dtype=dtype)
        )
    return program.fill(move.x, filled, scale)


def _fill_traced(moves: Sequence[PartMove]) -> jax.Array:
    """The move of several arrays into one inside a trace."""
    filled = None
    for x, request, given in moves:
        _, after = request.ends
        if filled is None and given.out is None:
            mesh = placement.manual_mesh() or request.ends[0].mesh
            with placement.without_context_mesh():
                goal = placement.layout_of(after, request.target_shape(x.shape), request.target_dtype(x.dtype.name))
                filled = on_jax.make_unfilled_array(goal, mesh)
        elif filled is not None:
            x, filled = lax.optimization_barrier((x, filled))  # As in `_parts_program`.
        filled = _move_traced(x, request, given if filled is None else replace(given, out=filled))
    assert filled is not None
    return filled


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


def _check_view_options(x: jax.Array, given: ViewOptions, part: bool) -> None:
    if given.sizes and given.view is None:
        options = ("source", "budget", "network", "donate", "prefer", "have", "changed")
        refuse_sizes(given.sizes, (*options, *(each.name for each in fields(ViewOptions))))
    if isinstance(given.view, View) and (given.sizes or given.take or given.into):
        raise PlanError(f"the view {given.view} has its sizes and parts already; give take, into and sizes with text")
    for name, parts in (("take", given.take), ("into", given.into)):
        if not (parts is None or isinstance(parts, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f'{name} {quoted(parts)}: give a dict of atom to index or slice, such as {{"three": 0}}')
    if not (given.out is None or isinstance(given.out, jax.Array)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"out {quoted(given.out)} is a {type(given.out).__name__}; give the jax array to fill")
    placement.check_not_deleted((given.out, given.scale))
    if not part and given.fills != (given.out is not None):
        need = (
            "fills part of the target: give its array with out=, or reshard.jax.Target(..., parts=[...]) for all of it"
            if given.fills
            else "fills all of it: give no out="
        )
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
    if given.fills and not narrows and any(size > 1 for size in shape):
        raise PlanError(f"a scale of shape {shape} for an array that fills part of another: give one number")
    check_scale(shape, x.shape if narrows else request.target_shape(x.shape))
