"""Programs: a checked plan spelled out for every device, as plain data.

    slice            the block of its tile that each device keeps
    all_gather       groups; member j's tile is block j of everyone's result
    all_to_all       groups; block j of member i's tile is block i of member j's result
    reduce_scatter   groups; block j of everyone's tile, combined, is member j's result
    all_reduce       groups; everyone's tile, combined
    split_sum        the block of its tile that each device keeps, and where it goes in a tile of zeros; or zeros alone
    permute          (sender, receiver) pairs of whole tiles
    exchange         local copies, then rounds of transfers; in a round each device sends at most
                     one list of blocks and receives at most one; or in place, slot by slot
    reorder          every tile reshaped, transposed, reshaped: the same elements in another order; often no copy at all
    take, put        part of every tile; a part written into the tile that is there
    cast             every tile in another dtype

Devices are ids of the meshes. Tile views say how a tile falls into blocks. A runtime needs nothing else, and in
particular no layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.geometry.holders import Tile, tiles
from reshard.geometry.refine import Refinement, refine
from reshard.lower.colouring import EvenRounds, colour_edges
from reshard.lower.exchange_rounds import Exchange as Exchange
from reshard.lower.exchange_rounds import ExchangeInPlace, Transfer, lower_exchange, lower_in_place
from reshard.lower.groups import Groups, block_numbers, coordinate, groups_along
from reshard.plans.plan import Batch, Plan, Step
from reshard.plans.rules import tile_view
from reshard.plans.rules.collectives import VIEW_RULES
from reshard.plans.rules.split_steps import Cut, Part, split_step
from reshard.plans.rules.tile_view import TileView, gather_order, scatter_order
from reshard.plans.rules.view_steps import TileOrder, tile_order
from reshard.types import dtypes
from reshard.types.layout import Layout
from reshard.types.view import View


@dataclass(frozen=True)
class Slice:
    """Device d keeps block `block[d]` of its tile."""

    send: TileView
    receive: TileView
    block: dict[int, int]


@dataclass(frozen=True)
class AllGather:
    """Every member of a group receives the tiles of all members, as blocks in group order."""

    groups: Groups
    send: TileView
    receive: TileView


@dataclass(frozen=True)
class AllToAll:
    """Member i's block j goes to member j, as its block i."""

    groups: Groups
    send: TileView
    receive: TileView


@dataclass(frozen=True)
class ReduceScatter:
    """Member j receives everyone's block j, combined by `reduction`."""

    groups: Groups
    send: TileView
    receive: TileView
    reduction: str


@dataclass(frozen=True)
class AllReduce:
    """Every member receives everyone's tile, combined by `reduction`."""

    groups: Groups
    reduction: str


@dataclass(frozen=True)
class SplitSum:
    """Device d puts block `keep[d]` of its tile at block `place[d]` of a tile filled with the identity of `reduction`.

    Where `place[d]` is None, the tile has nothing but the identity.
    """

    send: TileView
    receive: TileView
    keep: dict[int, int]
    place: dict[int, int | None]
    reduction: str


@dataclass(frozen=True)
class Permute:
    """Whole tiles go from sender to receiver; every device of the result receives exactly one, perhaps its own."""

    pairs: tuple[tuple[int, int], ...]


Spans = tuple[tuple[int, int], ...]
"""(start, extent) along every axis of a tile."""


@dataclass(frozen=True)
class Reorder:
    """Every tile is reshaped to digits, transposed and reshaped to the result's shape."""

    order: TileOrder


@dataclass(frozen=True)
class TakePart:
    """Every device keeps these spans of its tile."""

    spans: Spans


@dataclass(frozen=True)
class PutPart:
    """Every device writes its tile over these spans of the target's tile that is there."""

    spans: Spans


@dataclass(frozen=True)
class CastTiles:
    """Every tile is cast."""

    dtype: str


ViewInstruction = Reorder | TakePart | PutPart | CastTiles

