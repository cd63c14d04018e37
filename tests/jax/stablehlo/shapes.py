"""Operations that move elements, choose them or combine many of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.jax.stablehlo.base import OpCase, emit
from tests.jax.stablehlo.elementwise import complex_of, whole

X = "tensor<16x16xf32>"
NORM = "{epsilon = 0.001 : f32, feature_index = 1 : i64}"


def text(body: str, out: str = X):
    """A function from text, `%0` to `%1`, whose type is that of `out`."""
    *sizes, _ = out.removeprefix("tensor<").removesuffix(">").split("x")
    shape = [int(size) for size in sizes]
    return lambda x: emit(f"{body}\nreturn %1 : {out}", x, out=[("f4", *shape)])


def _convolved(x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")


def _gathered(x: jax.Array) -> jax.Array:
    return x[whole(x)[:, 0] % 16]


def _select_and_scatter(x: jax.Array) -> jax.Array:
    """The gradient of a max-pool over two dims of an image, of 16 x 16 pixels with one channel."""

    def pooled(v: jax.Array) -> jax.Array:
        window = (1, 2, 2, 1)
        largest = lax.reduce_window(v.reshape(1, 16, 16, 1), -jnp.inf, lax.max, window, window, "VALID")
        return (largest * jnp.arange(64.0).reshape(1, 8, 8, 1)).sum()

    return jax.grad(pooled)(x)


def _positive_definite(x: jax.Array) -> jax.Array:
    return x @ x.T + 16 * jnp.eye(16, dtype=x.dtype)


MOVES = (
    OpCase(
        "broadcast",
        text(
            "%1 = stablehlo.broadcast %0, sizes = [8] : (tensor<16x16xf32>) -> tensor<8x16x16xf32>",
            "tensor<8x16x16xf32>",
        ),
    ),
    OpCase("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 16, 16), (1, 2))),
    OpCase("concatenate", lambda x: lax.concatenate([x, x.T, x], 0)),
    OpCase("dynamic_slice", lambda x: lax.dynamic_slice(x, (whole(x)[0, 0] % 8, 0), (8, 16))),
    OpCase("dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, x[:8, :8], (whole(x)[0, 0] % 8, 3))),
    OpCase("gather", _gathered),
    OpCase("iota", lambda x: x + lax.broadcasted_iota(jnp.float32, (16, 16), 1)),
    OpCase("pad", lambda x: lax.pad(x, 0.5, ((3, 2, 1), (0, -1, 0)))),
    OpCase("reshape", lambda x: lax.reshape(x, (4, 4, 16))),
    OpCase("reverse", lambda x: lax.rev(x, (0, 1))),
    OpCase("scatter", lambda x: x.at[whole(x)[:, 0] % 16].add(x)),
    OpCase("scatter", lambda x: complex_of(x).at[whole(x)[:, 0] % 16].add(complex_of(x)), "complex"),
    OpCase("slice", lambda x: lax.slice(x, (1, 2), (15, 16), (2, 1))),
    OpCase("transpose", lambda x: lax.transpose(x, (1, 0))),
)
COMBINE = (
    OpCase("reduce", lambda x: x.sum(0)),
    OpCase("reduce", lambda x: complex_of(x).sum(1), "complex"),
    OpCase("reduce", lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 1)), "of-two"),
    OpCase("reduce_window", lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 2), (1, 2), "SAME")),
    OpCase("reduce_window", lambda x: lax.cumsum(x, 0), "cumsum"),
    OpCase("select_and_scatter", _select_and_scatter),
    OpCase("sort", lambda x: lax.sort(x, dimension=0)),
    OpCase("sort", lambda x: lax.sort((whole(x), x), dimension=1, num_keys=2), "of-two"),
    OpCase(
        "map",
        text(f"""%1 = "stablehlo.map"(%0) ({{
        ^bb0(%a: tensor<f32>):
        %b = stablehlo.sine %a : tensor<f32>
        stablehlo.return %b : tensor<f32>
    }}) {{dimensions = array<i64: 0, 1>}} : ({X}) -> {X}"""),
    ),
    OpCase("dot", text(f"%1 = stablehlo.dot %0, %0 : ({X}, {X}) -> {X}")),
    OpCase("dot_general", lambda x: x @ x),
    OpCase("dot_general", lambda x: complex_of(x) @ complex_of(x), "complex"),
    OpCase("einsum", text(f'%1 = stablehlo.einsum %0, %0, config = "ij,jk->ik" : ({X}, {X}) -> {X}')),
    OpCase(
        "unary_einsum",
        text(f'%1 = "stablehlo.unary_einsum"(%0) {{einsum_config = "ij->ji"}} : ({X}) -> {X}'),
        refused=dict.fromkeys(("cpu", "tpu"), "can't be translated"),
    ),
    OpCase("convolution", _convolved),
    OpCase("fft", lambda x: jnp.fft.fft(x, axis=0)),
    OpCase("fft", lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), "real"),
    OpCase("fft", lambda x: jnp.fft.ifft2(complex_of(x)), "two-dims"),
    OpCase(
        "torch_index_select",
        lambda x: emit(
            f'%2 = "stablehlo.torch_index_select"(%0, %1) {{dim = 0 : i64, batch_dims = 0 : i64}} '
            f": ({X}, tensor<16xi32>) -> {X}\nreturn %2 : {X}",
            x,
            whole(x)[:, 0] % 16,
            out=[("f4", 16, 16)],
        ),
    ),
    OpCase(
        "batch_norm_inference",
        lambda x: emit(
            f"""%2 = "stablehlo.batch_norm_inference"(%0, %1, %1, %1, %1) {NORM}
        : ({X}, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>) -> {X}
        return %2 : {X}""",
            x,
            x[0],
            out=[("f4", 16, 16)],
        ),
    ),
    OpCase(
        "batch_norm_training",
        lambda x: emit(
            f"""%2:3 = "stablehlo.batch_norm_training"(%0, %1, %1) {NORM}
        : ({X}, tensor<16xf32>, tensor<16xf32>) -> ({X}, tensor<16xf32>, tensor<16xf32>)
        return %2#0, %2#1, %2#2 : {X}, tensor<16xf32>, tensor<16xf32>""",
            x,
            x[0],
            out=[("f4", 16, 16), ("f4", 16), ("f4", 16)],
        ),
    ),
    OpCase(
        "batch_norm_grad",
        lambda x: emit(
            f"""%2:3 = "stablehlo.batch_norm_grad"(%0, %1, %1, %1, %0) {NORM}
        : ({X}, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, {X}) -> ({X}, tensor<16xf32>, tensor<16xf32>)
        return %2#0, %2#1, %2#2 : {X}, tensor<16xf32>, tensor<16xf32>""",
            x,
            x[0],
            out=[("f4", 16, 16), ("f4", 16), ("f4", 16)],
        ),
    ),
    OpCase("cholesky", lambda x: text(f"%1 = stablehlo.cholesky %0, lower = true : {X}")(_positive_definite(x))),
    OpCase(
        "triangular_solve",
        lambda x: emit(
            f"""%2 = "stablehlo.triangular_solve"(%0, %1) {{left_side = true, lower = true, unit_diagonal = true,
        transpose_a = #stablehlo<transpose NO_TRANSPOSE>}} : ({X}, {X}) -> {X}\nreturn %2 : {X}""",
            x / 8,
            x,
            out=[("f4", 16, 16)],
        ),
    ),
)
CASES = (*MOVES, *COMBINE)
