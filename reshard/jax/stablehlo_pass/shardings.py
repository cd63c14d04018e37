"""Reads the meshes, shardings and layouts of values in a module of the Shardy dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.mlir.dialects import sdy as _sdy

from reshard.lower.to_stablehlo import Attribute, Module, Operation, Value, ir
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

sdy: Any = _sdy
SHARDING = "sdy.sharding"
MANUAL = "sdy.manual_computation"
_DTYPES = {"i1": "bool", "complex<f32>": "c64", "complex<f64>": "c128"}


def read_meshes(module: Module) -> dict[str, Mesh]:
    """The meshes of a module by symbol, without those of one device or no axes, which split nothing.

    Raises `MeshError` for axis names that our notation does not allow.
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


def result_sharding(op: Operation, number: int) -> Attribute | None:
    """The sharding of an operation's result; None, which means that it is not split, if it has no such attribute."""
    if op.name in ("sdy.reshard", "sdy.sharding_constraint"):
        return op.attributes["sharding"]
    name = "out_shardings" if op.name == MANUAL else SHARDING
    return sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings[number] if name in op.attributes else None


def value_sharding(value: Value) -> Attribute | None:
    """The sharding of a value; None, which means that it is not split, if it has no such attribute."""
    if not isinstance(value.owner, ir.Block):
        return result_sharding(value.owner.operation, value.result_number)
    op = value.owner.owner.operation
    if op.name == "func.func":
        attributes = op.attributes.get("arg_attrs")
        named = () if attributes is None else ir.DictAttr(attributes[value.arg_number])
        return next((pair.attr for pair in named if pair.name == SHARDING), None)
    return result_sharding(op, value.arg_number) if op.name == "stablehlo.while" else None


def mesh_symbol(sharding: Attribute | None) -> str:
    """The symbol of a sharding's mesh; empty without a sharding, or if the mesh is written inline."""
    named: Any = None if sharding is None else sdy.TensorShardingAttr(sharding).mesh_or_ref
    return named.value if isinstance(named, ir.FlatSymbolRefAttr) else ""


def read_layout(value: Value, sharding: Attribute | None, known: Mapping[str, Mesh], mesh: Mesh) -> Layout:
    """The layout of a value with this sharding; without one, or on a mesh that splits nothing, replicated on `mesh`.

    Raises `ReshardError` if our notation cannot express the layout, for example of a quantized dtype.
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
