"""`show`: which device holds what of a live JAX array, as `reshard show` prints it."""

from __future__ import annotations

from typing import Any

from reshard.errors import ReshardError, quoted
from reshard.types.layout import Layout
from reshard.types.whole import whole

_ROWS = 32  # As many as `reshard show` prints.


def show(array: Any, limit: int = _ROWS) -> None:
    """Prints the layout of a JAX array, its sizes, and a picture of which device holds what.

    `array` is anything with a shape, a dtype and a `NamedSharding`, such as a `jax.ShapeDtypeStruct`; `limit` is about
    how many lines the picture has. Raises `ReshardError` for what has no sharding, as a value inside `jax.jit` has
    none yet, and `LayoutError` for another kind of sharding.

    >>> import jax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    >>> show(jax.device_put(jax.numpy.zeros((4, 8)), rows))  # doctest: +ELLIPSIS
    f32[4, 8]
      mesh     <x=1>, 1 device
    ...
    """
    from reshard.show.layout_picture import show_layout  # Only here does `reshard.jax` need rich.

    rows = whole(limit, 1)
    if rows is None:
        raise ReshardError(f"limit {quoted(limit)}: give the most lines of the picture, a whole number from 1 up")
    try:
        shape, dtype, sharding = array.shape, array.dtype, array.sharding
    except Exception:  # A tracer has errors of its own for what it lacks.
        shape, dtype, sharding = (), None, None
    if sharding is None:
        raise ReshardError(
            f"{quoted(array)} has no sharding: give a jax.Array, outside jax.jit; inside it, "
            f"jax.debug.inspect_array_sharding(x, callback=...) tells what the compiler chose"
        )
    show_layout(Layout.from_jax(sharding, shape, dtype), rows)
