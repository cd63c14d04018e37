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

from reshard.geometry.blocks import split_run
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
TOGETHER = 1 << 20
"""The most bytes of tiles that are allocated together."""
START = 12 << 10
"""The bytes that are copied in the time that numpy takes to start a copy (`python benchmarks/dispatch.py --moves`)."""
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

    If it `fills` part of the target, the rest of the target's tiles stays. If there are `runs`, nothing is copied: each
    tile of the target is a run of memory of the shard at one position, from an element of it on. If there is another
    exchange `then`, this one makes the whole array, of which that one makes the target.
    """

    copies: tuple[Copy, ...]
    tiles: int
    tile_at: tuple[int, ...]
    tile_shape: tuple[int, ...]
    itemsize: int
    elements: int
    senders: tuple[int, ...]
    fills: bool
    runs: tuple[tuple[int, int], ...] = ()
    then: HostExchange | None = None

    @property
    def cost(self) -> int:
        """What it takes, in bytes that are copied meanwhile."""
        each = math.prod(self.tile_shape) * self.itemsize * self.tiles
        own = 0 if self.runs else len(self.copies) * START + each
        return own + (0 if self.then is None else self.then.cost)


def plan_host_exchange(
    operand: Layout,
    result: Layout,
    view: View | None = None,
    holding: Holding | None = None,
    fresh: bool = False,
    shares: bool = False,
) -> HostExchange:
    """The exchange from one layout to the other, by a view if one is given, once for each tile of the result.

    What a view does not fill of the tiles stays, unless they are `fresh`.

    Beside a `holding`, in which devices hold the result's tiles, of what is stale in these. If it `shares`, results
    are the memory of the source where all of their tiles are runs of it.

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
    # A tile is read on the first device that has it, so that few are opened, and results keep no more of them alive.
    homes: dict[Tile, int] = {}
    home_at = [
        at if operand.partial else homes.setdefault(tile_of(operand, device), at)
        for at, device in enumerate(operand.mesh.devices)
    ]
    size, elements = jnp.dtype(operand.dtype).itemsize, math.prod(result.tile_shape)
    copies: list[Copy] = []
    runs: dict[int, tuple[int, int]] = {}
    for message in exchange_messages(operand, result, view, holding):
        if message.receiver not in first:
            continue
        sender, receiver = home_at[operand.mesh.position(message.sender)], first[message.receiver]
        for block in message.blocks:
            if block.is_run and block.elements == elements:
                runs[receiver] = sender, block.src
            # What is together on both sides is one element: numpy copies short rows one by one, with a call for each.
            axes, together = split_run(block.axes, below=SHORT / size)
            run = size * together
            if view is None and (together == 1 or size * block.elements < SHORT):
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
    fills = holding is not None or (view is not None and view.into and not fresh)
    # A view may take a part of the source, of which the rest would stay alive.
    may_share = shares and view is None
    shared = tuple(map(runs.__getitem__, range(len(numbers)))) if may_share and len(runs) == len(numbers) else ()
    senders = tuple(dict.fromkeys([sender for sender, _ in shared] or [copy.sender for copy in copies]))
    tiles, elements = len(numbers), len(numbers) * elements
    copied = () if shared else tuple(copies)
    ends = tuple(tile_at), result.tile_shape
    direct = HostExchange(copied, tiles, *ends, size, elements, senders, fills, shared)
    whole = Layout.tiled(operand.mesh, operand.shape, operand.dtype, [()] * len(operand.shape))
    if not may_share or shared or not operand.even or len(senders) < 2:
        return direct
    # Eight tiles to eight are 64 copies, and by way of the whole array 16, or 8 whose result the tiles are parts of.
    then = plan_host_exchange(whole, result, shares=True)
    through = plan_host_exchange(operand, whole)._replace(then=then)
    fits = then.runs or whole.tile_bytes <= TOGETHER
    return through if fits and through.cost < direct.cost else direct


