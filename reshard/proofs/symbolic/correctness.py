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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.errors import UndecidedError
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
    Slice,
    SplitSum,
)
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.claims import Claim, Query, Sum
from reshard.proofs.symbolic.contract import (
    Factors,
    StepContract,
    check_blocks,
    check_groups,
    check_places,
    count_values,
    held_factors,
    open_view,
    pair_digits,
    require,
)
from reshard.proofs.symbolic.form import Form, FormDigit, Place, Tied, form_of, local_place, step_digits
from reshard.proofs.symbolic.formulas import ByFormula, formula_claims
from reshard.proofs.symbolic.transfers import (
    broken_message_rule,
    check_exchange,
    check_exchange_in_place,
    check_permute,
    check_turns,
)
from reshard.types.layout import Layout
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


# Collectives run on symbols: which digit of the operand each digit of the result comes from.
#
# The numpy runtime opens a tile to digits, takes blocks, sends them and closes them again. Here every digit is a
# variable. Reshaping keeps the string of digits, so two shapes fit if their strings of radices and names are equal. A
# block's number is the string of its block digits. The sender of a block has, along the group's factors, the
# coordinates that the block's number spells. For an all_to_all, for example:
#
#     the receiver                            coordinate c:4 along stride 4, local digit e0:2 at place 2 of dim 0
#     its element comes from the device with  c:4 := e0:2
#     and there from the local digit          e1:8 := c:4
#
# The claim is that, digit by digit, the value that the operand's layout reads at the sender is the value that the
# result's layout reads at the receiver. It does not depend on the number of devices.


@dataclass(frozen=True)
class ElementSource:
    """Where the element at a receiver's coordinates and local digits comes from.

    `coordinates` replaces some of the receiver's by variables, `digits` names the operand's local digits; the senders
    along the `summed` factors are all combined. Along the `started` factors, the sender is the one device whose summand
    has the element, and the receiver any of them.
    """

    coordinates: dict[int, str]
    digits: dict[Place, str]
    summed: Factors = ()
    started: Factors = ()


def digit_variable(digit: FormDigit) -> str:
    """The variable of a local digit of the result."""
    return f"e{digit.dim}:{digit.low}"


def coordinate_variable(stride: int) -> str:
    """The variable of the receiver's coordinate along a stride."""
    return f"c:{stride}"


def claim_collective(instruction: object, contract: StepContract) -> list[Claim]:
    """The claims that make a collective right; compares its lists with the layouts on the way."""
    source_of = SOURCES.get(type(instruction))
    if source_of is None:
        raise UndecidedError(f"{contract.about}: no such instruction as {type(instruction).__name__}")
    source = source_of(instruction, contract)
    # Exactly the factors that stop being partial are summed, exactly those that start are filled, and the others keep
    # their summand.
    about = contract.about
    before = set(_partial_factors(contract, contract.operand))
    after = set(_partial_factors(contract, contract.result))
    require(set(source.started) == after - before, f"{about}: the result is partial where the operand is not")
    require(set(source.summed) == before - after, f"{about}: other summands are combined than those of the layouts")
    require(not {s for s, _ in after & before} & set(source.coordinates), f"{about}: summands change places")
    reduction = getattr(instruction, "reduction", None)
    if source.summed:
        require(reduction == contract.operand.reduction, f"{about}: combined by {reduction}")
    if source.started:
        require(reduction == contract.result.reduction, f"{about}: filled for {reduction}")
    same = not after & before or contract.operand.reduction == contract.result.reduction
    require(same, f"{about}: another reduction is left")
    return [_claim(contract, source)]


def _open_before(view: TileView, contract: StepContract) -> tuple[list[FormDigit], list[FormDigit]]:
    """The digits of a tile of the operand that number blocks by a view, and the others."""
    return open_view(view, contract.before, contract.tiles[0], len(contract.operand.dims))


