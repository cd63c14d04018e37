"""A load into the tiles of one process, which has all devices: what one tile has, another copies, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.holders import tile_of
from reshard.plans.load_plan import LoadPlan, Wave
from reshard.plans.plan import TreePlan
from reshard.runtime.on_files.engine import CheckpointReader, WantedTiles
from reshard.runtime.on_files.host_moves import copy_tile, list_process_copies
from reshard.runtime.on_files.reader_thread import (
    ALIGNED,
    Progress,
    ReaderThread,
    gathered_name,
    list_staged_layouts,
    longest_buffers,
    place_staged,
    view_direct_tile,
    view_staged_tile,
)
from reshard.runtime.on_files.result_memory import ResultMemory
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, view_as_words

Array = NDArray[Any]
Tiles = dict[int, Array]


def load_in_process(plan: LoadPlan, reader: CheckpointReader, progress: Progress) -> dict[str, Tiles]:
    """Reads and moves all waves of a plan; the tiles of its targets, by name and device."""
    results: dict[str, Tiles] = {}
    every = {(name, device): layout for name, layout in plan.targets.items() for device in layout.mesh.devices}
    memory = ResultMemory(every)
    for name, device in every:
        results.setdefault(name, {})[device] = memory.make_tile((name, device))
    length = longest_buffers(plan, together=True)
    buffers = [np.empty(length, np.uint8) for _ in range(min(2, len(plan.waves)))]

    # Tiles of all devices lie in a buffer, one device behind another, as those of one do in a rank's.
    def place_wave(number: int) -> tuple[dict[str, Tiles], list[WantedTiles]]:
        """Where the tiles of a wave lie, by name, and where its readings are read to."""
        wave = plan.waves[number]
        staged = list_staged_layouts(wave)
        places, _ = place_staged(staged, together=True)
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
        placed: list[dict[str, Tiles]] = []
        for number, wave in enumerate(plan.waves):
            # A buffer is read to again as soon as its wave has moved.
            for ahead in range(len(placed), min(number + 2, len(plan.waves))):
                staged, wanted = place_wave(ahead)
                placed.append(staged)
                thread.start(wanted)
            thread.wait()
            for tree in wave.trees:
                _move_tree_in_process(wave, tree, placed[number], results)
            progress(reader.counts.bytes)
    # Devices that replicate a tile have a copy each, of the one that moves have filled.
    for name in {target for wave in plan.waves for tree in wave.trees for target in tree.target_layouts} & {*results}:
        first: dict[object, Array] = {}
        for device, tile in results[name].items():
            twin = first.setdefault(tile_of(plan.targets[name], device), tile)
            if twin is not tile:
                copy_view(view_as_words(tile), view_as_words(twin))
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
        before, ends = sources[tree.source_of[name]], (plan.source, plan.target, plan.view)
        every = sorted({*plan.source.mesh.devices, *plan.target.mesh.devices})
        for copy in list_process_copies(*ends, tuple((device, 0) for device in every)):
            copy_tile(copy, before[copy.sender], into[copy.receiver])
