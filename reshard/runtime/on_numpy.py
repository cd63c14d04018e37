"""The reference runtime: all devices in one process, on numpy.

It follows the lowered program and nothing else, so that running it tests the lowering. Every buffer is counted while
it lives, and every element when it is received from another device (`Account`). These counts are an independent
measurement to compare with what a plan promises and with what `lower.program_traffic` derives from the program.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple, cast, overload

import numpy as np
from numpy.typing import NDArray

from reshard.errors import NamedErrors, PlanError, TileError, name_arguments, quoted
from reshard.geometry.messages import list_held_copies
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange, ExchangeInPlace, Transfer, place_offsets
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    CastTiles,
    InParts,
    Instruction,
    Joint,
    PackedCollective,
    Permute,
    Program,
    PutPart,
    ReduceScatter,
    Reorder,
    Slice,
    SplitSum,
    TakePart,
    dtype_after,
    is_alias,
    join_launches,
    lower_batch,
    shape_of_part,
    transposing_cycles,
    wire_dtype,
)
from reshard.plans.plan import Plan, TreePlan
from reshard.plans.rules.split_steps import Cut, part_regions
from reshard.plans.rules.tile_view import TileView
from reshard.runtime.account import Account, InBytes, begin_account
from reshard.runtime.numpy_tiles import (
    checked_tiles,
    identities,
    numpy_dtype,
    tile_per_device,
    ufunc,
    with_padding,
    without_padding,
)
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.reductions import all_reduce_elements
from reshard.types.whole import checked_flag

Array = NDArray[Any]
Tiles = dict[int, Array]
Shape = Sequence[int]


@dataclass(frozen=True)
class Extras:
    """What a run needs beside the source's tiles: copies of the target's tiles that it fills, and the cast's scales.

    `beside` are other tiles that are there all the time: they are counted.

    Without `casts`, values stay as they are where a program casts: the prover's marks are counted, not converted.
    """

    into: Tiles = field(default_factory=dict[int, Array])
    beside: Mapping[int, Array] = field(default_factory=dict[int, Array])
    scale: Mapping[int, Any] = field(default_factory=dict[int, Any])
    casts: bool = True


NO_EXTRAS = Extras()


@overload
def simulate(
    plan: Plan,
    tiles: Mapping[int, Array],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[int, Array] | None = None,
    have: Mapping[int, Array] | None = None,
    scale: Any = None,
) -> Tiles: ...


@overload
def simulate(
    plan: TreePlan,
    tiles: Mapping[str, Mapping[int, Array]],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[str, Mapping[int, Array]] | None = None,
    scale: Mapping[str, Any] | None = None,
) -> dict[str, Tiles]: ...


@name_arguments
def simulate(
    plan: Plan | TreePlan,
    tiles: Mapping[Any, Any],
    memory: Account | None = None,
    *,
    padded: bool = True,
    into: Mapping[Any, Any] | None = None,
    have: Mapping[int, Array] | None = None,
    scale: Any = None,
) -> Tiles | dict[str, Tiles]:
    """Runs a plan on numpy arrays, all devices in this process; returns the target's tiles by device id.

    Tiles have their layout's tile shape, padding included, or `tile_shape_of(device)` without it, and its dtype. With
    `padded=False` the result has no padding either. The given tiles are not written to. `memory` is updated with the
    bytes live and received. A tree of plans takes {name of a source: {device id: tile}}, returns the same by names of
    targets, and takes a `memory` in bytes, `Account("uint8")`; `into` has the tiles of `tree.filled`, by name, and
    `scale` the scales of moves. For a plan of a `Move`, `into` has the target's tiles of which it fills a part, `have`
    the tiles that devices of the target hold already, as the plan says, and `scale` is what its cast divides by where
    it narrows, and multiplies by where it widens: a number, or by device id an array that broadcasts to the wider tile.
    Raises `TileError` for tiles that do not fit the source.

    >>> import numpy as np, reshard as rs
    >>> mesh = rs.Mesh(x=2)
    >>> plan = rs.plan(rs.Layout.parse("int64[{x}2]", mesh), rs.Layout.parse("int64[4]", mesh))
    >>> rs.simulate(plan, {0: np.array([0, 1]), 1: np.array([2, 3])})[1]
    array([0, 1, 2, 3])
    """
    padded = checked_flag(padded, "padded")
    if isinstance(plan, Plan):
        program, given = lower_plan(plan), _pad_tiles(plan.source, tiles)
        if (plan.holding is None) != (have is None):
            need = (
                "moves all that devices need" if plan.holding is None else f"counts on what devices hold, {plan.have}"
            )
            raise TileError(f"the move {plan.source} -> {plan.target} {need}; got have={quoted(have)}")
        # A plan that fills part of its target needs the target's tiles, and no other may be given any.
        wanted = plan.view is not None and plan.view.into and plan.holding is None
        if wanted != (into is not None):
            need = (
                "fills part of the target: give the target's tiles with into=" if wanted else "fills all of the target"
            )
            raise TileError(f"the move {plan.source} -> {plan.target} {need}; got into={quoted(into)}")
        extras = Extras(_copy_target_tiles(plan.target, into) if wanted else {})
        if plan.holding is not None:
            extras = hold_tiles(plan.holding.layout, plan.target, cast("Mapping[int, Array]", have))
        moved = run(program, given, memory, replace(extras, scale=_scale_by_device(plan, scale)))
        return moved if padded else _trim_padding(plan.target, moved)
    if not isinstance(plan, TreePlan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"{quoted(plan)} is a {type(plan).__name__}, not a plan; give what reshard.plan() returns")
    if have is not None:
        raise TileError("have= is of one move; what a tree holds of its targets is given by name, with into=")
    results = _run_tree(plan, tiles, {} if into is None else into, {} if scale is None else scale, memory)
    return results if padded else {name: _trim_padding(plan.target_layouts[name], results[name]) for name in results}


def _run_tree(tree: TreePlan, tiles: object, into: object, scale: object, memory: Account | None) -> dict[str, Tiles]:
    """Runs the batches of a tree; the tiles of its targets, by name."""
    sources = _tiles_by_name("tiles", tree.source_layouts, tiles)
    given = _tiles_by_name("into", {name: tree.target_layouts[name] for name in tree.filled}, into)
    scales = cast("Mapping[str, Any]", scale) if isinstance(scale, Mapping) else None
    if scales is None or any(name not in tree.plans for name in scales):
        raise TileError(
            f"scale {quoted(cast('object', scale))}: give a dict of scales by the names of the tree's moves"
        )
    account = begin_account("uint8", memory)  # Arrays differ in dtype, so that bytes are counted.

    def in_bytes(layout: Layout) -> InBytes:
        return InBytes(layout.dtype, account)

    for name, layout in tree.source_layouts.items():
        _take_tiles(in_bytes(layout), sources[name])
    results: dict[str, Tiles] = {}
    for name, layout in tree.target_layouts.items():
        results[name] = NewTiles(layout, in_bytes(layout))
        if name in given:
            _take_tiles(in_bytes(layout), given[name])
            results[name].update((device, tile.copy()) for device, tile in given[name].items())
    readers = Counter(tree.sources)
    shared = {source for source, count in readers.items() if count > 1}
    for batch in tree.batches:
        reads = Counter(tree.source_of[name] for name in batch.names)
        held: list[_Held] = []
        for name, plan in zip(batch.names, batch.plans, strict=True):
            source = tree.source_of[name]
            keep = not plan.donate or reads[source] < readers[source]
            fills = results[tree.target_of[name]] if plan.fills else {}
            more = Extras(fills, _scale_by_device(plan, scales.get(name)))
            held.append(_Held(sources[source], keep, more, source in shared))
        of_batch = in_bytes(batch.plans[0].source)
        made = _run_launches(lower_batch(batch), held, of_batch)
        account.launches += of_batch.launches
        for name, plan, moved in zip(batch.names, batch.plans, made, strict=True):
            if not plan.fills:
                results[tree.target_of[name]] = moved
        readers -= reads
    return {name: dict(tiles) for name, tiles in results.items()}


class _Held(NamedTuple):
    """What one array of a batch brings: its source's tiles, whether these stay, and whether others read them, too."""

    tiles: Tiles
    keep: bool
    more: Extras = NO_EXTRAS
    shared: bool = False


