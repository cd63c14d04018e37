"""Models written in jax alone: a transformer in training and in serving, experts, long sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.real_programs.base import Case, P, Scale, constrain, program, shaped, shardings_of


class Sizes:
    """The sizes of a transformer."""

    def __init__(self, scale: Scale, layers: int = 4) -> None:
        self.batch = scale.pick(16, len(scale.devices))
        self.length = scale.pick(64, 512)
        self.width = scale.pick(128, 1024)
        self.heads = 16
        self.vocabulary = scale.pick(512, 32768)
        self.layers = layers


def weights(sizes: Sizes, mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """The weights of a Llama-like transformer: FSDP over `data`, tensor parallelism over `model`."""
    d, f, n, v = sizes.width, 4 * sizes.width, sizes.layers, sizes.vocabulary
    made = {
        "qkv": (P(None, "data", None, "model"), (n, d, 3, d)),
        "out": (P(None, "model", "data"), (n, d, d)),
        "gate": (P(None, "data", None, "model"), (n, d, 2, f)),
        "down": (P(None, "model", "data"), (n, f, d)),
        "norm": (P(None, None), (n, d)),
    }
    blocks = {name: shaped(mesh, spec, shape, dtype) for name, (spec, shape) in made.items()}
    embedding = shaped(mesh, P("model", "data"), (v, d), dtype)
    return {"blocks": blocks, "embedding": embedding, "head": shaped(mesh, P("data", "model"), (d, v), dtype)}


def block(x: Any, w: Any, heads: int, mesh: Mesh, *, sequence: str | None = None) -> Any:
    """One layer. With `sequence`, activations between matrix products are split along the sequence over that axis."""
    batch, length, width = x.shape
    x = constrain(x, mesh, "data", sequence, None)
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["norm"]
    qkv = constrain(jnp.einsum("bld,dcf->bclf", normed, w["qkv"]), mesh, "data", None, None, "model")
    q, k, v = (qkv[:, one].reshape(batch, length, heads, width // heads) for one in range(3))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * (width // heads) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v).reshape(batch, length, width)
    x = x + constrain(mixed @ w["out"], mesh, "data", sequence, None)
    gate = constrain(jnp.einsum("bld,dcf->bclf", x, w["gate"]), mesh, "data", None, None, "model")
    return x + constrain((jax.nn.silu(gate[:, 0]) * gate[:, 1]) @ w["down"], mesh, "data", sequence, None)


def _loss(w: Any, tokens: Any, sizes: Sizes, mesh: Mesh, scan: bool, sequence: str | None) -> Any:
    x = constrain(w["embedding"][tokens], mesh, "data", sequence, None)
    layer = jax.checkpoint(lambda x, one: (block(x, one, sizes.heads, mesh, sequence=sequence), None))
    if scan:
        x, _ = jax.lax.scan(layer, x, w["blocks"])
    else:
        for at in range(sizes.layers):
            x, _ = layer(x, jax.tree.map(lambda one, at=at: one[at], w["blocks"]))
    logits = constrain(x @ w["head"], mesh, "data", None, "model").astype("float32")
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1, 1)[..., None], -1)
    return -jnp.mean(picked)


def _train(scale: Scale, layers: int, scan: bool, sequence: str | None = None) -> Case:
    mesh = scale.mesh(data=2, model=4)
    sizes = Sizes(scale, layers)
    w = weights(sizes, mesh, jnp.bfloat16 if scale.large else jnp.float32)
    tokens = shaped(mesh, P("data", None), (sizes.batch, sizes.length), jnp.int32)

    def step(w: Any, tokens: Any) -> Any:
        loss, gradient = jax.value_and_grad(_loss)(w, tokens, sizes, mesh, scan, sequence)
        return jax.tree.map(lambda one, by: (one - 0.01 * by).astype(one.dtype), w, gradient), loss

    options = {"out_shardings": (shardings_of(w), NamedSharding(mesh, P()))}
    return Case(step, (w, tokens), options, sizes.vocabulary - 1)


@program("jax", "v5p-256", "h100")
def fsdp_tensor_parallel(scale: Scale) -> Case:
    """A training step of a transformer: FSDP and tensor parallelism, scan and remat."""
    return _train(scale, 4, True)


@program("jax", "v5p-256")
def unrolled_16_layers(scale: Scale) -> Case:
    """The same with 16 layers, not scanned."""
    return _train(scale, 16, False)


@program("jax")
def sequence_parallel(scale: Scale) -> Case:
    """A training step with activations split along the sequence between tensor-parallel products."""
    return _train(scale, 4, True, "model")


@program("jax", "h100")
def prefill(scale: Scale) -> Case:
    """Prefill of a server: the prompt's cache is made by heads and kept by sequence."""
    mesh, sizes = scale.mesh(data=2, model=4), Sizes(scale)
    w = weights(sizes, mesh, jnp.bfloat16 if scale.large else jnp.float32)
    tokens = shaped(mesh, P("data", None), (sizes.batch, sizes.length), jnp.int32)

    def fill(w: Any, tokens: Any) -> Any:
        def layer(x: Any, one: Any) -> Any:
            qkv = constrain(jnp.einsum("bld,dcf->bclf", x, one["qkv"]), mesh, "data", None, None, "model")
            cache = constrain(qkv[:, 1:], mesh, "data", None, "model", None)
            return block(x, one, sizes.heads, mesh), cache

        x, cache = jax.lax.scan(layer, w["embedding"][tokens], w["blocks"])
        return constrain(x[:, -1] @ w["head"], mesh, "data", "model"), cache

    return Case(fill, (w, tokens), highest=sizes.vocabulary - 1)


