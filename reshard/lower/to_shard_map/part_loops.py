"""Steps run on one part of the tile after another, in a loop; several share one where the parts of each are those of
the next."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from reshard.lower.program import (
    AllGather,
    AllToAll,
    Exchange,
    InParts,
    Instruction,
    Permute,
    ReduceScatter,
    Slice,
    part_of,
    shape_of_part,
    transposing_cycles,
    transposing_passes,
)
from reshard.lower.to_shard_map.part_writers import (
    PartWriter,
    Run,
    choose_part_form,
    make_fused_writer,
    make_part_writer,
    open_cut,
    pack_as_it_is,
    slice_part,
    write_part,
)
from reshard.lower.to_shard_map.place import MeshPlace
from reshard.lower.to_shard_map.run_collectives import find_gathered_dim, finish_scattered, scatter_blocks, send_blocks
from reshard.lower.to_shard_map.tile_memory import (
    LANES,
    SUBLANES,
    choose_memory_order,
    fix_layout,
    join_blocks,
    make_unfilled,
    number_blocks,
    resize_tile,
)
from reshard.plans.rules.split_steps import Cut, Part, Regions, part_regions
from reshard.plans.step import Step

Array = jax.Array
Shape = Sequence[int]


UNROLLED_PARTS = 8


def are_unrolled(steps: Sequence[InParts]) -> bool:
    """Whether a TPU runs the parts of steps that share a loop one after another instead of in one: those of a gather.

    libtpu cuts the next part out while the last one is copied to its place, if where it lies is a constant; in a loop
    it does one after the other. Of an all-to-all before the gather it would pack several parts at once.
    """
    alone = all(isinstance(step.each, Slice | Permute | AllGather) for step in steps)
    return alone and isinstance(steps[-1].each, AllGather) and steps[-1].put.parts <= UNROLLED_PARTS


def run_part_loop(steps: Sequence[InParts], shapes: Sequence[Shape], place: MeshPlace, run: Run, tile: Array) -> Array:
    """The tile after steps that share a loop, each with the shape of the tile after it; `run` does a step on a part.

    A loop keeps one part in memory at a time; unrolled without barriers, XLA moves several at once.
    """
    default, on_tpu = choose_writers(steps[-1], shapes[-1], tile.dtype.name, place, run)
    shape, count = shapes[-1], steps[-1].put.parts
    unrolled = are_unrolled(steps)

    def fill(writer: PartWriter, tile: Array, unrolled: bool = False) -> Array:
        def pack(number: Array) -> Array:
            if writer.cut is not None and len(steps) == 1:
                return writer.cut(tile, number)
            return writer.pack(_run_before_last(steps, shapes, place, run, tile, number))

        def write(filled: Array, arrived: Array, number: Array) -> Array:
            return fix_layout(writer.write(filled, arrived, number))

        def write_next(number: Array, filled: Array) -> Array:
            return write(filled, writer.send(pack(number)), number)

        filled = make_unfilled(writer.carried, tile.dtype)
        if writer.overlaps:
            filled = overlap_parts(count, filled, pack, writer.send, write)
        elif unrolled:
            for number in range(count):
                at = jnp.asarray(number, jnp.int32)
                # Before the first part too: without a barrier libtpu would fill a result of up to 36 MiB on the chip,
                # and count it twice. Where the first part lies is hidden from it: nothing runs beside this one, which
                # would be cut out to HBM.
                if number:
                    tile, filled = lax.optimization_barrier((tile, filled))
                else:
                    tile, filled, at = lax.optimization_barrier((tile, filled, at))
                filled = write_next(at, filled)
        else:
            filled = lax.fori_loop(0, count, write_next, filled)
        return writer.tile(filled, shape)

    if on_tpu is None and not unrolled:
        return fill(default, tile)
    tpu = partial(fill, default if on_tpu is None else on_tpu, unrolled=unrolled)
    return lax.platform_dependent(tile, tpu=tpu, default=partial(fill, default))


def choose_writers(
    step: InParts, shape: Shape, dtype: str, place: MeshPlace, run: Run
) -> tuple[PartWriter, PartWriter | None]:
    """The writer of the parts of a step's result of this shape, and that on a TPU, where it is another one.

    A TPU keeps what a loop carries in the order of dims in which the loop writes it, whatever the padding, so its
    writer has the order in which the result lies in memory.
    """
    order, own = choose_memory_order(shape, dtype), tuple(range(len(shape)))
    overlapping = make_overlapping_writer(step, shape, place, own) if step.overlap else None
    if overlapping is not None:
        return overlapping, None if order == own else make_overlapping_writer(step, shape, place, order)
    on_tpu = make_fused_writer(step, shape, dtype, place)
    if on_tpu is None and order != own:
        on_tpu = make_part_writer(step, shape, place, run, order)
    return make_part_writer(step, shape, place, run), on_tpu


def _run_before_last(
    steps: Sequence[InParts], shapes: Sequence[Shape], place: MeshPlace, run: Run, tile: Array, number: Array
) -> Array:
    """A part of the tile after all steps but the last."""
    first, rest = steps[0], list(zip(steps[:-1], shapes, strict=False))
    shape, part = shape_of_part(first.put, shapes[0]), None
    if isinstance(first.each, Slice) and len(steps) > 1:
        part = slice_part(first.each, first.take, place.anew(), tile, number)
    if part is not None:
        part, rest = resize_tile(part, shape), rest[1:]
    else:
        part = cut_part(first.take, tile, number)
    # On a TPU the part is cut out before anything is done with it: XLA may give the tile the part's layout else. Of an
    # exchange that reads at most half of a part, all would be read then: it is left where the minor dim stays minor.
    little = False
    dtype, read = part.dtype.name, Counter[int]()
    if isinstance(first.each, Exchange):
        for transfer in itertools.chain(first.each.local, *first.each.rounds):
            read[transfer.sender] += transfer.elements
        minors = {choose_memory_order(each, dtype)[-1] for each in (part.shape, shapes[0])}
        little = len(minors) == 1 and 2 * max(read.values(), default=0) <= part.size
    if not little:
        part = lax.platform_dependent(part, tpu=lax.optimization_barrier, default=pack_as_it_is)
    for step, after in rest:
        part = run(step.each, place.anew(), part, shape_of_part(step.put, after))
    return part


def cut_part(cut: Cut, tile: Array, number: Array) -> Array:
    """A part of a tile, cut out in the tile's order of dims."""
    order = choose_memory_order(tile.shape, tile.dtype.name)
    if cut.outer == 1:
        part = lax.dynamic_slice_in_dim(tile, number * cut.inner, cut.inner, cut.axis, allow_negative_indices=False)
        return fix_layout(part, order)
    spread = tile.reshape(open_cut(cut, tile.shape, cut.parts))
    part = lax.dynamic_slice_in_dim(spread, number, 1, cut.axis + 1, allow_negative_indices=False)
    digits = (range(dim, dim + 3) if dim == cut.axis else [dim + 2 * (dim > cut.axis)] for dim in order)
    part = fix_layout(part, [axis for each in digits for axis in each])
    return part.reshape(shape_of_part(cut, tile.shape))


