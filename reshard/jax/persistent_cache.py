"""jax's persistent compilation cache beside the pass, of which it knows nothing.

A program that the cache hands out is not compiled, so it never comes to the pass. Two things follow: programs compiled
with the pass must not be mixed with others, and what is compiled only for the pass to see must not come from the cache.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def adapt(key: Callable[[], str], bypassed: Callable[[], bool]) -> None:
    """Makes what `key` returns part of the keys of the cache, which is left out by threads that are `bypassed`.

    Both are asked at each compilation. It changes functions of jax, once in a process.
    """
    try:
        from jax._src import cache_key, compilation_cache  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        return
    _replace(cache_key, "custom_hook", lambda before: before() + key())
    _replace(compilation_cache, "is_cache_used", lambda before, *backend: not bypassed() and before(*backend))


def _replace(module: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replaces a function of a module by another one, which is given the first one before its arguments."""
    before = getattr(module, name, None)
    if before is not None:
        setattr(module, name, lambda *args: instead(before, *args))
