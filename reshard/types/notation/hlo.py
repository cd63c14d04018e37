"""XLA's HLO shardings, read into plain data, and placed on a mesh made for them.

    sharding = ["sharding="] "{" body {note} "}" ["," other attributes of the instruction]
    body     = "replicated" | "unreduced" | "maximal device=" id | "manual" | "unknown"
             | "devices=[" sizes "]" numbers [last]                       tiles per dim
             | "mesh[" [axis-size {"," axis-size}] "]" ["," "device_ids=(" numbers ")"] "," named
    numbers  = id {"," id} | ["<="] "[" sizes "]" ["T(" permutation ")"]  the devices, tile by tile
    last     = "last_tile_dim_replicate" | "last_tile_dims={" kind {"," kind} "}"
    kind     = "replicated" | "manual" | "unreduced"                      of tile dims past the array's
    named    = value, as in `sharding`, with single quotes and also "manual={...}"
             | "replicated" | "unreduced" ["=" op] | "manual"
    note     = "metadata={...}" | "shard_as" id | "shard_like" id         read and dropped

`[4,2]T(1,0)` is the iota 0..7 reshaped to 4 x 2, then transposed: devices 0, 2, 4, 6, 1, 3, 5, 7. The
dims before the transposition become the axes d0, d1, ... of the mesh, so that devices keep their order:

    devices=[2,1,4]<=[4,2]T(1,0)   -->   <d0=4, d1=2>, dims {d1} {} {d0}

Tile dims take the transposed dims as factors, major to minor. A tile dim that ends inside a factor takes a
sub-axis of it, `d0:(1)2`. If a tile dim cuts a factor unevenly (tiles 2 x 3 of an iota 3 x 2), or the ids
are not a transposed iota, the tile dims themselves become the axes, with explicit device ids.

Along a manual tile dim or axis each device has an array of its own, and the sharding describes each of these
arrays over the remaining axes. So the layout does not use manual axes, just as it does not use replicated ones.
The text does not give the kind of an unreduced tile dim (XLA prints sums and maxima alike); it is read as a sum.

Device ids are those of the program: JAX numbers devices by their position in the mesh, whatever their own ids.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from reshard.errors import LayoutError, MeshError, NotationError, quoted
from reshard.types.mesh import Mesh
from reshard.types.notation.sharding import NO_TILE, Placed, RawMesh, RawSharding, Reader, place_sharding
from reshard.types.whole import whole

KINDS = ("replicated", "manual", "unreduced")
MOST_IDS = 1 << 22  # The longest list of device ids that is built; regular meshes of any size need none.
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


class IdRun(NamedTuple):
    """`size` device ids, `stride` apart: one dim of an iota."""

    stride: int
    size: int


class Tiling(NamedTuple):
    """The number of tiles along each dim of the array, then along each last tile dim (one for each of `kinds`).

    Row by row, the tiles lie on the devices that `runs`, major to minor, enumerate, or else on those in `ids`.
    """

    text: str
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    runs: tuple[IdRun, ...] | None
    ids: tuple[int, ...] | None


class Untiled(NamedTuple):
    """The same on every device, whatever their number: `replicated` or `unreduced`."""

    kind: str


def parse_hlo(text: str) -> Tiling | Untiled | RawSharding:
    """Reads one sharding; raises `NotationError` with the place that does not parse.

    >>> parse_hlo("{devices=[2,1,4]<=[4,2]T(1,0)}").runs
    (IdRun(stride=1, size=2), IdRun(stride=2, size=4))
    """
    reader = Reader("HLO sharding", text)
    reader.match(_HEAD)
    reader.need("{", _ADVICE)
    if reader.sees("{"):
        reader.fail("it is the sharding of a tuple; give that of one element")
    raw = _read_body(reader)
    # Metadata and sharing groups do not affect where elements are.
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
    reader.need("}", "close the sharding with }")
    reader.match(_TAIL)
    reader.end()
    return raw


def place_hlo(raw: Tiling | Untiled | RawSharding, rank: int, num_devices: int) -> Placed:
    """Places the sharding of an array of rank `rank` on its own mesh.

    `num_devices` is 1 for unknown. It is needed where the text does not say how many devices there are, and
    raises `MeshError` where it contradicts the text.

    >>> mesh, dims, *_ = place_hlo(parse_hlo("{devices=[2,1,4]<=[4,2]T(1,0)}"), 3, 1)
    >>> print(mesh, [[axis.axis for axis in dim] for dim in dims])
    <d0=4, d1=2> [['d1'], [], ['d0']]
    """
    if whole(num_devices, 1) is None:
        raise MeshError(f"num_devices is of size {quoted(num_devices)}: a size is a whole number of at least 1")
    if isinstance(raw, Untiled):
        mesh = Mesh() if num_devices == 1 else Mesh(d0=num_devices)
        axes = tuple(mesh.sub_axis(name) for name in mesh.axes)
        if raw.kind == "unreduced" and not axes:
            raise MeshError(
                "it is unreduced over an unknown number of devices; say how many, 2 or more, with num_devices"
            )
        return Placed(mesh, ((),) * rank, axes if raw.kind == "unreduced" else ())
    sharding = (
        _place_tiling(raw, rank)
        if isinstance(raw, Tiling)
        else place_sharding(raw if raw.dims else raw.padded(rank), None)
    )
    if num_devices not in (1, sharding.mesh.size):
        raise MeshError(
            f"it is over {sharding.mesh.size} devices, but {num_devices} are given (as num_devices, or as the size of "
            f"a mesh); leave that out or make it {sharding.mesh.size}"
        )
    return sharding


def _read_body(reader: Reader) -> Tiling | Untiled | RawSharding:
    at, word = reader.at, reader.word()
    match word:
        case "devices":
            return _read_tiling(reader)
        case "mesh":
            return _read_named(reader)
        case "replicated" | "unreduced":
            return Untiled(word)
        case "maximal" | "maximal_mesh" | "single_device":
            device = reader.match(re.compile(r"[\[\s]*device(?:_id)?\s*=\s*([0-9]+)"))
            return _refuse_sharding(reader, NO_TILE.format(device=device[1] if device else 0))
        case "manual":
            return _refuse_sharding(reader, _MANUAL)
        case "unknown":
            return _refuse_sharding(reader, _UNKNOWN)
        case _:
            return reader.fail(_ADVICE, at)


def _refuse_sharding(reader: Reader, why: str) -> NoReturn:
    raise LayoutError(f"HLO sharding {quoted(reader.text)}: {why}")


def _read_tiling(reader: Reader) -> Tiling:
    """Reads what follows `devices`: `=[2,4]<=[8]`, and the kinds of the last tile dims."""
    reader.need("=", "write devices=[2,4]<=[8]")
    reader.need("[", "write devices=[2,4]<=[8]")
    sizes = _read_sizes(reader)
    runs, ids = _read_devices(reader, math.prod(sizes))
    kinds: tuple[str, ...] = ()
    if reader.take("last_tile_dim_replicate"):
        kinds = ("replicated",)
    elif reader.take("last_tile_dims"):
        reader.need("=", "write last_tile_dims={manual}")
        reader.need("{", "write last_tile_dims={manual}")

        def read_kind() -> str:
            at, word = reader.at, reader.word()
            return word if word in KINDS else reader.fail(f"the last tile dims are {', '.join(KINDS)}", at)

        kinds = reader.items(read_kind, "}")
    return Tiling(reader.text, sizes, kinds, runs, ids)


def _read_sizes(reader: Reader) -> tuple[int, ...]:
    at = reader.at
    sizes = reader.items(lambda: reader.number("sizes are whole numbers, as in [2,4]"), "]")
    if not sizes or min(sizes) < 1:
        reader.fail("give at least one size, all of them at least 1", at)
    return sizes


def _read_devices(reader: Reader, count: int) -> tuple[tuple[IdRun, ...] | None, tuple[int, ...] | None]:
    """Reads the devices in order: as runs if they are a transposed iota, else as a list of ids."""
    iota = reader.take("<=")
    if reader.take("["):
        at, dims = reader.at, _read_sizes(reader)
        if math.prod(dims) != count:
            given = " x ".join(map(str, dims))
            reader.fail(f"{given} is not the {quoted(count)} devices of the tiles or axes; make them equal", at)
        order = tuple(range(len(dims)))
        if reader.take("T"):
            at = reader.at
            reader.need("(", "write a transposition as T(1,0)")
            order = reader.items(lambda: reader.number("write a transposition as T(1,0)"), ")")
            if sorted(order) != list(range(len(dims))):
                reader.fail(
                    f"the transposition must order the {len(dims)} dims before it, each of 0..{len(dims) - 1} once", at
                )
        return list_iota_runs(dims, order), None
    listed = reader.match(re.compile(r"[0-9]{1,18}(?:\s*,\s*[0-9]{1,18})*(?![0-9])"))
    if listed is None or iota:
        reader.fail(f"it does not say which device has which tile; write <=[{count}], or one device id per tile")
    ids = tuple(int(part) for part in listed[0].split(","))
    if len(ids) != count or len(set(ids)) != count:
        raise NotationError(
            f"{reader.what} {quoted(reader.text)}: it lists {len(ids)} device ids, {len(set(ids))} of them different, "
            f"for {count} tiles or mesh positions; give one device each"
        )
    runs = _find_iota(ids)
    return runs, ids if runs is None else None


def list_iota_runs(dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[IdRun, ...]:
    """The runs of a transposed iota, major to minor; neighbours that continue one another are merged."""
    runs: list[IdRun] = []
    for at in order:
        run = IdRun(math.prod(dims[at + 1 :]), dims[at])
        if run.size == 1:
            continue
        if runs and runs[-1].stride == run.stride * run.size:
            run = IdRun(run.stride, run.size * runs.pop().size)
        runs.append(run)
    return tuple(runs)


def _find_iota(ids: tuple[int, ...]) -> tuple[IdRun, ...] | None:
    """The runs of the transposed iota that lists exactly these ids, None if there is none.

    0 2 4 6 1 3 5 7    the longest evenly spaced start, 0 2 4 6, is the minor run: 4 ids, 2 apart
    0 1                the first id of each such run: the next run is 2 ids, 1 apart

    Each round divides the number of ids by at least 2, so the loop ends.
    """
    runs: list[IdRun] = []
    left = ids
    while len(left) > 1:
        stride, size = left[1] - left[0], 2
        while size < len(left) and left[size] - left[size - 1] == stride:
            size += 1
        if len(left) % size:
            return None
        runs.insert(0, IdRun(stride, size))
        left = left[::size]
    by_stride = sorted(runs)
    strides = [math.prod(run.size for run in by_stride[:at]) for at in range(len(by_stride))]
    return tuple(runs) if [run.stride for run in by_stride] == strides and list_run_ids(runs) == ids else None


def list_run_ids(runs: Sequence[IdRun]) -> tuple[int, ...]:
    """The ids that the runs enumerate, the last run varying fastest."""
    count = math.prod(run.size for run in runs)
    if count > MOST_IDS:
        raise MeshError(f"{count} devices in an order that no axes of a mesh have; at most {MOST_IDS} can be listed")
    ids = [0]
    for stride, size in runs:
        ids = [start + step * stride for start in ids for step in range(size)]
    return tuple(ids)


def _read_named(reader: Reader) -> RawSharding | Untiled:
    """Reads what follows `mesh`: its axes, its device ids, and the axes of each dim, or one word for all dims."""
    reader.need("[", "write the mesh as mesh['x'=4,'y'=2]")
    axes = reader.items(reader.axis_size, "]")
    ids: tuple[int, ...] | None = None
    if reader.match(_IDS):
        runs, ids = _read_devices(reader, math.prod(size for _, size in axes))
        reader.need(")", "close the device ids with )")
        ids = list_run_ids(runs or ()) if ids is None else ids
    mesh, advice = RawMesh(axes, ids), "one {} per dim in [] follows the mesh, as in {mesh['x'=2], [{'x'}, {}]}"
    reader.need(",", advice)
    if reader.sees("["):
        return reader.value(_KEYS)._replace(mesh=mesh)
    at, word = reader.at, reader.word()
    if word not in KINDS:
        reader.fail(advice, at)
    if word == "manual":
        return _refuse_sharding(reader, _MANUAL)
    if not axes:
        return Untiled(word)
    unreduced = tuple(name for name, _ in axes) if word == "unreduced" else ()
    reduction = reader.reduction() if word == "unreduced" and reader.take("=") else "sum"
    return RawSharding((), unreduced=unreduced, reduction=reduction, mesh=mesh)


def _place_tiling(raw: Tiling, rank: int) -> Placed:
    """Places each tile dim on axes of the iota where these divide, else on an axis of its own."""
    if len(raw.sizes) - len(raw.kinds) != rank:
        raise LayoutError(
            f"it has {len(raw.sizes) - len(raw.kinds)} tile dims of an array ({len(raw.sizes)} less {len(raw.kinds)} "
            f"for last tile dims), but the array has {rank}; give one tile size per dim, 1 for a dim that is not split"
        )
    dims = None if raw.runs is None else _deal_runs(raw.runs, raw.sizes)
    if raw.runs is not None and dims is not None:
        mesh = Mesh((f"d{at}", run.size) for at, run in enumerate(sorted(raw.runs, reverse=True)))
        axes = [tuple(sub for run in dim for sub in mesh.sub_axes(*run)) for dim in dims]
    else:
        split = [size for size in raw.sizes if size > 1]
        ids = raw.ids or list_run_ids(raw.runs or ())
        mesh = Mesh(((f"d{at}", size) for at, size in enumerate(split)), device_ids=ids)
        names = iter(mesh.axes)
        axes = [(mesh.sub_axis(next(names)),) if size > 1 else () for size in raw.sizes]
    last = zip(raw.kinds, axes[rank:], strict=True)
    return Placed(mesh, tuple(axes[:rank]), tuple(sub for kind, dim in last if kind == "unreduced" for sub in dim))


def _deal_runs(runs: tuple[IdRun, ...], sizes: tuple[int, ...]) -> list[list[IdRun]] | None:
    """Deals the runs out to the tile dims, major to minor; None if a size cuts a run unevenly.

    sizes 2, 1, 4 of runs 4, 2    the first takes 2 of the run of 4, the last the other 2 and the run of 2

    At every step the sizes still to be filled and the runs still to be dealt have the same product.
    """
    left = list(reversed(runs))
    dims: list[list[IdRun]] = []
    for size in sizes:
        dim: list[IdRun] = []
        while size > 1:
            stride, have = left.pop()
            taken = math.gcd(size, have)
            if taken not in (size, have):
                return None
            # The major part of the run, whose ids are farther apart.
            dim.append(IdRun(stride * (have // taken), taken))
            if taken < have:
                left.append(IdRun(stride, have // taken))
            size //= taken
        dims.append(dim)
    return dims


# Shardy's tensor shardings, read into plain data.
#
#     sharding = ["sdy.sharding ="] ["#sdy.sharding"] "<" mesh "," value ">"
#              | "#sdy.sharding_per_value<[<" mesh "," value ">]>"      one value only
#              | value                                                  as in `sharding`
#     mesh     = "@" symbol | "mesh<[" [axis-size {"," axis-size}] "]" ["," "device_ids" "=" "[" ids "]"] ">"
#
# For example `#sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}], unreduced={"z"}>`: dim 0 is split by x and by
# half of y, dim 1 is whole (and open to the compiler), and the array is still a sum over z.


_SYMBOL = re.compile(r"@(?:[A-Za-z0-9_$.\-]+|\"[^\"]*\")")
_SHARDY_HEAD = re.compile(r"sdy\.sharding\s*=")
_SHARDY_IDS = re.compile(r",\s*device_ids\s*=")


def parse_shardy(text: str) -> RawSharding:
    """Reads one sharding; raises `NotationError` with the place that does not parse.

    >>> parse_shardy('#sdy.sharding<@mesh, [{"x", "y":(1)2}, {?}], unreduced={"z"}>').dims
    (('x', 'y:(1)2'), ())
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotationError(f"Shardy sharding {quoted(text)} is not text; give a str")
    reader = Reader("Shardy sharding", text.replace('\\"', '"'))  # quotes are escaped inside HLO attributes
    reader.match(_SHARDY_HEAD)
    if reader.take("#sdy.sharding_per_value"):
        # A list of exactly one sharding, <[<@mesh, [{}]>]>.
        reader.need("<", "write #sdy.sharding_per_value<[...]>")
        reader.need("[", "write #sdy.sharding_per_value<[...]>")
        reader.need("<", "a per-value sharding has its values in <>, as in [<@mesh, [{}]>]")
        raw = _read_framed(reader)
        if reader.take(","):
            reader.fail("it lists several values; give the sharding of one of them")
        reader.need("]", "close the list of values with ]>")
        reader.need(">", "close the list of values with ]>")
    elif reader.take("#sdy.sharding") or reader.sees("<"):
        reader.need("<", 'write #sdy.sharding<@mesh, [{"x"}, {}]>')
        raw = _read_framed(reader)
    else:
        raw = reader.value()
    reader.end()
    return raw


def _read_framed(reader: Reader) -> RawSharding:
    """Reads the mesh and the value after `<`, and the closing `>`."""
    mesh: RawMesh | None = None
    if not reader.match(_SYMBOL):
        advice = 'name the mesh, as in <@mesh, [{}]>, or write it, as in <mesh<["x"=2]>, [{"x"}]>'
        for token in ("mesh", "<", "["):
            reader.need(token, advice)
        axes = reader.items(reader.axis_size, "]")
        ids = None
        if reader.match(_SHARDY_IDS):
            reader.need("[", "write device_ids=[0, 1]")
            ids = reader.items(lambda: reader.number("device ids are whole numbers"), "]")
        reader.need(">", advice)
        if ids and not axes:
            raise LayoutError(f"Shardy sharding {quoted(reader.text)}: {NO_TILE.format(device=ids[0])}")
        mesh = RawMesh(axes, ids)
    reader.need(",", "a comma follows the mesh, as in <@mesh, [{}]>")
    raw = reader.value()
    reader.need(">", "close the sharding with >")
    return raw._replace(mesh=mesh)
