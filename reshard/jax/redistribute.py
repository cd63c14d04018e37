"""`redistribute`: moves an array, or a tree of arrays, to another sharding by a plan of this package.

placement           resolves what the caller gave to `NamedSharding`s
eager               moves a concrete array now; `batches` many at once, `in_flight` not too many
traced              moves a traced array: checks it, and binds `primitive`, to which every transformation applies
partitioner_hook    ... whose source tracing does not know (auto axes under jit): XLA's partitioner provides it
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from reshard.errors import LayoutError, quoted
from reshard.jax import placement, traced
from reshard.jax.batches import run_all
from reshard.jax.eager import (
    EagerMove,
    Pending,
    check_source,
    discard,
    mover_of,
    prepare_move,
    prepare_on_device,
    put,
    run_pending,
)
from reshard.jax.request import UNLIMITED, ReshardRequest
from reshard.jax.target_trees import spread
from reshard.jax.targets import Target, ViewOptions
from reshard.jax.tree_budget import is_joint, joint_moves
from reshard.jax.views import prepare_view
from reshard.synth import Network
from reshard.synth.options import PlanOptions


def redistribute(
    x: Any,
    sharding: Any,
    *,
    source: Any = None,
    budget: int | str | None = None,
    network: Network | str | None = None,
    donate: bool = False,
    view: str | None = None,
    take: Mapping[Any, Any] | None = None,
    into: Mapping[Any, Any] | None = None,
    out: jax.Array | None = None,
    dtype: Any = None,
    scale: Any = None,
    **sizes: int,
) -> Any:
    """Moves an array to another sharding, in place of `jax.device_put`, `with_sharding_constraint` and `reshard`.

    `x` is an array or a tree of arrays. `sharding` is a `NamedSharding`, a `PartitionSpec` on the mesh that is set
    (or on the array's own), or a `reshard.Layout`: one for all leaves, or a tree of them whose structure is that of
    `x`, or of its top. `source`, in the same forms, is the sharding of `x` if tracing cannot know it.
    `budget` (bytes, or text such as "64MiB") bounds what lives on each device during the move: all sources, all results
    and all buffers of the tree; inside a trace, those of each leaf. Without one, large moves are split into parts,
    which need little more than source and result.
    `network` is that of `reshard.plan`. Without one, the fastest plan on the network of the devices, if it is known
    (`platform_network`), is taken where it needs no more memory than the plan of fewest bytes; "none" is for none.
    With `donate`, `x` is deleted once the move is under way.

    `view` (with `sizes`), `take` and `into` are those of `reshard.Move`, and `dtype` that of the result; `sharding` is
    then the target's. `out` is the array of which `into` fills a part; the result has the rest of it. Where the dtype
    narrows, elements are divided by `scale` first; else multiplied by it at last. It is a number, or an array of the
    rank of the wider array whose dims divide that array's: one number for each channel, block or tile. The leaves of a
    tree have views of their own in its tree of targets, see `Target`.

    It works eagerly, under jit, grad, vmap, scan and remat, on auto and explicit axes, inside `jax.set_mesh`, and
    inside a `shard_map` that is manual over other axes. Concrete leaves of a tree share programs, and an array that is
    where it should go is returned as it is. Source and target may be on any two sets of devices, of several
    processes too: then it is called outside of jit. What needs no plan is left to JAX: arrays that are not sharded
    yet, and the other targets of `jax.device_put` and `with_sharding_constraint` (None, a memory, `P.UNCONSTRAINED`
    dims).

    Raises `LayoutError`, `MeshError` or `PlanError` for an invalid source or target, and `BudgetError`, with the
    smallest budget that works, if no plan fits the budget.

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
    free = budget is None and network is None and donate is False
    options = UNLIMITED if free else PlanOptions.read(budget, network, donate)
    placement.check_alive(x)  # One may be where it should go, and would be returned.
    try:
        if sizes or any(each is not None for each in (view, take, into, out, dtype, scale)):
            given = ViewOptions(view, take, into, out, dtype, scale, sizes)
            return run_pending(prepare_view(x, sharding, source, given, options))
        # Before all else, since it should cost nothing.
        if not options.donate and source is None and _is_there(x, sharding):
            return put(x, sharding, donate=False)
        if source is None and isinstance(x, jax.Array) and placement.is_target(sharding):
            return run_pending(_prepare(x, sharding, None, options))
        return _move_tree(x, sharding, source, options)
    except RuntimeError:
        placement.check_alive(x)
        raise


def _move_tree(x: Any, sharding: Any, source: Any, options: PlanOptions) -> Any:
    """A tree of arrays on its new shardings."""
    leaves, tree = jax.tree.flatten(x)
    targets = spread(sharding, x, "target")
    sources = [None] * len(leaves) if source is None else spread(source, x, "source")
    if options.budget is not None and is_joint(leaves):
        return jax.tree.unflatten(tree, _move_within(x, leaves, targets, sources, options))
    if options.donate and len({*map(id, leaves)}) < len(leaves):
        return jax.tree.unflatten(tree, _move_shared(leaves, targets, sources, options))
    return jax.tree.unflatten(tree, run_all(_prepare_all(leaves, targets, sources, options)))


def _prepare_all(
    leaves: Sequence[Any], targets: Sequence[Any], sources: Sequence[Any], options: PlanOptions
) -> list[Pending]:
    """The moves of all leaves."""
    each = zip(leaves, targets, sources, strict=True)
    return [_prepare(leaf, target, source, options) for leaf, target, source in each]


def _move_within(
    x: Any,
    leaves: Sequence[Any],
    targets: Sequence[Any],
    sources: Sequence[Any],
    options: PlanOptions,
) -> list[jax.Array]:
    """All leaves within one budget."""
    for leaf, source in zip(leaves, sources, strict=True):
        known = placement.sharding_of(leaf)
        if source is not None and known is not None:
            check_source(leaf, placement.resolve(source, leaf, "source"), known)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(x)]

    def place(at: int) -> jax.Array:
        move = _prepare(leaves[at], targets[at], None, options._replace(budget=None))
        return run_all([move])[0]

    return joint_moves(names, leaves, targets, place, options)


