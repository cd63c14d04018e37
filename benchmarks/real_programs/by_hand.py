"""Programs twice: as they are written with constraints alone, and by hand with `shard_map`, which receives far less.

Both compute the same from the same arguments. `benchmarks/programs.py --by-hand` says how much each of them receives.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.real_programs.base import BY_HAND, Case, P, Scale, constrain, program, shaped

Array = Any
STEPS = 4
HEADS = 8


def _advance(tile: Array) -> Array:
    """One step of diffusion, from a tile with a frame of one element: the 9-point Laplacian."""
    rows, columns = tile.shape[0] - 2, tile.shape[1] - 2
    far = {0: -20.0, 1: 4.0, 2: 1.0}
    total = jnp.zeros((rows, columns), tile.dtype)
    for dy, dx in product((-1, 0, 1), repeat=2):
        part = tile[1 + dy : 1 + dy + rows, 1 + dx : 1 + dx + columns]
        total = total + far[abs(dy) + abs(dx)] * part
    return tile[1:-1, 1:-1] + total / 60


def _stencil(scale: Scale) -> tuple[Mesh, jax.ShapeDtypeStruct]:
    mesh, n = scale.mesh(y=2, x=4), scale.pick(64, 8192)
    return mesh, shaped(mesh, P("y", "x"), (n, n))


@program("jax")
def stencil_9_point(scale: Scale) -> Case:
    """Diffusion on a torus by the 9-point stencil: rolls of an array split by rows and columns."""
    mesh, field = _stencil(scale)
    far = {0: -20.0, 1: 4.0, 2: 1.0}

    def turn(_: int, u: Array) -> Array:
        total = jnp.zeros_like(u)
        for dy, dx in product((-1, 0, 1), repeat=2):
            total = total + far[abs(dy) + abs(dx)] * jnp.roll(u, (-dy, -dx), (0, 1))
        return constrain(u + total / 60, mesh, "y", "x")

    return Case(lambda u: jax.lax.fori_loop(0, STEPS, turn, u), (field,), {"out_shardings": field.sharding})


@program("jax", BY_HAND)
def stencil_9_point_by_hand(scale: Scale) -> Case:
    """Two rows from the neighbours, then two columns of the tile with them, which bring the corners."""
    mesh, field = _stencil(scale)

    def frame(tile: Array, dim: int, axis: str) -> Array:
        devices, size = mesh.shape[axis], tile.shape[dim]
        up = [(one, (one + 1) % devices) for one in range(devices)]
        last, first = (jax.lax.slice_in_dim(tile, at, at + 1, axis=dim) for at in (size - 1, 0))
        before = jax.lax.ppermute(last, axis, up)
        after = jax.lax.ppermute(first, axis, [(to, source) for source, to in up])
        return jnp.concatenate([before, tile, after], dim)

    def run(u: Array) -> Array:
        return jax.lax.fori_loop(0, STEPS, lambda _, u: _advance(frame(frame(u, 0, "y"), 1, "x")), u)

    f = jax.shard_map(run, mesh=mesh, in_specs=P("y", "x"), out_specs=P("y", "x"))
    return Case(f, (field,), {"out_shardings": field.sharding})


def _scanned(scale: Scale) -> tuple[Mesh, tuple[Any, ...]]:
    """The arguments of a selective scan: what goes in, its step sizes, the matrix A, and B and C by position."""
    mesh = scale.mesh(data=2, seq=4)
    batch, length, width, states = 8, scale.pick(64, 4096), scale.pick(32, 512), 16
    along = P("data", "seq", None)
    x, steps = (shaped(mesh, along, (batch, length, width)) for _ in range(2))
    b, c = (shaped(mesh, along, (batch, length, states)) for _ in range(2))
    return mesh, (x, steps, shaped(mesh, P(), (width, states)), b, c)


def _discretize(x: Array, steps: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Of `h[t] = decay[t] * h[t - 1] + brought[t]`, both factors, by position, channel and state."""
    steps = jax.nn.softplus(steps)[..., None]
    return jnp.exp(-steps * jnp.exp(a)), steps * b[:, :, None, :] * x[..., None]


