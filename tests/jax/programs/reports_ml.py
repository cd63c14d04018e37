"""Public reports from machine learning, rebuilt around the reshard that each names; shapes scaled down."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.base import Case, normal, ordinal, program, programs_in, put


@program(
    "jax-21562", "involuntary full rematerialization, https://github.com/jax-ml/jax/issues/21562", remat=True, x=4, y=2
)
def jax_21562(mesh: Mesh) -> Case:
    first, second = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def f(a, b, c):
        d = a + b
        d = with_sharding_constraint(d, second)
        return c + d

    a = ordinal(16, 16, 16)
    args = (put(mesh, a, *first.spec), put(mesh, a, *first.spec), put(mesh, a, *second.spec))
    jit = {"in_shardings": (first, first, second), "out_shardings": second}
    return Case(f, args, jit, tolerance=0)


@program(
    "xla-15207",
    "the same reshard both ways, by its gradient, https://github.com/openxla/xla/issues/15207",
    remat=True,
    x=4,
    y=2,
)
def xla_15207(mesh: Mesh) -> Case:
    first, second = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def f(a, b, c):
        return jnp.sum(c * with_sharding_constraint(a + b, second) ** 2)

    args = (put(mesh, normal(0, 16, 16, 16), *first.spec), put(mesh, normal(1, 16, 16, 16), *first.spec))
    args = (*args, put(mesh, normal(2, 16, 16, 16), *second.spec))
    jit = {"in_shardings": (first, first, second), "out_shardings": (first, first)}
    return Case(jax.grad(f, argnums=(0, 1)), args, jit)


@program(
    "jax-18591",
    "from one dim over all devices to another over some, https://github.com/jax-ml/jax/issues/18591",
    remat=True,
    x=4,
    y=2,
)
def jax_18591(mesh: Mesh) -> Case:
    rows, columns = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P(None, "x"))

    def f(tokens, weight):
        hidden = with_sharding_constraint(jnp.tanh(tokens), rows)
        return with_sharding_constraint(hidden, columns) @ weight

    args = (put(mesh, normal(0, 32, 16), ("x", "y")), put(mesh, normal(1, 16, 8), "x"))
    return Case(f, args)


@program("jax-30335", "shard, swap axes, merge, shard again, https://github.com/jax-ml/jax/issues/30335", devices=8)
def jax_30335(mesh: Mesh) -> Case:
    sharding = NamedSharding(mesh, P("devices"))

    def f(x):
        x = with_sharding_constraint(x, sharding)
        x = jnp.swapaxes(x, 0, 2)
        x = jnp.reshape(x, (-1, 3))
        x = with_sharding_constraint(x, sharding)
        return jnp.reshape(x, (8, 16, 3))

    args = (put(mesh, ordinal(8, 2, 8, 3), "devices"),)
    return Case(f, args, tolerance=0)


@program("jax-20381", "a shuffle of every row that gathers the batch, https://github.com/jax-ml/jax/issues/20381", dp=8)
def jax_20381(mesh: Mesh) -> Case:
    by_row = NamedSharding(mesh, P("dp"))

    def f(key, inputs):
        keys = jax.random.split(key, inputs.shape[0])
        shuffled = jax.vmap(jax.random.permutation)(keys, inputs)
        return shuffled, with_sharding_constraint(shuffled, NamedSharding(mesh, P(None, "dp")))

    args = (put(mesh, np.uint32([0, 1])), put(mesh, ordinal(8, 16, 4), "dp"))
    return Case(f, args, {"out_shardings": (by_row, None)}, tolerance=0)


@program(
    "xla-13306",
    "gradient accumulation: the batch split off a sharded dim, https://github.com/openxla/xla/issues/13306",
    data=4,
    model=2,
)
def xla_13306(mesh: Mesh) -> Case:
    def loss(w, x):
        return jnp.mean(jnp.tanh(x.astype(jnp.float32) @ w) ** 2)

    def f(w, x):
        micro = with_sharding_constraint(x.reshape(2, 8, 32), NamedSharding(mesh, P(None, "data")))
        zero = jnp.zeros_like(w)
        grads, _ = jax.lax.scan(lambda total, x: (total + jax.grad(loss)(w, x), None), zero, micro)
        return grads

    args = (
        put(mesh, normal(0, 32, 16, scale=0.2), None, "model"),
        put(mesh, normal(1, 16, 32, dtype=jnp.bfloat16), "data"),
    )
    return Case(f, args, {"out_shardings": NamedSharding(mesh, P("data", "model"))})


@program(
    "xla-15048",
    "pipelining by a shifted buffer over the stages, the last one's outputs scattered out and padded in the backward "
    "pass, https://github.com/openxla/xla/issues/15048",
    dp=2,
    pp=2,
    tp=2,
)
def xla_15048(mesh: Mesh) -> Case:
    stages, micro = 4, 4
    by_stage, by_micro = NamedSharding(mesh, P("pp", "dp", "tp")), NamedSharding(mesh, P(None, "dp", "tp"))

    def loss(w, x):
        def tick(state, t):
            state = jnp.roll(state, 1, axis=0).at[0].set(x[jnp.minimum(t, micro - 1)])
            state = with_sharding_constraint(jnp.tanh(jnp.einsum("nbsd,nde->nbse", state, w)), by_stage)
            return state, state

        start = with_sharding_constraint(jnp.zeros((stages, *x.shape[1:])), by_stage)
        _, states = jax.lax.scan(tick, start, jnp.arange(stages + micro - 1))
        y = with_sharding_constraint(states[stages - 1 :, -1], by_micro)
        return jnp.mean(jnp.swapaxes(y, 0, 1) ** 2)

    args = (put(mesh, normal(0, stages, 8, 8, scale=0.5), "pp"), put(mesh, normal(1, micro, 4, 8, 8), None, "dp", "tp"))
    return Case(jax.value_and_grad(loss), args)


@program(
    "xla-4062",
    "a product whose result swaps the axes of its operands, https://github.com/openxla/xla/issues/4062",
    x=4,
    y=2,
)
def xla_4062(mesh: Mesh) -> Case:
    args = (put(mesh, normal(0, 16, 32), "x"), put(mesh, normal(1, 32, 16), None, "y"))
    return Case(lambda a, b: a @ b, args, {"out_shardings": NamedSharding(mesh, P("y", "x"))})


@program(
    "openpi-193",
    "activations over both batch axes, the layer's weights over one of them, inside the scan over layers, "
    "https://github.com/Physical-Intelligence/openpi/pull/193",
    remat=True,
    batch=4,
    fsdp=2,
)
def openpi_193(mesh: Mesh) -> Case:
    by_batch, by_width = NamedSharding(mesh, P(("batch", "fsdp"))), NamedSharding(mesh, P(None, None, "fsdp"))

    def layer(x, w):
        x = with_sharding_constraint(x, by_batch)
        y = with_sharding_constraint(x, by_width) @ w
        return with_sharding_constraint(x + jax.nn.gelu(y), by_batch), None

    def loss(ws, x):
        x = with_sharding_constraint(x, by_batch)
        policy = jax.checkpoint_policies.nothing_saveable
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0] ** 2)

    args = (put(mesh, normal(0, 3, 16, 16, scale=0.3), None, "fsdp"), put(mesh, normal(1, 8, 4, 16), ("batch", "fsdp")))
    return Case(jax.grad(loss), args)


@program(
    "psgd-kron",
    "a preconditioner that arrives over dim 1, constrained to dim 2 in the branch that updates it, "
    "https://github.com/evanatyourservice/psgd_jax",
    remat=True,
    a=4,
    b=2,
)
def psgd_kron(mesh: Mesh) -> Case:
    before, after = NamedSharding(mesh, P(None, "a")), NamedSharding(mesh, P(None, None, "b"))

    def f(key, q, grads):
        def update(q):
            q = with_sharding_constraint(q, after)
            noise = with_sharding_constraint(jax.random.normal(key, grads.shape), before)
            product = jnp.einsum("lij,ljk->lik", q, noise + grads)
            return q - 0.01 * jnp.einsum("lij,lkj->lik", product, q)

        q = jax.lax.cond(jnp.sum(grads**2) > 0, update, lambda q: q, q)
        q = with_sharding_constraint(q, after)
        return q, jnp.einsum("lji,ljk,lkm->lim", q, q, grads)

    args = (
        put(mesh, np.uint32([0, 3])),
        put(mesh, normal(0, 3, 16, 16), None, "a"),
        put(mesh, normal(1, 3, 16, 16), None, "a"),
    )
    return Case(f, args)


@program(
    "param-decomp",
    "FSDP x TP masters, and a difference of weights that wants both of their dims over one axis, "
    "https://github.com/goodfire-ai/param-decomp",
    ambient=True,
    dp=4,
    tp=2,
)
def param_decomp(mesh: Mesh) -> Case:
    def loss(masters, weight, x, mask):
        v, u = masters
        xv = with_sharding_constraint(x @ v, P("dp", None, "tp"))
        out = (xv * mask) @ u + x @ (weight - (v @ u).T).T
        return jnp.mean(with_sharding_constraint(out, P("dp")) ** 2)

    masters = (put(mesh, normal(0, 16, 32, scale=0.2), "dp", "tp"), put(mesh, normal(1, 32, 16, scale=0.2), "tp", "dp"))
    args = (masters, put(mesh, normal(2, 16, 16)), put(mesh, normal(3, 8, 4, 16), "dp"))
    mask = np.random.default_rng(4).random((8, 4, 32)).astype(np.float32)
    placed = (NamedSharding(mesh, P("dp", "tp")), NamedSharding(mesh, P("tp", "dp")))
    return Case(jax.grad(loss), (*args, put(mesh, mask, "dp", None, "tp")), {"out_shardings": placed})


@program(
    "xla-44795",
    "a stack of layers sharded over the layers, one sliced out in each step, https://github.com/openxla/xla/pull/44795",
    lp=8,
)
def xla_44795(mesh: Mesh) -> Case:
    def f(ws, x):
        def layer(i, x):
            w = jax.lax.dynamic_index_in_dim(ws, i, keepdims=False)
            return with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P("lp")))

        return jax.lax.fori_loop(0, ws.shape[0], layer, x)

    return Case(f, (put(mesh, normal(0, 8, 16, 16, scale=0.3), "lp"), put(mesh, normal(1, 16, 16), "lp")))


PROGRAMS = programs_in(vars())