def _open_after(view: TileView, contract: StepContract) -> tuple[list[FormDigit], list[FormDigit]]:
    """The digits of a tile of the result that number blocks by a view, and the others."""
    return open_view(view, contract.after, contract.tiles[1], len(contract.operand.dims))


def _slice(step: Slice, contract: StepContract) -> ElementSource:
    blocks, rest = _open_before(step.send, contract)
    check_blocks(contract.operand.mesh, step.block, held_factors(blocks, "dst"))
    return ElementSource({}, _sent(blocks, rest) | _closed(step.receive, rest, contract))


def _all_gather(step: AllGather, contract: StepContract) -> ElementSource:
    whole, _ = _open_before(step.send, contract)
    require(not whole, f"{contract.about}: a tile is sent in blocks")
    blocks, rest = _open_after(step.receive, contract)
    along = held_factors(blocks, "src")
    check_groups(contract.operand.mesh, step.groups, along, ordered=True)
    require(count_values(rest) == math.prod(contract.tiles[0]), "a block that is not a tile")
    return ElementSource(_senders(blocks, along), _kept(contract.before, rest))


def _all_to_all(step: AllToAll, contract: StepContract) -> ElementSource:
    (out, left), (arrived, rest) = _open_before(step.send, contract), _open_after(step.receive, contract)
    along = held_factors(arrived, "src")
    check_groups(contract.operand.mesh, step.groups, along, ordered=True)
    require([a.radix for a in out] == [a.radix for a in arrived], "the two ends number their blocks differently")
    digits = {a.place: coordinate_variable(stride) for a, (stride, _) in zip(out, along, strict=True)}
    return ElementSource(_senders(arrived, along), digits | _kept(left, rest))


def _reduce_scatter(step: ReduceScatter, contract: StepContract) -> ElementSource:
    blocks, rest = _open_before(step.send, contract)
    along = held_factors(blocks, "dst")
    check_groups(contract.operand.mesh, step.groups, along, ordered=True)
    return ElementSource({}, _sent(blocks, rest) | _closed(step.receive, rest, contract), along)


def _all_reduce(step: AllReduce, contract: StepContract) -> ElementSource:
    remaining = _partial_factors(contract, contract.result)
    along = [f for f in _partial_factors(contract, contract.operand) if f not in remaining]
    check_groups(contract.operand.mesh, step.groups, along, ordered=False)
    require(contract.tiles[0] == contract.tiles[1], "a combined tile of another shape")
    return ElementSource({}, _kept(contract.before, contract.after), along)


def _split_sum(step: SplitSum, contract: StepContract) -> ElementSource:
    """The device that has an element has, along each factor that releases a digit, that digit's value as coordinate."""
    mesh = contract.operand.mesh
    (kept, left), (placed, rest) = _open_before(step.send, contract), _open_after(step.receive, contract)
    check_blocks(mesh, step.keep, held_factors(kept, "dst"))
    before = _partial_factors(contract, contract.operand)
    started = [f for f in _partial_factors(contract, contract.result) if f not in before]
    # The digits that pass from one holder to another: the strides of both, and the radix.
    held = [(a.src, a.dst, a.radix) for a in contract.nested if a.src is not None and a.dst is not None]
    passed, along = [(src, dst, radix) for src, dst, radix in held if src != dst], held_factors(placed, "src")
    moved = {a.src for a in contract.nested if a.src is not None and a.src != a.dst}
    require(moved <= {stride for stride, _ in started}, f"{contract.about}: a digit that no new summand releases")
    require({stride for stride, _ in along} == moved - {src for src, _, _ in passed}, "blocks of other digits")
    check_places(mesh, step.place, along, [f for f in started if f[0] not in moved], passed)
    senders = _senders(placed, along) | {src: coordinate_variable(dst) for src, dst, _ in passed}
    return ElementSource(senders, _sent(kept, left) | _kept(left, rest), started=started)


