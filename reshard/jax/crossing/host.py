"""The exchange between CPU devices of one process, whose tiles are memory of this process: one copy, and no messages.

The source's shards are read where they are, and the boxes of the exchange are copied into new memory, which becomes the
result's shards as it is. A view is part of the copy: boxes are then strided in either tile. Devices that hold the same
tile share its memory, as they do after `jax.device_put` of a numpy array; XLA copies such memory before it would
overwrite it. A donated source is deleted shard by shard, each as soon as nobody needs it any more.
"""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.lib.stride_tricks import as_strided

from reshard.geometry.holders import Tile, tile_of
from reshard.geometry.messages import exchange_messages
from reshard.jax.placement import devices_of
from reshard.lower.exchange_rounds import digit_boxes
from reshard.types.layout import Layout
from reshard.types.view import View

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
"""XLA takes memory as it is from this alignment on, and copies other memory."""
THREADED = 32 << 20
"""From this many bytes on, several threads copy; below it, waking them costs as much as they gain."""


class Strides(NamedTuple):
    """A box of a flat tile: its first place, its extents and their strides, in elements."""

    place: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]


Part = tuple[slice, ...] | Strides
"""A box of a tile."""


class Copy(NamedTuple):
    """A box of the source's tile at position `sender` that goes into the target's tile of number `receiver`."""

    sender: int
    taken: Part
    receiver: int
    put: Part


class HostExchange(NamedTuple):
    """The boxes to copy; `tile_at` is the number of the tile of the device at each position of the target.

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
    listed = _boxes(operand, result) if view is None else _strided_boxes(operand, result, view)
    copies = [
        Copy(operand.mesh.position(sender), taken, first[receiver], put)
        for sender, receiver, taken, put in listed
        if receiver in first
    ]
    copies.sort(key=lambda copy: (copy.receiver, copy.sender))  # So that senders are done with one after another.
    elements = len(numbers) * math.prod(result.tile_shape)
    fills = view is not None and view.into
    return HostExchange(tuple(copies), len(numbers), tuple(tile_at), result.tile_shape, elements, fills)


Boxes = Iterator[tuple[int, int, Part, Part]]


def _boxes(operand: Layout, result: Layout) -> Boxes:
    for message in exchange_messages(operand, result):
        for block in message.blocks:
            for box in digit_boxes(block, operand.tile_shape, result.tile_shape):
                taken, put = (tuple(slice(start, start + extent) for start, extent in side) for side in box)
                yield message.sender, message.receiver, taken, put


def _strided_boxes(operand: Layout, result: Layout, view: View) -> Boxes:
    for message in exchange_messages(operand, result, view):
        for src, dst, axes in message.blocks:
            extents, before, after = tuple(zip(*axes, strict=True)) if axes else ((), (), ())
            yield message.sender, message.receiver, Strides(src, extents, before), Strides(dst, extents, after)


def run_host_exchange(
    exchange: HostExchange, near: jax.Array, donate: bool, into: Sequence[jax.Array] | None = None
) -> list[Array]:
    """The tiles of the result by their numbers; with `donate`, the source is deleted on the way.

    `into` are the target's tiles by their numbers, if part of them stays.
    """
    uses = Counter(copy.sender for copy in exchange.copies)
    # JAX returns the first shard of a replicated array for all others: good enough to read, but not to delete.
    shards = shards_of(near) if donate else {at: near.addressable_data(at) for at in uses}
    if donate:
        _delete_shards(shard for at, shard in shards.items() if not uses[at])
    views = {at: _as_plain_numbers(np.asarray(shards[at])) for at in uses}
    tiles = [_allocate_aligned(exchange.tile_shape, near.dtype) for _ in range(exchange.tiles)]
    plain = [_as_plain_numbers(tile) for tile in tiles]
    if into is not None:
        _copy_old(plain, into)

    def run(copy: Copy) -> int:
        _view_part(plain[copy.receiver], copy.put)[...] = _view_part(views[copy.sender], copy.taken)
        return copy.sender

    for sender in _run_copies(run, exchange.copies, exchange.elements * near.dtype.itemsize):
        uses[sender] -= 1
        if donate and not uses[sender]:
            del views[sender]
            _delete_shards([shards[sender]])
    if donate:
        near.delete()
    return tiles


def _copy_old(tiles: Sequence[Array], into: Sequence[jax.Array]) -> None:
    for tile, old in zip(tiles, into, strict=True):
        tile[...] = _as_plain_numbers(np.asarray(old))


def _view_part(tile: Array, part: Part) -> Array:
    """A box of a tile, as a view of its memory."""
    if not isinstance(part, Strides):
        return tile[(*part, ...)]
    strides = tuple(stride * tile.itemsize for stride in part.strides)
    return as_strided(tile.reshape(-1)[part.place :], part.extents, strides)


def shards_of(x: jax.Array) -> dict[int, jax.Array]:
    """The shards of an array on a mesh of this process, by their devices' positions."""
    sharding: Any = x.sharding
    by_device = {shard.device: shard.data for shard in x.addressable_shards}
    return {at: by_device[device] for at, device in enumerate(devices_of(sharding.mesh))}


def _run_copies(run: Any, copies: Sequence[Copy], size: int) -> Iterable[int]:
    """Runs the copies, and yields their senders in order, each when its copy is done."""
    if size < THREADED or len(copies) < 2 or _count_threads() < 2:
        return map(run, copies)
    return _thread_pool().map(run, copies)


def _count_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_count_threads(), thread_name_prefix="reshard")


def _allocate_aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """New memory that XLA takes as it is."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _as_plain_numbers(tile: Array) -> Array:
    """The same memory as numbers that numpy copies fast: those of ml_dtypes are copied one by one."""
    return tile if tile.dtype.isbuiltin == 1 else tile.view(f"u{tile.itemsize}")


def _delete_shards(shards: Iterable[jax.Array]) -> None:
    for shard in shards:
        shard.delete()
