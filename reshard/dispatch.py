"""`reshard.redistribute`: one name for the moves of all that holds arrays, each made by what holds it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from reshard.errors import PlanError, name_arguments, quoted
from reshard.geometry.detect import as_layouts
from reshard.runtime import simulate
from reshard.synth import plan
from reshard.types.layout import Layout

_PLANNED = ("budget", "network", "donate", "slack")
_GIVE = (
    "give a jax.Array, a DistArray, this rank's tile with source= and comm=, or a dict of all tiles by device id with "
    "source="
)


@name_arguments
def redistribute[T](x: T, target: Any, *, source: Any = None, comm: Any = None, **options: Any) -> T:
    """An array in another layout, held as it was before.

    x                                          what makes the move, and has the other options
    a jax.Array, or a tree of them             `reshard.jax.redistribute`; `target` is a sharding, spec or layout
    a `reshard.mpi.DistArray`                  its `redistribute`
    a rank's tile, with `source` and `comm`    `reshard.mpi.redistribute`; a dict of tiles moves as one
    {device id: tile}, with `source`           `reshard.simulate`, in this process

    `source` and `target` are layouts in any form that `reshard.as_layout` reads. Raises the errors of what makes the
    move, and `PlanError` for an `x` that nothing here can move.

    >>> import numpy as np
    >>> from reshard import Layout
    >>> rows, columns = (Layout.parse(text, {"x": 2}) for text in ("int64[{x}1, 2]", "int64[2, {x}1]"))
    >>> redistribute(rows.tiles(np.arange(4).reshape(2, 2)), columns, source=rows)[1].tolist()
    [[1], [3]]
    """
    given: Any = x
    if isinstance(getattr(given, "layout", None), Layout) and hasattr(given, "redistribute"):
        if source is not None or comm is not None:
            raise PlanError("a DistArray has its layout and communicator: leave out source= and comm=")
        return given.redistribute(target, **options)
    if comm is not None:
        if source is None:
            raise PlanError("with comm=, a tile is of the layout source=: give it")
        return import_module("reshard.mpi").redistribute(given, source, target, comm, **options)
    # Who has an array of jax has loaded it.
    jax = sys.modules.get("jax")
    if jax is not None and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(given)):
        return import_module("reshard.jax").redistribute(given, target, source=source, **options)
    tiles: dict[Any, Any] = cast("Any", given) if isinstance(given, Mapping) else {}
    if not tiles or not all(isinstance(device, int) for device in tiles):
        shown: object = x
        raise PlanError(f"{quoted(shown)} is a {type(shown).__name__}, of which nothing says where it is; {_GIVE}")
    if source is None:
        raise PlanError("tiles by device id are of the layout source=: give it")
    asked = {name: options.pop(name) for name in _PLANNED if name in options}
    return cast("T", simulate(plan(*as_layouts(source, target), **asked), tiles, **options))
