"""One function a collective: slices, gathers, all-to-alls, reductions, split sums and permutes of a device's tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.groups import Groups
from reshard.lower.program import AllGather, AllReduce, AllToAll, Permute, Plain, ReduceScatter, Slice, SplitSum
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.tile_memory import (
    LANES,
    SUBLANES,
    BlockRuns,
    choose_memory_order,
    cut_box,
    join_blocks,
    keep_tile_layout,
    merge_block_digits,
    number_blocks,
    resize_tile,
    split_tile_digits,
)
from reshard.plans.rules.tile_view import TileView
from reshard.types.reductions import identity

Array = jax.Array

_WHOLE_SLICE = 64
"""From this number of TPU chips on, libtpu turns a gather among all of them into an all-reduce: twice the bytes."""


def _read_numbered_block(view: TileView, place: MeshPlace, number: Mapping[int, int], tile: Array) -> Array:
    """The block whose number is this device's, in the runs of the view."""
    runs = BlockRuns.of(view)
    # To look up where a block starts takes fewer operations than to take a number apart.
    columns = zip(*(runs.list_starts(number[device]) for device in place.devices), strict=True)
    starts = [place.look_up(column) for column in columns]
    return cut_box(resize_tile(tile, view.padded).reshape(runs.shape), starts, runs.block)


