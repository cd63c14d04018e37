"""Random layouts for `benchmarks/fuzz.py`: each as one entry of the package takes it, with its meaning beside it.

    parse, digits       any digits: even, strided, block-cyclic, uneven, over sub-axes, partial; pieces of any size
    from_spec, from_shardy, from_jax_text      contiguous pieces
    from_hlo            tile assignments: iotas, transposed iotas, lists of ids
    from_dtensor        torch's chunks, one mesh dim after the other
    from_scalapack      blocks dealt in rounds
    from_owners, from_sizes     a table of owners, or lengths

The meaning is computed from the definition of each notation, with numpy and without the package, so that a mistake in
`reshard.types` shows as well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

import reshard as rs
from tests.owners import random_owners, spell_pieces

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 24, 30, 31)
COUNTS = (1, 2, 3, 4, 4, 5, 6, 6, 8, 8, 8, 9, 12, 12, 16)
REDUCTIONS = ("sum", "max", "min", "product")
SHORT = {
    "int4": "s4", "int8": "s8", "uint8": "u8", "int16": "s16", "int32": "s32", "int64": "s64", "bool": "bool",
    "bfloat16": "bf16", "float32": "f32", "float64": "f64", "complex64": "c64",
}  # fmt: skip

Indices = tuple[np.ndarray, ...]
"""For each dim, the global index of every local index of a tile; -1 is padding."""


class Factor(NamedTuple):
    """A factor of a mesh axis: `size` values, after a prefix of `pre`."""

    axis: str
    pre: int
    size: int


class Table(NamedTuple):
    """Pieces of any size: which of the pieces, counted along `held`, has each index."""

    held: list[Factor]
    owners: np.ndarray


Digits = list[tuple[int, Factor | None]] | Table


@dataclass(frozen=True)
class Grid:
    """A mesh in plain data: axes, and the device at each position."""

    axes: dict[str, int]
    devices: tuple[int, ...]

    @cached_property
    def mesh(self) -> rs.Mesh:
        """The package's mesh."""
        return rs.Mesh(self.axes, device_ids=self.devices)

    @cached_property
    def _places(self) -> dict[int, dict[str, int]]:
        """Where each device is along each axis."""
        places = np.ndindex(*self.axes.values())
        return {device: dict(zip(self.axes, at, strict=True)) for device, at in zip(self.devices, places, strict=True)}

    def coordinate(self, device: int, factor: Factor) -> int:
        """A device's coordinate along a factor of an axis."""
        axis, pre, size = factor
        return self._places[device][axis] // (self.axes[axis] // (pre * size)) % size

    def spell(self, factor: Factor) -> str:
        """`x`, or `x:(2)2` for a part of an axis."""
        whole = factor.pre == 1 and factor.size == self.axes[factor.axis]
        return factor.axis if whole else f"{factor.axis}:({factor.pre}){factor.size}"


@dataclass(frozen=True)
class Given:
    """One layout: how to make it, and what it must mean.

    `groups` are the devices whose tiles combine to one tile of the array, a device each unless it is partial; a
    device's summand is its place in its group.
    """

    text: str
    make: Callable[[], rs.Layout]
    shape: tuple[int, ...]
    indices: dict[int, Indices]
    groups: list[tuple[int, ...]]
    reduction: str | None = None
    factors: tuple[Factor, ...] = field(default=())
    grid: Grid | None = None


def indices_of(digits: Digits, size: int, coordinate: Callable[[Factor], int]) -> np.ndarray:
    """The global index of every local one, appending digit by digit."""
    if isinstance(digits, Table):
        number = 0
        for factor in digits.held:
            number = number * factor.size + coordinate(factor)
        own = np.flatnonzero(digits.owners == number)
        return np.concatenate([own, np.full(max(np.bincount(digits.owners), default=0) - len(own), -1)])
    index = np.zeros(1, np.int64)
    for radix, holder in digits:
        values = np.arange(radix) if holder is None else np.array([coordinate(holder)])
        index = (index[:, None] * radix + values).ravel()
    return np.where(index < size, index, -1)