Plain = Slice | AllGather | AllToAll | ReduceScatter | AllReduce | SplitSum | Permute | Exchange | ExchangeInPlace


@dataclass(frozen=True)
class InParts:
    """One instruction, run on one part after another: `take` cuts parts out of the operand, `put` into the result.

    With `overlap`, a part may be written while the next one is on its way. `in_place` the operand's memory becomes the
    result's: see `transposing_cycles`.
    """

    each: Plain
    take: Cut
    put: Cut
    overlap: bool = False
    in_place: bool = False


Instruction = Plain | InParts | ViewInstruction


@dataclass(frozen=True)
class Program:
    """One array's instructions, and the shape of a tile after each; `keep_source` unless the source was donated.

    Several arrays whose steps share launches are as many programs, side by side: see `join_launches`.
    """

    devices: tuple[int, ...]
    dtype: str
    tile_shape: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    keep_source: bool


def lower_plan(plan: Plan, device: int | None = None) -> Program:
    """Spells out a checked plan as a program; raises `PlanError` for anything else.

    Given a `device`, exchanges list only the messages of that one: one rank of many needs no others.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> program = lower_plan(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)))
    >>> program.instructions[0].groups
    ((0, 1),)
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"lower takes a checked Plan, not {type(plan).__name__}; make one with reshard.plan()")
    return lower_steps(plan.source, plan.steps, device, donate=plan.donate)


def lower_steps(source: Layout, steps: Sequence[Step], device: int | None = None, *, donate: bool = False) -> Program:
    """The program of some steps of a plan, one after another; each was checked when it was built.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> whole = Layout.parse("f32[4]", mesh)
    >>> lower_steps(whole, [Step("slice", whole, Layout.parse("f32[{x}2]", mesh))]).tile_shapes
    ((2,),)
    """
    return Program(
        source.mesh.devices,
        source.dtype,
        source.tile_shape,
        tuple(_lower_step(step, device) for step in steps),
        tuple(step.result.tile_shape for step in steps),
        not donate,
    )


def _lower_step(step: Step, device: int | None) -> Instruction:
    if step.kind in VIEW_RULES:
        return view_instruction(step)
    part = part_of(step)
    if part is None:
        return _lower_whole(step, device)
    each = _lower_whole(Step(step.kind, part.operand, part.result), device)
    return InParts(each, part.take, part.put, step.mode.overlap, step.mode.in_place)


def part_of(step: Step) -> Part | None:
    """One part of a step, if it runs in parts."""
    if step.mode.parts == 1:
        return None
    return split_step(step.operand, step.result, step.mode.parts, in_place=step.mode.in_place)


def shape_of_part(cut: Cut, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one part of a tile of this shape."""
    return (*shape[: cut.axis], cut.outer * cut.inner, *shape[cut.axis + 1 :])


def view_instruction(step: Step) -> ViewInstruction:
    """The instruction of a step that changes indices or the dtype, and sends nothing.

    >>> from reshard.types import Mesh
    >>> layouts = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}4]", "bf16[{x}4]")]
    >>> view_instruction(Step("cast", *layouts))
    CastTiles(dtype='bfloat16')
    """
    if step.kind == "cast":
        return CastTiles(step.result.dtype)
    view = step.mode.view or View.identity(step.operand.shape)
    if step.kind == "view":
        return Reorder(tile_order(step.operand, step.result, view))
    # The windows of the dims of which part moves, the whole tile along the others.
    tile = (step.operand if step.kind == "take" else step.result).tile_shape
    spans: list[tuple[int, int]] = []
    for atom, extent in zip(view.atoms, tile, strict=True):
        window = atom.taken or atom.into
        spans.append((0, extent) if window is None else (window.start, atom.size))
    return TakePart(tuple(spans)) if step.kind == "take" else PutPart(tuple(spans))


def dtype_after(instruction: object, dtype: str) -> str:
    """The dtype of tiles after an instruction that starts from tiles of this one."""
    casts = isinstance(instruction, CastTiles | Exchange) and instruction.dtype
    return casts or dtype


