"""Plans as StableHLO: what a module of a plan contains, and how it is inserted into another one.

That inserted plans compute the right values is tested on whole programs, in tests/jax.
"""

from __future__ import annotations

import itertools
import re

import pytest
from jax.interpreters.mlir import make_ir_context

import reshard as rs
from reshard.errors import PlanError
from reshard.lower.to_stablehlo import framed, insert, ir, run_passes, tile_module, walk
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.types import Layout, Mesh

M42 = Mesh(x=4, y=2)


def one_step(kind: str, source: str, target: str, mesh: Mesh = M42) -> Plan:
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    return chain(before, after, [StepSpec(kind, after)])


def operations(module) -> list[str]:
    return [op.name for op in walk(module.operation)]


@pytest.fixture(autouse=True)
def context():
    """MLIR with the dialects that jax registers."""
    with make_ir_context(), ir.Location.unknown():
        yield


@pytest.mark.parametrize(
    ("kind", "source", "target", "operation", "operand", "result"),
    [
        ("all_gather", "f32[{x}4, 3]", "f32[16, 3]", "all_gather", "tensor<4x3xf32>", "tensor<16x3xf32>"),
        ("all_to_all", "s8[{x}4, 8]", "s8[16, {x}2]", "all_to_all", "tensor<4x8xi8>", "tensor<16x2xi8>"),
        ("permute", "f64[{x}{y}2]", "f64[{y}{x}2]", "collective_permute", "tensor<2xf64>", "tensor<2xf64>"),
        ("reduce_scatter", "f32[16] + sum{x}", "f32[{x}4]", "reduce_scatter", "tensor<16xf32>", "tensor<4xf32>"),
        ("all_reduce", "f32[5] + max{y}", "f32[5]", "all_reduce", "tensor<5xf32>", "tensor<5xf32>"),
        ("all_gather", "f32[{x}3/10]", "f32[10]", "all_gather", "tensor<3xf32>", "tensor<10xf32>"),
    ],
)
def test_a_step_is_one_collective_in_one_function(
    kind: str, source: str, target: str, operation: str, operand: str, result: str
):
    text = tile_module(one_step(kind, source, target))
    assert f"func.func @tile(%arg0: {operand}) -> {result} {{" in text
    assert text.count("func.func") == 1
    assert re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text) == [operation]
    assert not re.search(r"sdy\.|call @|mesh_axes", text), "refers to something outside"


@pytest.mark.parametrize(
    ("source", "groups"),
    [
        ("f32[{x}4]", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("f32[{y}8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("f32[{y}{x}2]", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("f32[{x:(1)2}8]", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_groups_are_lists_of_devices(source: str, groups: list[list[int]]):
    text = tile_module(one_step("all_gather", source, "f32[16]"))
    assert f"replica_groups = dense<{groups}>" in text.replace("\n", " ")


def test_what_has_no_module():
    mesh = Mesh({"x": 2}, device_ids=[1, 0])
    reordered = one_step("all_gather", "f32[{x}2]", "f32[4]", mesh)
    scalar = one_step("all_reduce", "f32[] + sum{x}", "f32[]")
    for plan in (reordered, scalar):
        with pytest.raises(PlanError, match="has no dims, or its mesh has device ids of its own"):
            tile_module(plan)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("f32[{y}8, {x:(1)2}8]", '<@m, [{"y"}, {"x":(1)2}]>'),
        ("f32[16, {x}{y}2]", '<@m, [{}, {"x", "y"}]>'),
        ("f32[{x:(2)2}{y}4]", '<@m, [{"x":(2)2, "y"}]>'),
        ("f32[7]", "<@m, [{}]>"),
    ],
)
def test_layouts_as_shardings(layout: str, text: str):
    assert framed(Layout.parse(layout, M42), "m") == text


PROGRAM = """
module {
  sdy.mesh @other = <["x"=4, "y"=2]>
  func.func @main(%arg0: tensor<16x16xf32>) -> tensor<16x16xf32> {
    return %arg0 : tensor<16x16xf32>
  }
}
"""


def test_a_plan_is_inserted_as_a_manual_computation():
    plan = rs.plan(Layout.parse("f32[{x}4, {y}8]", M42), Layout.parse("f32[{y}8, {x}4]", M42))
    module = ir.Module.parse(PROGRAM)
    main = module.body.operations[1]
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        moved = insert(plan, block.arguments[0], "other", itertools.count(7))
    assert module.operation.verify()
    text = str(module)
    assert str(moved.type) == "tensor<16x16xf32>"
    assert 'in_shardings=[<@other, [{"x"}, {"y"}]>] out_shardings=[<@other, [{"y"}, {"x"}]>]' in text
    assert 'manual_axes={"x", "y"}' in text
    handles = re.findall(r"handle = (\d+)", text)
    assert handles == [str(7 + at) for at in range(len(handles))] != []


def test_operations_are_listed_before_they_change():
    module = ir.Module.parse(PROGRAM)
    assert [op.name for op in walk(module.operation)] == ["sdy.mesh", "func.func", "func.return"]
    for op in walk(module.operation)[:1]:
        op.erase()
    assert operations(module) == ["func.func", "func.return"]


def test_passes_run_in_place():
    twice = "%0 = stablehlo.constant dense<1> : tensor<i32> %1 = stablehlo.constant dense<1> : tensor<i32>"
    module = ir.Module.parse(
        f"func.func @f() -> (tensor<i32>, tensor<i32>) {{ {twice} return %0, %1 : tensor<i32>, tensor<i32> }}"
    )
    assert operations(module).count("stablehlo.constant") == 2
    run_passes(module, "canonicalize,cse")
    assert operations(module).count("stablehlo.constant") == 1
