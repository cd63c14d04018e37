"""Models: training steps, serving, experts, pipelines, convolutions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.base import Case, normal, program, programs_in, put, shardings

LAYERS, BATCH, LENGTH, WIDTH, HEADS, HEAD, HIDDEN, VOCAB = 2, 8, 16, 32, 4, 8, 64, 64


def _norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def _attend(q, k, v, mask):
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1), v)


TRANSFORMER_SPECS = {
    "embed": P("tp", "fsdp"),
    "gain": P(),
    "qkv": P(None, "fsdp", None, "tp", None),
    "out": P(None, "tp", None, "fsdp"),
    "up": P(None, "fsdp", "tp"),
    "down": P(None, "tp", "fsdp"),
}


def _transformer_params():
    return {
        "embed": normal(0, VOCAB, WIDTH, scale=0.3),
        "gain": 1 + normal(1, LAYERS, 2, WIDTH, scale=0.1),
        "qkv": normal(2, LAYERS, WIDTH, 3, HEADS, HEAD, scale=0.2),
        "out": normal(3, LAYERS, HEADS, HEAD, WIDTH, scale=0.2),
        "up": normal(4, LAYERS, WIDTH, HIDDEN, scale=0.2),
        "down": normal(5, LAYERS, HIDDEN, WIDTH, scale=0.2),
    }


def _transformer_loss(mesh, params, tokens):
    by_batch, by_length, by_head, by_hidden = (
        NamedSharding(mesh, spec)
        for spec in (P("fsdp"), P("fsdp", "tp"), P("fsdp", None, None, "tp"), P("fsdp", None, "tp"))
    )
    mask = np.tril(np.ones((LENGTH, LENGTH), bool))

    def layer(x, w):
        y = with_sharding_constraint(_norm(x, w["gain"][0]), by_batch)  # the whole sequence, for attention
        qkv = with_sharding_constraint(
            jnp.einsum("bsd,dchk->cbshk", y, w["qkv"]), NamedSharding(mesh, P(None, *by_head.spec))
        )
        x = x + jnp.einsum("bshk,hkd->bsd", _attend(*qkv, mask), w["out"])
        x = with_sharding_constraint(x, by_length)
        y = with_sharding_constraint(_norm(x, w["gain"][1]), by_batch)
        up = with_sharding_constraint(jax.nn.gelu(y @ w["up"]), by_hidden)
        return with_sharding_constraint(x + up @ w["down"], by_length), None

    stacked = {name: value for name, value in params.items() if name != "embed"}
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    x = with_sharding_constraint(params["embed"][tokens[:, :-1]], by_length)
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, stacked)
    logits = with_sharding_constraint(x @ params["embed"].T, by_hidden)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


@program("transformer-train", "FSDP + TP step: scan over layers, remat, sequence-parallel norms, adam", fsdp=4, tp=2)
def transformer_train(mesh: Mesh) -> Case:
    placed = shardings(mesh, TRANSFORMER_SPECS)
    state_at = {"params": placed, "m": placed, "v": placed, "step": NamedSharding(mesh, P())}

    def train_step(state, tokens):
        loss, grads = jax.value_and_grad(partial(_transformer_loss, mesh))(state["params"], tokens)
        step = state["step"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["v"], grads)
        scale = jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
        params = jax.tree.map(lambda p, m, v: p - 1e-2 * scale * m / (jnp.sqrt(v) + 1e-4), state["params"], m, v)
        return {"params": params, "m": m, "v": v, "step": step}, loss

    params = _transformer_params()
    zeros = jax.tree.map(np.zeros_like, params)
    state = jax.device_put({"params": params, "m": zeros, "v": zeros, "step": np.float32(0)}, state_at)
    tokens = np.random.default_rng(9).integers(0, VOCAB, (BATCH, LENGTH + 1))
    return Case(
        train_step,
        (state, put(mesh, tokens.astype(np.int32), "fsdp")),
        {"donate_argnums": 0, "out_shardings": (state_at, NamedSharding(mesh, P()))},
        tolerance=1e-4,
    )


@program("kv-cache", "serving: prefill with the sequence sharded, then decode with the heads sharded", data=2, tp=4)
def kv_cache(mesh: Mesh) -> Case:
    prompt, steps = 12, 4
    by_length, by_head = (NamedSharding(mesh, spec) for spec in (P("data", "tp"), P("data", None, "tp")))

    def generate(w, x, cache):
        qkv = jnp.einsum("bsd,dchk->cbshk", x, w)
        q, k, v = with_sharding_constraint(qkv, NamedSharding(mesh, P(None, *by_length.spec)))
        hidden = _attend(q, k, v, np.tril(np.ones((prompt, prompt), bool)))
        cache = [
            jax.lax.dynamic_update_slice(c, with_sharding_constraint(new, by_head), (0, 0, 0, 0))
            for c, new in zip(cache, (k, v), strict=True)
        ]
        last = with_sharding_constraint(hidden, by_head)[:, -1:].reshape(BATCH, 1, WIDTH)

        def decode(carry, position):
            x, cache = carry
            q, k, v = jnp.einsum("bsd,dchk->cbshk", x, w)
            cache = [
                with_sharding_constraint(jax.lax.dynamic_update_slice(c, new, (0, position, 0, 0)), by_head)
                for c, new in zip(cache, (k, v), strict=True)
            ]
            y = _attend(q, *cache, jnp.arange(LENGTH) <= position).reshape(BATCH, 1, WIDTH)
            return (y, cache), y

        (_, cache), ys = jax.lax.scan(decode, (last, cache), prompt + jnp.arange(steps))
        return ys, cache

    empty = [put(mesh, np.zeros((BATCH, LENGTH, HEADS, HEAD), np.float32), *by_head.spec) for _ in range(2)]
    args = (
        put(mesh, normal(0, WIDTH, 3, HEADS, HEAD, scale=0.2), None, None, "tp"),
        put(mesh, normal(1, BATCH, prompt, WIDTH), "data", "tp"),
    )
    return Case(generate, (*args, empty), {"donate_argnums": 2, "out_shardings": (None, [by_head, by_head])})


@program("moe-sort", "experts by sorting the tokens: gather, batched matmul, scatter back", data=2, expert=4)
def moe_sort(mesh: Mesh) -> Case:
    tokens, experts, width = 64, 8, 16
    by_token, by_expert = NamedSharding(mesh, P(("data", "expert"))), NamedSharding(mesh, P("expert", "data"))

    def layer(w, x, choice):
        order = jnp.argsort(choice, stable=True)
        grouped = with_sharding_constraint(x[order].reshape(experts, -1, width), by_expert)
        y = jax.nn.silu(jnp.einsum("ecd,edf->ecf", grouped, w))
        y = with_sharding_constraint(y, by_expert).reshape(tokens, width)
        return with_sharding_constraint(jnp.zeros_like(x).at[order].set(y), by_token) + x

    choice = np.random.default_rng(5).permutation(np.repeat(np.arange(experts), tokens // experts))

    args = (
        put(mesh, normal(0, experts, width, width, scale=0.3), "expert"),
        put(mesh, normal(1, tokens, width), ("data", "expert")),
        put(mesh, choice.astype(np.int32), ("data", "expert")),
    )
    return Case(layer, args)


@program("pipeline", "stages in a user's shard_map with ppermute, constraints before and after", stage=4, data=2)
def pipeline(mesh: Mesh) -> Case:
    layers, micro, rows, width = 8, 4, 8, 16
    stages = mesh.shape["stage"]

    def stage_fn(w, x):
        for layer in range(w.shape[0]):
            x = jnp.tanh(x @ w[layer])
        return x

    def shifted(w, xs):
        stage = jax.lax.axis_index("stage")
        state, done = jnp.zeros_like(xs[0]), jnp.zeros_like(xs)
        for tick in range(micro + stages - 1):
            state = stage_fn(w, jnp.where(stage == 0, xs[min(tick, micro - 1)], state))
            if tick >= stages - 1:
                done = done.at[tick - stages + 1].set(jnp.where(stage == stages - 1, state, 0))
            state = jax.lax.ppermute(state, "stage", [(i, (i + 1) % stages) for i in range(stages)])
        return jax.lax.psum(done, "stage")

    run = jax.shard_map(
        shifted, mesh=mesh, in_specs=(P("stage"), P(None, "data")), out_specs=P(None, "data"), check_vma=False
    )

    def f(w, x):
        x = with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, None, "data")))
        x = x - jnp.mean(x, axis=(0, 1))
        y = run(w, x)
        return with_sharding_constraint(y, NamedSharding(mesh, P(None, ("stage", "data"))))

    args = (
        put(mesh, normal(0, layers, width, width, scale=0.3), "stage"),
        put(mesh, normal(1, micro, rows, width), None, "data"),
    )
    return Case(f, args)


@program(
    "convnet",
    "spatial then batch sharding of convolutions, batch norm over the whole batch, gradient",
    batch=2,
    height=4,
)
def convnet(mesh: Mesh) -> Case:
    spatial, batched = NamedSharding(mesh, P("batch", "height")), NamedSharding(mesh, P(("batch", "height")))

    def conv(x, w, stride):
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def batch_norm(x):
        mean, var = jnp.mean(x, axis=(0, 1, 2)), jnp.var(x, axis=(0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(var + 1e-3)

    def loss(w, images, target):
        x = with_sharding_constraint(batch_norm(conv(images, w["stem"], 1)), spatial)
        x = with_sharding_constraint(jax.nn.relu(x), batched)
        x = jax.nn.relu(batch_norm(conv(x, w["body"], 2)))
        logits = jnp.mean(x, axis=(1, 2)) @ w["head"]
        return jnp.mean((logits - target) ** 2)

    w = {"stem": normal(0, 3, 3, 3, 8), "body": normal(1, 3, 3, 8, 8), "head": normal(2, 8, 4)}
    args = (
        jax.device_put(w, NamedSharding(mesh, P())),
        put(mesh, normal(3, 8, 16, 16, 3), "batch", "height"),
        put(mesh, normal(4, 8, 4), ("batch", "height")),
    )
    return Case(jax.value_and_grad(loss), args, tolerance=1e-4)


@program("embedding", "lookup in a vocabulary sharded over one axis, and its scatter-add gradient", data=4, tp=2)
def embedding(mesh: Mesh) -> Case:
    def loss(table, ids, weight):
        x = with_sharding_constraint(table[ids], NamedSharding(mesh, P("data", None, "tp")))
        y = with_sharding_constraint(x @ weight, NamedSharding(mesh, P("data", "tp")))
        return jnp.sum(y * y) / y.size

    args = (
        put(mesh, normal(0, 48, 16), "tp", "data"),
        put(mesh, np.random.default_rng(1).integers(0, 48, (8, 6)).astype(np.int32), "data"),
        put(mesh, normal(2, 16, 8), "tp"),
    )
    out = (NamedSharding(mesh, P()), (NamedSharding(mesh, P("tp", "data")), NamedSharding(mesh, P("tp"))))
    return Case(jax.value_and_grad(loss, argnums=(0, 2)), args, {"out_shardings": out})


@program(
    "train-to-serve", "a tree of weights from the training layout to the serving layout, cast to bfloat16", fsdp=4, tp=2
)
def train_to_serve(mesh: Mesh) -> Case:
    serve = {
        "embed": P(None, ("tp", "fsdp")),
        "gain": P(),
        "qkv": P(None, None, None, ("tp", "fsdp"), None),
        "out": P(None, ("tp", "fsdp")),
        "up": P(None, None, ("fsdp", "tp")),
        "down": P(None, ("fsdp", "tp")),
    }
    params = _transformer_params()
    params["qkv"] = np.concatenate([params["qkv"]] * 2, axis=3)
    params["out"] = np.concatenate([params["out"]] * 2, axis=1)
    args = (jax.device_put(params, shardings(mesh, TRANSFORMER_SPECS)),)

    def f(params):
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

    return Case(f, args, {"out_shardings": shardings(mesh, serve)}, tolerance=0)


@program("custom-vjp", "gather the weight in the forward pass, scatter its gradient in the backward pass", fsdp=8)
def custom_vjp(mesh: Mesh) -> Case:
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))

    @jax.custom_vjp
    def gathered(w):
        return with_sharding_constraint(w, whole)

    def backward(_, g):
        return (with_sharding_constraint(g, split),)

    gathered.defvjp(lambda w: (gathered(w), None), backward)

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ gathered(w))
        return jnp.sum(x)

    ws = [put(mesh, normal(i, 16, 16, scale=0.3), "fsdp") for i in range(2)]
    return Case(
        jax.value_and_grad(loss), (ws, put(mesh, normal(7, 16, 16), "fsdp")), {"out_shardings": (whole, [split, split])}
    )


PROGRAMS = programs_in(vars())
