"""jax's persistent compilation cache beside the pass, of which it knows nothing.

A program that the cache hands out is not compiled, so it never comes to the pass. Two things follow: programs compiled
with the pass must not be mixed with others, or with those of another version of the pass; and what is compiled only for
the pass to see must not come from the cache.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from reshard import errors

_PACKAGE = Path(errors.__file__).resolve().parent


@cache
def digest_source() -> str:
    """What tells this version of the pass from any other: a digest of the package's source, read once in a process.

    The version number stays as it is while the code changes, and the times of files differ between machines that share
    a cache. Without source files it is the version number after all.
    """
    digest, files = hashlib.blake2b(digest_size=8), sorted(_list_source_files())
    for name in files:  # Not as a `Path`: that takes three times as long.
        with open(os.path.join(_PACKAGE, name), "rb", buffering=0) as file:
            source = file.read()
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest() if files else importlib.metadata.version("reshard")


def _list_source_files() -> Iterator[str]:
    """The files of the package's source, by their paths inside it."""
    for folder, _, names in os.walk(_PACKAGE):
        inside = os.path.relpath(folder, _PACKAGE)
        yield from (os.path.join(inside, name) for name in names if name.endswith(".py"))


def adapt_cache(key: Callable[[], str], bypassed: Callable[[], bool]) -> None:
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
