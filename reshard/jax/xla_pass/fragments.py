"""Fragments: plans compiled for the devices and memory layouts of a program, captured before they are scheduled.

A fragment is a module with a parameter for each tile before, and a result for each tile after. XLA compiles it as
it compiles any program, and hands it to our pass at the stage at which it hands over the program itself. So a fragment
is spelled as this compiler on this platform spells it, and is never written by hand.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as JaxLayout
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from reshard import hlo
from reshard.doctor.batch_ops import BatchOp
from reshard.doctor.equivalence import Proofs
from reshard.doctor.infer_layouts import Cuts, find_part_cuts
from reshard.doctor.proposals import ProgramCost
from reshard.doctor.shifts import HaloExchange, Shift, ShiftCell, Sizes, plan_exchange
from reshard.errors import SpliceError
from reshard.hlo import Array, Module
from reshard.hlo.proto import INSTRUCTIONS, ModuleProto
from reshard.jax.xla_pass.measured_programs import measure_program
from reshard.jax.xla_pass.program_peaks import CompilingThread
from reshard.lower import lower_plan
from reshard.lower.to_shard_map import LANES, tile_function
from reshard.plans.plan import Plan
from reshard.types import dtypes
from reshard.types.mesh import Mesh

_TILE = re.compile(r"\(([\d,]+)\)")
_ORDER = re.compile(r"^([\d,]*)(?::T((?:\([\d,]+\))+))?$")
_LONG = 1 << 20  # bytes of a constant
_LITERAL, _TARGET = 8, 28  # fields of an instruction
_capturing = CompilingThread[list[bytes]]("reshard-fragment")


Tiles = tuple[jax.Array, ...]


class MoveKey(NamedTuple):
    """A move in a fragment: the plan, the tile after, how the source's digits lie, and the number of the tile before.

    The digits, their `start` and the `pick` are those of an `InferredMove`.
    """

    plan: Plan
    after: Array
    places: tuple[tuple[int, int], ...]
    start: int = 0
    pick: tuple[int, ...] = ()
    tile: int = 0

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], jax.Array]:
        """From the tile before to the one afterwards, for code inside a `shard_map` over all axes.

        The conversions that the program has on the way come first or last, so that the narrowest dtype is moved.
        """
        run = tile_function(lower_plan(self.plan), axes)
        moved = dtypes.canonical(self.plan.source.dtype)

        def run_in_lanes(tile: jax.Array) -> jax.Array:
            lanes = jnp.broadcast_to(tile[..., np.newaxis], (*tile.shape, LANES))
            return jax.vmap(run, -1, -1)(jax.lax.optimization_barrier(lanes))[..., 0]

        def move(tile: jax.Array) -> jax.Array:
            tile = in_places(tile, self.places, self.start).astype(moved).reshape(self.plan.source.tile_shape)
            if self.pick and tile.size < LANES:
                # A TPU gathers a few numbers as a sum with zeros, which makes 0 of -0: each goes in a row of its own.
                tile = jax.lax.platform_dependent(tile, tpu=run_in_lanes, default=run)
            else:
                tile = run(tile)
            return tile[self.pick].reshape(self.after.dims).astype(dtypes.canonical(self.after.dtype))

        return move


class JoinKey(NamedTuple):
    """A result that is put together of those of several moves, from the `first` on: cells between the `cuts`."""

    after: Array
    cuts: Cuts
    first: int


@dataclass(frozen=True)
class FragmentKey:
    """What a fragment is compiled for: the tiles before, and the moves that yield those after.

    Each move yields a result, or all of them are put together as the `joins` say.
    """

    befores: tuple[Array, ...]
    moves: tuple[MoveKey, ...]
    joins: tuple[JoinKey, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh of its layouts."""
        return self.moves[0].plan.source.mesh

    @property
    def afters(self) -> tuple[Array, ...]:
        """The arrays that it yields."""
        return tuple(one.after for one in self.joins or self.moves)

    def __str__(self) -> str:
        return ", ".join(f"{one.plan.source} -> {one.plan.target}" for one in self.moves)

    def function(self, axes: dict[str, int]) -> Callable[..., Tiles]:
        """From the tiles before to those afterwards, for code inside a `shard_map` over all axes."""
        runs = [(one.tile, one.function(axes)) for one in self.moves]

        def move(*tiles: jax.Array) -> Tiles:
            moved = tuple(run(tiles[at]) for at, run in runs)
            return tuple(join_cells(moved[one.first :], one.cuts) for one in self.joins) or moved

        return move


