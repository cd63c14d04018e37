"""Replaces the reshards of a module: by plans' collectives, by constraints, or by nothing, so that XLA can import it.

Each reshard that `explicit_reshards` inserted has one of three outcomes:

    TAKEN      a manual computation runs the plan's collectives
    PINNED     a sharding constraint: the user wrote it, or a neighbouring TAKEN reshard depends on it
    DROPPED    removed: XLA decides what to move

Operations next to a TAKEN reshard keep the sharding that it requires, as a constraint. All other shardings are handed
to XLA in the forms that JAX's own lowering uses, and in no other. Shardy's propagation writes a sharding on every
operation and on every function; JAX writes shardings in three places:

    on the arguments and results of the public function
    on a sharding constraint
    on a manual computation (a `shard_map`)

XLA's import is made for these. For example, it turns the sharding of a private function's result into a custom call of
one operand; libtpu splits a complex value in two before it reads that, and aborts the process. It hoists the invariants
of a loop together with the loop's shardings, and it expands collectives into parts of other ranks, which would get the
collective's sharding.

`mark_given` records which operations have shardings before propagation. `make_importable` goes back to these, and
writes the shardings that have to stay as constraints. Propagation rebuilds private functions, and JAX gives them none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from enum import Enum

from reshard.jax.stablehlo_pass.explicit_reshards import GIVEN, NEVER, ReshardOp, is_changed, remove_marks
from reshard.jax.stablehlo_pass.shardy import MANUAL, SHARDING, add_constraint, read_meshes, sdy
from reshard.lower.to_stablehlo import CHANNEL, Module, Operation, insert_plan, ir, list_operations
from reshard.plans.plan import Plan

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
            op, plan = reshard.op, plans.get(reshard)
            value = op.operands[0]
            with op.location, ir.InsertionPoint(op):
                if plan is not None:
                    value = insert_plan(plan, value, symbols[plan.source.mesh], channels)
                elif outcome is ReshardOutcome.PINNED:
                    value = add_constraint(value, op.attributes["sharding"])
            op.results[0].replace_all_uses_with(value)
            op.erase()
        make_importable(module, kept)
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


def make_importable(module: Module, kept: Collection[Operation]) -> None:
    """Goes back to the shardings of before propagation, except for the operations in `kept`, and except in `main`."""
    for op in list_operations(module.operation):
        attributes = op.attributes
        if op.name == "func.func":
            # Only the program's public function has shardings on its arguments and results.
            if "sym_visibility" in attributes and attributes["sym_visibility"].value == "private":
                for name in [name for name in ("arg_attrs", "res_attrs") if name in attributes]:
                    plain = (
                        {named.name: named.attr for named in ir.DictAttr(each) if named.name != SHARDING}
                        for each in attributes[name]
                    )
                    attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in plain])
            continue
        if GIVEN in attributes:
            if op not in kept:
                attributes[SHARDING] = attributes[GIVEN]
            del attributes[GIVEN]
        elif SHARDING in attributes:
            if op in kept and op.name not in NEVER:
                _constrain_results(op)  # It has no sharding of its own, so it keeps it as a constraint.
            del attributes[SHARDING]
        if op.name == "sdy.constant":
            # XLA does not import constants of Shardy; as text, because Python has no attributes for complex ones.
            text = op.get_asm(print_generic_op_form=True)
            with op.location, ir.InsertionPoint(op) as point:
                made = ir.Operation.parse(text.replace('"sdy.constant"', '"stablehlo.constant"', 1))
                point.insert(made)
            op.results[0].replace_all_uses_with(made.results[0])
            op.erase()


def _constrain_results(op: Operation) -> None:
    """Puts a constraint after each result with the sharding that the operation has now; scalars and tokens need none,
    since they cannot be split."""
    shardings = sdy.TensorShardingPerValueAttr(op.attributes[SHARDING]).shardings
    for result, sharding in zip(op.results, shardings, strict=True):
        if not isinstance(result.type, ir.RankedTensorType) or ir.RankedTensorType(result.type).rank == 0:
            continue
        with op.location, ir.InsertionPoint.after(op):
            value = add_constraint(result, sharding)
        result.replace_all_uses_except(value, value.owner.operation)