# Which steps in parts share a loop: those that follow each other, the parts of each being those of the next.
#
#   mesh <x=4, y=2>, f32[{x}{y}8, 3, 5] -> f32[{y}{x}8, 3, 5] -> f32[{y}32, 3, 5]     a permute and a gather, in 2 parts
#
#     part 0   rows 0-3 of the tile   permuted, gathered, and written to rows 0-3, 8-11, ... of the result
#     part 1   rows 4-7               rows 4-7, 12-15, ...
#
# The tile between the two is never whole. Parts in place of each other share no loop: they lie in one buffer.


def group_instructions(instructions: Sequence[Instruction]) -> list[range]:
    """The numbers of all instructions, those that share a loop together."""
    return _group_loops([each if isinstance(each, InParts) and not each.in_place else None for each in instructions])


def group_steps(steps: Sequence[Step]) -> list[tuple[Step, ...]]:
    """All steps, those that share a loop together.

    >>> from reshard.types import Layout, Mesh
    >>> from reshard.plans.rules import StepMode
    >>> texts = ("f32[{x}{y}8, 3, 5]", "f32[{y}{x}8, 3, 5]", "f32[{y}32, 3, 5]")
    >>> ends = [Layout.parse(text, Mesh(x=4, y=2)) for text in texts]
    >>> two = [Step("permute", *ends[:2], StepMode(parts=2)), Step("all_gather", *ends[1:], StepMode(parts=2))]
    >>> [len(loop) for loop in group_steps(two)]
    [2]
    """
    loops = _group_loops([None if step.mode.in_place else part_of(step) for step in steps])
    return [tuple(steps[at] for at in loop) for loop in loops]


