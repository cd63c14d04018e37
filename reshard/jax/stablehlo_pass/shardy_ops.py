"""Spells the operations of Shardy that XLA does not import in those that it does, by what they mean.

A module that has been through some of Shardy's passes, in a file or from another tool, has more than the shardings and
constraints that `jax.jit` writes. On the whole array, each of these is the identity:

    %b = sdy.reshard %a <@mesh, [{"x"}]>                                 sdy.sharding_constraint with its sharding
    %b = sdy.all_gather [{"x"}] %a out_sharding=<@mesh, [{}]>            the same; so are the other collectives
    %b = sdy.data_flow_edge %a                                           %a
    %b = sdy.replicated_to_unreduced {"x"} %a out_sharding=...           %a: XLA decides where it sums
    %b = sdy.named_computation<"f">(%a) (%x) { ... sdy.return %y }       its body, with %a for %x
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reshard.jax.stablehlo_pass.shardings import sdy
from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir, list_operations

_COLLECTIVES = ("all_gather", "all_slice", "all_to_all", "collective_permute", "all_reduce", "reduce_scatter")
_MOVES = ("sdy.reshard", *(f"sdy.{name}" for name in _COLLECTIVES))
_EDGES = ("sdy.data_flow_edge", "sdy.func_data_flow_edge")
_UNREDUCED = ("sdy.replicated_to_unreduced", "sdy.sharded_to_unreduced")
_NAMED = "sdy.named_computation"
_SHARDINGS = ("sharding", "out_sharding")


def spell_out(module: Module) -> None:
    """Replaces Shardy's collectives, data flow edges and named computations in a module, in place.

    What is left are operations that propagation starts from.
    """
    for op in _inner_first(module, *_EDGES):
        _replace_operation(op, [op.operands[0]])
    for op in _inner_first(module, _NAMED):
        _inline_computation(op)
    for op in _inner_first(module, *_MOVES[1:]):
        _replace_operation(op, [_constrain_before(op.operands[0], _own_sharding(op), op)])


def make_compilable(module: Module) -> None:
    """Replaces all operations of Shardy that XLA does not import, in place."""
    spell_out(module)
    for op in _inner_first(module, *_UNREDUCED):
        _replace_operation(op, [op.operands[0]])
    for op in _inner_first(module, "sdy.reshard"):
        _replace_operation(op, [_constrain_before(op.operands[0], _own_sharding(op), op)])


def _inner_first(module: Module, *names: str) -> Iterator[Operation]:
    """The operations of these names; those inside one come before it."""
    yield from reversed([op for op in list_operations(module.operation) if op.name in names])


def _own_sharding(op: Operation) -> Attribute:
    return next(op.attributes[name] for name in _SHARDINGS if name in op.attributes)


def _replace_operation(op: Operation, values: list[Value]) -> None:
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _constrain_before(value: Value, sharding: Attribute | None, before: Operation) -> Value:
    """The value with a constraint, inserted before an operation; the value itself without a sharding."""
    if sharding is None:
        return value
    with before.location, ir.InsertionPoint(before):
        attributes = {"sharding": sharding}
        return ir.Operation.create("sdy.sharding_constraint", [value.type], [value], attributes).results[0]


def _inline_computation(op: Operation) -> None:
    """Puts the body of a named computation in its place; its shardings become constraints."""
    body = op.regions[0].blocks[0]
    operands = zip(body.arguments, op.operands, _shardings_named(op, "in_shardings"), strict=True)
    for argument, operand, sharding in operands:
        argument.replace_all_uses_with(_constrain_before(operand, sharding, op))
    *inner, end = [each.operation for each in body.operations]
    for each in inner:
        each.move_before(op)
    results = zip(end.operands, _shardings_named(op, "out_shardings"), strict=True)
    values = [_constrain_before(value, sharding, op) for value, sharding in results]
    end.erase()
    _replace_operation(op, values)


def _shardings_named(op: Operation, name: str) -> list[Any]:
    """The shardings of a computation's operands or results; None for each if it has none."""
    if name in op.attributes:
        return list(sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings)
    return [None] * len(op.operands if name == "in_shardings" else op.results)
