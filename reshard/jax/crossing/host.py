"""Exchanges between CPU devices of one process, whose tiles are memory of this process: one copy, and no messages.

The sources' shards are read where they are, and the blocks of the exchanges are copied into new memory, which becomes
the results' shards as it is; a view is part of the copy. Devices that hold the same tile share its memory, as they do
after `jax.device_put` of a numpy array; XLA copies such memory before it would overwrite it. A donated source is
deleted shard by shard, each as soon as nobody needs it any more.

The exchanges of a tree run at once, and several may fill one result:

    q, k, v     the tiles of qkv, made once     copies, the large ones cut: thread 0, thread 1, thread 0, thread 1 ...
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reshard.geometry.holders import Tile, tile_of
from reshard.geometry.messages import exchange_messages
from reshard.jax import placement
from reshard.lower.exchange_rounds import digit_boxes
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.view import View

Array = np.ndarray[Any, Any]
ALIGNMENT = 64
"""XLA takes memory as it is from this alignment on, and copies other memory."""
THREADED = 32 << 20
"""From this many bytes on, several threads copy; below it, waking them costs as much as they gain."""
UNIT = 4 << 20
"""About the bytes that a thread copies before it looks for more: in pieces of half of that, all takes 5% longer."""


SHORT = 16 << 10
"""Bytes of a copy below which slices are made in half of its time, and of a run from which numpy copies it fast."""


class Strides(NamedTuple):
    """A part of a tile's memory: its first byte, its extents, their strides in bytes, and what is at each place."""

    place: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    kind: np.dtype[Any]


class Copy(NamedTuple):
    """A part of the source's tile at position `sender` that goes into the target's tile of number `receiver`.

    Slices where the copy is small and no view is given: they take half the time of strides.
    """

    sender: int
    taken: tuple[Any, ...] | Strides
    receiver: int
    put: tuple[Any, ...] | Strides


class HostExchange(NamedTuple):
    """The blocks to copy; `tile_at` is the number of the tile of the device at each position of the target, and
    `senders` are the positions of the shards that are read.

    If it `fills` part of the target, the rest of the target's tiles stays.
    """

    copies: tuple[Copy, ...]
    tiles: int
    tile_at: tuple[int, ...]
    tile_shape: tuple[int, ...]
    elements: int
    senders: tuple[int, ...]
    fills: bool


