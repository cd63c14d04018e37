"""Moves written into StableHLO modules: what they are made of; tests/jax has whole programs that compute with them."""

from __future__ import annotations

import itertools
import re

import pytest
from jax.interpreters.mlir import make_ir_context

import reshard as rs
from reshard.errors import PlanError
from reshard.lower.to_stablehlo import insert_plan, ir, list_operations, spell_sharding
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.types import Layout, Mesh

M42 = Mesh(x=4, y=2)


def one_step(kind: str, source: str, target: str, mesh: Mesh = M42) -> Plan:
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    return chain(before, after, [StepSpec(kind, after)])


def insert(plan: Plan, element: str = "f32", first: int = 1) -> str:
    """A module of a mesh `other` and a function, with a plan at its beginning; MLIR accepts it."""
    axes = ", ".join(f'"{name}"={size}' for name, size in plan.source.mesh.axes.items())
    tensor = f"tensor<{''.join(f'{size}x' for size in plan.source.shape)}{element}>"
    with make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(
            f"sdy.mesh @other = <[{axes}]> func.func @main(%a: {tensor}) -> {tensor} {{ return %a : {tensor} }}"
        )
        block = module.body.operations[1].regions[0].blocks[0]
        with ir.InsertionPoint.at_block_begin(block):
            moved = insert_plan(plan, block.arguments[0], "other", itertools.count(first))
        assert str(moved.type) == tensor and module.operation.verify()
        names = [op.name for op in list_operations(module.operation)]
        assert names[:2] == ["sdy.mesh", "func.func"] and "func.call" not in names
        return str(module)


@pytest.mark.parametrize(
    ("kind", "source", "target", "operation", "types"),
    [
        ("all_gather", "f32[{x}4, 3]", "f32[16, 3]", "all_gather", "tensor<4x3xf32>) -> tensor<16x3xf32>"),
        ("all_to_all", "s8[{x}4, 8]", "s8[16, {x}2]", "all_to_all", "tensor<4x4x2xi8>) -> tensor<4x4x2xi8>"),
        ("permute", "f64[{x}{y}2]", "f64[{y}{x}2]", "collective_permute", "tensor<2xf64>) -> tensor<2xf64>"),
        ("reduce_scatter", "f32[16] + sum{x}", "f32[{x}4]", "reduce_scatter", "tensor<4x4xf32>) -> tensor<1x4xf32>"),
        ("all_reduce", "f32[5] + max{y}", "f32[5]", "all_reduce", "tensor<5xf32>) -> tensor<5xf32>"),
        ("all_gather", "f32[{x}3/10]", "f32[10]", "all_gather", "tensor<3xf32>) -> tensor<12xf32>"),
    ],
)
def test_a_step_is_one_collective(kind: str, source: str, target: str, operation: str, types: str):
    plan = one_step(kind, source, target)
    text = insert(plan, {"int8": "i8", "float64": "f64", "float32": "f32"}[plan.source.dtype])
    assert re.findall(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)", text) == [operation]
    assert types in text
    assert "mesh_axes" not in text, "groups refer to a mesh of another module"


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
    assert f"replica_groups = dense<{groups}>" in insert(one_step("all_gather", source, "f32[16]")).replace("\n", " ")


def test_a_move_is_a_manual_computation_with_channels_of_its_own():
    text = insert(rs.plan(Layout.parse("f32[{x}4, {y}8]", M42), Layout.parse("f32[{y}8, {x}4]", M42)), first=7)
    assert 'in_shardings=[<@other, [{"x"}, {"y"}]>] out_shardings=[<@other, [{"y"}, {"x"}]>]' in text
    assert 'manual_axes={"x", "y"}' in text
    handles = re.findall(r"handle = (\d+)", text)
    assert handles == [str(7 + at) for at in range(len(handles))] != []


@pytest.mark.parametrize("dtype", ["f32", "s32", "c64"])
def test_uneven_arrays_are_padded_before_and_cut_after(dtype: str):
    """10 elements in 4 pieces of 3 are 12; the gathered ones are 10 again."""
    element = {"f32": "f32", "s32": "i32", "c64": "complex<f32>"}[dtype]
    text = insert(one_step("permute", f"{dtype}[{{x}}3/10]", f"{dtype}[{{x}}3/10]"), element)
    assert re.search(rf"stablehlo\.pad.*tensor<12x{element}>", text)
    assert re.search(rf"stablehlo\.slice.*tensor<10x{element}>", text)
    assert text.count("sdy.sharding_constraint") == 2 and text.count('<@other, [{"x"}]>') == 4


def test_what_stablehlo_cannot_say_is_refused():
    mesh = Mesh({"x": 2}, device_ids=[1, 0])
    reordered = one_step("all_gather", "f32[{x}2]", "f32[4]", mesh)
    scalar = one_step("all_reduce", "f32[] + sum{x}", "f32[]")
    for plan in (reordered, scalar):
        with pytest.raises(PlanError, match="has no dims, or its mesh has device ids of its own"):
            insert(plan)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("f32[{y}8, {x:(1)2}8]", '<@m, [{"y"}, {"x":(1)2}]>'),
        ("f32[16, {x}{y}2]", '<@m, [{}, {"x", "y"}]>'),
        ("f32[7] + max{x:(2)2}", '<@m, [{}], unreduced=max{"x":(2)2}>'),
    ],
)
def test_layouts_as_shardings(layout: str, text: str):
    assert spell_sharding(Layout.parse(layout, M42), "m") == text
