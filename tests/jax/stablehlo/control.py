"""Control flow, calls, tokens, tuples, random numbers, and types of their own."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.jax.stablehlo.base import ABORTS, OpCase, emit
from tests.jax.stablehlo.elementwise import complex_of, whole
from tests.jax.stablehlo.shapes import X, text

NO_SHARDING = dict.fromkeys(("cpu 0.12", "tpu 0.12"), "must have sharding")
_CHANNELS = itertools.count(901)
BOUNDED = "tensor<?x16xf32, #stablehlo.bounds<16, ?>>"
TOKEN = "!stablehlo.token"


def _on_first(count: int) -> str:
    """JAX's sharding of host transfers: all of it on one device."""
    one = "<mesh<[], device_ids=[0]>, []>"
    return f"sdy.sharding = #sdy.sharding_per_value<[{', '.join([one] * count)}]>"


def _cond(x: jax.Array) -> Any:
    return lax.cond(x[0, 0] > 2, lambda v: v.T, lambda v: v * 2, x)


def _switch(x: jax.Array) -> Any:
    return lax.switch(whole(x)[0, 0] % 3, [lambda v: v, jnp.transpose, jnp.sin], complex_of(x))


def _nested(x: jax.Array) -> Any:
    """A branch in a loop in a branch, with complex numbers and a call in the middle."""

    @jax.jit
    def turn(v: jax.Array) -> jax.Array:
        return lax.cond(v[0, 0].real > 1, lambda u: u.T, lambda u: u * 1j, v)

    def loop(v: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, u: turn(u) / 2, v)

    return lax.cond(x[0, 0] > 2, lambda v: v, loop, complex_of(x))


def _while(x: jax.Array) -> Any:
    return lax.while_loop(lambda v: v[0].sum() < 90, lambda v: (v[0] * 1.5, v[1].T, v[2] + 1), (x, complex_of(x), 0))


def _scan(x: jax.Array) -> Any:
    return lax.scan(lambda c, row: (c + row, jnp.fft.fft(row)), jnp.zeros(16), x)


def _callback(x: jax.Array) -> Any:
    return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _ordered(x: jax.Array) -> Any:
    return io_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=False)


@jax.custom_vjp
def _cubed(x: jax.Array) -> jax.Array:
    return x**3


_cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x * x * g,))


def _tokens(x: jax.Array) -> Any:
    return emit(
        f"""%1 = stablehlo.create_token : {TOKEN}
        %2 = stablehlo.after_all %1, %1 : {TOKEN}
        %3:2 = "stablehlo.infeed"(%2) {{infeed_config = "", layout = [[1, 0]], {_on_first(2)}}}
          : ({TOKEN}) -> ({X}, {TOKEN})
        %4 = "stablehlo.outfeed"(%3#0, %3#1) {{outfeed_config = "", {_on_first(1)}}} : ({X}, {TOKEN}) -> {TOKEN}
        %5 = stablehlo.add %0, %3#0 : {X}
        return %5 : {X}""",
        x,
        out=[("f4", 16, 16)],
    )


def _barred(x: jax.Array) -> Any:
    """A token that lives beside an array."""
    return emit(
        f"""%1 = stablehlo.create_token : {TOKEN}
        %2 = stablehlo.after_all %1, %1 : {TOKEN}
        %3:2 = stablehlo.optimization_barrier %0, %2 : {X}, {TOKEN}
        return %3#0 : {X}""",
        x,
        out=[("f4", 16, 16)],
    )


def _alike(x: jax.Array) -> Any:
    """Two arrays that are to be sharded in the same way, which jax 0.10 writes as `shard_alike`."""
    return emit(
        f"""sdy.sharding_group %0 group_id=7 : {X}
        sdy.sharding_group %1 group_id=7 : {X}
        return %0, %1 : {X}, {X}""",
        x,
        jnp.sin(x.T),
        out=[("f4", 16, 16)] * 2,
    )


def _send_recv(x: jax.Array) -> Any:
    to_host, from_host = (f"#stablehlo.channel_handle<handle = {next(_CHANNELS)}, type = {kind}>" for kind in (2, 3))
    names = 'mhlo.frontend_attributes = {_xla_host_transfer_handler_name = "a", _xla_host_transfer_rendezvous = "b"}'
    return emit(
        f"""%1 = stablehlo.create_token : {TOKEN}
        %2 = "stablehlo.send"(%0, %1) {{channel_handle = {to_host}, is_host_transfer = true, {names}, {_on_first(1)}}}
          : ({X}, {TOKEN}) -> {TOKEN}
        %3:2 = "stablehlo.recv"(%2) {{channel_handle = {from_host}, is_host_transfer = true, {names}, {_on_first(2)}}}
          : ({TOKEN}) -> ({X}, {TOKEN})
        return %3#0 : {X}""",
        x,
        out=[("f4", 16, 16)],
    )