def plan_host_exchange(
    operand: Layout, result: Layout, view: View | None = None, holding: Holding | None = None, fresh: bool = False
) -> HostExchange:
    """The exchange from one layout to the other, by a view if one is given, once for each tile of the result.

    What a view does not fill of the tiles stays, unless they are `fresh`.

    Beside a `holding`, in which devices hold the result's tiles, of what is stale in these.

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
    for message in exchange_messages(operand, result, view, holding):
        if message.receiver not in first:
            continue
        sender, receiver = operand.mesh.position(message.sender), first[message.receiver]
        for block in message.blocks:
            # What is together on both sides is one element: numpy copies short rows one by one, with a call for each.
            axes, run = block.axes, size
            while axes and size * axes[-1].src == size * axes[-1].dst == run and run * axes[-1].extent < SHORT:
                run *= axes[-1].extent
                axes = axes[:-1]
            if view is None and (run == size or size * block.elements < SHORT):
                for box in digit_boxes(block, operand.tile_shape, result.tile_shape):
                    taken, put = ((*(slice(at, at + extent) for at, extent in side), ...) for side in box)
                    copies.append(Copy(sender, taken, receiver, put))
                continue
            kind = np.dtype(f"u{run}" if run in (1, 2, 4, 8) else (np.void, run))
            extents = tuple([axis.extent for axis in axes])
            near, far = (tuple([size * axis[side] for axis in axes]) for side in (1, 2))
            taken = Strides(size * block.src, extents, near, kind)
            copies.append(Copy(sender, taken, receiver, Strides(size * block.dst, extents, far, kind)))
    copies.sort(key=lambda copy: (copy.receiver, copy.sender))  # So that senders are done with one after another.
    elements = len(numbers) * math.prod(result.tile_shape)
    fills = holding is not None or (view is not None and view.into and not fresh)
    senders = tuple(dict.fromkeys(copy.sender for copy in copies))
    return HostExchange(tuple(copies), len(numbers), tuple(tile_at), result.tile_shape, elements, senders, fills)


class HostPart(NamedTuple):
    """An array that an exchange reads, and the number of the result of which it fills all or a part."""

    exchange: HostExchange
    near: jax.Array
    donate: bool = False
    result: int = 0


Shard = tuple[int, int]
"""An array, by its identity, and the position of the device that has the shard."""


class _Piece(NamedTuple):
    """Memory to fill, what it is filled with, and the shard whose copy is done with this piece."""

    target: Array
    source: Array
    shard: Shard | None


def run_host_exchanges(
    parts: Sequence[HostPart],
    old: Mapping[int, Sequence[jax.Array]] = MappingProxyType({}),
    kept: Set[int] = frozenset(),
) -> dict[int, list[Array]]:
    """The tiles of each result by their numbers; sources that are donated are deleted on the way.

    `old` are the tiles, by their numbers, of results of which some elements stay; the memory of those in `kept` is that
    of their results.
    """
    donated = {id(part.near): part.near for part in parts if part.donate}
    # JAX returns the first shard of a replicated array for all others: good enough to read, but not to delete.
    owned = {(key, at): shard for key, near in donated.items() for at, shard in shards_of(near).items()}
    memory: dict[int, dict[int, Array]] = {}
    for exchange, near, _, _ in parts:
        key = id(near)
        read = memory.setdefault(key, {})
        for at in exchange.senders:
            if at not in read:
                shard = owned[key, at] if donated and key in donated else near.addressable_data(at)
                read[at] = _as_plain_numbers(np.asarray(shard))
    first: dict[int, HostPart] = {}
    for part in parts:
        first.setdefault(part.result, part)
    tiles = {number: _make_tiles(part, old.get(number, ()), number in kept) for number, part in first.items()}
    plain = {number: [_as_plain_numbers(tile) for tile in each] for number, each in tiles.items()}
    total = sum(part.exchange.elements * part.near.dtype.itemsize for part in first.values())
    alone = total < THREADED or _count_threads() < 2
    if alone and not donated:
        for exchange, near, _, number in parts:
            into, read = plain[number], memory[id(near)]
            for sender, taken, receiver, put in exchange.copies:
                _part_of(into[receiver], put)[...] = _part_of(read[sender], taken)
        return tiles
    pieces = (
        _Piece(_part_of(plain[number][receiver], put), _part_of(memory[id(near)][sender], taken), (id(near), sender))
        for exchange, near, _, number in parts
        for sender, taken, receiver, put in exchange.copies
    )
    uses = Counter((id(near), copy.sender) for exchange, near, _, _ in parts for copy in exchange.copies)
    _delete_shards(shard for key, shard in owned.items() if key not in uses)
    # Several threads copy much; shards come in order, when their copies are done.
    units = map(lambda piece: [piece], pieces) if alone else _share_pieces(pieces)
    for done in (map if alone else _thread_pool().map)(_copy_pieces, units):
        for key in done:
            uses[key] -= 1
            if not uses[key] and key in owned:
                del memory[key[0]][key[1]]
                _delete_shards([owned[key]])
    for near in donated.values():
        near.delete()
    return tiles


def _copy_pieces(unit: list[_Piece]) -> list[Shard]:
    """Makes some copies; what has been read by them, as often as it was wanted."""
    for piece in unit:
        piece.target[...] = piece.source
    done = [piece.shard for piece in unit if piece.shard is not None]
    unit.clear()  # A shard that is deleted stays while something reads it.
    return done


def _share_pieces(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """The pieces in lists of about equal bytes, for threads, in their order; the first axes of large ones are cut."""
    unit: list[_Piece] = []
    room = UNIT
    for target, source, shard in pieces:
        count = min(-(-target.nbytes // UNIT), len(target) if target.ndim else 1)
        for at in range(count):
            cut = slice(len(target) * at // count, len(target) * (at + 1) // count) if count > 1 else ...
            unit.append(_Piece(target[cut], source[cut], shard if at == count - 1 else None))
            room -= unit[-1].target.nbytes
            if room <= 0:
                yield unit
                unit, room = [], UNIT
    yield unit


def _part_of(tile: Array, box: tuple[Any, ...] | Strides) -> Array:
    if not isinstance(box, Strides):
        return tile[box]
    # `as_strided` takes five times longer.
    return np.ndarray(box.extents, box.kind, tile, box.place, box.strides)


def _make_tiles(part: HostPart, old: Sequence[jax.Array], kept: bool) -> list[Array]:
    """The tiles of a result, with what the `old` ones hold: new memory that XLA takes as it is, or if `kept` theirs."""
    shape, dtype = part.exchange.tile_shape, part.near.dtype
    if kept:  # JAX gives it to be read alone.
        held = [(ctypes.c_uint8 * shard.nbytes).from_address(shard.unsafe_buffer_pointer()) for shard in old]
        return [np.ndarray(shape, dtype, each) for each in held]
    size = math.prod(shape) * dtype.itemsize
    tiles: list[Array] = []
    for _ in range(part.exchange.tiles):
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        tiles.append(np.ndarray(shape, dtype, raw, start))
    each = zip(tiles, old, strict=bool(old))
    pieces = (_Piece(_as_plain_numbers(tile), _as_plain_numbers(np.asarray(shard)), None) for tile, shard in each)
    alone = size * len(old) < THREADED or _count_threads() < 2
    for _ in (map if alone else _thread_pool().map)(_copy_pieces, _share_pieces(pieces)):
        pass
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
