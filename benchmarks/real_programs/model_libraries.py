"""Models of tunix, qwix, flax (nnx and linen), equinox and haiku."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.real_programs.base import (
    Case,
    P,
    Scale,
    constrain,
    divisible,
    fsdp,
    program,
    shaped,
    sharded_like,
    shardings_of,
)


def _qwen3(scale: Scale) -> tuple[Any, Any, Any, Mesh]:
    """tunix's Qwen3: its graph, its weights with the shardings that the library gives them, and its mesh."""
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    mesh = scale.mesh(fsdp=2, tp=4)
    width = scale.pick(64, 1024)
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=512, embed_dim=width, hidden_dim=4 * width, num_heads=8, head_dim=scale.pick(16, 128),
        num_kv_heads=4, rope_theta=1_000_000, norm_eps=1e-6, dtype=jnp.float32,
    )  # fmt: skip
    graph, state = nnx.split(nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0))))
    specs = nnx.get_partition_spec(state)

    def one(leaf: Any, spec: Any) -> Any:
        part = divisible(spec if isinstance(spec, P) else P(), leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, part))

    weights = jax.tree.map(one, nnx.to_pure_dict(state), nnx.to_pure_dict(specs))
    return graph, state, weights, mesh


def _qwen3_inputs(scale: Scale, mesh: Mesh) -> tuple[Any, Any, Any]:
    batch, length = scale.pick(8, 16), scale.pick(32, 512)
    tokens = shaped(mesh, P("fsdp", None), (batch, length), jnp.int32)
    return tokens, jnp.arange(length)[None].repeat(batch, 0), jnp.tril(jnp.ones((batch, length, length), bool))


@program("tunix")
def tunix_qwen3(scale: Scale) -> Case:
    """Qwen3, a step of training with AdamW."""
    import optax
    from flax import nnx

    graph, state, weights, mesh = _qwen3(scale)
    tokens, positions, mask = _qwen3_inputs(scale, mesh)
    optimizer = optax.adamw(1e-3)
    kept = jax.eval_shape(optimizer.init, weights)
    by_path = {path: one.sharding.spec for path, one in jax.tree_util.tree_leaves_with_path(weights)}

    def like_weights(path: Any, leaf: Any) -> Any:
        spec = next((spec for ours, spec in by_path.items() if path[-len(ours) :] == ours), P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    kept = jax.tree_util.tree_map_with_path(like_weights, kept)

    def step(weights: Any, kept: Any, tokens: Any) -> Any:
        def loss(weights: Any) -> Any:
            filled = jax.tree.map(lambda one: one, state)
            nnx.replace_by_pure_dict(filled, weights)
            logits, _ = nnx.merge(graph, filled)(tokens, positions, None, mask)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        with mesh:
            value, gradient = jax.value_and_grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept, weights)
        return optax.apply_updates(weights, updates), after, value

    out = (shardings_of(weights), shardings_of(kept), NamedSharding(mesh, P()))
    return Case(step, (weights, kept, tokens), {"out_shardings": out}, 500)


@program("qwix")
def qwix_int8(scale: Scale) -> Case:
    """Two layers of flax's linen, quantized to int8 by qwix, serving."""
    import qwix
    from flax import linen as nn

    mesh, width = scale.mesh(data=2, model=4), scale.pick(128, 2048)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                h = nn.Dense(4 * width, use_bias=False)(x)
                h = constrain(jax.nn.gelu(h), mesh, "data", "model")
                x = x + constrain(nn.Dense(width, use_bias=False)(h), mesh, "data", None)
            return constrain(x, mesh, None, ("data", "model"))

    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    model = qwix.quantize_model(Model(), qwix.PtqProvider(rules))
    x = shaped(mesh, P("data", None), (scale.pick(64, 1024), width))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))

    def rule(path: str, leaf: Any) -> Any:
        return P("data", "model") if "Dense_0" in path or "Dense_2" in path else P("model", "data")

    weights = sharded_like(shapes, rule, mesh)
    return Case(lambda w, x: model.apply(w, x), (weights, x), highest=100)


@program("flax")
def nnx_transformer(scale: Scale) -> Case:
    """flax.nnx: two blocks with MultiHeadAttention, FSDP by annotations, a step of SGD."""
    from flax import nnx

    mesh, width = scale.mesh(data=2, model=4), scale.pick(64, 1024)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attention = nnx.MultiHeadAttention(8, width, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)
            self.norm = nnx.LayerNorm(width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + constrain(self.attention(self.norm(x)), mesh, "data", None, None)
            h = constrain(nnx.gelu(self.up(x)), mesh, "data", None, "model")
            return x + constrain(self.down(h), mesh, "data", None, None)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            for one in self.blocks:
                x = one(x)
            return x

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    weights = sharded_like(nnx.to_pure_dict(state), fsdp("model"), mesh)
    x = shaped(mesh, P("data", None, None), (scale.pick(8, 16), scale.pick(32, 512), width))

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            filled = jax.tree.map(lambda one: one, state)
            nnx.replace_by_pure_dict(filled, weights)
            return jnp.mean(nnx.merge(graph, filled)(x) ** 2)

        gradient = jax.grad(loss, allow_int=True)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g if jnp.issubdtype(w.dtype, jnp.floating) else w, weights, gradient)

    return Case(step, (weights, x), {"out_shardings": shardings_of(weights)})


