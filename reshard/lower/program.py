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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import PlanError
from reshard.geometry.holders import Tile, tiles
from reshard.geometry.refine import Refinement, refine
from reshard.lower.colouring import EvenRounds
from reshard.lower.exchange_rounds import Exchange as Exchange
from reshard.lower.exchange_rounds import ExchangeInPlace, lower_exchange, lower_in_place
from reshard.lower.groups import Groups, block_numbers, coordinate, groups_along
from reshard.plans.plan import Batch, Plan, Step
from reshard.plans.rules import tile_view
from reshard.plans.rules.collectives import VIEW_RULES
from reshard.plans.rules.split_steps import Cut, Part, split_step
from reshard.plans.rules.tile_view import TileView, gather_order, scatter_order
from reshard.plans.rules.view_steps import TileOrder, tile_order
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

VIEW_INSTRUCTIONS = (Reorder, TakePart, PutPart, CastTiles)

Plain = Slice | AllGather | AllToAll | ReduceScatter | AllReduce | SplitSum | Permute | Exchange | ExchangeInPlace


@dataclass(frozen=True)
class InParts:
    """One instruction, run on one part after another: `take` cuts parts out of the operand, `put` into the result.

    With `overlap`, a part may be written while the next one is on its way.
    With `lower_in_place` the operand's memory becomes the result's (`lower.parts_in_place`).
    """

    each: Plain
    take: Cut
    put: Cut
    overlap: bool = False
    in_place: bool = False


Instruction = Plain | InParts | ViewInstruction