class HostPart(NamedTuple):
    """An array whose shards an exchange reads, and the number of the result of which it fills all or a part."""

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
    for part in parts:
        key, near = id(part.near), part.near
        read = memory.setdefault(key, {})
        for at in part.exchange.senders:
            if at not in read:
                shard = owned[key, at] if donated and key in donated else near.addressable_data(at)
                read[at] = _as_plain_numbers(np.asarray(shard))
    first: dict[int, HostPart] = {}
    for part in parts:
        first.setdefault(part.result, part)
    tiles = {
        number: _share_runs(part.exchange, memory[id(part.near)], part.near.dtype)
        if part.exchange.runs
        else _make_tiles(part.exchange, part.near.dtype, old.get(number, ()), number in kept)
        for number, part in first.items()
    }
    plain = {number: [_as_plain_numbers(tile) for tile in each] for number, each in tiles.items()}
    total = sum(part.exchange.elements * part.near.dtype.itemsize for part in first.values())
    alone = total < THREADED or count_cores() < 2
    if alone and not donated:
        for part in parts:
            _copy_all(part.exchange, plain[part.result], memory[id(part.near)])
        return {number: _finish_tiles(part, tiles[number]) for number, part in first.items()}
    pieces = (
        _Piece(
            _part_of(plain[part.result][receiver], put),
            _part_of(memory[id(part.near)][sender], taken),
            (id(part.near), sender),
        )
        for part in parts
        for sender, taken, receiver, put in part.exchange.copies
    )
    uses = Counter((id(part.near), copy.sender) for part in parts for copy in part.exchange.copies)
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
    return {number: _finish_tiles(part, tiles[number]) for number, part in first.items()}


def _copy_all(exchange: HostExchange, into: Sequence[Array], read: Mapping[int, Array]) -> None:
    for sender, taken, receiver, put in exchange.copies:
        _part_of(into[receiver], put)[...] = _part_of(read[sender], taken)


def _finish_tiles(part: HostPart, tiles: list[Array]) -> list[Array]:
    """The tiles of a result, if they are made of those of its first exchange."""
    then, dtype = part.exchange.then, part.near.dtype
    if then is None:
        return tiles
    read = {0: _as_plain_numbers(tiles[0])}
    if then.runs:
        return _share_runs(then, read, dtype)
    made = _make_tiles(then, dtype, (), False)
    _copy_all(then, [_as_plain_numbers(tile) for tile in made], read)
    return made


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


def _share_runs(exchange: HostExchange, read: Mapping[int, Array], dtype: np.dtype[Any]) -> list[Array]:
    """The tiles of a result as parts of what is read: JAX gives them to be read alone, and XLA keeps their memory."""
    shape = exchange.tile_shape
    ends = [(read[at].reshape(-1), start) for at, start in exchange.runs]
    return [tile[start : start + math.prod(shape)].reshape(shape).view(dtype) for tile, start in ends]


def _make_tiles(exchange: HostExchange, dtype: np.dtype[Any], old: Sequence[jax.Array], kept: bool) -> list[Array]:
    """The tiles of a result, with what the `old` ones hold: new memory that XLA takes as it is, or if `kept` theirs."""
    shape = exchange.tile_shape
    if kept:  # JAX gives it to be read alone.
        held = [(ctypes.c_uint8 * shard.nbytes).from_address(shard.unsafe_buffer_pointer()) for shard in old]
        return [np.ndarray(shape, dtype, each) for each in held]
    size, count = math.prod(shape) * dtype.itemsize, exchange.tiles
    tiles: list[Array] = []
    # Small tiles are one piece of memory, since to ask for one costs more than to copy it; large ones are freed one by
    # one.
    each = -(-size // ALIGNMENT) * ALIGNMENT
    together = count if each * count <= TOGETHER else 1
    for _ in range(0, count, together or 1):
        raw = np.empty(together * each + ALIGNMENT, np.uint8)
        start = -raw.__array_interface__["data"][0] % ALIGNMENT
        tiles += [np.ndarray(shape, dtype, raw, start + at * each) for at in range(together)]
    if not old:
        return tiles
    pairs = zip(tiles, old, strict=True)
    pieces = (_Piece(_as_plain_numbers(tile), _as_plain_numbers(np.asarray(shard)), None) for tile, shard in pairs)
    alone = size * len(old) < THREADED or count_cores() < 2
    for _ in (map if alone else _thread_pool().map)(_copy_pieces, _share_pieces(pieces)):
        pass
    return tiles


def shards_of(x: jax.Array) -> dict[int, jax.Array]:
    """The shards of an array on a mesh of this process, by their devices' positions."""
    sharding: Any = x.sharding
    by_device = {shard.device: shard.data for shard in x.addressable_shards}
    return {at: by_device[device] for at, device in enumerate(placement.devices_of(sharding.mesh))}


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count_cores(), thread_name_prefix="reshard")


def _as_plain_numbers(tile: Array) -> Array:
    """The same memory as numbers that numpy copies fast: those of ml_dtypes are copied one by one."""
    return tile if tile.dtype.isbuiltin == 1 else tile.view(f"u{tile.itemsize}")


def _delete_shards(shards: Iterable[jax.Array]) -> None:
    for shard in shards:
        shard.delete()