SOURCES: dict[type[Any], Callable[[Any, StepContract], ElementSource]] = {
    Slice: _slice,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
    ReduceScatter: _reduce_scatter,
    AllReduce: _all_reduce,
    SplitSum: _split_sum,
}
"""Where each instruction takes its elements from."""


def _kept(before: Sequence[FormDigit], after: Sequence[FormDigit]) -> dict[Place, str]:
    """The operand's digits, named by the digits of the result that a reshape pairs them with."""
    return {a.place: digit_variable(b) for a, b in pair_digits(before, after)}


def _closed(view: TileView, block: Sequence[FormDigit], contract: StepContract) -> dict[Place, str]:
    """The digits of a block that becomes a whole tile of the result."""
    numbered, rest = _open_after(view, contract)
    return _kept(block, [*numbered, *rest])


def _sent(blocks: Sequence[FormDigit], rest: Sequence[FormDigit]) -> dict[Place, str]:
    """The block digits of the operand: the receiver's own coordinates number the block that it gets."""
    own = {a.place: coordinate_variable(a.dst) for a in blocks if a.dst is not None}
    require(len(own) == len(blocks) and not {a.place for a in rest} & set(own), "a block digit that no device holds")
    return own


def _senders(blocks: Sequence[FormDigit], along: Factors) -> dict[int, str]:
    """The coordinates of a block's sender, which the block's number spells."""
    return {stride: digit_variable(a) for a, (stride, _) in zip(blocks, along, strict=True)}


def _partial_factors(contract: StepContract, layout: Layout) -> list[tuple[int, int]]:
    """A layout's partial factors, cut where factors of the other layout end."""
    both = [*contract.partial(contract.operand), *contract.partial(contract.result)]
    both += [(stride, a.radix) for a in contract.nested for stride in (a.src, a.dst) if stride is not None]
    ends = {end for stride, size in both for end in (stride, stride * size)}
    pieces: list[tuple[int, int]] = []
    for stride, size in contract.partial(layout):
        inner = sorted(e for e in ends if stride <= e <= stride * size)
        pieces += [(low, high // low) for low, high in itertools.pairwise(inner)]
    return pieces


def _claim(contract: StepContract, source: ElementSource) -> Claim:
    """Digit by digit, what is read of the operand is what the result's layout says."""
    equal: list[tuple[str, str]] = []
    read: dict[Place, str] = {}
    bounds: dict[str, int | str] = {}
    for a in contract.nested:
        bounds |= {coordinate_variable(stride): a.radix for stride in (a.src, a.dst) if stride is not None}
        if a.dst is None:
            bounds[digit_variable(a)] = a.name or a.radix
        after = digit_variable(a) if a.dst is None else coordinate_variable(a.dst)
        if a.radix == 1:
            read[a.place] = after
        elif a.src is not None:
            read[a.place] = source.coordinates.get(a.src, coordinate_variable(a.src))
        elif a.place in contract.part:
            read[a.place] = digit_variable(a)
        else:
            require(a.place in source.digits, f"{contract.about}: a digit of the operand is not read")
            read[a.place] = source.digits[a.place]
        equal.append((read[a.place], after))
    # Where digits reach past the operand's tile, true elements are claimed to come from inside of it.
    given: list[tuple[Sum, int]] = []
    below: list[tuple[Sum, int]] = []
    for at, dim in enumerate(contract.operand.dims):
        local = [a for a in contract.before if a.dim == at]
        if count_values(local) != contract.tiles[0][at]:
            whole = [(a.low, after) for a, (_, after) in zip(contract.nested, equal, strict=True) if a.dim == at]
            given.append((tuple(whole), dim.size))
            inner = [(count_values(local[i + 1 :]), read[a.place]) for i, a in enumerate(local)]
            below.append((tuple(inner), contract.tiles[0][at]))
    return Claim(contract.about, tuple(bounds.items()), tuple(equal), tuple(given), tuple(below))