def meant(
    grid: Grid,
    shape: Sequence[int],
    dims: Sequence[Digits],
    partial: Sequence[Factor],
    reduction: str | None,
    text: str,
    make: Callable[[], rs.Layout],
) -> Given:
    """A layout of these digits on a grid."""

    known: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in dims]  # By the coordinates of what holds a dim.

    def along(dim: int, device: int) -> np.ndarray:
        of = dims[dim]
        holders = of.held if isinstance(of, Table) else [holder for _, holder in of if holder is not None]
        at = tuple(grid.coordinate(device, holder) for holder in holders)
        if at not in known[dim]:
            known[dim][at] = indices_of(of, shape[dim], dict(zip(holders, at, strict=True)).__getitem__)
        return known[dim][at]

    groups: dict[tuple[Any, ...], dict[int, int]] = {}
    axes = [Factor(name, 1, size) for name, size in grid.axes.items()]
    for device in grid.devices:
        number = 0
        rest = [grid.coordinate(device, axis) for axis in axes]
        for factor in partial:
            at, value = list(grid.axes).index(factor.axis), grid.coordinate(device, factor)
            rest[at] -= value * (grid.axes[factor.axis] // (factor.pre * factor.size))
            number = number * factor.size + value
        groups.setdefault(tuple(rest), {})[number] = device
    ordered = [tuple(group[n] for n in sorted(group)) for group in groups.values()]
    indices = {device: tuple(along(dim, device) for dim in range(len(dims))) for device in grid.devices}
    kept = reduction if partial else None
    return Given(text, make, tuple(shape), indices, ordered, kept, tuple(partial), grid)


def grid_of(choose: random.Random, devices: Sequence[int]) -> Grid:
    """These devices on random axes, in order or shuffled."""
    sizes = factored(choose, len(devices))
    if choose.random() < 0.15:
        sizes.insert(choose.randint(0, len(sizes)), 1)
    ids = list(devices)
    if choose.random() < 0.25:
        choose.shuffle(ids)
    names = choose.sample(["x", "y", "z", "w", "data", "dcn"], len(sizes)) if len(sizes) < 7 else []
    return Grid(dict(zip(names, sizes, strict=True)), tuple(ids))


def factored(choose: random.Random, size: int) -> list[int]:
    """Random factors of a size, in order."""
    factors: list[int] = []
    while size > 1:
        factors.append(choose.choice([k for k in range(2, size + 1) if size % k == 0]))
        size //= factors[-1]
    return factors


def some_factors(choose: random.Random, grid: Grid, whole: bool = False) -> list[Factor]:
    """Some of the factors of a grid's axes, in random order."""
    factors: list[Factor] = []
    for name, size in grid.axes.items():
        pre = 1
        for radix in [size] if whole or choose.random() < 0.5 else factored(choose, size):
            if radix > 1 or choose.random() < 0.3:
                factors.append(Factor(name, pre, radix))
            pre *= radix
    choose.shuffle(factors)
    return factors[: choose.randint(min(1, len(factors)), len(factors))]


def _dealt(choose: random.Random, factors: Sequence[Factor], rank: int) -> list[list[Factor]]:
    held: list[list[Factor]] = [[] for _ in range(rank)]
    for factor in factors if rank else ():
        choose.choice(held).append(factor)
    return held


def _pieces(held: Sequence[Factor], size: int) -> Digits:
    """Contiguous pieces of ceil(size / pieces) elements."""
    return [*((f.size, f) for f in held), (-(-size // math.prod(f.size for f in held)), None)]


def _any_digits(choose: random.Random, held: Sequence[Factor], size: int) -> Digits:
    kind = choose.choice(("contiguous", "strided", "cyclic", "pieces"))
    if kind == "contiguous":
        return _pieces(held, size)
    if kind == "pieces":
        return Table(list(held), random_owners(choose, size, math.prod(f.size for f in held)))
    digits: Digits = [(f.size, f) for f in held]
    tile = -(-size // math.prod(f.size for f in held))
    radices = (factored(choose, tile) or [tile]) if kind == "strided" else [choose.randint(1, 4) for _ in range(2)]
    for radix in radices:
        digits.insert(choose.randint(0, len(digits)), (radix, None))
    if kind == "strided":
        return [(1, None), *digits]
    while digits and digits[0][1] is None:
        del digits[0]
    return [(-(-size // math.prod(radix for radix, _ in digits)), None), *digits]


def _split(choose: random.Random, grid: Grid, rank: int, partial: float) -> tuple[list[list[Factor]], list[Factor]]:
    """Factors of a grid for the dims of an array, and those that it is partial over."""
    factors = some_factors(choose, grid)
    summed = factors[:1] if factors and choose.random() < partial else []
    if summed and len(factors) > 2 and choose.random() < 0.3:
        summed = factors[:2]
    return _dealt(choose, factors[len(summed) :], rank), summed


def parsed(choose: random.Random, grid: Grid, shape: Sequence[int], dtype: str, partial: float = 0.0) -> Given:
    """Any digits, as text or as objects."""
    held, summed = _split(choose, grid, len(shape), partial)
    dims = [_any_digits(choose, on, size) for on, size in zip(held, shape, strict=True)]
    reduction = choose.choice(REDUCTIONS) if summed else None
    return _of_digits(choose, grid, shape, dtype, dims, summed, reduction)


def _of_digits(
    choose: random.Random,
    grid: Grid,
    shape: Sequence[int],
    dtype: str,
    dims: Sequence[Digits],
    summed: Sequence[Factor],
    reduction: str | None,
) -> Given:
    def dim(digits: Digits, size: int) -> str:
        if isinstance(digits, Table):
            held, count = digits.held, math.prod(f.size for f in digits.held)
            return "".join(f"{{{grid.spell(f)}}}" for f in held) + spell_pieces(digits.owners, count)
        spelled = " ".join(str(r) if f is None else f"{{{grid.spell(f)}}}" for r, f in digits)
        return f"{spelled}/{size}"

    body = ", ".join(dim(d, s) for d, s in zip(dims, shape, strict=True))
    tail = f" + {reduction}" + "".join(f"{{{grid.spell(f)}}}" for f in summed) if summed else ""
    text = f"{SHORT[dtype]}[{body}]{tail}"

    def build() -> rs.Layout:
        from reshard.types import Digit, Dim, Pieces, SubAxis

        made: list[Dim] = []
        for of, size in zip(dims, shape, strict=True):
            pieces = None
            if isinstance(of, Table):
                pieces = Pieces.from_owners(of.owners, math.prod(f.size for f in of.held))
                of = [*((f.size, f) for f in of.held), (pieces.largest, None)]
            made.append(Dim(tuple(Digit(r, None if f is None else SubAxis(*f)) for r, f in of), size, pieces))
        return rs.Layout(grid.mesh, tuple(made), dtype, reduction, tuple(SubAxis(*f) for f in summed))

    if choose.random() < 0.3:
        return meant(grid, shape, dims, summed, reduction, f"Layout(...) {text} on {grid.mesh!r}", build)
    entry = f"parse({text!r}) on {grid.mesh!r}"
    return meant(grid, shape, dims, summed, reduction, entry, lambda: rs.Layout.parse(text, grid.mesh))


def by_table(choose: random.Random, grid: Grid, shape: Sequence[int], dtype: str) -> Given:
    """One dim by an owner for each index, or in lengths along some axes; the others are whole."""
    dim, axes = choose.randrange(len(shape)), list(grid.axes)
    entry = choose.choice(("owners", "sizes"))
    if entry == "sizes":
        axes = choose.sample(axes, choose.randint(0, len(axes)))
    held = [Factor(name, 1, grid.axes[name]) for name in axes]
    owners = random_owners(choose, shape[dim], math.prod(f.size for f in held), sort=entry == "sizes")
    dims: list[Digits] = [[(size, None)] for size in shape]
    dims[dim] = Table(held, owners)
    if entry == "owners":
        table = choose.choice((owners, owners.astype("u1"), owners.tolist()))
        text = f"from_owners({owners.tolist()}, {grid.mesh!r}, {tuple(shape)}, dim={dim})"
        make = partial(rs.Layout.from_owners, table, grid.mesh, shape, dtype, dim)
    else:
        sizes = np.bincount(owners, minlength=math.prod(f.size for f in held)).tolist()
        text = f"from_sizes({sizes}, {grid.mesh!r}, {tuple(shape)}, dim={dim}, axes={axes})"
        make = partial(rs.Layout.from_sizes, sizes, grid.mesh, shape, dtype, dim, axes)
    return meant(grid, shape, dims, (), None, text, make)


def contiguous(choose: random.Random, grid: Grid, shape: Sequence[int], dtype: str, partial: float = 0.0) -> Given:
    """Contiguous pieces, as a spec, a Shardy sharding or a partition spec."""
    held, summed = _split(choose, grid, len(shape), partial)
    dims = [_pieces(on, size) for on, size in zip(held, shape, strict=True)]
    reduction = "sum" if summed else None
    entry = choose.choice(("spec", "shardy", "jax"))
    names = [[grid.spell(f) for f in on] for on in held]
    sums = [grid.spell(f) for f in summed]

    def quoted(on: Sequence[Factor]) -> str:
        return ", ".join(f'"{f.axis}"' + grid.spell(f)[len(f.axis) :] for f in on)

    if entry == "spec":
        text = f"from_spec({names}, unreduced={sums})"

        def make() -> rs.Layout:
            return rs.Layout.from_spec(grid.mesh, shape, dtype, names, unreduced=sums)
    elif entry == "shardy":
        value = "[" + ", ".join(f"{{{quoted(on)}}}" for on in held) + "]"
        value += f", unreduced={{{quoted(summed)}}}" if summed else ""
        axes = ", ".join(f'"{name}"={size}' for name, size in grid.axes.items())
        ids = f", device_ids={list(grid.devices)}" if grid.mesh.device_ids is not None else ""
        framed = bool(axes) and choose.random() < 0.3  # Without axes it would be an array on one device alone.
        text = f"#sdy.sharding<mesh<[{axes}]{ids}>, {value}>" if framed else value

        def make() -> rs.Layout:
            return rs.Layout.from_shardy(text, None if framed else grid.mesh, shape, dtype)
    else:
        entries = [repr(tuple(on)) if len(on) != 1 else repr(on[0]) for on in names]
        entries += [f"unreduced={{{', '.join(map(repr, sums))}}}"] if sums else []
        text = f"P({', '.join(entries)})"

        def make() -> rs.Layout:
            return rs.Layout.from_jax_text(text, grid.mesh, shape, dtype)

    text_of_all = f"{entry}: {text}, {tuple(shape)}, {dtype} on {grid.mesh!r}"
    return meant(grid, shape, dims, summed, reduction, text_of_all, make)


def by_hlo(choose: random.Random, count: int, shape: Sequence[int], dtype: str) -> Given:
    """A tile assignment of devices 0 to count - 1."""
    factors = factored(choose, count)
    choose.shuffle(factors)
    cuts = [1] * (len(shape) + 1)
    for factor in factors:
        cuts[choose.randrange(len(cuts))] *= factor
    replicas = cuts.pop()
    tiles = [*cuts, replicas] if replicas > 1 or not shape or choose.random() < 0.3 else cuts
    tail = " last_tile_dim_replicate" if len(tiles) > len(shape) else ""
    kind = choose.choice(("iota", "transposed", "listed"))
    order = np.arange(count)
    if kind == "transposed":
        dims = factored(choose, count) or [1]
        turn = choose.sample(range(len(dims)), len(dims))
        order = order.reshape(dims).transpose(turn).ravel()
        ids = f"<={dims}T({','.join(map(str, turn))})".replace(" ", "")
    elif kind == "listed":
        order = np.array(choose.sample(range(count), count))
        ids = ",".join(map(str, order))
    else:
        ids = f"<=[{count}]"
    text = f"{{devices=[{','.join(map(str, tiles))}]{ids}{tail}}}"
    places, known = np.asarray(order).reshape(tiles), choose.choice((1, count))
    indices: dict[int, Indices] = {}
    for at in np.ndindex(*tiles):
        along = []
        for size, pieces, number in zip(shape, cuts, at, strict=False):
            piece = -(-size // pieces)
            index = np.arange(number * piece, (number + 1) * piece)
            along.append(np.where(index < size, index, -1))
        indices[int(places[at])] = tuple(along)
    return Given(
        f"from_hlo({text!r}, {tuple(shape)})",
        lambda: rs.Layout.from_hlo(text, shape, dtype, num_devices=known),
        tuple(shape),
        indices,
        [(device,) for device in range(count)],
    )


def by_dtensor(choose: random.Random, count: int, shape: Sequence[int], dtype: str) -> Given:
    """Torch's placements: every mesh dim chunks what is local so far."""
    sizes = factored(choose, count) or [1]
    local = {device: [np.arange(size) for size in shape] for device in range(count)}
    uneven: set[int] = set()
    blocks: dict[int, int] = {}  # Parts of a dim that are strided: pieces that cut through them are no digits.
    placements: list[str] = []
    grid = Grid({f"d{at}": size for at, size in enumerate(sizes)}, tuple(range(count)))
    for axis, size in enumerate(sizes):
        dim = choose.randrange(len(shape)) if shape and choose.random() < 0.75 else None
        if dim is None or dim in uneven:
            placements.append("R")
            continue
        extent = len(local[0][dim])
        split = choose.choice([1, 1, 2, 3, 4])
        if extent % (size * split) or not extent:
            split = 1
        if not extent or (extent % size and extent != shape[dim]) or blocks.get(dim, size) % size:
            placements.append("R")
            continue
        if extent % size:
            uneven.add(dim)
        split = 1 if dim in blocks else split
        if split > 1 or dim in blocks:
            blocks[dim] = blocks.get(dim, split * size) // size
        placements.append(f"S({dim})" if split == 1 else f"_S({dim}, {split})")
        for device, dims in local.items():
            number = grid.coordinate(device, Factor(f"d{axis}", 1, size))
            piece = -(-extent // (size * split))
            chunks = [dims[dim][at * piece : (at + 1) * piece] for at in range(size * split)]
            mine = np.concatenate(chunks[number::size])
            dims[dim] = np.concatenate([mine, np.full(piece * split - len(mine), -1)])
    indices = {device: tuple(dims) for device, dims in local.items()}
    text = f"from_dtensor({placements}, {tuple(sizes)}, {tuple(shape)})"
    return Given(
        text,
        lambda: rs.Layout.from_dtensor(placements, sizes, shape, dtype),
        tuple(shape),
        indices,
        [(device,) for device in range(count)],
    )


def by_scalapack(choose: random.Random, count: int, shape: Sequence[int], dtype: str) -> Given:
    """Element i of a dim is on process (i // block + source) mod processes, in rounds."""
    rows = choose.choice([k for k in range(1, count + 1) if count % k == 0])
    grid, order = (rows, count // rows), choose.choice("RC")
    blocks = [choose.choice((1, 2, 3, 4, 5, 8, 40)) for _ in range(2)]
    source = [choose.randrange(n) for n in grid]
    desc = [1, choose.choice((0, -1, 3)), *shape, *blocks, *source, 1 << 20]

    def along(dim: int, process: int) -> np.ndarray:
        size, block, processes = shape[dim], blocks[dim], grid[dim]
        rounds = -(-size // (block * processes))
        local = np.full(rounds * block, -1)
        for index in range(size):
            if (index // block + source[dim]) % processes == process:
                local[index // (block * processes) * block + index % block] = index
        return local

    indices: dict[int, Indices] = {}
    for r, c in np.ndindex(*grid):
        number = r * grid[1] + c if order == "R" else c * grid[0] + r
        indices[number] = (along(0, r), along(1, c))
    return Given(
        f"from_scalapack({desc}, {grid}, order={order!r})",
        lambda: rs.Layout.from_scalapack(desc, grid, dtype, order=order),
        tuple(shape),
        indices,
        [(device,) for device in range(count)],
    )


def any_given(
    choose: random.Random, devices: Sequence[int], shape: Sequence[int], dtype: str, partial: float = 0.0
) -> Given:
    """A random layout on these devices, by any entry that can say it."""
    count = len(devices)
    plain = sorted(devices) == list(range(count))
    entries = ["parse", "parse", "parse", "contiguous", "contiguous"]
    if plain and not partial:
        entries += ["hlo", "dtensor", *(["table"] if shape else []), *(["scalapack"] if len(shape) == 2 else [])]
    match choose.choice(entries):
        case "hlo":
            return by_hlo(choose, count, shape, dtype)
        case "dtensor":
            return by_dtensor(choose, count, shape, dtype)
        case "scalapack":
            return by_scalapack(choose, count, shape, dtype)
        case "table":
            return by_table(choose, grid_of(choose, devices), shape, dtype)
        case "contiguous":
            return contiguous(choose, grid_of(choose, devices), shape, dtype, partial)
        case _:
            return parsed(choose, grid_of(choose, devices), shape, dtype, partial)


def finished(choose: random.Random, source: Given, dtype: str) -> Given:
    """A target for a partial array: finished, or partial over some of the same axes; mostly on the source's mesh."""
    assert source.grid is not None
    kept = [f for f in source.factors if choose.random() < 0.25]
    if not kept and choose.random() < 0.4:
        return any_given(choose, source.grid.devices, source.shape, dtype)
    factors = [f for f in some_factors(choose, source.grid) if all(f.axis != k.axis for k in kept)]
    dims = [_any_digits(choose, on, size)
            for on, size in zip(_dealt(choose, factors, len(source.shape)), source.shape, strict=True)]  # fmt: skip
    return _of_digits(choose, source.grid, source.shape, dtype, dims, kept, source.reduction if kept else None)