@program("jax", "v5p-256")
def decode(scale: Scale) -> Case:
    """One token of a server: the cache is split along the sequence, heads are computed apart, then sampled."""
    mesh, sizes = scale.mesh(data=2, model=4), Sizes(scale)
    dtype = jnp.bfloat16 if scale.large else jnp.float32
    w = weights(sizes, mesh, dtype)
    cache = shaped(
        mesh, P(None, "data", None, "model", None), (sizes.layers, sizes.batch, 2, sizes.length, sizes.width), dtype
    )
    token = shaped(mesh, P("data"), (sizes.batch,), jnp.int32)
    at = shaped(mesh, P(), (), jnp.int32)

    def one_token(w: Any, cache: Any, token: Any, at: Any) -> Any:
        def layer(x: Any, both: Any) -> Any:
            one, kept = both
            qkv = constrain(jnp.einsum("bd,dcf->bcf", x, one["qkv"]), mesh, "data", None, "model")
            kept = jax.lax.dynamic_update_slice_in_dim(kept, qkv[:, 1:, None].astype(kept.dtype), at, 2)
            kept = constrain(kept, mesh, "data", None, "model", None)
            k, v = (constrain(kept[:, n], mesh, "data", None, "model") for n in range(2))
            split = (sizes.batch, sizes.length, sizes.heads, -1)
            q = qkv[:, 0].reshape(sizes.batch, sizes.heads, -1)
            weights = jax.nn.softmax(jnp.einsum("bhd,blhd->bhl", q, k.reshape(split)))
            mixed = jnp.einsum("bhl,blhd->bhd", weights, v.reshape(split)).reshape(sizes.batch, -1)
            return x + constrain(mixed @ one["out"], mesh, "data", None), kept

        x, cache = jax.lax.scan(layer, w["embedding"][token], (w["blocks"], cache))
        logits = constrain(x @ w["head"], mesh, "data", "model")
        best, which = jax.lax.top_k(constrain(logits.astype("float32"), mesh, ("data", "model"), None), 8)
        return best, which, cache

    options = {"out_shardings": (None, None, cache.sharding), "donate_argnums": 1}
    return Case(one_token, (w, cache, token, at), options, 7)


@program("jax", "v5p-256", "h100")
def moe_layer(scale: Scale) -> Case:
    """A mixture of experts: tokens are split by batch, experts by number, and constraints ask for the exchange."""
    mesh = scale.mesh(data=2, expert=4)
    experts, groups = 4 * mesh.shape["expert"], 2 * len(scale.devices)
    tokens, width, room = scale.pick(64, 512), scale.pick(64, 1024), 8
    x = shaped(mesh, P(("data", "expert"), None, None), (groups, tokens, width))
    w = {
        "router": shaped(mesh, P(None, None), (width, experts)),
        "up": shaped(mesh, P("expert", None, None), (experts, width, 4 * width)),
        "down": shaped(mesh, P("expert", None, None), (experts, 4 * width, width)),
    }

    def forward(w: Any, x: Any) -> Any:
        chances = jax.nn.softmax(x @ w["router"])
        chosen = jax.nn.one_hot(jnp.argmax(chances, -1), experts)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        mask = jax.nn.one_hot(place.astype("int32"), room)
        sent = constrain(jnp.einsum("gtec,gtd->egcd", mask, x), mesh, None, ("data", "expert"))
        sent = constrain(sent, mesh, "expert", "data", None, None)
        hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", sent, w["up"]))
        made = constrain(jnp.einsum("egcf,efd->egcd", hidden, w["down"]), mesh, "expert", "data", None, None)
        made = constrain(made, mesh, None, ("data", "expert"))
        return jnp.einsum("egcd,gtec->gtd", made, mask * jnp.max(chances, -1)[..., None, None])

    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(forward(w, x) ** 2))(w)
        return jax.tree.map(lambda one, by: one - by, w, gradient), loss

    return Case(step, (w, x), {"out_shardings": (shardings_of(w), NamedSharding(mesh, P()))})


@program("jax")
def ulysses_attention(scale: Scale) -> Case:
    """Attention over a sequence split over all devices: heads instead of positions, and back, in a loop of layers."""
    mesh = scale.mesh(data=2, model=4)
    batch, length, heads, depth = 2, scale.pick(256, 1024), 8, scale.pick(16, 128)
    x = shaped(mesh, P("data", "model", None), (batch, length, heads * depth))
    w = shaped(mesh, P(None, None, None, None), (3, 3, heads * depth, heads * depth))

    def forward(x: Any, w: Any) -> Any:
        def layer(x: Any, one: Any) -> Any:
            q, k, v = ((x @ each).reshape(batch, length, heads, depth) for each in one)
            q, k, v = (constrain(each, mesh, "data", None, "model", None) for each in (q, k, v))
            scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k))
            mixed = jnp.einsum("bhlm,bmhd->blhd", scores, v)
            mixed = constrain(mixed, mesh, "data", "model", None, None)
            return x + mixed.reshape(x.shape), None

        return jax.lax.scan(layer, x, w)[0]

    return Case(lambda x, w: jax.grad(lambda x: jnp.sum(forward(x, w)))(x), (x, w))
