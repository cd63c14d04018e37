"""Batches as programs: for each step, one instruction that moves the packed blocks of all arrays.

    w: all_gather, blocks of 32 elements      packed tile   w w w ... b b      34 elements
    b: all_gather, blocks of 2 elements       all_gather of 34 elements, then w's part of each block, and b's

A collective sees a tile as numbered blocks (`TileView`). Packing puts the blocks of the same number side by side, so
the collective on the packed tile is one with plain views, and unpacking takes each array's part of every block. An
exchange has messages of boxes instead: in each round, the messages of all arrays between two devices travel as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import PlanError
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Instruction,
    Permute,
    Program,
    ReduceScatter,
    lower_plan,
)
from reshard.types.batch import Batch
from reshard.types.rules.tile_view import TileView


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

    None stands for a step in which each array's own instruction runs: it is local, or there is one array.
    """

    programs: tuple[Program, ...]
    joint: tuple[Joint | None, ...]


def lower_batch(batch: Batch) -> BatchProgram:
    """Spells out a checked batch.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> (step,) = lower_batch(Batch(("a", "b"), (rs.plan(rows, whole),) * 2)).joint
    >>> step.packed.groups, step.packed.receive.block_shape
    (((0, 1),), (8,))
    """
    if not isinstance(batch, Batch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"lower_batch takes a checked Batch, not {type(batch).__name__}; make one with plan_tree()")
    lowered = {plan: lower_plan(plan) for plan in dict.fromkeys(batch.plans)}
    programs = tuple(lowered[plan] for plan in batch.plans)
    columns = zip(*(program.instructions for program in programs), strict=True)
    steps = zip(batch.steps, columns, strict=True)
    alone = len(programs) == 1
    return BatchProgram(
        programs,
        tuple(None if alone or not of[0].cost.launches else joined(each) for of, each in steps),
    )


def joined(each: Sequence[Instruction]) -> Joint:
    """One instruction for those of several arrays; raises `PlanError` if their devices differ.

    >>> joined([Permute(((0, 1), (1, 0)))] * 2).packed
    Permute(pairs=((0, 1), (1, 0)))
    """
    first = each[0]
    if isinstance(first, Exchange):
        return _exchange(each)
    for other in each[1:]:
        if type(other) is not type(first) or _between(other) != _between(first):
            raise PlanError(f"{type(first).__name__} and {type(other).__name__} are not between the same devices")
    return _collective(each)


def _between(step: Instruction) -> object:
    """Who sends to whom, and how summands are combined."""
    match step:
        case AllGather(groups=groups) | AllToAll(groups=groups):
            return groups
        case ReduceScatter(groups=groups, reduction=reduction) | AllReduce(groups=groups, reduction=reduction):
            return groups, reduction
        case Permute(pairs=pairs):
            return pairs
        case _:
            raise PlanError(f"{type(step).__name__} shares its launches with no other")


def _collective(each: Sequence[Instruction]) -> PackedCollective:
    send = tuple(step.send for step in each if isinstance(step, AllGather | AllToAll | ReduceScatter))
    receive = tuple(step.receive for step in each if isinstance(step, AllGather | AllToAll | ReduceScatter))
    match each[0]:
        case AllGather(groups=groups):
            packed = AllGather(groups, _blocks(send, 0), _blocks(receive, len(groups[0])))
        case AllToAll(groups=groups):
            packed = AllToAll(groups, _blocks(send, len(groups[0])), _blocks(receive, len(groups[0])))
        case ReduceScatter(groups=groups, reduction=reduction):
            packed = ReduceScatter(groups, _blocks(send, len(groups[0])), _blocks(receive, 0), reduction)
        case AllReduce() | Permute():
            return PackedCollective(each[0], (), ())
        case other:
            raise PlanError(f"{type(other).__name__} shares its launches with no other")
    return PackedCollective(packed, send, receive)


def _blocks(views: Sequence[TileView], count: int) -> TileView:
    """The view of a packed tile: `count` blocks one after another, or none and the tile as it is."""
    elements = sum(view.elements for view in views)
    if not count:
        return TileView((elements,), (elements,), (elements,), (0,), ())
    return TileView((elements,), (elements,), (count, elements // count), (0, 0), (0,))


def _exchange(each: Sequence[Instruction]) -> JointExchange:
    exchanges = tuple(step for step in each if isinstance(step, Exchange))
    turns = [[[(t.sender, t.receiver) for t in turn] for turn in step.rounds] for step in exchanges]
    if len(exchanges) != len(each) or any(turn != turns[0] for turn in turns):
        raise PlanError("the exchanges of a batch do not have the same senders and receivers in each round")
    return JointExchange(exchanges)
