"""`jit` where XLA has a hook for the pass: `jax.jit` itself, compiling with the pass switched on.

There is one compilation, and the dispatch is that of `jax.jit`. Each function has a switch of its own, which is part of
the key of jax's caches, so that its programs never mix with those of `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from reshard.jax.arguments import abstract, placement_of
from reshard.jax.strict import Limits, effective_limits, has_limits
from reshard.jax.wrapped_jit import WrappedJit, is_another_program
from reshard.jax.xla_pass import xla_hook
from reshard.jax.xla_pass.lowered import LoweredInXla
from reshard.jax.xla_pass.xla_hook import Enabled


class JittedInXla(WrappedJit):
    """The result of `jit`: the function of `jax.jit`, whose programs go through the pass inside XLA."""

    def __init__(self, f: Callable[..., Any], jit_options: dict[str, Any], switched: Enabled, limits: Limits) -> None:
        super().__init__(f, jit_options)
        self._switched = switched
        self._on, self._back = xla_hook.switch()
        self._limits = limits
        self._limited = limits != Limits()
        self._accepted: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._limited or has_limits():
            self._check(args, kwargs)
        before = self._on(self._switched)
        try:
            return self._plain(*args, **kwargs)
        finally:
            self._back(before)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredInXla:
        """The program for arguments, or for `jax.ShapeDtypeStruct`s with shardings."""
        return self._lowered(self._trace(args, kwargs), args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with xla_hook.on(self._switched):
            return self._plain.trace(*args, **kwargs)

    def _lowered(self, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoweredInXla:
        shapes, named = abstract(args, kwargs)
        with xla_hook.on(self._switched):
            lowered = traced.lower()
        return LoweredInXla(lowered, self._switched, self._limits, lambda: self._plain.lower(*shapes, **named))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises `StrictError` if the program for these arguments exceeds the limits."""
        leaves = jax.tree.leaves((args, kwargs))
        if is_another_program(leaves):
            return
        traced = self._trace(args, kwargs)
        key = (traced.jaxpr, effective_limits(self._limits), *map(placement_of, leaves))
        if key not in self._accepted:
            self._lowered(traced, args, kwargs).compile()
            self._accepted.add(key)
