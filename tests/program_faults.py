"""Faults to plant in lowered programs: what a wrong lowering could do, one small change at a time.

A fault is planted only where it must change something: where, by the meaning of the layouts alone, the devices
involved need different elements. Listing two groups in another order, for example, changes nothing.

`CORPUS` has plans with every kind of step; `planted` makes faulty programs of one, `WHOLE` has faults that do not
depend on the instruction. Whoever claims to find wrong programs (the oracle on a runtime, the prover) is tested with
all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import reshard as rs
from reshard.geometry.blocks import Block
from reshard.lower import Program, lower_plan
from reshard.lower.exchange_rounds import ExchangeInPlace, Transfer, place_offsets
from reshard.lower.program import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice, SplitSum
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.tile_view import TileView
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.oracle import check, of_boxes

MOST_PER_KIND = 40
"""The most faults of one kind in one plan."""

CORPUS = [
    # Even, and each device has data of its own: no fault can hide behind a replica.
    (Mesh(x=4), "f32[{x}4]", "f32[16]", {}),
    (Mesh(x=4, y=2), "f32[{x}{y}2, 3]", "f32[16, 3]", {}),
    (Mesh(x=4, y=2), "f32[{x}2, {y}4]", "f32[8, {y}4]", {}),
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {}),
    (Mesh(x=2, y=4), "f32[{x}4, {y}2, 16]", "f32[8, 8, {y}{x}2]", {}),
    (Mesh(x=2, y=3), "f32[{x}6, {y}4]", "f32[{x}{y}2, 12]", {}),
    (Mesh(x=4, y=2), "f32[{x}{y}2]", "f32[{y}{x}2]", {}),
    (Mesh(x=2, y=2), "f32[{x}4, {y}2]", "f32[{y}4, {x}2]", {}),
    (Mesh(x=4, y=2), "f32[16, 8]", "f32[{x}4, {y}4]", {}),
    (Mesh(x=2, y=2, z=2), "f32[{x}4, {z}4, 8, 8]", "f32[8, 8, {z}4, {y}4]", {}),
    (Mesh(x=4), "f32[4{x}2]", "f32[{x}8]", {}),
    # Exchanges: digit cycles mixed with moves, numerals that do not nest, uneven pieces.
    (Mesh(x=2, y=2, z=2), "f32[{x}{y}2, {z}4]", "f32[{z}4, 2{x}2]", {}),
    (Mesh(x=6), "f32[6{x:(1)2}3]", "f32[{x:(2)3}12]", {}),
    (Mesh(x=4), "f32[{x}3/10, 4]", "f32[10, {x}]", {}),
    (Mesh(x=3, y=2), "f32[{x}4/10]", "f32[{y}{x}2/10]", {}),
    (Mesh(x=2, y=3), "f32[{x}6, 7]", "f32[{y}4, 7]", {}),
    (Mesh(x=2), "f32[5{x}2]", "f32[{x}10]", {}),
    (Mesh(x=2), "f32[3{x}5/27]", "f32[5{x}3/27]", {}),  # messages of several blocks
    # Chunked, and in place.
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {"budget": 512 + 32}),
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {"budget": 256 + 32, "donate": True}),
    (Mesh(x=2, y=2), "f32[{x}2, {y}8]", "f32[4, {x}{y}4]", {"budget": 64 + 16, "donate": True}),
    # Reductions.
    (Mesh(x=4), "f32[16] + sum{x}", "f32[{x}4]", {}),
    (Mesh(x=2, y=2), "f32[8, 4] + mean{x}{y}", "f32[{y}4, {x}2]", {}),
    (Mesh(x=4, y=2), "f32[{y}8] + max{x}", "f32[{y}8]", {}),
    (Mesh(x=2, y=2), "f32[{y}8] + product{x}", "f32[{y}{x}4]", {}),
    (Mesh(x=2, y=2), "f32[8] + min{x}{y}", "f32[8]", {}),
    # Sums that are started: from held digits, replicated, passed on to another axis, sliced.
    (Mesh(x=4), "f32[{x}4, 2]", "f32[16, 2] + sum{x}", {}),
    (Mesh(x=2, y=2), "f32[{y}4, {x}2]", "f32[8, 4] + min{x}{y}", {}),
    (Mesh(x=2, y=3), "f32[{x}6]", "f32[12] + sum{x}{y}", {}),
    (Mesh(x=2, y=2, z=2), "f32[{x}4, 8]", "f32[{z}4, {y}4] + sum{x}", {}),
    # Devices in another order.
    (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}4, 16]", "f32[16, {x}4]", {}),
]


@cache
def plans() -> list[Plan]:
    """The plans of the corpus."""
    return [
        rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)
        for mesh, source, target, options in CORPUS
    ]


class Fault(NamedTuple):
    """A wrong instruction in place of the right one."""

    kind: str
    wrong: Any


def has(layout: Layout, device: int) -> tuple[frozenset[int], ...]:
    """The true indices of a device, dim by dim; () if it has no element at all."""
    indices = tuple(
        frozenset(i for i in dim if i < size) for dim, size in zip(meaning(layout, device), layout.shape, strict=True)
    )
    return indices if all(indices) else ()


# ---- faults of single instructions ---------------------------------------------------------------


def replaced(items: tuple, at: int, new: Any) -> tuple:
    """The items with another one at this place."""
    return (*items[:at], new, *items[at + 1 :])


def grouped(step: Step, right: AllGather | AllToAll | ReduceScatter | AllReduce) -> Iterator[Fault]:
    """Faults in the groups of a collective."""
    groups = right.groups
    for one, other in combinations(range(len(groups)), 2):
        for at in range(len(groups[0])):
            a, b = groups[one][at], groups[other][at]
            rest = [(g, h) for k, (g, h) in enumerate(zip(groups[one], groups[other], strict=True)) if k != at]
            if any(has(step.operand, g) != has(step.operand, h) for g, h in rest):
                wrong = replaced(groups, one, replaced(groups[one], at, b))
                wrong = replaced(wrong, other, replaced(groups[other], at, a))
                yield Fault("two groups trade a member", replace(right, groups=wrong))
    for number, group in enumerate(groups):
        yield Fault("a group dropped", replace(right, groups=(*groups[:number], *groups[number + 1 :])))
        yield Fault("a group run twice", replace(right, groups=(*groups, group)))
        if isinstance(right, AllReduce):
            continue
        for i, j in combinations(range(len(group)), 2):
            ends = [(has(end, group[i]), has(end, group[j])) for end in (step.operand, step.result)]
            if any(a != b for a, b in ends):
                order = list(group)
                order[i], order[j] = order[j], order[i]
                yield Fault(
                    "two members of a group swapped", replace(right, groups=replaced(groups, number, tuple(order)))
                )
    if isinstance(right, (ReduceScatter, AllReduce)):
        for other in {"sum", "max", "min", "product", "mean"} - {right.reduction}:
            yield Fault("another reduction", replace(right, reduction=other))


def viewed(right: Any) -> Iterator[Fault]:
    """Faults in how a tile is seen as blocks."""
    for side in ("send", "receive"):
        view: TileView = getattr(right, side)
        if len(view.blocks) > 1:
            yield Fault(
                "block axes of a view swapped", replace(right, **{side: replace(view, blocks=view.blocks[::-1])})
            )
        for at, (a, b) in enumerate(zip(view.digits, view.digits[1:], strict=False)):
            blocks = {at, at + 1} & set(view.blocks)
            if a > 1 and b > 1 and a != b and len(blocks) == 1:
                digits = (*view.digits[:at], b, a, *view.digits[at + 2 :])
                moved = {at: at + 1, at + 1: at}
                wrong = replace(view, digits=digits, blocks=tuple(moved.get(k, k) for k in view.blocks))
                yield Fault("digits of a view swapped", replace(right, **{side: wrong}))


def sliced(step: Step, right: Slice) -> Iterator[Fault]:
    """Faults in the blocks that devices keep."""
    for device, block in right.block.items():
        for other in range(right.send.count):
            if other != block:
                yield Fault("a wrong slice", replace(right, block={**right.block, device: other}))
    for a, b in combinations(right.block, 2):
        if right.block[a] != right.block[b]:
            wrong = {**right.block, a: right.block[b], b: right.block[a]}
            yield Fault("two slices swapped", replace(right, block=wrong))


def split(step: Step, right: SplitSum) -> Iterator[Fault]:
    """Faults in what each summand has."""
    for device, place in right.place.items():
        last = [-1] if place is None else []  # Where numpy would write the last block.
        for other in {None, *range(right.receive.count), *last} - {place}:
            yield Fault("data in another summand", replace(right, place={**right.place, device: other}))
        for other in range(right.send.count):
            if other != right.keep[device] and place is not None:
                yield Fault("another block kept", replace(right, keep={**right.keep, device: other}))
    for other in {"sum", "max", "min", "product"} - {right.reduction}:
        yield Fault("another reduction", replace(right, reduction=other))


def permuted(step: Step, right: Permute) -> Iterator[Fault]:
    """Faults in the pairs of a permute."""
    pairs = right.pairs
    for i, j in combinations(range(len(pairs)), 2):
        (a, p), (b, q) = pairs[i], pairs[j]
        if has(step.operand, a) != has(step.operand, b):
            wrong = replaced(replaced(pairs, i, (b, p)), j, (a, q))
            yield Fault("two senders of a permutation swapped", Permute(wrong))
    for at, (a, p) in enumerate(pairs):
        if a != p:
            yield Fault("a permutation pair flipped", Permute(replaced(pairs, at, (p, a))))
        yield Fault("a permutation pair dropped", Permute((*pairs[:at], *pairs[at + 1 :])))


def shifted(block: Block, side: str, digits: tuple[int, ...]) -> Iterator[Block]:
    """The block one value off, along each digit and in each direction that stays inside of the tile."""
    first = getattr(block, side)
    last = first + sum((axis.extent - 1) * getattr(axis, side) for axis in block.axes)
    for at, radix in enumerate(digits):
        stride = prod(digits[at + 1 :])
        for by in (-1, 1):
            if first // stride % radix + by >= 0 and last // stride % radix + by < radix:
                yield block._replace(**{side: first + by * stride})


def boxed(step: Step, right: Exchange) -> Iterator[Fault]:
    """Faults in the rounds of an exchange."""
    for at in range(len(right.local)):
        rest = (*right.local[:at], *right.local[at + 1 :])
        yield Fault("a local copy dropped", replace(right, local=rest))
    for number, turn in enumerate(right.rounds):
        rest = (*right.rounds[:number], *right.rounds[number + 1 :])
        yield Fault("a round dropped", replace(right, rounds=rest))
        yield Fault("a round run twice", replace(right, rounds=(*right.rounds, turn)))
        if len(turn) > 1:
            around = [t.receiver for t in (*turn[1:], turn[0])]
            astray = tuple(t._replace(receiver=r) for t, r in zip(turn, around, strict=True) if t.sender != r)
            yield Fault("a round run again to wrong receivers", replace(right, rounds=(*right.rounds, astray)))
        for at, transfer in enumerate(turn):
            for kind, wrong in astray_transfers(step, right, turn, at, transfer):
                turns = tuple(t for t in wrong if t is not None)
                yield Fault(kind, replace(right, rounds=replaced(right.rounds, number, turns)))
    if not of_boxes(step) and right.rounds:
        yield Fault("staging forgotten", replace(right, staged=not right.staged))


def astray_transfers(
    step: Step, right: Exchange, turn: tuple[Transfer, ...], at: int, transfer: Transfer
) -> Iterator[tuple[str, tuple]]:
    """Faults of one transfer of a round."""
    yield "a chunk dropped", replaced(turn, at, None)
    for number, block in enumerate(transfer.blocks):
        if len(transfer.blocks) > 1:
            fewer = transfer._replace(blocks=(*transfer.blocks[:number], *transfer.blocks[number + 1 :]))
            yield "a block dropped", replaced(turn, at, fewer)
        for side, view in (("src", right.send), ("dst", right.receive)):
            for wrong in shifted(block, side, view.digits):
                moved = transfer._replace(blocks=replaced(transfer.blocks, number, wrong))
                name = "a source block off by one" if side == "src" else "a target block off by one"
                yield name, replaced(turn, at, moved)
    for other in range(at + 1, len(turn)):
        a, b = transfer, turn[other]
        if has(step.operand, a.sender) != has(step.operand, b.sender):
            swapped = replaced(replaced(turn, at, a._replace(sender=b.sender)), other, b._replace(sender=a.sender))
            yield "two senders of a round swapped", swapped
        if has(step.result, a.receiver) != has(step.result, b.receiver):
            swapped = replaced(
                replaced(turn, at, a._replace(receiver=b.receiver)), other, b._replace(receiver=a.receiver)
            )
            yield "two receivers of a round swapped", swapped


def slotted(step: Step, right: ExchangeInPlace) -> Iterator[Fault]:
    """Faults of an exchange in place."""
    for number, turn in enumerate(right.rounds):
        rest = (*right.rounds[:number], *right.rounds[number + 1 :])
        yield Fault("a round dropped", replace(right, rounds=rest))
        for at, t in enumerate(turn):
            wrong = {
                "a chunk dropped": None,
                "a source slot off by one": t._replace(src_slot=(t.src_slot + 1) % right.slots),
                "a target slot off by one": t._replace(dst_slot=(t.dst_slot + 1) % right.slots),
            }
            if t.start + t.length < right.slot:
                wrong["a piece of a slot off by one"] = t._replace(start=t.start + 1)
            for kind, other in wrong.items():
                turns = tuple(x for x in replaced(turn, at, other) if x is not None)
                yield Fault(kind, replace(right, rounds=replaced(right.rounds, number, turns)))
    for name in ("pack", "unpack"):
        for device, places in getattr(right, name).items():
            if len(places) > 1:
                (a, p), (b, q) = places[:2]
                own = ((a, q), (b, p), *places[2:])
                wrong = {**getattr(right, name), device: own}
                yield Fault(f"two places of {name}ing swapped", replace(right, **{name: wrong}))
            view = right.send if name == "pack" else right.receive
            for number, (slot, place) in enumerate(places):
                # A share that lies where it belongs is not moved in any case.
                if list(place_offsets(view, place)) != list(range(slot * right.slot, (slot + 1) * right.slot)):
                    wrong = {**getattr(right, name), device: (*places[:number], *places[number + 1 :])}
                    yield Fault(f"a place of {name}ing dropped", replace(right, **{name: wrong}))
    yield Fault("staging forgotten", replace(right, staged=not right.staged))


def faults(step: Step, right: Any) -> Iterator[Fault]:
    """All faults of one instruction."""
    match right:
        case Slice():
            yield from sliced(step, right)
        case SplitSum():
            yield from split(step, right)
        case Permute():
            yield from permuted(step, right)
        case Exchange():
            yield from boxed(step, right)
        case ExchangeInPlace():
            yield from slotted(step, right)
        case _:
            yield from grouped(step, right)
    if hasattr(right, "send") and not isinstance(right, Exchange | ExchangeInPlace):
        yield from viewed(right)


KINDS = 32
"""How many kinds of faults there are: each must come up."""


def planted(plan: Plan) -> list[tuple[str, int, Program]]:
    """At most `MOST_PER_KIND` faulty programs of each kind, each with its kind and the number of the wrong step."""
    program = lower_plan(plan)
    by_kind: dict[str, list[tuple[str, int, Program]]] = {}
    for at, (step, right) in enumerate(zip(plan.steps, program.instructions, strict=True)):
        for fault in faults(step, right):
            wrong = replace(program, instructions=replaced(program.instructions, at, fault.wrong))
            by_kind.setdefault(fault.kind, []).append((fault.kind, at, wrong))
    choose = random.Random(0)
    return [fault for alike in by_kind.values() for fault in choose.sample(alike, min(len(alike), MOST_PER_KIND))]


def detected(plan: Plan, program: Program) -> bool:
    """Whether the oracle objects, or the faulty program does not even run."""
    try:
        check(plan, program)
    except (AssertionError, LookupError, ValueError):
        return True
    return False


# ---- faults of whole programs --------------------------------------------------------------------


WHOLE: dict[str, Callable[[Program], Program]] = {
    "a step dropped": lambda p: replace(p, instructions=p.instructions[1:], tile_shapes=p.tile_shapes[1:]),
    "a step run twice": lambda p: replace(
        p, instructions=(*p.instructions, p.instructions[-1]), tile_shapes=(*p.tile_shapes, p.tile_shapes[-1])
    ),
    "steps reversed": lambda p: replace(p, instructions=p.instructions[::-1], tile_shapes=p.tile_shapes[::-1]),
    "the tile's shape reversed": lambda p: replace(p, tile_shapes=(*p.tile_shapes[:-1], p.tile_shapes[-1][::-1])),
    "the source given up": lambda p: replace(p, keep_source=False),
    "a device dropped": lambda p: replace(p, devices=p.devices[1:]),
    "another dtype": lambda p: replace(p, dtype="float64"),
}
