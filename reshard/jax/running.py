"""What every program of a move shares: how it is started when others are running, and what it keeps of weak types.

Moves are dispatched and not waited for, so a loop over many arrays starts programs faster than they finish, and each of
them holds its buffers. So before one more is started, the oldest is waited for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Sharding

from reshard.jax import placement

MOST = 16
"""The most programs of this package that run at once."""

_results: deque[weakref.ref[jax.Array]] = deque()


def start_program(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a compiled move, while not too many others are running, on its own meshes."""
    if jax.sharding.get_abstract_mesh().empty:
        moved = function(*arrays)
    else:
        with placement.without_context_mesh():
            moved = function(*arrays)
    limit_running(moved[0] if isinstance(moved, tuple) else moved)
    return moved


def limit_running(result: jax.Array) -> None:
    """Records a program that was just started, by one of its results, and waits until at most `MOST` are running."""
    if isinstance(result, Tracer):
        return  # Inside a trace: part of a program that is not running yet.
    _results.append(weakref.ref(result))
    while len(_results) > MOST:
        oldest = _results.popleft()()
        # Programs on the same devices finish in the order in which they were started, so a result that is gone
        # (deleted, donated or garbage) is covered by the next one that is there.
        while _results and (oldest is None or oldest.is_deleted()):
            oldest = _results.popleft()()
        if oldest is not None and not oldest.is_deleted():
            oldest.block_until_ready()


# Collectives do not keep weak types: `jnp.full((8, 8), 2.0)` has one, and has it still when it has moved.
_weaken_p = Primitive("weaken")
_weaken_p.def_abstract_eval(lambda x: x.update(weak_type=True))
mlir.register_lowering(_weaken_p, lambda _, x: [x])


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