@dataclass(frozen=True)
class Program:
    """Instructions, and the shape of a tile after each; `keep_source` unless the source was donated."""

    devices: tuple[int, ...]
    dtype: str
    tile_shape: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    keep_source: bool

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the arrays, as a `BatchProgram` has them: this one."""
        return (self,)

    @property
    def joint(self) -> tuple[None, ...]:
        """For each step what stands for the instructions of all arrays: nothing, since there is one array."""
        return (None,) * len(self.instructions)


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


def _lower_whole(step: Step, device: int | None) -> Plain:
    operand, result = step.operand, step.result
    if step.kind == "permute":
        return Permute(permute_pairs(operand, result))
    if step.kind == "exchange":
        return lower_in_place(operand, result, step.mode.chunk) if step.mode.in_place else lower_exchange(step, device)
    refinement = refine(operand, result)
    if refinement is None:  # The typing rule of a checked step required one.
        raise PlanError(f"{step.kind}: {operand} and {result} have no common refinement; check the plan first")
    return _COLLECTIVES[step.kind](operand, result, refinement)


def _lower_slice(operand: Layout, result: Layout, r: Refinement) -> Slice:
    order = scatter_order(r)
    numbers = block_numbers(operand.mesh, _position_factors(r, order))
    return Slice(tile_view.before(operand, r, order), tile_view.after(result, r), numbers)


def _lower_all_gather(operand: Layout, result: Layout, r: Refinement) -> AllGather:
    order = gather_order(r)
    groups = groups_along(operand.mesh, _position_factors(r, order))
    return AllGather(groups, tile_view.before(operand, r), tile_view.after(result, r, order))


def _lower_all_to_all(operand: Layout, result: Layout, r: Refinement) -> AllToAll:
    order = scatter_order(r)
    groups = groups_along(operand.mesh, _position_factors(r, order))
    return AllToAll(groups, tile_view.before(operand, r, order), tile_view.after(result, r, order))


def _lower_reduce_scatter(operand: Layout, result: Layout, r: Refinement) -> ReduceScatter:
    order = scatter_order(r)
    groups = groups_along(operand.mesh, _position_factors(r, order))
    return ReduceScatter(
        groups, tile_view.before(operand, r, order), tile_view.after(result, r), str(operand.reduction)
    )


def _lower_all_reduce(operand: Layout, result: Layout, r: Refinement) -> AllReduce:
    return AllReduce(groups_along(operand.mesh, r.reduced), str(operand.reduction))


def _lower_split_sum(operand: Layout, result: Layout, r: Refinement) -> SplitSum:
    kept, released = scatter_order(r), gather_order(r)
    keep = block_numbers(operand.mesh, _position_factors(r, kept))
    numbers = block_numbers(operand.mesh, _position_factors(r, released))
    place = {device: number if _has_data(operand, r, device) else None for device, number in numbers.items()}
    send, receive = tile_view.before(operand, r, kept), tile_view.after(result, r, released)
    return SplitSum(send, receive, keep, place, str(result.reduction))


def _has_data(operand: Layout, r: Refinement, device: int) -> bool:
    """Whether a device's summand has data: it is the first along sub-axes that held nothing, and its coordinate along
    each sub-axis that passes its digit on to another is that along the other."""
    position = operand.mesh.position(device)
    copies = (f for f in r.started if f.stride not in r.used_before)
    passed = ((d.src or 0, d.dst or 0, d.radix) for d in r.swapped)
    return all(coordinate(position, *factor) == 0 for factor in copies) and all(
        coordinate(position, src, radix) == coordinate(position, dst, radix) for src, dst, radix in passed
    )


_COLLECTIVES: dict[str, Callable[[Layout, Layout, Refinement], Plain]] = {
    "slice": _lower_slice,
    "all_gather": _lower_all_gather,
    "all_to_all": _lower_all_to_all,
    "reduce_scatter": _lower_reduce_scatter,
    "all_reduce": _lower_all_reduce,
    "split_sum": _lower_split_sum,
}


def _position_factors(r: Refinement, order: Sequence[int]) -> list[tuple[int, int]]:
    """The (stride, size) factors of the positions along strides that hold a digit on one side only."""
    radix = {stride: d.radix for d in (*r.sliced, *r.gathered) for stride in (d.src, d.dst) if stride is not None}
    return [(stride, radix[stride]) for stride in order]


# Batches as programs: for each step, one instruction that moves the packed blocks of all arrays.
#
#     w: all_gather, blocks of 32 elements      packed tile   w w w ... b b      34 elements
#     b: all_gather, blocks of 2 elements       all_gather of 34 elements, then w's part of each block, and b's
#
# A collective sees a tile as numbered blocks (`TileView`). Packing puts the blocks of the same number side by side, so
# the collective on the packed tile is one with plain views, and unpacking takes each array's part of every block. An
# exchange has messages of boxes instead: in each round, the messages of all arrays between two devices travel as one.


@dataclass(frozen=True)
class PackedCollective:
    """One collective for several arrays: `packed`, on tiles in which the blocks of all arrays lie side by side.

    `send` and `receive` are each array's views of its tile before and after.
    """

    packed: AllGather | AllToAll | ReduceScatter | AllReduce | Permute
    send: tuple[TileView, ...]
    receive: tuple[TileView, ...]


@dataclass(frozen=True)
class JointExchange:
    """The exchanges of several arrays, round by round: in each round all have the same senders and receivers."""

    each: tuple[Exchange, ...]


Joint = PackedCollective | JointExchange


@dataclass(frozen=True)
class BatchProgram:
    """The programs of a batch's arrays, and for each step the instruction that stands for all of them.

    None stands for a step that is local: each array's own instruction runs.
    """

    programs: tuple[Program, ...]
    joint: tuple[Joint | None, ...]


AnyProgram = Program | BatchProgram
"""The program of one array or of many; runtimes read `programs` and `joint`, which both have."""


def lower_batch(batch: Batch) -> AnyProgram:
    """Spells out a checked batch; that of one array is the program of its plan.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> (step,) = lower_batch(Batch(("a", "b"), (rs.plan(rows, whole),) * 2)).joint
    >>> step.packed.groups, step.packed.receive.block_shape
    (((0, 1),), (8,))
    """
    if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"lower_batch takes a checked Batch, not {type(batch).__name__}; make one with plan_tree()")
    lowered = {plan: lower_plan(plan) for plan in dict.fromkeys(batch.plans)}
    if len(batch.plans) == 1:
        return lowered[batch.plans[0]]
    programs = tuple(lowered[plan] for plan in batch.plans)
    columns = zip(batch.steps, zip(*(program.instructions for program in programs), strict=True), strict=True)
    return BatchProgram(
        programs, tuple(join_instructions(each) if steps[0].cost.launches else None for steps, each in columns)
    )


def join_instructions(each: Sequence[Instruction]) -> Joint:
    """One instruction for those of several arrays; raises `PlanError` if their devices differ.

    >>> join_instructions([Permute(((0, 1), (1, 0)))] * 2).packed
    Permute(pairs=((0, 1), (1, 0)))
    """
    first = each[0]
    if isinstance(first, Exchange):
        exchanges = tuple(step for step in each if isinstance(step, Exchange))
        ends = [[[(t.sender, t.receiver) for t in turn] for turn in step.rounds] for step in exchanges]
        if len(exchanges) != len(each) or any(one != ends[0] for one in ends):
            raise PlanError("the exchanges of a batch do not have the same senders and receivers in each round")
        return JointExchange(exchanges)
    for other in each[1:]:
        if type(other) is not type(first) or _devices_of(other) != _devices_of(first):
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


def _devices_of(step: Instruction) -> object:
    """Who sends to whom, and how summands are combined: what instructions that share a launch have in common."""
    match step:
        case AllGather(groups=groups) | AllToAll(groups=groups):
            return groups
        case ReduceScatter(groups=groups, reduction=reduction) | AllReduce(groups=groups, reduction=reduction):
            return groups, reduction
        case Permute(pairs=pairs):
            return pairs
        case _:
            raise PlanError(f"{type(step).__name__} shares its launches with no other")


def _packed_view(views: Sequence[TileView], count: int) -> TileView:
    """The view of a packed tile: `count` blocks one after another, or none and the tile as it is."""
    elements = sum(view.elements for view in views)
    if not count:
        return TileView((elements,), (elements,), (elements,), (0,), ())
    return TileView((elements,), (elements,), (count, elements // count), (0, 0), (0,))


# The pairs of a permute: which device sends its whole tile to which.


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
    return _match_devices(operand, result)


def _match_devices(operand: Layout, result: Layout) -> tuple[tuple[int, int], ...]:
    """Devices matched by the tile that they hold and need; a device keeps its own where it can."""
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
    if step.kind == "take":
        return TakePart(_part_spans(step.operand, view))
    return PutPart(_part_spans(step.result, view))


def is_alias(instruction: object) -> bool:
    """Whether an instruction leaves every tile's memory as it is."""
    return isinstance(instruction, Reorder) and instruction.order.aliases


