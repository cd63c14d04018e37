"""Programs in jax that go from one layout to another between their operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real_programs.base import Case, P, Scale, constrain, program, shaped


@program("jax", "h100")
def issue_21562(scale: Scale) -> Case:
    """The program of jax-ml/jax#21562: a split over two dims becomes one over both in a third."""
    mesh = scale.mesh(y=2, x=4)
    n = scale.pick(64, 512)
    a = shaped(mesh, P("y", None, "x"), (n, n, n))
    return Case(lambda a: jnp.tanh(constrain(a + a, mesh, None, ("x", "y"), None)), (a,))


@program("jax")
def pencil_fft(scale: Scale) -> Case:
    """A 3-D FFT by pencils, written with constraints."""
    mesh = scale.mesh(y=2, x=4)
    n = scale.pick(32, 64)
    a = shaped(mesh, P("y", "x", None), (n, n, n), jnp.complex64)

    def forward(a: Any) -> Any:
        a = constrain(jnp.fft.fft(a, axis=2), mesh, "y", None, "x")
        a = constrain(jnp.fft.fft(a, axis=1), mesh, None, "y", "x")
        return jnp.fft.fft(a, axis=0)

    return Case(forward, (a,), {"out_shardings": constrained(a, P(None, "y", "x"))})


def constrained(a: jax.ShapeDtypeStruct, spec: Any) -> Any:
    """A sharding on the mesh of an argument."""
    return jax.sharding.NamedSharding(a.sharding.mesh, spec)


@program("jax")
def alternating_directions(scale: Scale) -> Case:
    """Implicit diffusion in 2-D: tridiagonal solves along rows, then along columns, in a loop."""
    mesh = scale.mesh(y=2, x=4)
    n = scale.pick(64, 2048)
    a = shaped(mesh, P("y", "x"), (n, n))

    def solve(a: Any) -> Any:
        """The Thomas algorithm along dim 1."""

        def down(carry: Any, column: Any) -> Any:
            c, d = carry
            w = 1.0 / (3.0 + c)
            carry = (-w, (column + d) * w)
            return carry, carry

        def up(x: Any, both: Any) -> Any:
            c, d = both
            x = d - c * x
            return x, x

        zero = jnp.zeros_like(a[:, 0])
        _, both = jax.lax.scan(down, (zero, zero), a.T)
        return jax.lax.scan(up, zero, both, reverse=True)[1].T

    def turn(_: int, a: Any) -> Any:
        a = solve(constrain(a, mesh, ("y", "x"), None))
        return constrain(solve(constrain(a.T, mesh, ("x", "y"), None)).T, mesh, "y", "x")

    return Case(lambda a: jax.lax.fori_loop(0, 3, turn, a), (a,))


@program("jax")
def sharded_embedding(scale: Scale) -> Case:
    """A recommender: tables split by rows, looked up by all, features exchanged, a dense network by batch."""
    mesh = scale.mesh(data=2, model=4)
    tables, rows, width, batch = 8, scale.pick(256, 65536), 16, scale.pick(64, 4096)
    table = shaped(mesh, P(None, ("data", "model"), None), (tables, rows, width))
    ids = shaped(mesh, P(("data", "model"), None), (batch, tables), jnp.int32)
    w = shaped(mesh, P("model", None), (tables * width, 64))

    def step(table: Any, w: Any, ids: Any) -> Any:
        def loss(both: Any) -> Any:
            looked = jnp.stack([both[0][one][ids[:, one]] for one in range(tables)], 1)
            looked = constrain(looked, mesh, ("data", "model"), None, None)
            dense = constrain(looked.reshape(batch, -1), mesh, "data", "model")
            return jnp.mean(jax.nn.relu(dense @ both[1]) ** 2)

        value, (by_table, by_w) = jax.value_and_grad(loss)((table, w))
        return value, table - 0.1 * by_table, w - 0.1 * by_w

    outs = (None, table.sharding, w.sharding)
    return Case(step, (table, w, ids), {"out_shardings": outs}, rows - 1)


@program("jax")
def spatial_convolution(scale: Scale) -> Case:
    """A U-Net's step on images split by rows and columns, with batch parallelism in its middle."""
    mesh = scale.mesh(y=2, x=4)
    n, batch, c = scale.pick(32, 64), 8, scale.pick(8, 64)
    image = shaped(mesh, P(None, "y", "x", None), (batch, n, n, c))
    w = [shaped(mesh, P(), (3, 3, c, c)) for _ in range(4)]

    def conv(x: Any, w: Any) -> Any:
        return jax.nn.relu(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )

    def forward(w: Any, x: Any) -> Any:
        first = conv(constrain(x, mesh, None, "y", "x"), w[0])
        low = first.reshape(batch, n // 2, 2, n // 2, 2, c).mean((2, 4))
        low = constrain(low, mesh, ("y", "x"), None, None, None)
        low = conv(conv(low, w[1]), w[2])
        high = constrain(jnp.repeat(jnp.repeat(low, 2, 1), 2, 2), mesh, None, "y", "x", None)
        return jnp.mean(conv(first + high, w[3]) ** 2)

    return Case(lambda w, x: jax.grad(forward)(w, x), (w, image))


@program("jax")
def kv_cache_handover(scale: Scale) -> Case:
    """A cache of keys and values from the layout of prefill to that of decode, all layers at once."""
    mesh = scale.mesh(data=2, model=4)
    layers, batch, length, heads, depth = 4, 8, scale.pick(64, 4096), 8, scale.pick(16, 128)
    dtype = jnp.bfloat16 if scale.large else jnp.float32
    cache = [
        shaped(mesh, P("data", "model", None, None), (batch, length, heads, depth), dtype) for _ in range(2 * layers)
    ]

    def hand(cache: Any) -> Any:
        return [constrain(one * 1.5, mesh, None, None, ("model", "data"), None) for one in cache]

    return Case(hand, (cache,))
