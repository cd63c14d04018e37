"""Parts on their way while others are written: what a GPU runs beside a collective.

    sent       part 1            part 2            part 3            ...
    beside     part 0 written    part 1 written    part 2 written

A turn of the loop does two parts. With one, the part that the loop carries to the next turn would have to take the
place of the one before it, which is still being written, so XLA would copy it. With two, each takes the other's place.
At most two parts of what is sent and two of what arrives are in memory.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from reshard.lower.program import AllGather, AllToAll, Permute, Plain, ReduceScatter
from reshard.lower.to_shard_map.collectives import gathered_dim, scattered, to_all, unscattered
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import blocks_of, closed, resized

Array = jax.Array
Number = Array | int


class Phases(NamedTuple):
    """A collective in three: what is sent, the collective alone, and the tile that what arrives makes up."""

    pack: Callable[[Array], Array]
    send: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


def phases(step: Plain, place: MeshPlace, shape: Sequence[int]) -> Phases | None:
    """The phases of a collective after which a tile has this shape; None for what is not one collective.

    >>> phases(Permute(()), MeshPlace((0,), {}), (4,)).unpack(1)
    1
    """
    of = _PHASES.get(type(step))
    return None if of is None else of(step, place, shape)


def overlapped(
    count: int,
    start: Array,
    packed: Callable[[Number], Array],
    send: Callable[[Array], Array],
    written: Callable[[Array, Array, Number], Array],
) -> Array:
    """`start` with all of `count` parts `written` by number, each while the next one is on its way.

    `packed` is what is sent of a part.
    """

    def one(filled: Array, arrived: Array, following: Array, number: Number) -> tuple[Array, Array]:
        # The part before this one is written before the next one is sent, into its memory.
        following, filled = lax.optimization_barrier((following, filled))
        return written(filled, arrived, number), send(following)

    def two(turn: Array, parts: tuple[Array, Array]) -> tuple[Array, Array]:
        number = 2 * turn
        filled, arrived = one(*parts, packed(number + 1), number)
        # XLA would pack both parts at once, before either is sent.
        last, _ = lax.optimization_barrier((number + 2, filled))
        return one(filled, arrived, packed(last), number + 1)

    turns = (count - 1) // 2
    filled, arrived = lax.fori_loop(0, turns, two, (start, send(packed(0))))
    for number in range(2 * turns, count - 1):
        filled, arrived = one(filled, arrived, packed(number + 1), number)
    return written(filled, arrived, count - 1)


def _all_to_all(step: AllToAll, place: MeshPlace, shape: Sequence[int]) -> Phases:
    return Phases(partial(blocks_of, step.send), partial(to_all, step.groups, place), partial(closed, step.receive))


def _all_gather(step: AllGather, place: MeshPlace, shape: Sequence[int]) -> Phases:
    rows = gathered_dim(step.receive) == 0

    def pack(tile: Array) -> Array:
        tile = resized(tile, step.send.padded)
        return tile if rows else tile[np.newaxis]

    def send(tile: Array) -> Array:
        return lax.all_gather(tile, axis=0, tiled=True, **place.group(step.groups))

    return Phases(pack, send, partial(resized, shape=shape) if rows else partial(closed, step.receive))


def _reduce_scatter(step: ReduceScatter, place: MeshPlace, shape: Sequence[int]) -> Phases | None:
    if step.reduction not in ("sum", "mean"):
        return None
    return Phases(
        partial(blocks_of, step.send), partial(scattered, step.groups, place), partial(unscattered, step, shape=shape)
    )


def _permute(step: Permute, place: MeshPlace, shape: Sequence[int]) -> Phases:
    return Phases(_itself, partial(place.permute, pairs=step.pairs), _itself)


def _itself(tile: Array) -> Array:
    return tile


_PHASES: dict[type[Plain], Callable[[Any, MeshPlace, Sequence[int]], Phases | None]] = {
    AllToAll: _all_to_all,
    AllGather: _all_gather,
    ReduceScatter: _reduce_scatter,
    Permute: _permute,
}
