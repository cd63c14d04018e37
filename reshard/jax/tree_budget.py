"""Trees within a budget: all leaves as one plan, whose peak counts every source, result and buffer at once.

    leaves     what is moved by a plan, and what JAX places itself: that counts from the start
    tree       the plan of all (`reshard.plan_tree`), whose peak on XLA is within the budget
    run        batch after batch, each finished and its donated sources freed before the next one starts

Every program is made before the first one starts, so that what cannot be done moves nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding

from reshard.errors import BudgetError, LayoutError, MeshError, NamedErrors
from reshard.jax import compiled_forms, placement
from reshard.jax.agreement import agree_on_moves
from reshard.jax.eager import (
    EagerMove,
    EagerProgram,
    compile_plan,
    discard_donated,
    on_devices,
    run_pending,
    unwrap_shard,
)
from reshard.jax.placement import ArrayGoal, Target, ViewOptions, devices_of
from reshard.jax.request import UNLIMITED, ReshardRequest, number_devices, numbered_move, options_on
from reshard.jax.running import start_program, weaken_on
from reshard.jax.view_moves import PartMove, fill_part, place_beside, read_jax_view, read_parts
from reshard.plans.plan import Batch, Plan, TreePlan, device_kinds
from reshard.plans.step import Footprint, find_peaks
from reshard.runtime import on_jax
from reshard.synth import planner
from reshard.synth.options import PlanOptions

OWN = 64 << 10
"""Bytes that a program on an accelerator needs for itself."""
_TRIES = 8
_compile_alone = lru_cache(maxsize=1024)(compile_plan)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A concrete array that moves by a plan, and what is then made of its result.

    `goal` is the number of the array that it makes; `part` says that it fills a part of it.
    """

    name: str
    goal: int
    x: jax.Array
    request: ReshardRequest
    given: ViewOptions
    finish: Callable[[jax.Array], jax.Array] | None = None
    part: bool = False


def joint_moves(
    names: Sequence[str],
    leaves: Sequence[Any],
    goals: Sequence[ArrayGoal],
    place: Callable[[int], Any],
    options: PlanOptions,
) -> list[jax.Array]:
    """Makes all that is asked for within the budget of the options, all together; `place` makes what no plan does.

    Raises `BudgetError` with the smallest budget that works, before anything moves.
    """
    taken: Counter[str] = Counter()
    made: list[Leaf] = []
    others: list[int] = []
    for at, goal in enumerate(goals):
        found = _read_goal(at, goal, goal.name or names[goal.reads[0]], leaves)
        # Two paths may be joined to one name, and moves are known by theirs.
        taken.update(leaf.name for leaf in found)
        made += [replace(leaf, name=f"{leaf.name} {n}") if (n := taken[leaf.name]) > 1 else leaf for leaf in found]
        others += [] if found else [at]
    # What JAX places counts from the start: its bytes on the busiest device, before and after.
    held: Counter[Any] = Counter()
    for at in others:
        x = leaves[goals[at].reads[0]]
        target = placement.unwrap_target(goals[at].target, x)
        aval = x if isinstance(x, jax.Array) else jax.typeof(x)
        itemsize = 4 if placement.is_key_dtype(aval.dtype) else aval.dtype.itemsize
        device = placement.one_device(target)
        sharding = placement.resolve_sharding(target, aval, "target") if placement.has_layout(target) else None
        if device is not None:
            held[device] += math.prod(aval.shape) * itemsize
        elif sharding is not None and isinstance(sharding.mesh, JaxMesh):
            held.update(dict.fromkeys(sharding.device_set, math.prod(sharding.shard_shape(aval.shape)) * itemsize))
        if isinstance(x, jax.Array):
            held.update({shard.device: shard.data.nbytes for shard in x.addressable_shards})
    # What parts are filled of stays with the caller, beside what is made of it.
    for out in {id(leaf.given.out): leaf.given.out for leaf in made}.values():
        held.update({} if out is None else {shard.device: shard.data.nbytes for shard in out.addressable_shards})
    moved: dict[int, jax.Array] = {}
    runs = _compile_tree(made, max(held.values(), default=0), options, moved)
    moved |= {at: place(at) for at in others}
    for run in runs:
        run()
    return [moved[at] for at in range(len(goals))]