def _tuple(x: jax.Array) -> Any:
    return emit(
        f"""%2 = stablehlo.tuple %0, %1 : tuple<{X}, {X}>
        %3 = stablehlo.get_tuple_element %2[1] : (tuple<{X}, {X}>) -> {X}
        return %3 : {X}""",
        x,
        jnp.sin(x),
        out=[("f4", 16, 16)],
    )


def _tuple_call(x: jax.Array) -> Any:
    """A tuple that an operation takes and gives: it cannot be folded away."""
    return emit(
        f"""%2 = stablehlo.tuple %0, %1 : tuple<{X}, {X}>
        %3 = stablehlo.custom_call @Sharding(%2) : (tuple<{X}, {X}>) -> tuple<{X}, {X}>
        %4 = stablehlo.get_tuple_element %3[0] : (tuple<{X}, {X}>) -> {X}
        return %4 : {X}""",
        x,
        jnp.sin(x),
        out=[("f4", 16, 16)],
    )


def _barrier(x: jax.Array) -> Any:
    return lax.optimization_barrier((x, complex_of(x), whole(x)))


def _quantized(x: jax.Array) -> Any:
    kind = "tensor<16x16x!quant.uniform<i8:f32, 0.01:5>>"
    return text(f"""%2 = stablehlo.uniform_quantize %0 : ({X}) -> {kind}
        %1 = stablehlo.uniform_dequantize %2 : ({kind}) -> {X}""")(x)


def _async(x: jax.Array) -> Any:
    future = f"!stablehlo.future<{X}>"
    return text(f"""%2 = "stablehlo.async_start"(%0) ({{
        ^bb0(%a: {X}):
        %b = "stablehlo.all_gather"(%a) {{all_gather_dim = 0 : i64, replica_groups = dense<[[0]]> : tensor<1x1xi64>}}
          : ({X}) -> {X}
        stablehlo.return %b : {X}
      }}) : ({X}) -> {future}
      %1 = "stablehlo.async_done"(%2) : ({future}) -> {X}""")(x)


def _dynamic(body: str, out: str = X):
    return text(body, out)


