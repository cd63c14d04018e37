"""Weak types, which collectives do not keep: `jnp.full((8, 8), 2.0)` has one, and keeps it when it moves."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Sharding

_weaken_p = Primitive("weaken")


def weaken(x: jax.Array) -> jax.Array:
    """The array, traced, with a weak type.

    >>> jax.jit(weaken)(jax.numpy.ones(3)).weak_type
    True
    """
    return _weaken_p.bind(x)


@lru_cache(maxsize=1024)
def weaken_on(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    """The compiled change of the type of a concrete array with this sharding to a weak one."""
    return jax.jit(weaken, out_shardings=target, donate_argnums=0)


def _weak_type(x: Any) -> Any:
    return x.update(weak_type=True)


def _lower_nothing(ctx: Any, x: Any) -> list[Any]:
    return [x]


_weaken_p.def_abstract_eval(_weak_type)
mlir.register_lowering(_weaken_p, _lower_nothing)
