"""Moves concrete arrays: each plan runs now, small ones many to a program; or JAX places what needs no plan.

EagerMove       one array and the compiled program that moves it
prepare_move    a move, checked and planned, but not started; `mover_of` is the way of one that was made before
run_pending     starts one; `move_now` is both, for one array
put_by_jax      what JAX places itself: arrays that are not sharded yet, and targets without a layout
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from reshard.errors import BudgetError, LayoutError, MeshError, PlanError
from reshard.jax import compiled_forms, crossing, placement
from reshard.jax.agreement import agree_on_moves
from reshard.jax.placement import local_shards
from reshard.jax.request import ReshardRequest, check_even, plan_request
from reshard.jax.running import start_program, weaken_on
from reshard.lower.to_shard_map import spread_scale
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.synth.options import PlanOptions

SMALL = 256 << 10
"""An array whose tiles of source and target have at most as many bytes together moves with others in one program: its
cost is that of starting the program, not of copying it."""


@dataclass(frozen=True, eq=False)
class EagerProgram:
    """A planned move of concrete arrays of one shape, dtype and sharding; there is one object for equal moves.

    `start` takes the array; for a view or a cast also the array of which a part is filled and the scale, or None, the
    scale on the devices of `scale_on`. `together` says whether it may share a program with other moves; `host` is what
    shares one exchange with others, between CPU devices.
    """

    request: ReshardRequest
    plan: Plan
    weak: bool
    start: Callable[..., jax.Array]
    scale_on: NamedSharding
    compile_fill: Callable[[], Callable[..., jax.Array]]
    together: bool = False
    host: crossing.HostMove | None = None

    @cached_property
    def fill(self) -> Callable[..., jax.Array]:
        """`start`, which may overwrite the array of which it fills a part: one that such a part before it has made."""
        return self.compile_fill()


Beside = Callable[[EagerProgram], tuple[jax.Array | None, jax.Array | None]]
"""Makes what a move reads beside its array: the array of which a part is filled, and the scale of its cast."""


class EagerMove(NamedTuple):
    """A concrete array, what moves it, and what is then made of it: keys are moved as integers."""

    x: jax.Array
    program: EagerProgram
    wrapped: Callable[[jax.Array], jax.Array] | None = None
    beside: Beside | None = None


Pending = EagerMove | Callable[[], jax.Array]
"""A move that is not started: one that is planned, or one that JAX makes."""


def move_now(x: jax.Array, request: ReshardRequest) -> jax.Array:
    """Moves a concrete array: its actual sharding is the source, and a `source=` that contradicts it is an error."""
    return run_pending(prepare_move(x, request))


def run_pending(move: Pending) -> jax.Array:
    """Starts one move, planned or left to JAX."""
    if not isinstance(move, EagerMove):
        return move()
    x, program, wrapped, beside = move
    moved = program.start(x) if beside is None else program.start(x, *beside(program))
    if program.request.options.donate and not x.is_deleted() and moved is not x:
        x.delete()  # XLA keeps the buffer until the move has read it.
    return moved if wrapped is None else wrapped(moved)


def prepare_move(x: jax.Array, request: ReshardRequest, beside: Beside | None = None) -> Pending:
    """The move of a concrete array, checked and planned."""
    known, donate = placement.sharding_of(x), request.options.donate
    if known is None:
        if request.options.budget is None:
            return partial(put_by_jax, x, request.target, donate=donate)
        raise MeshError(
            f"the array of shape {x.shape} on {len(x.sharding.device_set)} devices, the target {request.target.spec} "
            f"on {request.target.mesh.size} (mesh {dict(request.target.mesh.shape)}): it has a "
            f"{type(x.sharding).__name__}, whose layout is not known, so jax.device_put moves it, which keeps to no "
            f"budget; leave budget out"
        )
    if request.source is not None:
        check_given_source(x, request.source, known)
    if request.plain and not donate and _has_sharding(known, request.target, x.ndim):
        return partial(put_by_jax, x, request.target, donate=False)
    near = find_device_memory(known)
    if beside is not None and near != known.memory_kind:  # What is read beside the array must follow it.
        there = NamedSharding(known.mesh, known.spec, memory_kind=near)
        moved = replace(request, source=None)
        return lambda: run_pending(prepare_move(put_by_jax(x, there, donate=donate), moved, beside))
    move = _make_mover(replace(request, source=None), known, x.shape, x.dtype, x.weak_type)(x)
    return move._replace(beside=beside) if beside is not None and isinstance(move, EagerMove) else move


@lru_cache(maxsize=4096)
def mover_of(
    aval: Any, known: NamedSharding, target: NamedSharding, options: PlanOptions
) -> Callable[[jax.Array], Pending] | None:
    """How concrete arrays of this type and sharding move, checked and planned once; None where `prepare_move` has to
    look at the array."""
    if placement.leaves_open(target) or placement.is_key_dtype(aval.dtype):
        return None
    target = placement.resolve_sharding(target, aval, "target")
    if not options.donate and _has_sharding(known, target, aval.ndim):
        same = known == target

        def stay(x: jax.Array) -> Pending:
            """What `jax.device_put` makes of an array that is where it should go, which takes it 20 us."""
            if not same:
                return partial(jax.device_put, x, target)
            if x.committed and not placement.is_tracing():
                return lambda: x
            return partial(put_by_jax, x, target, donate=False)

        return stay
    return _make_mover(ReshardRequest(target, None, options), known, aval.shape, aval.dtype, aval.weak_type)


def _make_mover(
    request: ReshardRequest, known: NamedSharding, shape: tuple[int, ...], dtype: Any, weak: bool
) -> Callable[[jax.Array], Pending]:
    """How arrays of this type and sharding move."""
    donate = request.options.donate
    near = find_device_memory(known)
    if near != known.memory_kind:  # Collectives work in the devices' own memory.
        there = NamedSharding(known.mesh, known.spec, memory_kind=near)
        return lambda x: lambda: move_now(put_by_jax(x, there, donate=donate), request)
    request = replace(request, source=known, target=on_devices(request.target, known))
    target = request.target
    if 0 in shape and request.crosses and request.plain:
        return lambda x: partial(put_by_jax, x, target, donate=donate)
    if 0 in shape and not (request.plain or request.fills):
        empty = np.zeros(request.target_shape(shape), jnp.dtype(request.target_dtype(dtype.name)))
        return lambda x: partial(put_by_jax, empty, target, donate=False)
    far = find_device_memory(target)
    if request.crosses and far != target.memory_kind:  # A memory of another kind is filled from the devices' own.
        there = NamedSharding(target.mesh, target.spec, memory_kind=far)
        program = program_of(replace(request, target=there), shape, dtype, weak)
        return lambda x: EagerMove(x, program, partial(put_by_jax, target=target, donate=False))
    program = program_of(request, shape, dtype, weak)
    return lambda x: EagerMove(x, program)


@lru_cache(maxsize=4096)
def program_of(request: ReshardRequest, shape: tuple[int, ...], dtype: Any, weak: bool) -> EagerProgram:
    """The program for arrays with this source, shape, dtype and weakness of type, which all of its processes want."""
    agree_on_moves([(request, shape, dtype.name)])
    if request.crosses:
        with placement.without_mesh(), placement.without_transfer_guard():
            plan, run = crossing.program_across(request, shape, dtype.name)
        return _over_two_meshes(plan, request, run, weak, partial(crossing.compile_across, plan, request))
    if request.options.prefer is not None and request.options.budget is None:
        # Copies between CPU devices of one process need no program: none of the forms of a plan is faster.
        by_model = program_of(replace(request, options=request.options._replace(prefer=None)), shape, dtype, weak)
        if by_model.host is not None:
            return by_model
    if request.options.budget is None or jax.process_count() == 1:
        return compile_plan(plan_request(request, shape, dtype.name), request, weak)
    # What a compiler says of a form decides it, and processes may have different ones.
    found: Plan | BudgetError
    try:
        found = plan_request(request, shape, dtype.name)
    except BudgetError as error:
        found = error
    refused = isinstance(found, BudgetError)
    agree_on_moves([(request, shape, dtype.name)], str(found) if refused else found.to_json())
    if refused:
        raise found
    return compile_plan(found, request, weak)


def compile_plan(
    plan: Plan, request: ReshardRequest, weak: bool, devices: tuple[Any, ...] | None = None
) -> EagerProgram:
    """The program that moves concrete arrays by a plan, whose devices are these by their numbers if it leads to others.

    Raises `LayoutError` for a target that does not divide the array.
    """
    source, target = request.ends
    check_even(plan.target, request)
    if request.crosses:
        compile_across = partial(crossing.compile_across, plan, request, devices)
        return _over_two_meshes(plan, request, compile_across(), weak, compile_across)
    if compiled_forms.runs_on_stack(source, target):
        reorder = partial(reordered_program, plan, source, target)
        program = _over_two_meshes(plan, request, reorder(), weak, reorder)
    else:
        program = _compile_on_one_mesh(plan, request, weak)
    # Copies between CPU devices of one process cost less than any program, and slices and permutations nothing.
    host = crossing.compile_copies(plan, request) if request.options.budget is None else None
    if host is None:
        return program
    copy = _over_two_meshes(plan, request, host, weak, program.compile_fill).start

    def start(x: jax.Array, *beside: jax.Array | None) -> jax.Array:
        return program.start(x, *beside) if placement.is_tracing() else copy(x, *beside)

    return replace(program, start=start, host=host)


def _compile_on_one_mesh(plan: Plan, request: ReshardRequest, weak: bool) -> EagerProgram:
    """The jitted program of a move whose ends list the same devices in the same order."""
    source, target = request.ends

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        return on_jax.apply_plan(plan, source.mesh, x, into, scale)

    run = compiled_forms.jit_move(plan, request.compiled_ends, weak)
    # A move gains by sharing a program if it is small, and others' tiles count against no budget.
    small = plan.source.tile_bytes + plan.target.tile_bytes <= SMALL
    sums = plan.source.partial or plan.target.partial  # JAX does not concatenate unreduced arrays.
    alone = sums or request.options.donate or (request.options.budget, request.options.prefer) != (None, None)
    together = small and request.plain and not alone

    def compile_fill() -> Callable[..., jax.Array]:
        return partial(start_program, jax.jit(moved, out_shardings=target, donate_argnums=1))

    return EagerProgram(request, plan, weak, partial(start_program, run), target, compile_fill, together)


def _over_two_meshes(
    plan: Plan,
    request: ReshardRequest,
    run: Callable[..., jax.Array],
    weak: bool,
    compile_move: Callable[..., Callable[..., jax.Array]],
) -> EagerProgram:
    """A program whose result is on another mesh; a cast takes its scale on the devices where it is made."""
    source, target = request.ends
    near = crossing.casts_before(plan) if request.crosses else bool(plan.steps) and on_jax.narrows_first(plan.steps)
    weaken = weaken_on(target) if weak and request.plain else None

    def start(x: jax.Array, *beside: jax.Array | None, run: Callable[..., jax.Array] = run) -> jax.Array:
        with placement.without_mesh(), placement.without_transfer_guard():
            moved = run(x, *beside)
            return moved if weaken is None else weaken(moved)

    def compile_fill() -> Callable[..., jax.Array]:
        return partial(start, run=compile_move(overwrites=True))

    host = run if isinstance(run, crossing.HostMove) else None
    return EagerProgram(request, plan, weak, start, source if near else target, compile_fill, host=host)


def unwrap_shard(x: jax.Array, device: Any, weak: bool) -> jax.Array:
    """An array of one shard as an array of that device alone."""
    alone = SingleDeviceSharding(device)
    whole = jax.make_array_from_single_device_arrays(x.shape, alone, local_shards(x), dtype=x.dtype)
    return weaken_on(alone)(whole) if weak else whole


@lru_cache(maxsize=256)
def find_device_memory(sharding: NamedSharding) -> str:
    """The kind of memory that is the own of the devices of a sharding."""
    return str(next(iter(sharding.device_set)).default_memory().kind)


def check_given_source(x: jax.Array, given: NamedSharding, known: NamedSharding) -> None:
    """Raises `PlanError` for a source that is not that of the array; one on an abstract mesh is on its devices."""
    there = on_devices(given, known) if given.mesh.size == known.mesh.size else given
    if not there.is_equivalent_to(known, x.ndim):
        raise PlanError(
            f"the array of shape {x.shape} is sharded as {known.spec} on mesh {dict(known.mesh.shape)}, not as the "
            f"source that is given, {given.spec} on {dict(given.mesh.shape)}; leave source out for a concrete array"
        )


@lru_cache(maxsize=4096)
def _has_sharding(source: NamedSharding, target: NamedSharding, rank: int) -> bool:
    """Whether an array already has its target sharding, in the same kind of memory."""
    if source == target:
        return True
    sums = any(s.spec.unreduced or s.spec.reduced for s in (source, target))  # JAX's comparison ignores them.
    return isinstance(target.mesh, JaxMesh) and not sums and source.is_equivalent_to(target, rank)


def on_devices(target: NamedSharding, source: NamedSharding) -> NamedSharding:
    """The target on a mesh with devices: an abstract mesh takes those of the source."""
    if isinstance(target.mesh, JaxMesh) or not isinstance(source.mesh, JaxMesh):
        return target
    if target.mesh.size != source.mesh.size:
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has {target.mesh.size} devices, not {source.mesh.size}"
        )
    devices = source.mesh.devices.reshape(tuple(target.mesh.shape.values()))
    return NamedSharding(JaxMesh(devices, target.mesh.axis_names, axis_types=target.mesh.axis_types), target.spec)


def put_by_jax(x: Any, target: Any, *, donate: bool) -> jax.Array:
    """Places an array by `jax.device_put`: one that is not sharded yet, or for a target that has no layout.

    Raises `LayoutError` for what JAX refuses.
    """
    if isinstance(target, NamedSharding) and not isinstance(target.mesh, JaxMesh) and not placement.is_tracing():
        raise MeshError(
            f"the target's mesh {dict(target.mesh.shape)} has no devices, and the array of shape {x.shape}, which is "
            f"not sharded yet, has none either; give a NamedSharding on a jax.sharding.Mesh"
        )
    if isinstance(target, NamedSharding) and target.spec.unreduced:  # device_put starts no sum.
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.sharding == target:
            return x
        whole = NamedSharding(target.mesh, PartitionSpec(*target.spec.partitions))
        return move_now(put_by_jax(x, whole, donate=donate), ReshardRequest(target))
    try:
        # In a program, `device_put` to a format leaves the array where it is, without a word; a constraint does not.
        constrain = isinstance(target, Format) and isinstance(x, Tracer)
        placed = jax.lax.with_sharding_constraint(x, target) if constrain else jax.device_put(x, target, donate=donate)
    except (TypeError, ValueError, OverflowError) as error:
        if "evenly" in str(error):
            raise LayoutError(
                f"JAX makes no uneven tiles of an array of shape {x.shape}, as {getattr(target, 'spec', target)} asks "
                f"for: {error}; pad its dims to sizes that their axes divide, or leave them whole"
            ) from None
        raise LayoutError(f"JAX refuses the move to {target}: {error}") from None
    if donate and placed is not x and isinstance(x, jax.Array) and not isinstance(x, Tracer):
        discard_donated(x, [placed])
    return placed


def discard_donated(x: jax.Array, results: Iterable[jax.Array]) -> None:
    """Deletes a donated array, unless a result shares its memory."""

    def shards_of_numbers(array: jax.Array) -> list[jax.Array]:  # Of random keys, the integers that they consist of.
        return local_shards(jax.random.key_data(array) if placement.is_key_dtype(array.dtype) else array)

    buffers = {shard.unsafe_buffer_pointer() for array in results for shard in shards_of_numbers(array)}
    if not x.is_deleted() and not any(shard.unsafe_buffer_pointer() in buffers for shard in shards_of_numbers(x)):
        x.delete()


# Moves with a view between meshes that list the same devices in another order, such as a transposed one.
#
#     source on devices 0 1 2 3   the steps, one program on this mesh      a stack of the target's tiles
#     target on devices 3 1 2 0   the tiles are its shards as they are     the result
#
# A jitted program has one order of devices, so the steps run on the source's mesh. What they read by the target's
# tiles, the array of which a part is filled and the scale of a cast at the end, is handed to it as shards in the same
# way.


@lru_cache(maxsize=1024)
def reordered_program(
    whole: Plan, source: NamedSharding, target: NamedSharding, *, overwrites: bool = False
) -> Callable[..., jax.Array]:
    """The compiled move; beside the array it takes the array of which a part is filled, which it may overwrite, and the
    scale of a cast.

    The scale is on all devices of the source's mesh if the first step casts, else of the target's.
    """
    mesh = source.mesh
    if not isinstance(mesh, JaxMesh):
        raise MeshError(f"the source's mesh {dict(mesh.shape)} has no devices; give a NamedSharding on a mesh of them")
    run = on_jax.compile_to_stack(whole.source, whole.steps, mesh, overwrites)
    first = bool(whole.steps) and on_jax.narrows_first(whole.steps)
    goal = whole.target
    scalar = not goal.shape

    def stack_of(x: jax.Array, tile: tuple[int, ...]) -> jax.Array:
        """The shards of an array on the target's mesh as a stack on the source's."""
        shape = (goal.mesh.size * tile[0], *tile[1:]) if tile else ()
        sharding = NamedSharding(mesh, on_jax.spell_stack_spec(mesh, goal))
        return jax.make_array_from_single_device_arrays(shape, sharding, local_shards(x), dtype=x.dtype)

    def moved(x: jax.Array, into: jax.Array | None = None, scale: jax.Array | None = None) -> jax.Array:
        tiles: dict[str, jax.Array] = {}
        if into is not None:
            tiles["into"] = stack_of(into, goal.tile_shape)
        if scale is not None and not first:
            # The steps run on the source's mesh and read the scale by the target's tiles: each device gets its part.
            blocks, held = spread_scale(scale, goal, target.spec)
            parts = jax.jit(jnp.asarray, out_shardings=NamedSharding(placement.of_auto_axes(target.mesh), held))(blocks)
            tiles["scale"] = stack_of(parts, () if scalar else parts.sharding.shard_shape(parts.shape))
        stack = start_program(run, x, scale if first else None, tiles)
        return jax.make_array_from_single_device_arrays(goal.shape, target, local_shards(stack), dtype=stack.dtype)

    return moved
