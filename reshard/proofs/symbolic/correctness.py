"""A whole program on symbols: every instruction against the two layouts of its step, and what it has live and receives.

Three things of a program are about no single step, and are checked first: it has the plan's devices, tiles and steps;
every tile has the dtype of its step at every instruction; and in each round a device sends one message at most, and
receives one at most.

Buffers are counted from the program's own instructions, as `runtime.on_numpy` allocates them, on the fullest device.
Every buffer contains each free digit whole. At other sizes it is therefore its size here, divided by the product of the
free sizes here and multiplied by their product there. What is received is added up from the lists of an instruction;
that the lists themselves are right is proved step by step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.lower.exchange_rounds import ExchangeInPlace, Transfer
from reshard.lower.program import (
    AllGather,
    AllReduce,
    AllToAll,
    CastTiles,
    Exchange,
    InParts,
    Instruction,
    Joint,
    Permute,
    Program,
    ReduceScatter,
)
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.claims import Query
from reshard.proofs.symbolic.contract import StepContract, require
from reshard.proofs.symbolic.element_sources import claim_collective
from reshard.proofs.symbolic.form import Form, Place, Tied, form_of, local_place, step_digits
from reshard.proofs.symbolic.formulas import ByFormula, formula_claims
from reshard.proofs.symbolic.transfers import (
    broken_message_rule,
    check_exchange,
    check_exchange_in_place,
    check_permute,
    check_turns,
)
from reshard.types.reductions import all_reduce_elements

Buffers = tuple[int, ...]
"""The elements of each buffer that is live at one moment."""


@dataclass(frozen=True)
class Outline:
    """A program in which formulas stand for the lists of some exchanges and permutes."""

    devices: tuple[int, ...]
    dtype: str
    tile_shape: tuple[int, ...]
    instructions: tuple[Instruction | ByFormula, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    keep_source: bool


class JointCost(NamedTuple):
    """Collective calls of a step of several arrays, and the elements of its buffers; 0 where each array has its own."""

    launches: int
    buffers: int


class Wire(NamedTuple):
    """Elements that the worst device receives, and collective calls."""

    elements: int
    launches: int


def derive_claims(plan: Plan, program: Program | Outline) -> tuple[Form, list[list[Query]]]:
    """The form of a plan, and per step the claims that remain once its lists have been compared.

    Raises `UndecidedError` for an instruction that is not shown to be right.
    """
    check_outside(plan, program)
    broken = broken_rule(plan, program)
    require(broken is None, str(broken))
    layouts = [plan.source, *(step.result for step in plan.steps)]
    parts: list[tuple[Place, ...]] = []
    for instruction, operand in zip(program.instructions, layouts, strict=False):
        if isinstance(instruction, InParts):  # The two places between which the digit lies that numbers the parts.
            take = instruction.take
            low = local_place(operand, take.axis, take.inner)
            require(low is not None, "parts that cut digits elsewhere than the layouts do")
            parts.append(((take.axis, low or 1), (take.axis, (low or 1) * take.parts)))
        else:
            parts.append(())
    tied = frozenset(place for places in parts for place in places[:1])
    while True:
        form = form_of(layouts, itertools.chain.from_iterable(parts), tied)
        try:
            each = zip(itertools.count(1), plan.steps, program.instructions, parts, strict=False)
            return form, [_step_claims(*one, form) for one in each]
        except Tied as more:  # Every restart ties more sizes, so the loop ends.
            tied |= more.places


def check_outside(plan: Plan, program: Program | Outline) -> None:
    """Checks that the program has this plan's devices, tiles and steps."""
    require(program.devices == plan.source.mesh.devices, "the program is for other devices")
    require(program.dtype == plan.source.dtype, "the program is for another dtype")
    require(program.keep_source != plan.donate, "program and plan disagree on whether the source is kept")
    require(program.tile_shape == plan.source.tile_shape, "the program starts from other tiles")
    require(len(program.instructions) == len(program.tile_shapes) == len(plan.steps), "the program has other steps")
    for step, instruction, shape in zip(plan.steps, program.instructions, program.tile_shapes, strict=True):
        require(shape == step.result.tile_shape, f"{step.kind}: the result has tiles of shape {shape}")
        plain = instruction.each if isinstance(instruction, InParts) else instruction
        if isinstance(plain, Exchange | Permute) or step.operand.mesh != step.result.mesh:
            devices = _devices_after(plain, frozenset(step.operand.mesh.devices))
            require(frozenset(step.result.mesh.devices) == devices, f"{step.kind}: other devices")


