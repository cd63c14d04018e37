"""A load into the tiles of one process, which has all devices: what one tile has, another copies, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.messages import exchange_messages
from reshard.lower.to_mpi.tile_blocks import multiply_factors
from reshard.plans.load_plan import LoadPlan, Wave
from reshard.plans.plan import TreePlan
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_files.engine import CheckpointReader, WantedTiles
from reshard.runtime.on_files.reader_thread import (
    ALIGNED,
    Progress,
    ReaderThread,
    gathered_name,
    list_staged,
    longest_buffers,
    place_staged,
    view_direct_tile,
    view_staged_tile,
)
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, view_as_words, view_block
from reshard.types.layout import Layout
from reshard.types.view import View

Array = NDArray[Any]
Tiles = dict[int, Array]


def fill_targets(
    source: Layout, tiles: Mapping[int, Array], target: Layout, into: Mapping[int, Array], view: View | None = None
) -> None:
    """Copies what the tiles of a target want out of those of a source, all in this process; casts where dtypes differ.

    Tiles have their layouts' padding. Of several tiles that have an element, the receiver's own is read, or any.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}1, 2]", mesh), Layout.parse("f64[2, {x}1]", mesh)
    >>> into = {device: np.empty((2, 1)) for device in (0, 1)}
    >>> fill_targets(rows, {0: np.array([[1, 2]], "f4"), 1: np.array([[3, 4]], "f4")}, columns, into)
    >>> into[1].tolist()
    [[2.0], [4.0]]
    """
    casts = source.dtype != target.dtype
    viewed = None if view is None or view.plain else view
    for message in exchange_messages(source, target, viewed):
        before, after = tiles[message.sender], into[message.receiver]
        if not casts:
            before, after = view_as_words(before), view_as_words(after)
        folded = (block for product in message.products for block in multiply_factors(product))
        for block in folded if viewed is None else message.blocks:
            pair = view_block(after, block, "dst"), view_block(before, block, "src")
            if casts:
                np.copyto(*pair, casting="unsafe")
            else:
                copy_view(*pair)


def load_in_process(plan: LoadPlan, reader: CheckpointReader, progress: Progress) -> dict[str, Tiles]:
    """Reads and moves all waves of a plan; the tiles of its targets, by name and device."""
    results: dict[str, Tiles] = {}
    for name, layout in plan.targets.items():
        new = np.empty if layout.even else np.zeros
        results[name] = {at: new(layout.tile_shape, numpy_dtype(layout.dtype)) for at in layout.mesh.devices}
    devices = max((reading.layout.mesh.size for wave in plan.waves for reading in wave.readings), default=1)
    length = longest_buffers(plan, devices)
    buffers = [np.empty(length, np.uint8) for _ in range(min(2, len(plan.waves)))]

    # Tiles of all devices lie in a buffer, one device behind another, as those of one do in a rank's.
    def place_wave(number: int) -> tuple[dict[str, Tiles], list[WantedTiles]]:
        """Where the tiles of a wave lie, by name, and where its readings are read to."""
        wave = plan.waves[number]
        staged = list_staged(wave)
        places, _ = place_staged(staged, devices)
        tiles: dict[str, Tiles] = {}
        for name, layout in staged.items():
            step = -(-layout.tile_bytes // ALIGNED) * ALIGNED
            tiles[name] = {
                device: view_staged_tile(buffers[number % 2], places[name] + at * step, layout)
                for at, device in enumerate(layout.mesh.devices)
            }
        straight = {direct.reading: direct for direct in wave.direct}
        wanted: list[WantedTiles] = []
        for reading in wave.readings:
            if (direct := straight.get(reading.name)) is None:
                wanted.append((reading, tiles[reading.name]))
                continue
            shape, into = reading.layout.tile_shape, results[direct.target]
            views = {at: view_direct_tile(into[at], direct.box, shape) for at in reading.layout.mesh.devices}
            wanted.append((reading, views))
        return tiles, wanted

    with reader, ReaderThread(reader) as thread:
        following = place_wave(0) if plan.waves else None
        if following is not None:
            thread.start(following[1])
        for number, wave in enumerate(plan.waves):
            staged = {} if following is None else following[0]
            thread.wait()
            if number + 1 < len(plan.waves):
                following = place_wave(number + 1)
                thread.start(following[1])
            for tree in wave.trees:
                _move_tree_in_process(wave, tree, staged, results)
            progress(reader.counts.bytes)
    return results


def _move_tree_in_process(
    wave: Wave, tree: TreePlan, staged: Mapping[str, Tiles], results: Mapping[str, Tiles]
) -> None:
    """The moves of one tree of a wave, into targets and gathered packs."""
    packs = {reading.name for reading in wave.readings if reading.packed}
    sources: dict[str, Tiles] = dict(staged)
    if tree is wave.split_tree:
        sources = {}
        for reading in wave.readings:
            for name, start in reading.packed:
                if name in tree.source_layouts:
                    shape = tree.source_layouts[name].tile_shape
                    stop = start + int(np.prod(shape))
                    whole = staged[gathered_name(reading.name)]
                    sources[name] = {at: tile[start:stop].reshape(shape) for at, tile in whole.items()}
    for name, plan in tree.plans.items():
        target = tree.target_of[name]
        into = staged[gathered_name(target)] if target in packs and tree is wave.tree else results[target]
        fill_targets(plan.source, sources[tree.source_of[name]], plan.target, into, plan.view)
