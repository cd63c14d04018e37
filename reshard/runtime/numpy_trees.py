"""Trees of plans on the reference runtime: batch after batch, all sources and all targets counted.

A batch runs as it is lowered: blocks are packed side by side, one collective moves them, and they are unpacked. The
account counts bytes, because arrays differ in dtype; every buffer is counted while it lives, as in `on_numpy`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from reshard.errors import TileError, quoted
from reshard.lower import lower_plan
from reshard.lower.batch import JointExchange, PackedCollective, lower_batch
from reshard.lower.program import Instruction, Program
from reshard.runtime.account import Account, InBytes, begin_account
from reshard.runtime.given_tiles import tile_per_device, with_padding, without_padding
from reshard.runtime.numpy_in_place import overwrites
from reshard.runtime.numpy_tiles import closed, copy_boxes, numbered, opened
from reshard.runtime.on_numpy import run, run_instruction
from reshard.types.batch import Batch
from reshard.types.layout import Layout
from reshard.types.plan import Plan
from reshard.types.plan_tree import TreePlan
from reshard.types.rules.tile_view import TileView

Array = NDArray[Any]
Tiles = dict[int, Array]


def simulate_tree(
    tree: TreePlan, tiles: Mapping[str, Mapping[int, Array]], memory: Account | None = None, *, padded: bool = True
) -> dict[str, Tiles]:
    """Runs the plans of a tree on numpy arrays, all devices in this process: {name: {device id: tile}}.

    Tiles are as in `simulate`, and so is `padded`. `memory`, an account of dtype "uint8", is updated with the bytes
    live and received. Raises `TileError` for tiles that do not fit.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("int64[{x}1]", "int64[2]"))
    >>> tree = rs.plan_tree({"a": (rows, whole), "b": (rows, whole)})
    >>> tiles = {"a": {0: np.array([1]), 1: np.array([2])}, "b": {0: np.array([3]), 1: np.array([4])}}
    >>> {name: moved[0].tolist() for name, moved in simulate_tree(tree, tiles).items()}
    {'a': [1, 2], 'b': [3, 4]}
    """
    live = _checked(tree, tiles)
    account = begin_account("uint8", memory)
    for name, plan in tree.plans.items():
        _take(InBytes(plan.source.dtype, account), live[name])
    for batch in tree.batches:
        moved = _run_batch(batch, [live[name] for name in batch.names], account)
        live.update(zip(batch.names, moved, strict=True))
    if padded:
        return live
    targets = {name: plan.target for name, plan in tree.plans.items()}
    return {name: {d: without_padding(targets[name], d, tile) for d, tile in by.items()} for name, by in live.items()}


def _checked(tree: TreePlan, tiles: object) -> dict[str, Tiles]:
    """The tiles of all arrays with padding, each by device."""
    if not isinstance(tiles, Mapping):
        raise TileError(f"tiles are a {type(tiles).__name__}; give a dict with the tiles of each array, by its name")
    given = cast("Mapping[str, object]", tiles)
    missing = (name for name in tree.names if name not in given)
    unknown = (name for name in given if name not in tree.plans)
    wrong = list(itertools.islice(itertools.chain(missing, unknown), 4))
    if wrong:
        raise TileError(
            f"tiles are given for {len(given)} arrays, the tree has {len(tree.names)}; {quoted(wrong)} are missing "
            f"or unknown; give the tiles of each array by its name"
        )
    return {name: _of_layout(name, plan.source, given[name]) for name, plan in tree.plans.items()}


def _of_layout(name: str, layout: Layout, tiles: object) -> Tiles:
    shapes = {device: (layout.tile_shape, layout.tile_shape_of(device)) for device in layout.mesh.devices}
    try:
        checked = {d: with_padding(layout, d, tile) for d, tile in tile_per_device(shapes, tiles).items()}
    except TileError as error:
        raise TileError(f"{name}: {error}") from None
    for device, tile in checked.items():
        if tile.shape != layout.tile_shape or tile.dtype.name != layout.dtype:
            raise TileError(
                f"{name}: device {device}'s tile has shape {tile.shape} and dtype {tile.dtype.name}, the source's "
                f"tiles have {layout.tile_shape} and {layout.dtype}"
            )
    return checked


def _take(memory: Account, tiles: Tiles) -> None:
    for device, tile in tiles.items():
        memory.take(device, tile.size)


def _free(memory: Account, tiles: Tiles) -> None:
    for device, tile in tiles.items():
        memory.free(device, tile.size)


def _run_batch(batch: Batch, sources: list[Tiles], account: Account) -> list[Tiles]:
    """The tiles of a batch's targets; sources are already counted, and freed if they are donated."""
    memory = InBytes(batch.plans[0].source.dtype, account)
    if len(batch.plans) == 1:
        return [_run_alone(batch.plans[0], sources[0], memory, account)]
    lowered = lower_batch(batch)
    tiles = sources
    for number, joint in enumerate(lowered.joint):
        before = tiles
        steps = [program.instructions[number] for program in lowered.programs]
        shapes = [program.tile_shapes[number] for program in lowered.programs]
        memory.launches = 0
        if joint is None:
            tiles = [run_instruction(*each, memory) for each in zip(steps, before, shapes, strict=True)]
            memory.launches = memory.launches // len(steps)
        elif isinstance(joint, JointExchange):
            tiles = _exchanged(joint, before, shapes, memory)
        else:
            tiles = _packed_and_moved(joint, before, shapes, memory)
        account.launches += memory.launches
        _free_operands(lowered.programs, steps, before, before is sources, memory)
    if tiles is sources:
        return [{device: tile.copy() for device, tile in by.items()} for by in sources]
    return tiles