def broken_rule(plan: Plan, program: Program | Outline) -> str | None:
    """What makes a program wrong whatever its elements do, None if nothing does: tiles of another dtype than the plan's
    at some instruction, and messages that no round can have.
    """
    if program.dtype != plan.source.dtype:
        return f"the program is for {program.dtype}, not {plan.source.dtype}"
    dtype = program.dtype
    aligned = len(program.instructions) == len(plan.steps)
    for number, instruction in enumerate(program.instructions):
        plain = instruction.each if isinstance(instruction, InParts) else instruction
        casts = isinstance(plain, CastTiles | Exchange) and plain.dtype
        dtype = casts or dtype
        wanted = plan.steps[number].result.dtype if aligned else dtype
        if dtype != wanted:
            return f"instruction {number + 1} leaves tiles of {dtype}, the plan says {wanted}"
        if broken := broken_message_rule(plain):
            return f"instruction {number + 1}: {broken}"
    return None if dtype == plan.target.dtype else f"the program ends with tiles of {dtype}, not {plan.target.dtype}"


def _devices_after(instruction: Instruction | ByFormula, devices: frozenset[int]) -> frozenset[int]:
    """The devices that have a tile after an instruction, given those that have one before it."""
    if isinstance(instruction, Exchange):
        return frozenset(instruction.receivers)
    if isinstance(instruction, Permute):
        return frozenset(receiver for _, receiver in instruction.pairs)
    return devices


def _step_claims(
    number: int, step: Step, instruction: Instruction | ByFormula, parts: Sequence[Place], form: Form
) -> list[Query]:
    """The claims of one step; only collectives leave any: the lists of exchanges and permutes are compared in full."""
    digits = step_digits(step.operand, step.result, form, parts)
    tiles = step.operand.tile_shape, step.result.tile_shape
    about = f"step {number}, {step.kind}"
    contract = StepContract(about, step.operand, step.result, digits, tiles, frozenset(form.names))
    if 0 in step.operand.shape:
        return []
    if isinstance(instruction, ByFormula):
        return formula_claims(step, contract, instruction)
    if isinstance(instruction, InParts):
        same = math.prod(tiles[0]) == math.prod(tiles[1])
        require(same or not instruction.in_place, f"{about}: parts of other sizes cannot take each other's place")
        (axis, low), (_, high) = parts
        inside = frozenset(a.place for a in contract.nested if a.dim == axis and low <= a.low < high)
        contract, instruction = contract.of_part(instruction.take, instruction.put, inside), instruction.each
    if isinstance(instruction, Permute):
        check_permute(instruction, contract)
    elif isinstance(instruction, Exchange):
        check_exchange(instruction, contract)
    elif isinstance(instruction, ExchangeInPlace):
        check_exchange_in_place(instruction, contract)
    else:
        return list(claim_collective(instruction, contract))
    return []


# ---- several arrays at once ----------------------------------------------------------------------


