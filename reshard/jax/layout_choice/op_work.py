"""What operations take on one device, as far as it depends on shapes: floating-point operations, and bytes read.

XLA's own count, `jax.stages.Lowered.cost_analysis`, is the same for products, convolutions, sorts and sums, where it
takes milliseconds each; it has none of solvers and factorizations, and takes a cumulative sum for a square one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.mlir.dialects import stablehlo as _stablehlo

from reshard.jax.layout_choice.step_flow import FlowOp, StepFlow
from reshard.lower.to_stablehlo import Operation
from reshard.types import dtypes

stablehlo: Any = _stablehlo
_FACTORING = ("stablehlo.cholesky", "stablehlo.triangular_solve", "stablehlo.custom_call")
_SLICING = ("stablehlo.slice", "stablehlo.dynamic_slice", "stablehlo.gather")


def count_flops(op: Operation, placed: FlowOp, flow: StepFlow) -> float:
    """The floating-point operations of one run: a multiplication and an addition are two."""
    if not placed.results:
        return 0.0
    made = flow.values[placed.results[0]].elements
    shapes = [flow.values[operand].shape for operand in placed.operands]
    match placed.name.rpartition(".")[2]:
        case "dot_general":
            numbers: Any = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
            return 2.0 * made * math.prod(shapes[0][dim] for dim in list[int](numbers.lhs_contracting_dimensions))
        case "convolution":
            numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
            kernel = list[int](numbers.kernel_spatial_dimensions)
            strides, spread, dilation = (
                list[int](op.attributes[name]) if name in op.attributes else [1] * len(kernel)
                for name in ("window_strides", "lhs_dilation", "rhs_dilation")
            )
            pads = np.array(op.attributes["padding"]) if "padding" in op.attributes else np.zeros((len(kernel), 2), int)
            sums = float(shapes[1][int(numbers.kernel_input_feature_dimension)])
            images, results = list[int](numbers.input_spatial_dimensions), list[int](numbers.output_spatial_dimensions)
            for at, (image, result) in enumerate(zip(images, results, strict=True)):
                size = flow.values[placed.results[0]].shape[result]
                taps = dilation[at] * np.arange(shapes[1][kernel[at]]) - pads[at, 0]
                sums *= count_taps(shapes[0][image], size, taps, strides[at], spread[at]) / max(1, size)
            return 2.0 * made * sums
        # The usual count of a transform of n numbers, 5 n log2 n.
        case "fft":
            return 5.0 * made * math.log2(max(2, math.prod(list[int](op.attributes["fft_length"]))))
        case "sort":
            return made * math.log2(max(2, made))
        # One operation for each element that goes in.
        case "reduce" | "reduce_window" | "select_and_scatter" | "top_k":
            return float(max(math.prod(shape) for shape in shapes))
        case "scatter":
            return float(math.prod(shapes[-1]))
        case _:
            # A factorization of n x m takes about n m min(n, m), whichever it is.
            if placed.name in _FACTORING and shapes and len(shapes[0]) > 1:
                return float(math.prod(shapes[0]) * min(shapes[0][-2:]))
            return float(made)


def count_taps(extent: int, size: int, taps: np.ndarray, stride: int, spread: int) -> int:
    """The elements of an image that the taps of a kernel meet along a dim, over all places in the result together.

    What is padded, or lies between the elements of an image that is spread out, is not multiplied: a TPU has products
    over a dim that both operands keep as convolutions, whose kernel meets one element of each window.

    >>> count_taps(8, 8, np.arange(8) - 7, 1, 1), count_taps(8, 8, np.arange(3) - 1, 1, 1)
    (36, 22)
    """
    places = stride * np.arange(size)
    return sum(
        int(np.count_nonzero((places >= -tap) & (places + tap < spread * extent) & ((places + tap) % spread == 0)))
        for tap in taps.tolist()
    )


def count_read_bytes(placed: FlowOp, place: int, flow: StepFlow) -> int:
    """The bytes of an operand that one run reads; slices read what they take, updates what they write."""
    value = flow.values[placed.operands[place]]
    elements = value.elements
    # A slice of one layer of a stack reads that layer, not the stack.
    if place == 0 and placed.name in _SLICING:
        elements = min(elements, flow.values[placed.results[0]].elements)
    # It writes in place what it updates: the rest is not touched.
    if place == 0 and placed.name in ("stablehlo.dynamic_update_slice", "stablehlo.scatter"):
        elements = min(elements, flow.values[placed.operands[-1 if placed.name.endswith("scatter") else 1]].elements)
    return dtypes.nbytes(elements, value.dtype)
