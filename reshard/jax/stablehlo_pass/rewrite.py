"""Replaces the reshards of a module: by our collectives, by constraints, or by nothing, so that XLA can import it.

Each reshard that `explicit_reshards` inserted has one of three outcomes:

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
from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp, is_changed, remove_marks
from reshard.jax.stablehlo_pass.shardings import MANUAL, read_meshes
from reshard.lower.to_stablehlo import CHANNEL, Module, Operation, Value, insert_plan, ir, list_operations
from reshard.plans.plan import Plan
from reshard.types.mesh import Mesh

_HANDLE = re.compile(r"handle = (\d+)")


class ReshardOutcome(Enum):
    """What becomes of a reshard, see the module."""

    TAKEN = "taken"
    PINNED = "pinned"
    DROPPED = "dropped"


def decide_outcomes(reshards: Iterable[ReshardOp], plans: Mapping[ReshardOp, Plan]) -> dict[ReshardOp, ReshardOutcome]:
    """The outcome of each reshard if those with a plan are taken.

    The operations around a taken reshard keep the shardings that require it, so their other reshards are pinned.
    """
    kept = _operations_around(plans)
    result: dict[ReshardOp, ReshardOutcome] = {}
    for reshard in reshards:
        idle = reshard.source is not None and reshard.source == reshard.target
        # XLA requires one sharding of the results of all branches of a conditional.
        needed = any(
            op in kept
            or (op.name == "stablehlo.return" and op.parent.operation.name in ("stablehlo.case", "stablehlo.if"))
            for op in reshard.around
        )
        pinned = reshard.by_user or (needed and not idle)
        left = ReshardOutcome.PINNED if pinned else ReshardOutcome.DROPPED
        result[reshard] = ReshardOutcome.TAKEN if reshard in plans else left
    return result


def replace_reshards(
    module: Module, reshards: Iterable[ReshardOp], plans: Mapping[ReshardOp, Plan]
) -> dict[ReshardOp, ReshardOutcome]:
    """Replaces every reshard, and whatever else XLA does not accept, in place. Returns the outcome of each reshard."""
    decided = decide_outcomes(reshards, plans)
    kept = _operations_around(plans)
    used = (str(op.attributes[CHANNEL]) for op in list_operations(module.operation) if CHANNEL in op.attributes)
    channels = itertools.count(1 + max((int(match[1]) for text in used if (match := _HANDLE.search(text))), default=0))
    # A plan's mesh is that of one of its ends, so the module has it.
    symbols = {mesh: symbol for symbol, mesh in read_meshes(module).items()}
    with module.context:
        for reshard, outcome in decided.items():
            with reshard.op.location, ir.InsertionPoint(reshard.op):
                value = _replace_reshard(reshard, outcome, plans.get(reshard), symbols, channels)
            reshard.op.results[0].replace_all_uses_with(value)
            reshard.op.erase()
        handover.make_importable(module, kept)
    remove_marks(module)
    module.operation.verify()
    return decided


def inside_manual(op: Operation) -> bool:
    """Whether an operation is inside a manual computation (a user's `shard_map`)."""
    parent = op.parent
    while parent is not None and parent.operation.name != MANUAL:
        parent = parent.operation.parent
    return parent is not None


def _operations_around(plans: Mapping[ReshardOp, Plan]) -> set[Operation]:
    """The operations that keep their new shardings, because a taken reshard is between them."""
    return {op for reshard in plans for op in reshard.around if is_changed(op)}


def _replace_reshard(
    reshard: ReshardOp, outcome: ReshardOutcome, plan: Plan | None, symbols: Mapping[Mesh, str], channels: Iterator[int]
) -> Value:
    value = reshard.op.operands[0]
    if outcome is ReshardOutcome.DROPPED:
        return value
    if plan is None:
        return handover.add_constraint(value, reshard.op.attributes["sharding"])
    return insert_plan(plan, value, symbols[plan.source.mesh], channels)