def check_joint_launch(about: str, each: Sequence[Instruction], joint: Joint | None) -> JointCost:
    """Checks that what several arrays do together in a step is what the instruction of each of them does alone; returns
    its launches, and the elements of the buffers in which their blocks leave and arrive.

    Blocks lie side by side, number by number: so the packed instruction has the same devices and as many blocks.
    """
    first = each[0]
    if joint is None:  # Each runs its own.
        launches = sum(count_received(instruction, 0).launches for instruction in each)
        require(len(each) == 1 or not launches, f"{about}: arrays of one batch run one after another")
        return JointCost(launches, 0)
    require(all(type(other) is type(first) for other in each), f"{about}: other instructions in one launch")
    if isinstance(joint, tuple):
        exchanges = [step for step in each if isinstance(step, Exchange)]
        require(len(joint) == len(exchanges) == len(each), f"{about}: other exchanges than those of the arrays")
        for own, step in zip(exchanges, joint, strict=True):
            # Beside the messages of others, and in other rounds, it has its own.
            same = replace(own, rounds=(), gathers=0) == replace(step, rounds=(), gathers=0)
            alike = sorted(_list_full_messages(own)) == sorted(_list_full_messages(step))
            require(same and alike, f"{about}: other exchanges than those of the arrays")
            check_turns(step, about)
        require(len({(step.dtype, step.gathers) for step in joint}) == 1, f"{about}: one message in several dtypes")
        ends = [[[t[:2] for t in turn] for turn in step.rounds] for step in joint]
        require(all(other == ends[0] for other in ends), f"{about}: exchanges between other devices in one launch")
        for turn in ends[0]:
            once = all(len({t[end] for t in turn}) == len(turn) for end in (0, 1))
            require(once, f"{about}: a device sends or receives two messages in a round")
        launches = _list_exchange_launches(joint)
        return JointCost(len(launches), max(launches, default=0))
    for name in ("groups", "pairs", "reduction"):
        same = len({getattr(step, name, None) for step in (*each, joint.packed)}) == 1
        require(same and type(joint.packed) is type(first), f"{about}: a packed launch of other {name}")
    require(isinstance(first, AllGather | AllToAll | ReduceScatter | AllReduce | Permute), f"{about}: a local launch")
    elements: list[int] = []
    for side in ("send", "receive"):
        views = tuple(getattr(step, side) for step in each if hasattr(step, side))
        require(getattr(joint, side) == views, f"{about}: packed by other views than those of the arrays")
        if not views:
            continue
        packed, total = getattr(joint.packed, side), sum(view.elements for view in views)
        count = math.prod(views[0].digits[axis] for axis in views[0].blocks)
        same = all(math.prod(view.digits[axis] for axis in view.blocks) == count for view in views)
        digits, blocks = ((count, total // count), (0,)) if views[0].blocks else ((total,), ())
        plain = packed == TileView((total,), (total,), digits, (0,) * len(digits), blocks)
        require(same and plain, f"{about}: packed tiles with other blocks than those of the arrays")
        elements.append(total)
    return JointCost(1, sum(elements))


# ---- memory and traffic --------------------------------------------------------------------------


def list_moments(program: Program | Outline) -> list[list[Buffers]]:
    """Per step, the buffers that are live together on a device at the moments that may be the fullest."""
    source = math.prod(program.tile_shape)
    steps: list[list[Buffers]] = []
    before = source
    home = here = frozenset(program.devices)
    for number, (instruction, shape) in enumerate(zip(program.instructions, program.tile_shapes, strict=True)):
        there, after = _devices_after(instruction, here), math.prod(shape)
        elsewhere = home.isdisjoint(here) and home.isdisjoint(there)
        retained = (source,) if program.keep_source and number and not elsewhere else ()
        if here.isdisjoint(there):  # No device is both: the buffers of senders, and those of receivers.
            staged = _staged(instruction) if isinstance(instruction, Exchange) and instruction.staged else 0
            steps.append([(*retained, before, staged), (after, staged)])
        elif isinstance(instruction, InParts):
            # The whole tiles stay live while a step runs part by part; of parts that overlap, there are two.
            parts = before // instruction.take.parts, after // instruction.put.parts
            tiles = (before,) if instruction.in_place else (before, after)
            next_one = parts if instruction.overlap else ()
            steps.append([(*retained, *tiles, *next_one, *m) for m in _moments_of_step(instruction.each, *parts)])
        else:
            steps.append([(*retained, *m) for m in _moments_of_step(instruction, before, after)])
        before, here = after, there
    return steps


def _moments_of_step(instruction: Instruction | ByFormula, before: int, after: int) -> Iterator[Buffers]:
    """The moments of one instruction that runs as a whole: operand, result, and what is live beside them."""
    match instruction:
        case AllGather(receive=view):  # Blocks arrive in the result itself, or in a buffer beside it.
            yield (before, view.elements) if view.in_place else (before, view.elements, after)
        case AllToAll(send=view, receive=arrived):  # The packed blocks are freed before the others are unpacked.
            yield (before, *(() if view.in_place else (view.elements,)), arrived.elements)
            yield (before, arrived.elements) if arrived.in_place else (before, arrived.elements, after)
        case ReduceScatter(send=view):
            yield (before, *(() if view.in_place else (view.elements,)), after)
        case Exchange(staged=True):
            staged = _staged(instruction)
            yield (before, after, staged) if staged else (before, after)
        case ByFormula(message=message, staged=True):
            yield before, after, 2 * message
        case ExchangeInPlace(rounds=rounds, slot=slot, slots=slots, staged=staged):
            longest = max((t.length for transfers in rounds for t in transfers), default=0)
            buffer = max(slot * slots, before)
            yield (buffer, 2 * longest) if staged and longest else (buffer,)
        case _:
            yield before, after


def _staged(step: Exchange) -> int:
    """The messages that one device sends and receives in a round, for the round and the device that have the most."""
    return max(_list_exchange_launches([step]), default=0)


def _list_exchange_launches(joint: Sequence[Exchange]) -> list[int]:
    """For each launch of exchanges with the same rounds, what the messages of the busiest device have together: of
    rounds in which groups gather, what it sends counts once."""
    first = joint[0]
    rounds: list[list[Transfer]] = []
    for turns in zip(*(step.rounds for step in joint), strict=True):
        rounds.append([transfer for turn in turns for transfer in turn])
    split = len(rounds) - first.gathers
    staged = [_count_staged(turn) for turn in rounds[:split]]
    if first.gathers:
        loads, sent = Counter[int](), Counter[int]()
        for turn in rounds[split:]:
            packed = Counter[int]()
            for transfer in turn:
                loads[transfer.receiver] += transfer.elements
                packed[transfer.sender] += transfer.elements
            sent |= packed
        staged.append(max((loads + sent).values(), default=0))
    return staged


def _list_full_messages(step: Exchange) -> list[tuple[bool, int, int, tuple[Any, ...]]]:
    """The messages of an exchange that have blocks."""
    return [(t.relayed, t.sender, t.receiver, t.blocks) for turn in step.rounds for t in turn if t.blocks]


def _count_staged(turn: Iterable[Transfer]) -> int:
    """The same for one round."""
    busy = Counter[int]()
    for t in turn:
        if t.sender != t.receiver:
            busy[t.sender] += t.elements
            busy[t.receiver] += t.elements
    return max(busy.values(), default=0)


def count_received(instruction: Instruction | ByFormula, before: int) -> Wire:
    """What the worst device receives in an instruction, from its lists or from the formula that stands for them."""
    match instruction:
        case ByFormula(message=message, rounds=rounds):
            return Wire(rounds * message, rounds)
        case InParts(each=each, take=take):
            one = count_received(each, before // take.parts)
            return Wire(one.elements * take.parts, one.launches * take.parts)
        case AllGather(groups=groups):
            return Wire((len(groups[0]) - 1) * before, 1)
        case AllToAll(groups=groups, send=view) | ReduceScatter(groups=groups, send=view):
            return Wire((len(groups[0]) - 1) * math.prod(view.block_shape), 1)
        case AllReduce(groups=groups):
            return Wire(all_reduce_elements(before, len(groups[0])), 1)
        case Permute(pairs=pairs):
            rounds, flows = 1, [(sender, receiver, before) for sender, receiver in pairs]
        case Exchange():
            rounds = len(_list_exchange_launches([instruction]))
            flows = [(t.sender, t.receiver, t.elements) for turn in instruction.rounds for t in turn]
        case ExchangeInPlace():
            rounds = len(instruction.rounds)
            flows = [(t.sender, t.receiver, t.length) for turn in instruction.rounds for t in turn]
        case _:
            return Wire(0, 0)
    received = Counter[int]()
    for sender, receiver, elements in flows:
        if sender != receiver:
            received[receiver] += elements
    return Wire(max(received.values(), default=0), rounds)
