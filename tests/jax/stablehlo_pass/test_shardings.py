"""Shardings read from modules: meshes, values of every kind, and their layouts."""

from __future__ import annotations

import pytest
from jax.interpreters.mlir import make_ir_context

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
    assert str(shardy.read_value_layout(value, sharding, shardy.read_meshes(module), Mesh(x=4, y=2))) == layout


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
    layout = shardy.read_value_layout(carried, shardy.value_sharding(carried), shardy.read_meshes(module), Mesh(x=4))
    assert str(layout) == "f32[{x}2]"
