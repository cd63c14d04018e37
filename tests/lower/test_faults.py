"""The drill: faults planted in lowered programs, and in plans. The oracle, or the types, must find each.

A fault is planted wherever it applies: where, by the meaning of the layouts alone, the devices involved
need different elements. What changes nothing (two groups listed in another order) is no fault.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import pytest

import reshard as rs
from reshard.errors import ReshardError
from reshard.lower import Program, lower
from reshard.lower.exchange import Box, Transfer
from reshard.lower.exchange_in_place import ExchangeInPlace, offsets
from reshard.lower.program import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter, Slice
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from reshard.types.plan import Plan, Step
from reshard.types.rules.checker import RULES
from reshard.types.rules.tile_view import TileView
from tests.oracle import check, of_boxes

MOST_PER_KIND = 40
"""Faults of one kind in one plan."""

CORPUS = [
    # Even, every device with its own data: nothing can hide behind a replica.
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
    # Devices in another order.
    (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}4, 16]", "f32[16, {x}4]", {}),
]


def plans() -> list[Plan]:
    return [
        rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options)
        for mesh, source, target, options in CORPUS
    ]


class Fault(NamedTuple):
    """A wrong instruction in place of the right one."""

    kind: str
    wrong: Any


def has(layout: Layout, device: int) -> tuple[frozenset[int], ...]:
    """The true indices of a device per dim; none at all if any dim has none."""
    found = tuple(
        frozenset(i for i in dim if i < size) for dim, size in zip(meaning(layout, device), layout.shape, strict=True)
    )
    return found if all(found) else ()


# ---- faults of each instruction ------------------------------------------------------------------


def replaced(items: tuple, at: int, new: Any) -> tuple:
    return (*items[:at], new, *items[at + 1 :])


def grouped(step: Step, found: AllGather | AllToAll | ReduceScatter | AllReduce) -> Iterator[Fault]:
    groups = found.groups
    for one, other in combinations(range(len(groups)), 2):
        for at in range(len(groups[0])):
            a, b = groups[one][at], groups[other][at]
            rest = [(g, h) for k, (g, h) in enumerate(zip(groups[one], groups[other], strict=True)) if k != at]
            if any(has(step.operand, g) != has(step.operand, h) for g, h in rest):
                wrong = replaced(groups, one, replaced(groups[one], at, b))
                wrong = replaced(wrong, other, replaced(groups[other], at, a))
                yield Fault("two groups trade a member", replace(found, groups=wrong))
    for number, group in enumerate(groups):
        yield Fault("a group dropped", replace(found, groups=(*groups[:number], *groups[number + 1 :])))
        yield Fault("a group run twice", replace(found, groups=(*groups, group)))
        if isinstance(found, AllReduce):
            continue
        for i, j in combinations(range(len(group)), 2):
            ends = [(has(end, group[i]), has(end, group[j])) for end in (step.operand, step.result)]
            if any(a != b for a, b in ends):
                order = list(group)
                order[i], order[j] = order[j], order[i]
                yield Fault(
                    "two members of a group swapped", replace(found, groups=replaced(groups, number, tuple(order)))
                )
    if isinstance(found, (ReduceScatter, AllReduce)):
        for other in {"sum", "max", "min", "product", "mean"} - {found.reduction}:
            yield Fault("another reduction", replace(found, reduction=other))


def viewed(found: Any) -> Iterator[Fault]:
    for side in ("send", "receive"):
        view: TileView = getattr(found, side)
        if len(view.blocks) > 1:
            yield Fault(
                "block axes of a view swapped", replace(found, **{side: replace(view, blocks=view.blocks[::-1])})
            )
        for at, (a, b) in enumerate(zip(view.digits, view.digits[1:], strict=False)):
            blocks = {at, at + 1} & set(view.blocks)
            if a > 1 and b > 1 and a != b and len(blocks) == 1:
                digits = (*view.digits[:at], b, a, *view.digits[at + 2 :])
                moved = {at: at + 1, at + 1: at}
                wrong = replace(view, digits=digits, blocks=tuple(moved.get(k, k) for k in view.blocks))
                yield Fault("digits of a view swapped", replace(found, **{side: wrong}))


def sliced(step: Step, found: Slice) -> Iterator[Fault]:
    for device, block in found.block.items():
        for other in range(found.send.count):
            if other != block:
                yield Fault("a wrong slice", replace(found, block={**found.block, device: other}))
    for a, b in combinations(found.block, 2):
        if found.block[a] != found.block[b]:
            wrong = {**found.block, a: found.block[b], b: found.block[a]}
            yield Fault("two slices swapped", replace(found, block=wrong))


def permuted(step: Step, found: Permute) -> Iterator[Fault]:
    pairs = found.pairs
    for i, j in combinations(range(len(pairs)), 2):
        (a, p), (b, q) = pairs[i], pairs[j]
        if has(step.operand, a) != has(step.operand, b):
            wrong = replaced(replaced(pairs, i, (b, p)), j, (a, q))
            yield Fault("two senders of a permutation swapped", Permute(wrong))
    for at, (a, p) in enumerate(pairs):
        if a != p:
            yield Fault("a permutation pair flipped", Permute(replaced(pairs, at, (p, a))))
        yield Fault("a permutation pair dropped", Permute((*pairs[:at], *pairs[at + 1 :])))


def shifted(box: Box, side: str, shape: tuple[int, ...]) -> Iterator[Box]:
    """The box one place off along each axis where that is another place."""
    spans = getattr(box, side)
    for axis, ((start, extent), size) in enumerate(zip(spans, shape, strict=True)):
        for by in (-1, 1):
            if start + by >= 0 and start + by + extent <= size:
                yield box._replace(**{side: replaced(spans, axis, (start + by, extent))})


def boxed(step: Step, found: Exchange) -> Iterator[Fault]:
    for at in range(len(found.local)):
        rest = (*found.local[:at], *found.local[at + 1 :])
        yield Fault("a local copy dropped", replace(found, local=rest))
    for number, turn in enumerate(found.rounds):
        rest = (*found.rounds[:number], *found.rounds[number + 1 :])
        yield Fault("a round dropped", replace(found, rounds=rest))
        yield Fault("a round run twice", replace(found, rounds=(*found.rounds, turn)))
        if len(turn) > 1:
            around = [t.receiver for t in (*turn[1:], turn[0])]
            astray = tuple(t._replace(receiver=r) for t, r in zip(turn, around, strict=True) if t.sender != r)
            yield Fault("a round run again to wrong receivers", replace(found, rounds=(*found.rounds, astray)))
        for at, transfer in enumerate(turn):
            for kind, wrong in astray_transfers(step, found, turn, at, transfer):
                turns = tuple(t for t in wrong if t is not None)
                yield Fault(kind, replace(found, rounds=replaced(found.rounds, number, turns)))
    if not of_boxes(step) and found.rounds:
        yield Fault("staging forgotten", replace(found, staged=not found.staged))


def astray_transfers(
    step: Step, found: Exchange, turn: tuple[Transfer, ...], at: int, transfer: Transfer
) -> Iterator[tuple[str, tuple]]:
    yield "a chunk dropped", replaced(turn, at, None)
    for number, box in enumerate(transfer.boxes):
        if len(transfer.boxes) > 1:
            fewer = transfer._replace(boxes=(*transfer.boxes[:number], *transfer.boxes[number + 1 :]))
            yield "a box dropped", replaced(turn, at, fewer)
        for side, view in (("src", found.send), ("dst", found.receive)):
            for wrong in shifted(box, side, view.digits):
                moved = transfer._replace(boxes=replaced(transfer.boxes, number, wrong))
                name = "a source box off by one" if side == "src" else "a target box off by one"
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


def slotted(step: Step, found: ExchangeInPlace) -> Iterator[Fault]:
    for number, turn in enumerate(found.rounds):
        rest = (*found.rounds[:number], *found.rounds[number + 1 :])
        yield Fault("a round dropped", replace(found, rounds=rest))
        for at, t in enumerate(turn):
            wrong = {
                "a chunk dropped": None,
                "a source slot off by one": t._replace(src_slot=(t.src_slot + 1) % found.slots),
                "a target slot off by one": t._replace(dst_slot=(t.dst_slot + 1) % found.slots),
            }
            if t.start + t.length < found.slot:
                wrong["a piece of a slot off by one"] = t._replace(start=t.start + 1)
            for kind, other in wrong.items():
                turns = tuple(x for x in replaced(turn, at, other) if x is not None)
                yield Fault(kind, replace(found, rounds=replaced(found.rounds, number, turns)))
    for name in ("pack", "unpack"):
        for device, places in getattr(found, name).items():
            if len(places) > 1:
                (a, p), (b, q) = places[:2]
                own = ((a, q), (b, p), *places[2:])
                wrong = {**getattr(found, name), device: own}
                yield Fault(f"two places of {name}ing swapped", replace(found, **{name: wrong}))
            view = found.send if name == "pack" else found.receive
            for number, (slot, place) in enumerate(places):
                # A share that lies where it belongs is not moved anyway.
                if list(offsets(view, place)) != list(range(slot * found.slot, (slot + 1) * found.slot)):
                    wrong = {**getattr(found, name), device: (*places[:number], *places[number + 1 :])}
                    yield Fault(f"a place of {name}ing dropped", replace(found, **{name: wrong}))
    yield Fault("staging forgotten", replace(found, staged=not found.staged))


def faults(step: Step, found: Any) -> Iterator[Fault]:
    match found:
        case Slice():
            yield from sliced(step, found)
        case Permute():
            yield from permuted(step, found)
        case Exchange():
            yield from boxed(step, found)
        case ExchangeInPlace():
            yield from slotted(step, found)
        case _:
            yield from grouped(step, found)
    if hasattr(found, "send") and not isinstance(found, Exchange | ExchangeInPlace):
        yield from viewed(found)


KINDS = {
    "two groups trade a member",
    "two members of a group swapped",
    "a group dropped",
    "a group run twice",
    "another reduction",
    "block axes of a view swapped",
    "digits of a view swapped",
    "a wrong slice",
    "two slices swapped",
    "two senders of a permutation swapped",
    "a permutation pair flipped",
    "a permutation pair dropped",
    "a local copy dropped",
    "a round dropped",
    "a round run twice",
    "a round run again to wrong receivers",
    "a chunk dropped",
    "a box dropped",
    "a source box off by one",
    "a target box off by one",
    "two senders of a round swapped",
    "two receivers of a round swapped",
    "a source slot off by one",
    "a target slot off by one",
    "a piece of a slot off by one",
    "two places of packing swapped",
    "two places of unpacking swapped",
    "a place of packing dropped",
    "a place of unpacking dropped",
    "staging forgotten",
}


def planted(plan: Plan) -> list[tuple[str, int, Program]]:
    """At most `MOST_PER_KIND` faulty programs of every kind, and where the fault is."""
    program = lower(plan)
    by_kind: dict[str, list[tuple[str, int, Program]]] = {}
    for at, (step, found) in enumerate(zip(plan.steps, program.instructions, strict=True)):
        for fault in faults(step, found):
            wrong = replace(program, instructions=replaced(program.instructions, at, fault.wrong))
            by_kind.setdefault(fault.kind, []).append((fault.kind, at, wrong))
    choose = random.Random(0)
    return [f for found in by_kind.values() for f in choose.sample(found, min(len(found), MOST_PER_KIND))]


def found_out(plan: Plan, program: Program) -> bool:
    """Whether the oracle objects, or the faulty program does not even run."""
    try:
        check(plan, program)
    except (AssertionError, LookupError, ValueError):
        return True
    return False


@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_every_planted_fault_is_found(number: int):
    plan = plans()[number]
    check(plan)
    every = planted(plan)
    assert len(every) >= 6
    missed = [(kind, at) for kind, at, program in every if not found_out(plan, program)]
    assert not missed, f"{missed} in {plan}"


def test_the_corpus_has_every_kind_of_step_and_fault():
    kinds = Counter(step.kind for plan in plans() for step in plan.steps)
    assert set(kinds) == set(RULES)
    counts = Counter(kind for plan in plans() for kind, _, _ in planted(plan))
    assert set(counts) == KINDS
    assert min(counts.values()) >= 2, counts


def test_a_right_program_passes():
    for plan in plans():
        check(plan, lower(plan))


def test_groups_listed_in_another_order_are_no_fault():
    plan = rs.plan(Layout.parse("f32[{x}2, {y}4]", Mesh(x=4, y=2)), Layout.parse("f32[8, {y}4]", Mesh(x=4, y=2)))
    program = lower(plan)
    (gather,) = program.instructions
    assert isinstance(gather, AllGather)
    check(plan, replace(program, instructions=(replace(gather, groups=gather.groups[::-1]),)))


# ---- faults of the whole program -----------------------------------------------------------------


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


@pytest.mark.parametrize("kind", WHOLE)
def test_faults_of_the_whole_program_are_found(kind: str):
    mesh = Mesh(x=2, y=2, z=2)
    source, target = Layout.parse("f32[{x}4, {z}4, 8, 8]", mesh), Layout.parse("f32[8, 8, {z}4, {y}4]", mesh)
    plan = rs.plan(source, target)
    assert len(plan.steps) == 3
    assert found_out(plan, WHOLE[kind](lower(plan)))


# ---- faults that types refuse --------------------------------------------------------------------


def test_a_step_of_another_kind_is_refused():
    """Only an exchange derives what another step does, since it derives every move."""
    for plan in plans():
        for step in (s for s in plan.steps if s.kind != "exchange"):
            for kind in set(RULES) - {step.kind, "exchange"}:
                with pytest.raises(ReshardError):
                    Step(kind, step.operand, step.result)


def test_a_plan_for_another_target_is_refused():
    """Every plan's steps, offered for each other target of the same mesh."""
    refused = 0
    for plan in plans():
        for other in plans():
            if other.target != plan.target and other.target.mesh == plan.target.mesh:
                with pytest.raises(ReshardError):
                    Plan(plan.source, other.target, plan.steps, plan.donate)
                refused += 1
    assert refused > 20