def _read_goal(at: int, goal: ArrayGoal, name: str, leaves: Sequence[Any]) -> list[Leaf]:
    """What plans move for one goal, checked; nothing for what JAX places."""
    arrays, target = [leaves[read] for read in goal.reads], goal.target
    if not (isinstance(target, Target) and target.parts):
        leaf = _read_leaf(name, at, arrays[0], target)
        return [] if leaf is None else [leaf]
    parts = read_parts(name, arrays, target, [None] * len(arrays), [UNLIMITED] * len(arrays))
    for _, request, _ in parts:
        _check_ends(name, request)
    sources = [part.source for part in target.parts]
    return [
        Leaf(f"{name} from {source}", at, x, request, given, part=True)
        for source, (x, request, given) in zip(sources, parts, strict=True)
    ]


def _read_leaf(name: str, at: int, x: Any, target: Any) -> Leaf | None:
    """What a plan moves, checked; None for what JAX places."""
    given = target.options if isinstance(target, Target) else ViewOptions()
    sharding = placement.unwrap_target(target, x)
    device = placement.one_device(sharding)
    alone = device is not None and given.plain and placement.is_spread(x)
    if alone:
        sharding = placement.whole_on(device)
    if not isinstance(x, jax.Array) or placement.is_unsharded(x) or not placement.has_layout(sharding):
        return None
    if placement.leaves_open(sharding):
        return None
    before = placement.sharding_of(x)
    if before is None:
        raise MeshError(f"{name} has a {type(x.sharding).__name__}, whose layout is not known; leave budget out")
    sharding = on_devices(placement.resolve_sharding(sharding, x, "target"), before) if given.plain else sharding
    finish = partial(unwrap_shard, device=device, weak=False) if alone else None
    if placement.is_key_dtype(x.dtype):
        impl = jax.random.key_impl(x)
        x, finish = jax.random.key_data(x), partial(jax.random.wrap_key_data, impl=impl)
    elif x.weak_type:
        finish = partial(_weaken_result, finish)
    with NamedErrors(name):
        request = read_jax_view(x, sharding, None, given, UNLIMITED)
    _check_ends(name, request)
    shape, dtype = request.target_shape(x.shape), request.target_dtype(x.dtype.name)
    if not placement.layout_of(request.target, shape, dtype).even:
        raise LayoutError(f"{name}: the target {request.target.spec} does not divide the shape {shape}; pad the array")
    return Leaf(name, at, x, request, given, finish)


def _check_ends(name: str, request: ReshardRequest) -> None:
    for end in request.ends:
        kind = next(iter(end.device_set)).default_memory().kind
        if end.memory_kind not in (None, kind):
            raise MeshError(f"{name} is or goes to {end.memory_kind} memory, which no budget counts; leave budget out")


def _weaken_result(finish: Callable[[jax.Array], jax.Array] | None, x: jax.Array) -> jax.Array:
    there = x if finish is None else finish(x)
    return there if there.weak_type else weaken_on(there.sharding)(there)


# ---- the plan --------------------------------------------------------------------------------------


def _compile_tree(
    leaves: Sequence[Leaf], placed: int, options: PlanOptions, moved: dict[int, jax.Array]
) -> list[Callable[[], None]]:
    """The compiled batches of a tree whose peak is within the budget, in their order; they put results into `moved`."""
    budget = options.budget or 0
    if not leaves:
        if placed > budget:
            raise BudgetError(f"budget {budget} B is too small for arrays of {placed} B on a device", placed)
        return []
    agreed = [(leaf.request, leaf.x.shape, leaf.x.dtype.name) for leaf in leaves]
    agree_on_moves(agreed, f"together within {budget - placed} B, donate {options.donate}")
    numbers = number_devices(*(end.mesh for leaf in leaves for end in leaf.request.ends))
    moves = {leaf.name: numbered_move(leaf.request, numbers, leaf.x.shape, leaf.x.dtype.name) for leaf in leaves}
    cpu = all(device.platform == "cpu" for device in numbers)
    used = options_on(devices_of(leaves[0].request.target.mesh), options)
    # An array that several leaves read is one source, and one that several fill is one target.
    sources = {leaf.name: str(id(leaf.x)) for leaf in leaves}
    targets = {leaf.name: str(leaf.goal) for leaf in leaves}
    by_name = {leaf.name: leaf for leaf in leaves}

    def measure(batch: Batch) -> int | None:
        found, ends = [by_name[name] for name in batch.names], [(p.source, p.target) for p in batch.plans]
        small = sum(end.tile_bytes for pair in ends for end in pair) < compiled_forms.ASKED
        if small or not batch.steps or not _runs_together(found):
            return None
        before, after = zip(*(leaf.request.ends for leaf in found), strict=True)
        return _compile_peak(batch.plans, before, after)

    try:
        limited = used._replace(budget=budget - placed)
        tree = bounded_tree(moves, limited, 0 if cpu else OWN, sources, targets, measure)
    except BudgetError as error:
        if not placed:
            raise
        text = f"{error}, beside {placed} B of arrays that JAX places"
        raise BudgetError(text, error.smallest + placed) from None
    spare = budget - placed - xla_peak_bytes(tree)
    uses = Counter(id(leaf.x) for leaf in leaves)
    made_of: dict[int, list[jax.Array]] = {}
    return [
        _compile_batch(
            batch, [by_name[name] for name in batch.names], tuple(numbers), spare, options.donate, uses, made_of, moved
        )
        for batch in tree.batches
    ]