def _follow(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
    return before[0] * after[0], before[1] * after[0] + after[1]


@program("jax")
def selective_scan(scale: Scale) -> Case:
    """A layer of a selective state-space model, its sequence split over devices: an associative scan."""
    mesh, args = _scanned(scale)

    def run(x: Array, steps: Array, a: Array, b: Array, c: Array) -> Array:
        pair = tuple(constrain(one, mesh, "data", "seq", None, None) for one in _discretize(x, steps, a, b))
        _, h = jax.lax.associative_scan(_follow, pair, axis=1)
        h = constrain(h, mesh, "data", "seq", None, None)
        return constrain(jnp.einsum("blds,bls->bld", h, c), mesh, "data", "seq", None)

    return Case(run, args, {"out_shardings": args[0].sharding})


@program("jax", BY_HAND)
def selective_scan_by_hand(scale: Scale) -> Case:
    """Each device scans its own positions; one pair of carries is exchanged."""
    mesh, args = _scanned(scale)

    def run(x: Array, steps: Array, a: Array, b: Array, c: Array) -> Array:
        decay, h = jax.lax.associative_scan(_follow, _discretize(x, steps, a, b), axis=1)
        decays, brought = jax.lax.all_gather((decay[:, -1], h[:, -1]), "seq")
        at, carry = jax.lax.axis_index("seq"), jnp.zeros_like(h[:, 0])
        for one in range(mesh.shape["seq"] - 1):
            carry = jnp.where(one < at, carry * decays[one] + brought[one], carry)
        return jnp.einsum("blds,bls->bld", h + decay * carry[:, None], c)

    along = P("data", "seq", None)
    f = jax.shard_map(run, mesh=mesh, in_specs=(along, along, P(), along, along), out_specs=along)
    return Case(f, args, {"out_shardings": args[0].sharding})


def _diffusion(scale: Scale) -> tuple[Mesh, Any, tuple[Any, ...]]:
    """The mesh, the weights of a diffusion transformer, and a batch: noised patches, times, and the noise."""
    mesh = scale.mesh(dp=2, cp=4)
    batch, length, d, layers = 2 * mesh.shape["dp"], scale.pick(64, 2048), scale.pick(64, 1024), 2
    sizes = {
        "modulate": (layers, d, 6 * d), "qkv": (layers, d, 3, HEADS, d // HEADS), "out": (layers, d, d),
        "up": (layers, d, 4 * d), "down": (layers, 4 * d, d),
    }  # fmt: skip
    weights = {name: shaped(mesh, P(), shape) for name, shape in sizes.items()}
    patches = shaped(mesh, P("dp", "cp", None), (batch, length, d))
    return mesh, weights, (patches, shaped(mesh, P("dp"), (batch,)), patches)


def _denoise(w: Any, patches: Array, times: Array, attend: Callable[[Array], Array], keep: Callable[..., Any]) -> Array:
    """The noise that a diffusion transformer with adaptive norms finds; `attend` mixes the positions of q, k and v."""
    d = patches.shape[-1]
    angles = times[:, None] * jnp.exp(jnp.arange(d // 2) / -8.0)
    condition = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

    def norm(x: Array, shift: Array, by: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + by[:, None]) + shift[:, None]

    def layer(x: Array, one: Any) -> tuple[Array, None]:
        factors = jnp.split(jax.nn.silu(condition) @ one["modulate"], 6, -1)
        mixed = attend(jnp.einsum("bld,dchk->cblhk", norm(x, factors[0], factors[1]), one["qkv"]))
        x = keep(x + factors[2][:, None] * (mixed.reshape(x.shape) @ one["out"]))
        hidden = jax.nn.gelu(norm(x, factors[3], factors[4]) @ one["up"])
        return keep(x + factors[5][:, None] * (hidden @ one["down"])), None

    return jax.lax.scan(layer, patches, w)[0]


def _attention(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)


@program("jax")
def diffusion_transformer(scale: Scale) -> Case:
    """A training step of a diffusion transformer with context and data parallelism: heads instead of positions."""
    mesh, weights, args = _diffusion(scale)

    def attend(qkv: Array) -> Array:
        q, k, v = (constrain(one, mesh, "dp", None, "cp", None) for one in qkv)
        return constrain(_attention(q, k, v), mesh, "dp", "cp", None, None)

    def step(w: Any, patches: Array, times: Array, noise: Array) -> Any:
        def loss(w: Any) -> Array:
            found = _denoise(w, patches, times, attend, lambda x: constrain(x, mesh, "dp", "cp", None))
            return jnp.mean((found - noise) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda one, by: one - 0.1 * by, w, gradient), value

    return Case(step, (weights, *args), {"out_shardings": NamedSharding(mesh, P())})


@program("jax", BY_HAND)
def diffusion_transformer_by_hand(scale: Scale) -> Case:
    """One all-to-all for q, k and v, and one sum of all gradients over both axes."""
    mesh, weights, args = _diffusion(scale)
    size = args[0].size

    def attend(qkv: Array) -> Array:
        q, k, v = jax.lax.all_to_all(qkv, "cp", 3, 2, tiled=True)
        return jax.lax.all_to_all(_attention(q, k, v), "cp", 1, 2, tiled=True)

    def step(w: Any, patches: Array, times: Array, noise: Array) -> Any:
        def loss(w: Any) -> Array:
            return jnp.sum((_denoise(w, patches, times, attend, lambda x: x) - noise) ** 2) / size

        value, gradient = jax.lax.psum(jax.value_and_grad(loss)(w), ("dp", "cp"))
        return jax.tree.map(lambda one, by: one - 0.1 * by, w, gradient), value

    along = P("dp", "cp", None)
    f = jax.shard_map(step, mesh=mesh, in_specs=(P(), along, P("dp"), along), out_specs=P(), check_vma=False)
    return Case(f, (weights, *args), {"out_shardings": NamedSharding(mesh, P())})
