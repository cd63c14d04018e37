"""Shardy's dialect in a module: the layouts of its values, and its operations in spellings that XLA imports.

A module that has been through some of Shardy's passes, in a file or from another tool, has more than the shardings and
constraints that `jax.jit` writes. On the whole array, each of these is the identity, which `spell_out` makes it:

    %b = sdy.reshard %a <@mesh, [{"x"}]>                                 sdy.sharding_constraint with its sharding
    %b = sdy.all_gather [{"x"}] %a out_sharding=<@mesh, [{}]>            the same; so are the other collectives
    %b = sdy.data_flow_edge %a                                           %a
    %b = sdy.replicated_to_unreduced {"x"} %a out_sharding=...           %a: XLA decides where it sums
    %b = sdy.named_computation<"f">(%a) (%x) { ... sdy.return %y }       its body, with %a for %x
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.mlir.dialects import sdy as _sdy

from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir, list_operations
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

sdy: Any = _sdy
SHARDING = "sdy.sharding"
MANUAL = "sdy.manual_computation"
CONSTRAINT = "sdy.sharding_constraint"
ALIAS, DONOR = "tf.aliasing_output", "jax.buffer_donor"  # of arguments that a result replaces, or any may
RESHARD = "sdy.reshard"
_DTYPES = {"i1": "bool", "complex<f32>": "c64", "complex<f64>": "c128"}
_COLLECTIVES = ("all_gather", "all_slice", "all_to_all", "collective_permute", "all_reduce", "reduce_scatter")


# ---- meshes, shardings and layouts -----------------------------------------------------------------


def read_meshes(module: Module) -> dict[str, Mesh]:
    """The meshes of a module by symbol, without those of one device or no axes, which split nothing.

    Raises `MeshError` for axis names that the language does not allow.
    """
    result: dict[str, Mesh] = {}
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(op.attributes["mesh"])
            axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
            if any(axis.size > 1 for axis in axes):
                ids = list(mesh.device_ids) or None
                result[op.attributes["sym_name"].value] = Mesh([(a.name, a.size) for a in axes], device_ids=ids)
    return result


def value_sharding(value: Value) -> Attribute | None:
    """The sharding of a value; None, which means that it is not split, if it has no such attribute."""
    block = isinstance(value.owner, ir.Block)
    op = value.owner.owner.operation if block else value.owner.operation
    number = value.arg_number if block else value.result_number
    if block and op.name == "func.func":
        attributes = op.attributes.get("arg_attrs")
        named = () if attributes is None else ir.DictAttr(attributes[number])
        return next((pair.attr for pair in named if pair.name == SHARDING), None)
    if block and op.name != "stablehlo.while":
        return None
    if op.name in (RESHARD, CONSTRAINT):
        return op.attributes["sharding"]
    name = "out_shardings" if op.name == MANUAL else SHARDING
    return sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings[number] if name in op.attributes else None


def mesh_symbol(sharding: Attribute | None) -> str:
    """The symbol of a sharding's mesh; empty without a sharding, or if the mesh is written inline."""
    named: Any = None if sharding is None else sdy.TensorShardingAttr(sharding).mesh_or_ref
    return named.value if isinstance(named, ir.FlatSymbolRefAttr) else ""


def read_value_layout(value: Value, sharding: Attribute | None, known: Mapping[str, Mesh], mesh: Mesh) -> Layout:
    """The layout of a value with this sharding; without one, or on a mesh that splits nothing, replicated on `mesh`.

    Raises `ReshardError` if the language cannot express the layout, for example of a quantized dtype.
    """
    tensor = ir.RankedTensorType(value.type)
    own = known.get(mesh_symbol(sharding))
    text = f"[{', '.join(['{}'] * tensor.rank)}]" if own is None else str(sharding)
    return Layout.from_shardy(text, own or mesh, tuple(tensor.shape), read_dtype(str(tensor.element_type)))


def read_dtype(element: str) -> str:
    """Our name of an MLIR element type.

    >>> read_dtype("ui32"), read_dtype("f8E4M3FN"), read_dtype("complex<f32>")
    ('u32', 'f8e4m3fn', 'c64')
    """
    return _DTYPES.get(element) or ("u" + element[2:] if element.startswith("ui") else element.lower())


# ---- operations ------------------------------------------------------------------------------------


def add_constraint(value: Value, sharding: Attribute | None) -> Value:
    """The value under a sharding constraint, created at MLIR's insertion point; the value itself without a sharding."""
    if sharding is None:
        return value
    return ir.Operation.create(CONSTRAINT, [value.type], [value], {"sharding": sharding}).results[0]


def spell_out(module: Module) -> None:
    """Replaces Shardy's collectives, data flow edges and named computations in a module, in place.

    What is left are operations that propagation starts from.
    """
    _drop_operations(module, "sdy.data_flow_edge", "sdy.func_data_flow_edge")
    for op in _inner_first(module, "sdy.named_computation"):
        # Its body takes its place; its shardings become constraints.
        body = op.regions[0].blocks[0]
        before, after = (
            list(sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings)
            if name in op.attributes
            else [None] * len(values)
            for name, values in (("in_shardings", op.operands), ("out_shardings", op.results))
        )
        with op.location, ir.InsertionPoint(op):
            for argument, operand, sharding in zip(body.arguments, op.operands, before, strict=True):
                argument.replace_all_uses_with(add_constraint(operand, sharding))
        *inner, end = [each.operation for each in body.operations]
        for each in inner:
            each.move_before(op)
        with op.location, ir.InsertionPoint(op):
            values = [add_constraint(*each) for each in zip(end.operands, after, strict=True)]
        end.erase()
        for result, value in zip(op.results, values, strict=True):
            result.replace_all_uses_with(value)
        op.erase()
    _constrain_operations(module, *(f"sdy.{name}" for name in _COLLECTIVES))


def make_compilable(module: Module) -> None:
    """Replaces all operations of Shardy that XLA does not import, in place."""
    spell_out(module)
    _drop_operations(module, "sdy.replicated_to_unreduced", "sdy.sharded_to_unreduced")
    _constrain_operations(module, RESHARD)


def _inner_first(module: Module, *names: str) -> Iterator[Operation]:
    """The operations of these names; those inside one come before it."""
    yield from reversed([op for op in list_operations(module.operation) if op.name in names])


def _drop_operations(module: Module, *names: str) -> None:
    for op in _inner_first(module, *names):
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _constrain_operations(module: Module, *names: str) -> None:
    """Replaces operations by constraints with their shardings."""
    for op in _inner_first(module, *names):
        sharding = next(op.attributes[name] for name in ("sharding", "out_sharding") if name in op.attributes)
        with op.location, ir.InsertionPoint(op):
            value = add_constraint(op.operands[0], sharding)
        op.results[0].replace_all_uses_with(value)
        op.erase()
