"""`started`: how every compiled program of an eager move is called."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from reshard.jax import in_flight, placement


def started(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a compiled move, while not too many others are running, on its own meshes."""
    if jax.sharding.get_abstract_mesh().empty:
        moved = function(*arrays)
    else:
        with placement.without_context_mesh():
            moved = function(*arrays)
    in_flight.add(moved[0] if isinstance(moved, tuple) else moved)
    return moved
