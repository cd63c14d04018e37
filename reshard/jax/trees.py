"""`reshard_pytree`: a tree of arrays as one move, with one budget, agreed on by all processes.

agree      all processes move the same arrays, by name, shape, sharding and version; or all raise
move       by `redistribute`; with a budget, all leaves together (`joint`)
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from reshard.errors import AgreementError, shortened
from reshard.jax import placement
from reshard.jax.redistribute import redistribute
from reshard.jax.request import UNLIMITED
from reshard.jax.target_trees import spread
from reshard.jax.targets import Target
from reshard.jax.views import read_view
from reshard.plans.manifest import Manifest, Version, list_differences
from reshard.synth import Network
from reshard.synth.options import read_budget
from reshard.types.layout import Layout
from reshard.types.move import Move
from reshard.types.whole import checked_flag

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

    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    >>> rows, columns = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec(None, "x"))
    >>> tree = {"w": jax.device_put(np.ones((8, 8), "float32"), rows)}
    >>> reshard_pytree(tree, {"w": columns}, budget="1MiB")["w"].sharding == columns
    True
    """
    checked_flag(donate, "donate")
    if jax.process_count() > 1:
        agree(lambda: _manifest(source, target, version), lambda: f"budget {read_budget(budget)}, donate {donate}")
    shardings = jax.tree.map(_sharding_of, target, is_leaf=placement.is_target)
    return redistribute(source, shardings, budget=budget, network=network, donate=donate)


def _sharding_of(target: Any) -> Any:
    """What a leaf of the target stands for: a sharding or a `Target`, or the sharding of an array."""
    return target if placement.is_target(target) else getattr(target, "sharding", target)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


# ---- agreement of processes ------------------------------------------------------------------------


def _manifest(source: Any, target: Any, version: Version | Mapping[str, Version]) -> Manifest:
    """What this process moves; its names are the paths of the tree."""
    shardings = jax.tree.map(_sharding_of, target, is_leaf=placement.is_target)
    pairs, _ = jax.tree_util.tree_flatten_with_path(source)
    targets = spread(shardings, source, "target")
    entries = {_name(path): _entry(leaf, target) for (path, leaf), target in zip(pairs, targets, strict=True)}
    return Manifest.of(entries, version)


def _entry(leaf: Any, target: Any) -> Move | tuple[Layout, Layout]:
    """What a leaf is before and after, its devices by their ids."""
    if isinstance(target, Target) and not target.options.plain:
        request = read_view(leaf, target.sharding, None, target.options, UNLIMITED)
        before, after = request.ends
        shape, dtype = request.target_shape(leaf.shape), request.target_dtype(leaf.dtype.name)
        near, far = Layout.from_jax(before, leaf.shape, leaf.dtype.name), Layout.from_jax(after, shape, dtype)
        return Move(near, far, request.view, cast=True)
    after = placement.resolve(target.sharding if isinstance(target, Target) else target, leaf, "target")
    before = placement.sharding_of(leaf) or after
    layouts = (Layout.from_jax(each, leaf.shape, leaf.dtype.name) for each in (before, after))
    return next(layouts), next(layouts)


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
    lines = list_differences(Manifest.from_json(ours), Manifest.from_json(theirs), here, there)
    return "; ".join(lines) or f"{mine} {here} and {other} {there}"


def _gathered(text: str) -> list[str]:
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size], np.int32))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
