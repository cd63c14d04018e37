"""An exchange that overwrites its operand, in one buffer of slots that XLA updates in place."""

# jax annotates its functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.program import Program
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tiles import written
from reshard.types.rules.tile_view import TileView

Array = jax.Array


def shares_lie_in_order(program: Program) -> bool:
    """Whether every in-place exchange of a program packs and unpacks nothing: its slots, in order, are the tile.

    Otherwise XLA would copy the tile to rearrange its shares, and so hold it twice.
    """
    return all(
        in_order(step.pack, step.send) and in_order(step.unpack, step.receive)
        for step in program.instructions
        if isinstance(step, ExchangeInPlace)
    )


def exchange_in_place(step: ExchangeInPlace, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """Packs the tile into slots, sends slots round by round, and unpacks the result."""
    buffer = _packed(step, place, tile)
    for turn in step.rounds:
        first = turn[0]
        src = {t.sender: t.src_slot for t in turn}
        dst = {t.receiver: t.dst_slot for t in turn}
        start = jnp.asarray(first.start, jnp.int32)
        at = place.look_up([src.get(d, 0) for d in place.devices])
        message = lax.dynamic_slice(buffer, (at, start), (1, first.length))
        message = place.permute(message, [(t.sender, t.receiver) for t in turn])
        to = place.look_up([dst.get(d, 0) for d in place.devices])
        gets = None if len(dst) == len(place.devices) else place.flag(dst)
        buffer = written(buffer, message, [to, start], gets)
    return _unpacked(step, place, buffer, shape)


def _packed(step: ExchangeInPlace, place: MeshPlace, tile: Array) -> Array:
    opened = tile.reshape(step.send.digits)
    if step.slots * step.slot == tile.size and in_order(step.pack, step.send):
        return opened.reshape(step.slots, step.slot)
    buffer = jnp.zeros((step.slots, step.slot), tile.dtype)
    for number in range(max(len(places) for places in step.pack.values())):
        slots, starts, extents = _table(step.pack, step.send, number, place)
        share = lax.dynamic_slice(opened, starts, extents).reshape(1, step.slot)
        buffer = lax.dynamic_update_slice(buffer, share, (slots, jnp.zeros((), jnp.int32)))
    return buffer


def _unpacked(step: ExchangeInPlace, place: MeshPlace, buffer: Array, shape: Sequence[int]) -> Array:
    if step.slots * step.slot == math.prod(shape) and in_order(step.unpack, step.receive):
        return buffer.reshape(tuple(shape))
    filled = jnp.zeros(step.receive.digits, buffer.dtype)
    for number in range(max(len(places) for places in step.unpack.values())):
        slots, starts, extents = _table(step.unpack, step.receive, number, place)
        share = lax.dynamic_slice(buffer, (slots, jnp.zeros((), jnp.int32)), (1, step.slot))
        filled = lax.dynamic_update_slice(filled, share.reshape(extents), starts)
    return filled.reshape(tuple(shape))


_Places = Mapping[int, tuple[tuple[int, tuple[int | None, ...]], ...]]
"""By device id, (slot, place in a view) of each share."""


def _table(
    places: _Places, view: TileView, number: int, place: MeshPlace
) -> tuple[Array, list[Array], tuple[int, ...]]:
    """This device's share number `number`: its slot, its starts in the view, and its extents."""
    rows = [places[device][number] for device in place.devices]
    extents = tuple(radix if index is None else 1 for radix, index in zip(view.digits, rows[0][1], strict=True))
    columns = zip(*(tuple(index or 0 for index in where) for _, where in rows), strict=True)
    return place.look_up([slot for slot, _ in rows]), [place.look_up(column) for column in columns], extents


def in_order(places: _Places, view: TileView) -> bool:
    """Whether the slots of every device, one after another, are the tile as it lies in memory."""
    first = next(iter(places.values()))
    whole = [index is None for index in first[0][1]] if first else []
    if whole != sorted(whole):
        return False
    ranges = [range(radix) for radix, keep in zip(view.digits, whole, strict=True) if not keep]
    order = list(itertools.product(*ranges))
    return all(
        {slot: tuple(i for i in where if i is not None) for slot, where in listed} == dict(enumerate(order))
        for listed in places.values()
    )
