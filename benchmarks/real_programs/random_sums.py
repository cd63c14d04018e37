"""Random sums between devices, inside a `shard_map`: combined ones, sums of sums, sums that are kept in parts or twice.

Each program takes one array, whose rows are the devices' own summands, and yields what each device has of the sums.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.real_programs.base import Case

P = PartitionSpec
Array = jax.Array
_MESHES = ((("x", 8),), (("x", 2), ("y", 4)), (("x", 4), ("y", 2)), (("x", 2), ("y", 2), ("z", 2)))
_DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "int32", "int8", "complex64")
_MADE: dict[str, Callable[[Array], Array]] = {
    "own": lambda a: a,
    "scaled": lambda a: a * 3,
    "transposed": lambda a: a.T * 2,
    "flat": lambda a: (a + 1).reshape(-1),
    "half": lambda a: a[: a.shape[0] // 2] * 2,
    "product": lambda a: a.T @ a,
    "one": lambda a: (a * a).sum(),
}
_REDUCED = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "most": jax.lax.pmax}
_USES = ("whole", "kept", "kept", "kept", "twice", "both", "rounded")


def build_random_sums(seed: int, devices: list[Any]) -> tuple[Case, str]:
    """The random program of a seed, and what it adds up, in words."""
    rng = random.Random(seed)
    axes = rng.choice(_MESHES)
    mesh = Mesh(np.array(devices).reshape([size for _, size in axes]), [name for name, _ in axes])
    dtype, rows, columns = rng.choice(_DTYPES), rng.choice((16, 32, 48)), rng.choice((8, 16, 24, 64))
    place = rng.choice(("alone", "alone", "scan", "branch"))
    summed = [_choose_sum(rng, [name for name, _ in axes], dtype) for _ in range(rng.randint(1, 4))]

    def add_up(tile: Array) -> tuple[Array, ...]:
        return tuple(_add_up(tile, mesh, *one) for one in summed)

    def run(x: Array) -> list[Array]:
        tile = x.reshape(x.shape[-2:])
        if place == "scan":
            results = jax.lax.scan(lambda carry, _: (carry * 2, add_up(carry)), tile, None, length=3)[1]
        elif place == "branch":
            first = jax.lax.psum(tile.reshape(-1)[0].real, [name for name, _ in axes])
            results = jax.lax.cond(first > 0, add_up, lambda a: add_up(a * 2), tile)
        else:
            results = add_up(tile)
        return [one[None] for one in results]

    spec = P(tuple(name for name, _ in axes))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=[spec] * len(summed), check_vma=False)
    argument = jax.ShapeDtypeStruct((mesh.size, rows, columns), dtype, sharding=NamedSharding(mesh, spec))
    words = ", ".join(f"{kind} of {made} along {'+'.join(along)}: {use} {'+'.join(kept)} {dim}"
                      for made, kind, along, use, kept, dim in summed)  # fmt: skip
    return Case(mapped, (argument,)), f"sums {dtype}[{rows},{columns}] {dict(axes)} {place}: {words}"


def _choose_sum(rng: random.Random, names: list[str], dtype: str) -> tuple[Any, ...]:
    """What is made, how and along which axes it is reduced, one after another, and what a device uses of the sum."""
    kinds = ("sum", "sum", "sum", "sum", "most", "mean") if dtype.startswith("float") else ("sum",)
    along = rng.sample(names, rng.randint(1, len(names)))
    kept = rng.sample(names, rng.randint(1, len(names)))
    return rng.choice(tuple(_MADE)), rng.choice(kinds), along, rng.choice(_USES), kept, rng.randrange(2)


def _add_up(
    tile: Array, mesh: Mesh, made: str, kind: str, along: list[str], use: str, kept: list[str], dim: int
) -> Array:
    total = _MADE[made](tile)
    for axis in along:
        total = _REDUCED[kind](total, axis).astype(total.dtype)

    def take_part(a: Array, dim: int) -> Array:
        for axis in kept:
            if a.ndim and a.shape[dim % a.ndim] % mesh.shape[axis] == 0:
                size = a.shape[dim % a.ndim] // mesh.shape[axis]
                a = jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axis) * size, size, dim % a.ndim)
        return a

    match use:
        case "kept":
            return take_part(total, dim) * 2
        case "twice":
            return jnp.concatenate([take_part(total, 0).reshape(-1), take_part(total, 1).reshape(-1)])
        case "both":
            return jnp.abs(total).sum() + take_part(total, dim) * 2
        case "rounded":
            narrow = "bfloat16" if total.dtype == "float32" else total.dtype
            return take_part(total.astype(narrow), dim)
        case _:
            return total + 1
