"""The rewritten module: what becomes of each reshard, and what XLA's import requires."""

from __future__ import annotations

import re

import reshard as rs
from reshard.jax.stablehlo_pass.explicit_reshards import ReshardOp
from reshard.jax.stablehlo_pass.module_pass import transform
from tests.jax.modules import COLUMNS, SWAPPED, TYPE, constraint, module, uneven


def plan(op: ReshardOp) -> rs.Plan:
    assert op.source is not None and op.target is not None
    return rs.plan(op.source, op.target)


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
