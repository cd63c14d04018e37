"""Replaces the reshards of a module: by our collectives, by constraints, or by nothing, so that XLA can import it.

Each reshard that `explicit_reshards` inserted meets one of three fates:

    TAKEN      a manual computation runs the plan's collectives
    PINNED     a sharding constraint: the user wrote it, or a neighbouring TAKEN reshard depends on it
    DROPPED    removed: XLA decides what to move

Operations next to a TAKEN reshard keep the sharding that it requires, as a constraint; see `handover`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

from reshard.jax.stablehlo_pass import handover
from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp, changed, unmark
from reshard.jax.stablehlo_pass.shardings import MANUAL, meshes
from reshard.lower.to_stablehlo import CHANNEL, Module, Operation, Value, insert_plan, ir, walk
from reshard.plans.plan import Plan
from reshard.types.mesh import Mesh

_HANDLE = re.compile(r"handle = (\d+)")


class Fate(Enum):
    """What becomes of a reshard, see the module."""

    TAKEN = "taken"
    PINNED = "pinned"
    DROPPED = "dropped"


def fates(reshards: Iterable[ReshardOp], plans: Mapping[ReshardOp, Plan]) -> dict[ReshardOp, Fate]:
    """The fate of each reshard if those with a plan are taken.

    The operations around a taken reshard keep the shardings that require it, so their other reshards are pinned.
    """
    kept = _kept(plans)
    result: dict[ReshardOp, Fate] = {}
    for reshard in reshards:
        idle = reshard.source is not None and reshard.source == reshard.target
        needed = any(op in kept or _ends_branch(op) for op in reshard.around)
        pinned = reshard.by_user or (needed and not idle)
        result[reshard] = Fate.TAKEN if reshard in plans else Fate.PINNED if pinned else Fate.DROPPED
    return result


def replace_reshards(
    module: Module, reshards: Iterable[ReshardOp], plans: Mapping[ReshardOp, Plan]
) -> dict[ReshardOp, Fate]:
    """Replaces every reshard, and whatever else XLA does not accept, in place. Returns the fate of each reshard."""
    decided = fates(reshards, plans)
    kept = _kept(plans)
    channels = itertools.count(1 + _last_channel(module))
    symbols = {mesh: symbol for symbol, mesh in meshes(module).items()}  # A plan's mesh is that of one of its ends.
    with module.context:
        for reshard, fate in decided.items():
            with reshard.op.location, ir.InsertionPoint(reshard.op):
                value = _replacement(reshard, fate, plans.get(reshard), symbols, channels)
            reshard.op.results[0].replace_all_uses_with(value)
            reshard.op.erase()
        handover.make_importable(module, kept)
    unmark(module)
    module.operation.verify()
    return decided


def inside_manual(op: Operation) -> bool:
    """Whether an operation is inside a manual computation (a user's `shard_map`)."""
    parent = op.parent
    while parent is not None and parent.operation.name != MANUAL:
        parent = parent.operation.parent
    return parent is not None


def _ends_branch(op: Operation) -> bool:
    """Whether an operation ends a branch of a conditional; XLA requires one sharding of all branches' results."""
    return op.name == "stablehlo.return" and op.parent.operation.name in ("stablehlo.case", "stablehlo.if")


def _kept(plans: Mapping[ReshardOp, Plan]) -> set[Operation]:
    """The operations that keep their new shardings, because a taken reshard is between them."""
    return {op for reshard in plans for op in reshard.around if changed(op)}


def _replacement(
    reshard: ReshardOp, fate: Fate, plan: Plan | None, symbols: Mapping[Mesh, str], channels: Iterator[int]
) -> Value:
    value = reshard.op.operands[0]
    if fate is Fate.DROPPED:
        return value
    if plan is None:
        return handover.constrained(value, reshard.op.attributes["sharding"])
    return insert_plan(plan, value, symbols[plan.source.mesh], channels)


def _last_channel(module: Module) -> int:
    used = (str(op.attributes[CHANNEL]) for op in walk(module.operation) if CHANNEL in op.attributes)
    return max((int(match[1]) for text in used if (match := _HANDLE.search(text))), default=0)
