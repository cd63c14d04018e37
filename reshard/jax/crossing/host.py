"""The exchange between CPU devices of one process, whose tiles are memory of this process: one copy, and no messages.

The source's shards are read where they are, and the boxes of the exchange are copied into new memory, which becomes the
result's shards as it is. Devices that hold the same tile share its memory, as they do after `jax.device_put`
of a numpy array; XLA copies such memory before it would overwrite it. A donated source is deleted shard by shard, each
as soon as nobody needs it any more.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from reshard.jax.crossing.plans import devices_of
from reshard.types.layout import Layout
from reshard.types.pair import messages
from reshard.types.pair.message import Tile, tile_of

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
"""XLA takes memory as it is from this alignment on, and copies other memory."""
THREADED = 32 << 20
"""From this many bytes on, several threads copy: below, to wake them costs what they gain."""


class Copy(NamedTuple):
    """A box of the source's tile at position `sender` that goes into the target's tile of number `receiver`."""

    sender: int
    taken: tuple[slice, ...]
    receiver: int
    put: tuple[slice, ...]


class HostExchange(NamedTuple):
    """The boxes to copy; `tile_at` is the number of the tile of the device at each position of the target."""

    copies: tuple[Copy, ...]
    tiles: int
    tile_at: tuple[int, ...]
    tile_shape: tuple[int, ...]
    elements: int


def host_exchange(operand: Layout, result: Layout) -> HostExchange:
    """The exchange from one layout to the other, once for each tile of the result.

    >>> from reshard.types import Mesh
    >>> server = Mesh({"rep": 2}, device_ids=[4, 5])
    >>> exchange = host_exchange(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[4]", server))
    >>> exchange.tile_at, [(copy.sender, copy.put) for copy in exchange.copies]
    ((0, 0), [(0, (slice(0, 2, None),)), (1, (slice(2, 4, None),))])
    """
    numbers: dict[Tile, int] = {}
    first: dict[int, int] = {}
    tile_at: list[int] = []
    for device in result.mesh.devices:
        number = numbers.setdefault(tile_of(result, device), len(numbers))
        if number not in tile_at:
            first[device] = number
        tile_at.append(number)
    copies = [
        Copy(
            operand.mesh.position(message.sender),
            tuple(slice(run.src, run.src + run.length) for run in box),
            first[message.receiver],
            tuple(slice(run.dst, run.dst + run.length) for run in box),
        )
        for message in messages.all_messages(operand, result)
        if message.receiver in first
        for box in message.boxes
    ]
    copies.sort(key=lambda copy: (copy.receiver, copy.sender))  # So that senders are done with one after another.
    return HostExchange(
        tuple(copies), len(numbers), tuple(tile_at), result.tile_shape, len(numbers) * math.prod(result.tile_shape)
    )


def exchanged(exchange: HostExchange, near: jax.Array, donate: bool) -> list[Array]:
    """The tiles of the result by their numbers; with `donate`, the source is deleted on the way."""
    uses = Counter(copy.sender for copy in exchange.copies)
    # JAX gives the first shard of a replicated array for all others, which is as good to read, and not to delete.
    shards = shards_of(near) if donate else {at: near.addressable_data(at) for at in uses}
    if donate:
        _delete(shard for at, shard in shards.items() if not uses[at])
    views = {at: _plain(np.asarray(shards[at])) for at in uses}
    tiles = [_aligned(exchange.tile_shape, near.dtype) for _ in range(exchange.tiles)]
    plain = [_plain(tile) for tile in tiles]

    def run(copy: Copy) -> int:
        plain[copy.receiver][copy.put] = views[copy.sender][copy.taken]
        return copy.sender

    for sender in _each(run, exchange.copies, exchange.elements * near.dtype.itemsize):
        uses[sender] -= 1
        if donate and not uses[sender]:
            del views[sender]
            _delete([shards[sender]])
    if donate:
        near.delete()
    return tiles


def shards_of(x: jax.Array) -> dict[int, jax.Array]:
    """The shards of an array on a mesh of this process, by their devices' positions."""
    sharding: Any = x.sharding
    by_device = {shard.device: shard.data for shard in x.addressable_shards}
    return {at: by_device[device] for at, device in enumerate(devices_of(sharding.mesh))}


def _each(run: Any, copies: Sequence[Copy], size: int) -> Iterable[int]:
    """Runs the copies, and yields their senders in order, each when its copy is done."""
    if size < THREADED or len(copies) < 2 or _threads() < 2:
        return map(run, copies)
    return _pool().map(run, copies)


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), thread_name_prefix="reshard")


def _aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """New memory that XLA takes as it is."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _plain(tile: Array) -> Array:
    """The same memory as numbers that numpy copies fast: those of ml_dtypes are copied one by one."""
    return tile if tile.dtype.isbuiltin == 1 else tile.view(f"u{tile.itemsize}")


def _delete(shards: Iterable[jax.Array]) -> None:
    for shard in shards:
        shard.delete()