def _group_loops(parts: Sequence[InParts | Part | None]) -> list[range]:
    loops: list[range] = []
    for at, part in enumerate(parts):
        joins = bool(at) and share_loop(parts[at - 1], part)
        loops.append(range(loops.pop().start if joins else at, at + 1))
    return loops


def share_loop(before: InParts | Part | None, after: InParts | Part | None) -> bool:
    """Whether the parts of a step are those of the next."""
    return before is not None and after is not None and before.put == after.take


# Parts on their way while others are written: what a GPU runs beside a collective.
#
#     sent       part 1            part 2            part 3            ...
#     beside     part 0 written    part 1 written    part 2 written
#
# A turn of the loop does two parts. With one, the part that the loop carries to the next turn would have to take the
# place of the one before it, which is still being written, so XLA would copy it. With two, each takes the other's
# place. At most two parts of what is sent and two of what arrives are in memory.


def overlap_parts(
    count: int,
    start: Array,
    pack: Callable[[Array], Array],
    send: Callable[[Array], Array],
    write: Callable[[Array, Array, Array], Array],
) -> Array:
    """`start` with all of `count` parts written by number, each while the next one is on its way."""

    def index(number: Array | int) -> Array:
        return jnp.asarray(number, jnp.int32)

    def one(filled: Array, arrived: Array, following: Array, number: Array | int) -> tuple[Array, Array]:
        # The part before this one is written before the next one is sent, into its memory.
        following, filled = lax.optimization_barrier((following, filled))
        return write(filled, arrived, index(number)), send(following)

    def two(turn: Array, parts: tuple[Array, Array]) -> tuple[Array, Array]:
        number = 2 * turn
        filled, arrived = one(*parts, pack(index(number + 1)), number)
        # XLA would pack both parts at once, before either is sent.
        last, _ = lax.optimization_barrier((number + 2, filled))
        return one(filled, arrived, pack(index(last)), number + 1)

    turns = (count - 1) // 2
    filled, arrived = lax.fori_loop(0, turns, two, (start, send(pack(index(0)))))
    for number in range(2 * turns, count - 1):
        filled, arrived = one(filled, arrived, pack(index(number + 1)), number)
    return write(filled, arrived, index(count - 1))