def gather_group_tiles(step: AllGather, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """The tiles of all members of the device's group, in group order."""
    dim = find_gathered_dim(step.receive)
    levels = place.levels(step.groups) if len(step.groups[0]) >= _WHOLE_SLICE else (step.groups,)

    def stacked(levels: Sequence[Groups], tile: Array) -> Array:
        each = resize_tile(tile, step.send.padded)[np.newaxis]
        return join_blocks(step.receive, _gather_by_levels(levels, place, each, 0))

    def tiled(levels: Sequence[Groups], tile: Array) -> Array:
        return resize_tile(_gather_by_levels(levels, place, resize_tile(tile, step.send.padded), dim or 0), shape)

    def opened(levels: Sequence[Groups], tile: Array) -> Array:
        # Tiles travel in the digits of the result, which libtpu orders as it received them: in fewer digits they would
        # be transposed before they are sent, and after.
        view = merge_block_digits(step.receive)
        rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
        at, *more = view.blocks
        below = math.prod(view.digits[axis] for axis in rest if axis > at and view.dims[axis] == view.dims[at])
        in_place = not more and view.dims[at] != choose_memory_order(shape, tile.dtype.name)[-1]
        if not (more or in_place) and below % LANES == 0:
            return stacked(levels, tile)  # Whole rows of lanes are put in order in half of the time, or less.
        tile = resize_tile(tile, step.send.padded).reshape([view.digits[axis] for axis in rest])
        if in_place:
            tile = _gather_by_levels(levels, place, jnp.expand_dims(tile, at), at)
        else:  # What is less than a row of lanes cannot be received in its place.
            order = [*view.blocks, *rest]
            tile = _gather_by_levels(levels, place, tile[np.newaxis], 0)
            tile = tile.reshape([view.digits[axis] for axis in order]).transpose(np.argsort(order))
        return resize_tile(tile.reshape(view.padded), shape)

    # Gathering an inner dim costs XLA:CPU and GPU two transposes, of tile and result; TPU needs none.
    default, on_tpu = tiled if dim == 0 else stacked, opened if dim is None else tiled
    if default is on_tpu and len(levels) == 1:
        return default(levels, tile)
    return place.by_platform(tile, tpu=partial(on_tpu, levels), default=partial(default, (step.groups,)))


def _gather_by_levels(levels: Sequence[Groups], place: MeshPlace, tile: Array, dim: int) -> Array:
    """The tiles one after another along a dim, of the inner level first, while there is little."""
    for groups in reversed(levels):
        tile = lax.all_gather(tile, axis=dim, tiled=True, **place.group(groups))
    return tile


def find_gathered_dim(view: TileView) -> int | None:
    """The dim along which the tiles lie one after another in the result, if they do."""
    dims = {view.dims[axis] for axis in view.blocks}
    if len(dims) != 1 or list(view.blocks) != sorted(view.blocks):
        return None
    dim = dims.pop()
    runs = [run for run in view.runs if view.dims[run[0]] == dim]
    return dim if view.dims.index(dim) == view.blocks[0] and len(runs) == 1 else None


def exchange_blocks(step: AllToAll, place: MeshPlace, tile: Array) -> Array:
    """The tile after an all-to-all: on a TPU blocks stay where they lie, if one digit numbers them, for XLA to pack.

    It packs them in one pass where it spells an all-to-all itself, and in two where they were transposed before.
    """
    view = merge_block_digits(step.send)

    def send_digit(tile: Array) -> Array:
        (at,) = view.blocks
        opened = split_tile_digits(view, tile)
        arrived = lax.all_to_all(opened, split_axis=at, concat_axis=at, tiled=True, **place.anew().group(step.groups))
        return join_blocks(step.receive, jnp.moveaxis(arrived, at, 0).reshape(view.count, *step.receive.block_shape))

    def send_numbered(tile: Array) -> Array:
        return join_blocks(step.receive, send_blocks(step.groups, place.anew(), number_blocks(step.send, tile)))

    if len(view.blocks) != 1:
        return send_numbered(tile)
    return lax.platform_dependent(tile, tpu=send_digit, default=send_numbered)


def send_blocks(groups: Groups, place: MeshPlace, blocks: Array) -> Array:
    """Block j of member i as block i of member j."""
    return lax.all_to_all(blocks, split_axis=0, concat_axis=0, tiled=True, **place.group(groups))


def scatter_sum(step: ReduceScatter, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """The device's block of all members' tiles, combined."""

    def at_once(tile: Array) -> Array:
        return scatter_blocks(step.groups, place, number_blocks(step.send, tile)).reshape(step.receive.padded)

    def by_levels(tile: Array) -> Array:
        # A TPU receives twice the bytes for other spellings: libtpu makes an all-reduce of a reduce-scatter of other
        # dtypes, among all devices of a program, and of one that drops the dim it scatters. So the dim stays, and a
        # group of all devices is two levels: the larger groups, along most axes of a torus, go first, when the tiles
        # are large. Nor does it scatter along the last two dims what is less than whole tiles of memory, 512 bytes of
        # a row or 16 rows, and along others it adds tiles until members have equal numbers of them.
        if tile.dtype.name not in ("float32", "bfloat16"):
            blocks = send_blocks(step.groups, place, number_blocks(step.send, tile))
            return _reduce_gathered("sum", blocks).reshape(step.receive.padded)
        levels, row = place.levels(step.groups), 4 * LANES // tile.dtype.itemsize
        members = math.lcm(*(len(groups[0]) for groups in levels))

        def has_even_tiles(block: Sequence[int]) -> bool:
            *most, second, minor = (1, 1, *block)
            tiles = math.prod(most) * -(-second // SUBLANES) * -(-minor // LANES)
            return minor >= LANES and second >= SUBLANES and tiles % members == 0

        block, size = list(step.send.padded), math.prod(step.send.padded) // step.send.count
        dim, rank = find_gathered_dim(step.send) or 0, len(block)
        block[dim] //= step.send.count
        least = {rank - 1: row, rank - 2: 16}.get(dim)
        if dim and (block[dim] % least == 0 if least else has_even_tiles(block)):
            tile = resize_tile(tile, step.send.padded)
        else:
            dim, tile = 0, number_blocks(step.send, tile)
            rows = -(-size // row)
            if not has_even_tiles(tile.shape[1:]) and rows >= SUBLANES:
                # Each block is a column of rows. Fewer rows are better summed with others at once, as libtpu does.
                flat = tile.reshape(len(tile), -1)
                flat = resize_tile(flat, (len(tile), rows * row)).reshape(len(tile), rows, row)
                dim, tile = 1, flat.swapaxes(0, 1).reshape(rows, -1)
        for groups in levels:
            tile = lax.psum_scatter(tile, scatter_dimension=dim, tiled=True, **place.group(groups))
        return tile.reshape(-1)[:size].reshape(step.receive.padded)

    if step.reduction in ("sum", "mean"):
        total = place.by_platform(tile, tpu=by_levels, default=at_once)
    else:  # jax.lax has a reduce-scatter for sums only; an all-to-all moves the same bytes.
        total = _reduce_gathered(step.reduction, send_blocks(step.groups, place, number_blocks(step.send, tile)))
    return finish_scattered(step, total, shape)


def scatter_blocks(groups: Groups, place: MeshPlace, blocks: Array) -> Array:
    """The sum of the device's blocks."""
    return lax.psum_scatter(blocks, scatter_dimension=0, tiled=False, **place.group(groups))


def finish_scattered(step: ReduceScatter, total: Array, shape: Sequence[int]) -> Array:
    """The tile that a device's block makes up, once the blocks of all members are combined."""
    total = total.reshape(step.receive.padded)
    return resize_tile(_average_total(step.reduction, total, step.send.count), shape)


def _split_tile(step: SplitSum, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """What the device keeps of its tile, in a tile of zeros, or of the identity of another operation."""
    nothing = np.asarray(identity(tile.dtype.name, step.reduction)).astype(tile.dtype)
    runs = BlockRuns.of(step.receive)
    block = _read_numbered_block(step.send, place, step.keep, tile).reshape(runs.block)
    if None in step.place.values():
        has_data = place.flag(device for device, number in step.place.items() if number is not None)
        block = lax.select(jnp.broadcast_to(has_data, block.shape), block, jnp.full(block.shape, nothing))
    if step.receive.blocks:
        number = place.by_device({device: number or 0 for device, number in step.place.items()})
        block = lax.dynamic_update_slice(jnp.full(runs.shape, nothing), block, runs.starts(number))
    return resize_tile(block.reshape(step.receive.padded), shape)


def _reduce_gathered(reduction: str, parts: Array) -> Array:
    if reduction in ("sum", "mean"):
        return parts.sum(axis=0, dtype=parts.dtype)
    if reduction == "product":
        return parts.prod(axis=0, dtype=parts.dtype)
    return parts.max(axis=0) if reduction == "max" else parts.min(axis=0)


def _average_total(reduction: str, total: Array, count: int) -> Array:
    return total / jnp.asarray(count, total.dtype) if reduction == "mean" else total


def run_collective(step: Plain, place: MeshPlace, tile: Array, shape: Sequence[int]) -> Array:
    """The tile of this shape after a step that is one collective, or none."""
    match step:
        case Slice():
            block = _read_numbered_block(step.send, place, step.block, tile).reshape(step.receive.padded)
            orders = {choose_memory_order(each, tile.dtype.name) for each in (tile.shape, shape)}
            return resize_tile(block if len(orders) == 1 else keep_tile_layout(tile, block), shape)
        case AllToAll():
            return exchange_blocks(step, place, tile)
        case Permute():
            return place.permute(tile, step.pairs)
        case AllGather():
            return gather_group_tiles(step, place, tile, shape)
        case ReduceScatter():
            return scatter_sum(step, place, tile, shape)
        case AllReduce():
            group = place.group(step.groups)
            reduce = {"sum": lax.psum, "mean": lax.psum, "max": lax.pmax, "min": lax.pmin}.get(step.reduction)
            if reduce is None:  # jax.lax has no product over devices, so all tiles are gathered.
                return _reduce_gathered(step.reduction, lax.all_gather(tile, **group))
            return _average_total(step.reduction, reduce(tile, **group), len(step.groups[0]))
        case SplitSum():
            return _split_tile(step, place, tile, shape)
        case _:
            raise TypeError(f"{type(step).__name__} is no collective")
