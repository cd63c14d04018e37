"""Rounds alike: unrolled if they are few, else a loop, so that one piece of code packs and writes the messages of all.

XLA compiles each copy of that code on its own where the rounds are unrolled.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from reshard.lower.to_shard_map.place import MeshPlace

Array = jax.Array
LOOPED = 16
"""The fewest rounds between any devices that become a loop."""

Round = Callable[[MeshPlace, Array | int, Array], Array]
"""What a turn makes of a value, from the place, which is another one inside a loop, and the turn's number."""


def repeated(count: int, place: MeshPlace, one: Round, start: Array) -> Array:
    """What `one` makes of the value, in turn after turn from 0 on."""

    def in_loop(turn: Array, value: Array) -> Array:
        return one(place.anew(), turn, value)

    if count >= LOOPED:
        return lax.fori_loop(0, count, in_loop, start)
    for turn in range(count):
        start = one(place, turn, start)
    return start