def join_cells(cells: Sequence[jax.Array], cuts: Cuts) -> jax.Array:
    """The array whose cells between the cuts are the first of these, in row-major order.

    They are joined along one dim after another, the last one first.
    """
    parts = list(cells[: math.prod(len(one) - 1 for one in cuts)])
    for dim in reversed(range(len(cuts))):
        count = len(cuts[dim]) - 1
        rows = [parts[at : at + count] for at in range(0, len(parts), count)]
        parts = [row[0] if count == 1 else jnp.concatenate(row, dim) for row in rows]
    return parts[0]


class Fragment(NamedTuple):
    """A captured fragment: its module, and what it costs as it is compiled.

    `peak_bytes` is what a device holds at its peak, both tiles included, `received_bytes` what it receives in how many
    `launches` of collectives.
    """

    module: bytes
    peak_bytes: int
    received_bytes: int = 0
    launches: int = 0


class Fragments:
    """The fragments compiled so far for one set of devices, in the order of the program's device assignment.

    `program_peaks` are those of `ProgramPeaks`, `proofs` what was proved of the chains that they replaced, and
    `outcomes` what became of whole modules.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = tuple(devices)
        self._known: dict[Key, Fragment] = {}
        self.program_peaks: dict[tuple[bytes, bytes], ProgramCost] = {}
        self.outcomes: dict[tuple[object, ...], Any] = {}
        self.proofs = Proofs()

    @property
    def platform(self) -> str:
        """The platform of the devices: `cpu`, `tpu`, `gpu` ..."""
        return self.devices[0].platform

    @property
    def processes(self) -> int:
        """The processes that share the platform: what adds up sums differs there, even of the devices of one."""
        everywhere = getattr(self.devices[0], "client", None)
        return len({device.process_index for device in (everywhere.devices() if everywhere else self.devices)})

    def get(self, key: Key) -> Fragment:
        """The fragment of a plan; raises `SpliceError` where the compiler makes none."""
        if key in self._known:
            return self._known[key]
        captured: list[bytes] = []

        def measured() -> tuple[int, int, int]:
            # Loops count in 32 bits without it: XLA:TPU splits a counter of 64 bits into two numbers.
            wide = any(dtypes.bits(dtypes.canonical(one.dtype)) >= 64 for one in (*key.befores, *key.afters))
            with jax.enable_x64(wide or isinstance(key, OpFragmentKey)):
                lowered = _lower_fragment(key, self.devices)

                def compile_it(options: Mapping[str, Any]) -> Any:
                    captured.clear()
                    return lowered.compile(dict(options)).runtime_executable()

                figures = measure_program(self.platform, compile_it)
            (traffic,) = figures.read_traffic()
            if not traffic.exact:
                raise SpliceError("it is not known how often a loop of it runs")
            return figures.peak_bytes, traffic.received_bytes, traffic.launches

        try:
            costs = _capturing.run(captured, measured)
        except Exception as error:  # XLA's errors have no class of their own; the chain stays as it is.
            reason = str(error).partition("\n")[0]
            raise SpliceError(f"{key}: it does not compile here ({reason})") from error
        if len(captured) != 1:
            raise SpliceError(f"{key}: it does not compile here ({len(captured)} modules were captured)")
        self._known[key] = Fragment(captured[0], *costs)
        return self._known[key]


def is_capturing() -> bool:
    """Whether this thread is compiling a fragment."""
    return _capturing.mark is not None


def capture_module(module: bytes) -> bool:
    """Whether this thread is compiling a fragment; keeps the module if so."""
    into = _capturing.mark
    if into is None:
        return False
    into.append(bytes(module))
    return True


def _lower_fragment(key: Key, devices: Sequence[Any]) -> Any:
    """The fragment's program. One with several results yields a constant as well.

    So its root is always a tuple of instructions, and never one instruction that yields them all.
    """
    axes = {f"axis{at}": axis for at, axis in enumerate(key.mesh.axes.values())}
    mesh = JaxMesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    spec = PartitionSpec(tuple(axes))
    function, afters = key.function(axes), key.afters

    def moved(*tiles: jax.Array) -> Any:
        made = function(*tiles)
        return (*made, jax.numpy.zeros(1, bool)) if len(afters) > 1 else next(iter(made))

    sharding = NamedSharding(mesh, spec)
    shapes = [
        tuple(len(devices) * size if dim == 0 else size for dim, size in enumerate(one.dims)) for one in key.befores
    ]
    formats = [Format(_layout_of(one), sharding) for one in afters]
    jitted = jax.jit(
        jax.shard_map(moved, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        in_shardings=tuple(Format(_layout_of(one), sharding) for one in key.befores),
        out_shardings=(*formats, sharding) if len(formats) > 1 else formats[0],
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, dtypes.canonical(one.dtype), sharding=sharding)
        for shape, one in zip(shapes, key.befores, strict=True)
    ]
    return jitted.lower(*arguments)


def in_places(tile: jax.Array, places: Sequence[tuple[int, int]], start: int = 0) -> jax.Array:
    """A part of a tile as its digits, given as radices and strides in the tile; a dim for each, in the given order."""
    if not places:  # One element: a TPU would copy a tile that is made flat.
        at = [int(index) for index in np.unravel_index(start, tile.shape)]
        return jax.lax.slice(tile, at, [index + 1 for index in at]).reshape(())
    by_place = sorted(range(len(places)), key=lambda at: -places[at][1])
    order = [by_place.index(at) for at in range(len(places))]
    is_whole = math.prod(radix for radix, _ in places) == tile.size
    cuts = [] if is_whole else find_part_cuts(places, start, tile.size)
    tile = tile if is_whole else tile.reshape(-1)
    for cut in cuts:
        tile = jax.lax.slice_in_dim(tile, cut.first, cut.after, cut.step, -1)
        tile = tile.reshape(*tile.shape[:-1], *cut.sizes)
    return tile.reshape([places[at][0] for at in by_place]).transpose(order)


def _layout_of(array: Array) -> JaxLayout:
    """The memory layout of an array in HLO text, as jax writes it."""
    text = _ORDER.match(array.layout)
    if text is None:
        raise SpliceError(f"the memory layout {array.layout} is not known")
    minor_to_major = [int(dim) for dim in text[1].split(",") if dim]
    tiles = [tuple(int(size) for size in tile.split(",")) for tile in _TILE.findall(text[2] or "")]
    return JaxLayout(tuple(reversed(minor_to_major)), tuple(tiles) or None)


# What only jaxlib says of a serialized module: its text, and the spelling of its shardings.


def print_module(module: Any) -> str:
    """The text of a module, serialized or jaxlib's own, with the long constants that have tables of offsets."""
    jaxlib = _import_hlo()
    options = jaxlib.HloPrintOptions()
    options.print_large_constants = True
    own = jaxlib.HloModule.from_serialized_hlo_module_proto(module) if isinstance(module, bytes) else module
    return own.to_string(options)


