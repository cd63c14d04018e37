"""What a program of the corpus is, and the few helpers that its builders share.

A builder writes constraints out as users do (`jax.lax.with_sharding_constraint(x, NamedSharding(...))` in its own
body, never through a helper here): the source line of a reshard in the compiled module is then the program's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True, eq=False)
class Case:
    """A function, concrete arguments placed on a mesh, and the keyword arguments of `jax.jit`.

    Arguments that `jit` donates are gone after one call: build the case again for the next.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    jit: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5  # absolute, over the largest magnitude in the output compared

    def jitted(self) -> Any:
        return jax.jit(self.f, **self.jit)

    @property
    def traced_args(self) -> tuple[Any, ...]:
        """The arguments that a compiled program takes: all but the static ones."""
        static = self.jit.get("static_argnums", ())
        static = (static,) if isinstance(static, int) else static
        return tuple(arg for place, arg in enumerate(self.args) if place not in static)


@dataclass(frozen=True, eq=False)
class Program:
    """A whole program as users write them, to be built for a mesh of its own axes (any sizes that divide)."""

    name: str
    about: str  # one line; the public thread where the program is a report
    mesh: Mapping[str, int]  # axis -> size
    build: Callable[[Mesh], Case]
    explicit: bool = False  # the axes are Explicit (sharding in types), else Auto
    ambient: bool = False  # runs under jax.set_mesh
    moves: bool = True  # whether something has to change layout
    remat: bool = False  # whether XLA warns of an involuntary full rematerialization (jax 0.10.2 and 0.12.0.1)

    @property
    def device_count(self) -> int:
        return prod(self.mesh.values())

    def make_mesh(self) -> Mesh:
        """The program's mesh, on the first devices."""
        sizes, devices = tuple(self.mesh.values()), jax.devices()
        if len(devices) < prod(sizes):
            raise RuntimeError(
                f"program {self.name!r} needs {prod(sizes)} devices and there are {len(devices)}: set "
                "XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax is imported"
            )
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        grid = np.array(devices[: prod(sizes)]).reshape(sizes)
        return Mesh(grid, tuple(self.mesh), axis_types=(kind,) * len(sizes))

    def entered(self, mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
        """The context to trace, compile and run in."""
        return jax.set_mesh(mesh) if self.ambient else contextlib.nullcontext()


def program(name: str, about: str, **settings: Any) -> Callable[[Callable[[Mesh], Case]], Program]:
    """Makes a builder a `Program`: of the keywords, integers are mesh axes, major to minor, and the rest its flags."""
    mesh = {axis: size for axis, size in settings.items() if not isinstance(size, bool)}
    flags = {flag: value for flag, value in settings.items() if isinstance(value, bool)}
    return lambda build: Program(name, about, mesh, build, **flags)


def normal(seed: int, *shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Gaussian numbers, the same for every run."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * np.random.default_rng(seed + 1000).standard_normal(shape) * scale
    return values.astype(dtype)


def ordinal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Every element its own index: a misplaced element cannot hide. float32 is exact below 2**24."""
    return np.arange(prod(shape)).reshape(shape).astype(dtype)


def put(mesh: Mesh, value: np.ndarray, *axes: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*axes)))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """A tree of `PartitionSpec`s as a tree of shardings on `mesh`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P))


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """Two trees of arrays: equal in structure, shape and dtype, and within `tolerance` of the largest magnitude.

    Integers and booleans have to be equal.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if np.issubdtype(a.dtype, np.integer) or a.dtype == bool:
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        wide = np.complex128 if np.iscomplexobj(a) else np.float64  # bfloat16 too
        a, b = a.astype(wide), b.astype(wide)
        bound = tolerance * np.max(np.abs(b), initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=where)


def programs_in(module: Mapping[str, Any]) -> tuple[Program, ...]:
    return tuple(value for value in module.values() if isinstance(value, Program))
