"""Whole training steps in jax alone: transformers with AdamW, a convolutional network, a graph network, a solver.

They are what `benchmarks/autoshard.py` chooses shardings for, beside programs of other modules: `SEEN` are those that
the choice was developed on, `HELD_BACK` those that nobody looked at meanwhile. Which are which was drawn by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.real_programs.base import (
    Case,
    P,
    Scale,
    constrain,
    fsdp,
    program,
    shaped,
    sharded_like,
    shardings_of,
)

STEPS = (
    "llama_adamw", "llama_scan", "moe_layer", "resnet_momentum", "gcn_adam", "sharded_embedding", "decode",
    "spectral_poisson",
    "zero_adamw", "fsdp_adafactor", "fsdp_muon", "mixed_precision_lamb",
    "flax_llama", "flax_gpt2", "flax_bert",
    "nnx_transformer", "linen_logical_axes",
    "equinox_transformer", "haiku_convnet", "tunix_qwen3", "tunix_llama3", "qwix_int8",
    "jraph_network", "md_lennard_jones", "diffrax_neural_ode", "numpyro_hmc", "cfd_navier_stokes", "cfd_spectral",
    "jaxdecomp_poisson", "brax_ppo",
)  # fmt: skip
"""Thirty steps of fifteen libraries."""


def _draw_seen(seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Half of the steps, and the other half; the first of all is always seen."""
    rest = list(STEPS[1:])
    random.Random(seed).shuffle(rest)
    seen = {STEPS[0], *rest[: len(STEPS) // 2 - 1]}
    return tuple(name for name in STEPS if name in seen), tuple(name for name in STEPS if name not in seen)


SEEN, HELD_BACK = _draw_seen(33)
SEEN += ("muon_update", "muon_scan")  # beside the thirty


class LlamaSizes:
    """The sizes of a Llama: two key and value heads for each four of queries."""

    def __init__(self, width: int, layers: int, vocabulary: int, batch: int, length: int, heads: int = 8) -> None:
        self.width, self.layers, self.vocabulary = width, layers, vocabulary
        self.batch, self.length = batch, length
        self.heads, self.kv_heads, self.depth = heads, heads // 2, width // heads
        self.hidden = 3 * width

    def shapes(self, dtype: Any, stacked: bool) -> dict[str, Any]:
        """The weights, of each layer by itself or of all layers at once."""
        d, f, kv = self.width, self.hidden, self.kv_heads * self.depth
        one = {
            "q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d),
            "norm1": (d,), "norm2": (d,),
        }  # fmt: skip

        def made(*lead: int) -> dict[str, Any]:
            return {name: jax.ShapeDtypeStruct((*lead, *shape), dtype) for name, shape in one.items()}

        return {
            "embedding": jax.ShapeDtypeStruct((self.vocabulary, d), dtype),
            "layers": made(self.layers) if stacked else [made() for _ in range(self.layers)],
            "norm": jax.ShapeDtypeStruct((d,), dtype),
            "head": jax.ShapeDtypeStruct((d, self.vocabulary), dtype),
        }


def _normalize(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def _rotate(x: Any) -> Any:
    """Rotary position embeddings of queries or keys, (batch, length, heads, depth)."""
    length, depth = x.shape[1], x.shape[3]
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, depth, 2) / depth)
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., : depth // 2], x[..., depth // 2 :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def llama_layer(x: Any, w: Any, sizes: LlamaSizes, keep: Callable[[Any], Any]) -> Any:
    """One layer; `keep` constrains the activations between attention and MLP."""
    batch, length, _ = x.shape
    h = _normalize(x, w["norm1"])
    q = _rotate((h @ w["q"]).reshape(batch, length, sizes.heads, sizes.depth))
    k = _rotate((h @ w["k"]).reshape(batch, length, sizes.kv_heads, sizes.depth))
    v = (h @ w["v"]).reshape(batch, length, sizes.kv_heads, sizes.depth)
    q = q.reshape(batch, length, sizes.kv_heads, -1, sizes.depth)
    scores = jnp.einsum("blgrd,bmgd->bgrlm", q, k).astype(jnp.float32) * sizes.depth**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bgrlm,bmgd->blgrd", jax.nn.softmax(scores).astype(v.dtype), v)
    x = keep(x + mixed.reshape(x.shape) @ w["o"])
    h = _normalize(x, w["norm2"])
    return keep(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


def llama_step(sizes: LlamaSizes, scan: bool, keep: Callable[[Any], Any] = lambda x: x) -> Callable[..., Any]:
    """A training step with AdamW: `step(weights, moments, tokens)`. Layers that are scanned are recomputed."""
    import optax

    optimizer = optax.adamw(1e-3)

    def loss(w: Any, tokens: Any) -> Any:
        x = keep(w["embedding"][tokens])
        if scan:
            layer = jax.checkpoint(lambda x, one: (llama_layer(x, one, sizes, keep), None))
            x, _ = jax.lax.scan(layer, x, w["layers"])
        else:
            for one in w["layers"]:
                x = llama_layer(x, one, sizes, keep)
        logits = (_normalize(x, w["norm"]) @ w["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()

    def step(weights: Any, moments: Any, tokens: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, tokens)
        updates, moments = optimizer.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    return step


def llama_shapes(sizes: LlamaSizes, scan: bool, dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """The arguments of `llama_step`, without shardings."""
    import optax

    weights = sizes.shapes(dtype, scan)
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length), jnp.int32)
    return weights, jax.eval_shape(optax.adamw(1e-3).init, weights), tokens


def _split_llama(path: str, leaf: Any) -> Any:
    """FSDP over `data`, columns and rows over `model`."""
    if leaf.ndim < 2 or "norm" in path:
        return P()
    rows = any(f"['{name}']" in path for name in ("o", "down", "embedding"))
    pair = ("model", "data") if rows else ("data", "model")
    return P(*[None] * (leaf.ndim - 2), *pair)


def _llama(scale: Scale, layers: int, scan: bool) -> Case:
    mesh = scale.mesh(data=2, model=4)
    sizes = LlamaSizes(scale.pick(128, 2048), layers, scale.pick(512, 32000), scale.pick(16, 32), scale.pick(64, 2048))
    dtype = jnp.bfloat16 if scale.large else jnp.float32
    weights, moments, tokens = llama_shapes(sizes, scan, dtype)
    weights, moments = (sharded_like(each, _split_llama, mesh) for each in (weights, moments))
    tokens = shaped(mesh, P("data", None), tokens.shape, jnp.int32)
    step = llama_step(sizes, scan, lambda x: constrain(x, mesh, "data", None, None))
    return finish_case(step, weights, moments, (tokens,), mesh, sizes.vocabulary - 1)


def finish_case(
    step: Callable[..., Any], weights: Any, moments: Any, batch: tuple[Any, ...], mesh: Mesh, highest: int = 7
) -> Case:
    """The case of a step that returns the next weights, the next moments and its loss, and is given the former two."""
    out = (shardings_of(weights), shardings_of(moments), NamedSharding(mesh, P()))
    return Case(step, (weights, moments, *batch), {"out_shardings": out, "donate_argnums": (0, 1)}, highest)


@program("jax")
def llama_adamw(scale: Scale) -> Case:
    """Two layers of a Llama with grouped queries, one after the other, and AdamW."""
    return _llama(scale, 2, False)


@program("jax")
def llama_scan(scale: Scale) -> Case:
    """Four layers of a Llama, scanned and recomputed, and AdamW."""
    return _llama(scale, 4, True)


def _muon_numbers(weights: Any) -> Any:
    """Which dims are a matrix's rows and columns; optax would otherwise take the stacked dim for one of them."""
    from optax.contrib import MuonDimensionNumbers

    return jax.tree.map(lambda _: MuonDimensionNumbers(1, 2), weights)


@program("optax")
def muon_update(scale: Scale) -> Case:
    """Muon on eight stacked layers whose weights, gradients and momentum stay FSDP: the update alone."""
    from optax import contrib

    mesh, n = scale.mesh(data=8), scale.pick(512, 4096)
    weights = {"layers": shaped(mesh, P(None, "data", None), (8, n, n))}
    shapes = {"layers": jax.ShapeDtypeStruct((8, n, n), jnp.float32)}
    optimizer = contrib.muon(1e-3, muon_weight_dimension_numbers=_muon_numbers)

    def rows(path: str, leaf: Any) -> Any:
        return P(None, "data", None) if leaf.ndim == 3 else P()

    state = sharded_like(jax.eval_shape(optimizer.init, shapes), rows, mesh)

    def update(weights: Any, state: Any, gradient: Any) -> Any:
        import optax

        changes, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, changes), state

    options = {"out_shardings": (shardings_of(weights), shardings_of(state)), "donate_argnums": (0, 1)}
    return Case(update, (weights, state, weights), options, fixed={"weights": P(None, "data", None),
                "gradient": P(None, "data", None)})  # fmt: skip


@program("optax")
def muon_scan(scale: Scale) -> Case:
    """A training step of eight scanned layers with Muon, whose weights are stacked and FSDP by rows."""
    from optax import contrib

    mesh, n = scale.mesh(data=8), scale.pick(128, 2048)
    weights = {"layers": shaped(mesh, P(None, "data", None), (8, n, n))}
    shapes = {"layers": jax.ShapeDtypeStruct((8, n, n), jnp.float32)}
    optimizer = contrib.muon(1e-3, muon_weight_dimension_numbers=_muon_numbers)

    def rows(path: str, leaf: Any) -> Any:
        return P(None, "data", None) if leaf.ndim == 3 else P()

    state = sharded_like(jax.eval_shape(optimizer.init, shapes), rows, mesh)
    x = shaped(mesh, P("data", None), (scale.pick(256, 8192), n))

    def step(weights: Any, state: Any, x: Any) -> Any:
        import optax

        def loss(weights: Any) -> Any:
            layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
            return jnp.mean(jax.lax.scan(layer, x, weights["layers"])[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        changes, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, changes), state, value

    return finish_case(step, weights, state, (x,), mesh)


@program("jax")
def resnet_momentum(scale: Scale) -> Case:
    """A residual network on images with group normalization and momentum, by batch."""
    mesh, n, c = scale.mesh(data=2, model=4), scale.pick(16, 64), scale.pick(16, 128)
    shapes = {
        "stem": (3, 3, 3, c), "one": (3, 3, c, c), "two": (3, 3, c, c), "down": (3, 3, c, 2 * c),
        "three": (3, 3, 2 * c, 2 * c), "four": (3, 3, 2 * c, 2 * c), "head": (2 * c, 64),
    }  # fmt: skip
    weights = sharded_like(
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}, fsdp("data"), mesh
    )
    images = shaped(mesh, P(("data", "model")), (scale.pick(32, 256), n, n, 3))
    labels = shaped(mesh, P(("data", "model")), images.shape[:1], jnp.int32)

    def conv(x: Any, w: Any, stride: int = 1) -> Any:
        made = jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        groups = made.reshape(*made.shape[:3], 4, -1)
        centred = groups - groups.mean((1, 2, 4), keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, (1, 2, 4), keepdims=True) + 1e-5)
        return jax.nn.relu(scaled.reshape(made.shape))

    def loss(w: Any, x: Any, y: Any) -> Any:
        x = conv(x, w["stem"])
        x = x + conv(conv(x, w["one"]), w["two"])
        x = conv(x, w["down"], 2)
        x = x + conv(conv(x, w["three"]), w["four"])
        logits = x.mean((1, 2)) @ w["head"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))

    def step(weights: Any, moments: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, x, y)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments, value

    return finish_case(step, weights, weights, (images, labels), mesh, 63)


