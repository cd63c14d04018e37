"""Even exchanges and permutes with long lists: the formulas that write the lists, run on one symbolic device.

`lower` writes the transfers of round j with a few lines of arithmetic on a device's position. Here the same lines run
on a position whose coordinates are variables, and on a round whose number is a variable. The result is the sender's
coordinates and the spans of the box, as variables, so that one claim covers all devices and all rounds.

    f32[{x}4, 16] -> f32[16, {x}4] on <x=4>, receiver at c along x, round j

    share received      (c + j) mod 4            sender's coordinate along x := (c + j) mod 4
    box at the sender   dim 1: value c           box at the receiver   dim 0: value (c + j) mod 4

Where the formulas shift a share by other coordinates of the receiver, the claim about rounds has these variables too.

**What is shared with the lowering, and why.** The formulas themselves (`EvenRounds`, `sent_spans`,
`received_spans`) are what is proved, so they must be the lowering's own. They take a refinement as input, and get the
lowering's. Nothing else is taken from it: its digits must be those that `form` reads off the layouts, and the message,
the rounds and the staging are computed from `form`'s digits. It is trusted that `lower` writes the values of these
formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from reshard.geometry.refine import RefinedDigit, Refinement, refine
from reshard.lower.colouring import EvenRounds, RoundShift
from reshard.lower.exchange_rounds import received_spans, sent_spans
from reshard.plans.plan import Step
from reshard.plans.rules.step_mode import PLAIN
from reshard.proofs.symbolic.claims import Claim, Query, Rounds, ShareTurn, ShiftAlong
from reshard.proofs.symbolic.contract import StepContract, size_of
from reshard.proofs.symbolic.form import FormDigit
from reshard.proofs.symbolic.lists import require


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


class _Run(NamedTuple):
    """The formulas' results for one receiver and one round: the sender, the shares and the box at both ends."""

    sender: SymbolicPosition
    share: Sequence[SymbolicCoordinate]
    sent: Mapping[int, tuple[object, int]]
    received: Mapping[int, tuple[object, int]]


def by_formula(step: Step) -> ByFormula | None:
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
    about = contract.about
    r = refine(step.operand, step.result)
    require(r is not None and contract.operand.partial_as(contract.result), f"{about}: not an even exchange")
    if r is None:
        return []
    run = _run_formulas(r, step.operand.mesh.size)
    require(_agree(r.digits, contract.nested), f"{about}: other digits than the layouts have")
    for stride, size in contract.partial(contract.operand):
        kept = all(not stride <= s < stride * size for s in run.sender.replaced)
        require(kept, f"{about}: summands change places")
    _check_figures(instruction, contract)
    return [_same_elements(about, r.digits, run), _rounds(about, r.digits, run)]


def _run_formulas(r: Refinement, devices: int) -> _Run:
    """Runs the lowering's formulas on symbols."""
    even, here = EvenRounds.of_exchange(r, devices), cast(Any, SymbolicPosition())
    turn = cast(Any, [RoundDigit(f"j{at}") for at in range(len(even.shares))])
    sender = cast(SymbolicPosition, even.sender(here, turn))
    share = cast("list[SymbolicCoordinate]", even.share(here, turn))
    shares = {digit.src: value for (digit, _), value in zip(even.shares, share, strict=True)}
    whole: list[tuple[int, int]] = [(0, a.radix) for a in r.digits if a.src is None and a.dst is None]
    return _Run(sender, share, sent_spans(r, here, whole), received_spans(r, cast(Any, shares), whole))


def _check_figures(instruction: ByFormula, contract: StepContract) -> None:
    """Checks the message, the staging and the rounds against the digits of the layouts."""
    digits = contract.nested
    message = size_of([a for a in digits if a.src is None and a.dst is None])
    require(instruction.message == message, f"{contract.about}: a message of another size")
    require(instruction.staged or not _needs_staging(contract), f"{contract.about}: unstaged")
    shares = size_of([a for a in digits if a.src is not None and a.dst is None])
    swapped = any(a.src is not None and a.dst not in (None, a.src) for a in digits)
    # Without a digit that changes holders, one of the shares is the receiver's own.
    rounds = shares if swapped else shares - 1
    require(instruction.rounds >= rounds, f"{contract.about}: rounds are left out")


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


def _needs_staging(contract: StepContract) -> bool:
    """Whether a message is not contiguous in memory on some side: a digit that moves comes after one that stays."""
    for digits in (contract.before, contract.after):
        moves = [(a.src, a.dst) != (None, None) for a in digits if a.radix > 1]
        if moves != sorted(moves, reverse=True):
            return True
    return False


def _same_elements(about: str, refined: Sequence[RefinedDigit], run: _Run) -> Claim:
    """Digit by digit, the box takes at the sender what the result's layout puts at the receiver."""
    equal: list[tuple[str, str]] = []
    bounds: dict[str, int] = {}
    for at, a in enumerate(refined):
        before = _digit(run.sent[at], a) if a.src is None else _coordinate(run.sender, a.src, a.radix)
        after = _digit(run.received[at], a) if a.dst is None else SymbolicCoordinate(a.dst, a.radix)
        for value in (before, after):
            bounds[_spell(value)] = value.radix if isinstance(value, SymbolicCoordinate) else 1
        equal.append((_spell(before), _spell(after)))
    return Claim(about, tuple(bounds.items()), tuple(equal))


def _coordinate(position: SymbolicPosition, stride: int, radix: int) -> SymbolicCoordinate:
    return position.replaced.get(stride, SymbolicCoordinate(stride, radix))


def _digit(span: tuple[object, int], digit: RefinedDigit) -> SymbolicCoordinate | str:
    """The span of a digit that moves is one value; that of a digit that stays is whole."""
    start, extent = span
    return start if isinstance(start, SymbolicCoordinate) and extent == 1 else f"whole {digit}"


def _spell(value: SymbolicCoordinate | str) -> str:
    if isinstance(value, str):
        return value
    return f"c:{value.stride}" if value.turned is None else f"share of {value.turned}"


def _rounds(about: str, refined: Sequence[RefinedDigit], run: _Run) -> Rounds:
    """In each round every device sends once, and over all rounds every share arrives."""
    radices = {s: a.radix for a in refined for s in (a.src, a.dst) if s is not None}
    coordinates = tuple(sorted(radices.items()))
    values = [_coordinate(run.sender, stride, radix) for stride, radix in coordinates]
    senders = tuple((value.stride, value.turned) for value in values)
    turns = tuple(
        ShareTurn(
            value.turned or "", value.stride, value.radix, tuple(_along(shift, radices) for shift in value.shifts)
        )
        for value in run.share
    )
    return Rounds(about, coordinates, senders, turns)


def _along(shift: RoundShift, radices: Mapping[int, int]) -> ShiftAlong:
    """A shift by a part of the coordinate along one of the strides."""
    stride = max((stride for stride in radices if stride <= shift.stride), default=0)
    place, rest = divmod(shift.stride, stride) if stride else (0, 1)
    require(not rest and radices[stride] % (place * shift.size) == 0, "a shift along no stride of the layouts")
    return ShiftAlong(shift.times, stride, place, shift.size)
