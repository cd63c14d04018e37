"""Even exchanges and permutes with long lists: the formulas that write the lists, run on one symbolic device.

`lower` writes the transfers of round j with a few lines of arithmetic on a device's position. Here the same lines run
on a position whose coordinates are variables, and on a round whose number is a variable. The result is the sender's
coordinates and the spans of the box, as variables, so that one claim covers all devices and all rounds.

    f32[{x}4, 16] -> f32[16, {x}4] on <x=4>, receiver at c along x, round j

    share received      (c + j) mod 4            sender's coordinate along x := (c + j) mod 4
    box at the sender   dim 1: value c           box at the receiver   dim 0: value (c + j) mod 4

Where the formulas shift a share by other coordinates of the receiver, the claim about rounds has these variables too.

**What is shared with the lowering, and why.** The formulas themselves (`EvenRounds`, `EvenMessages`) are what is
proved, so they must be the lowering's own: one that is wrong leaves a false claim. They take a refinement as input, and
get the lowering's. Nothing else is taken from it: its digits must be those that `form` reads off the layouts, and the
message, the rounds and the staging are computed from `form`'s digits. What the formulas give are blocks: a start at
each end, which is a sum of coordinates times strides, and loops, which are the same for all devices. Both are read
here, and by `transfers`, with strides of the prover's own. So the lists are right on every device if `lower` writes
them in every turn for every receiver; that it does so is compared on one device, which must get each share once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from reshard.errors import UndecidedError
from reshard.geometry.refine import RefinedDigit, refine
from reshard.lower import lower_plan
from reshard.lower.colouring import RoundShift
from reshard.lower.exchange_rounds import EvenMessages, Exchange
from reshard.plans.plan import Step, chain
from reshard.plans.rules.step_mode import PLAIN
from reshard.proofs.symbolic.claims import Claim, Query, Rounds, ShareTurn, ShiftAlong
from reshard.proofs.symbolic.contract import StepContract, count_values, require
from reshard.proofs.symbolic.form import FormDigit, Place
from reshard.proofs.symbolic.transfers import boxes_of, check_messages, spans_of_loops


@dataclass(frozen=True)
class ByFormula:
    """Stands for the lists of an even exchange or a permute: elements of a message, rounds, whether it is staged."""

    message: int
    rounds: int
    staged: bool


class RoundDigit(NamedTuple):
    """The digit of a round's number that counts the shares of one gathered digit."""

    name: str


class SymbolicCoordinate(NamedTuple):
    """The receiver's coordinate along a stride, turned by a digit of the round and by shifts, or not."""

    stride: int
    radix: int
    turned: str | None = None
    shifts: tuple[RoundShift, ...] = ()

    def __add__(self, turn: object) -> _Turning:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(isinstance(turn, RoundDigit) and self.turned is None, "a share that no round numbers")
        return _Turning(self, cast(RoundDigit, turn))

    def __mul__(self, times: object) -> _Offset:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(isinstance(times, int), "a multiple by something else than a number")
        return _Offset(((cast(int, times), self),))

    def __sub__(self, own: SymbolicCoordinate) -> _CoordinateChange:
        require(own.turned is None, "a coordinate that is not the receiver's")
        return _CoordinateChange(self, own)


class _Offset(NamedTuple):
    """A sum of coordinates times numbers."""

    terms: tuple[tuple[int, SymbolicCoordinate], ...]

    def __add__(self, other: object) -> _Offset:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(other == 0 or isinstance(other, _Offset), "a start that is not a sum of coordinates")
        return self if other == 0 else _Offset((*self.terms, *cast(_Offset, other).terms))

    __radd__ = __add__


class _Turning(NamedTuple):
    value: SymbolicCoordinate
    turn: RoundDigit
    shifts: tuple[RoundShift, ...] = ()

    def __add__(self, shift: object) -> _Turning:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(isinstance(shift, _Offset), "a share shifted by something else than coordinates")
        ((times, by),) = cast(_Offset, shift).terms
        require(by.turned is None, "a share shifted by another share")
        return _Turning(self.value, self.turn, (*self.shifts, RoundShift(times, by.stride, by.radix)))

    def __mod__(self, radix: int) -> SymbolicCoordinate:
        require(radix == self.value.radix, "a share counted by another radix")
        return SymbolicCoordinate(self.value.stride, radix, self.turn.name, self.shifts)


class _CoordinateChange(NamedTuple):
    new: SymbolicCoordinate
    own: SymbolicCoordinate

    def __mul__(self, stride: object) -> _CoordinateChange:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(stride == self.own.stride and self.new.radix == self.own.radix, "a coordinate of another place")
        return self


