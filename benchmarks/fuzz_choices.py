"""Chosen layouts of programs that nobody tuned for: results against `jax.jit` on one device, bytes against the plan.

Every program (loops, branches, integers, keys, gathers, sorts, empty arrays, trees with None, own shardings, ...) is
chosen for with random fixed specs and budgets, on random meshes of 8 CPU devices, and run. It prints every program
whose results or bytes differ, or that raises a foreign exception, and counts them in the last line.

    python benchmarks/fuzz_choices.py [--seed 0] [--rounds 1] [--only NAME] [--seconds 600]
"""

from __future__ import annotations

import argparse
import os
import random
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard.errors import BudgetError, ReshardError
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.network import Network

MESHES = (((8,), ("x",)), ((4, 2), ("x", "y")), ((2, 2, 2), ("x", "y", "z")))
PROGRAMS: dict[str, Callable[[random.Random, Mesh], tuple[Any, tuple[Any, ...]]]] = {}
Made = tuple[Any, tuple[Any, ...]]


def program(make: Callable[[random.Random, Mesh], Made]) -> Callable[[random.Random, Mesh], Made]:
    PROGRAMS[make.__name__] = make
    return make


def numbers(rng: random.Random, *shape: int, dtype: Any = "float32") -> jax.Array:
    drawn = np.random.default_rng(rng.randrange(1 << 30)).normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(drawn + 1j * drawn[::-1], dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(drawn > 0)
    return jnp.asarray(np.round(8 * drawn) if jnp.issubdtype(dtype, jnp.integer) else drawn, dtype)


def size(rng: random.Random) -> int:
    return rng.choice((8, 16, 16, 24, 32, 32, 7, 13))


@program
def scan_carries(rng: random.Random, mesh: Mesh) -> Made:
    n, m, backward = size(rng), size(rng), rng.random() < 0.5

    def f(x, k, b, w):
        def turn(carry, each):
            x, k, b, z = carry
            x = jnp.tanh(x @ each)
            return (x, k + (x > 0).astype(k.dtype), jnp.logical_xor(b, x < 0), z * 1j + x), (x.sum(0), k.max())

        return lax.scan(turn, (x, k, b, jnp.zeros(x.shape, jnp.complex64)), w, reverse=backward)

    return f, (numbers(rng, n, m), numbers(rng, n, m, dtype="int32"), numbers(rng, n, m, dtype=bool),
               numbers(rng, 3, m, m) / 4)  # fmt: skip


@program
def nested_scans(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    def f(x, w):
        def inner(c, each):
            return c + jnp.sin(c * each), c.mean()

        def outer(c, each):
            c, means = lax.scan(inner, c, each)
            c = lax.cond(means.sum() > 0, lambda c: c @ (each[0] * jnp.ones((m, m))) / m, lambda c: c * 0.5, c)
            return c, means

        return lax.scan(outer, x, w)

    return f, (numbers(rng, n, m), numbers(rng, 2, 3, m))


@program
def while_of_data(rng: random.Random, mesh: Mesh) -> Made:
    n = size(rng)

    def f(a, x):
        def more(state):
            _, step, change = state
            return jnp.logical_and(change > 1e-3, step < 20)

        def turn(state):
            x, step, _ = state
            new = a @ x
            new = new / jnp.linalg.norm(new)
            return new, step + 1, jnp.abs(new - x).max()

        return lax.while_loop(more, turn, (x, 0, jnp.inf))

    a = numbers(rng, n, n)
    return f, (a @ a.T + 5 * jnp.eye(n), numbers(rng, n) ** 2)


@program
def own_gradients(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    @jax.custom_vjp
    def clip(x, s):
        return jnp.clip(x, -s, s)

    clip.defvjp(lambda x, s: (clip(x, s), (x, s)), lambda res, g: (g * (jnp.abs(res[0]) < res[1]), (g * 0).sum()))

    @partial(jax.checkpoint, policy=rng.choice((None, jax.checkpoint_policies.dots_saveable)))
    def layer(w, x):
        return jnp.sin(clip(x @ w, 0.7) @ w.T)

    def loss(w, x):
        return layer(w[1], layer(w[0], x)).sum()

    return jax.value_and_grad(loss), (numbers(rng, 2, m, m) / 4, numbers(rng, n, m))


@program
def grads_of_examples(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    def loss(w, x, y):
        return ((jax.nn.softmax(w @ x) - y) ** 2).sum()

    def f(w, x, y):
        per = jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, y)
        norms = jnp.sqrt((per**2).sum((1, 2)))
        return w - 0.1 * (per / jnp.maximum(norms, 1)[:, None, None]).mean(0), norms

    return f, (numbers(rng, m, 16), numbers(rng, n, 16), numbers(rng, n, m))


@program
def integers(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    def f(k, b, u):
        even = (k & 1) == 0
        return {
            "sum": k.sum(1), "all": b.all(0), "any": (b & even).any(), "prod": jnp.where(b, 1, 2).prod(1),
            "or": lax.reduce(u, np.uint8(0), lax.bitwise_or, (0,)), "count": lax.population_count(u),
            "shift": (k << 2) // 3 % 5, "cum": jnp.cumsum(k, 0), "max": k.max(), "float": k.astype("float32") / 3,
            "bits": lax.bitcast_convert_type(k, "float32"), "xor": lax.reduce(u, np.uint8(0), lax.bitwise_xor, (1,)),
        }  # fmt: skip

    return f, (numbers(rng, n, m, dtype="int32"), numbers(rng, n, m, dtype=bool),
               numbers(rng, n, m, dtype="int32").astype("uint8"))  # fmt: skip


@program
def complex_numbers(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    def f(z, x):
        w = jnp.fft.fft2(z * x)
        return (
            jnp.fft.ifft2(w * jnp.conj(w)).real,
            jnp.abs(w @ w.T.conj()),
            jnp.fft.irfft(jnp.fft.rfft(x, axis=0), n, axis=0),
            w.sum(),
        )

    return f, (numbers(rng, n, m, dtype="complex64"), numbers(rng, n, m))


@program
def narrow_floats(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)
    eight = rng.choice((jnp.float8_e4m3fn, jnp.float8_e5m2))

    def f(x, w, s):
        y = lax.dot_general(x, w.astype(eight).astype(jnp.bfloat16), (((1,), (0,)), ((), ())),
                            preferred_element_type=jnp.float32)  # fmt: skip
        return y, (y * s).astype(eight), x.sum(0), (x.astype(jnp.float16) * 2).max(1)

    return f, (numbers(rng, n, m, dtype="bfloat16"), numbers(rng, m, n), numbers(rng, n))


@program
def sorting(rng: random.Random, mesh: Mesh) -> Made:
    n, m, dim = size(rng), size(rng), rng.choice((0, 1))

    def f(x, k):
        values, at = lax.top_k(x, 3)
        return {
            "sort": jnp.sort(x, axis=dim), "order": jnp.argsort(k, axis=0), "top": (values, at),
            "max": jnp.argmax(x, 0), "min": jnp.argmin(x), "median": jnp.median(x, axis=1),
            "pairs": lax.sort((k, x), dimension=1, num_keys=2), "find": jnp.searchsorted(jnp.sort(x[0]), x[:, 0]),
        }  # fmt: skip

    return f, (numbers(rng, n, m), numbers(rng, n, m, dtype="int32"))


@program
def gathers(rng: random.Random, mesh: Mesh) -> Made:
    n, m, mode = size(rng), size(rng), rng.choice(("drop", "clip", None))

    def f(x, at, pairs):
        y = x[at]
        z = x.at[at, :].add(y * 2, mode=mode)
        return {
            "rows": y, "add": z, "cols": x[:, pairs[:, 0] % m], "points": x[pairs[:, 0], pairs[:, 1]],
            "set": x.at[pairs[:, 0] % n, 0].set(0.0), "max": x.at[at].max(y), "mul": x.at[0].multiply(2),
            "segments": jax.ops.segment_sum(y, at % 5, 5), "take": jnp.take_along_axis(x, at[:n, None] % m, 1)
            if len(at) >= n else x, "fill": jnp.take(x, at, axis=1, mode="fill", fill_value=7.0),
            "grad": jax.grad(lambda x: (x[at] ** 2).sum())(x),
        }  # fmt: skip

    at = jnp.asarray([rng.randrange(-n, n + 2) for _ in range(size(rng))])
    return f, (numbers(rng, n, m), at, jnp.asarray([[rng.randrange(n), rng.randrange(m)] for _ in range(8)]))


@program
def slices(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)
    a, b = rng.randrange(n - 2), rng.randrange(1, 4)

    def f(x, i, j):
        return {
            "slice": x[a:, ::b], "dynamic": lax.dynamic_slice(x, (i, j), (3, m - 1)), "reverse": x[::-1],
            "update": lax.dynamic_update_slice(x, x[:2, :3] * 2, (i, j)), "roll": jnp.roll(x, i, 1),
            "pad": jnp.pad(x, ((1, 2), (0, b))), "neg": lax.pad(x, 0.0, ((-1, 0, 0), (0, -1, 1))),
            "join": jnp.concatenate([x, x[:1], x * 2]), "stack": jnp.stack([x, x.at[i].set(0)], 1),
            "split": jnp.split(x, [2], 1), "tile": jnp.tile(x, (2, 3)), "repeat": jnp.repeat(x, 2, 0),
            "shape": x.reshape(-1), "square": x.reshape(1, n, m, 1).transpose(2, 0, 3, 1), "row": x[i],
            "windows": lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 2), "SAME"), "tri": jnp.tril(x),
        }  # fmt: skip

    return f, (numbers(rng, n, m), jnp.int32(rng.randrange(-2, n)), jnp.int32(rng.randrange(m)))


@program
def empty_arrays(rng: random.Random, mesh: Mesh) -> Made:
    n = size(rng)

    def f(x, e, s):
        return x + e.sum(), jnp.concatenate([e, x[:0]]), e @ jnp.ones((n, 4)), (e.T @ e) * s, jnp.zeros((0,)), s

    return f, (numbers(rng, n, n), jnp.zeros((0, n)), jnp.float32(2))


@program
def scalars(rng: random.Random, mesh: Mesh) -> Made:
    return lambda a, b, c: (a + b, jnp.where(c, a, b), lax.fori_loop(0, b.astype(int), lambda i, x: x * 2, a)), (
        jnp.float32(1.5), jnp.float32(3), jnp.bool_(True))  # fmt: skip


@program
def unchanged(rng: random.Random, mesh: Mesh) -> Made:
    n = size(rng)
    return lambda x, y, unused: (x, x, y, {"again": y + 0, "both": (x + x.T, x)}, jnp.arange(n), 3.0), (
        numbers(rng, n, n), numbers(rng, n), numbers(rng, 8))  # fmt: skip


@program
def constants(rng: random.Random, mesh: Mesh) -> Made:
    n = size(rng)
    table = np.random.default_rng(1).normal(size=(n, 16)).astype("float32")

    def f(x):
        grid = jnp.arange(n)[:, None] * jnp.ones((n, 8))
        return jnp.eye(n), jnp.asarray(table), x @ table, jnp.full((n, 8), x.sum()), grid

    return f, (numbers(rng, 8, n),)


@program
def keys(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    def f(key, old, x):
        key, sub = jax.random.split(key)
        x = x + jax.random.normal(sub, x.shape)
        many = jax.vmap(lambda k: jax.random.uniform(k, (m,)))(jax.random.split(old, n))
        return key, jnp.where(jax.random.bernoulli(sub, 0.3, x.shape), x, many), jax.random.permutation(sub, x), \
            jax.random.categorical(sub, x), jax.random.randint(old, (n,), 0, 9)  # fmt: skip

    return f, (jax.random.key(rng.randrange(99)), jax.random.PRNGKey(3), numbers(rng, n, m))


@program
def trees(rng: random.Random, mesh: Mesh) -> Made:
    n = size(rng)

    def f(state, batch):
        loss, grads = jax.value_and_grad(lambda p: ((batch["x"] @ p["w"][0] + p["b"]) ** 2).mean())(state["params"])
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, state["params"], mu)
        return {"params": params, "mu": mu, "step": state["step"] + 1, "none": None}, {"loss": loss, "aux": (None, [])}

    params = {"w": (numbers(rng, n, 16),), "b": numbers(rng, 16)}
    state = {"params": params, "mu": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0), "none": None}
    return f, (state, {"x": numbers(rng, size(rng), n), "meta": None})


@program
def own_shardings(rng: random.Random, mesh: Mesh) -> Made:
    axes = mesh.axis_names
    first = axes[0]

    def local(x, w):
        return lax.psum(x @ w, axes) + lax.axis_index(first)

    def f(x, w):
        y = jax.shard_map(local, mesh=mesh, in_specs=(P(None, axes), P(axes)), out_specs=P(first))(x, w)
        y = lax.with_sharding_constraint(jnp.tanh(y), NamedSharding(mesh, P(first)))
        z = jax.shard_map(lambda a: lax.all_gather(a, first, axis=0, tiled=True) * 2, mesh=mesh, in_specs=P(axes),
                          out_specs=P(tuple(a for a in axes if a != first) or None), check_vma=False)(y)  # fmt: skip
        return y.sum(0), z, lax.with_sharding_constraint(w * 2, NamedSharding(mesh, P(P.UNCONSTRAINED, first)))

    return f, (numbers(rng, 16, 32), numbers(rng, 32, 8))


@program
def linear_algebra(rng: random.Random, mesh: Mesh) -> Made:
    n = rng.choice((8, 7, 16))

    def f(a, b):
        spd = a @ a.transpose(0, 2, 1) + n * jnp.eye(n)
        low = jnp.linalg.cholesky(spd)
        return low, jax.scipy.linalg.solve_triangular(low, b, lower=True), jnp.linalg.det(spd), \
            jnp.linalg.eigvalsh(spd), jnp.linalg.solve(spd, b), jnp.einsum("bij,bjk,bkl->il", a, spd, b)  # fmt: skip

    return f, (numbers(rng, 8, n, n), numbers(rng, 8, n, 4))


@program
def convolutions(rng: random.Random, mesh: Mesh) -> Made:
    c = rng.choice((8, 3, 16))
    groups = rng.choice((1, c))

    def f(x, w):
        def loss(w):
            y = lax.conv_general_dilated(x, w, (rng_stride, 1), "SAME", rhs_dilation=(1, 2), feature_group_count=groups,
                                         dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
            return jax.nn.relu(lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")).sum()

        return jax.value_and_grad(loss)(w)

    rng_stride = rng.choice((1, 2))
    return f, (numbers(rng, 8, 16, 16, c), numbers(rng, 3, 3, c // groups, c * rng.choice((1, 2))))


@program
def branches(rng: random.Random, mesh: Mesh) -> Made:
    n, m = size(rng), size(rng)

    def f(x, k, w):
        y = lax.switch(k, (lambda x: x @ w, lambda x: jnp.zeros((n, m)), lambda x: jnp.sort(x @ w * 2, 0)), x)

        def turn(c, i):
            return lax.cond(
                i % 2 == 0,
                lambda c: (c[0] + y, c[1]),
                lambda c: (c[0] @ (w @ w.T)[:m, :m] if n < 0 else c[0] * 2, c[1] + 1),
                c,
            ), i

        return jax.grad(lambda x: lax.cond(k > 1, lambda x: (x**2).sum(), lambda x: x.sum(), x))(x), lax.scan(
            turn, (y, k), jnp.arange(4)
        )

    return f, (numbers(rng, n, m), jnp.int32(rng.randrange(3)), numbers(rng, m, m))


@program
def attention(rng: random.Random, mesh: Mesh) -> Made:
    h, s, d = rng.choice((4, 6, 8)), size(rng), rng.choice((8, 16))

    def f(x, q, k, v, o, table, t):
        def loss(weights):
            x, q, k, v, o, table = weights
            e = table[t] + x
            heads = [(e @ each).reshape(2, s, h, d) for each in (q, k, v)]
            a = jnp.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / d**0.5
            a = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((s, s), bool)), a, -1e9))
            y = jnp.einsum("bhqk,bkhd->bqhd", a, heads[2]).reshape(2, s, h * d) @ o
            logits = jax.nn.log_softmax(y @ table.T)
            return -jnp.take_along_axis(logits, t[..., None], -1).mean()

        return jax.value_and_grad(loss)((x, q, k, v, o, table))

    w = [numbers(rng, 16, h * d) / 4 for _ in range(3)]
    return f, (numbers(rng, 2, s, 16), *w, numbers(rng, h * d, 16) / 4, numbers(rng, 40, 16),
               jnp.asarray([[rng.randrange(40) for _ in range(s)] for _ in range(2)]))  # fmt: skip


def random_spec(rng: random.Random, shape: tuple[int, ...], mesh: Mesh) -> P:
    left = list(mesh.axis_names)
    rng.shuffle(left)
    dims: list[Any] = []
    for extent in shape:
        taken: list[str] = []
        while left and rng.random() < 0.5 and extent % mesh.shape[left[-1]] == 0 and extent:
            extent //= mesh.shape[left[-1]]
            taken.append(left.pop())
        dims.append(tuple(taken) or (P.UNCONSTRAINED if rng.random() < 0.2 else None))
    return P(*dims)


def as_numbers(leaf: Any) -> np.ndarray:
    leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    array = np.asarray(leaf)
    return array if array.dtype.kind in "biufc" else array.astype("float32")


def check_choice(name: str, seed: str) -> str:
    """Chooses, runs and compares; returns what is wrong, or that all is equal."""
    rng = random.Random(seed)
    sizes, axes = rng.choice(MESHES)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), axes)
    f, values = PROGRAMS[name](rng, mesh)
    alone = jax.jit(f)(*values)
    # Fast links and a slow device split, slow links and a fast device leave whole.
    network = Network.uniform(rng.choice((1e-9, 1e-6)), rng.choice((1e9, 1e12)))
    speed = rng.choice((None, DeviceSpeed("slow", {"f32": 1e6}, 1e6)))
    step = reshard.jax.layout_choice.trace_step.trace_step(f, values)
    fixed = {
        each.name: random_spec(rng, each.shape[: len(each.shape) - (each.key is not None)], mesh)
        for each in (*step.arguments, *step.results) if rng.random() < 0.25
    }  # fmt: skip
    donate = tuple(at for at in range(len(values)) if rng.random() < 0.3)
    options: dict[str, Any] = dict(network=network, speed=speed, compare="none", time_limit=5)
    text = f"{name} seed {seed} mesh {dict(mesh.shape)} fixed {fixed} donate {donate} speed {speed is not None}"
    try:
        choice = reshard.jax.autoshard(f, mesh, *values, fixed=fixed, donate=donate, **options)
        if rng.random() < 0.4:
            budget = int(choice.peak_bytes * rng.uniform(0.4, 1))
            text += f" budget {budget} of {choice.peak_bytes}"
            try:
                choice = reshard.jax.autoshard(f, mesh, *values, fixed=fixed, donate=donate, budget=budget, **options)
            except BudgetError:
                text += " (refused)"
            else:
                if choice.peak_bytes > budget:
                    return f"{text}: peak {choice.peak_bytes}"
        planned = choice.tried[0].planned.received_bytes
        str(choice), choice.to_json()
        copies = jax.tree.map(jnp.copy, values)
        jitted = choice.jit()
        for _ in range(2):
            run = jitted(*jax.device_put(jax.tree.map(jnp.copy, copies), choice.in_shardings))
    except ReshardError as error:
        return f"{text}: refused: {type(error).__name__}: {error}"
    except Exception:
        return f"{text}: RAISED {traceback.format_exc(limit=-6)}"
    if jax.tree.structure(run) != jax.tree.structure(alone):
        return f"{text}: TREE {jax.tree.structure(run)}"
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(run), strict=True):
        a, b = as_numbers(one), as_numbers(other)
        if one.dtype != other.dtype or a.shape != b.shape:
            return f"{text}: TYPE {path} {one.dtype}{a.shape} {other.dtype}{b.shape}"
        exact = a.dtype.kind in "biu"
        narrow = np.dtype(one.dtype).itemsize < 4 if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key) else False
        scale = float(np.abs(a[np.isfinite(a)]).max(initial=0)) if not exact else 0
        if not (
            np.array_equal(a, b)
            if exact
            else np.allclose(
                a, b, rtol=0.1 if narrow else 2e-4, atol=(0.02 if narrow else 2e-5) * scale, equal_nan=True
            )
        ):
            return f"{text}: DIFFERS {path}: {a.ravel()[:6]} {b.ravel()[:6]} max {np.abs(a.astype(complex) - b).max()}"
    # XLA:CPU sums bf16 as f32, and the collectives of the user's own shard_map are nobody's plan.
    if abs(choice.received_bytes - planned) > max(64, 0.02 * planned) and name not in (
        "narrow_floats",
        "own_shardings",
    ):
        return f"{text}: BYTES planned {planned}, compiled {choice.received_bytes}"
    split = sum(any(spec or ()) for spec in (*choice.best.in_specs, *choice.best.out_specs))
    return f"{name} equal: {split} values split, {planned} bytes planned, {choice.received_bytes} received"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=600)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    began, count, wrong = time.time(), 0, 0
    for turn in range(given.rounds):
        for name in PROGRAMS:
            if given.only not in name or time.time() - began > given.seconds:
                continue
            started = time.time()
            found = check_choice(name, f"{given.seed}.{turn}.{name}")
            count, wrong = count + 1, wrong + ("equal:" not in found)
            print(f"{found} ({time.time() - started:.1f} s)", flush=True)
    print(f"{count} choices, {wrong} to look at")


if __name__ == "__main__":
    main()
