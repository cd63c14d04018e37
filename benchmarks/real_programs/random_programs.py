"""Random programs, plain and with the pass: equal bits, no more bytes received, no higher peak as compiled.

A program is one array that goes through constraints with arithmetic, products, transforms, stencils, loops and branches
between. It runs on 8 devices of one process, or of several with gloo between them, which adds up in another order. For
chips that exist only as a description it is compiled ahead of time, with arrays large enough that a tile's minor dim
fills the lanes; then only its bytes and peaks are compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reshard.jax
from benchmarks.real_programs.base import Case
from benchmarks.real_programs.counting import received_bytes
from benchmarks.real_programs.measuring import PEAK_SLACK, peak_handed_back
from benchmarks.real_programs.random_sums import build_random_sums
from reshard.doctor import examine
from reshard.jax.program_report import optimized_text
from reshard.jax.request import options_on
from reshard.jax.xla_pass.measured_programs import read_executable
from reshard.synth.options import PlanOptions

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


def build_random_case(seed: int, devices: Sequence[Any]) -> tuple[Case, str]:
    """The random program of a seed, and its steps in words."""
    rng = random.Random(seed)
    axes = rng.choice(MESHES)
    mesh = Mesh(np.array(devices).reshape([size for _, size in axes]), [name for name, _ in axes])
    rank, size, dtype = rng.choice((2, 2, 3)), rng.choice((16, 16, 32, 48)), rng.choice(DTYPES)
    sizes = (size,) * rank
    if devices[0].platform != "cpu":  # a tile has at least 128 elements in its minor dim; f64 is emulated there
        sizes = (1024,) * 3 if rank == 3 else (128 * size,) * 2
        dtype = "float32" if dtype == "float64" else dtype

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
    words = f"seed {seed}: {dtype}{list(sizes)} {dict(axes)} {first.spec} {words}".replace("PartitionSpec", "P")
    return Case(run, (jax.ShapeDtypeStruct(sizes, dtype, sharding=first),)), words


def measure_programs(
    seeds: Iterable[int], number: int, processes: int, port: int, sums: bool = False
) -> Iterator[dict[str, Any]]:
    """The rows of random programs, or of random sums, in the process of that number."""
    build = build_random_sums if sums else build_random_case
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, number)
    for seed in seeds:
        with jax.enable_x64(True):
            yield _measure(seed, *build(seed, jax.devices()))


def compile_programs(seeds: Iterable[int], devices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The rows of random programs that are only compiled, for devices that need not exist."""
    for seed in seeds:
        case, words = build_random_case(seed, devices)
        try:
            plain, seconds = _compile(case)
        except jax.errors.JaxRuntimeError as error:  # XLA itself cannot compile it: there is nothing to compare with.
            yield _row_without_run(seed, f"{words} (not compiled by XLA: {str(error).splitlines()[0]})")
            continue
        with reshard.jax.enabled() as log:
            ours, pass_seconds = _compile(case)
        places = [place for report in log.reports for place in report.places]
        received, peaks = ([count(one) for one in (plain, ours)] for count in (_count_received, _count_peak))
        yield _row_without_run(seed, words) | {
            "received": received, "peaks": peaks, "replaced": sum(place.replaced for place in places),
            "violations": _list_violations(received, peaks), "seconds": [seconds, pass_seconds],
            "fates": [place.to_pass_dict() for place in places],
        } | _ask_doctor(plain, devices)  # fmt: skip


def _ask_doctor(plain: Any, devices: Sequence[Any]) -> dict[str, int]:
    """What the doctor says of the plain program, in bytes that a device receives."""
    network, platform = options_on(devices, PlanOptions()).network, devices[0].platform
    places = [one for one in examine(optimized_text(plain), network=network, platform=platform).places if one.counted]
    return {"could_save": sum(one.saved_bytes for one in places), "not_needed": sum(one.wasted_bytes for one in places)}


def _compile(case: Case) -> tuple[Any, float]:
    """A compiled program, and the CPU seconds that it took once lowered."""
    lowered = jax.jit(lambda x: case.f(x)).lower(*case.args)
    started = time.process_time()
    return lowered.compile(), round(time.process_time() - started, 3)


def _row_without_run(seed: int, words: str) -> dict[str, Any]:
    return {"seed": seed, "program": words, "received": [0, 0], "peaks": [0, 0], "replaced": 0, "rounded": False,
            "could_save": 0, "not_needed": 0, "violations": []}  # fmt: skip


def _list_violations(received: list[int], peaks: list[int], slack: float = 1.0) -> list[str]:
    """What must not be so: figures before and after of which the second is higher; peaks by more than the slack."""
    violations = [f"receives {received}"] if received[1] > received[0] else []
    return violations + ([f"needs {peaks} at its peak"] if peaks[1] > slack * peaks[0] else [])


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

    try:
        plain = jax.jit(case.f).lower(argument).compile()
        bits = _run(plain, data)
    except jax.errors.JaxRuntimeError as error:  # XLA itself cannot run it: there is nothing to compare with.
        return _row_without_run(seed, f"{words} (not run by XLA: {str(error).splitlines()[0]})")
    found = [compare()]
    if not found[0][3]:
        found.append(compare(same_bits=True))
    violations = [] if found[-1][3] else ["other bits"]
    if words.startswith("sums"):  # In any order, floats may have other bits, but no more bytes are received than plain.
        found.append(compare(sums="any order"))
    for received, peaks, _, _ in found:
        if peaks[1] > PEAK_SLACK * peaks[0]:  # XLA:CPU orders any module anew that is given back.
            peaks[0] = max(peaks[0], peak_handed_back(lambda: jax.jit(lambda x: case.f(x)).lower(argument).compile()))
        violations += _list_violations(received, peaks, PEAK_SLACK)
    received, peaks, replaced, same = found[0]
    return _row_without_run(seed, words) | {
        "received": received, "peaks": peaks, "replaced": replaced, "rounded": not same, "violations": violations,
    } | _ask_doctor(plain, jax.devices())  # fmt: skip


def _run(compiled: Any, data: Array) -> list[bytes]:
    arrays: list[Array] = jax.tree.leaves(compiled(data))
    return [np.asarray(shard.data).tobytes() for array in arrays for shard in array.addressable_shards]


def _count_received(compiled: Any) -> int:
    return received_bytes(compiled.as_text())


def _count_peak(compiled: Any) -> int:
    return read_executable(compiled.runtime_executable()).peak_bytes