FLOW = (
    OpCase("case", _cond),
    OpCase("case", _switch, "three-complex"),
    OpCase("case", _nested, "nested"),
    OpCase(
        "if",
        lambda x: emit(
            f"""%2 = "stablehlo.if"(%1) ({{
          %a = stablehlo.sine %0 : {X}
          stablehlo.return %a : {X}
        }}, {{
          stablehlo.return %0 : {X}
        }}) : (tensor<i1>) -> {X}
        return %2 : {X}""",
            x,
            x[0, 0] > 2,
            out=[("f4", 16, 16)],
        ),
    ),
    OpCase("while", _while),
    OpCase("while", _scan, "scan-of-fft"),
    OpCase("return", lambda x: lax.fori_loop(0, 3, lambda _, v: v.T / 2, x)),
    OpCase("composite", lambda x: lax.composite(lambda v: jnp.sin(v) + v.T, "reshard.test")(x)),
    OpCase("composite", lambda x: lax.composite(lambda v: v * 1j + v.T, "reshard.test")(complex_of(x)), "complex"),
    OpCase("custom_call", _callback, "callback", alone=True),
    OpCase("custom_call", _ordered, "effect", alone=True),
    OpCase("chlo.top_k", lambda x: lax.top_k(x, 3)),
    OpCase("custom_call", lambda x: jnp.linalg.qr(x), "qr"),
    OpCase("sdy.sharding_group", _alike),
    OpCase("chlo.erf", jax.lax.erf),
    OpCase("optimization_barrier", _barrier),
    OpCase("optimization_barrier", lambda x: jax.grad(lambda v: jax.checkpoint(jnp.sin)(jnp.sin(v)).sum())(x), "remat"),
    OpCase("multiply", lambda x: jax.grad(lambda v: _cubed(v).sum())(x), "custom-vjp"),
    OpCase("tuple", _tuple, left="tuple", alone=True),
    OpCase("tuple", _tuple_call, "kept", refused=dict.fromkeys(("cpu", "tpu"), ABORTS)),
    OpCase("get_tuple_element", _tuple, left="tuple", alone=True),
    OpCase("create_token", _barred, alone=True),
    OpCase("after_all", _barred, alone=True),
    OpCase("infeed", _tokens, waits=True, alone=True, refused=NO_SHARDING),
    OpCase("outfeed", _tokens, waits=True, alone=True, refused=NO_SHARDING),
    OpCase("send", _send_recv, waits=True, alone=True, refused={"cpu": "not supported"}),
    OpCase("recv", _send_recv, waits=True, alone=True, refused={"cpu": "not supported"}),
    OpCase("async_start", _async, alone=True, refused={"tpu": "Failed to serialize|must have sharding"}),
    OpCase("async_done", _async, alone=True, refused={"tpu": "Failed to serialize|must have sharding"}),
    OpCase("rng", lambda x: lax.rng_uniform(0.0, 1.0, (16, 16)) * 0 + x, refused={"tpu 0.12": ABORTS}),
    OpCase(
        "rng_bit_generator", lambda x: lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), (16, 16))[1] + whole(x)
    ),
    OpCase("xor", lambda x: jax.random.normal(jax.random.key(0), (16, 16)) + x, "threefry"),
    OpCase("uniform_quantize", _quantized, refused=dict.fromkeys(("cpu", "tpu"), "unregistered dialect")),
    OpCase("uniform_dequantize", _quantized, refused=dict.fromkeys(("cpu", "tpu"), "unregistered dialect")),
)
DYNAMIC = (
    OpCase(
        "get_dimension_size",
        lambda x: emit(
            f"%1 = stablehlo.get_dimension_size %0, dim = 1 : ({X}) -> tensor<i32>\nreturn %1 : tensor<i32>",
            x,
            out=[("i4",)],
        ),
    ),
    OpCase(
        "set_dimension_size",
        lambda x: emit(
            f"%2 = stablehlo.set_dimension_size %0, %1, dim = 0 : ({X}, tensor<i32>) -> {BOUNDED}"
            "\n%3 = stablehlo.constant dense<16> : tensor<i32>"
            f"\n%4 = stablehlo.set_dimension_size %2, %3, dim = 0 : ({BOUNDED}, tensor<i32>) -> {X}"
            f"\nreturn %4 : {X}",
            x,
            whole(x)[0, 0] % 8,
            out=[("f4", 16, 16)],
        ),
        refused={"cpu": "static shape"},
        left="static shape",
        alone=True,
    ),
    OpCase(
        "dynamic_broadcast_in_dim",
        _dynamic(
            f"""%s = stablehlo.constant dense<[8, 16, 16]> : tensor<3xi32>
        %1 = stablehlo.dynamic_broadcast_in_dim %0, %s, dims = [1, 2] : ({X}, tensor<3xi32>) -> tensor<8x16x16xf32>""",
            "tensor<8x16x16xf32>",
        ),
    ),
    OpCase(
        "dynamic_reshape",
        _dynamic(
            f"""%s = stablehlo.constant dense<[8, 32]> : tensor<2xi32>
        %1 = stablehlo.dynamic_reshape %0, %s : ({X}, tensor<2xi32>) -> tensor<8x32xf32>""",
            "tensor<8x32xf32>",
        ),
    ),
    OpCase(
        "dynamic_iota",
        _dynamic(
            f"""%s = stablehlo.constant dense<[16, 16]> : tensor<2xi32>
        %i = stablehlo.dynamic_iota %s, dim = 1 : (tensor<2xi32>) -> {X}
        %1 = stablehlo.add %0, %i : {X}"""
        ),
    ),
    OpCase(
        "dynamic_pad",
        _dynamic(
            f"""%l = stablehlo.constant dense<[0, 0]> : tensor<2xi32>
        %h = stablehlo.constant dense<[16, 0]> : tensor<2xi32>
        %z = stablehlo.constant dense<0.5> : tensor<f32>
        %1 = stablehlo.dynamic_pad %0, %z, %l, %h, %l
          : ({X}, tensor<f32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<32x16xf32>""",
            "tensor<32x16xf32>",
        ),
    ),
    OpCase(
        "real_dynamic_slice",
        _dynamic(
            f"""%l = stablehlo.constant dense<[8, 0]> : tensor<2xi32>
        %h = stablehlo.constant dense<[16, 16]> : tensor<2xi32>
        %s = stablehlo.constant dense<[1, 1]> : tensor<2xi32>
        %1 = stablehlo.real_dynamic_slice %0, %l, %h, %s
          : ({X}, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<8x16xf32>""",
            "tensor<8x16xf32>",
        ),
    ),
    OpCase(
        "dynamic_gather",
        lambda x: emit(
            f"""%s = stablehlo.constant dense<[1, 16]> : tensor<2xi32>
        %2 = "stablehlo.dynamic_gather"(%0, %1, %s) {{dimension_numbers = #stablehlo.gather<offset_dims = [1],
          collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, indices_are_sorted = false}}
          : ({X}, tensor<16xi32>, tensor<2xi32>) -> {X}\nreturn %2 : {X}""",
            x,
            whole(x)[:, 0] % 16,
            out=[("f4", 16, 16)],
        ),
    ),
    OpCase(
        "dynamic_conv",
        lambda x: emit(
            """%p = stablehlo.constant dense<1> : tensor<2x2xi32>
        %2 = "stablehlo.dynamic_conv"(%0, %1, %p) {
          dimension_numbers = #stablehlo.conv<[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]>,
          batch_group_count = 1 : i64, feature_group_count = 1 : i64}
          : (tensor<1x1x16x16xf32>, tensor<1x1x3x3xf32>, tensor<2x2xi32>) -> tensor<1x1x16x16xf32>
        return %2 : tensor<1x1x16x16xf32>""",
            x[None, None],
            x[None, None, :3, :3],
            out=[("f4", 1, 1, 16, 16)],
        ),
        refused=dict.fromkeys(("cpu", "tpu"), "can't be translated"),
    ),
)
CASES = (*FLOW, *DYNAMIC)
