"""Replaces the reshards of a module: by our collectives, by constraints, or by nothing, so that XLA can import it.

Each reshard that `explicit_reshards` inserted meets one of three fates:

    TAKEN      a manual computation runs the plan's collectives
    PINNED     a sharding constraint: the user wrote it, or a neighbouring TAKEN reshard depends on it
    DROPPED    removed: XLA decides what to move

Operations whose sharding changed only because of PINNED or DROPPED reshards get their old sharding back.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from reshard.jax.explicit_reshards import ReshardOp, changed, restore, unmark, users
from reshard.jax.shardings import MANUAL, SHARDING, meshes
from reshard.lower.to_stablehlo import CHANNEL, Attribute, Module, Operation, Value, framed, insert, ir, walk
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan

# Operations that must not keep the sharding that propagation gave them. XLA's import hoists the invariants of a loop
# and would keep their shardings; and it expands the collectives of a shard_map into parts of other ranks, which would
# get the same sharding.
_WITHOUT_SHARDING = (
    "stablehlo.while",
    *(f"stablehlo.{name}" for name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")),
    *(f"stablehlo.collective_{name}" for name in ("broadcast", "permute")),
)
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
        for op in walk(module.operation):
            if changed(op) and op not in kept and not any(map(_ends_branch, _users(op))):
                restore(op)
            _make_importable(op)
    unmark(module)
    module.operation.verify()
    return decided


def inside_manual(op: Operation) -> bool:
    """Whether an operation is inside a manual computation (a user's `shard_map`)."""
    parent = op.parent
    while parent is not None and parent.operation.name != MANUAL:
        parent = parent.operation.parent
    return parent is not None


def _users(op: Operation) -> list[Operation]:
    return [user for result in op.results for user in users(result)]


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
        attributes = {"sharding": reshard.op.attributes["sharding"]}
        return ir.Operation.create("sdy.sharding_constraint", [value.type], [value], attributes).results[0]
    mesh = symbols[plan.source.mesh]
    padded = _resized(value, plan.source.padded_shape, plan.source, mesh)
    return _resized(insert(plan, padded, mesh, channels), tuple(value.type.shape), plan.target, mesh)


def _resized(value: Value, shape: tuple[int, ...], layout: Layout, mesh: str) -> Value:
    """The value padded or cut at the high end of each dim, as manual computations take even tiles only.

    For example, 10 x 16 in 4 pieces of 3 is padded to 12 x 16, and the result of the move is cut to 10 x 16 again.
    """
    tensor = ir.RankedTensorType(value.type)
    now, rank = tuple(tensor.shape), len(shape)
    if now == shape:
        return value
    sharding = {SHARDING: ir.Attribute.parse(f"#sdy.sharding_per_value<[{framed(layout, mesh)}]>")}
    result = [ir.RankedTensorType.get(shape, tensor.element_type)]
    if now > shape:
        ends = {"start_indices": [0] * rank, "limit_indices": list(shape), "strides": [1] * rank}
        return ir.Operation.create("stablehlo.slice", result, [value], _int_arrays(ends) | sharding).results[0]
    more = [to - size for size, to in zip(now, shape, strict=True)]
    edges = {"edge_padding_low": [0] * rank, "edge_padding_high": more, "interior_padding": [0] * rank}
    operands = [value, _zero(tensor.element_type)]
    return ir.Operation.create("stablehlo.pad", result, operands, _int_arrays(edges) | sharding).results[0]


def _int_arrays(values: Mapping[str, list[int]]) -> dict[str, Attribute]:
    return {name: ir.DenseI64ArrayAttr.get(value) for name, value in values.items()}


def _zero(element: Any) -> Value:
    text = "0" if isinstance(element, ir.IntegerType) else "(0.0,0.0)" if isinstance(element, ir.ComplexType) else "0.0"
    return _parsed(
        f'%0 = "stablehlo.constant"() <{{value = dense<{text}> : tensor<{element}>}}> : () -> tensor<{element}>'
    )


def _parsed(text: str) -> Value:
    """The result of an operation created from text, because Python has no attributes for complex constants."""
    made = ir.Operation.parse(text)
    ir.InsertionPoint.current.insert(made)
    return made.results[0]


def _last_channel(module: Module) -> int:
    used = (str(op.attributes[CHANNEL]) for op in walk(module.operation) if CHANNEL in op.attributes)
    return max((int(match[1]) for text in used if (match := _HANDLE.search(text))), default=0)


def _make_importable(op: Operation) -> None:
    """Removes shardings and replaces constants that XLA's import of Shardy modules refuses, or crashes on."""
    sharding = op.attributes.get(SHARDING) if op.name in ("sdy.constant", *_WITHOUT_SHARDING) else None
    if sharding is not None:
        del op.attributes[SHARDING]
    if op.name == "sdy.constant":
        text = op.get_asm(print_generic_op_form=True)
        with op.location, ir.InsertionPoint(op):
            made = _parsed(text.replace('"sdy.constant"', '"stablehlo.constant"', 1))
        if sharding is not None:
            made.owner.attributes[SHARDING] = sharding
        op.results[0].replace_all_uses_with(made)
        op.erase()
