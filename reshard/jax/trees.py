"""`reshard_pytree`: a tree of arrays as one move, with one budget, agreed on by all processes.

agree      all processes move the same arrays, by name, shape, sharding and version; or all raise
plan       without a budget leaf by leaf, as `redistribute` does; with one, all leaves by `plan_tree`
run        batch after batch, each finished and its donated sources freed before the next one starts
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from reshard.errors import AgreementError, BudgetError, LayoutError, MeshError, shortened
from reshard.jax import placement
from reshard.jax.platform_network import network_of_mesh
from reshard.jax.redistribute import redistribute
from reshard.jax.request import orders_differ
from reshard.jax.starting import started
from reshard.runtime import on_jax
from reshard.synth import Network, plan_tree
from reshard.synth.planner import bytes_of
from reshard.types.batch import Batch
from reshard.types.layout import Layout
from reshard.types.manifest import Manifest, Version, differences
from reshard.types.plan_tree import TreePlan, device_kinds
from reshard.types.tree_memory import peaks

OWN = 64 << 10
"""Bytes that a program on an accelerator needs for itself."""
_TRIES = 8
_END = "\n"


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

    >>> from jax.sharding import PartitionSpec
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    >>> tree = {"w": jax.device_put(np.ones((8, 8), "float32"), rows)}
    >>> reshard_pytree(tree, {"w": columns}, budget="1MiB")["w"].sharding == columns
    True
    """
    if jax.process_count() > 1:
        agree(lambda: _manifest(source, target, version), lambda: f"budget {bytes_of(budget)}, donate {donate}")
    shardings = jax.tree.map(_sharding_of, target, is_leaf=placement.is_target)
    limit = bytes_of(budget)
    if limit is None:
        return redistribute(source, shardings, network=network, donate=donate)
    pairs, structure = jax.tree_util.tree_flatten_with_path(source)
    wanted = _spread(shardings, source)
    names = [_name(path) for path, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    ends = [_ends(*each) for each in zip(names, leaves, wanted, strict=True)]
    own = 0 if all(placement.platform_of(x.sharding.mesh) == "cpu" for x in leaves) else OWN
    used = network_of_mesh(leaves[0].sharding.mesh, network) if leaves else None
    tree = bounded_tree(dict(zip(names, ends, strict=True)), limit, used, donate, own)
    moved = _moved(tree, dict(zip(names, leaves, strict=True)), dict(zip(names, wanted, strict=True)), donate)
    return jax.tree.unflatten(structure, [moved[name] for name in names])


def _sharding_of(target: Any) -> Any:
    return target if placement.is_target(target) else getattr(target, "sharding", target)


def _spread(shardings: Any, source: Any) -> list[Any]:
    """One sharding per leaf, in the order of the leaves."""
    try:
        spread = shardings if not placement.is_target(shardings) else jax.tree.map(lambda _: shardings, source)  # pyright: ignore[reportUnknownLambdaType]
        given = jax.tree.broadcast(spread, source, is_leaf=placement.is_target)
    except ValueError as error:
        raise LayoutError(f"the target's tree is not that of the arrays ({error}); give one of its structure") from None
    listed: list[Any] = []
    jax.tree.map(lambda _, sharding: listed.append(sharding), source, given)  # pyright: ignore
    return listed


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _ends(name: str, leaf: Any, target: Any) -> tuple[Layout, Layout]:
    """The layouts of one leaf before and after, devices by their positions in the mesh."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array) or placement.is_unsharded(leaf):
        raise LayoutError(f"{name} is not a sharded jax.Array; without a budget, redistribute places it")
    if placement.is_key_array(leaf):
        raise LayoutError(f"{name} has random keys; move them apart, without a budget")
    before = placement.sharding_of(leaf)
    after = placement.resolve(target, leaf, "target")
    if before is None or before.device_set != after.device_set or orders_differ(before, after):
        raise MeshError(
            f"{name} goes from {leaf.sharding} to {target}: a tree keeps to a budget on one list of devices only; "
            f"leave budget out"
        )
    source, end = (placement.layout_of(each, leaf.shape, leaf.dtype.name) for each in (before, after))
    if not end.even:
        raise LayoutError(f"{name}: the target {after.spec} does not divide the shape {leaf.shape}; pad the array")
    return source, end


# ---- within a budget -------------------------------------------------------------------------------


def bounded_tree(
    ends: Mapping[str, tuple[Layout, Layout]],
    budget: int,
    network: Network | str | None,
    donate: bool,
    own: int = 0,
) -> TreePlan:
    """The plans of a tree whose peak on XLA is within the budget; XLA allocates results before it runs anything."""
    room, least, needed = budget, 0, budget
    for _ in range(_TRIES):
        tree = plan_tree(ends, max(room, least), network, donate)
        needed = xla_peak_bytes(tree, own)
        if needed <= budget:
            return tree
        if room <= least:
            break
        room = min(room, tree.peak_bytes) - (needed - budget)
        least = _floor(ends, network, donate)
    raise BudgetError(f"budget {budget} B: XLA needs {needed} B for {len(ends)} arrays; give that", needed)


def _floor(ends: Mapping[str, tuple[Layout, Layout]], network: Network | str | None, donate: bool) -> int:
    try:
        return plan_tree(ends, 0, network, donate).peak_bytes
    except BudgetError as error:
        return error.smallest


def xla_peak_bytes(tree: TreePlan, own: int = 0) -> int:
    """The tree's peak bytes on XLA: while a batch runs, its results are live from the start, and `own` bytes of XLA's.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=4)) for text in ("f32[{x}4]", "f32[16]"))
    >>> tree = rs.plan_tree({"a": (rows, whole)})
    >>> xla_peak_bytes(tree) == tree.peak_bytes
    True
    """
    kinds = device_kinds(tree.plans.values())
    footprints = [kinds.footprint(batch) for batch in tree.batches]
    early = [_beside(batch) + own for batch in tree.batches]
    shown = [
        each._replace(during=tuple(nbytes + more for nbytes in each.during))
        for each, more in zip(footprints, early, strict=True)
    ]
    return max(peaks(shown))


def _beside(batch: Batch) -> int:
    """What XLA needs beside a batch's own buffers: results before the last step, and the larger of two shared buffers
    twice, because a TPU gives packed blocks another layout in memory than tiles.
    """
    early = sum(plan.target.tile_bytes for plan in batch.plans) if len(batch.steps) > 1 else 0
    if len(batch.plans) == 1:
        return early
    differ = (abs(sum(s.result.tile_bytes - s.operand.tile_bytes for s in steps)) for steps in batch.steps)
    return early + max(differ, default=0)


def _moved(
    tree: TreePlan, arrays: Mapping[str, jax.Array], targets: Mapping[str, Any], donate: bool
) -> dict[str, jax.Array]:
    moved: dict[str, jax.Array] = {}
    for batch in tree.batches:
        given = [arrays[name] for name in batch.names]
        ends = [placement.resolve(targets[name], arrays[name], "target") for name in batch.names]
        results = _run(batch, given, ends)
        jax.block_until_ready(results)  # Two batches at once would need the buffers of both.
        moved |= zip(batch.names, results, strict=True)
        for array, result in zip(given, results, strict=True):
            if donate and result is not array:
                array.delete()
    return moved


def _run(batch: Batch, arrays: Sequence[jax.Array], targets: Sequence[NamedSharding]) -> Sequence[jax.Array]:
    sources = tuple(placement.sharding_of(array) for array in arrays)
    if not batch.steps:
        return [jax.device_put(array, target) for array, target in zip(arrays, targets, strict=True)]
    return started(_program(batch.plans, sources, tuple(targets)), *arrays)


@lru_cache(maxsize=256)
def _program(plans: Any, sources: Any, targets: Any) -> Callable[..., Any]:
    batch = Batch(tuple(map(str, range(len(plans)))), plans)
    move = partial(_applied, batch, sources[0].mesh)
    return jax.jit(move, in_shardings=sources, out_shardings=targets)


def _applied(batch: Batch, mesh: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(on_jax.apply_batch(batch, mesh, arrays))


# ---- agreement of processes ------------------------------------------------------------------------


def _manifest(source: Any, target: Any, version: Version | Mapping[str, Version]) -> Manifest:
    """What this process moves; its names are the paths of the tree."""
    shardings = jax.tree.map(_sharding_of, target, is_leaf=placement.is_target)
    pairs, _ = jax.tree_util.tree_flatten_with_path(source)
    entries: dict[str, tuple[Layout, Layout]] = {}
    for (path, leaf), target in zip(pairs, _spread(shardings, source), strict=True):
        after = placement.resolve(target, leaf, "target")
        before = placement.sharding_of(leaf) or after
        layouts = (Layout.from_jax(each, leaf.shape, leaf.dtype.name) for each in (before, after))
        entries[_name(path)] = (next(layouts), next(layouts))
    return Manifest.of(entries, version)


def agree(describe: Callable[[], Manifest], options: Callable[[], str]) -> None:
    """Returns on all processes, or raises `AgreementError` on all: they differ, or one cannot describe its part."""
    try:
        text = f"{describe().to_json()}{_END}{options()}"
    except Exception as error:  # The other processes are waiting: it is raised once they know.
        text = f"{type(error).__name__}: {error}"
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    failed = np.array([_END not in text], np.uint8)
    heads = np.asarray(multihost_utils.process_allgather(np.concatenate([digest, failed])))
    if (heads == heads[0]).all() and not heads[0, -1]:
        return
    texts = _gathered(text)
    raise AgreementError(f"the processes do not agree, so nothing was moved: {_disagreement(texts)}")


def _disagreement(texts: Sequence[str]) -> str:
    wrong = [f"process {number}: {shortened(each)}" for number, each in enumerate(texts) if _END not in each]
    if wrong:
        return "; ".join(wrong)
    number = next(number for number, each in enumerate(texts) if each != texts[0])
    (ours, mine), (theirs, other) = (texts[at].split(_END) for at in (0, number))
    here, there = "on process 0", f"on process {number}"
    lines = differences(Manifest.from_json(ours), Manifest.from_json(theirs), here, there)
    return "; ".join(lines) or f"{mine} {here} and {other} {there}"


def _gathered(text: str) -> list[str]:
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size], np.int32))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