@program("jax")
def gcn_adam(scale: Scale) -> Case:
    """A graph convolutional network on one large graph: messages along edges, sums by node, and Adam."""
    mesh, nodes, edges = scale.mesh(data=8), scale.pick(256, 65536), scale.pick(2048, 1 << 20)
    width, classes = scale.pick(64, 512), 16
    shapes = [(width, 2 * width), (2 * width, 2 * width), (2 * width, classes)]
    weights = sharded_like([jax.ShapeDtypeStruct(one, jnp.float32) for one in shapes], fsdp("data"), mesh)
    features = shaped(mesh, P("data", None), (nodes, width))
    ends = [shaped(mesh, P("data"), (edges,), jnp.int32) for _ in range(2)]
    labels = shaped(mesh, P("data"), (nodes,), jnp.int32)

    def loss(w: Any, x: Any, senders: Any, receivers: Any, labels: Any) -> Any:
        degree = jax.ops.segment_sum(jnp.ones_like(senders, jnp.float32), receivers, nodes) + 1
        for at, one in enumerate(w):
            h = x @ one
            h = (jax.ops.segment_sum(h[senders], receivers, nodes) + h) / degree[:, None]
            x = jax.nn.relu(h) if at + 1 < len(w) else h
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))

    def step(weights: Any, moments: Any, *graph: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, *graph)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], gradient)
        second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments["second"], gradient)
        weights = jax.tree.map(lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-6), weights, first, second)
        return weights, {"first": first, "second": second}, value

    moments = {"first": weights, "second": weights}
    return finish_case(step, weights, moments, (features, *ends, labels), mesh, classes - 1)


@program("jax")
def spectral_poisson(scale: Scale) -> Case:
    """Time steps of a reaction and diffusion in three dims, its diffusion implicit by FFTs."""
    mesh, n = scale.mesh(z=2, y=4), scale.pick(32, 256)
    field = shaped(mesh, P("z", "y"), (n, n, n), jnp.complex64)

    def step(u: Any) -> Any:
        waves = jnp.fft.fftfreq(n) * n
        squares = waves[:, None, None] ** 2 + waves[None, :, None] ** 2 + waves[None, None, :] ** 2

        def advance(_: int, u: Any) -> Any:
            spectrum = u + 0.01 * (u - u * jnp.abs(u) ** 2)
            for dim in range(3):
                spectrum = jnp.fft.fft(spectrum, axis=dim)
            spectrum = spectrum / (1 + 0.01 * squares)
            for dim in range(3):
                spectrum = jnp.fft.ifft(spectrum, axis=dim)
            return constrain(spectrum, mesh, "z", "y", None)

        return jax.lax.fori_loop(0, 2, advance, u)

    return Case(step, (field,), {"out_shardings": field.sharding, "donate_argnums": 0})