def make_overlapping_writer(step: InParts, shape: Shape, place: MeshPlace, order: tuple[int, ...]) -> PartWriter | None:
    """The writer of parts that are one collective each, apart from what packs and writes them; None for other steps.

    The result's dims are in this order while the loop runs.
    """
    each, part_shape = step.each, shape_of_part(step.put, shape)
    put = step.put._replace(axis=order.index(step.put.axis))
    pack: Callable[[Array], Array] = pack_as_it_is
    unpack: Callable[[Array], Array] = pack_as_it_is
    if isinstance(each, AllToAll):
        pack, send = partial(number_blocks, each.send), partial(send_blocks, each.groups, place)
        unpack = partial(join_blocks, each.receive)
    elif isinstance(each, AllGather):
        rows = find_gathered_dim(each.receive) == 0
        unpack = partial(resize_tile, shape=part_shape) if rows else partial(join_blocks, each.receive)

        def pack_tile(part: Array) -> Array:
            part = resize_tile(part, each.send.padded)
            return part if rows else part[np.newaxis]

        pack, send = pack_tile, partial(lax.all_gather, axis=0, tiled=True, **place.group(each.groups))
    elif isinstance(each, ReduceScatter) and each.reduction in ("sum", "mean"):
        pack, send = partial(number_blocks, each.send), partial(scatter_blocks, each.groups, place)
        unpack = partial(finish_scattered, each, shape=part_shape)
    elif isinstance(each, Permute):
        send = partial(place.permute, pairs=each.pairs)
    else:
        return None

    def write(filled: Array, arrived: Array, number: Array) -> Array:
        return write_part(put, filled, unpack(arrived).transpose(order), number)

    return PartWriter(tuple(shape[dim] for dim in order), order, pack, send, write, overlaps=True)


# A step whose parts take each other's place: a loop that XLA runs in the memory of a donated tile.
#
# The loop carries one buffer, which is the tile as it lies in memory, so that neither making it nor unmaking it moves
# anything. On a TPU the two minor dims lie in tiles of 8 x 128 elements, and the buffer is a list of them, or of rows:
#
#     bf16[2048, 8192]   in memory 256 x 64 tiles   buffer (256 * 64, 8, 128)


