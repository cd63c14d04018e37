"""The rewritten module: what becomes of each reshard, and what XLA's import requires."""

from __future__ import annotations

import re
from dataclasses import replace

from jax.interpreters.mlir import make_ir_context

import reshard as rs
from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp, make_explicit, reshard_ops
from reshard.jax.stablehlo_pass.module_pass import transform
from reshard.jax.stablehlo_pass.rewrite import ReshardOutcome, decide_outcomes, replace_reshards
from reshard.lower.to_stablehlo import Module, ir
from tests.jax.modules import COLUMNS, SWAPPED, TYPE, constraint, count, module, uneven


def explicit(text: str) -> tuple[Module, list[ReshardOp]]:
    parsed = ir.Module.parse(text, make_ir_context())
    make_explicit(parsed)
    return parsed, reshard_ops(parsed)


def plan(op: ReshardOp) -> rs.Plan:
    assert op.source is not None and op.target is not None
    return rs.plan(op.source, op.target)


ADDITION = f"""{constraint(SWAPPED, result="%b")}
  %c = stablehlo.add %a, %b {{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{{"x"}}, {{"y"}}]>]>}} : {TYPE}
  {constraint(COLUMNS, "%c")}"""


def test_fates() -> None:
    """Three reshards: two of the user's, and one that the addition requires."""
    _, ops = explicit(module(ADDITION))
    assert [op.by_user for op in ops] == [True, False, True]
    assert list(decide_outcomes(ops, {}).values()) == [
        ReshardOutcome.PINNED,
        ReshardOutcome.DROPPED,
        ReshardOutcome.PINNED,
    ]
    every = {op: plan(op) for op in ops}
    assert set(decide_outcomes(ops, every).values()) == {ReshardOutcome.TAKEN}


def test_a_taken_reshard_is_a_manual_computation() -> None:
    transformed, ops = explicit(module(ADDITION))
    decided = replace_reshards(transformed, ops, {ops[1]: plan(ops[1])})
    assert list(decided.values()) == [ReshardOutcome.PINNED, ReshardOutcome.TAKEN, ReshardOutcome.PINNED]
    text = str(transformed)
    assert count(text, "sdy.manual_computation") == 1 and count(text, "sdy.sharding_constraint") == 2
    assert 'in_shardings=[<@mesh, [{"y"}, {"x"}]>] out_shardings=[<@mesh, [{"x"}, {"y"}]>]' in text


def test_both_branches_of_a_conditional_keep_one_sharding() -> None:
    """XLA requires it of their results: a reshard at the end of a branch is pinned, not dropped."""
    body = f"""%k = stablehlo.constant dense<true> : tensor<i1>
      %r = "stablehlo.if"(%k) ({{
        %b = stablehlo.sine %a : {TYPE}
        {constraint(COLUMNS, "%b", "%c")}
        stablehlo.return %c : {TYPE}
      }}, {{
        stablehlo.return %a : {TYPE}
      }}) : (tensor<i1>) -> {TYPE}"""
    _, ops = explicit(module(body))
    at_ends = [replace(op, by_user=False) for op in ops if any(user.name == "stablehlo.return" for user in op.users)]
    moving = [op for op in at_ends if op.source != op.target]
    assert moving and set(decide_outcomes(moving, {}).values()) == {ReshardOutcome.PINNED}
    idle = [replace(op, target=op.source) for op in moving]
    assert set(decide_outcomes(idle, {}).values()) == {ReshardOutcome.DROPPED}


def test_uneven_tiles_are_padded_around_the_move() -> None:
    transformed = transform(uneven('[{"x"}, {}]', '[{}, {"x"}]', 10))
    (_, moved, *_) = transformed.report.reshards
    assert (str(moved.source), str(moved.target), moved.taken) == ("f32[{x}3/10, 16]", "f32[10, {x}4]", True)
    assert re.search(r"manual_computation.*(\n.*)*: \(tensor<12x16xf32>\) -> tensor<10x16xf32>", transformed.text)


def test_the_same_padding_is_moved_along() -> None:
    """30 in 4 pieces of 8 and in 8 pieces of 4 is padded to 32 both times: one all-to-all of 32."""
    transformed = transform(uneven('[{"x"}, {"y"}]', '[{"x", "y"}, {}]', 30))
    (reshard,) = transformed.report.taken
    assert (str(reshard.source), str(reshard.target)) == ("f32[{x}8/30, {y}8]", "f32[{x}{y}4/30, 16]")
    assert re.search(r"manual_computation.*(\n.*)*: \(tensor<32x16xf32>\) -> tensor<32x16xf32>", transformed.text)
    assert "[0:30, 0:16]" in transformed.text


def test_channels_are_numbered_anew() -> None:
    body = f"{constraint(COLUMNS, result='%b')}\n{constraint(SWAPPED, '%b')}"
    handles = re.findall(r"channel_handle<handle = (\d+)", transform(module(body)).text)
    assert len(handles) >= 2 and len(set(handles)) == len(handles)


def test_complex_and_large_constants_survive() -> None:
    """MLIR's Python has no complex constants: touching one ends the process."""
    numbers = ", ".join(f"({at}.0, -{at}.5)" for at in range(16))
    body = f"""%k = stablehlo.constant dense<[{numbers}]> : tensor<16xcomplex<f32>>
      %w = stablehlo.broadcast_in_dim %k, dims = [0] : (tensor<16xcomplex<f32>>) -> {TYPE}
      %b = stablehlo.multiply %a, %w : {TYPE}
      {constraint(COLUMNS, "%b")}"""
    text = transform(module(body).replace("xf32>", "xcomplex<f32>>").replace("complex<complex<f32>>", "complex<f32>"))
    assert "sdy.constant" not in text.text and "elided" not in text.text and "-1.550000e+01" in text.text
    assert len(text.report.taken) == 1
