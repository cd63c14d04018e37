"""Public reports about experts, and about orders of axes: rebuilt around the reshard that each names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.base import Case, normal, ordinal, program, programs_in, put


def _orthogonalised(x):
    """Three Newton-Schulz iterations on a stack of matrices."""
    x = x / jnp.linalg.norm(x, axis=(1, 2), keepdims=True)
    for _ in range(3):
        gram = x @ jnp.swapaxes(x, 1, 2)
        x = 1.5 * x - 0.5 * gram @ x
    return x


@program(
    "marin-ep-cp",
    "muon on stacked expert weights: matrices sharded over two axes, whole for the update, "
    "https://github.com/marin-community/marin/pull/9116",
    remat=True,
    context=2,
    expert=4,
)
def marin_ep_cp(mesh: Mesh) -> Case:
    specs = {
        "gate": P(None, ("expert", "context")),
        "up": P(None, ("expert", "context")),
        "down": P(None, None, ("expert", "context")),
    }
    stored = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    by_layer = NamedSharding(mesh, P("context"))

    def step(weights, momenta):
        def update(w, m, at):
            m = _orthogonalised(with_sharding_constraint(m, by_layer))
            return w - 0.1 * with_sharding_constraint(m, at)

        return jax.tree.map(update, weights, momenta, stored)

    shapes = {"gate": (4, 16, 24), "up": (4, 16, 8), "down": (4, 8, 16)}
    weights, momenta = (
        jax.device_put({name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}, stored)
        for seed in (0, 10)
    )
    return Case(step, (weights, momenta), {"donate_argnums": 0, "out_shardings": stored})


@program(
    "marin-6069",
    "between attention and the experts, explicitly: batch and heads to batch over both axes, "
    "https://github.com/marin-community/marin/pull/6069",
    explicit=True,
    ambient=True,
    data=2,
    expert=4,
)
def marin_6069(mesh: Mesh) -> Case:
    def loss(w, x):
        y = jax.sharding.reshard(x, P("data", None, "expert"))
        y = jax.sharding.reshard(jnp.tanh(y), P(("data", "expert")))
        y = jnp.einsum("bshd,hdf->bsf", y, w, out_sharding=P(("data", "expert")))
        return jnp.sum(y * y)

    args = (put(mesh, normal(0, 4, 8, 16, scale=0.2)), put(mesh, normal(1, 8, 4, 4, 8), ("data", "expert")))
    return Case(jax.grad(loss, argnums=(0, 1)), args, tolerance=1e-4)


@program(
    "marin-lm-head",
    "a loss whose head is stored over the axes that the tokens use too, https://github.com/marin-community/marin",
    data=4,
    expert=2,
)
def marin_lm_head(mesh: Mesh) -> Case:
    by_token, by_vocab = (
        NamedSharding(mesh, P(("data", "expert"))),
        NamedSharding(mesh, P(None, None, ("data", "expert"))),
    )

    def loss(head, hidden, labels):
        hidden = with_sharding_constraint(jax.nn.silu(hidden), by_token)
        logits = with_sharding_constraint(hidden @ head, by_vocab)
        logits = with_sharding_constraint(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True), by_token)
        return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], axis=-1))

    labels = np.random.default_rng(2).integers(0, 32, (8, 8)).astype(np.int32)
    args = (put(mesh, normal(0, 16, 32), ("data", "expert")), put(mesh, normal(1, 8, 8, 16), ("data", "expert")))
    return Case(jax.grad(loss, argnums=(0, 1)), (*args, put(mesh, labels, ("data", "expert"))))


@program(
    "reshard-blog-3d",
    "(-, (X, T)) to ((D, X, T), -) and (D, X) to (-, (D, X, T)), https://zhen8838.github.io/2025/10/15/jax-reshard",
    remat=True,
    explicit=True,
    D=2,
    X=2,
    T=2,
)
def reshard_blog_3d(mesh: Mesh) -> Case:
    def f(x, y):
        rows = jax.sharding.reshard(x, NamedSharding(mesh, P(("D", "X", "T"))))
        return rows, jax.sharding.reshard(y, NamedSharding(mesh, P(None, ("D", "X", "T"))))

    args = (put(mesh, ordinal(32, 32), None, ("X", "T")), put(mesh, -ordinal(32, 32), "D", "X"))
    return Case(f, args, tolerance=0)


@program(
    "heat-1932",
    "a resplit of dims the devices do not divide, https://github.com/helmholtz-analytics/heat/issues/1932",
    p=8,
)
def heat_1932(mesh: Mesh) -> Case:
    columns, rows = NamedSharding(mesh, P(None, "p")), NamedSharding(mesh, P("p"))

    def f(x):
        x = with_sharding_constraint(jnp.cumsum(x, axis=0), columns)
        x = with_sharding_constraint(x, rows)
        return x / jnp.max(x, axis=1, keepdims=True)

    return Case(f, (put(mesh, 1 + ordinal(19, 11, 3)),))


PROGRAMS = programs_in(vars())