def is_filling(instruction: object) -> bool:
    """Whether an instruction writes into the target's tile that is there already."""
    return isinstance(instruction, PutPart) or (isinstance(instruction, Exchange) and instruction.fills)


def last_dtype(instructions: Sequence[object]) -> str | None:
    """The dtype of the last cast; None without one.

    >>> last_dtype([CastTiles("bfloat16")])
    'bfloat16'
    """
    return next((each.dtype for each in reversed(instructions) if isinstance(each, CastTiles)), None)


def _part_spans(layout: Layout, view: View) -> Spans:
    """The windows of the dims of which part moves, the whole tile along the others."""
    starts = [window.start if window is not None else 0 for window in (a.taken or a.into for a in view.atoms)]
    whole = [atom.taken is None and atom.into is None for atom in view.atoms]
    extents = [
        tile if all_of else atom.size for tile, all_of, atom in zip(layout.tile_shape, whole, view.atoms, strict=True)
    ]
    return tuple(zip(starts, extents, strict=True))


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
def transposing_stops(rows: int, columns: int) -> tuple[int, ...]:
    """The slots, numbered row by row, at which a hand stops that transposes rows x columns slots where they are.

    >>> hand, slots = "", list("abcdef")  # (a b c), (d e f)
    >>> for at in transposing_stops(2, 3):
    ...     hand, slots[at] = slots[at], hand
    >>> "".join(slots)
    'adbecf'
    """
    stops: list[int] = []
    moved: set[int] = set()
    for start in range(rows * columns):
        if start in moved:
            continue
        cycle = [start]
        while (at := _transposed(cycle[-1], rows, columns)) != start:
            cycle.append(at)
        moved.update(cycle)
        stops += [*cycle, start] if len(cycle) > 1 else []
    return tuple(stops)


def _transposed(slot: int, rows: int, columns: int) -> int:
    """Where a slot's content belongs."""
    return slot % columns * rows + slot // columns
