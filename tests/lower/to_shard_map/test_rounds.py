"""Turns one after another: unrolled if they are few, else in a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.rounds import LOOPED, repeated


@pytest.mark.parametrize("count", [0, 1, LOOPED - 1, LOOPED, LOOPED + 3])
def test_turns_come_in_order_and_many_are_one_loop(count: int):
    place = MeshPlace(range(1), {})

    def run(start: jax.Array) -> jax.Array:
        return repeated(count, place, lambda _, turn, value: value * 3 + turn, start)

    expected = 7
    for turn in range(count):
        expected = expected * 3 + turn
    assert int(run(jnp.uint32(7))) == expected % 2**32
    jaxpr = str(jax.make_jaxpr(run)(jnp.uint32(7)))
    assert ("scan" in jaxpr or "while" in jaxpr) == (count >= LOOPED)
