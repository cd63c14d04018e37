"""The move of jax-ml/jax#21562 in a program of its own, and what goes around it."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def program(devices):
    """The function, its arguments' shapes and shardings, and the options of `jax.jit`."""
    mesh = Mesh(devices.reshape(4, 2), ("x", "y"))
    before = NamedSharding(mesh, P("y", None, "x"))
    after = NamedSharding(mesh, P(None, ("x", "y"), None))
    weights = NamedSharding(mesh, P(None, "y"))

    def step(a, b, w):
        total = a + b
        total = jax.lax.with_sharding_constraint(total, after)
        return jnp.einsum("abc,cd->abd", jnp.tanh(total), w)

    args = (
        jax.ShapeDtypeStruct((512, 512, 256), "float32", sharding=before),
        jax.ShapeDtypeStruct((512, 512, 256), "float32", sharding=before),
        jax.ShapeDtypeStruct((256, 128), "float32", sharding=weights),
    )
    return step, args, {"out_shardings": after}
