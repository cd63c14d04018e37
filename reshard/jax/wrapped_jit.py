"""`WrappedJit`: what both results of `reshard.jax.jit` share, each a function of `jax.jit` called in its own way."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax

_jax: Any = jax  # Its own stubs leave too much unknown.


class WrappedJit(ABC):
    """A function of `jax.jit`, kept as `_plain`: it is bound to instances as functions are, and has its attributes."""

    def __init__(self, f: Callable[..., Any], jit_options: dict[str, Any]) -> None:
        functools.update_wrapper(self, f)
        self._plain = _jax.jit(f, **jit_options)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Before `__init__` has set it, as in copying and unpickling.
            raise AttributeError(name)
        return getattr(self._plain, name)  # trace, eval_shape, clear_cache


def is_another_program(leaves: list[Any]) -> bool:
    """Whether a call with these arguments compiles nothing of its own: inside a trace, or with jit switched off."""
    return any(isinstance(leaf, _jax.core.Tracer) for leaf in leaves) or _jax.config.jax_disable_jit
