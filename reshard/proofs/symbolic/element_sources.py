"""Collectives run on symbols: which digit of the operand each digit of the result comes from.

The numpy runtime opens a tile to digits, takes blocks, sends them and closes them again. Here every digit is a
variable. Reshaping keeps the string of digits, so two shapes fit if their strings of radices and names are equal. A
block's number is the string of its block digits. The sender of a block has, along the group's factors, the coordinates
that the block's number spells. For an all_to_all, for example:

    the receiver                            coordinate c:4 along stride 4, local digit e0:2 at place 2 of dim 0
    its element comes from the device with  c:4 := e0:2
    and there from the local digit          e1:8 := c:4

The claim is that, digit by digit, the value that the operand's layout reads at the sender is the value that the
result's layout reads at the receiver. It does not depend on the number of devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import UndecidedError
from reshard.lower.program import AllGather, AllReduce, AllToAll, ReduceScatter, Slice, SplitSum
from reshard.plans.rules.tile_view import TileView
from reshard.proofs.symbolic.claims import Claim, Sum
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
from reshard.proofs.symbolic.form import FormDigit, Place
from reshard.types.layout import Layout


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
