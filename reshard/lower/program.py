"""Programs: a checked plan spelled out for every device, as plain data.

    slice            which block of its tile each device keeps
    all_gather       groups; member j's tile is block j of everyone's result
    all_to_all       groups; block j of member i's tile is block i of member j's result
    reduce_scatter   groups; block j of everyone's tile, combined, is member j's result
    all_reduce       groups; everyone's tile, combined
    permute          (sender, receiver) pairs of whole tiles
    exchange         local copies, then rounds of transfers; in a round each device sends at most
                     one box list and receives at most one; or in place, slot by slot

Devices are ids of the mesh. Views say how a tile falls into blocks; a runtime needs nothing else,
and in particular no layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import PlanError
from reshard.lower.exchange import Transfer, rounds
from reshard.lower.exchange_in_place import ExchangeInPlace, in_place
from reshard.lower.groups import Groups, coordinates, groups_along, permutation
from reshard.types.layout import Layout
from reshard.types.pair.refine import Refinement, refine
from reshard.types.plan import Plan, Step
from reshard.types.rules import tile_view
from reshard.types.rules.parts import Cut, split_step
from reshard.types.rules.tile_view import TileView, gather_order, scatter_order


@dataclass(frozen=True)
class Slice:
    """Device d keeps block `block[d]` of its tile."""

    send: TileView
    receive: TileView
    block: dict[int, int]


@dataclass(frozen=True)
class AllGather:
    """Every member of a group gets all members' tiles, as blocks in group order."""

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
    """Member j gets everyone's block j, combined by `reduction`."""

    groups: Groups
    send: TileView
    receive: TileView
    reduction: str


@dataclass(frozen=True)
class AllReduce:
    """Every member gets everyone's tile, combined by `reduction`."""

    groups: Groups
    reduction: str


@dataclass(frozen=True)
class Permute:
    """Whole tiles go from sender to receiver; every device is one receiver."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Exchange:
    """Boxes go from the operand's digits to the result's, in rounds; `staged` if via buffers."""

    send: TileView
    receive: TileView
    local: tuple[Transfer, ...]
    rounds: tuple[tuple[Transfer, ...], ...]
    staged: bool


Plain = Slice | AllGather | AllToAll | ReduceScatter | AllReduce | Permute | Exchange | ExchangeInPlace


@dataclass(frozen=True)
class InParts:
    """One instruction, run on part after part: cut out of the operand by `take`, into the result by `put`."""

    each: Plain
    take: Cut
    put: Cut


Instruction = Plain | InParts


@dataclass(frozen=True)
class Program:
    """Instructions with the shape of the tile after each; `keep_source` unless it was donated."""

    devices: tuple[int, ...]
    dtype: str
    tile_shape: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    keep_source: bool


def lower(plan: Plan) -> Program:
    """Spells out a checked plan; raises `PlanError` for anything else.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> program = lower(plan(Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)))
    >>> program.instructions[0].groups
    ((0, 1),)
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"lower takes a checked Plan, not {type(plan).__name__}; make one with reshard.plan()")
    return Program(
        plan.source.mesh.devices,
        plan.source.dtype,
        plan.source.tile_shape,
        tuple(_instruction(step) for step in plan.steps),
        tuple(step.result.tile_shape for step in plan.steps),
        not plan.donate,
    )


def _instruction(step: Step) -> Instruction:
    part = split_step(step.operand, step.result, step.mode.parts) if step.mode.parts > 1 else None
    if part is None:
        return _plain(step)
    return InParts(_plain(Step(step.kind, part.operand, part.result)), part.take, part.put)


def _plain(step: Step) -> Plain:
    operand, result = step.operand, step.result
    if step.kind == "permute":
        return Permute(permutation(operand, result))
    if step.kind == "exchange":
        if step.mode.in_place:
            return in_place(operand, result, step.mode.chunk)
        send, receive, local, turns = rounds(operand, result, step.mode.chunk)
        return Exchange(send, receive, local, turns, step.cost.scratch > 0)
    refinement = refine(operand, result)
    if refinement is None:  # A checked step has one; the rule of its kind asked for it.
        raise PlanError(f"{step.kind}: {operand} and {result} have no common refinement; check the plan first")
    return _collective(step.kind, operand, result, refinement)


def _collective(kind: str, operand: Layout, result: Layout, r: Refinement) -> Plain:
    mesh = operand.mesh
    if kind == "all_reduce":
        order = tuple(f.stride for f in r.reduced)
        return AllReduce(groups_along(mesh, [(f.stride, f.size) for f in r.reduced]), str(operand.reduction))
    order = gather_order(r) if kind == "all_gather" else scatter_order(r)
    radix = {s: a.radix for a in (*r.sliced, *r.gathered) for s in (a.src, a.dst) if s is not None}
    factors = [(stride, radix[stride]) for stride in order]
    if kind == "slice":
        send, receive = tile_view.before(operand, r, order), tile_view.after(result, r)
        return Slice(send, receive, coordinates(mesh, factors))
    groups = groups_along(mesh, factors)
    if kind == "all_gather":
        return AllGather(groups, tile_view.before(operand, r), tile_view.after(result, r, order))
    if kind == "all_to_all":
        return AllToAll(groups, tile_view.before(operand, r, order), tile_view.after(result, r, order))
    send, receive = tile_view.before(operand, r, order), tile_view.after(result, r)
    return ReduceScatter(groups, send, receive, str(operand.reduction))
