"""The oracle: tiles filled with global indices, and the tiles that a layout's meaning demands.

Built on `types.meaning` alone. Padding is filled with a value that no element has, and is never
compared; a partial array's summands differ from device to device and combine to the index.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

import reshard as rs
from reshard.lower import Program, lower
from reshard.runtime import Account, run
from reshard.types import Layout
from reshard.types.meaning import meaning
from reshard.types.pair.refine import refine

PADDING = -7


def tiles_of(layout: Layout) -> dict[int, np.ndarray]:
    """Per device, the global index of every element of its tile, `PADDING` where there is none."""
    cache: dict[tuple, np.ndarray] = {}
    found = {}
    for device in layout.mesh.devices:
        index = meaning(layout, device)
        if index not in cache:
            cache[index] = _tile(layout, index)
        found[device] = cache[index]
    return found


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
    """Tiles of a partial array: the device with partial coordinates all zero has the index plus what
    the others take away again (sum, mean: c and -c; max, min: the index once; product: ones)."""
    found = {}
    groups: Counter = Counter()
    sizes = [axis.size for axis in layout.partial]
    count = int(np.prod(sizes))
    for device, tile in tiles_of(layout).items():
        position = layout.mesh.position(device)
        number = 0
        for axis in layout.partial:
            number = number * axis.size + position // layout.mesh.stride(axis) % axis.size
        groups[number] += 1
        found[device] = _summand(layout.reduction, tile, number, count)
    assert len(set(groups.values())) == 1
    return found


def _summand(reduction: str | None, tile: np.ndarray, number: int, count: int) -> np.ndarray:
    if reduction in ("sum", "mean"):
        scale = count if reduction == "mean" else 1
        rest = tile * scale - sum(range(1, count)) - 3 * tile * (count - 1)
        return rest if number == 0 else 3 * tile + number
    if reduction == "product":
        return tile if number == 0 else np.ones_like(tile)
    worse = -1000 if reduction == "max" else 1000
    return tile if number == count - 1 else tile + worse - number


def check(plan: rs.Plan, program: Program | None = None) -> Account:
    """Runs a plan on indices and asserts that every device ends with what the target means, that the wire
    and the memory are exactly as promised, and that nothing given was written to.

    Less than promised is right in two cases. An exchange of boxes may need less memory: its largest
    message need not meet the device that is fullest. And two steps that load devices unevenly may
    each have another worst device, so that none receives the sum.
    """
    source, target = plan.source, plan.target
    tiles = summands_of(source) if source.partial else tiles_of(source)
    given = {device: tile.astype(source.dtype) for device, tile in tiles.items()}
    kept = {device: tile.copy() for device, tile in given.items()}
    memory = Account(source.dtype)
    result = run(program or lower(plan), given, memory)
    assert set(result) == set(target.mesh.devices), f"tiles of {sorted(result)}"
    for device, tile in result.items():
        assert tile.shape == target.tile_shape, f"device {device}: shape {tile.shape}"
        assert tile.dtype == np.dtype(target.dtype), f"device {device}: dtype {tile.dtype}"
    wanted = tiles_of(target)
    for device, tile in finished(target, result).items():
        real = wanted[device] != PADDING
        assert np.array_equal(tile[real], wanted[device].astype(target.dtype)[real]), f"device {device} of {plan}"
    for device, tile in given.items():
        assert np.array_equal(tile, kept[device]), f"device {device}'s source was written to"
    assert memory.received_bytes <= plan.received_bytes, f"{memory.received_bytes} received: {plan}"
    if sum(step.kind in ("permute", "exchange") for step in plan.steps) < 2:
        assert memory.received_bytes == plan.received_bytes, f"{memory.received_bytes} received, not all: {plan}"
    assert memory.launches == plan.launches, f"{memory.launches} launches: {plan}"
    assert memory.peak_bytes <= plan.peak_bytes, f"{memory.peak_bytes} live: {plan}"
    if not any(of_boxes(step) for step in plan.steps):
        assert memory.peak_bytes == plan.peak_bytes, f"{memory.peak_bytes} live, promised more: {plan}"
    return memory


def finished(layout: Layout, tiles: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The tiles of an array that is partial, combined over the devices that hold its summands."""
    groups: dict[int, list[int]] = {}
    for device in layout.mesh.devices:
        at = layout.mesh.position(device)
        for axis in layout.partial:
            stride = layout.mesh.stride(axis)
            at -= at // stride % axis.size * stride
        groups.setdefault(at, []).append(device)
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
    """Whether a step is an exchange between numerals that have no exact common refinement."""
    refinement = refine(step.operand, step.result)
    return step.kind == "exchange" and (refinement is None or not refinement.exact)