@dataclass(frozen=True)
class TileMemory:
    """How a tile lies in memory: its dims, major first, the last ones in units of several elements."""

    order: tuple[int, ...]
    unit: tuple[int, ...] = ()

    def extents(self, shape: Shape) -> list[int]:
        """The dims of a tile in memory, in units."""
        units = [1] * (len(shape) - len(self.unit)) + list(self.unit)
        return [shape[dim] // unit for dim, unit in zip(self.order, units, strict=True)]

    def buffer(self, tile: Array) -> Array:
        """The tile's units one after another."""
        extents = self.extents(tile.shape)
        inside = len(extents) - len(self.unit)
        pairs = zip(extents[inside:], self.unit, strict=True)
        opened = tile.transpose(self.order).reshape(*extents[:inside], *(size for pair in pairs for size in pair))
        return opened.transpose(self._units_last(inside)).reshape(-1, *self.unit)

    def tile(self, buffer: Array, shape: Shape) -> Array:
        """The tile of this shape whose units these are."""
        extents = self.extents(shape)
        opened = buffer.reshape(*extents, *self.unit)
        inside = len(extents) - len(self.unit)
        closed = opened.transpose(np.argsort(self._units_last(inside))).reshape([shape[dim] for dim in self.order])
        return closed.transpose(np.argsort(self.order))

    def settled(self, tile: Array) -> Array:
        """The tile, made as it lies in memory: a TPU would move tiles of 8 x 128 elements several times otherwise."""
        if not self.unit:
            return tile
        return lax.optimization_barrier(fix_layout(tile.transpose(self.order))).transpose(np.argsort(self.order))

    def _units_last(self, inside: int) -> list[int]:
        """The axes of a tile whose last dims are opened into (extent, unit), those of units last."""
        pairs = range(inside, inside + 2 * len(self.unit), 2)
        return [*range(inside), *pairs, *(at + 1 for at in pairs)]


@dataclass(frozen=True)
class LyingTiles:
    """How the tiles of a step's operand and result lie in memory, in the same units."""

    operand: TileMemory
    result: TileMemory

    def regions(self, take: Cut, operand: Shape, put: Cut, result: Shape) -> Regions:
        """Where the parts lie in tiles of these shapes."""
        take = take._replace(axis=self.operand.order.index(take.axis))
        put = put._replace(axis=self.result.order.index(put.axis))
        return part_regions(self.operand.extents(operand), take, self.result.extents(result), put)


_WIDTHS = ("float32", "bfloat16", "int8")
"""A dtype of each width, by which the order of dims may differ where there are few rows."""


def find_tiles_on_tpu(take: Cut, operand: Shape, put: Cut, result: Shape) -> LyingTiles | None:
    """How tiles of these shapes lie on a TPU; None if their parts do not consist of whole 8 x 128 tiles.

    >>> find_tiles_on_tpu(Cut(0, 1, 8, 8), (64, 512, 512), Cut(0, 8, 8, 8), (512, 512, 64)).result
    TileMemory(order=(0, 2, 1), unit=(512,))
    >>> find_tiles_on_tpu(Cut(0, 8, 8, 256), (16384, 1024), Cut(0, 1, 8, 256), (2048, 8192)).result
    TileMemory(order=(0, 1), unit=(8, 128))
    """
    if len(operand) < 2:
        return None
    if any(len({choose_memory_order(shape, dtype) for dtype in _WIDTHS}) > 1 for shape in (operand, result)):
        return None
    ends = [(shape, choose_memory_order(shape, _WIDTHS[0]), cut) for shape, cut in ((operand, take), (result, put))]
    for shape, order, cut in ends:
        # Both a tile and the pieces of a part consist of whole 8 x 128 tiles.
        units = dict(zip(order[-2:], (SUBLANES, LANES), strict=True))
        if any(shape[dim] % unit for dim, unit in units.items()) or cut.inner % units.get(cut.axis, 1):
            return None
    in_tiles = [TileMemory(order, (SUBLANES, LANES)) for _, order, _ in ends]
    minors = {shape[order[-1]] for shape, order, _ in ends}
    if len(minors) > 1 or any(cut.axis == order[-1] for _, order, cut in ends):
        return LyingTiles(*in_tiles)
    rows = (minors.pop(),)
    return LyingTiles(*(TileMemory(order, rows) for _, order, _ in ends))


def find_regions_on_tpu(take: Cut, operand: Shape, put: Cut, result: Shape) -> Regions | None:
    """Where parts in place of each other lie in a TPU's memory, or None if a TPU would copy the tile.

    >>> find_regions_on_tpu(Cut(1, 8, 8, 8), (64, 512, 512), Cut(1, 1, 8, 8), (512, 64, 512))
    Regions(outer=512, before=1, parts=8, after=1)
    """
    lying = find_tiles_on_tpu(take, operand, put, result)
    return None if lying is None else lying.regions(take, operand, put, result)


def writes_parts_over(step: InParts, operand: Shape, result: Shape, dtype: str) -> bool:
    """Whether a TPU cuts the parts of an all-to-all in place straight out of the tile, and writes them straight into
    it.

    No slots change places then, and rows of the minor dim stay whole: tiles of 8 x 128 elements would be put in another
    order, all of them.
    """
    lying, each = find_tiles_on_tpu(step.take, operand, step.put, result), step.each
    if lying is None or len(lying.operand.unit) > 1 or not isinstance(each, AllToAll):
        return False
    form = choose_part_form(step, result, dtype)
    straight = form.cut and not form.joined and form.kernels == 1
    return straight and not lying.regions(step.take, operand, step.put, result).transpositions


def run_parts_in_place(step: InParts, shape: Shape, place: MeshPlace, run: Run, tile: Array) -> Array:
    """The tile of this shape after a step that overwrites its operand part by part; `run` does it on a part."""

    def write_over(lying: LyingTiles, writer: PartWriter, tile: Array) -> Array:
        """The same where parts lie in the same places before and after: as in a loop from one tile to another."""
        before = tile.shape

        def write_next(number: Array, filled: Array) -> Array:
            operand = lying.operand.tile(lying.result.buffer(writer.tile(filled, shape)), before)
            assert writer.cut is not None
            return fix_layout(writer.write(filled, writer.send(writer.cut(operand, number)), number))

        start = lying.result.tile(lying.operand.buffer(tile), shape).transpose(writer.order).reshape(writer.carried)
        return writer.tile(lax.fori_loop(0, step.put.parts, write_next, fix_layout(start)), shape)

    def run_in(lying: LyingTiles, tile: Array) -> Array:
        """The same, in a buffer that is the tiles as they lie in memory."""
        where = lying.regions(step.take, tile.shape, step.put, shape)
        before, after = shape_of_part(step.take, tile.shape), shape_of_part(step.put, shape)
        unit = lying.operand.unit

        def overwrite_part(number: Array, buffer: Array) -> Array:
            region = lax.dynamic_slice_in_dim(buffer, number, 1, 1, allow_negative_indices=False)
            part = lying.operand.settled(lying.operand.tile(lax.optimization_barrier(region), before))
            moved = lying.result.settled(run(step.each, place.anew(), part, after))
            moved = lying.result.buffer(moved).reshape(region.shape)
            return fix_layout(lax.dynamic_update_slice_in_dim(buffer, moved, number, 1, allow_negative_indices=False))

        def transpose_slots(buffer: Array, outer: int, rows: int, columns: int) -> Array:
            """The buffer with (outer, rows, columns) slots as (outer, columns, rows) of them, in passes."""
            slot = tile.nbytes // (outer * rows * columns)
            for each in transposing_passes(outer, rows, columns, slot):
                slots = buffer.reshape(each.outer, each.rows * each.columns, -1, *unit)
                buffer = _transpose_slots(slots, each.rows)
            return buffer

        buffer = transpose_slots(lying.operand.buffer(tile), where.outer, where.before, where.parts)
        buffer = buffer.reshape(where.outer, where.parts, -1, *unit)
        buffer = lax.fori_loop(0, where.parts, overwrite_part, fix_layout(buffer))
        return lying.result.tile(transpose_slots(buffer, where.outer, where.parts, where.after), shape)

    rows = LyingTiles(*[TileMemory(tuple(range(tile.ndim)))] * 2)  # in the order of indices, but on a TPU
    tpu = find_tiles_on_tpu(step.take, tile.shape, step.put, shape)
    if tpu is None:
        return run_in(rows, tile)
    over = writes_parts_over(step, tile.shape, shape, tile.dtype.name)
    writer = make_fused_writer(step, shape, tile.dtype.name, place) if over else None
    on_tpu = partial(run_in, tpu) if writer is None else partial(write_over, tpu, writer)
    return lax.platform_dependent(tile, tpu=on_tpu, default=partial(run_in, rows))


def _transpose_slots(slots: Array, rows: int) -> Array:
    """The slots along axis 1, `rows` rows of them, transposed in place, with one slot in hand.

    Where the hand goes next is computed: a TPU takes longer to read a place from a table than to move 256 KiB.
    """
    columns = slots.shape[1] // rows
    cycles = transposing_cycles(rows, columns)
    ends = list(itertools.accumulate(map(len, cycles), initial=0))

    def one(turn: Array, carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slots, hand, at = carried
        for start, cycle in zip(ends, cycles, strict=False):
            at = jnp.where(turn == start, np.int32(cycle[0]), at)
        taken = lax.dynamic_slice_in_dim(slots, at, 1, 1, allow_negative_indices=False)
        slots = lax.dynamic_update_slice_in_dim(slots, hand, at, 1, allow_negative_indices=False)
        following = lax.rem(at, np.int32(columns)) * np.int32(rows) + lax.div(at, np.int32(columns))
        return fix_layout(slots), fix_layout(taken), following

    hand = make_unfilled((slots.shape[0], 1, *slots.shape[2:]), slots.dtype)
    start = fix_layout(slots), fix_layout(hand), jnp.zeros((), np.int32)
    return lax.fori_loop(0, ends[-1], one, start)[0] if cycles else slots
