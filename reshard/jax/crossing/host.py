"""The exchange between CPU devices of one process, whose tiles are memory of this process: one copy, and no messages.

The source's shards are read where they are, and the blocks of the exchange are copied into new memory, which becomes
the result's shards as it is; a view is part of the copy. Devices that hold the same tile share its memory, as they do
after `jax.device_put` of a numpy array; XLA copies such memory before it would overwrite it. A donated source is
deleted shard by shard, each as soon as nobody needs it any more.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reshard.geometry.holders import Tile, tile_of
from reshard.geometry.messages import exchange_messages
from reshard.jax import placement
from reshard.lower.exchange_rounds import digit_boxes
from reshard.types.layout import Layout
from reshard.types.view import View

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
"""XLA takes memory as it is from this alignment on, and copies other memory."""
THREADED = 32 << 20
"""From this many bytes on, several threads copy; below it, waking them costs as much as they gain."""


class Strides(NamedTuple):
    """A part of a tile's memory: its first byte, its extents, and their strides in bytes."""

    place: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """A part of the source's tile at position `sender` that goes into the target's tile of number `receiver`.

    Slices where no view is given: they take half the time of strides, and a small move has little else to do.
    """

    sender: int
    taken: tuple[Any, ...] | Strides
    receiver: int
    put: tuple[Any, ...] | Strides


class HostExchange(NamedTuple):
    """The blocks to copy; `tile_at` is the number of the tile of the device at each position of the target.

    If it `fills` part of the target, the rest of the target's tiles stays.
    """

    copies: tuple[Copy, ...]
    tiles: int
    tile_at: tuple[int, ...]
    tile_shape: tuple[int, ...]
    elements: int
    fills: bool = False


def plan_host_exchange(operand: Layout, result: Layout, view: View | None = None) -> HostExchange:
    """The exchange from one layout to the other, by a view if one is given, once for each tile of the result.

    >>> from reshard.types import Mesh
    >>> server = Mesh({"rep": 2}, device_ids=[4, 5])
    >>> exchange = plan_host_exchange(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[4]", server))
    >>> exchange.tile_at, [(copy.sender, copy.put) for copy in exchange.copies]
    ((0, 0), [(0, (slice(0, 2, None), Ellipsis)), (1, (slice(2, 4, None), Ellipsis))])
    """
    numbers: dict[Tile, int] = {}
    first: dict[int, int] = {}
    tile_at: list[int] = []
    for device in result.mesh.devices:
        number = numbers.setdefault(tile_of(result, device), len(numbers))
        if number not in tile_at:
            first[device] = number
        tile_at.append(number)
    size = jnp.dtype(operand.dtype).itemsize
    copies: list[Copy] = []
    for message in exchange_messages(operand, result, view):
        if message.receiver not in first:
            continue
        sender, receiver = operand.mesh.position(message.sender), first[message.receiver]
        for block in message.blocks:
            if view is None:
                for box in digit_boxes(block, operand.tile_shape, result.tile_shape):
                    taken, put = ((*(slice(at, at + extent) for at, extent in side), ...) for side in box)
                    copies.append(Copy(sender, taken, receiver, put))
                continue
            near, far = (tuple([size * axis[side] for axis in block.axes]) for side in (1, 2))
            taken = Strides(size * block.src, block.extents, near)
            copies.append(Copy(sender, taken, receiver, Strides(size * block.dst, block.extents, far)))
    copies.sort(key=lambda copy: (copy.receiver, copy.sender))  # So that senders are done with one after another.
    elements = len(numbers) * math.prod(result.tile_shape)
    fills = view is not None and view.into
    return HostExchange(tuple(copies), len(numbers), tuple(tile_at), result.tile_shape, elements, fills)


def run_host_exchange(
    exchange: HostExchange, near: jax.Array, donate: bool, into: Sequence[jax.Array] | None = None
) -> list[Array]:
    """The tiles of the result by their numbers; with `donate`, the source is deleted on the way.

    `into` are the target's tiles by their numbers, if part of them stays.
    """
    uses, size = Counter(copy.sender for copy in exchange.copies), near.dtype.itemsize
    # JAX returns the first shard of a replicated array for all others: good enough to read, but not to delete.
    shards = shards_of(near) if donate else {at: near.addressable_data(at) for at in uses}
    if donate:
        _delete_shards(shard for at, shard in shards.items() if not uses[at])
    views = {at: _as_plain_numbers(np.asarray(shards[at])) for at in uses}
    tiles: list[Array] = []
    for _ in range(exchange.tiles):
        # New memory that XLA takes as it is.
        length = math.prod(exchange.tile_shape) * size
        raw = np.empty(length + ALIGNMENT, np.uint8)
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        tiles.append(raw[start : start + length].view(near.dtype).reshape(exchange.tile_shape))
    plain = list(map(_as_plain_numbers, tiles))
    for tile, old in zip(plain, into or (), strict=into is not None):
        tile[...] = _as_plain_numbers(np.asarray(old))

    def part(tile: Array, box: tuple[Any, ...] | Strides) -> Array:
        if not isinstance(box, Strides):
            return tile[box]
        return np.ndarray(
            box.extents, tile.dtype, tile, box.place, box.strides
        )  # `as_strided` takes five times longer.

    def run(copy: Copy) -> int:
        part(plain[copy.receiver], copy.put)[...] = part(views[copy.sender], copy.taken)
        return copy.sender

    # Several threads copy large arrays; each sender comes in order, when its copy is done.
    together = exchange.elements * size < THREADED or len(exchange.copies) < 2 or _count_threads() < 2
    for sender in (map if together else _thread_pool().map)(run, exchange.copies):
        uses[sender] -= 1
        if donate and not uses[sender]:
            del views[sender]
            _delete_shards([shards[sender]])
    if donate:
        near.delete()
    return tiles


def shards_of(x: jax.Array) -> dict[int, jax.Array]:
    """The shards of an array on a mesh of this process, by their devices' positions."""
    sharding: Any = x.sharding
    by_device = {shard.device: shard.data for shard in x.addressable_shards}
    return {at: by_device[device] for at, device in enumerate(placement.devices_of(sharding.mesh))}


def _count_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_count_threads(), thread_name_prefix="reshard")


def _as_plain_numbers(tile: Array) -> Array:
    """The same memory as numbers that numpy copies fast: those of ml_dtypes are copied one by one."""
    return tile if tile.dtype.isbuiltin == 1 else tile.view(f"u{tile.itemsize}")


def _delete_shards(shards: Iterable[jax.Array]) -> None:
    for shard in shards:
        shard.delete()