def wire_dtype(before: str, after: str | None) -> str:
    """The dtype in which elements travel between tiles of these two, the narrower; `after` is None without a cast."""
    return min((before, after or before), key=dtypes.bits)


def is_alias(instruction: object) -> bool:
    """Whether an instruction leaves every tile's memory as it is."""
    return isinstance(instruction, Reorder) and instruction.order.aliases


def _lower_whole(step: Step, device: int | None) -> Plain:
    operand, result, mesh = step.operand, step.result, step.operand.mesh
    if step.kind == "permute":
        return Permute(permute_pairs(operand, result))
    if step.kind == "exchange":
        return lower_in_place(operand, result, step.mode.chunk) if step.mode.in_place else lower_exchange(step, device)
    r = refine(operand, result)
    if r is None:  # The typing rule of a checked step required one.
        raise PlanError(f"{step.kind}: {operand} and {result} have no common refinement; check the plan first")
    if step.kind == "all_reduce":
        return AllReduce(groups_along(mesh, r.reduced), str(operand.reduction))
    # Blocks are numbered by the positions along strides that hold a digit on one side only: a scatter's after the
    # step, a gather's before it.
    radix = {stride: d.radix for d in (*r.sliced, *r.gathered) for stride in (d.src, d.dst) if stride is not None}
    order = gather_order(r) if step.kind == "all_gather" else scatter_order(r)
    factors = [(stride, radix[stride]) for stride in order]
    if step.kind == "all_gather":
        receive = tile_view.after(result, r, order)
        return AllGather(groups_along(mesh, factors), tile_view.before(operand, r), receive)
    send = tile_view.before(operand, r, order)
    match step.kind:
        case "slice":
            return Slice(send, tile_view.after(result, r), block_numbers(mesh, factors))
        case "all_to_all":
            return AllToAll(groups_along(mesh, factors), send, tile_view.after(result, r, order))
        case "reduce_scatter":
            return ReduceScatter(groups_along(mesh, factors), send, tile_view.after(result, r), str(operand.reduction))
        case kind:
            assert kind == "split_sum", kind
    released = gather_order(r)
    numbers = block_numbers(mesh, [(stride, radix[stride]) for stride in released])
    place = {device: number if _has_data(operand, r, device) else None for device, number in numbers.items()}
    receive = tile_view.after(result, r, released)
    return SplitSum(send, receive, block_numbers(mesh, factors), place, str(result.reduction))


def _has_data(operand: Layout, r: Refinement, device: int) -> bool:
    """Whether a device's summand has data: it is the first along sub-axes that held nothing, and its coordinate along
    each sub-axis that passes its digit on to another is that along the other."""
    position = operand.mesh.position(device)
    copies = (f for f in r.started if f.stride not in r.used_before)
    passed = ((d.src or 0, d.dst or 0, d.radix) for d in r.swapped)
    return all(coordinate(position, *factor) == 0 for factor in copies) and all(
        coordinate(position, src, radix) == coordinate(position, dst, radix) for src, dst, radix in passed
    )