def read_module(module: bytes) -> Module:
    """A serialized module as XLA reads and prints it, with a call of the name of its digest for each long constant.

    Raises `SpliceError` if XLA refuses the module: handed back, it would fail the compile.
    """
    proto = ModuleProto.decode(module)
    long = [one for one in proto.computations if any(len(each) > _LONG for each in one.message.all_data(INSTRUCTIONS))]
    for one in (one for computation in long for one in computation.instructions):
        literal = one.message.data(_LITERAL) or b""
        if len(literal) > _LONG:  # To print and to read 100 MB takes 17 s.
            one.opcode = "custom-call"
            one.message.remove(_LITERAL)
            one.message.set_data(_TARGET, hashlib.blake2b(literal, digest_size=16).hexdigest().encode())
    try:
        return hlo.parse(print_module(proto.encode() if long else module))
    except (RuntimeError, ValueError) as error:
        raise SpliceError(f"XLA does not read the module: {error}") from None


def parameter_shardings(module: bytes) -> tuple[str, ...]:
    """The shardings of the parameters of a serialized module's entry, in HLO's notation; empty if it does not say."""
    shardings = _import_hlo().HloModule.from_serialized_hlo_module_proto(module).spmd_parameters_shardings
    return tuple(str(_import_hlo().HloSharding.from_proto(one)) for one in shardings or ())


