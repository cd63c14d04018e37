"""Even exchanges and permutes with long lists: the formulas that write the lists, run on one symbolic device.

`lower` writes the transfers of round j with a few lines of arithmetic on a device's position. Here the same lines run
on a position whose coordinates are variables, and on a round whose number is a variable. The result is the sender's
coordinates and the spans of the box, as variables, so that one claim covers all devices and all rounds.

    f32[{x}4, 16] -> f32[16, {x}4] on <x=4>, receiver at c along x, round j

    share received      (c + j) mod 4            sender's coordinate along x := (c + j) mod 4
    box at the sender   dim 1: value c           box at the receiver   dim 0: value (c + j) mod 4

Where the formulas shift a share by other coordinates of the receiver, the claim about rounds has these variables too.

**What is shared with the lowering, and why.** The formulas themselves (`EvenRounds`, `sent_spans`,
`received_spans`) are what is proved, so they must be the lowering's own: one that is wrong leaves a false claim. They
take a refinement as input, and get the lowering's. Nothing else is taken from it: its digits must be those that `form`
reads off the layouts, and the message, the rounds and the staging are computed from `form`'s digits. That `lower`
writes the values of these formulas is compared on the messages of one device, whose blocks `transfers` reads; beyond
`_MOST_SAMPLED` devices it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from reshard.errors import UndecidedError
from reshard.geometry.refine import RefinedDigit, refine
from reshard.lower import lower_plan
from reshard.lower.colouring import EvenRounds, RoundShift
from reshard.lower.exchange_rounds import Exchange, received_spans, sent_spans
from reshard.plans.plan import Step, StepSpec, chain
from reshard.plans.rules.step_mode import PLAIN
from reshard.proofs.symbolic.claims import Claim, Query, Rounds, ShareTurn, ShiftAlong
from reshard.proofs.symbolic.contract import StepContract, count_values, require
from reshard.proofs.symbolic.form import FormDigit
from reshard.proofs.symbolic.transfers import boxes_of, check_messages

_MOST_SAMPLED = 1 << 16
"""On more devices no messages are lowered: the list of receivers alone would take as long as the proof."""


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

    def __mul__(self, times: object) -> RoundShift:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(isinstance(times, int) and self.turned is None, "a shift by something else than coordinates")
        return RoundShift(cast(int, times), self.stride, self.radix)

    def __sub__(self, own: SymbolicCoordinate) -> _CoordinateChange:
        require(own.turned is None, "a coordinate that is not the receiver's")
        return _CoordinateChange(self, own)


class _Turning(NamedTuple):
    value: SymbolicCoordinate
    turn: RoundDigit
    shifts: tuple[RoundShift, ...] = ()

    def __add__(self, shift: object) -> _Turning:  # pyright: ignore[reportIncompatibleMethodOverride]
        require(isinstance(shift, RoundShift), "a share shifted by something else than coordinates")
        return _Turning(self.value, self.turn, (*self.shifts, cast(RoundShift, shift)))

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
    even, here = EvenRounds.of_exchange(r, step.operand.mesh.size), cast(Any, SymbolicPosition())
    turn = cast(Any, [RoundDigit(f"j{at}") for at in range(len(even.shares))])
    sender = cast(SymbolicPosition, even.sender(here, turn)).replaced
    shares = cast("list[SymbolicCoordinate]", even.share(here, turn))
    by_source = cast(Any, {digit.src: value for (digit, _), value in zip(even.shares, shares, strict=True)})
    whole: list[tuple[int, int]] = [(0, a.radix) for a in r.digits if a.src is None and a.dst is None]
    sent, received = sent_spans(r, here, whole), received_spans(r, by_source, whole)

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
    if step.kind == "exchange" and step.operand.mesh.size <= _MOST_SAMPLED:
        # The messages of the last device, none of whose coordinates is 0.
        alone = chain(step.operand, step.result, [StepSpec(step.kind, step.result, step.mode)], donate=True)
        (lists,) = lower_plan(alone, step.operand.mesh.devices[-1]).instructions
        require(isinstance(lists, Exchange), f"{about}: other lists than those of an exchange")
        check_messages(cast(Exchange, lists), boxes_of(cast(Exchange, lists)), contract)

    # Digit by digit, the box takes at the sender what the result's layout puts at the receiver.
    equal: list[tuple[str, str]] = []
    bounds: dict[str, int] = {}
    for at, a in enumerate(r.digits):
        names: list[str] = []
        for spans, stride, replaced in ((sent, a.src, sender), (received, a.dst, {})):
            if stride is not None:
                value = replaced.get(stride, SymbolicCoordinate(stride, a.radix))
            else:  # The span of a digit that moves is one value; that of a digit that stays is whole.
                start, extent = cast("tuple[object, int]", spans[at])
                value = start if isinstance(start, SymbolicCoordinate) and extent == 1 else None
            name = f"whole {a}" if value is None else f"c:{value.stride}"
            if value is not None and value.turned is not None:
                name = f"share of {value.turned}"
            bounds[name] = 1 if value is None else value.radix
            names.append(name)
        equal.append((names[0], names[1]))
    return [Claim(about, tuple(bounds.items()), tuple(equal)), _rounds_claim(about, r.digits, sender, shares)]


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
