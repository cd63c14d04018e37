"""The steps of a move with a view on numpy: tiles reordered, parts taken and put, casts, exchanges of strided boxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from reshard.errors import TileError, quoted
from reshard.lower.views import (
    CastTiles,
    PutPart,
    Reorder,
    Spans,
    StridedTransfer,
    TakePart,
    ViewExchange,
    ViewInstruction,
    fills,
)
from reshard.runtime.account import Account
from reshard.runtime.given_tiles import tile_per_device, with_padding
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.types import dtypes
from reshard.types.plan import Plan

Array = NDArray[Any]
Tiles = dict[int, Array]


@dataclass(frozen=True)
class Extras:
    """What a run needs beside the source's tiles: copies of the target's tiles that it fills, and the cast's scales.

    Without `casts`, values stay as they are where a program casts: the prover's marks are counted, not converted.
    """

    into: Tiles = field(default_factory=dict[int, Array])
    scale: Mapping[int, Any] = field(default_factory=dict[int, Any])
    casts: bool = True


NO_EXTRAS = Extras()


def extras(plan: Plan, into: object, scale: object) -> Extras:
    """The extras of a run, checked; raises `TileError` for those that are missing, unknown or do not fit.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> layout = Layout.parse("f32[{x}4]", Mesh(x=2))
    >>> extras(plan(layout, layout), None, None)
    Extras(into={}, scale={}, casts=True)
    """
    wanted = plan.view is not None and plan.view.into
    if wanted != (into is not None):
        need = "fills part of the target: give the target's tiles with into=" if wanted else "fills all of the target"
        raise TileError(f"the move {plan.source} -> {plan.target} {need}; got into={quoted(into)}")
    return Extras(_existing(plan, into) if wanted else {}, _scales(plan, scale))


def _existing(plan: Plan, into: object) -> Tiles:
    target = plan.target
    shapes = {device: (target.tile_shape, target.tile_shape_of(device)) for device in target.mesh.devices}
    tiles: Tiles = {}
    for device, tile in tile_per_device(shapes, into).items():
        padded = with_padding(target, device, tile)
        if padded.shape != target.tile_shape or padded.dtype.name != target.dtype:
            raise TileError(
                f"device {device}'s target tile is {padded.dtype.name}{list(padded.shape)}, and {target} has tiles "
                f"{list(target.tile_shape)}"
            )
        tiles[device] = padded.copy()
    return tiles


def _scales(plan: Plan, scale: object) -> Mapping[int, Any]:
    if scale is None:
        return {}
    if plan.source.dtype == plan.target.dtype:
        raise TileError(f"scale {quoted(scale)}: {plan.source} -> {plan.target} casts nothing; leave it out")
    devices = plan.source.mesh.devices
    if not isinstance(scale, Mapping):
        return dict.fromkeys(devices, scale)
    scales = cast("Mapping[int, Any]", scale)
    missing = [device for device in devices if device not in scales]
    if missing:
        raise TileError(f"scale has nothing for the devices {missing[:8]}; give one number or array for each")
    return scales


def run_view(step: ViewInstruction, tiles: Tiles, shape: Sequence[int], memory: Account, more: Extras) -> Tiles:
    """Runs one instruction; counts what it allocates and receives."""
    if fills(step):
        devices = step.receivers if isinstance(step, ViewExchange) else tuple(tiles)
        result = {device: more.into[device].reshape(tuple(shape)) for device in devices}
        return _FILL[type(step)](step, tiles, result, memory)
    if isinstance(step, CastTiles):
        return _cast(step, tiles, memory, more)
    if isinstance(step, Reorder):
        return {device: _reorder(step, device, tile, shape, memory) for device, tile in tiles.items()}
    dtype = next(iter(tiles.values())).dtype
    devices = step.receivers if isinstance(step, ViewExchange) else tuple(tiles)
    result = {device: np.zeros(tuple(shape), dtype) for device in devices}
    for device, tile in result.items():
        memory.take(device, tile.size)
    if isinstance(step, TakePart):
        for device, tile in tiles.items():
            result[device][...] = tile[_at(step.spans)]
        return result
    return _exchange(cast("ViewExchange", step), tiles, result, memory)


def _reorder(step: Reorder, device: int, tile: Array, shape: Sequence[int], memory: Account) -> Array:
    if step.order.aliases:
        return tile.reshape(tuple(shape))
    memory.take(device, tile.size)
    return np.ascontiguousarray(tile.reshape(step.order.digits).transpose(step.order.order)).reshape(tuple(shape))


def _put(step: PutPart, tiles: Tiles, result: Tiles, memory: Account) -> Tiles:
    for device, tile in tiles.items():
        result[device][_at(step.spans)] = tile
    return result


def _exchange(step: ViewExchange, tiles: Tiles, result: Tiles, memory: Account) -> Tiles:
    flat = {device: np.ascontiguousarray(tile).reshape(-1) for device, tile in tiles.items()}
    filled = {device: tile.reshape(-1) for device, tile in result.items()}
    for transfer in step.local:
        _copy(transfer, flat, filled)
    for turn in step.rounds:
        memory.launches += 1
        ends = [(device, t.elements) for t in turn for device in (t.sender, t.receiver)] if step.staged else []
        for device, elements in ends:
            memory.take(device, elements)
        for transfer in turn:
            memory.receive(transfer.receiver, transfer.elements)
            _copy(transfer, flat, filled)
        for device, elements in ends:
            memory.free(device, elements)
    return result


def _copy(transfer: StridedTransfer, flat: Tiles, filled: Tiles) -> None:
    source, target = flat[transfer.sender], filled[transfer.receiver]
    for box in transfer.boxes:
        there = _strided(target, box.dst, box.extents, box.dst_strides)
        there[...] = _strided(source, box.src, box.extents, box.src_strides)


def _strided(flat: Array, place: int, extents: Sequence[int], strides: Sequence[int]) -> Array:
    """The elements of a box in a flat tile; the box was checked to lie inside it."""
    last = place + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
    if not 0 <= place <= last < flat.size:
        raise TileError(f"a box from {place} to {last} leaves a tile of {flat.size} elements")
    return as_strided(flat[place:], tuple(extents), tuple(stride * flat.itemsize for stride in strides))


def _cast(step: CastTiles, tiles: Tiles, memory: Account, more: Extras) -> Tiles:
    narrows = dtypes.bits(step.dtype) < dtypes.bits(memory.dtype)
    memory.cast(step.dtype)
    result: Tiles = {}
    for device, tile in tiles.items():
        scale = more.scale.get(device)
        dtype = numpy_dtype(step.dtype) if more.casts else tile.dtype
        try:
            result[device] = scaled(tile, dtype, scale, narrows)
        except (ValueError, TypeError, MemoryError) as error:
            raise TileError(
                f"device {device}'s scale {quoted(scale)} does not fit its tile of shape {tile.shape}: {error}; give a "
                f"number, or an array that broadcasts to the tile"
            ) from None
        memory.take(device, tile.size)
    return result


def scaled(tile: Array, dtype: np.dtype[Any], scale: Any, narrows: bool) -> Array:
    """A tile cast, divided by a scale before where the dtype narrows, multiplied by it after where it widens.

    >>> scaled(np.array([2.0, 4.0]), np.dtype("float32"), 2, narrows=True)
    array([1., 2.], dtype=float32)
    """
    if scale is None:
        return tile.astype(dtype)
    if narrows:
        factor = np.broadcast_to(np.asarray(scale, tile.dtype), tile.shape)
        return (tile / factor).astype(dtype)
    wide = tile.astype(dtype)
    return wide * np.broadcast_to(np.asarray(scale, dtype), wide.shape)


def _at(spans: Spans) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in spans)


_FILL: dict[type[ViewInstruction], Callable[[Any, Tiles, Tiles, Account], Tiles]] = {
    PutPart: _put,
    ViewExchange: _exchange,
}