def permute_pairs(operand: Layout, result: Layout) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) for every receiver: who holds before what it must hold after.

    Where several devices hold the same tile, senders are chosen so that each sends once.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2, y=2)
    >>> permute_pairs(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh))
    ((0, 0), (2, 1), (1, 2), (3, 3))
    """
    r = refine(operand, result)
    if r is not None and operand.partial_as(result):
        rounds = EvenRounds(r)
        ids = operand.mesh.devices
        return tuple((ids[rounds.sender(at, ())], ids[at]) for at in range(operand.mesh.size))
    # No closed form: devices are matched by the tile that they hold and need; a device keeps its own where it can.
    waiting: dict[Tile, list[int]] = {}
    pairs: list[tuple[int, int]] = []
    needs = tiles(result)
    for device, held in tiles(operand).items():
        if held == needs.get(device):
            pairs.append((device, device))
            del needs[device]
        else:
            waiting.setdefault(held, []).append(device)
    for device, needed in needs.items():
        if not waiting.get(needed):
            raise PlanError(f"permute: no device is left that holds what device {device} of {result} needs")
        pairs.append((waiting[needed].pop(), device))
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


# Programs of several arrays whose steps share launches: one instruction for each launch.
#
#     w: all_gather, blocks of 32 elements      packed tile   w w w ... b b      34 elements
#     b: all_gather, blocks of 2 elements       all_gather of 34 elements, then w's part of each block, and b's
#
# A collective sees a tile as numbered blocks (`TileView`). Packing puts the blocks of the same number side by side, so
# the collective on the packed tile is one with plain views, and unpacking takes each array's part of every block.
# Exchanges have messages instead: in each round, the messages of all arrays between two devices travel as one.


@dataclass(frozen=True)
class PackedCollective:
    """One collective for several arrays: `packed`, on tiles in which the blocks of all arrays lie side by side.

    `send` and `receive` are each array's views of its tile before and after.
    """

    packed: AllGather | AllToAll | ReduceScatter | AllReduce | Permute
    send: tuple[TileView, ...]
    receive: tuple[TileView, ...]


Joint = PackedCollective | tuple[Exchange, ...]
"""What several arrays do in one launch; their exchanges have the same senders and receivers in each round, some of them
without blocks."""


def lower_batch(batch: Batch) -> tuple[Program, ...]:
    """Spells out the plan of every array of a checked batch; `join_launches` says what they do together.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> (step,) = join_launches(lower_batch(Batch(("a", "b"), (rs.plan(rows, whole),) * 2)))
    >>> step.packed.groups, step.packed.receive.block_shape
    (((0, 1),), (8,))
    """
    if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"lower_batch takes a checked Batch, not {type(batch).__name__}; make one with plan_tree()")
    lowered = {plan: lower_plan(plan) for plan in dict.fromkeys(batch.plans)}
    return tuple(lowered[plan] for plan in batch.plans)


def join_launches(programs: Sequence[Program]) -> list[Joint | None]:
    """For each step, the instruction that stands for those of all arrays.

    None where each array's own instruction runs: one array has no other, and a local step has no launch to share.
    """
    if len(programs) == 1:
        return [None] * len(programs[0].instructions)
    columns = zip(*(program.instructions for program in programs), strict=True)
    return [None if _is_local(each[0]) else join_instructions(each) for each in columns]


def _is_local(instruction: Instruction) -> bool:
    if isinstance(instruction, InParts):
        return _is_local(instruction.each)
    silent = isinstance(instruction, Exchange) and not instruction.rounds
    return silent or isinstance(instruction, Slice | SplitSum | ViewInstruction)


def join_instructions(each: Sequence[Instruction]) -> Joint:
    """One instruction for those of several arrays; raises `PlanError` if their devices differ.

    >>> join_instructions([Permute(((0, 1), (1, 0)))] * 2).packed
    Permute(pairs=((0, 1), (1, 0)))
    """
    first = each[0]
    if isinstance(first, Exchange):
        exchanges = tuple(step for step in each if isinstance(step, Exchange))
        if len(exchanges) != len(each):
            raise PlanError("an exchange shares its launches with other exchanges alone")
        ends = [[[(t.sender, t.receiver) for t in turn] for turn in step.rounds] for step in exchanges]
        return exchanges if all(one == ends[0] for one in ends) else _align_rounds(exchanges)

    def devices(step: Instruction) -> list[object]:
        """Who sends to whom, and how summands are combined: what instructions that share a launch have in common."""
        return [type(step), *(getattr(step, name, None) for name in ("groups", "pairs", "reduction"))]

    for other in each[1:]:
        if devices(other) != devices(first):
            raise PlanError(f"{type(first).__name__} and {type(other).__name__} are not between the same devices")
    send = tuple(step.send for step in each if isinstance(step, AllGather | AllToAll | ReduceScatter))
    receive = tuple(step.receive for step in each if isinstance(step, AllGather | AllToAll | ReduceScatter))
    # The blocks of all arrays lie side by side, number by number, so the packed tile needs no order of its own: its
    # views number as many blocks as a group has members, or none where the whole tile is one block.
    match first:
        case AllGather(groups=groups):
            packed = AllGather(groups, _packed_view(send, 0), _packed_view(receive, len(groups[0])))
        case AllToAll(groups=groups):
            packed = AllToAll(groups, _packed_view(send, len(groups[0])), _packed_view(receive, len(groups[0])))
        case ReduceScatter(groups=groups, reduction=reduction):
            packed = ReduceScatter(groups, _packed_view(send, len(groups[0])), _packed_view(receive, 0), reduction)
        case AllReduce() | Permute():
            packed = first  # Whole tiles, one after another.
        case other:
            raise PlanError(f"{type(other).__name__} shares its launches with no other")
    return PackedCollective(packed, send, receive)


def _align_rounds(exchanges: Sequence[Exchange]) -> tuple[Exchange, ...]:
    """The exchanges with the same senders and receivers in each round: those of all, without blocks where one of them
    sends nothing.

    The rounds of all pairs are coloured anew; rounds in which groups gather stay what they are, since each has one
    receiver for any sender.
    """
    gathers = max(step.gathers for step in exchanges)
    if any(step.gathers not in (0, gathers) for step in exchanges) or any(
        t.sender == t.receiver for step in exchanges for turn in step.rounds for t in turn
    ):
        raise PlanError("the exchanges of a batch have rounds in which devices keep what is theirs, or other groups")
    firsts: list[dict[tuple[int, int], Transfer]] = []
    lasts: list[list[dict[tuple[int, int], Transfer]]] = []
    for step in exchanges:
        split = len(step.rounds) - step.gathers
        firsts.append({(t.sender, t.receiver): t for turn in step.rounds[:split] for t in turn})
        gathered = [{(t.sender, t.receiver): t for t in turn} for turn in step.rounds[split:]]
        lasts.append(gathered or [{} for _ in range(gathers)])
        if len(firsts[-1]) < sum(map(len, step.rounds[:split])):
            raise PlanError("an exchange of a batch sends several messages between two devices")
    pairs = sorted(set(itertools.chain(*firsts)))
    turns = [[pairs[at] for at in turn] for turn in colour_edges(pairs)]
    gathering = [sorted({pair for last in lasts for pair in last[number]}) for number in range(gathers)]
    aligned: list[Exchange] = []
    for step, first, last in zip(exchanges, firsts, lasts, strict=True):
        rounds = [tuple(first.get(pair) or Transfer(*pair, ()) for pair in turn) for turn in turns]
        for turn, here in zip(gathering, last, strict=True):
            rounds.append(tuple(here.get(pair) or Transfer(*pair, (), relayed=True) for pair in turn))
        aligned.append(replace(step, rounds=tuple(rounds), gathers=gathers))
    return tuple(aligned)


def _packed_view(views: Sequence[TileView], count: int) -> TileView:
    """The view of a packed tile: `count` blocks one after another, or none and the tile as it is."""
    elements = sum(view.elements for view in views)
    if not count:
        return TileView((elements,), (elements,), (elements,), (0,), ())
    return TileView((elements,), (elements,), (count, elements // count), (0, 0), (0,))


# Parts that take each other's place: a tile becomes the result part by part, in its own memory.
#
#     f32[16, 3, {x}1] -> f32[{x}4, 3, 4] on <x=4>, an all-to-all in 4 parts: part k has rows k, 4 + k, 8 + k and 12 + k
#
#     tile        0 1 2 3 | 4 5 6 7 | 8 9 a b | c d e f      16 rows of 3 elements
#     together    0 4 8 c | 1 5 9 d | 2 6 a e | 3 7 b f      each part is one piece
#     part 0      row 0   | 1 5 9 d | 2 6 a e | 3 7 b f      12 elements of the result take the place of 0 4 8 c
#     part 1      row 0   | row 1   | 2 6 a e | 3 7 b f
#
# A part of the result is as large as one of the operand. One that is not a single piece of a tile consists of slots,
# which are brought together before the first part, or put where they belong after the last
# (`plans.rules.split_steps.Regions`).
#
# **Slots change places in the tile's memory,** with one slot in hand. The hand goes through each cycle of slots, and at
# each puts down what it has and takes up what is there; back at the first, it puts down the last. What it puts down at
# the first slot of a cycle belongs to none, and is overwritten in the end.


@lru_cache(maxsize=1024)
def transposing_cycles(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """The slots, numbered row by row, at which a hand stops that transposes rows x columns slots where they are: cycle
    by cycle, each from its first slot back to it.

    >>> hand, slots = "", list("abcdef")  # (a b c), (d e f)
    >>> for at in sum(transposing_cycles(2, 3), ()):
    ...     hand, slots[at] = slots[at], hand
    >>> "".join(slots)
    'adbecf'
    """
    cycles: list[tuple[int, ...]] = []
    moved: set[int] = set()
    for start in range(rows * columns):
        if start in moved:
            continue
        cycle = [start]
        # In row-major order of the transposed slots, slot r, c of the original is slot c, r.
        while (at := cycle[-1] % columns * rows + cycle[-1] // columns) != start:
            cycle.append(at)
        moved.update(cycle)
        cycles += [(*cycle, start)] if len(cycle) > 1 else []
    return tuple(cycles)


class TransposingPass(NamedTuple):
    """`outer` times at once, rows x columns slots change places."""

    outer: int
    rows: int
    columns: int


KERNEL, SWAPPED = 2116, 1 / 206
"""Cycles that a TPU's kernel takes whatever it moves, and those of a byte that is put down while another is taken up:
what libtpu estimates for such loops (v5p; `benchmarks/tpu_traffic.py` shows it)."""


@lru_cache(maxsize=1024)
def transposing_passes(outer: int, rows: int, columns: int, slot: int) -> tuple[TransposingPass, ...]:
    """The passes that transpose `outer` times rows x columns slots of so many bytes where they are, in the least time.

    Small slots are many turns of the hand; where a factor of the rows, or of the columns, changes places first, and the
    rest after it, slots are larger in both.

        (a b) c slots  ->  a (c b)  ->  (c a) b        a times at once, then with slots of b
        a (b c) slots  ->  (b a) c  ->  b (c a)        with slots of c, then b times at once

    >>> transposing_passes(1, 8, 16, 1 << 20)
    (TransposingPass(outer=1, rows=8, columns=16),)
    >>> transposing_passes(1, 1536, 16, 1 << 13)
    (TransposingPass(outer=32, rows=48, columns=16), TransposingPass(outer=1, rows=32, columns=16))
    """
    if rows == 1 or columns == 1:
        return ()
    ways: list[tuple[TransposingPass, ...]] = [(TransposingPass(outer, rows, columns),)]
    for major in (divisor for divisor in range(2, rows) if rows % divisor == 0):
        first = TransposingPass(outer * major, rows // major, columns)
        ways.append((first, TransposingPass(outer, major, columns)))
    for major in (divisor for divisor in range(2, columns) if columns % divisor == 0):
        ways.append((TransposingPass(outer, rows, major), TransposingPass(outer * major, rows, columns // major)))
    return min(ways, key=lambda way: count_transposing_cycles(way, outer * rows * columns * slot))


def count_transposing_cycles(passes: Sequence[TransposingPass], tile: int) -> float:
    """The cycles that a TPU takes for such passes over a tile of so many bytes."""
    return sum(each.rows * each.columns * KERNEL + tile * SWAPPED for each in passes)