def test_a_step_whose_result_is_wrong_is_refused():
    """Each result with two of its digits' holders swapped, or one more or one less: never the same step."""
    refused = 0
    for plan in plans():
        for at, step in enumerate(plan.steps):
            for text in twisted(str(step.result)):
                try:
                    result = Layout.parse(text, step.result.mesh)
                except ReshardError:
                    continue
                if result in (step.result,) or result.shape != step.result.shape:
                    continue
                with pytest.raises(ReshardError):
                    wrong = Step(step.kind, step.operand, result, step.mode, step.retained_bytes)
                    Plan(plan.source, plan.target, replaced(plan.steps, at, wrong), plan.donate)
                refused += 1
    assert refused > 20


def twisted(text: str) -> Iterator[str]:
    """Texts of layouts near one."""
    for a, b in combinations("xyz", 2):
        yield text.replace(f"{{{a}}}", "{?}").replace(f"{{{b}}}", f"{{{a}}}").replace("{?}", f"{{{b}}}")
    body = text[text.index("[") + 1 : text.index("]")]
    dims = body.split(", ")
    for i, j in combinations(range(len(dims)), 2):
        swapped = list(dims)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield text.replace(body, ", ".join(swapped))
    for op in ("sum", "max"):
        yield f"{text} + {op}{{x}}"
        yield f"{text} + {op}{{y}}"
    yield text.split(" + ")[0]
