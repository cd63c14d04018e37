"""Our collectives in the place of reshards, and a module that XLA takes.

Of the reshards that a module spells out, some are taken: a manual computation runs their plan. The others are
left to XLA: as the constraint that they are where what we do depends on them or the user asked for them, else
not at all, and the operations around them are put back as they were before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from reshard.jax.explicit_reshards import Move, changed, restore, unmark, users
from reshard.jax.shardings import MANUAL, SHARDING, meshes
from reshard.lower.to_stablehlo import CHANNEL, Attribute, Module, Operation, Value, framed, insert, ir, walk
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.plan import Plan

# Without a sharding, whatever the propagation found: XLA's import hoists the invariants of a loop, and would keep
# their shardings; and it expands the collectives of a shard_map into parts of other ranks, with the same sharding.
_BARE = (
    "stablehlo.while",
    *(f"stablehlo.{name}" for name in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")),
    *(f"stablehlo.collective_{name}" for name in ("broadcast", "permute")),
)
_HANDLE = re.compile(r"handle = (\d+)")


class Fate(Enum):
    """What becomes of a reshard."""

    TAKEN = "taken"
    PINNED = "pinned"  # a sharding constraint: XLA moves the data, to where we say
    DROPPED = "dropped"  # XLA finds itself what to move


def fates(moves: Iterable[Move], plans: Mapping[Move, Plan]) -> dict[Move, Fate]:
    """What becomes of each reshard, if those with a plan are taken.

    The operations around a taken one keep the shardings that make it one, and their other reshards are pinned.
    """
    kept = _kept(plans)
    found: dict[Move, Fate] = {}
    for move in moves:
        idle = move.source is not None and move.source == move.target
        needed = any(op in kept or _ends_branch(op) for op in _around(move))
        pinned = move.asked or (needed and not idle)
        found[move] = Fate.TAKEN if move in plans else Fate.PINNED if pinned else Fate.DROPPED
    return found


def operate(module: Module, moves: Iterable[Move], plans: Mapping[Move, Plan]) -> dict[Move, Fate]:
    """Replaces every reshard, and whatever else XLA does not take, in place; says what became of each."""
    decided = fates(moves, plans)
    kept = _kept(plans)
    channels = itertools.count(1 + _last_channel(module))
    symbols = {mesh: symbol for symbol, mesh in meshes(module).items()}  # A plan is on the mesh of one of its ends.
    with module.context:
        for move, fate in decided.items():
            with move.op.location, ir.InsertionPoint(move.op):
                value = _replacement(move, fate, plans.get(move), symbols, channels)
            move.op.results[0].replace_all_uses_with(value)
            move.op.erase()
        for op in walk(module.operation):
            if changed(op) and op not in kept and not any(map(_ends_branch, _users(op))):
                restore(op)
            _suit_xla(op)
    unmark(module)
    module.operation.verify()
    return decided


def inside_manual(op: Operation) -> bool:
    """Whether an operation is inside of a manual computation (a user's `shard_map`)."""
    parent = op.parent
    while parent is not None and parent.operation.name != MANUAL:
        parent = parent.operation.parent
    return parent is not None


def _around(move: Move) -> list[Operation]:
    return [*([move.maker] if move.maker is not None else []), *move.users]


def _users(op: Operation) -> list[Operation]:
    return [user for result in op.results for user in users(result)]


def _ends_branch(op: Operation) -> bool:
    """Whether an operation ends a branch of a conditional: XLA wants all its branches to return one sharding."""
    return op.name == "stablehlo.return" and op.parent.operation.name in ("stablehlo.case", "stablehlo.if")


def _kept(plans: Mapping[Move, Plan]) -> set[Operation]:
    """The operations whose new shardings make the taken reshards what they are."""
    return {op for move in plans for op in _around(move) if changed(op)}


def _replacement(
    move: Move, fate: Fate, plan: Plan | None, symbols: Mapping[Mesh, str], channels: Iterator[int]
) -> Value:
    value = move.op.operands[0]
    if fate is Fate.DROPPED:
        return value
    if plan is None:
        attributes = {"sharding": move.op.attributes["sharding"]}
        return ir.Operation.create("sdy.sharding_constraint", [value.type], [value], attributes).results[0]
    mesh = symbols[plan.source.mesh]
    padded = _resized(value, plan.source.padded_shape, plan.source, mesh)
    return _resized(insert(plan, padded, mesh, channels), tuple(value.type.shape), plan.target, mesh)


def _resized(value: Value, shape: tuple[int, ...], layout: Layout, mesh: str) -> Value:
    """Padded or cut at the high end of each dim: a manual computation takes even tiles only."""
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
    """The result of an operation, made from text: complex constants are no attributes that Python can have."""
    made = ir.Operation.parse(text)
    ir.InsertionPoint.current.insert(made)
    return made.results[0]


def _last_channel(module: Module) -> int:
    used = (str(op.attributes[CHANNEL]) for op in walk(module.operation) if CHANNEL in op.attributes)
    return max((int(found[1]) for text in used if (found := _HANDLE.search(text))), default=0)


def _suit_xla(op: Operation) -> None:
    """What XLA's import of Shardy modules refuses, or crashes on."""
    sharding = op.attributes.get(SHARDING) if op.name in ("sdy.constant", *_BARE) else None
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