@program("flax")
def linen_logical_axes(scale: Scale) -> Case:
    """flax.linen with logical axes, scan over layers and remat, as MaxText writes it: gradients."""
    from flax import linen as nn

    mesh, width = scale.mesh(data=2, model=4), scale.pick(64, 1024)
    rules = (("batch", "data"), ("embed", None), ("mlp", "model"), ("heads", "model"), ("length", None),
             ("fsdp", "data"), ("layers", None), ("norm_length", "model"))  # fmt: skip

    def logical(x: Any, *names: Any) -> Any:
        return nn.with_logical_constraint(x, names, rules=rules, mesh=mesh)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            x = logical(x, "batch", "norm_length", "embed")
            h = nn.LayerNorm()(x)
            q, k, v = (
                logical(nn.DenseGeneral((8, width // 8), name=one)(h), "batch", "length", "heads", None)
                for one in "qkv"
            )
            h = nn.dot_product_attention(q, k, v)
            h = nn.DenseGeneral(width, axis=(-2, -1), name="out")(h)
            x = x + logical(h, "batch", "norm_length", "embed")
            h = logical(nn.gelu(nn.Dense(4 * width, name="up")(x)), "batch", "length", "mlp")
            return x + logical(nn.Dense(width, name="down")(h), "batch", "norm_length", "embed"), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
            return layers(name="layers")(x, None)[0]

    model = Model()
    x = shaped(mesh, P("data", None, None), (scale.pick(8, 16), scale.pick(32, 512), width))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))

    def rule(path: str, leaf: Any) -> Any:
        if "down" in path:
            return P(None, "model", "data")
        if "up" in path:
            return P(None, "data", "model")
        return P(None, "data", "model") if any(f"['{one}']" in path for one in "qkv") else P()

    weights = sharded_like(shapes, rule, mesh)
    gradient = jax.grad(lambda w, x: jnp.mean(model.apply(w, x) ** 2))
    return Case(gradient, (weights, x), {"out_shardings": shardings_of(weights)})


@program("equinox")
def equinox_transformer(scale: Scale) -> Case:
    """equinox: attention and an MLP over a batch, with filter_shard, ZeRO and Adam."""
    import equinox as eqx
    import optax

    mesh, width = scale.mesh(data=2, model=4), scale.pick(64, 1024)

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norm: eqx.nn.LayerNorm

        def __init__(self, key: Any) -> None:
            one, two = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(8, width, key=one)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, key=two)
            self.norm = eqx.nn.LayerNorm(width)

        def __call__(self, x: Any) -> Any:
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h)
            return x + jax.vmap(self.mlp)(x)

    made = eqx.filter_eval_shape(lambda: [Block(key) for key in jax.random.split(jax.random.key(0), 2)])
    shapes, static = eqx.partition(made, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    optimizer = optax.adam(1e-3)
    weights = sharded_like(shapes, fsdp("data"), mesh)
    kept = sharded_like(jax.eval_shape(optimizer.init, shapes), fsdp(("data", "model")), mesh)
    x = shaped(mesh, P(("data", "model"), None, None), (scale.pick(8, 16), scale.pick(32, 256), width))

    def step(weights: Any, kept: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = eqx.filter_shard(x, NamedSharding(mesh, P(("data", "model"))))
            for one in eqx.combine(weights, static):
                y = jax.vmap(one)(y)
            return jnp.mean(y**2)

        gradient = jax.grad(loss)(weights)
        updates, after = optimizer.update(gradient, kept, weights)
        return eqx.apply_updates(weights, updates), after

    out = (shardings_of(weights), shardings_of(kept))
    return Case(step, (weights, kept, x), {"out_shardings": out, "donate_argnums": (0, 1)})


@program("haiku")
def haiku_convnet(scale: Scale) -> Case:
    """haiku: a small ResNet with batch norm over all devices, its last layers split by channel."""
    import haiku as hk

    mesh, n, c = scale.mesh(data=2, model=4), scale.pick(16, 64), scale.pick(16, 128)

    def network(x: Any) -> Any:
        x = hk.Conv2D(c, 3)(x)
        for _ in range(2):
            h = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
            x = x + hk.Conv2D(c, 3)(jax.nn.relu(h))
        x = constrain(x.mean((1, 2)), mesh, "data", "model")
        return hk.Linear(128)(jax.nn.relu(hk.Linear(8 * c)(x)))

    model = hk.transform_with_state(network)
    x = shaped(mesh, P(("data", "model"), None, None, None), (scale.pick(16, 64), n, n, 3))
    shapes, state = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype))
    weights, state = sharded_like(shapes, fsdp("model"), mesh), sharded_like(state, fsdp("model"), mesh)

    def step(weights: Any, state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y, after = model.apply(weights, state, jax.random.key(0), x)
            return jnp.mean(y**2), after

        gradient, after = jax.grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), after

    return Case(step, (weights, state, x), {"out_shardings": (shardings_of(weights), shardings_of(state))})
