"""Loads run on numpy by what their plans say alone: an oracle of who reads what, and of what arrives.

Tensors are filled with numbers that no two of their elements share. A reading's tile is looked up through
`types.meaning`, box, split and parts of packs with numpy's own reshapes; trees run on `rs.simulate`.
"""

import math
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import reshard as rs
from reshard.plans.load_plan import LoadPlan, Reading
from reshard.plans.stored import ChunkGrid, Stored, StoredPiece
from reshard.synth.reading import ReadOptions
from reshard.types import Digit, Dim, Pieces
from reshard.types.meaning import meaning

Arrays = Mapping[str, np.ndarray]


def store(name: str, shape: tuple[int, ...], dtype: str = "float32", at: int = 0, **how: Any) -> Stored:
    """A raw tensor in one piece, unless pieces are given."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    piece = StoredPiece(tuple((0, extent) for extent in shape), 0, at, size)
    return Stored(name, dtype, shape, how.pop("pieces", (piece,)), **how)


def fill(stored: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """Each tensor with numbers of its own."""
    start, made = 1, {}
    for name, each in stored.items():
        size = math.prod(each.shape)
        made[name] = np.arange(start, start + size).reshape(each.shape).astype(each.dtype)
        start += size
    return made


def part_of(layout: rs.Layout, whole: np.ndarray, device: int) -> np.ndarray:
    """The tile of a device, padding as zeros."""
    padded = np.zeros([dim.size + dim.padded for dim in layout.dims], whole.dtype)
    padded[tuple(slice(0, size) for size in whole.shape)] = whole
    return padded[np.ix_(*meaning(layout, device))] if layout.dims else padded.copy()


def read_array(reading: Reading, arrays: Arrays) -> np.ndarray:
    """The whole array of which a reading's layout says who has what."""
    if reading.packed:
        pack = np.zeros(reading.layout.shape, reading.layout.dtype)
        for name, start in reading.packed:
            pack[start : start + arrays[name].size] = arrays[name].reshape(-1)
        return pack
    whole = arrays[reading.stored]
    if reading.split > 1:
        whole = whole.reshape(reading.split, -1, *whole.shape[1:])
    return whole if reading.box is None else whole[tuple(slice(*ends) for ends in reading.box)]


