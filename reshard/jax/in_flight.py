"""A bound on the programs that run at once.

Moves are dispatched and not waited for, so a loop over many arrays starts programs faster than they finish. XLA:CPU of
jax 0.10 deadlocks with about 100 of them, and aborts the process; anywhere, each holds its buffers. So before one more
is started, the oldest is waited for.
"""

from __future__ import annotations

import weakref
from collections import deque

import jax
from jax.core import Tracer

MOST = 16
"""The most programs of this package that run at once."""

_results: deque[weakref.ref[jax.Array]] = deque()


def add(result: jax.Array) -> None:
    """Records a program that was just started, by one of its results, and waits until at most `MOST` are running.

    Programs on the same devices finish in the order in which they were started, so a result that is gone (deleted,
    donated or garbage) is covered by a later one.
    """
    if isinstance(result, Tracer):
        return  # Inside a trace: part of a program that is not running yet.
    _results.append(weakref.ref(result))
    while len(_results) > MOST:
        oldest = _results.popleft()()
        if oldest is None or oldest.is_deleted():
            oldest = _oldest_alive()
        if oldest is not None:
            oldest.block_until_ready()


def _oldest_alive() -> jax.Array | None:
    """The oldest result that still exists; those before it are forgotten."""
    while _results:
        result = _results.popleft()()
        if result is not None and not result.is_deleted():
            return result
    return None
