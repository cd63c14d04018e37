"""Random programs, plain and with the pass: equal bits, no more bytes received, no higher peak as compiled.

A program is one array that goes through constraints with arithmetic, products, transforms, stencils, loops and branches
between. It runs on 8 devices of one process, or of several with gloo between them, which adds up in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reshard.jax
from benchmarks.real_programs.base import Case
from benchmarks.real_programs.counting import received_bytes
from reshard.jax.xla_pass.program_peaks import compiled_peak_bytes

P = PartitionSpec
Array = jax.Array
MESHES = ((("x", 8),), (("x", 4), ("y", 2)), (("x", 2), ("y", 4)), (("x", 2), ("y", 2), ("z", 2)))
DTYPES = ("float32", "float32", "float32", "bfloat16", "float64", "int32", "complex64")
_constrain = jax.lax.with_sharding_constraint


class Step(NamedTuple):
    """A constraint, what is done with the array then, along which dim, and the sharding inside loops and branches."""

    here: NamedSharding
    kind: str
    dim: int
    inside: NamedSharding


def _fused(x: Array, step: Step) -> Array:
    return x * x + x


def _affine(x: Array, step: Step) -> Array:
    shape = [x.shape[step.dim] if at == step.dim else 1 for at in range(x.ndim)]
    table = (jnp.arange(x.shape[step.dim], dtype=jnp.float32) / 7 + 1).astype(x.dtype).reshape(shape)
    return x * table + table


def _matmul(x: Array, step: Step) -> Array:
    return jnp.matmul(x, x) / x.shape[-1]


def _contract(x: Array, step: Step) -> Array:
    left, right = ("abc", "dbc") if x.ndim == 3 else ("ab", "cb")
    y = jnp.einsum(f"{left},{right}->{left[0]}{right[0]}", x, x) / x.shape[-1]
    return x + jnp.expand_dims(y, step.dim) if x.ndim == 3 else y


def _center(x: Array, step: Step) -> Array:
    return x - x.mean(step.dim, keepdims=True).astype(x.dtype)


def _normalize(x: Array, step: Step) -> Array:
    return (x * jax.lax.rsqrt((x * x).mean(step.dim, keepdims=True) + 1)).astype(x.dtype)


def _softmax(x: Array, step: Step) -> Array:
    return jax.nn.softmax(x, axis=step.dim)


def _fourier(x: Array, step: Step) -> Array:
    wide = jnp.complex128 if x.dtype in (jnp.float64, jnp.complex128) else jnp.complex64
    y = jnp.fft.fft(x.astype(wide), axis=step.dim) / x.shape[step.dim]
    return y.astype(x.dtype) if jnp.iscomplexobj(x) else (y.real + y.imag).astype(x.dtype)


def _stencil(x: Array, step: Step) -> Array:
    return x + jnp.roll(x, 1, step.dim) * 2 - jnp.roll(x, -1, step.dim)


def _scan(x: Array, step: Step) -> Array:
    def turn(carry: Array, _: Any) -> tuple[Array, None]:
        return _constrain(_constrain(carry * 2, step.inside) + carry, step.here), None

    return jax.lax.scan(turn, x, None, length=3)[0]


def _branch(x: Array, step: Step) -> Array:
    first = x.reshape(-1)[0].real
    return jax.lax.cond(first > 0, lambda a: _constrain(a * 3 + 1, step.inside), lambda a: a * 2, x)


def _gradient(x: Array, step: Step) -> Array:
    def loss(a: Array) -> Array:
        return jnp.sum(jnp.tanh(jnp.matmul(_constrain(a, step.inside), a) / a.shape[-1]) ** 2)

    return x - jax.grad(loss)(x) if not jnp.iscomplexobj(x) else x


KINDS: dict[str, Callable[[Array, Step], Array]] = {
    "move": lambda x, _: x,
    "add": lambda x, _: x + x,
    "scale": lambda x, _: x * 2 + 1,
    "fused": _fused,
    "affine": _affine,
    "matmul": _matmul,
    "contract": _contract,
    "center": _center,
    "normalize": _normalize,
    "softmax": _softmax,
    "fourier": _fourier,
    "sort": lambda x, step: jnp.sort(x, axis=step.dim),
    "cumulate": lambda x, step: jnp.cumsum(x, step.dim, dtype=x.dtype),
    "stencil": _stencil,
    "transpose": lambda x, _: jnp.swapaxes(x, 0, 1),
    "scan": _scan,
    "branch": _branch,
    "gradient": _gradient,
}
_FLOATS = ("normalize", "softmax", "gradient", "sort", "fourier", "center")


def build_random_case(seed: int, devices: list[Any]) -> tuple[Case, str]:
    """The random program of a seed, and its steps in words."""
    rng = random.Random(seed)
    axes = rng.choice(MESHES)
    mesh = Mesh(np.array(devices).reshape([size for _, size in axes]), [name for name, _ in axes])
    rank, size, dtype = rng.choice((2, 2, 3)), rng.choice((16, 16, 32, 48)), rng.choice(DTYPES)

    def choose_sharding() -> NamedSharding:
        dims: list[list[str]] = [[] for _ in range(rank + 1)]  # the last one takes axes that split nothing
        for name in rng.sample([name for name, _ in axes], len(axes)):
            rng.choice(dims).append(name)
        return NamedSharding(mesh, P(*[tuple(dim) or None for dim in dims[:-1]]))

    kinds = [kind for kind in KINDS if dtype.startswith(("float", "bfloat")) or kind not in _FLOATS[:4]]
    kinds = [kind for kind in kinds if dtype != "int32" or kind not in _FLOATS]
    first = choose_sharding()
    steps = [
        Step(choose_sharding(), rng.choice(kinds), rng.randrange(rank), choose_sharding())
        for _ in range(rng.randint(1, 5))
    ]

    def run(x: Array) -> Array:
        for step in steps:
            x = KINDS[step.kind](_constrain(x, step.here), step).astype(dtype)
        return x

    words = " ".join(f"{step.here.spec} {step.kind} {step.dim}" for step in steps)
    words = f"seed {seed}: {dtype}[{size}^{rank}] {dict(axes)} {first.spec} {words}".replace("PartitionSpec", "P")
    argument = jax.ShapeDtypeStruct((size,) * rank, dtype, sharding=first)
    return Case(run, (argument,)), f"{dtype}[{size}^{rank}] {dict(axes)} {first.spec} {words}".replace(
        "PartitionSpec", "P"
    )


def measure_programs(seeds: Iterable[int], number: int, processes: int, port: int) -> Iterator[dict[str, Any]]:
    """The rows of random programs, in the process of that number."""
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, number)
    for seed in seeds:
        with jax.enable_x64(True):
            yield _measure(seed, *build_random_case(seed, jax.devices()))


def _measure(seed: int, case: Case, words: str) -> dict[str, Any]:
    """What a program is, plain and with the pass, and what of it is violated."""
    (argument,) = case.args
    rng = np.random.default_rng(seed)
    values = rng.normal(size=argument.shape) * np.exp2(rng.integers(-4, 4, argument.shape))
    shape, sharding = argument.shape, argument.sharding
    data = jax.make_array_from_callback(shape, sharding, lambda at: values[at].astype(argument.dtype))

    def compare(**options: Any) -> tuple[list[int], list[int], int, bool]:
        with reshard.jax.enabled(**options) as log:
            ours = jax.jit(lambda x: case.f(x)).lower(argument).compile()
        received, peaks = ([count(one) for one in (plain, ours)] for count in (_count_received, _count_peak))
        return received, peaks, sum(len(report.replaced) for report in log.reports), _run(ours, data) == bits

    plain = jax.jit(case.f).lower(argument).compile()
    try:
        bits = _run(plain, data)
    except jax.errors.JaxRuntimeError as error:  # XLA itself cannot run it: there is nothing to compare with.
        why = f"not run by XLA: {str(error).splitlines()[0]}"
        return {
            "seed": seed, "program": f"{words} ({why})", "received": [0, 0], "peaks": [0, 0], "replaced": 0,
            "rounded": False, "violations": [],
        }  # fmt: skip
    found = [compare()]
    if not found[0][3]:
        found.append(compare(same_bits=True))
    violations: list[str] = []
    for received, peaks, _, _ in found:
        violations += [f"receives {received}"] if received[1] > received[0] else []
        violations += [f"needs {peaks} at its peak"] if peaks[1] > 1.01 * peaks[0] else []
    violations += [] if found[-1][3] else ["other bits"]
    received, peaks, replaced, same = found[0]
    return {
        "seed": seed, "program": words, "received": received, "peaks": peaks, "replaced": replaced,
        "rounded": not same, "violations": violations,
    }  # fmt: skip


def _run(compiled: Any, data: Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in compiled(data).addressable_shards]


def _count_received(compiled: Any) -> int:
    return received_bytes(compiled.as_text())


def _count_peak(compiled: Any) -> int:
    return compiled_peak_bytes(compiled.memory_analysis())
