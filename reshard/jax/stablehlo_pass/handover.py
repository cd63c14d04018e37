"""What a module hands to XLA: shardings in the forms that JAX's own lowering uses, and in no other.

Shardy's propagation writes a sharding on every operation and on every function. JAX writes shardings in three places:

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

from collections.abc import Collection
from typing import Any

from reshard.jax.stablehlo_pass.shardings import SHARDING, sdy
from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir, list_operations

CONSTRAINT = "sdy.sharding_constraint"
GIVEN = "reshard.given"
_FUNCTION = "func.func"
_ON_VALUES = ("arg_attrs", "res_attrs")
# Operations on which XLA cannot import a sharding even if the program has it; JAX never writes one there.
_NEVER = ("stablehlo.while",)


def mark_given(module: Module) -> None:
    """Marks the operations that have shardings already; `make_importable` removes the marks."""
    for op in list_operations(module.operation):
        if SHARDING in op.attributes and op.name not in _NEVER:
            op.attributes[GIVEN] = op.attributes[SHARDING]


def make_importable(module: Module, kept: Collection[Operation]) -> None:
    """Goes back to the shardings of before propagation, except for the operations in `kept`, and except in `main`."""
    for op in list_operations(module.operation):
        if op.name == _FUNCTION:
            _without_shardings(op)
            continue
        if SHARDING in op.attributes or GIVEN in op.attributes:
            _restore_operation(op, op in kept)
        if op.name == "sdy.constant":
            # XLA does not import constants of Shardy.
            text = op.get_asm(print_generic_op_form=True)
            with op.location, ir.InsertionPoint(op):
                made = parse_operation(text.replace('"sdy.constant"', '"stablehlo.constant"', 1))
            op.results[0].replace_all_uses_with(made)
            op.erase()


def add_constraint(value: Value, sharding: Attribute) -> Value:
    """The value under a sharding constraint, created at MLIR's insertion point."""
    return ir.Operation.create(CONSTRAINT, [value.type], [value], {"sharding": sharding}).results[0]


def parse_operation(text: str) -> Value:
    """The result of an operation created from text, because Python has no attributes for complex constants."""
    made = ir.Operation.parse(text)
    ir.InsertionPoint.current.insert(made)
    return made.results[0]


def _without_shardings(function: Operation) -> None:
    """Removes the shardings of a function's arguments and results, unless it is the program's public one."""
    if "sym_visibility" not in function.attributes or function.attributes["sym_visibility"].value != "private":
        return
    for name in _ON_VALUES:
        if name in function.attributes:
            function.attributes[name] = ir.ArrayAttr.get(list(map(_without_sharding, function.attributes[name])))


def _restore_operation(op: Operation, keep: bool) -> None:
    """Gives an operation the sharding that it had before propagation, or with `keep` leaves it the present one.

    An operation without a sharding of its own keeps it as a constraint on each result.
    """
    if GIVEN in op.attributes:
        if not keep:
            op.attributes[SHARDING] = op.attributes[GIVEN]
        del op.attributes[GIVEN]
        return
    if keep and op.name not in _NEVER:
        _constrain_results(op)
    del op.attributes[SHARDING]


def _without_sharding(attributes: Any) -> Attribute:
    return ir.DictAttr.get({named.name: named.attr for named in ir.DictAttr(attributes) if named.name != SHARDING})


def _constrain_results(op: Operation) -> None:
    """Puts a constraint after each result of an operation with the sharding that the operation has now.

    Scalars and tokens cannot be split, so they need none.
    """
    shardings = sdy.TensorShardingPerValueAttr(op.attributes[SHARDING]).shardings
    for result, sharding in zip(op.results, shardings, strict=True):
        if not isinstance(result.type, ir.RankedTensorType) or ir.RankedTensorType(result.type).rank == 0:
            continue
        with op.location, ir.InsertionPoint.after(op):
            value = add_constraint(result, sharding)
        result.replace_all_uses_except(value, value.owner.operation)
