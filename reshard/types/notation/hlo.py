"""XLA's HLO shardings, read into plain data, and placed on a mesh made for them.

    sharding = ["sharding="] "{" body {note} "}" ["," other attributes of the instruction]
    body     = "replicated" | "unreduced" | "maximal device=" id | "manual" | "unknown"
             | "devices=[" sizes "]" numbers [last]                       tiles per dim
             | "mesh[" [axis-size {"," axis-size}] "]" ["," "device_ids=(" numbers ")"] "," named
    numbers  = id {"," id} | ["<="] "[" sizes "]" ["T(" permutation ")"]  the devices, tile by tile
    last     = "last_tile_dim_replicate" | "last_tile_dims={" kind {"," kind} "}"
    kind     = "replicated" | "manual" | "unreduced"                      of tile dims past the array's
    named    = value, as in `shardy`, with single quotes and also "manual={...}"
             | "replicated" | "unreduced" ["=" op] | "manual"
    note     = "metadata={...}" | "shard_as" id | "shard_like" id         read and dropped

`[4,2]T(1,0)` is the list of ids that an iota has after a reshape to 4 x 2 and a transposition. Its
dims become the axes d0, d1, ... of the mesh, so that devices keep their own order:

    devices=[2,1,4]<=[4,2]T(1,0)   -->   <d0=4, d1=2>, dims {d1} {} {d0}

A tile dim takes factors of the transposed dims, major to minor; where it ends inside one, it takes a
sub-axis, `d0:(1)2`. Tile dims that cut no such factors (2 x 3 of 3 x 2) become the axes themselves,
with explicit device ids; so do ids that are no transposed iota.

Along a manual tile dim or axis each device has an array of its own, and the sharding says how each of
these lies over the other axes: such axes are not used by the layout, like replicated ones. The kind of
an unreduced tile dim is not in the text (XLA prints sums and maxima alike); it is read as a sum.

Ids are those of the program. JAX numbers devices by their position in the mesh, whatever their own ids.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple, NoReturn

from reshard.errors import LayoutError, MeshError, NotationError
from reshard.types.mesh import Mesh
from reshard.types.notation.reader import Reader, axis_size, op, value
from reshard.types.notation.sharding import NO_TILE, Placed, RawMesh, RawSharding, place

KINDS = ("replicated", "manual", "unreduced")
MOST_IDS = 1 << 22  # Devices that are worth a list; regular meshes of any size need none.
_KEYS = ("replicated", "unreduced", "manual", "metadata")
_HEAD = re.compile(r"sharding\s*=")
_TAIL = re.compile(r",\s*[a-z_]+\s*=.*", re.DOTALL)
_IDS = re.compile(r",\s*device_ids\s*=\s*\(")
_ADVICE = "write {replicated}, {devices=[2,4]<=[8]} or {mesh['x'=2], [{'x'}]}"
_MANUAL = (
    "inside a manual region every device has an array of its own, so there is no global array to lay out; "
    "use the sharding that the array has outside the region"
)
_UNKNOWN = "the compiler has not chosen a sharding yet; take the one of the compiled program"


class Factor(NamedTuple):
    """A run of device ids: `size` of them, `stride` apart."""

    stride: int
    size: int


class Tiles(NamedTuple):
    """Tiles per dim, then per kind; `factors`, major to minor, or else `ids` number them row by row."""

    text: str
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    factors: tuple[Factor, ...] | None
    ids: tuple[int, ...] | None


class Whole(NamedTuple):
    """The same for all devices, however many: `replicated` or `unreduced`."""

    kind: str


def parse(text: str) -> Tiles | Whole | RawSharding:
    """Reads one sharding; raises `NotationError` with the place that does not parse.

    >>> parse("{devices=[2,1,4]<=[4,2]T(1,0)}").factors
    (Factor(stride=1, size=2), Factor(stride=2, size=4))
    """
    reader = Reader("HLO sharding", text)
    reader.match(_HEAD)
    reader.need("{", _ADVICE)
    if reader.sees("{"):
        reader.fail("it is the sharding of a tuple; give that of one element")
    raw = _body(reader)
    _notes(reader)
    reader.need("}", "close the sharding with }")
    reader.match(_TAIL)
    reader.end()
    return raw


def placed(raw: Tiles | Whole | RawSharding, rank: int, num_devices: int) -> Placed:
    """The sharding of an array of that rank, on its own mesh; `num_devices` if it does not say how many."""
    if isinstance(raw, Whole):
        return _whole(raw, rank, num_devices)
    # XLA writes [] for any rank if no dim is split.
    found = _tiles(raw, rank) if isinstance(raw, Tiles) else place(raw if raw.dims else raw.padded(rank), None)
    if num_devices not in (1, found.mesh.size):
        raise MeshError(
            f"it is over {found.mesh.size} devices, but {num_devices} are given (as num_devices, or as the size of a "
            f"mesh); leave that out or make it {found.mesh.size}"
        )
    return found


def _body(reader: Reader) -> Tiles | Whole | RawSharding:
    at, word = reader.at, reader.word()
    match word:
        case "devices":
            return _assignment(reader)
        case "mesh":
            return _named(reader)
        case "replicated" | "unreduced":
            return Whole(word)
        case "maximal" | "maximal_mesh" | "single_device":
            found = reader.match(re.compile(r"[\[\s]*device(?:_id)?\s*=\s*([0-9]+)"))
            return _refuse(reader, NO_TILE.format(device=found[1] if found else 0))
        case "manual":
            return _refuse(reader, _MANUAL)
        case "unknown":
            return _refuse(reader, _UNKNOWN)
        case _:
            return reader.fail(_ADVICE, at)


def _refuse(reader: Reader, why: str) -> NoReturn:
    raise LayoutError(f"HLO sharding {reader.text!r}: {why}")


def _notes(reader: Reader) -> None:
    """Takes what says nothing about where elements are."""
    while not reader.sees("}"):
        reader.take(",")
        at, word = reader.at, reader.word()
        if word == "metadata":
            reader.need("=", "write metadata={...}")
            reader.skip_braces()
        elif word in ("shard_as", "shard_like"):
            reader.number(f"write {word} 1")
        else:
            reader.fail("close the sharding with }", at)


def _assignment(reader: Reader) -> Tiles:
    """Reads what follows `devices`."""
    reader.need("=", "write devices=[2,4]<=[8]")
    reader.need("[", "write devices=[2,4]<=[8]")
    sizes = _sizes(reader)
    factors, ids = _numbers(reader, math.prod(sizes))
    kinds: tuple[str, ...] = ()
    if reader.take("last_tile_dim_replicate"):
        kinds = ("replicated",)
    elif reader.take("last_tile_dims"):
        reader.need("=", "write last_tile_dims={manual}")
        reader.need("{", "write last_tile_dims={manual}")
        kinds = reader.items(lambda: _kind(reader), "}")
    return Tiles(reader.text, sizes, kinds, factors, ids)


def _kind(reader: Reader) -> str:
    at, word = reader.at, reader.word()
    return word if word in KINDS else reader.fail(f"the last tile dims are {', '.join(KINDS)}", at)


def _sizes(reader: Reader) -> tuple[int, ...]:
    at = reader.at
    sizes = reader.items(lambda: reader.number("sizes are whole numbers, as in [2,4]"), "]")
    if not sizes or min(sizes) < 1:
        reader.fail("give at least one size, all of them at least 1", at)
    return sizes


def _numbers(reader: Reader, count: int) -> tuple[tuple[Factor, ...] | None, tuple[int, ...] | None]:
    """The devices in order: as factors if they are a transposed iota, else as ids."""
    iota = reader.take("<=")
    if reader.take("["):
        at, dims = reader.at, _sizes(reader)
        if math.prod(dims) != count:
            given = " x ".join(map(str, dims))
            reader.fail(f"{given} is not the {count} devices of the tiles or axes; make them equal", at)
        return _iota(dims, _permutation(reader, len(dims))), None
    listed = reader.match(re.compile(r"[0-9]{1,18}(?:\s*,\s*[0-9]{1,18})*(?![0-9])"))
    if listed is None or iota:
        reader.fail(f"it does not say which device has which tile; write <=[{count}], or one device id per tile")
    ids = tuple(int(part) for part in listed[0].split(","))
    if len(ids) != count or len(set(ids)) != count:
        raise NotationError(
            f"{reader.what} {reader.text!r}: it lists {len(ids)} device ids, {len(set(ids))} of them different, "
            f"for {count} tiles or mesh positions; give one device each"
        )
    factors = _found_iota(ids)
    return factors, ids if factors is None else None


def _permutation(reader: Reader, rank: int) -> tuple[int, ...]:
    if not reader.take("T"):
        return tuple(range(rank))
    at = reader.at
    reader.need("(", "write a transposition as T(1,0)")
    order = reader.items(lambda: reader.number("write a transposition as T(1,0)"), ")")
    if sorted(order) != list(range(rank)):
        reader.fail(f"the transposition must order the {rank} dims before it, each of 0..{rank - 1} once", at)
    return order


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[Factor, ...]:
    """The factors of a transposed iota, major to minor; those that run on from one another are merged."""
    found: list[Factor] = []
    for at in order:
        factor = Factor(math.prod(dims[at + 1 :]), dims[at])
        if factor.size == 1:
            continue
        if found and found[-1].stride == factor.stride * factor.size:
            factor = Factor(factor.stride, factor.size * found.pop().size)
        found.append(factor)
    return tuple(found)


def _found_iota(ids: tuple[int, ...]) -> tuple[Factor, ...] | None:
    """The factors of the transposed iota that these ids are, if they are one.

    Minor to major: the ids of one factor are those that are evenly spaced; the first of each such
    run are the ids of the factors above it, fewer by the factor's size (at least 2).
    """
    found: list[Factor] = []
    left = ids
    while len(left) > 1:
        stride, size = left[1] - left[0], 2
        while size < len(left) and left[size] - left[size - 1] == stride:
            size += 1
        if len(left) % size:
            return None
        found.insert(0, Factor(stride, size))
        left = left[::size]
    ordered = sorted(found)
    whole = [math.prod(f.size for f in ordered[:at]) for at in range(len(ordered))]
    return tuple(found) if [f.stride for f in ordered] == whole and _listed(found) == ids else None


def _listed(factors: list[Factor] | tuple[Factor, ...]) -> tuple[int, ...]:
    """The ids that factors number."""
    count = math.prod(f.size for f in factors)
    if count > MOST_IDS:
        raise MeshError(f"{count} devices in an order that no axes of a mesh have; at most {MOST_IDS} can be listed")
    found = [0]
    for stride, size in factors:
        found = [start + step * stride for start in found for step in range(size)]
    return tuple(found)


def _named(reader: Reader) -> RawSharding | Whole:
    """Reads what follows `mesh`."""
    reader.need("[", "write the mesh as mesh['x'=4,'y'=2]")
    axes = reader.items(lambda: axis_size(reader), "]")
    ids = None
    if reader.match(_IDS):
        factors, ids = _numbers(reader, math.prod(size for _, size in axes))
        ids = _listed(factors or ()) if ids is None else ids
        reader.need(")", "close the device ids with )")
    reader.need(",", "one {} per dim in [] follows the mesh, as in {mesh['x'=2], [{'x'}, {}]}")
    if reader.sees("["):
        return value(reader, _KEYS)._replace(mesh=RawMesh(axes, ids))
    at, word = reader.at, reader.word()
    if word not in KINDS:
        reader.fail("one {} per dim in [] follows the mesh, as in {mesh['x'=2], [{'x'}, {}]}", at)
    if word == "manual":
        return _refuse(reader, _MANUAL)
    if not axes:
        return Whole(word)
    unreduced = tuple(name for name, _ in axes) if word == "unreduced" else ()
    reduction = op(reader) if word == "unreduced" and reader.take("=") else "sum"
    return RawSharding((), unreduced=unreduced, reduction=reduction, mesh=RawMesh(axes, ids))


def _whole(raw: Whole, rank: int, num_devices: int) -> Placed:
    mesh = Mesh() if num_devices == 1 else Mesh(d0=num_devices)
    axes = tuple(mesh.sub_axis(name) for name in mesh.axes)
    if raw.kind == "unreduced" and not axes:
        raise MeshError("it is unreduced over an unknown number of devices; say how many, 2 or more, with num_devices")
    return Placed(mesh, ((),) * rank, axes if raw.kind == "unreduced" else ())


def _tiles(raw: Tiles, rank: int) -> Placed:
    """Tile dims on the axes of the iota; on axes of their own where that cannot be."""
    if len(raw.sizes) - len(raw.kinds) != rank:
        raise LayoutError(
            f"it has {len(raw.sizes) - len(raw.kinds)} tile dims of an array ({len(raw.sizes)} less {len(raw.kinds)} "
            f"for last tile dims), but the array has {rank}; give one tile size per dim, 1 for a dim that is not split"
        )
    parts = None if raw.factors is None else _split(raw.factors, raw.sizes)
    if raw.factors is not None and parts is not None:
        mesh = Mesh((f"d{at}", factor.size) for at, factor in enumerate(sorted(raw.factors, reverse=True)))
        axes = [tuple(sub for part in dim for sub in mesh.sub_axes(*part)) for dim in parts]
    else:
        mesh = Mesh(
            ((f"d{at}", size) for at, size in enumerate(s for s in raw.sizes if s > 1)),
            device_ids=raw.ids or _listed(raw.factors or ()),
        )
        names = iter(mesh.axes)
        axes = [(mesh.sub_axis(next(names)),) if size > 1 else () for size in raw.sizes]
    last = zip(raw.kinds, axes[rank:], strict=True)
    return Placed(mesh, tuple(axes[:rank]), tuple(sub for kind, dim in last if kind == "unreduced" for sub in dim))


def _split(factors: tuple[Factor, ...], sizes: tuple[int, ...]) -> list[list[Factor]] | None:
    """Deals the factors out to the tile dims, major to minor; None if a size cuts one unevenly.

    The sizes still to be filled and the factors still there have the same product all along.
    """
    left = list(reversed(factors))
    found: list[list[Factor]] = []
    for size in sizes:
        part: list[Factor] = []
        while size > 1:
            stride, have = left.pop()
            took = math.gcd(size, have)
            if took not in (size, have):
                return None
            part.append(Factor(stride * (have // took), took))
            if took < have:
                left.append(Factor(stride, have // took))
            size //= took
        found.append(part)
    return found
