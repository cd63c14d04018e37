"""Shardings read from modules: meshes, values of every kind, and their layouts."""

from __future__ import annotations

import pytest
from jax.interpreters.mlir import make_ir_context

from reshard.errors import LayoutError
from reshard.jax.stablehlo_pass import shardy
from reshard.lower.to_stablehlo import Module, Value, ir, list_operations
from reshard.types.mesh import Mesh

TEXT = """
  sdy.mesh @mesh = <["x"=4, "y"=2]>
  sdy.mesh @turned = <["k"=3], device_ids=[2, 0, 1]>
  sdy.mesh @one = <[]>
  func.func public @main(%a: tensor<16x12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>}, %b: tensor<7xui8>)
      -> tensor<16x12xf32> {
    %c = sdy.sharding_constraint %a <@mesh, [{}, {"x", "y"}]> : tensor<16x12xf32>
    %d = stablehlo.sine %c {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x":(2)2}, {}]>]>} : tensor<16x12xf32>
    %e = stablehlo.cosine %d : tensor<16x12xf32>
    return %e : tensor<16x12xf32>
  }
"""


@pytest.fixture
def module() -> Module:
    return ir.Module.parse(TEXT, make_ir_context())


def values(module: Module) -> dict[str, Value]:
    """The arguments by name, the results by their operations' names."""
    (main,) = (op for op in list_operations(module.operation) if op.name == "func.func")
    block = main.regions[0].blocks[0]
    return {"a": block.arguments[0], "b": block.arguments[1]} | {
        op.operation.name: op.operation.results[0] for op in block.operations if len(op.operation.results)
    }


def test_meshes(module: Module) -> None:
    """One without axes splits nothing, and is not among them."""
    assert shardy.read_meshes(module) == {"mesh": Mesh(x=4, y=2), "turned": Mesh({"k": 3}, device_ids=[2, 0, 1])}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("a", "f32[{y}8, {x}3]"),
        ("b", "u8[7]"),
        ("sdy.sharding_constraint", "f32[16, {x}{y}2/12]"),
        ("stablehlo.sine", "f32[{x:(2)2}8, 12]"),
        ("stablehlo.cosine", "f32[16, 12]"),
    ],
)
def test_layouts_of_values(module: Module, name: str, layout: str) -> None:
    value = values(module)[name]
    sharding = shardy.value_sharding(value)
    assert (sharding is None) == (name in ("b", "stablehlo.cosine"))
    assert str(shardy.read_layout(value, sharding, shardy.read_meshes(module), Mesh(x=4, y=2))) == layout


def test_the_symbol_of_a_mesh(module: Module) -> None:
    assert shardy.mesh_symbol(shardy.value_sharding(values(module)["a"])) == "mesh"
    assert shardy.mesh_symbol(None) == ""
    with module.context:
        inline = ir.Attribute.parse('#sdy.sharding<mesh<["x"=4]>, [{"x"}]>')
    assert shardy.mesh_symbol(inline) == ""


def test_without_a_sharding_an_array_is_whole_on_the_given_mesh(module: Module) -> None:
    whole = shardy.read_layout(values(module)["a"], None, {}, Mesh(z=5))
    assert (str(whole), whole.mesh) == ("f32[16, 12]", Mesh(z=5))


def test_loop_carried_values_have_the_loops_sharding() -> None:
    text = """
      sdy.mesh @mesh = <["x"=4]>
      func.func public @main(%a: tensor<8xf32>, %p: tensor<i1>) -> tensor<8xf32> {
        %w:2 = stablehlo.while(%v = %a, %q = %p) : tensor<8xf32>, tensor<i1>
          attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>, <@mesh, []>]>}
          cond { stablehlo.return %q : tensor<i1> }
          do { stablehlo.return %v, %q : tensor<8xf32>, tensor<i1> }
        return %w#0 : tensor<8xf32>
      }"""
    module = ir.Module.parse(text, make_ir_context())
    (loop,) = (op for op in list_operations(module.operation) if op.name == "stablehlo.while")
    carried = loop.regions[1].blocks[0].arguments[0]
    layout = shardy.read_layout(carried, shardy.value_sharding(carried), shardy.read_meshes(module), Mesh(x=4))
    assert str(layout) == "f32[{x}2]"


@pytest.mark.parametrize(
    ("element", "name"),
    [("i1", "bool"), ("ui8", "u8"), ("i32", "i32"), ("bf16", "bf16"), ("f8E5M2", "f8e5m2"), ("complex<f64>", "c128")],
)
def test_dtypes(element: str, name: str) -> None:
    assert shardy.read_dtype(element) == name


def test_an_element_type_without_a_name_is_refused() -> None:
    module = ir.Module.parse(TEXT.replace("tensor<7xui8>", "tensor<7xi17>"), make_ir_context())
    value = values(module)["b"]
    with pytest.raises(LayoutError, match="i17"):
        shardy.read_layout(value, None, {}, Mesh(x=4))