def bounded_tree(
    moves: Mapping[str, Any],
    options: PlanOptions,
    own: int = 0,
    sources: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
    measure: Callable[[Batch], int | None] | None = None,
) -> TreePlan:
    """The plans of a tree whose peak on XLA is within the budget; XLA allocates results before it runs anything.

    `sources` and `targets` name the arrays that moves share, as in `reshard.plan_tree`. `measure` asks the compiler
    about the batches of trees that fit without it, see `xla_peak_bytes`.
    """
    find_tree_plan = partial(planner.find_tree_plan, moves, sources=sources, targets=targets)
    budget = options.budget or 0
    room, least, needed = budget, 0, budget
    for _ in range(_TRIES):
        try:
            tree = find_tree_plan(options=options._replace(budget=max(room, least)))
        except BudgetError as error:
            needed = xla_peak_bytes(find_tree_plan(options=options._replace(budget=error.smallest)), own, measure)
            if needed <= error.smallest:
                raise
            break
        needed = xla_peak_bytes(tree, own)
        if needed <= budget and measure is not None:
            needed = xla_peak_bytes(tree, own, measure)
        if needed <= budget:
            return tree
        if room <= least:
            break
        # The next try leaves room for what XLA needs beyond the plan's own peak, down to the least that plans need.
        room = min(room, tree.peak_bytes) - (needed - budget)
        try:
            least = find_tree_plan(options=options._replace(budget=0)).peak_bytes
        except BudgetError as error:
            least = error.smallest
    text = f"budget {budget} B is too small for {len(moves)} arrays; with what XLA needs, {needed} B work"
    raise BudgetError(text, needed)


def xla_peak_bytes(tree: TreePlan, own: int = 0, measure: Callable[[Batch], int | None] | None = None) -> int:
    """The tree's peak bytes on XLA: while a batch runs, its results are live from the start, and `own` bytes of XLA's.

    `measure` says what a batch needs as it is compiled, its sources and results included; None where a model decides.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> tree = rs.plan_tree({"a": (rows, whole)})
    >>> xla_peak_bytes(tree) == tree.peak_bytes
    True
    """
    kinds = device_kinds(tree.plans.values())
    arrays = tree.arrays.within(tree.batches)
    live, shown = arrays.live_bytes(kinds), list[Footprint]()
    for batch in tree.batches:
        # Beside a batch's own buffers: the results that it makes before the last step, and the larger of two shared
        # buffers twice, because a TPU gives packed blocks another layout in memory than tiles.
        ends = [arrays.ends_of(name)[1] for name in batch.names]
        made = {end: plan.target.tile_bytes for end, plan in zip(ends, batch.plans, strict=True)}
        early = own
        if len(batch.steps) > 1:
            early += sum(nbytes for end, nbytes in made.items() if end not in arrays.there)
        if len(batch.plans) > 1:
            differ = (abs(sum(s.result.tile_bytes - s.operand.tile_bytes for s in steps)) for steps in batch.steps)
            early += max(differ, default=0)
        needed = arrays.run(batch, kinds)
        compiled = measure(batch) if measure is not None and kinds.count == 1 else None
        during = tuple(nbytes + early for nbytes in needed.during) if compiled is None else (compiled,)
        shown.append(needed._replace(during=during))
    return max(find_peaks(shown, live=live))


