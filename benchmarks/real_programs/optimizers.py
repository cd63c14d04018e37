"""Training steps of optax, with optimizer state split over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

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


def _network(scale: Scale) -> dict[str, Any]:
    d = scale.pick(128, 2048)
    shapes = {"a": (d, 4 * d), "b": (4 * d, d), "c": (d, 4 * d), "d": (4 * d, d), "bias": (d,)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _forward(w: Any, x: Any) -> Any:
    x = jax.nn.gelu(x @ w["a"]) @ w["b"] + w["bias"]
    return jax.nn.gelu(x @ w["c"]) @ w["d"]


def _trained(scale: Scale, optimizer: Any, weights: Any, state: Any, *, master: bool = False) -> Case:
    """A step in which weights and optimizer state have rules of their own."""
    import optax

    mesh = scale.mesh(data=2, model=4)
    shapes = _network(scale)
    params = sharded_like(shapes, weights, mesh)
    kept = sharded_like(jax.eval_shape(optimizer.init, shapes), state, mesh)
    x = shaped(mesh, P(("data", "model"), None), (scale.pick(64, 4096), shapes["a"].shape[0]))

    def step(params: Any, kept: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            low = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params) if master else params
            return jnp.mean(_forward(low, x.astype(jnp.bfloat16) if master else x).astype("float32") ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, after = optimizer.update(gradient, kept, params)
        return optax.apply_updates(params, updates), after, value

    out = (shardings_of(params), shardings_of(kept), NamedSharding(mesh, P()))
    return Case(step, (params, kept, x), {"out_shardings": out, "donate_argnums": (0, 1)})


def _whole(_: str, leaf: Any) -> Any:
    return P()


def _rows_and_columns(path: str, leaf: Any) -> Any:
    return P("data", "model") if leaf.ndim == 2 else P()


@program("optax", "h100")
def zero_adamw(scale: Scale) -> Case:
    """ZeRO-1: weights whole on every device, AdamW's moments split over all."""
    import optax

    return _trained(scale, optax.adamw(1e-3), _whole, fsdp(("data", "model")))


@program("optax")
def fsdp_adafactor(scale: Scale) -> Case:
    """FSDP in two axes with Adafactor, whose factors are sums over rows and columns."""
    import optax

    return _trained(scale, optax.adafactor(1e-3, min_dim_size_to_factor=64), _rows_and_columns, fsdp("model"))


@program("optax")
def fsdp_muon(scale: Scale) -> Case:
    """FSDP with Muon, which multiplies each gradient by itself a few times."""
    from optax import contrib

    return _trained(scale, contrib.muon(1e-3), fsdp(("data", "model")), fsdp(("data", "model")))


@program("optax")
def mixed_precision_lamb(scale: Scale) -> Case:
    """FSDP with weights in f32 that are used as bf16, clipped by global norm, with LAMB."""
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))
    return _trained(scale, optimizer, fsdp(("data", "model")), fsdp(("data", "model")), master=True)


@program("optax")
def shampoo_like(scale: Scale) -> Case:
    """A preconditioner of whole matrices: statistics by blocks, their roots computed in batches over devices."""
    mesh = scale.mesh(data=2, model=4)
    blocks, n = scale.pick(16, 64), scale.pick(16, 128)
    gradient = shaped(mesh, P("data", "model"), (blocks * n // 4, 4 * n))
    kept = shaped(mesh, P(("data", "model"), None, None), (blocks, n, n))

    def step(gradient: Any, kept: Any) -> Any:
        parts = gradient.reshape(blocks // 4, n, 4, n).transpose(0, 2, 1, 3).reshape(blocks, n, n)
        parts = constrain(parts, mesh, ("data", "model"), None, None)
        kept = 0.9 * kept + 0.1 * jnp.einsum("bij,bkj->bik", parts, parts)
        root = kept / (1 + jnp.linalg.norm(kept, axis=(1, 2), keepdims=True))
        for _ in range(4):
            root = 1.5 * root - 0.5 * root @ root @ root
        made = (root @ parts).reshape(blocks // 4, 4, n, n).transpose(0, 2, 1, 3).reshape(gradient.shape)
        return constrain(made, mesh, "data", "model"), kept

    return Case(step, (gradient, kept), {"out_shardings": (gradient.sharding, kept.sharding)})