def count_readers(plan: LoadPlan, stored: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """How many processes read each element."""
    numbers = {n: np.arange(1, math.prod(s.shape) + 1).reshape(s.shape) for n, s in stored.items()}
    counts = {name: np.zeros(math.prod(s.shape) + 1, int) for name, s in stored.items()}
    for wave in plan.waves:
        for reading in wave.readings:
            layout, seen = reading.layout, {}
            for device in layout.mesh.devices:
                seen.setdefault((plan.process_of or {}).get(device, device), set()).add(device)
            for devices in seen.values():
                for name in reading.tensors:
                    only = {n: numbers[n] if n == name else 0 * numbers[n] for n in reading.tensors}
                    array = read_array(reading, only if reading.packed else numbers).astype(int)
                    if reading.packed:  # Numbers may not fit the pack's dtype.
                        array = np.zeros(layout.shape, int)
                        start = dict(reading.packed)[name]
                        array[start : start + numbers[name].size] = numbers[name].reshape(-1)
                    held = [part_of(layout, array, device).reshape(-1) for device in devices]
                    counts[name][np.unique(np.concatenate(held))] += 1
    return {name: each[1:] for name, each in counts.items()}


def run_load(plan: LoadPlan, arrays: Arrays) -> dict[str, dict[int, np.ndarray]]:
    """The tiles of all targets, {name: {device: tile}}, made as the waves say."""
    targets = {
        name: {device: np.zeros(layout.tile_shape, layout.dtype) for device in layout.mesh.devices}
        for name, layout in plan.targets.items()
    }
    for wave in plan.waves:
        tiles = {
            each.name: {d: part_of(each.layout, read_array(each, arrays), d) for d in each.layout.mesh.devices}
            for each in wave.readings
        }
        for reading, target, box in wave.direct:
            for device, tile in tiles[reading].items():
                place = targets[target][device]
                where = ... if box is None else tuple(slice(*ends) for ends in box)
                place[where] = tile.reshape(place[where].shape)
        gathered: dict[str, dict[int, np.ndarray]] = {}
        for tree in wave.trees:
            into = {name: targets[name] for name in tree.filled}
            moved = rs.simulate(tree, {name: tiles[name] for name in tree.source_layouts}, into=into or None)
            for name, made in moved.items():
                (targets if name in targets else gathered)[name] = made
            for reading in wave.readings:
                for name, start in reading.packed:
                    if reading.name in gathered:
                        size, shape = arrays[name].size, arrays[name].shape
                        tiles[name] = {
                            d: t[start : start + size].reshape(shape).copy() for d, t in gathered[reading.name].items()
                        }
    return targets


def expect(moves: Mapping[str, rs.Move], sources: Mapping[str, str], fills: Mapping[str, str], arrays: Arrays) -> Any:
    """What the tiles of all targets must be, worked out from the index maps of views."""
    wholes: dict[str, np.ndarray] = {}
    for name, move in moves.items():
        flat = arrays[sources.get(name, name)].reshape(-1)
        goal = wholes.setdefault(fills.get(name, name), np.zeros(math.prod(move.target.shape), move.target.dtype))
        digits, start, end = move.view.map
        here, there = np.array([start]), np.array([end])
        for count, source, target in digits:
            here = (here[:, None] + source * np.arange(count)).reshape(-1)
            there = (there[:, None] + target * np.arange(count)).reshape(-1)
        goal[there] = flat[here].astype(goal.dtype)
    layouts = {fills.get(name, name): move.target for name, move in moves.items()}
    return {
        name: {d: part_of(layout, wholes[name].reshape(layout.shape), d) for d in layout.mesh.devices}
        for name, layout in layouts.items()
    }


def clip(layout: rs.Layout, device: int, tile: np.ndarray) -> np.ndarray:
    """A tile without its padding."""
    return tile[tuple(slice(0, size) for size in layout.tile_shape_of(device))]


class Problem(NamedTuple):
    """A load: what `plan_reading` takes."""

    stored: dict[str, Stored]
    moves: dict[str, rs.Move]
    sources: dict[str, str]
    fills: dict[str, str]
    process_of: dict[int, int] | None
    options: ReadOptions


def draw_problem(rng: random.Random) -> Problem:
    """A random load: raw tensors in one piece and in two, grids of coded chunks; as they are, cast, transposed, and as
    parts of stacks; each device a process, or several in one; reads, waves and slabs of all sizes."""
    sizes = rng.choice([(2, 2), (4,), (2, 3), (2, 2, 2), (6,), (4, 2)])
    mesh = rs.Mesh({f"m{at}": size for at, size in enumerate(sizes)})
    stored: dict[str, Stored] = {}
    moves: dict[str, rs.Move] = {}
    fills: dict[str, str] = {}
    axes, at = list(mesh.axes), 0

    def spec(shape: tuple[int, ...]) -> list[list[str]]:
        rng.shuffle(axes)
        by_dim: list[list[str]] = [[] for _ in shape]
        for axis in axes:
            if shape and rng.random() < 0.6:
                by_dim[rng.randrange(len(shape))].append(axis)
        return by_dim

    for number in range(rng.randint(1, 8)):
        name, dtype = f"w{number}", rng.choice(["float32", "int32"])
        shape = tuple(rng.choice([1, 2, 3, 4, 6, 8, 12, 16, 24]) for _ in range(rng.randint(0, 3)))
        size, kind = 4 * math.prod(shape), rng.choice(["raw", "raw", "grid", "rows"])
        if kind == "grid" and shape:
            chunks = tuple(min(extent, rng.choice([1, 2, 3, 4, 8])) for extent in shape)
            grid = ChunkGrid(shape, chunks, 4 * math.prod(chunks))
            stored[name] = Stored(name, dtype, shape, grid, chunks)
        elif kind == "rows" and shape and shape[0] > 1:
            cut, rest = rng.randint(1, shape[0] - 1), tuple((0, extent) for extent in shape[1:])
            row = size // shape[0]
            pieces = (
                StoredPiece(((0, cut), *rest), 0, at, cut * row),
                StoredPiece(((cut, shape[0]), *rest), 0, at + cut * row, size - cut * row),
            )
            stored[name] = store(name, shape, dtype, pieces=pieces)
        else:
            stored[name] = store(name, shape, dtype, at)
        at += size
        source, letters, how = stored[name].as_stored, "abc"[: len(shape)], rng.random()
        if how < 0.55 or len(shape) < 2:
            goal = rs.Layout.from_spec(mesh, shape, dtype if rng.random() < 0.8 else "float64", spec(shape))
            moves[name] = rs.Move(source, goal, cast=goal.dtype != dtype)
        elif how < 0.75:
            order = rng.sample(range(len(shape)), len(shape))
            turned = tuple(shape[dim] for dim in order)
            view = f"{' '.join(letters)} -> {' '.join(letters[dim] for dim in order)}"
            moves[name] = rs.Move(source, rs.Layout.from_spec(mesh, turned, dtype, spec(turned)), view=view)
        else:
            other = f"{name}b"
            stored[other] = store(other, shape, dtype, at)
            at += size
            goal = rs.Layout.from_spec(mesh, (2, *shape), dtype, [[], *spec(shape)])
            for part, each in enumerate((name, other)):
                view = f"{' '.join(letters)} -> l {' '.join(letters)}"
                moves[each] = rs.Move(stored[each].as_stored, goal, view=view, into={"l": part}, l=2)
                fills[each] = f"t{number}"
    devices = mesh.devices
    owners = [lambda d: d * 2 // len(devices), lambda d: d // 2, lambda d: 0, lambda d: d % 2]
    owner = rng.choice([None, None, *owners])
    process_of = None if owner is None else {device: owner(device) for device in devices}
    options = ReadOptions(rng.choice([1, 16, 64, 256, 1 << 20]), rng.choice([None, None, 64, 200, 1000]))
    # Rows of any target may belong to devices by a table, or in intervals of any length.
    for name, move in moves.items():
        held = [at for at, dim in enumerate(move.target.dims) if dim.digits and dim.digits[0].axis is not None]
        if name not in fills and held and rng.random() < 0.3:
            dims, at = [*move.target.dims], rng.choice(held)
            count = math.prod(digit.radix for digit in dims[at].digits if digit.axis is not None)
            owner = [rng.randrange(count) for _ in range(dims[at].size)]
            pieces = Pieces.from_owners(owner if rng.random() < 0.5 else sorted(owner), count)
            local = Digit(pieces.largest, None)
            dims[at] = Dim((*(d for d in dims[at].digits if d.axis is not None), local), dims[at].size, pieces)
            goal = rs.Layout(mesh, tuple(dims), move.target.dtype)
            moves[name] = rs.Move(move.source, goal, move.view, cast=move.cast)
    return Problem(stored, moves, {}, fills, process_of, options)
