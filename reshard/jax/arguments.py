"""Arguments of a function as compiling it needs them: their shapes, dtypes and shardings, without their data."""

from __future__ import annotations

from typing import Any

import jax

from reshard.errors import ProgramError, quoted

_jax: Any = jax  # Its own stubs leave too much unknown.


def checked_function(f: Any) -> Any:
    """Returns the function; raises `ProgramError` for what cannot be called."""
    if not callable(f):
        raise ProgramError(f"{quoted(f)} is a {type(f).__name__}, not a function; give one, as to jax.jit")
    return f


def placement_of(leaf: Any) -> Any:
    """The sharding of an argument; None if JAX is free to choose it.

    >>> placement_of(3.0) is None
    True
    """
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def abstract(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without their data, which a cached lowering would keep alive. Other leaves stay.

    >>> abstract((jax.numpy.ones(3), "sum"), {})
    ((ShapeDtypeStruct(shape=(3,), dtype=float32), 'sum'), {})
    """

    def without_data(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))  # Random keys have no such attribute.
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement_of(leaf), weak_type=weak)

    return _jax.tree.map(without_data, (args, kwargs))