class NewTiles(dict[int, Array]):
    """The tiles of a target that is made by whichever move fills a part of it first."""

    def __init__(self, layout: Layout, memory: Account) -> None:
        super().__init__()
        self._layout, self._memory = layout, memory

    def __missing__(self, device: int) -> Array:
        tile = np.zeros(self._layout.tile_shape, numpy_dtype(self._layout.dtype))
        self._memory.take(device, tile.size)
        self[device] = tile
        return tile


def _pad_tiles(layout: Layout, tiles: object) -> Tiles:
    """The tiles of a layout with padding, given with or without it."""
    shapes = {device: (layout.tile_shape, layout.tile_shape_of(device)) for device in layout.mesh.devices}
    return {device: with_padding(layout, device, tile) for device, tile in tile_per_device(shapes, tiles).items()}


def _trim_padding(target: Layout, moved: Tiles) -> Tiles:
    return {device: without_padding(target, device, tile) for device, tile in moved.items()}


def _copy_target_tiles(target: Layout, into: object) -> Tiles:
    tiles = _pad_tiles(target, into)
    for device, tile in tiles.items():
        if tile.shape != target.tile_shape or tile.dtype.name != target.dtype:
            raise TileError(
                f"device {device}'s target tile is {tile.dtype.name}{list(tile.shape)}, and {target} has tiles "
                f"{list(target.tile_shape)}"
            )
    return {device: tile.copy() for device, tile in tiles.items()}