def _move_shared(
    leaves: Sequence[Any], targets: Sequence[Any], sources: Sequence[Any], options: PlanOptions
) -> list[jax.Array]:
    """Moves donated leaves of which some are the same array: it is deleted once all its moves are under way."""
    moved = run_all(_prepare_all(leaves, targets, sources, options._replace(donate=False)))
    kept = {id(array) for array in moved}
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and id(leaf) not in kept:
            discard(leaf, moved)
    return moved


def _is_there(x: Any, sharding: Any) -> bool:
    """Whether it is one concrete array that has the very sharding that is wanted."""
    return (
        isinstance(sharding, NamedSharding)
        and isinstance(x, jax.Array)
        and not isinstance(x, Tracer)
        and (x.sharding == sharding)
    )


def _prepare(x: Any, sharding: Any, source: Any, options: PlanOptions) -> Pending:
    """The move of one leaf, checked; a concrete array does not move yet."""
    mover = None if source is not None else _known_mover(x, sharding, options)
    if mover is not None:
        return mover(x)
    if not isinstance(sharding, Target):
        return _prepare_plain(x, sharding, source, options)
    if sharding.options.plain:
        return _prepare_plain(x, sharding.sharding, source, options)
    return prepare_view(x, sharding.sharding, source, sharding.options, options)


def _known_mover(x: Any, sharding: Any, options: PlanOptions) -> Callable[[jax.Array], Pending] | None:
    """Looks up how a concrete array moves, if its type and shardings decide that: checks would outlast a small move."""
    if not isinstance(sharding, NamedSharding) or not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return None
    known = x.sharding
    return mover_of(x.aval, known, sharding, options) if isinstance(known, NamedSharding) else None


def _prepare_plain(x: Any, sharding: Any, source: Any, options: PlanOptions) -> Pending:
    """The move of one leaf that keeps its dims and dtype."""
    aval = x if isinstance(x, jax.Array) else _type_of(x)
    if not placement.has_layout(sharding):
        return _placed(x, sharding, options)
    if placement.leaves_open(sharding):
        return partial(traced.constrained, x, sharding)
    target = placement.resolve(sharding, aval, "target")
    before = None if source is None else placement.resolve(source, aval, "source")
    if not isinstance(x, jax.Array) or (not isinstance(x, Tracer) and placement.is_unsharded(x)):
        place = partial(put, donate=options.donate) if not placement.is_tracing() else traced.constant
        return partial(place, x, target)
    if placement.is_key_dtype(x.dtype):
        return _keys(x, target, before, options)
    if isinstance(x, Tracer):
        moved = traced.moved(x, ReshardRequest(target, before or placement.sharding_of(x), options))
        return lambda: moved
    return prepare_move(x, ReshardRequest(target, before, options))


def _placed(x: Any, target: Any, options: PlanOptions) -> Pending:
    """The move of one leaf to a device, to a memory, or to wherever JAX likes."""
    device = placement.one_device(target)
    if device is not None and placement.is_spread(x) and not placement.is_tracing():
        return prepare_on_device(x, device, options)
    return partial(put, x, target, donate=options.donate)


def _type_of(x: Any) -> Any:
    """The shape and dtype of the array that JAX makes of a number or of a numpy array."""
    try:
        return jax.typeof(x)
    except Exception as error:  # jax quotes what is given, whose repr is the caller's code.
        raise LayoutError(
            f"{quoted(x)} is a {type(x).__name__}, of which JAX makes no array: {error}; give arrays of numbers, bools "
            f"or random keys, or a tree of them"
        ) from None


def _keys(x: jax.Array, target: NamedSharding, source: NamedSharding | None, options: PlanOptions) -> Pending:
    """The move of random keys as the integers that they consist of; these add a last dim, which is never split."""
    impl = jax.random.key_impl(x)
    move = _prepare(jax.random.key_data(x), target, source, options)
    if isinstance(move, EagerMove) and move.wrapped is None:
        return move._replace(wrapped=partial(jax.random.wrap_key_data, impl=impl))

    return lambda: jax.random.wrap_key_data(run_pending(move), impl=impl)
