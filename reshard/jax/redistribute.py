"""`redistribute` and `reshard_pytree`: move an array, or a tree of arrays, to another sharding by a plan.

placement, view_moves   resolve what the caller gave: to `NamedSharding`s, and to a view or a cast
request                 one array's move as a value, and its plan
eager                   moves a concrete array now; `buckets` many at once, `tree_budget` all within one budget
traced                  moves a traced array by a JAX primitive, to which every transformation applies
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeGuard, overload

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from reshard.errors import LayoutError, MeshError, PlanError, name_arguments, quoted, shortened
from reshard.jax import placement, traced
from reshard.jax.agreement import agree_between
from reshard.jax.buckets import run_moves
from reshard.jax.crossing.across import compile_join, on_host
from reshard.jax.crossing.host import HostPart, plan_host_exchange, run_host_exchanges, shards_of
from reshard.jax.eager import (
    EagerMove,
    Pending,
    check_given_source,
    discard_donated,
    move_now,
    mover_of,
    on_devices,
    prepare_move,
    put_by_jax,
    run_pending,
    unwrap_shard,
)
from reshard.jax.placement import ArrayGoal, Target, ViewOptions, is_target, spread_targets
from reshard.jax.request import UNLIMITED, ReshardRequest, check_even, number_devices, numbered_move
from reshard.jax.tree_budget import joint_moves
from reshard.jax.view_moves import place_beside, prepare_parts, prepare_view, read_jax_view, read_parts
from reshard.plans.manifest import Manifest, Version, list_differences
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.runtime import on_jax
from reshard.runtime.on_numpy import simulate
from reshard.synth import Network
from reshard.synth.options import MEASURED, PlanOptions, read_budget
from reshard.synth.planner import find_plan
from reshard.types.index_set import IndexSet
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.view import View
from reshard.types.whole import checked_flag


@overload
def redistribute(x: jax.Array, sharding: Any, **options: Any) -> jax.Array: ...


@overload
def redistribute(x: Any, sharding: Any, **options: Any) -> Any: ...


@name_arguments
def redistribute(
    x: Any,
    sharding: Any,
    *,
    source: Any = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    view: str | View | None = None,
    take: Mapping[Any, Any] | None = None,
    into: Mapping[Any, Any] | None = None,
    out: jax.Array | None = None,
    dtype: Any = None,
    scale: Any = None,
    have: jax.Array | None = None,
    changed: Any = None,
    prefer: str | None = None,
    **sizes: int,
) -> Any:
    """Moves an array to another sharding, in place of `jax.device_put`, `with_sharding_constraint` and `reshard`.

    `x` is an array or a tree of arrays. `sharding` is a `NamedSharding`, a `PartitionSpec` on the mesh that is set
    (or on the array's own), a `reshard.Layout`, or text of one in any notation: one for all
    leaves, or a tree of them whose structure is that of `x`, or of its top. `source`, in the same forms, is the
    sharding of `x` if tracing cannot know it: on auto axes XLA's partitioner knows it on CPU and GPU, and not on TPU
    (jax-ml/jax#38196), unless `reshard.jax.jit` compiles.
    `budget` (bytes, or text such as "64MiB") bounds what lives on each device during the move: all sources, all results
    and all buffers of the tree; inside a trace, those of each leaf. Where devices are known, what the compiler says of
    a program keeps to it. Without one, large moves are split into parts, which need little more than source and result.
    `network` is that of `reshard.plan`. Without one, the fastest plan on the network of the devices, if it is known
    (`platform_network`), is taken where it needs no more memory than the plan of fewest bytes; "none" is for none.
    With `donate`, `x` is deleted once the move is under way; under jit, the argument has to be donated, too.
    With `prefer="measured"`, the forms that the plan of an array may take are compiled, and run a few times where its
    devices are here and have the memory; the fastest is taken, within the budget, and remembered in the process.

    `view` (with `sizes`), `take` and `into` are those of `reshard.Move`, and `dtype` that of the result; `sharding` is
    then the target's. `out` is the array of which `into` fills a part; the result has the rest of it. Where the dtype
    narrows, elements are divided by `scale` first; else multiplied by it at last. It is a number, or an array of the
    rank of the wider array whose dims divide that array's: one number for each channel, block or tile. The leaves of a
    tree have views of their own in its tree of targets, see `Target`.

    `have` is the target's array as it is there already, such as the weights of the last version, and `changed` the
    elements of `x` that are stale in it, as in `reshard.plan`: only what has changed moves, and what devices lack. The
    result is a new array. That is for a concrete array; between CPU devices of one process `have` may have any
    sharding, else it has the target's.

    It works eagerly, under jit, grad, vmap, scan and remat, on auto and explicit axes, inside `jax.set_mesh`, and
    inside a `shard_map` that is manual over other axes. Concrete leaves of a tree share programs, and an array that is
    where it should go is returned as it is; between CPU devices of one process, source and result may share memory.
    Source and target may be on any two sets of devices, of several processes too: then it is called outside of jit, by
    all processes that have some of these, which compare a move that is new before it begins. What needs no plan is left
    to JAX: arrays that are not sharded yet, and the other targets of `jax.device_put` and `with_sharding_constraint`
    (None, a memory, `P.UNCONSTRAINED` dims).

    On explicit axes `P(unreduced={"x"})`, a pending sum, may be a source, which is added up, and a target, which has
    zeros on all devices along `x` but one. Dims that do not divide are padded at their ends, under jit with auto axes.
    A result on axes that the source's mesh cannot express needs `out_shardings` under jit.

    A `reshard.Layout` in pieces of any size is that of an array of the layout's `padded_shape`: its tiles side by side,
    each with room for the largest piece, and zeros beyond its own rows where the pieces are new. Such a target makes
    one of the array itself, and such a `source` the array itself of one.

    Raises `LayoutError`, `MeshError` or `PlanError` for an invalid source or target, or one that no `NamedSharding`
    expresses; `BudgetError`, with the smallest budget that works, if no plan fits the budget; and `AgreementError` in
    all processes if one asks for another move, or after RESHARD_JAX_LIMIT (300 seconds) if one does not ask.

    >>> import numpy as np
    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    >>> x = jax.device_put(np.arange(64.0, dtype="float32").reshape(8, 8), rows)
    >>> y = redistribute(x, columns)
    >>> y.sharding == columns, np.array_equal(y, x)
    (True, True)

    Under jit with auto axes, `source=` tells what tracing cannot know:

    >>> move = jax.jit(lambda v: redistribute(v * 2, columns, source=rows))
    >>> move(x).sharding.is_equivalent_to(columns, 2)
    True
    """
    # Reading options that nobody gave would take a tenth of a small move that was made before.
    free = budget is None and network is None and donate is False and prefer is None
    options = UNLIMITED if free else PlanOptions.read(budget, network, donate, prefer=prefer, preferences=(MEASURED,))
    placement.check_not_deleted(x)  # One may be where it should go, and would be returned.
    try:
        if have is not None or changed is not None:
            given = ViewOptions(view, take, into, out, dtype, scale, sizes)
            return update_array(x, sharding, source, given, options, have, changed)
        if sizes or any(each is not None for each in (view, take, into, out, dtype, scale)):
            given = ViewOptions(view, take, into, out, dtype, scale, sizes)
            return run_pending(prepare_view(x, sharding, source, given, options))
        alone = is_target(sharding) and not (isinstance(sharding, Target) and sharding.named)
        if source is None and isinstance(x, jax.Array) and alone:
            return run_pending(_prepare_leaf(x, sharding, None, options))
        leaves = jax.tree.leaves(x)
        goals, tree = placement.read_goals(sharding, x)
        sources = [None] * len(leaves) if source is None else spread_targets(source, x, "source")
        return jax.tree.unflatten(tree, _move_leaves(x, leaves, goals, sources, options))
    except RuntimeError:
        placement.check_not_deleted(x)
        raise


def _move_leaves(
    x: Any, leaves: Sequence[Any], goals: Sequence[ArrayGoal], sources: Sequence[Any], options: PlanOptions
) -> list[Any]:
    """The arrays that the goals ask for, made of the leaves of the tree `x`."""
    uses = Counter(id(leaves[at]) for goal in goals for at in goal.reads)
    # Leaves of a trace run when XLA chooses, so that each of them has the budget for itself.
    tracing = placement.is_tracing() or any(isinstance(leaf, Tracer) for leaf in leaves)
    if len(uses) < uses.total():
        # Arrays that are read and made in the same way are one, under all their names.
        first: dict[object, int] = {}
        same = [first.setdefault(_key_of_goal(goal, leaves, sources), at) for at, goal in enumerate(goals)]
        if len(first) < len(goals):
            places = {at: number for number, at in enumerate(first.values())}
            moved = _move_leaves(x, leaves, [goals[at] for at in places], sources, options)
            return [moved[places[at]] for at in same]
    targets = [goal for goal in goals if isinstance(goal.target, Target)]
    _check_outs(targets)
    read = {at for goal in targets if goal.target.named for at in goal.reads if sources[at] is None}
    if read and not tracing and jax.process_count() == 1:  # Processes would each have an array of their own.
        leaves = [placement.place_alone(leaf) if at in read else leaf for at, leaf in enumerate(leaves)]
        uses = Counter(id(leaves[at]) for goal in goals for at in goal.reads)
    joint = options.budget is not None and sum(len(goal.reads) for goal in goals) > 1
    if joint and not tracing:
        for leaf, source in zip(leaves, sources, strict=True):
            known = placement.sharding_of(leaf)
            if source is not None and known is not None:
                check_given_source(leaf, placement.resolve_sharding(source, leaf, "source"), known)

        def place(at: int) -> jax.Array:
            (read,) = goals[at].reads
            free = options._replace(budget=None, donate=options.donate and uses[id(leaves[read])] == 1)
            return run_pending(_prepare_leaf(leaves[read], goals[at].target, None, free))

        moved = joint_moves(placement.name_leaves(x), leaves, goals, place, options)
        return _discard_shared(leaves, uses, moved) if options.donate else moved
    # An array that is donated in several places is deleted by the last of its moves; or once all are under way, where a
    # result may share its memory.
    left, shares = Counter(uses), set[int]()
    pending: list[Pending] = []
    results: list[int] = []
    for number, goal in enumerate(goals):
        if not options.donate and not (isinstance(goal.target, Target) and goal.target.parts):
            (at,) = goal.reads
            results.append(number)
            pending.append(_prepare_leaf(leaves[at], goal.target, sources[at], options))
            continue
        arrays, its = [leaves[at] for at in goal.reads], [sources[at] for at in goal.reads]
        each = [options] * len(arrays)
        for at, key in enumerate(map(id, arrays) if options.donate else ()):
            left[key] -= 1
            once = uses[key] == 1 or (not left[key] and key not in shares)
            each[at] = options if once else options._replace(donate=False)
        if isinstance(goal.target, Target) and goal.target.parts:
            moves = prepare_parts(read_parts(goal.name, arrays, goal.target, its, each), tracing)
        else:
            moves = [_prepare_leaf(arrays[0], goal.target, its[0], each[0])]
        if options.donate and not all(isinstance(move, EagerMove) and move.program.plan.steps for move in moves):
            shares |= set(map(id, arrays))
        pending += moves
        results += [number] * len(moves)
    moved = run_moves(pending, results if len(pending) > len(goals) else None)
    return _discard_shared(leaves, uses, moved) if options.donate else moved


def _discard_shared(leaves: Sequence[Any], uses: Counter[int], moved: list[Any]) -> list[Any]:
    """Deletes what several moves have read and none has donated, unless a result has its memory: the results."""
    made = {id(array) for array in moved}
    for leaf in {id(leaf): leaf for leaf in leaves if uses[id(leaf)] > 1}.values():
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and id(leaf) not in made:
            discard_donated(leaf, moved)
    return moved


def _check_outs(goals: Sequence[ArrayGoal]) -> None:
    """Refuses several targets that each fill a part of one array: each would be an array with that part alone."""
    filled: dict[int, int] = {}
    for at, goal in enumerate(goals):
        out = goal.target.options.out if isinstance(goal.target, Target) else None
        if out is not None and filled.setdefault(id(out), at) != at:
            names = " and ".join(repr(each.name) for each in (goals[filled[id(out)]], goal) if each.name)
            raise PlanError(
                f"the targets {names or f'{filled[id(out)]} and {at}'} fill parts of one out= of shape {out.shape}, "
                f"and would make an array each, with one part alone; give one Target(sharding, out=..., "
                f"parts=[Part(name, into=...), ...])"
            )


def _key_of_goal(goal: ArrayGoal, leaves: Sequence[Any], sources: Sequence[Any]) -> object:
    """What two goals have in common if their results are equal, bit by bit and shard by shard."""
    reads, target = tuple((id(leaves[at]), sources[at]) for at in goal.reads), goal.target
    if isinstance(target, Target):
        given = target.options
        if target.parts or given.out is not None:
            return id(goal)
        view = repr((given.view, given.take, given.into, given.dtype, given.sizes, given.shape))
        target = target.sharding if given.plain else (target.sharding, view, id(given.scale))
    try:
        hash((reads, target))
    except TypeError:  # It is no sharding, as its move will say.
        return id(goal)
    return reads, target


def _prepare_leaf(x: Any, sharding: Any, source: Any, options: PlanOptions) -> Pending:
    """The move of one leaf, checked; a concrete array does not move yet."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    if source is None and concrete and isinstance(sharding, NamedSharding) and isinstance(x.sharding, NamedSharding):
        # Where its type and shardings decide how it moves, since checks would outlast a small move.
        mover = mover_of(x.aval, x.sharding, sharding, options)
        if mover is not None:
            return mover(x)
    if isinstance(sharding, Target):
        if not sharding.options.plain:
            return prepare_view(x, sharding.sharding, source, sharding.options, options)
        sharding = placement.unwrap_target(sharding, x)
    if isinstance(x, jax.Array):
        aval = x
    else:
        try:
            aval = jax.typeof(x)
        except Exception as error:  # jax quotes what is given, whose repr is the caller's code.
            raise LayoutError(
                f"{quoted(x)} is a {type(x).__name__}, of which JAX makes no array: {shortened(str(error))}; write "
                f"redistribute(x, sharding), and give arrays of numbers, bools or random keys, or a tree of them"
            ) from None
    if is_in_pieces(sharding) or is_in_pieces(source):
        return _prepare_pieces(x, sharding, source, options)
    if not placement.has_layout(sharding):
        # The move of one leaf to a device, where it is an array of that alone, to a memory, or to wherever JAX likes.
        device = placement.one_device(sharding)
        if device is not None and placement.is_spread(x) and not placement.is_tracing():
            alone = ReshardRequest(placement.whole_on(device), None, options)
            return lambda: unwrap_shard(move_now(x, alone), device, x.weak_type)
        return partial(put_by_jax, x, sharding, donate=options.donate)
    if placement.leaves_open(sharding):
        return partial(traced.constrain_open, x, sharding)
    target = placement.resolve_sharding(sharding, aval, "target")
    before = None if source is None else placement.resolve_sharding(source, aval, "source")
    if not isinstance(x, jax.Array) or (concrete and placement.is_unsharded(x)):
        place = partial(put_by_jax, donate=options.donate) if not placement.is_tracing() else traced.place_constant
        return partial(place, x, target)
    if placement.is_key_dtype(x.dtype):
        # The move of random keys as the integers that they consist of; these add a last dim, which is never split, and
        # which JAX spells out in their own sharding: without its entry jit would compile again.
        target = target.update(spec=target.spec.update(partitions=(*target.spec.partitions, None)))
        wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
        move = _prepare_leaf(jax.random.key_data(x), target, before, options)
        if isinstance(move, EagerMove) and move.wrapped is None:
            return move._replace(wrapped=wrap)
        return lambda: wrap(run_pending(move))
    if isinstance(x, Tracer):
        moved = traced.move_traced(x, ReshardRequest(target, before or placement.sharding_of(x), options))
        return lambda: moved
    return prepare_move(x, ReshardRequest(target, before, options))


def _prepare_pieces(x: Any, sharding: Any, source: Any, options: PlanOptions) -> Pending:
    """The move of an array one end of which is in pieces of any size: there it is its tiles, one after another along
    each dim, each with room for the largest piece."""
    if placement.manual_mesh() is not None or not placement.has_layout(sharding):
        raise LayoutError(
            f"the move to {quoted(sharding)} of an array in pieces of any size: give a sharding or a reshard.Layout as "
            f"its target; in a shard_map, reshard.jax.move_tile moves the tiles"
        )
    aval: Any = jax.typeof(x)
    known = placement.sharding_of(x) if isinstance(x, jax.Array) else None
    meshed = next((each for each in (known, source, sharding) if isinstance(each, NamedSharding)), PartitionSpec())
    mesh = placement.named_sharding(meshed, x, "target").mesh
    given = {"source": known if source is None else source, "target": sharding}
    true = next(each.shape for each in given.values() if is_in_pieces(each))
    if given["source"] is None:
        raise PlanError(f"the source of the array of shape {aval.shape} is not known: give source= beside {sharding}")
    wanted = source.padded_shape if is_in_pieces(source) else true
    if aval.shape != wanted:
        raise LayoutError(
            f"an array of shape {aval.shape}, where {wanted} moves from {quoted(source)} to {quoted(sharding)}: the "
            f"array itself has shape {true}, and in pieces of any size it is its tiles side by side, of the layout's "
            f"padded_shape"
        )
    ends: list[Layout] = []
    held: list[NamedSharding] = []
    axes = on_jax.list_free_axes(mesh)
    like = jax.ShapeDtypeStruct(true, aval.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    for what, each in given.items():
        if not is_in_pieces(each):
            held.append(placement.resolve_sharding(each, like, what))
            ends.append(placement.layout_of(held[-1], true, aval.dtype.name))
            continue
        if each.mesh.devices != tuple(range(axes.size)):
            raise MeshError(
                f"the {what} {each} is on {each.mesh}, the array on {axes}; give a layout of as many devices, which "
                f"are known by their positions"
            )
        held.append(NamedSharding(mesh, on_jax.spell_spec(each, axes)))
        ends.append(each)
        # Else the tiles would be in another order in the array than the layout's, and all of their rows wrong.
        if what == "source" and known is not None and not known.is_equivalent_to(held[-1], x.ndim):
            raise PlanError(
                f"the array of shape {x.shape} is sharded as {known.spec}, and the tiles of its source {each} lie side "
                f"by side in {held[-1].spec}; an array of tiles is made with the axes in the layout's order"
            )
    plan = find_plan(Move(ends[0], ends[1]), None, options)
    sliced = options.budget is None  # All messages at once have buffers of their own.
    if isinstance(x, Tracer) or placement.is_tracing():
        return partial(on_jax.apply_plan, plan, mesh, x, sliced=sliced)

    def move() -> jax.Array:
        moved = _compile_pieces(plan, mesh, held[1], sliced)(jax.device_put(x, held[0]))
        if options.donate and isinstance(x, jax.Array):
            discard_donated(x, [moved])
        return moved

    return move


@lru_cache(maxsize=1024)
def _compile_pieces(plan: Plan, mesh: Any, target: NamedSharding, sliced: bool) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(partial(on_jax.apply_plan, plan, mesh, sliced=sliced), out_shardings=target)


def is_in_pieces(given: object) -> TypeGuard[Layout]:
    """Whether it is a layout that no sharding of JAX describes, since its pieces are of any size."""
    return isinstance(given, Layout) and given.ragged


_END = "\n"
"""Between the manifest of a tree and its options, in what processes compare."""


@name_arguments
def reshard_pytree(
    source: Any,
    target: Any,
    *,
    donate: bool = False,
    budget: int | str | None = None,
    network: Network | str | None = None,
    version: Version | Mapping[str, Version] = None,
) -> Any:
    """Moves a tree of arrays to the shardings of a tree of the same structure; not under jit.

    `target` has shardings, or arrays or `ShapeDtypeStruct`s whose shardings are meant; or it is one sharding for all.
    `budget` (bytes a device, or text such as "64MiB") bounds what lives on a device at any time: all sources, all
    results and all buffers. With `donate`, sources are freed as soon as they have moved. Where there are several
    processes, they compare names, shapes, shardings and the `version` of the values first.

    Raises the errors of `redistribute`; `BudgetError` with the smallest budget that works; and `AgreementError` on all
    processes if these differ, before anything moves.

    >>> import numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    >>> tree = {"w": jax.device_put(np.ones((8, 8), "float32"), rows)}
    >>> reshard_pytree(tree, {"w": columns}, budget="1MiB")["w"].sharding == columns
    True
    """
    checked_flag(donate, "donate")
    if jax.process_count() > 1:
        try:
            tree = _describe_tree(source, target, version).to_json()
            ask = f"{tree}{_END}budget {read_budget(budget)}, donate {donate}"
        except Exception as error:  # The others are waiting, and learn of it; if it is everyone's, it is raised below.
            ask = f"{type(error).__name__}: {error}"
        # Asked each time, since the values of the same arrays may be of another version.
        agree_between(set(range(jax.process_count())), ask, once=False, explain=_explain_trees)
    return redistribute(source, _read_shardings(target), budget=budget, network=network, donate=donate)


def _read_shardings(target: Any) -> Any:
    """What the leaves of a target stand for: a sharding or a `Target`, or the sharding of an array."""
    placement.check_tree(target, "the tree of target shardings")
    return jax.tree.map(lambda one: one if is_target(one) else getattr(one, "sharding", one), target, is_leaf=is_target)


# ---- agreement of processes ------------------------------------------------------------------------


def _describe_tree(source: Any, target: Any, version: Version | Mapping[str, Version]) -> Manifest:
    """What this process moves, each array by its path in the tree; devices by their ids."""
    leaves = jax.tree.leaves(source)
    goals, _ = placement.read_goals(_read_shardings(target), source)
    names = placement.name_leaves(source)
    entries: dict[str, Move | tuple[Layout, Layout]] = {}
    reads: dict[str, str] = {}
    for goal in goals:
        name, aim, arrays = goal.name or names[goal.reads[0]], goal.target, [leaves[at] for at in goal.reads]
        given = aim.options if isinstance(aim, Target) else ViewOptions()
        filled = isinstance(aim, Target) and bool(aim.parts)
        # Two arrays of one layout under one target name are two moves.
        labels = [
            f"{name}{f', part {at}' if filled else ''}{f', of {names[read]}' if filled or names[read] != name else ''}"
            for at, read in enumerate(goal.reads)
        ]
        reads |= {label: names[read] for label, read in zip(labels, goal.reads, strict=True)}
        requests: list[ReshardRequest] = []
        if isinstance(aim, Target) and aim.parts:
            moves = read_parts(name, arrays, aim, [None] * len(arrays), [UNLIMITED] * len(arrays))
            requests += [move.request for move in moves]
        elif isinstance(aim, Target) and not given.plain:
            requests.append(read_jax_view(arrays[0], aim.sharding, None, given, UNLIMITED))
        else:
            (leaf,) = arrays
            after = placement.resolve_sharding(placement.unwrap_target(aim, leaf), leaf, "target")
            before = placement.sharding_of(leaf) or after
            near, far = (Layout.from_jax(each, leaf.shape, leaf.dtype.name) for each in (before, after))
            entries[labels[0]] = near, far
            continue
        for label, leaf, request in zip(labels, arrays, requests, strict=True):
            before, after = request.ends
            shape, dtype = request.target_shape(leaf.shape), request.target_dtype(leaf.dtype.name)
            near, far = Layout.from_jax(before, leaf.shape, leaf.dtype.name), Layout.from_jax(after, shape, dtype)
            entries[label] = Move(near, far, request.view, cast=True)
    by_name = version if isinstance(version, Mapping) else None
    return Manifest.of(entries, version if by_name is None else {each: by_name.get(reads[each]) for each in entries})


def _explain_trees(asks: Mapping[int, str]) -> str:
    """How what two processes move differs, or what keeps one of them from saying what it moves."""
    wrong = [f"process {process}: {shortened(text)}" for process, text in asks.items() if _END not in text]
    if wrong:
        return "; ".join(wrong)
    (ours, mine), (theirs, other) = (text.split(_END) for text in asks.values())
    here, there = (f"on process {process}" for process in asks)
    lines = list_differences(Manifest.from_json(ours), Manifest.from_json(theirs), here, there)
    return "; ".join(lines) or f"{mine} {here} and {other} {there}"


# Arrays that devices hold already, brought up to date: `redistribute(x, sharding, have=..., changed=...)`.
#
# CPU devices of this process     copies into new memory, from the shards of both arrays; casts, and what is held in
#                                 another sharding, by the plan on numpy: nothing is compiled, so that every update
#                                 may be of other elements
# accelerators, other processes   the plan's exchange, as for any move that fills an array: a program for each `changed`


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
    if on_host(before, after, held):
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


def _sharding_of_held(have: jax.Array) -> NamedSharding:
    """The sharding of what is held; an array on one device is whole there."""
    known: Any = have.sharding
    if isinstance(known, SingleDeviceSharding):
        return placement.whole_on(*known.device_set)
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
        return compile_join(have.shape, target, exchange.tile_at)(tiles)
    if scale is not None and np.ndim(scale):
        raise PlanError(f"a scale of shape {np.shape(scale)} beside have=: give one number, or move all of the array")
    near, held = ({numbers[s.device]: np.asarray(s.data) for s in each.addressable_shards} for each in arrays)
    moved = simulate(plan, near, have=held, scale=None if scale is None else float(scale))
    devices = placement.devices_of(target.mesh)
    made = [jax.device_put(moved[numbers[device]], device) for device in devices]
    return jax.make_array_from_single_device_arrays(plan.target.shape, target, made)
