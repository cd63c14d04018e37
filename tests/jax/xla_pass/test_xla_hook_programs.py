"""Random programs of constraints with arithmetic, loops and branches between: equal results, never more bytes."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax
from reshard import hlo

MESHES = ((("x", 8),), (("x", 4), ("y", 2)), (("x", 2), ("y", 4)), (("x", 2), ("y", 2), ("z", 2)))
KINDS = ("none", "add", "scale", "matmul", "scan", "cond", "transpose")
DTYPES = ("float32", "float32", "bfloat16", "int32")
constrain = jax.lax.with_sharding_constraint


def random_spec(rng, names, rank):
    names = list(names)
    rng.shuffle(names)
    dims = [[] for _ in range(rank + 1)]  # The last one takes the names of axes that split nothing.
    for name in names:
        rng.choice(dims).append(name)
    return P(*[tuple(dim) if dim else None for dim in dims[:-1]])


def program(rng, mesh, names, rank):
    """A random function of one array, and the array's sharding."""
    first = NamedSharding(mesh, random_spec(rng, names, rank))
    steps = [(NamedSharding(mesh, random_spec(rng, names, rank)), rng.choice(KINDS)) for _ in range(rng.randint(1, 5))]

    def run(x):
        for sharding, kind in steps:
            x = apply(constrain(x, sharding), kind, sharding, first)
        return x

    return run, first


def apply(x, kind, here, first):
    match kind:
        case "add":
            return x + x
        case "scale":
            return x * 2 + 1
        case "matmul":
            return jnp.matmul(x, x)
        case "scan":

            def turn(carry, _):
                return constrain(constrain(carry * 2, first) + 1, here), None

            return jax.lax.scan(turn, x, None, length=3)[0]
        case "cond":
            return jax.lax.cond(x.reshape(-1)[0] > 0, lambda a: constrain(a + 1, first), lambda a: a * 2, x)
        case "transpose":
            return jnp.swapaxes(x, 0, 1)
        case _:
            return x


def check(seed):
    rng = random.Random(seed)
    axes = rng.choice(MESHES)
    mesh = JaxMesh(np.array(jax.devices()).reshape([size for _, size in axes]), [name for name, _ in axes])
    rank, dtype = rng.choice((2, 2, 3)), rng.choice(DTYPES)
    f, first = program(rng, mesh, [name for name, _ in axes], rank)
    shape = (16,) * rank
    argument = jax.ShapeDtypeStruct(shape, dtype, sharding=first)
    plain = jax.jit(f).lower(argument).compile()
    with reshard.jax.enabled() as log:
        ours = jax.jit(lambda x: f(x)).lower(argument).compile()
    assert not any(report.why for report in log.reports), str(log)
    before, after = (hlo.traffic(hlo.parse(one.as_text())).received_bytes for one in (plain, ours))
    assert after <= before, str(log)
    data = np.random.default_rng(seed).integers(-8, 8, shape).astype("float32")
    data = jax.device_put(jnp.asarray(data / (1 if dtype == "int32" else 8)).astype(dtype), first)
    assert np.asarray(plain(data)).tobytes() == np.asarray(ours(data)).tobytes(), str(log)
    return sum(len(report.replaced) for report in log.reports)


@pytest.mark.slow
def test_a_few_random_programs():
    assert sum(check(seed) for seed in range(4)) > 0


@pytest.mark.fast(0, slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 12))
def test_random_programs(seed):
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12, 200))
def test_many_random_programs(seed):
    check(seed)