class _PositionAbove(NamedTuple):
    stride: int

    def __mod__(self, radix: int) -> SymbolicCoordinate:
        return SymbolicCoordinate(self.stride, radix)


class SymbolicPosition:
    """A receiver's position with some coordinates replaced; the formulas use it like an integer.

    >>> here = SymbolicPosition()
    >>> there = here + ((here // 4 % 2) - (here // 1 % 2)) * 1
    >>> there.replaced
    {1: SymbolicCoordinate(stride=4, radix=2, turned=None, shifts=())}
    """

    def __init__(self, replaced: dict[int, SymbolicCoordinate] | None = None) -> None:
        self.replaced = replaced or {}

    def __floordiv__(self, stride: int) -> _PositionAbove:
        require(not self.replaced, "a coordinate of a changed position")
        return _PositionAbove(stride)

    def __add__(self, change: _CoordinateChange) -> SymbolicPosition:
        require(change.own.stride not in self.replaced, "a coordinate that is replaced twice")
        return SymbolicPosition({**self.replaced, change.own.stride: change.new})


def formula_of_step(step: Step) -> ByFormula | None:
    """What stands for the lists of a step, if it is a permute or an exchange, even and in one piece."""
    r = refine(step.operand, step.result)
    if step.kind not in ("permute", "exchange") or step.mode != PLAIN:
        return None
    if r is None or not r.exact or not r.common:
        return None
    if step.kind == "permute":
        return ByFormula(r.common, 1, staged=False)
    return ByFormula(r.common, r.pieces if r.swapped else r.pieces - 1, step.cost.scratch > 0)


def formula_claims(step: Step, contract: StepContract, instruction: ByFormula) -> list[Query]:
    """The claims that make an even exchange or a permute right, from the formulas that `lower` writes it by."""
    about, digits = contract.about, contract.nested
    r = refine(step.operand, step.result)
    if r is None or not contract.operand.partial_as(contract.result):
        raise UndecidedError(f"{about}: not an even exchange")
    # The lowering's formulas, run on one device of unknown coordinates in a round of unknown digits.
    messages, here = EvenMessages(r, step.operand.mesh.size, None), cast(Any, SymbolicPosition())
    even = messages.even
    turn = cast(Any, [RoundDigit(f"j{at}") for at in range(len(even.shares))])
    sender = cast(SymbolicPosition, even.sender(here, turn)).replaced
    shares = cast("list[SymbolicCoordinate]", even.share(here, turn))
    (block,) = messages.blocks(here, cast(Any, tuple(shares)))

    require(_agree(r.digits, digits), f"{about}: other digits than the layouts have")
    for stride, size in contract.partial(contract.operand):
        require(all(not stride <= s < stride * size for s in sender), f"{about}: summands change places")
    staying = [a for a in digits if a.src is None and a.dst is None]
    require(instruction.message == count_values(staying), f"{about}: a message of another size")
    for local in (contract.before, contract.after):
        # Where a digit that moves comes after one that stays, a message is not contiguous in memory.
        moves = [(a.src, a.dst) != (None, None) for a in local if a.radix > 1]
        require(instruction.staged or moves == sorted(moves, reverse=True), f"{about}: unstaged")
    given = count_values([a for a in digits if a.src is not None and a.dst is None])
    swapped = any(a.src is not None and a.dst not in (None, a.src) for a in digits)
    # Without a digit that changes holders, one of the shares is the receiver's own.
    require(instruction.rounds >= (given if swapped else given - 1), f"{about}: rounds are left out")
    if step.kind == "exchange":
        # The messages of the last device, none of whose coordinates is 0: it gets each share once.
        last = step.operand.mesh.devices[-1]
        alone = chain(step.operand, step.result, [step.spec], donate=True)
        lists = lower_plan(alone, last).instructions[0]
        require(isinstance(lists, Exchange), f"{about}: other lists than those of an exchange")
        boxes = boxes_of(cast(Exchange, lists))
        dst = check_messages(cast(Exchange, lists), boxes, contract)
        own, arriving = boxes.receiver == last, [a.place for a in contract.after if a.src is not None]
        got = {tuple(dst[place][at, 0] for place in arriving) for at in own.nonzero()[0]}
        require(len(got) == given == own.sum(), f"{about}: a device gets {len(got)} of its {given} shares")

    # Digit by digit, the block takes at the sender what the result's layout puts at the receiver.
    sent, received = (
        _read_formula_block(about, r.digits, local, start, loops)
        for local, start, loops in zip(
            (contract.before, contract.after),
            cast(Any, (block.src, block.dst)),
            spans_of_loops(block.axes, contract.before, contract.after),
            strict=True,
        )
    )
    equal: list[tuple[str, str]] = []
    bounds: dict[str, int] = {}
    for at, a in enumerate(r.digits):
        names: list[str] = []
        for one, stride, replaced in ((sent, a.src, sender), (received, a.dst, {})):
            # The span of a digit that moves is one value; that of a digit that stays is whole.
            value = one.get(at) if stride is None else replaced.get(stride, SymbolicCoordinate(stride, a.radix))
            name = f"whole {a}" if value is None else f"c:{value.stride}"
            if value is not None and value.turned is not None:
                name = f"share of {value.turned}"
            bounds[name] = 1 if value is None else value.radix
            names.append(name)
        equal.append((names[0], names[1]))
    return [Claim(about, tuple(bounds.items()), tuple(equal)), _rounds_claim(about, r.digits, sender, shares)]