# ---- what runs -------------------------------------------------------------------------------------


def _compile_batch(
    batch: Batch,
    leaves: Sequence[Leaf],
    devices: tuple[Any, ...],
    spare: int,
    donate: bool,
    uses: Counter[int],
    made_of: dict[int, list[jax.Array]],
    moved: dict[int, jax.Array],
) -> Callable[[], None]:
    """A batch, compiled: one program where it can be, else the plan of each of its arrays, one after another."""
    together = _runs_together(leaves)
    sources, targets = zip(*(leaf.request.ends for leaf in leaves), strict=True)
    programs: list[EagerProgram] = []
    for plan, leaf in zip(() if together else batch.plans, leaves, strict=not together):
        # What crosses sends messages within the budget, and frees a donated source as it goes; of other moves the
        # source is freed when the batch is done, since results may share its memory.
        once = donate and uses[id(leaf.x)] == 1
        limits = PlanOptions(plan.peak_bytes + spare, donate=once) if leaf.request.crosses else UNLIMITED
        programs.append(_compile_alone(plan, replace(leaf.request, options=limits), False, devices))

    def run() -> None:
        arrays = [leaf.x for leaf in leaves]
        results: Sequence[jax.Array]
        if not together:
            results = []
            for leaf, program in zip(leaves, programs, strict=True):
                if leaf.part:
                    result = fill_part(PartMove(leaf.x, leaf.request, leaf.given), program, moved.get(leaf.goal))
                    moved[leaf.goal] = result
                else:
                    beside = None if leaf.request.plain else partial(place_beside, leaf.given)
                    result = run_pending(EagerMove(leaf.x, program, None, beside))
                results.append(result.block_until_ready())
        elif batch.steps:
            results = start_program(_batch_program(batch.plans, sources, targets), *arrays)
        else:  # They are where they should go.
            results = [jax.device_put(x, target) for x, target in zip(arrays, targets, strict=True)]
        # What a part has filled may be gone, into the memory of what a later one has.
        results = [moved[leaf.goal] if leaf.part else x for leaf, x in zip(leaves, results, strict=True)]
        jax.block_until_ready(results)  # Two batches at once would need the buffers of both.
        for x, result in zip(arrays, results, strict=True):
            uses[id(x)] -= 1
            made = [result]
            if uses[id(x)] or id(x) in made_of:  # Any of its results may have its memory, those before as well.
                made = made_of.setdefault(id(x), [])
                made.append(result)
            if donate and not uses[id(x)] and not x.is_deleted() and not any(one is x for one in made):
                discard_donated(x, [one for one in made if not one.is_deleted()])
        for leaf, x in zip(leaves, results, strict=True):
            moved[leaf.goal] = x if leaf.finish is None else leaf.finish(x)

    return run


def _runs_together(leaves: Sequence[Leaf]) -> bool:
    """Whether leaves move by one program, which has one order of devices, one mesh if it is explicit, and changes
    layouts alone."""
    meshes = [end.mesh for leaf in leaves for end in leaf.request.ends]
    one_order = len({tuple(devices_of(mesh)) for mesh in meshes}) == 1
    one_mesh = len(set(meshes)) == 1 or not any(placement.has_explicit(mesh) for mesh in meshes)
    return one_order and one_mesh and all(leaf.request.plain for leaf in leaves)


@lru_cache(maxsize=256)
def _compile_peak(
    plans: tuple[Plan, ...], sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...]
) -> int:
    """What a batch needs as it is compiled, by the program that runs later."""
    shapes = [
        jax.ShapeDtypeStruct(plan.source.shape, jnp.dtype(plan.source.dtype), sharding=source)
        for plan, source in zip(plans, sources, strict=True)
    ]
    compiled = compiled_forms.compile_alone(_batch_program(plans, sources, targets), *shapes)
    return compiled_forms.read_memory(compiled, next(iter(sources[0].device_set)).platform)[0]


@lru_cache(maxsize=256)
def _batch_program(
    plans: tuple[Plan, ...], sources: tuple[NamedSharding, ...], targets: tuple[NamedSharding, ...]
) -> Callable[..., Any]:
    batch = Batch(tuple(map(str, range(len(plans)))), plans)

    def moved(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(on_jax.apply_batch(batch, sources[0].mesh, arrays))

    return jax.jit(moved, in_shardings=sources, out_shardings=targets)
