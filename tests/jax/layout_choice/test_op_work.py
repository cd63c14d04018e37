"""The work of operations by shapes is that which XLA counts, where it counts any."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from reshard.jax.layout_choice.op_work import count_flops
from reshard.jax.layout_choice.step_flow import read_flow
from reshard.jax.layout_choice.trace_step import trace_step


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def convolve(strides=1, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda image, kernel: lax.conv_general_dilated(
        image, kernel, (strides, strides), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def grad_of(f, at):
    return lambda *given: jax.vjp(f, *given[:-1])[1](given[-1])[at]


def pool(image):
    return lax.reduce_window(image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


IMAGE, KERNEL, MADE, FEW = f32(8, 32, 32, 16), f32(3, 3, 16, 32), f32(8, 32, 32, 32), f32(8, 16, 16, 32)
NUMBERS = jax.ShapeDtypeStruct((128,), "int32")


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        pytest.param(jnp.matmul, (f32(4, 64, 128), f32(4, 128, 32)), id="product"),
        pytest.param(convolve(), (IMAGE, KERNEL), id="convolution"),
        pytest.param(convolve(2), (IMAGE, KERNEL), id="convolution with strides"),
        pytest.param(convolve(groups=16), (IMAGE, f32(3, 3, 1, 16)), id="convolution by groups"),
        pytest.param(grad_of(convolve(2), 0), (IMAGE, KERNEL, FEW), id="gradient of an image"),
        pytest.param(grad_of(convolve(2), 1), (IMAGE, KERNEL, FEW), id="gradient of a kernel"),
        pytest.param(grad_of(convolve(groups=16), 1), (IMAGE, f32(3, 3, 1, 16), IMAGE), id="gradient by groups"),
        pytest.param(lambda x: jnp.fft.fft(lax.complex(x, x)), (f32(64, 1024),), id="transform"),
        pytest.param(jnp.sort, (f32(64, 1024),), id="sort"),
        pytest.param(lambda x: x.sum(0), (f32(64, 1024),), id="sum"),
        pytest.param(pool, (IMAGE,), id="windows"),
        pytest.param(lambda x, at: jax.ops.segment_sum(x, at, 16), (f32(128, 64), NUMBERS), id="scatter to few"),
        pytest.param(lambda x, y, at: x.at[at].add(y), (f32(65536, 64), f32(128, 64), NUMBERS), id="scatter to many"),
    ],
)
def test_operations_are_counted_as_by_the_compiler(f, shapes):
    step = trace_step(f, shapes, platform="cpu")
    flow = read_flow(step)
    with step.module.context:
        counted = sum(count_flops(step.ops[at], op, flow) for at, op in flow.ops.items())
    theirs = jax.jit(f).lower(*shapes).cost_analysis()
    # A transform takes 5 n log n operations, where XLA says 8; of others, edges and constants.
    assert 0.6 < counted / theirs["flops"] < 1.5