def _run_alone(plan: Plan, tiles: Tiles, memory: Account, account: Account) -> Tiles:
    """One array as `on_numpy` runs it, which counts its source again."""
    _free(memory, tiles)
    moved = run(lower_plan(plan), tiles, memory)
    account.launches += memory.launches
    return moved


def _free_operands(
    programs: Sequence[Program], steps: Sequence[Instruction], before: Sequence[Tiles], first: bool, memory: Account
) -> None:
    for program, step, tiles in zip(programs, steps, before, strict=True):
        if not overwrites(step) and not (first and program.keep_source):
            _free(memory, tiles)


def _packed_and_moved(
    step: PackedCollective, before: Sequence[Tiles], shapes: Sequence[tuple[int, ...]], memory: Account
) -> list[Tiles]:
    """Packs the blocks of all arrays, moves them by one collective, and unpacks them."""
    packed = {device: _packed(step.send, [tiles[device] for tiles in before]) for device in before[0]}
    _take(memory, packed)
    size = sum(view.elements for view in step.receive) or next(iter(packed.values())).size
    arrived = run_instruction(step.packed, packed, (size,), memory)
    _free(memory, packed)
    results = [dict[int, Array]() for _ in before]
    for device, tile in arrived.items():
        for result, part in zip(results, _unpacked(step.receive, tile, shapes), strict=True):
            result[device] = part
            memory.take(device, part.size)
    _free(memory, arrived)
    return results


def _packed(views: Sequence[TileView], tiles: Sequence[Array]) -> Array:
    """The blocks of the same number side by side, number after number; whole tiles if there are no views."""
    if not views:
        return np.concatenate([tile.reshape(-1) for tile in tiles])
    blocks = [numbered(view, opened(view, tile)) for view, tile in zip(views, tiles, strict=True)]
    return np.concatenate([each.reshape(len(each), -1) for each in blocks], axis=1).reshape(-1)


def _unpacked(views: Sequence[TileView], packed: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    sizes = [view.elements // view.count for view in views] or [int(np.prod(shape)) for shape in shapes]
    rows = packed.reshape(views[0].count if views else 1, sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    if not views:
        return [part.reshape(shape).copy() for part, shape in zip(parts, shapes, strict=True)]
    closed_parts = [closed(view, part.copy()) for view, part in zip(views, parts, strict=True)]
    return [part.reshape(shape).copy() for part, shape in zip(closed_parts, shapes, strict=True)]


def _exchanged(
    step: JointExchange, before: Sequence[Tiles], shapes: Sequence[tuple[int, ...]], memory: Account
) -> list[Tiles]:
    """The rounds of all exchanges together; each message holds the boxes of all arrays, packed one after another."""
    dtype = next(iter(before[0].values())).dtype
    results = [
        {device: np.zeros(shape, dtype) for device in one.receivers}
        for one, shape in zip(step.each, shapes, strict=True)
    ]
    for result in results:
        _take(memory, result)
    sides = [
        (_views(one.send, tiles), _views(one.receive, result))
        for one, tiles, result in zip(step.each, before, results, strict=True)
    ]
    for one, (source, target) in zip(step.each, sides, strict=True):
        for transfer in one.local:
            copy_boxes(transfer, source, target)
    for turn in zip(*(one.rounds for one in step.each), strict=True):
        memory.launches += 1
        _turn(turn, sides, memory)
    return results


def _views(view: TileView, tiles: Tiles) -> Tiles:
    return {device: tile.reshape(view.digits) for device, tile in tiles.items()}


def _turn(turn: Sequence[Any], sides: Sequence[tuple[Tiles, Tiles]], memory: Account) -> None:
    """One round: both ends of all messages are live at once."""
    ends: list[tuple[int, int]] = []
    for transfers in zip(*turn, strict=True):
        sender, receiver = transfers[0].sender, transfers[0].receiver
        elements = sum(transfer.elements for transfer in transfers)
        if sender != receiver:
            memory.receive(receiver, elements)
            ends += [(sender, elements), (receiver, elements)]
    for end in ends:
        memory.take(*end)
    for transfers in zip(*turn, strict=True):
        for transfer, (source, target) in zip(transfers, sides, strict=True):
            copy_boxes(transfer, source, target)
    for end in ends:
        memory.free(*end)
