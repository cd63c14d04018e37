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
    keys: Any = cache_key
    cache: Any = compilation_cache
    own_key, own_use = getattr(keys, "custom_hook", str), getattr(cache, "is_cache_used", None)

    def custom_hook() -> str:
        return own_key() + key()

    def is_cache_used(*backend: Any) -> bool:
        return not bypassed() and own_use is not None and own_use(*backend)

    keys.custom_hook, cache.is_cache_used = custom_hook, is_cache_used