def _read_formula_block(
    about: str,
    refined: Sequence[RefinedDigit],
    local: Sequence[FormDigit],
    start: _Offset | int,
    loops: Mapping[Place, tuple[int, int]],
) -> dict[int, SymbolicCoordinate]:
    """The value that a block takes of each refined digit of a tile that is not whole in it, by number.

    The loops take the digits that stay whole and one value of those that move; where it starts says which.
    """
    for a in local:
        stays = a.src is None and a.dst is None
        require(loops[a.place] == (0, a.radix if stays else 1), f"{about}: a block that takes other digits")
    strides = {a.place: count_values(local[at + 1 :]) for at, a in enumerate(local)}
    terms = () if start == 0 else cast(_Offset, start).terms
    values: dict[int, SymbolicCoordinate] = {}
    low: dict[int, int] = {}
    for at in range(len(refined) - 1, -1, -1):
        digit = refined[at]
        place = digit.dim, low.get(digit.dim, 1)
        low[digit.dim] = place[1] * digit.radix
        if digit.radix > 1 and place in strides and (digit.src, digit.dst) != (None, None):
            own = [value for times, value in terms if value.radix > 1 and times == strides[place]]
            require(len(own) == 1, f"{about}: a block that starts elsewhere, dim {digit.dim}")
            values[at] = own[0]
    require(len(values) == sum(value.radix > 1 for _, value in terms), f"{about}: a block that starts elsewhere")
    return values


def _agree(refined: Sequence[RefinedDigit], digits: Sequence[FormDigit]) -> bool:
    """Whether a refinement covers the digits of the layouts, each with its holders on both sides."""
    covered: list[tuple[int, int, int | None, int | None]] = []
    low: dict[int, int] = {}
    for digit in reversed(refined):
        start = low.get(digit.dim, 1)
        low[digit.dim] = start * digit.radix
        for ratio in (d.low // start for d in digits if d.dim == digit.dim and start <= d.low < low[digit.dim]):
            src, dst = (None if stride is None else stride * ratio for stride in (digit.src, digit.dst))
            covered.append((digit.dim, start * ratio, src, dst))
    return sorted(map(str, covered)) == sorted(str((d.dim, d.low, d.src, d.dst)) for d in digits)


def _rounds_claim(
    about: str,
    refined: Sequence[RefinedDigit],
    sender: Mapping[int, SymbolicCoordinate],
    shares: Sequence[SymbolicCoordinate],
) -> Rounds:
    """In each round every device sends once, and over all rounds every share arrives."""
    radices = {s: a.radix for a in refined for s in (a.src, a.dst) if s is not None}
    turns: list[ShareTurn] = []
    for value in shares:
        shifts: list[ShiftAlong] = []
        for times, low, size in value.shifts:  # By a part of the coordinate along one of the strides.
            stride = max((stride for stride in radices if stride <= low), default=0)
            place, rest = divmod(low, stride) if stride else (0, 1)
            require(not rest and radices[stride] % (place * size) == 0, "a shift along no stride of the layouts")
            shifts.append(ShiftAlong(times, stride, place, size))
        turns.append(ShareTurn(value.turned or "", value.stride, value.radix, tuple(shifts)))
    coordinates = tuple(sorted(radices.items()))
    values = [sender.get(stride, SymbolicCoordinate(stride, radix)) for stride, radix in coordinates]
    return Rounds(about, coordinates, tuple((value.stride, value.turned) for value in values), tuple(turns))