def _import_hlo() -> Any:
    """jaxlib's own module for HLO, which has no public name."""
    return importlib.import_module("jaxlib._hlo")


# Fragments that run an operation on each device's own rows: its source is moved there, and its results from there.


class OutputKey(NamedTuple):
    """A result of an operation: its number, its plan, the digits of the tile that the plan yields, and its array."""

    number: int
    plan: Plan
    order: tuple[tuple[int, int], ...]
    after: Array


@dataclass(frozen=True)
class OpFragmentKey:
    """What a fragment with an operation is compiled for.

    `plan` moves the only tile of `befores`, whose digits lie at `places`, to whole rows. `indices` has the dim of which
    an operand is the index, for each operand; None for the data.
    """

    op: BatchOp
    indices: tuple[int | None, ...]
    plan: Plan
    befores: tuple[Array]
    places: tuple[tuple[int, int], ...]
    outputs: tuple[OutputKey, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh of its layouts."""
        return self.plan.source.mesh

    @property
    def afters(self) -> tuple[Array, ...]:
        """The arrays that it yields."""
        return tuple(output.after for output in self.outputs)

    def __str__(self) -> str:
        return f"{self.op.target or self.op.kind} on {self.plan.target}"

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], Tiles]:
        """From the tile before to those afterwards, for code inside a `shard_map` over all axes."""
        gather, run = tile_function(lower_plan(self.plan), axes), rows_function(self.op, self.indices)
        moves = [tile_function(lower_plan(output.plan), axes) for output in self.outputs]

        def moved(tile: jax.Array) -> Tiles:
            rows = gather(in_places(tile, self.places).reshape(self.plan.source.tile_shape))
            results = run(rows)
            tiles = [move(results[one.number]) for move, one in zip(moves, self.outputs, strict=True)]
            return tuple(_lay_out_result(tile, one) for tile, one in zip(tiles, self.outputs, strict=True))

        return moved


def _lay_out_result(tile: jax.Array, output: OutputKey) -> jax.Array:
    """The tile of a layout as the array that the program uses."""
    by_place = sorted(range(len(output.order)), key=lambda at: -output.order[at][1])
    digits = tile.reshape([radix for radix, _ in output.order]).transpose(by_place)
    return digits.reshape(output.after.dims)


def rows_function(op: BatchOp, indices: Sequence[int | None]) -> Callable[[jax.Array], Tiles]:
    """The operation on some of the rows, which yields all of its results.

    >>> import jax.numpy as jnp
    >>> rows = Array("f32", (8, 4))
    >>> sort = BatchOp("sort", "", (0,), (rows, Array("s32", (8, 4))), (rows, Array("s32", (8, 4))), stable=True)
    >>> values, order = rows_function(sort, (None, 1))(jnp.array([[3.0, 1.0, 2.0, 0.0]]))
    >>> order
    Array([[3, 1, 2, 0]], dtype=int32)
    """

    def run(tile: jax.Array) -> Tiles:
        operands = [
            tile if dim is None else jax.lax.broadcasted_iota(dtypes.canonical(array.dtype), tile.shape, dim)
            for array, dim in zip(op.operands, indices, strict=True)
        ]
        if op.kind == "fft":
            return (jax.lax.fft(operands[0], op.target, op.lengths),)  # pyright: ignore[reportArgumentType]
        if op.kind == "sort":
            (dim,) = op.inner(op.operands[0])
            return tuple(jax.lax.sort(tuple(operands), dimension=dim, is_stable=op.stable, num_keys=1))
        if op.kind == "top_k":
            return tuple(jax.lax.top_k(operands[0], op.results[0].dims[-1]))
        # Foreign code, which says nothing of its shapes: they are those of the program, but of fewer rows.
        rows = {dim: operands[0].shape[dim] for dim in op.batch}
        shapes = [[rows.get(dim, size) for dim, size in enumerate(array.dims)] for array in op.results]
        results = [
            jax.ShapeDtypeStruct(shape, dtypes.canonical(array.dtype))
            for shape, array in zip(shapes, op.results, strict=True)
        ]
        layouts = [[_major_to_minor_dims(array) for array in arrays] for arrays in (op.operands, op.results)]
        call = jax.ffi.ffi_call(op.target, results, input_layouts=layouts[0], output_layouts=layouts[1])
        return tuple(call(*operands, **{name: np.dtype(dtype).type(value) for name, value, dtype in op.attributes}))

    return run


def _major_to_minor_dims(array: Array) -> list[int]:
    if not re.fullmatch(r"[\d,]*", array.layout):
        raise SpliceError(f"the memory layout {array.layout} is not known")
    return [int(dim) for dim in array.layout.split(",") if dim][::-1]


# Fragments that put results together from boxes of neighbours' tiles: what devices exchange, and concatenations.


@dataclass(frozen=True)
class ShiftKey:
    """What such a fragment is compiled for: the shifts of one tile, what each yields, and the dtype that is moved.

    `befores` has that tile alone.
    """

    shifts: tuple[Shift, ...]
    befores: tuple[Array, ...]
    afters: tuple[Array, ...]
    dtype: str

    @property
    def mesh(self) -> Mesh:
        """All devices, along one axis."""
        return Mesh(devices=self.shifts[0].devices)

    def __str__(self) -> str:
        return f"{len(self.shifts)} shifts of {self.dtype}{list(self.befores[0].dims)}"

    def function(self, axes: dict[str, int]) -> Callable[[jax.Array], Tiles]:
        """From the tile before to those afterwards, for code inside a `shard_map` over one axis."""
        exchange = plan_exchange(self.shifts, self.befores[0].dims)
        if exchange is None:
            raise SpliceError(f"{self}: no exchange brings them in so few permutes")

        def moved(tile: jax.Array) -> Tiles:
            tile = tile.astype(dtypes.canonical(self.dtype))
            (axis,) = axes
            received = run_halo_exchange(exchange, tile, axis)
            results: list[jax.Array] = []
            for shift, after in zip(exchange.shifts, self.afters, strict=True):
                parts = [_make_cell(exchange, cell, tile, received, axis) for cell in shift.cells]
                results.append(join_cells(parts, shift.cuts).astype(dtypes.canonical(after.dtype)))
            return tuple(results)

        return moved


Key = FragmentKey | OpFragmentKey | ShiftKey
"""What a fragment is compiled for: the tiles that it takes, those that it yields, and the function between them."""


def run_halo_exchange(exchange: HaloExchange, tile: jax.Array, axis: str) -> dict[tuple[int, int], jax.Array]:
    """The parcels that each device receives, by the numbers of their launches and their own."""
    received: dict[tuple[int, int], jax.Array] = {}
    for number, launch in enumerate(exchange.launches):
        pairs = [(sender, target) for target, sender in enumerate(launch.senders) if sender >= 0]
        sent: list[jax.Array] = []
        for parcel in launch.parcels:
            starts: list[Sizes | None] = [None] * len(launch.senders)
            for sender, target in pairs:
                if parcel.homes[target] < 0:
                    continue
                starts[sender] = parcel.starts[target]
                if parcel.passed_on is not None:
                    by, at = parcel.passed_on
                    first = exchange.launches[by].parcels[at].starts[sender]
                    starts[sender] = tuple(one - low for one, low in zip(parcel.starts[target], first, strict=True))
            held = tile if parcel.passed_on is None else received[parcel.passed_on]
            sent.append(_cut_where(held, starts, parcel.sizes, axis))
        # Boxes that differ in the size of one dim lie side by side; others are sent as lines.
        dims = [dim for dim in range(tile.ndim) if len({parcel.sizes[dim] for parcel in launch.parcels}) > 1]
        dim = dims[0] if dims else 0
        if len(dims) > 1:
            sent, dim = [one.reshape(-1) for one in sent], 0
        arrived = jax.lax.ppermute(sent[0] if len(sent) == 1 else jnp.concatenate(sent, dim), axis, pairs)
        first = 0
        for at, (parcel, one) in enumerate(zip(launch.parcels, sent, strict=True)):
            part = jax.lax.slice_in_dim(arrived, first, first + one.shape[dim], axis=dim)
            received[number, at] = part.reshape(parcel.sizes)
            first += one.shape[dim]
    return received


def _make_cell(
    exchange: HaloExchange, cell: ShiftCell, tile: jax.Array, received: dict[tuple[int, int], jax.Array], axis: str
) -> jax.Array:
    """One cell: each device has it itself, has received it, or has padding there."""
    starts: dict[tuple[int, int] | None, list[Sizes | None]] = {}
    for device, home in enumerate(cell.homes):
        if home < 0:
            continue
        start, found = cell.starts[device], None
        if home != device:
            found = exchange.find(device, home, cell.box(device))
            if found is None:
                raise SpliceError(f"device {device} does not receive {cell.box(device)} of device {home}")
            first = exchange.launches[found[0]].parcels[found[1]].starts[device]
            start = tuple(one - low for one, low in zip(start, first, strict=True))
        starts.setdefault(found, [None] * len(cell.homes))[device] = start
    made: jax.Array | None = None
    if any(home < 0 for home in cell.homes):
        fill = np.array(cell.fill, np.int64).view(np.float64)
        made = jnp.full(cell.sizes, fill.astype(bool) if tile.dtype == bool else fill, tile.dtype)
    for found, own in starts.items():
        box = _cut_where(tile if found is None else received[found], own, cell.sizes, axis)
        if made is not None:
            made = jnp.where(_pick_own(np.array([one is not None for one in own]), axis), box, made)
        else:
            made = box
    if made is None:
        raise SpliceError("a cell has no devices")
    return made


def _cut_where(held: jax.Array, starts: Sequence[Sizes | None], sizes: Sizes, axis: str) -> jax.Array:
    """The box of these sizes that begins where each device says; where None says nothing, any box will do."""
    known = sorted({one for one in starts if one is not None})
    if len(known) == 1:
        return jax.lax.slice(held, known[0], [first + size for first, size in zip(known[0], sizes, strict=True)])
    table = np.array([known[0] if one is None else one for one in starts], np.int32)
    # A dim along which all begin alike keeps its number, so that compilers see it.
    at = [jnp.int32(column[0]) if (column == column[0]).all() else _pick_own(column, axis) for column in table.T]
    return jax.lax.dynamic_slice(held, at, sizes)


def _pick_own(table: np.ndarray[Any, Any], axis: str) -> jax.Array:
    return jnp.asarray(table)[jax.lax.axis_index(axis)]
