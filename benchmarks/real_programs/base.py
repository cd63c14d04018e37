"""What a program is: a function as its users write it, and the shapes and shardings of its arguments.

`program` registers a builder, which takes a `Scale` and returns a `Case`. Builders import their libraries themselves,
so that a missing one leaves only its own programs out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
BY_HAND, BY_HAND_SUFFIX = "by hand", "_by_hand"
"""The tag of programs with `shard_map` that others are compared with, and what stands after those others' names."""


@dataclass(frozen=True)
class Scale:
    """The devices to compile for, and how large the program should be: `large` ones are compiled but never run."""

    devices: tuple[Any, ...]
    large: bool

    def mesh(self, **axes: int) -> Mesh:
        """A mesh of all devices: sizes are those for 8 devices; beyond, the last axes grow in turn."""
        sizes = list(axes.values())
        at = len(sizes) - 1
        while math.prod(sizes) < len(self.devices):
            sizes[at] *= 2
            at = (at - 1) % len(sizes)
        return Mesh(np.array(self.devices).reshape(sizes), tuple(axes))

    def pick(self, small: int, large: int) -> int:
        """A size for programs that run, or one for those that are only compiled."""
        return large if self.large else small


@dataclass(frozen=True)
class Case:
    """A function, its arguments as `jax.ShapeDtypeStruct`s with shardings, and options of `jax.jit`.

    `highest` is the largest integer among the arguments: the size of a vocabulary, or of what they index. `fixed` are
    specs by path that `benchmarks/autoshard.py` keeps. `start` makes the arguments where random numbers would not do.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    highest: int = 7
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    start: Callable[[], tuple[Any, ...]] | None = None

    def data(self) -> tuple[Any, ...]:
        """Arguments with values: the same ones each time."""
        if self.start is not None:
            return jax.tree.map(lambda one, like: jax.device_put(one, like.sharding), self.start(), self.args)
        leaves, tree = jax.tree.flatten_with_path(self.args)
        rng = np.random.default_rng(0)
        return jax.tree.unflatten(
            tree, [_filled(jax.tree_util.keystr(path), one, rng, self.highest) for path, one in leaves]
        )


@dataclass(frozen=True)
class Program:
    """A registered program: `tags` say where else than on 8 devices it is compiled."""

    name: str
    library: str
    about: str
    build: Callable[[Scale], Case]
    tags: frozenset[str]


PROGRAMS: dict[str, Program] = {}


def program(library: str, *tags: str) -> Callable[[Callable[[Scale], Case]], Callable[[Scale], Case]]:
    """Registers a builder under its own name; its docstring says what it is."""

    def register(build: Callable[[Scale], Case]) -> Callable[[Scale], Case]:
        about = (build.__doc__ or "").strip().splitlines()[0].rstrip(".")
        PROGRAMS[build.__name__] = Program(build.__name__, library, about, build, frozenset(tags))
        return build

    return register


def shaped(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An argument: its global shape and how it is sharded."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def shape_key(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A key for random numbers, which every device has."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct((), key.dtype, sharding=NamedSharding(mesh, P()))


def sharded_like(tree: Any, rule: Callable[[str, Any], PartitionSpec], mesh: Mesh) -> Any:
    """A tree of shapes with the sharding that a rule gives each path; dims that do not divide stay whole."""

    def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = divisible(rule(jax.tree_util.keystr(path), leaf), leaf.shape, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(one, tree)


def divisible(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The spec without axes that do not divide their dim, and no longer than the shape."""
    parts: list[Any] = []
    for size, part in zip(shape, tuple(spec) + (None,) * len(shape), strict=False):
        names = () if part is None else part if isinstance(part, tuple) else (part,)
        parts.append(part if size % math.prod(mesh.shape[name] for name in names) == 0 else None)
    return P(*parts)


def fsdp(axis: str | tuple[str, ...]) -> Callable[[str, Any], PartitionSpec]:
    """The rule of FSDP and of ZeRO: the largest dim is split over an axis."""

    def rule(_: str, leaf: Any) -> PartitionSpec:
        if leaf.ndim == 0 or leaf.size < 1024:
            return P()
        largest = max(range(leaf.ndim), key=lambda dim: leaf.shape[dim])
        return P(*[axis if dim == largest else None for dim in range(leaf.ndim)])

    return rule


def constrain(x: Any, mesh: Mesh, *spec: Any) -> Any:
    """`with_sharding_constraint`, as users spell it."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


@contextmanager
def without_constraints() -> Generator[None]:
    """Constraints mean nothing while this lasts, those of libraries neither: a program as it is before anyone splits
    it."""
    kept = jax.lax.with_sharding_constraint
    jax.lax.with_sharding_constraint = lambda x, *_, **__: x
    try:
        yield
    finally:
        jax.lax.with_sharding_constraint = kept


def shardings_of(tree: Any) -> Any:
    """The shardings of a tree of shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _filled(path: str, leaf: Any, rng: np.random.Generator, highest: int) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.key(0), leaf.sharding)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        data = rng.integers(0, highest + 1, leaf.shape)
    elif leaf.dtype == bool:
        data = rng.integers(0, 2, leaf.shape)
    elif any(word in path for word in (".nu", ".v_row", ".v_col", ".v[", ".v_", "scale", "var")):
        data = rng.random(leaf.shape) + 0.5
    else:
        data = rng.standard_normal(leaf.shape) * 0.1
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        data = data + 1j * rng.standard_normal(leaf.shape)
    return jax.device_put(np.asarray(data).astype(leaf.dtype), leaf.sharding)
