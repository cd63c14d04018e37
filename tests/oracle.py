"""The oracle of the tests: tiles filled with global indices, and the tiles that a layout's meaning demands.

    f32[{x}3/5] on <x=2>       device 0: 0 1 2       device 1: 3 4 PADDING

The tiles are built on `types.meaning` alone, and on purpose share no code with the shipped oracle
(`reshard.runtime.oracle`): that one is tested against this one, and a mistake common to both could hide the same
mistake in a runtime.

Padding is filled with a value that no element has, and is never compared. The summands of a partial array differ from
device to device and combine to the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

import reshard as rs
from reshard.geometry.refine import refine
from reshard.lower import Program, lower_plan
from reshard.runtime import Account, run
from reshard.types import Layout
from reshard.types.meaning import meaning

PADDING = -7


def tiles_of(layout: Layout) -> dict[int, np.ndarray]:
    """By device, the global index of every element of its tile, `PADDING` where there is none."""
    cache: dict[tuple, np.ndarray] = {}
    tiles = {}
    for device in layout.mesh.devices:
        index = meaning(layout, device)
        if index not in cache:
            cache[index] = _tile(layout, index)
        tiles[device] = cache[index]
    return tiles


def _tile(layout: Layout, index: tuple[tuple[int, ...], ...]) -> np.ndarray:
    flat = np.zeros(layout.tile_shape, np.int64)
    valid = np.ones(layout.tile_shape, bool)
    for axis, (size, along) in enumerate(zip(layout.shape, index, strict=True)):
        shape = [1] * flat.ndim
        shape[axis] = len(along)
        at = np.asarray(along, np.int64).reshape(shape)
        flat = flat * size + at
        valid &= at < size
    return np.where(valid, flat, PADDING)


def summands_of(layout: Layout) -> dict[int, np.ndarray]:
    """Tiles of a partial array whose summands combine to the global index.

    One summand has what the others lack: for a sum or a mean, the index and minus what the others add; for a maximum
    or a minimum, the index among worse values; for a product, the index among ones.
    """
    tiles = {}
    groups: Counter = Counter()
    sizes = [axis.size for axis in layout.partial]
    for device, tile in tiles_of(layout).items():
        coordinates = layout.mesh.coordinates(layout.mesh.position(device), layout.partial)
        number = int(np.ravel_multi_index(coordinates, sizes)) if sizes else 0
        groups[number] += 1
        tiles[device] = _summand(layout.reduction, tile, number, int(np.prod(sizes)))
    assert len(set(groups.values())) == 1
    return tiles


def _summand(reduction: str | None, tile: np.ndarray, number: int, count: int) -> np.ndarray:
    if reduction in ("sum", "mean"):
        scale = count if reduction == "mean" else 1
        rest = tile * scale - sum(range(1, count)) - 3 * tile * (count - 1)
        return rest if number == 0 else 3 * tile + number
    if reduction == "product":
        return tile if number == 0 else np.ones_like(tile)
    worse = -1000 if reduction == "max" else 1000
    return tile if number == count - 1 else tile + worse - number


def source_tiles(plan: rs.Plan) -> dict[int, np.ndarray]:
    """The tiles to run a plan on, of the source's dtype."""
    tiles = summands_of(plan.source) if plan.source.partial else tiles_of(plan.source)
    return {device: tile.astype(plan.source.dtype) for device, tile in tiles.items()}


def check_target(plan: rs.Plan, result: Mapping[int, np.ndarray]) -> None:
    """Asserts that every device ends with what the target means."""
    target, wanted = plan.target, tiles_of(plan.target)
    assert set(result) == set(target.mesh.devices), f"tiles of {sorted(result)}"
    for device, tile in result.items():
        assert tile.shape == target.tile_shape, f"device {device}: shape {tile.shape}"
        assert tile.dtype == np.dtype(target.dtype), f"device {device}: dtype {tile.dtype}"
    for device, tile in finished(target, result).items():
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device].astype(target.dtype)[real]), f"device {device} of {plan}"


def check(plan: rs.Plan, program: Program | None = None) -> Account:
    """Runs a plan on indices and asserts that every device ends with what the target means, that traffic and memory
    are exactly as promised, and that the given tiles were not written to.

    Less than promised is right in two cases. An exchange of boxes may need less memory, because its largest message
    may not involve the fullest device. And if two steps load devices unevenly, each may have another busiest
    device, so that none receives the sum of the two; so it is with the steps before and after a crossing.
    """
    given = source_tiles(plan)
    kept = {device: tile.copy() for device, tile in given.items()}
    memory = Account(plan.source.dtype)
    check_target(plan, run(program or lower_plan(plan), given, memory))
    for device, tile in given.items():
        assert np.array_equal(tile, kept[device]), f"device {device}'s source was written to"
    assert memory.received_bytes <= plan.received_bytes, f"{memory.received_bytes} received: {plan}"
    one_crossing = len(plan.steps) == 1 or not plan.crosses
    if one_crossing and sum(step.kind in ("permute", "exchange") for step in plan.steps) < 2:
        assert memory.received_bytes == plan.received_bytes, f"{memory.received_bytes} received, not all: {plan}"
    assert memory.launches == plan.launches, f"{memory.launches} launches: {plan}"
    assert memory.peak_bytes <= plan.peak_bytes, f"{memory.peak_bytes} live: {plan}"
    if not any(of_boxes(step) for step in plan.steps):
        assert memory.peak_bytes == plan.peak_bytes, f"{memory.peak_bytes} live, promised more: {plan}"
    return memory


def finished(layout: Layout, tiles: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The tiles of a partial array, combined over the devices that hold its summands."""
    groups: dict[int, list[int]] = {}
    for device in layout.mesh.devices:
        first = layout.mesh.position(device)
        for axis in layout.partial:
            first -= layout.mesh.coordinate(first, axis) * layout.mesh.stride(axis)
        groups.setdefault(first, []).append(device)
    return {
        device: _combined(layout.reduction, [tiles[d] for d in group]) for group in groups.values() for device in group
    }


def _combined(reduction: str | None, parts: list[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    stack = np.stack(parts)
    match reduction:
        case "mean":
            return stack.mean(axis=0)
        case "sum":
            return stack.sum(axis=0)
        case "product":
            return stack.prod(axis=0)
        case "max":
            return stack.max(axis=0)
        case _:
            return stack.min(axis=0)


def of_boxes(step: rs.Step) -> bool:
    """Whether a step is an exchange of boxes, between layouts without an exact common refinement."""
    refinement = refine(step.operand, step.result)
    return step.kind == "exchange" and (refinement is None or not refinement.exact)
