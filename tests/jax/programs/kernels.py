"""Numerical kernels: pencils, attention over a sharded sequence, matrix products, loops whose layout changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.base import Case, normal, program, programs_in, put


def _dft(size: int) -> np.ndarray:
    """The transform as a matrix: XLA:CPU itself fails on a sharded fft."""
    return np.exp(-2j * np.pi * np.outer(np.arange(size), np.arange(size)) / size).astype(np.complex64)


@program("pencils", "a spectral solve: three pencil layouts there and back, a dense DFT along the local axis", p=2, q=4)
def pencils(mesh: Mesh) -> Case:
    n = (8, 16, 8)
    along_2, along_1, along_0 = (
        NamedSharding(mesh, spec) for spec in (P("p", "q", None), P("p", None, "q"), P(None, "p", "q"))
    )
    f0, f1, f2 = (_dft(size) for size in n)
    k0, k1, k2 = np.meshgrid(*(np.fft.fftfreq(size) for size in n), indexing="ij")
    inverse_laplacian = (1 / (1 + k0**2 + k1**2 + k2**2)).astype(np.float32)

    def dft(u, matrix, pencil, rule):  # pinned before and after: the product must not gather instead
        u = with_sharding_constraint(u, pencil)
        return with_sharding_constraint(jnp.einsum(rule, u, matrix), pencil)

    def solve(u):
        u = dft(u, f2, along_2, "abc,cd->abd")
        u = dft(u, f1, along_1, "abc,bd->adc")
        u = dft(u, f0, along_0, "abc,ad->dbc") * with_sharding_constraint(inverse_laplacian, along_0)
        u = dft(u, f0.conj() / n[0], along_0, "abc,ad->dbc")
        u = dft(u, f1.conj() / n[1], along_1, "abc,bd->adc")
        return dft(u, f2.conj() / n[2], along_2, "abc,cd->abd")

    return Case(solve, (put(mesh, normal(0, *n, dtype=np.complex64), "p", "q"),), tolerance=1e-4)


def _qkv(mesh: Mesh, *axes: object, batch: int = 2, length: int = 32, heads: int = 4, size: int = 8):
    return tuple(put(mesh, normal(seed, batch, length, heads, size), *axes) for seed in range(3))


@program(
    "ring-attention",
    "striped ring attention: tokens dealt round robin, a user's shard_map ring over them",
    ring=4,
    tp=2,
)
def ring_attention(mesh: Mesh) -> Case:
    ring = mesh.shape["ring"]
    dealt, whole = NamedSharding(mesh, P(None, "ring", None, "tp")), NamedSharding(mesh, P(None, "ring", "tp"))

    def local(q, k, v):  # batch, 1, local length, heads, size: token t of a device is token t * ring + its index
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
        index = jax.lax.axis_index("ring")
        times = jnp.arange(q.shape[1]) * ring
        top = jnp.full(q.shape[:-1], -1e9)
        total, out = jnp.zeros(q.shape[:-1]), jnp.zeros_like(q)
        for hop in range(ring):
            owner = (index - hop) % ring
            allowed = (times + index)[:, None] >= (times + owner)[None, :]
            scores = jnp.einsum("bqhk,bthk->bqht", q, k) / np.sqrt(q.shape[-1])
            scores = jnp.where(allowed[None, :, None, :], scores, -1e9)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, decay = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            total = total * decay + weights.sum(-1)
            out, top = out * decay[..., None] + jnp.einsum("bqht,bthk->bqhk", weights, v), new_top
            k, v = (jax.lax.ppermute(x, "ring", [(i, (i + 1) % ring) for i in range(ring)]) for x in (k, v))
        return (out / total[..., None])[:, None]

    spec = P(None, "ring", None, "tp")
    attend = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)

    def f(q, k, v):
        def deal(x):
            b, s, h, d = x.shape
            return with_sharding_constraint(jnp.swapaxes(x.reshape(b, s // ring, ring, h, d), 1, 2), dealt)

        y = jnp.swapaxes(attend(deal(q), deal(k), deal(v)), 1, 2)
        return with_sharding_constraint(y.reshape(q.shape), whole)

    return Case(f, _qkv(mesh, None, "ring", "tp"))


@program("ulysses", "sequence-sharded to head-sharded attention and back, with its gradient", data=2, sp=4)
def ulysses(mesh: Mesh) -> Case:
    by_length, by_head = (NamedSharding(mesh, spec) for spec in (P("data", "sp"), P("data", None, "sp")))

    def loss(qkv):
        q, k, v = (with_sharding_constraint(x, by_head) for x in qkv)
        weights = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1]))
        y = with_sharding_constraint(jnp.einsum("bhqt,bthk->bqhk", weights, v), by_length)
        return jnp.sum(y**3)

    return Case(
        jax.grad(loss), (_qkv(mesh, "data", "sp", length=16),), {"out_shardings": (by_length,) * 3}, tolerance=1e-4
    )


@program(
    "summa", "a chain of products: both operands over the grid, then rows over all devices, then the grid", x=4, y=2
)
def summa(mesh: Mesh) -> Case:
    grid, turned = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("y", "x"))
    rows, columns = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P(None, ("y", "x")))

    def f(a, b, c):
        ab = with_sharding_constraint(a @ b, rows)
        q = ab / jnp.linalg.norm(ab, axis=1, keepdims=True)
        abc = with_sharding_constraint(q @ with_sharding_constraint(c, columns), grid)
        return with_sharding_constraint(abc.T @ abc, turned)

    args = (
        put(mesh, normal(0, 16, 32), "x", "y"),
        put(mesh, normal(1, 32, 24), "x", "y"),
        put(mesh, normal(2, 24, 16), "x", "y"),
    )
    return Case(f, args)


@program("adi-scan", "alternating directions: two carries that swap between row and column layout every step", p=8)
def adi_scan(mesh: Mesh) -> Case:
    rows, columns = NamedSharding(mesh, P("p")), NamedSharding(mesh, P(None, "p"))

    def f(sweep, a, b):
        def body(carry, _):
            a, b = carry
            new_b = with_sharding_constraint(sweep @ with_sharding_constraint(a, columns), columns)
            new_a = with_sharding_constraint(with_sharding_constraint(b, rows) @ sweep, rows)
            return (new_a, new_b), jnp.sum(new_a * a)

        return jax.lax.scan(body, (a, b), length=5)

    sweep = np.linalg.inv(np.eye(16) * 2.1 - np.eye(16, k=1) - np.eye(16, k=-1))
    args = (
        put(mesh, sweep.astype(np.float32) / 4),
        put(mesh, normal(0, 16, 16), "p"),
        put(mesh, normal(1, 16, 16), None, "p"),
    )
    return Case(f, args, {"out_shardings": ((rows, columns), None)}, tolerance=1e-4)


@program(
    "power-while", "power iteration until it converges: the vector changes axis in the body of a while loop", x=4, y=2
)
def power_while(mesh: Mesh) -> Case:
    along_x, along_y = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("y"))

    def f(a, v):
        def step(state):
            i, v, _ = state
            w = with_sharding_constraint(a @ v, along_x)
            w = with_sharding_constraint(w / jnp.linalg.norm(w), along_y)
            return i + 1, w, jnp.linalg.norm(w - v)

        def going(state):
            return (state[0] < 8) & (state[2] > 1e-30)

        return jax.lax.while_loop(going, step, (0, v, jnp.inf))

    a = normal(0, 16, 16)
    args = (put(mesh, a @ a.T, "x", "y"), put(mesh, normal(1, 16), "y"))
    return Case(f, args, tolerance=1e-4)


@program("cond", "a reshard in one branch only: softmax along a dim that the other branch leaves sharded", x=4, y=2)
def cond(mesh: Mesh) -> Case:
    grid, rows = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(("y", "x")))

    def normalised(x):
        return with_sharding_constraint(jax.nn.softmax(with_sharding_constraint(x, rows), axis=1), grid)

    def f(x, limits):
        results = [jax.lax.cond(jnp.mean(x) > limit, normalised, lambda x: x * 2, x) for limit in limits]
        return jax.lax.switch(jnp.int32(jnp.mean(x) > 9), [jnp.sin, normalised], results[0] + results[1])

    return Case(f, (put(mesh, normal(0, 16, 16), "x", "y"), put(mesh, np.float32([-9, 9]))))


@program("heat-loop", "a stencil with halos by roll in a fori_loop, then the layout of a checkpoint", x=4, y=2)
def heat_loop(mesh: Mesh) -> Case:
    grid, slabs = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(("x", "y")))

    def step(_, u):
        near = sum(jnp.roll(u, shift, axis) for axis in (0, 1) for shift in (1, -1))
        return with_sharding_constraint(0.6 * u + 0.1 * near, grid)

    def f(u):
        return with_sharding_constraint(jax.lax.fori_loop(0, 4, step, u), slabs)

    return Case(f, (put(mesh, normal(0, 16, 24), "x", "y"),), {"donate_argnums": 0})


@program("hessian-vector", "value, gradient and Hessian-vector product of a function that changes layout", x=4, y=2)
def hessian_vector(mesh: Mesh) -> Case:
    grid, columns = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, ("x", "y")))

    def energy(x):
        y = with_sharding_constraint(jnp.sin(x), columns)
        return jnp.sum(jnp.cumsum(y, axis=0) ** 2)

    def f(x, v):
        value, gradient = jax.value_and_grad(energy)(x)
        return value, gradient, jax.jvp(jax.grad(energy), (x,), (v,))[1]

    args = (put(mesh, normal(0, 16, 16), "x", "y"), put(mesh, normal(1, 16, 16), "x", "y"))
    return Case(f, args, {"out_shardings": (None, grid, grid)}, tolerance=1e-4)


PROGRAMS = programs_in(vars())
