"""One operation or feature a program: what lowers in its own way along a sharded dim, dtypes, modes of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.base import Case, normal, ordinal, program, programs_in, put


@program("dropout", "random bits drawn in one layout and used in another", x=4, y=2)
def dropout(mesh: Mesh) -> Case:
    grid, columns = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, ("x", "y")))

    def f(key, x):
        mask_key, noise_key = jax.random.split(key)
        keep = with_sharding_constraint(jax.random.bernoulli(mask_key, 0.8, x.shape), grid)
        noise = with_sharding_constraint(jax.random.normal(noise_key, x.shape), grid)
        x = with_sharding_constraint(jnp.where(keep, x / 0.8, 0), columns)
        return x + with_sharding_constraint(noise, columns)

    return Case(f, (put(mesh, np.uint32([0, 7])), put(mesh, normal(0, 16, 16), "x", "y")))


@program("order-ops", "cumulative sum, sort, argsort and top-k along a sharded dim", x=4, y=2)
def order_ops(mesh: Mesh) -> Case:
    turned = NamedSharding(mesh, P("y", "x"))

    def f(x):
        total = with_sharding_constraint(jnp.cumsum(x, axis=0), turned)
        values, places = jax.lax.top_k(x, 3)
        return total, jnp.sort(x, axis=0), jnp.argsort(x, axis=1), values, places, jnp.cumprod(x / 9, axis=1)

    return Case(f, (put(mesh, normal(0, 16, 16), "x", "y"),))


@program("uneven", "sizes that no mesh axis divides: 10 over 4, 17 over 8, 5 over 2", remat=True, x=4, y=2)
def uneven(mesh: Mesh) -> Case:
    a, b, c = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, ("x", "y")), P("y", "x")))

    def f(x):
        x = with_sharding_constraint(x + 1, a)
        x = with_sharding_constraint(x * 2, b)
        return jnp.cumsum(with_sharding_constraint(x[::2], c), axis=1)

    return Case(f, (put(mesh, ordinal(10, 17)),))


@program("join-and-flip", "concatenate arrays of two layouts, pad, reverse and roll along sharded dims", x=4, y=2)
def join_and_flip(mesh: Mesh) -> Case:
    rows, grid = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P("x", "y"))

    def f(a, b):
        joined = with_sharding_constraint(jnp.concatenate([a, b], axis=0), grid)
        padded = with_sharding_constraint(jnp.pad(joined, ((4, 4), (3, 5)), constant_values=-1), rows)
        return with_sharding_constraint(jnp.roll(jnp.flip(padded, axis=(0, 1)), 3, axis=1), grid)

    args = (put(mesh, ordinal(16, 8), "x", "y"), put(mesh, -ordinal(24, 8), None, ("y", "x")))
    return Case(f, args)


@program("reshapes", "reshapes that merge a sharded minor dim and split sharded dims off their axes' size", x=4, y=2)
def reshapes(mesh: Mesh) -> Case:
    merged, split = NamedSharding(mesh, P(("x", "y"))), NamedSharding(mesh, P("y", None, "x"))

    def f(x):
        flat = with_sharding_constraint(x.reshape(-1, 16) * 2, merged)
        halves = with_sharding_constraint(flat.reshape(2, 24, 16), split)
        return halves.reshape(2, 2, 12, 16).transpose(1, 2, 0, 3).reshape(24, 32)

    return Case(f, (put(mesh, ordinal(4, 12, 16), None, "x", "y"),))


@program("int8-bool", "quantised weights in int8 and a mask in bool, moved before the product in int32", x=4, y=2)
def int8_bool(mesh: Mesh) -> Case:
    source, target = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P(None, ("y", "x")))

    def f(x, w):
        mask = with_sharding_constraint(w != 0, target)
        w = with_sharding_constraint(w, target)
        product = jnp.dot(x, w, preferred_element_type=jnp.int32)
        return product, mask, with_sharding_constraint(product.astype(jnp.int16), source)

    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(np.int8) for shape in ((8, 16), (16, 24)))
    return Case(f, (put(mesh, x, "x"), put(mesh, w, "x", "y")), tolerance=0)


@program("vmapped", "vmap of a function with a constraint in it, the batch on an axis of its own", batch=2, x=4)
def vmapped(mesh: Mesh) -> Case:
    def one(x):
        x = with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P("x")))
        return with_sharding_constraint(x.T @ x, NamedSharding(mesh, P(None, "x")))

    f = jax.vmap(one, spmd_axis_name="batch")
    args = (put(mesh, normal(0, 4, 8, 16), "batch", None, "x"),)
    return Case(f, args)


@program(
    "partial-manual", "a user's shard_map manual over one axis; constraints on the other, inside and out", x=4, y=2
)
def partial_manual(mesh: Mesh) -> Case:
    def local(x):
        x = with_sharding_constraint(jnp.sin(x), P("y"))
        x = jax.lax.all_to_all(x, "x", split_axis=1, concat_axis=0, tiled=True)
        return with_sharding_constraint(x * 2, P(None, "y"))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"), axis_names={"x"}, check_vma=False)

    def f(x):
        x = with_sharding_constraint(x, NamedSharding(mesh, P("y", "x")))
        y = mapped(x + 1)
        return with_sharding_constraint(y, NamedSharding(mesh, P(("y", "x"))))

    return Case(f, (put(mesh, normal(0, 16, 16), "x", "y"),))


@program("three-by-two", "six devices: a pair of axes that moves, swaps dims, splits and joins", remat=True, x=3, y=2)
def three_by_two(mesh: Mesh) -> Case:
    # Never two sharded dims into one, as (x, y) -> ((y, x), -): XLA of jax 0.12.0.1 aborts the process on it here.
    layouts = [
        NamedSharding(mesh, spec)
        for spec in (P(None, ("x", "y")), P("y", "x"), P("x", None, "y"), P(("x", "y")), P(None, "x", "y"))
    ]

    def f(x):
        for step, layout in enumerate(layouts):
            x = with_sharding_constraint(x + step, layout)
        return x

    return Case(f, (put(mesh, ordinal(12, 18, 6), ("y", "x")),), tolerance=0)


@program("four-devices", "four devices in one axis, a resplit and a reduction to a scalar", d=4)
def four_devices(mesh: Mesh) -> Case:
    def f(x):
        y = with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, "d")))
        return y, jnp.max(jnp.abs(jnp.cumsum(y, axis=0)))

    args = (put(mesh, ordinal(8, 8), "d"),)
    return Case(f, args, tolerance=0)


@program("no-reshard", "data parallel inference: nothing changes layout", moves=False, data=8)
def no_reshard(mesh: Mesh) -> Case:
    by_batch = NamedSharding(mesh, P("data"))

    def f(w, x):
        for layer in w:
            x = with_sharding_constraint(jax.nn.relu(x @ layer), by_batch)
        return jax.nn.softmax(x)

    w = [put(mesh, normal(i, 16, 16, scale=0.3)) for i in range(3)]
    return Case(f, (w, put(mesh, normal(9, 16, 16), "data")))


@program(
    "explicit-block",
    "sharding in types: a gated block whose boundary reshards explicitly",
    explicit=True,
    ambient=True,
    data=4,
    tp=2,
)
def explicit_block(mesh: Mesh) -> Case:
    def loss(w, x):
        x = jax.sharding.reshard(x, P("data"))
        up, gate = (jnp.einsum("bd,df->bf", x, w[name], out_sharding=P("data", "tp")) for name in ("up", "gate"))
        y = jnp.einsum("bf,fd->bd", up * jax.nn.silu(gate), w["down"], out_sharding=P("data"))
        y = jax.sharding.reshard(y, P(("data", "tp")))
        return jnp.sum(y * y)

    w = {
        "up": put(mesh, normal(0, 16, 32, scale=0.3), None, "tp"),
        "gate": put(mesh, normal(1, 16, 32, scale=0.3), None, "tp"),
        "down": put(mesh, normal(2, 32, 16, scale=0.3), "tp"),
    }
    args = (w, put(mesh, normal(3, 16, 16), ("data", "tp")))
    return Case(jax.value_and_grad(loss, argnums=(0, 1)), args, tolerance=1e-4)


@program("ambient-scan", "under jax.set_mesh, constraints by PartitionSpec alone in a scan", ambient=True, x=4, y=2)
def ambient_scan(mesh: Mesh) -> Case:
    def body(x, w):
        y = with_sharding_constraint(x @ w, P(None, ("x", "y")))
        return with_sharding_constraint(jnp.tanh(y), P(("y", "x"))), jnp.sum(y)

    args = (put(mesh, normal(0, 16, 16), ("y", "x")), put(mesh, normal(1, 3, 16, 16, scale=0.3), None, "x", "y"))
    return Case(lambda x, ws: jax.lax.scan(body, x, ws), args)


@program(
    "callback", "a host callback, whose result lies on device 0, made into weights sharded over all", remat=True, fsdp=8
)
def callback(mesh: Mesh) -> Case:
    split = NamedSharding(mesh, P(None, "fsdp"))

    def f(x):
        loaded = jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct((16, 16), np.float32), x)
        return with_sharding_constraint(loaded, split) + 1

    return Case(f, (put(mesh, ordinal(16, 16)),), tolerance=0)


PROGRAMS = programs_in(vars())