def hold_tiles(layout: Layout, target: Layout, have: Mapping[int, Array], device: int | None = None) -> Extras:
    """What devices hold already, as tiles of the target for a program to fill: each device copies its own.

    Only those of one device, if it is given.

    >>> from reshard.types import Mesh
    >>> layouts = [Layout.parse(text, Mesh(x=2)) for text in ("int64[{x}1]", "int64[2]")]
    >>> hold_tiles(*layouts, {0: np.array([5]), 1: np.array([6])}).into
    {0: array([5, 0]), 1: array([0, 6])}
    """
    if not isinstance(have, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TileError(f"have= is {quoted(have)}; give a dict with the tiles of {layout}, by device id")
    if layout == target:
        return Extras(_copy_target_tiles(target, have))
    # Of a layout on other devices, too, only those of the target matter.
    ends = target.mesh.devices if device is None else (device,)
    devices = [each for each in layout.mesh.devices if each in frozenset(ends)]
    shapes = {each: (layout.tile_shape, layout.tile_shape_of(each)) for each in devices}
    mine = {each: have[each] for each in devices if each in have}
    padded = {at: with_padding(layout, at, tile) for at, tile in tile_per_device(shapes, mine).items()}
    given = checked_tiles(devices, layout.tile_shape, layout.dtype, padded)
    into = {each: np.zeros(target.tile_shape, numpy_dtype(target.dtype)) for each in ends}
    for message in list_held_copies(layout, target, devices):
        at, blocks = message.receiver, tuple(message.blocks)
        flat = {at: np.ascontiguousarray(given[at]).reshape(-1)}
        _copy_transfer(Transfer(at, at, blocks), flat, {at: into[at].reshape(-1)}, {}, {})
    return Extras(into, given)


def _scale_by_device(plan: Plan, scale: object) -> Mapping[int, Any]:
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


def _tiles_by_name(what: str, layouts: Mapping[str, Layout], tiles: object) -> dict[str, Tiles]:
    """The tiles of some arrays with padding, each by device; errors name the array."""
    if not isinstance(tiles, Mapping):
        raise TileError(f"{what} are a {type(tiles).__name__}; give a dict with the tiles of each array, by its name")
    given = cast("Mapping[str, object]", tiles)
    missing = (name for name in layouts if name not in given)
    unknown = (name for name in given if name not in layouts)
    wrong = list(itertools.islice(itertools.chain(missing, unknown), 4))
    if wrong:
        raise TileError(
            f"{what} are given for {len(given)} arrays, and are needed for {len(layouts)}; {quoted(wrong)} are missing "
            f"or unknown; give the tiles of each array by its name"
        )
    live: dict[str, Tiles] = {}
    for name, layout in layouts.items():
        with NamedErrors(name):
            padded = _pad_tiles(layout, given[name])
            live[name] = checked_tiles(layout.mesh.devices, layout.tile_shape, layout.dtype, padded)
    return live


def run(program: Program, tiles: Mapping[int, Array], memory: Account | None = None, more: Extras = NO_EXTRAS) -> Tiles:
    """Runs a program on one tile for each device id; returns the result's tiles.

    The given tiles are never written to. Raises `TileError` for tiles that do not fit the program's source.

    >>> from reshard.lower import lower_plan
    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2)
    >>> program = lower_plan(plan(Layout.parse("int64[{x}1]", mesh), Layout.parse("int64[2]", mesh)))
    >>> run(program, {0: np.array([5]), 1: np.array([6])})
    {0: array([5, 6]), 1: array([5, 6])}
    """
    checked = checked_tiles(program.devices, program.tile_shape, program.dtype, tiles)
    memory = begin_account(program.dtype, memory)
    _take_tiles(memory, checked)
    # What a program fills is of the dtype that it ends with.
    ends = memory.dtype
    for each in program.instructions:
        ends = dtype_after(each, ends)
    for device, tile in (*more.into.items(), *more.beside.items()):
        memory.take(device, tile.size, ends)
    return _run_launches([program], [_Held(checked, program.keep_source, more)], memory)[0]


def _run_launches(programs: Sequence[Program], held: Sequence[_Held], memory: Account) -> list[Tiles]:
    """Runs the launches of one array or of several that share them; the sources are counted already.

    What is given may never be written to, nor returned as a result: `given` has, for each array, the tiles that still
    share memory with its source. A source that several of them read is freed by the last that goes on from it.
    """
    given, after = [each.tiles for each in held], [each.tiles for each in held]
    readers, extras = Counter(id(each.tiles) for each in held), [each.more for each in held]

    def leave_source(at: int, dtype: str) -> None:
        readers[id(held[at].tiles)] -= 1
        if not held[at].keep and not readers[id(held[at].tiles)]:
            for device, tile in held[at].tiles.items():
                memory.free(device, tile.size, dtype)

    for number, joint in enumerate(join_launches(programs)):
        before, dtype = after, memory.dtype
        steps = [one.instructions[number] for one in programs]
        shapes = [one.tile_shapes[number] for one in programs]
        after = _run_launch(joint, steps, before, shapes, memory, extras)
        for at, step in enumerate(steps):
            over = isinstance(step, ExchangeInPlace) or (isinstance(step, InParts) and step.in_place)
            if is_alias(step):  # The same memory in another shape: it is still the source's if it was before.
                given[at] = after[at] if before[at] is given[at] else given[at]
            elif before[at] is given[at] and not over:
                leave_source(at, dtype)
            elif not over:
                for device, tile in before[at].items():
                    memory.free(device, tile.size, dtype)
    copied = [at for at, tiles in enumerate(after) if tiles is given[at]]
    for at in copied:
        after[at] = {device: tile.copy() for device, tile in after[at].items()}
        if held[at].shared:
            _take_tiles(memory, after[at])
    for at in copied:
        if held[at].shared:
            leave_source(at, memory.dtype)
    return after


def _run_launch(
    joint: Joint | None,
    steps: Sequence[Instruction],
    before: Sequence[Tiles],
    shapes: Sequence[tuple[int, ...]],
    memory: Account,
    extras: Sequence[Extras],
) -> list[Tiles]:
    """One step of all arrays: together, or each array's own."""
    if isinstance(joint, PackedCollective):
        return _run_packed_launch(joint, before, shapes, memory)
    if joint is not None:
        return _run_exchanges(joint, before, shapes, memory, extras)
    dtype, after = memory.dtype, list[Tiles]()
    for step, tiles, shape, more in zip(steps, before, shapes, extras, strict=True):
        memory.cast(dtype)
        after.append(run_instruction(step, tiles, shape, memory, more))
    return after


def _run_packed_launch(
    step: PackedCollective, before: Sequence[Tiles], shapes: Sequence[tuple[int, ...]], memory: Account
) -> list[Tiles]:
    """Packs the blocks of all arrays side by side, moves them by one collective, and unpacks them."""
    packed: Tiles = {}
    for device in before[0]:
        tiles = [each[device] for each in before]
        if step.send:
            blocks = [number_tile_blocks(view, tile) for view, tile in zip(step.send, tiles, strict=True)]
            packed[device] = np.concatenate([each.reshape(len(each), -1) for each in blocks], axis=1).reshape(-1)
        else:
            packed[device] = np.concatenate([tile.reshape(-1) for tile in tiles])
    _take_tiles(memory, packed)
    views = step.receive
    size = sum(view.elements for view in views) or next(iter(packed.values())).size
    arrived = run_instruction(step.packed, packed, (size,), memory)
    for device, tile in packed.items():
        memory.free(device, tile.size)
    results = [dict[int, Array]() for _ in before]
    sizes = [view.elements // view.count for view in views] or [math.prod(shape) for shape in shapes]
    for device, tile in arrived.items():
        rows = tile.reshape(views[0].count if views else 1, sum(sizes))
        for at, part in enumerate(np.split(rows, np.cumsum(sizes)[:-1], axis=1)):
            whole = merge_tile_blocks(views[at], part) if views else part
            results[at][device] = whole.reshape(shapes[at]).copy()
            memory.take(device, whole.size)
        memory.free(device, tile.size)
    return results


def run_instruction(
    instruction: Instruction, tiles: Tiles, shape: Shape, memory: Account, more: Extras = NO_EXTRAS
) -> Tiles:
    """Runs one instruction on a tile for each device; returns the tiles after it, which have this shape."""
    if isinstance(instruction, Exchange):
        return _run_exchanges([instruction], [tiles], [shape], memory, [more])[0]
    if isinstance(instruction, PutPart | CastTiles):
        return _run_with_extras(instruction, tiles, shape, memory, more)
    return _RUN[type(instruction)](instruction, tiles, shape, memory)


def _run_local(step: Slice | SplitSum | TakePart | Reorder, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    """Every device makes its tile of its own; one that only has another shape stays where it is."""
    result: Tiles = {}
    for device, tile in tiles.items():
        match step:
            case Slice():
                content = merge_tile_blocks(step.receive, number_tile_blocks(step.send, tile)[step.block[device]])
            case SplitSum():
                blocks = identities(step.reduction, (step.receive.count, *step.receive.block_shape), tile.dtype)
                place = step.place[device]
                if place is not None:
                    kept = number_tile_blocks(step.send, tile)[step.keep[device]]
                    blocks[place] = kept.reshape(step.receive.block_shape)
                content = merge_tile_blocks(step.receive, blocks)
            case TakePart():
                content = tile[tuple(slice(start, start + extent) for start, extent in step.spans)]
            case Reorder():
                content = tile.reshape(step.order.digits).transpose(step.order.order)
        aliases = isinstance(step, Reorder) and step.order.aliases
        result[device] = tile.reshape(tuple(shape)) if aliases else _new_tile(memory, device, content, shape)
    return result


def _run_with_extras(step: PutPart | CastTiles, tiles: Tiles, shape: Shape, memory: Account, more: Extras) -> Tiles:
    """A part written into the target's tile, or a cast, perhaps by a scale."""
    result: Tiles = {}
    if isinstance(step, PutPart):
        for device, tile in tiles.items():
            result[device] = more.into[device].reshape(tuple(shape))
            result[device][tuple(slice(start, start + extent) for start, extent in step.spans)] = tile
        return result
    narrows = dtypes.bits(step.dtype) < dtypes.bits(memory.dtype)
    memory.cast(step.dtype)
    for device, tile in tiles.items():
        scale = more.scale.get(device)
        dtype = numpy_dtype(step.dtype) if more.casts else tile.dtype
        wide = tile.dtype if narrows else dtype
        factor = None if scale is None else _factor_of(device, tile, scale, wide)
        result[device] = scale_tile(tile, dtype, factor, narrows)
        memory.take(device, tile.size)
    return result


def _factor_of(device: int, tile: Array, scale: Any, dtype: np.dtype[Any] | None = None) -> Array:
    """The scale of a device's tile, broadcast to the tile; `TileError` if it does not fit."""
    try:
        return np.broadcast_to(np.asarray(scale, dtype or tile.dtype), tile.shape)
    except (ValueError, TypeError, MemoryError) as error:
        raise TileError(
            f"device {device}'s scale {quoted(scale)} does not fit its tile of shape {tile.shape}: {error}; give a "
            f"number, or an array that broadcasts to the tile"
        ) from None


def scale_tile(tile: Array, dtype: np.dtype[Any], scale: Any, narrows: bool) -> Array:
    """A tile cast, divided by a scale before where the dtype narrows, multiplied by it after where it widens.

    >>> scale_tile(np.array([2.0, 4.0]), np.dtype("float32"), 2, narrows=True)
    array([1., 2.], dtype=float32)
    """
    if scale is None:
        return tile.astype(dtype)
    if narrows:
        factor = np.broadcast_to(np.asarray(scale, tile.dtype), tile.shape)
        return (tile / factor).astype(dtype)
    wide = tile.astype(dtype)
    return wide * np.broadcast_to(np.asarray(scale, dtype), wide.shape)


def _run_gather(step: AllGather | AllToAll, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    """Every member receives the whole tiles of all, or from each the block of its own number."""
    memory.launches += 1
    result: Tiles = {}
    view, packs = step.receive, isinstance(step, AllToAll)
    for group in step.groups:
        sent = {at: _pack_blocks(memory, at, step.send, tiles[at]) if packs else tiles[at] for at in group}
        for to, device in enumerate(group):
            # What arrives is the result itself if blocks lie there in the same order.
            memory.take(device, view.elements)
            buffer = np.empty((view.count, *view.block_shape), tiles[device].dtype)
            for at, peer in enumerate(group):
                block = sent[peer][to] if packs else sent[peer]
                if device != peer:
                    memory.receive(device, block.size)
                buffer[at] = block.reshape(buffer.shape[1:])
            if packs:
                _free_packed(memory, device, step.send)
            if view.in_place:
                result[device] = buffer.reshape(tuple(shape))
            else:
                result[device] = _new_tile(memory, device, merge_tile_blocks(view, buffer), shape)
                memory.free(device, view.elements)
    return result


def _run_reduce_scatter(step: ReduceScatter, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        packed = {device: _pack_blocks(memory, device, step.send, tiles[device]) for device in group}
        for to, device in enumerate(group):
            total = _reduce_tile_parts(step.reduction, [packed[peer][to] for peer in group])
            result[device] = _new_tile(memory, device, merge_tile_blocks(step.receive, total), shape)
            memory.receive(device, (len(group) - 1) * packed[device][to].size)
            _free_packed(memory, device, step.send)
    return result


def _run_all_reduce(step: AllReduce, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for group in step.groups:
        total = _reduce_tile_parts(step.reduction, [tiles[peer] for peer in group])
        for device in group:
            result[device] = _new_tile(memory, device, total, shape)
            memory.receive(device, all_reduce_elements(total.size, len(group)))
    return result


def _run_permute(step: Permute, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    memory.launches += 1
    result: Tiles = {}
    for sender, receiver in step.pairs:
        if sender != receiver:
            memory.receive(receiver, tiles[sender].size)
        result[receiver] = _new_tile(memory, receiver, tiles[sender], shape)
    return result


def _run_exchanges(
    steps: Sequence[Exchange],
    before: Sequence[Tiles],
    shapes: Sequence[Shape],
    memory: Account,
    extras: Sequence[Extras],
) -> list[Tiles]:
    """The rounds of one exchange, or of several together: then each message holds the blocks of all arrays, packed."""
    results: list[Tiles] = []
    cast, was, wire = steps[0].dtype, memory.dtype, wire_dtype(memory.dtype, steps[0].dtype)
    memory.cast(cast or was)
    for step, tiles, shape, more in zip(steps, before, shapes, extras, strict=True):
        if step.fills:
            results.append({device: more.into[device].reshape(tuple(shape)) for device in step.receivers})
        else:
            dtype = next(iter(tiles.values())).dtype
            dtype = numpy_dtype(cast) if cast is not None and more.casts else dtype
            results.append({device: np.zeros(tuple(shape), dtype) for device in step.receivers})
            _take_tiles(memory, results[-1])

    def flat(tiles: Tiles) -> Tiles:
        """The tiles in row-major order; those that are so already are not copied, and share their memory."""
        return {device: np.ascontiguousarray(tile).reshape(-1) for device, tile in tiles.items()}

    sides: list[_Sides] = []
    for tiles, result, more in zip(before, results, extras, strict=True):
        # A scale belongs to the tiles of the wider dtype: those that are sent, or those that are filled.
        factors: Tiles = {}
        if cast is not None and more.scale:
            wide = tiles if wire != was else result
            factors = flat({d: _factor_of(d, tile, more.scale.get(d, 1)) for d, tile in wide.items()})
        none: Tiles = {}
        divisors, multipliers = (factors, none) if wire != was else (none, factors)
        sides.append((flat(tiles), flat(result), divisors, multipliers))
    for step, side in zip(steps, sides, strict=True):
        for transfer in step.local:
            _copy_transfer(transfer, *side)
    memory.cast(wire)
    _run_exchange_rounds(steps, sides, memory, len(steps) > 1 or steps[0].staged)
    memory.cast(cast or was)
    return results


_Sides = tuple[Tiles, Tiles, Tiles, Tiles]
"""Of one array: its flat tiles before and after, what divides the first, and what multiplies the second."""


def _run_exchange_rounds(steps: Sequence[Exchange], sides: Sequence[_Sides], memory: Account, staged: bool) -> None:
    """The messages of exchanges with the same rounds, launch by launch."""
    turns = list(zip(*(step.rounds for step in steps), strict=True))
    launches, gathers = steps[0].launches, steps[0].gathers
    for number in range(launches):
        memory.launches += 1
        # The last launch has all rounds in which groups gather: a device sends the same in each.
        gathered = gathers and number == launches - 1
        launch = turns[number:] if gathered else turns[number : number + 1]
        messages = [message for turn in launch for message in zip(*turn, strict=True)]
        # Both ends of all messages of a launch are live at once; what stays on its device crosses no wire.
        ends: list[tuple[int, int]] = []
        packed: dict[int, int] = {}
        for sender, receiver, size in ((m[0].sender, m[0].receiver, sum(t.elements for t in m)) for m in messages):
            if sender != receiver:
                memory.receive(receiver, size)
                ends += [(receiver, size)] if staged else []
                packed[sender] = size
        ends += packed.items() if staged else ()
        for end in ends:
            memory.take(*end)
        for message in messages:
            for transfer, side in zip(message, sides, strict=True):
                if transfer.blocks:  # Of the arrays of a message, some may have none, and no tile there.
                    _copy_transfer(transfer, *side)
        for end in ends:
            memory.free(*end)


def _copy_transfer(
    transfer: Transfer,
    flat: Mapping[int, Array],
    filled: Mapping[int, Array],
    divisors: Mapping[int, Array],
    factors: Mapping[int, Array],
) -> None:
    """Copies the blocks of a message from the sender's flat tile to the receiver's, cast where their dtypes differ:
    divided before by what belongs to the sender's tile, or multiplied after by what belongs to the receiver's."""
    source, target = (filled if transfer.relayed else flat)[transfer.sender], filled[transfer.receiver]
    for src, dst, axes in transfer.blocks:
        there = _stride_tile(target, dst, [(extent, stride) for extent, _, stride in axes])
        here = _stride_tile(source, src, [(extent, stride) for extent, stride, _ in axes])
        if transfer.sender in divisors:
            here = here / _stride_tile(divisors[transfer.sender], src, [axis[:2] for axis in axes])
        if transfer.receiver in factors:
            by = _stride_tile(factors[transfer.receiver], dst, [(extent, stride) for extent, _, stride in axes])
            here = here.astype(by.dtype) * by
        np.copyto(there, here, casting="unsafe")


def _stride_tile(flat: Array, place: int, axes: Sequence[tuple[int, int]]) -> Array:
    """The elements of one end of a block in a flat tile; raises `TileError` if some lie outside of it."""
    extents = [extent for extent, _ in axes]
    reaches = [(extent - 1) * stride for extent, stride in axes]
    first, last = (place + sum([end(reach, 0) for reach in reaches]) for end in (min, max))
    if math.prod(extents) and not 0 <= first <= last < flat.size:
        raise TileError(f"a block from {first} to {last} leaves a tile of {flat.size} elements")
    if not math.prod(extents):
        return np.empty(extents, flat.dtype)
    # `as_strided` knows no dtypes but numpy's own (a float8_e5m2 says that it is "<f1").
    steps = [stride * flat.itemsize for _, stride in axes]
    return np.ndarray(extents, flat.dtype, flat.view(np.uint8), place * flat.itemsize, steps)


def _run_in_parts(step: InParts, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    """One part after another; one part of the operand and one of the result live beside both tiles, or two each."""
    if step.in_place:
        return _run_parts_in_place(step, tiles, shape, memory)
    result: Tiles = {}
    for device, tile in tiles.items():
        memory.take(device, math.prod(shape))
        result[device] = np.empty(tuple(shape), tile.dtype)

    def parts_in_middle(cut: Cut, tile: Array) -> Array:
        """A view of a tile with its parts along axis 1, and everything before them as axis 0."""
        rest = tile.shape[cut.axis + 1 :]
        return tile.reshape(math.prod(tile.shape[: cut.axis]) * cut.outer, cut.parts, cut.inner, *rest)

    waiting: list[tuple[int, Tiles, Tiles]] = []
    for number in range(step.take.parts):
        parts: Tiles = {}
        for device, tile in tiles.items():
            part = parts_in_middle(step.take, tile)[:, number]
            parts[device] = _new_tile(memory, device, part, shape_of_part(step.take, tile.shape))
        moved = run_instruction(step.each, parts, shape_of_part(step.put, shape), memory)
        waiting.append((number, parts, moved))
        # Where parts overlap, each is written while the next one is on its way; nothing follows the last.
        ready = 0 if step.overlap and number == 0 else 1 if number + 1 < step.take.parts else len(waiting)
        for at, before, after in waiting[:ready]:
            for device, part in after.items():
                place = parts_in_middle(step.put, result[device])[:, at]
                place[...] = part.reshape(place.shape)
                memory.free(device, part.size + before[device].size)
        del waiting[:ready]
    return result


# Steps that overwrite their operand: exchanges slot by slot, and steps whose parts take each other's place. A copy of
# the given tile stands for its own memory. It is counted once, and nothing else is as large.


def _run_exchange_in_place(step: ExchangeInPlace, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    """One buffer a device holds the operand, then the result; only its slots are ever written."""
    size = step.slot * step.slots

    def offsets(places: Sequence[tuple[int, Any]], view: TileView) -> dict[int, int]:
        """Offset in the buffer -> offset in the tile, for every element that some slot holds."""
        source: dict[int, int] = {}
        for slot, place in places:
            source.update(enumerate(place_offsets(view, place), slot * step.slot))
        return source

    def piece(slot: int, start: int, length: int) -> slice:
        return slice(slot * step.slot + start, slot * step.slot + start + length)

    buffers: Tiles = {}
    for device, tile in tiles.items():
        memory.free(device, tile.size)
        memory.take(device, max(size, tile.size))
        buffers[device] = np.resize(tile.reshape(-1), max(size, tile.size))
        rearrange_cells(buffers[device], offsets(step.pack[device], step.send))
    for turn in step.rounds:
        memory.launches += 1
        ends = [(device, t.length) for t in turn for device in (t.sender, t.receiver)] if step.staged else []
        for end in ends:
            memory.take(*end)
        # All slots are read before any is written, as if the messages crossed.
        in_flight = [buffers[t.sender][piece(t.src_slot, t.start, t.length)].copy() for t in turn]
        for t, content in zip(turn, in_flight, strict=True):
            memory.receive(t.receiver, t.length)
            buffers[t.receiver][piece(t.dst_slot, t.start, t.length)] = content
        for device, length in ends:
            memory.free(device, length)
    result: Tiles = {}
    count = math.prod(shape)
    for device, buffer in buffers.items():
        rearrange_cells(buffer, {to: at for at, to in offsets(step.unpack[device], step.receive).items()})
        result[device] = buffer[:count].reshape(tuple(shape))
        memory.free(device, buffer.size)
        memory.take(device, count)
    return result


def rearrange_cells(buffer: Array, source: Mapping[int, int]) -> None:
    """Assigns buffer[to] = buffer[source[to]] for all `to` at once, in place.

    It follows each chain of assignments from its end, and each cycle from anywhere, with one cell set aside.

    >>> buffer = np.array([5, 6, 7])
    >>> rearrange_cells(buffer, {0: 1, 1: 0})
    >>> buffer
    array([6, 5, 7])
    """
    readers = {at: to for to, at in source.items()}
    starts = [to for to in source if to not in readers] + list(source)
    done: set[int] = set()
    for start in starts:
        if start in done or source.get(start) == start:
            continue
        held, at = np.copy(buffer[start]), start
        while at in source and at not in done:
            done.add(at)
            origin = source[at]
            buffer[at] = held if origin == start else buffer[origin]
            at = origin


def _run_parts_in_place(step: InParts, tiles: Tiles, shape: Shape, memory: Account) -> Tiles:
    """One buffer a device holds the operand, then the result; parts are cut out of it and written over each other."""
    before = next(iter(tiles.values())).shape
    where = part_regions(before, step.take, shape, step.put)
    buffers = {device: tile.reshape(-1).copy() for device, tile in tiles.items()}

    def transpose_slots(rows: int, columns: int) -> None:
        """Transposes (outer, rows, columns) slots of each buffer to (outer, columns, rows), with one slot in hand."""
        stops = list(itertools.chain(*transposing_cycles(rows, columns)))
        for device, buffer in buffers.items() if stops else ():
            each = buffer.reshape(where.outer, rows * columns, -1)
            hand = np.empty_like(each[:, 0])
            memory.take(device, hand.size)
            for at in stops:
                taken = each[:, at].copy()
                each[:, at], hand = hand, taken
            memory.free(device, hand.size)

    transpose_slots(where.before, where.parts)
    for number in range(where.parts):
        places = {device: buffer.reshape(where.outer, where.parts, -1)[:, number] for device, buffer in buffers.items()}
        parts: Tiles = {}
        for device, place in places.items():
            parts[device] = _new_tile(memory, device, place, shape_of_part(step.take, before))
        for device, part in run_instruction(step.each, parts, shape_of_part(step.put, shape), memory).items():
            places[device][...] = part.reshape(places[device].shape)
            memory.free(device, part.size + parts[device].size)
    transpose_slots(where.parts, where.after)
    return {device: buffer.reshape(tuple(shape)) for device, buffer in buffers.items()}


_RUN: dict[type[Instruction], Callable[[Any, Tiles, Shape, Account], Tiles]] = {
    Slice: _run_local,
    SplitSum: _run_local,
    TakePart: _run_local,
    Reorder: _run_local,
    AllGather: _run_gather,
    AllToAll: _run_gather,
    ReduceScatter: _run_reduce_scatter,
    AllReduce: _run_all_reduce,
    Permute: _run_permute,
    ExchangeInPlace: _run_exchange_in_place,
    InParts: _run_in_parts,
}


# Tiles, their buffers, and their blocks by the `TileView` that an instruction gives.
#
# view of tile (4, 4), digits (4, 2, 2), blocks (1,)     numbered: 2 blocks of (4, 2)


def _take_tiles(memory: Account, tiles: Tiles) -> None:
    for device, tile in tiles.items():
        memory.take(device, tile.size)


def _new_tile(memory: Account, device: int, content: Array, shape: Shape) -> Array:
    memory.take(device, content.size)
    return content.reshape(tuple(shape)).copy()


def _pack_blocks(memory: Account, device: int, view: TileView, tile: Array) -> Array:
    """The blocks one after another; the tile itself, which costs no memory, if they lie so already."""
    if not view.in_place:
        memory.take(device, view.elements)
    return np.ascontiguousarray(number_tile_blocks(view, tile))


def _free_packed(memory: Account, device: int, view: TileView) -> None:
    if not view.in_place:
        memory.free(device, view.elements)


def _reduce_tile_parts(reduction: str, parts: Sequence[Array]) -> Array:
    total = reduce(ufunc(reduction), parts)
    return total / np.asarray(len(parts), total.dtype) if reduction == "mean" else total


def number_tile_blocks(view: TileView, tile: Array) -> Array:
    """The blocks of a tile, padded, numbered along a new first axis; a view of the tile where numpy can make one."""
    if view.tile != view.padded:
        tile = np.pad(tile, [(0, p - t) for t, p in zip(view.tile, view.padded, strict=True)])
    rest = [axis for axis in range(len(view.digits)) if axis not in view.blocks]
    return tile.reshape(view.digits).transpose(*view.blocks, *rest).reshape(view.count, *view.block_shape)


def merge_tile_blocks(view: TileView, blocks: Array) -> Array:
    """The tile that numbered blocks make up, cut to its true shape."""
    order = [*view.blocks, *(axis for axis in range(len(view.digits)) if axis not in view.blocks)]
    spread = blocks.reshape([view.digits[axis] for axis in order])
    whole = spread.transpose(np.argsort(order)).reshape(view.padded)
    return whole[tuple(slice(extent) for extent in view.tile)]
