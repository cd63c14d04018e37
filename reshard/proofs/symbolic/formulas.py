"""Even exchanges and permutes whose lists are long: the formulas that write them, run on one symbolic device.

`lower` writes round j's transfer of every device by the same few lines, from its position. They are run here on
a position whose coordinates are variables, and on a round whose number is one. What comes out is the
sender's coordinates and the spans of the box, as variables, and one claim covers all devices and rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from reshard.lower.exchange import received_spans, sent_spans
from reshard.lower.groups import Chains
from reshard.proofs.symbolic.collectives import Frame
from reshard.proofs.symbolic.form import Atom
from reshard.proofs.symbolic.lists import need
from reshard.proofs.symbolic.queries import Claim, Query, Rounds
from reshard.types.pair.refine import refine
from reshard.types.plan import Step


@dataclass(frozen=True)
class Written:
    """In place of the lists of an even exchange or a permute: a message's elements, rounds, and if buffers stage it."""

    message: int
    rounds: int
    staged: bool


class Value(NamedTuple):
    """A digit in terms of the receiver: its coordinate along a stride, turned by a round's digit or not."""

    stride: int
    radix: int
    turned: str | None = None

    def __add__(self, turn: object) -> _Turning:  # pyright: ignore[reportIncompatibleMethodOverride]
        need(isinstance(turn, Turn) and self.turned is None, "a share that no round numbers")
        return _Turning(self, cast(Turn, turn))

    def __sub__(self, own: Value) -> _Change:
        need(own.turned is None, "a coordinate that is no receiver's")
        return _Change(self, own)


class Turn(NamedTuple):
    """The digit of a round's number that counts the shares of one gathered digit."""

    name: str


class _Turning(NamedTuple):
    value: Value
    turn: Turn

    def __mod__(self, radix: int) -> Value:
        need(radix == self.value.radix, "a share counted by another radix")
        return Value(self.value.stride, radix, self.turn.name)


class _Change(NamedTuple):
    new: Value
    own: Value

    def __mul__(self, stride: object) -> _Change:  # pyright: ignore[reportIncompatibleMethodOverride]
        need(stride == self.own.stride and self.new.radix == self.own.radix, "a coordinate of another place")
        return self


class _Above(NamedTuple):
    stride: int

    def __mod__(self, radix: int) -> Value:
        return Value(self.stride, radix)


class Position:
    """A receiver's position, with some coordinates replaced: what the formulas take for a number."""

    def __init__(self, replaced: dict[int, Value] | None = None) -> None:
        self.replaced = replaced or {}

    def __floordiv__(self, stride: int) -> _Above:
        need(not self.replaced, "a coordinate of a changed position")
        return _Above(stride)

    def __add__(self, change: _Change) -> Position:
        need(change.own.stride not in self.replaced, "a coordinate that is replaced twice")
        return Position({**self.replaced, change.own.stride: change.new})


def written(step: Step) -> Written | None:
    """What stands for a step's lists, if it is a permute or an exchange, even and in one piece."""
    r = refine(step.operand, step.result)
    if step.kind not in ("permute", "exchange") or step.mode != (None, False, 1):
        return None
    if r is None or not r.exact or not r.common:
        return None
    if step.kind == "permute":
        return Written(r.common, 1, staged=False)
    return Written(r.common, r.pieces if r.swapped else r.pieces - 1, step.cost.scratch > 0)


def exchange(step: Step, frame: Frame, instruction: Written) -> list[Query]:
    """The claims that make an even exchange right, from the formulas that `lower` writes it by."""
    r = refine(step.operand, step.result)
    need(r is not None and frame.operand.partial == frame.result.partial, f"{frame.about}: no even exchange")
    if r is None:
        return []
    chains, here = Chains(r), cast(Any, Position())
    turn = cast(Any, [Turn(f"j{at}") for at in range(len(chains.shares))])
    sender = cast(Position, chains.sender(here, turn))
    share = cast("list[Value]", chains.share(here, turn))
    shares = {a.src: v for (a, _), v in zip(chains.shares, share, strict=True)}
    spans: list[tuple[int, int]] = [(0, a.radix) for a in r.atoms if a.src is None and a.dst is None]
    out, into = sent_spans(r, here, spans), received_spans(r, cast(Any, shares), spans)
    need(_fits(r.atoms, frame.nested), f"{frame.about}: other digits than the layouts have")
    equal: list[tuple[Value | str, Value | str]] = []
    for at, a in enumerate(r.atoms):
        before = sender.replaced.get(a.src, Value(a.src, a.radix)) if a.src is not None else _value(out[at], a)
        after = Value(a.dst, a.radix) if a.dst is not None else _value(into[at], a)
        equal.append((cast("Value | str", before), cast("Value | str", after)))
    for stride, size in frame.partial(frame.operand):
        need(all(not stride <= s < stride * size for s in sender.replaced), f"{frame.about}: summands change places")
    need(instruction.message == r.common and instruction.staged >= _needs_staging(frame), f"{frame.about}: unstaged")
    rounds = math.prod(v.radix for v in share)
    need(instruction.rounds >= rounds - (not r.swapped), f"{frame.about}: rounds are left out")
    return [_claim(frame.about, equal), _bijection(frame.about, r.atoms, sender, share)]


def _value(span: tuple[object, int], atom: object) -> object:
    """A span of a moved digit is one value; one of a digit that stays is whole."""
    start, extent = span
    return start if isinstance(start, Value) and extent == 1 else f"whole {atom}"


def _fits(coarse: Sequence[Any], fine: Sequence[Atom]) -> bool:
    """Whether two cuts of the same digits agree: the same place values and holders."""
    low: dict[int, int] = {}
    ends: set[tuple[int, int, int | None, int | None]] = set()
    for a in reversed(coarse):
        ends.add((a.dim, low.get(a.dim, 1), a.src, a.dst))
        low[a.dim] = low.get(a.dim, 1) * a.radix
    return ends <= {(a.dim, a.low, a.src, a.dst) for a in fine}


def _needs_staging(frame: Frame) -> bool:
    """Whether a message is no run of memory on some side: a digit that moves after one that stays."""
    for atoms in (frame.before, frame.after):
        moves = [(a.src, a.dst) != (None, None) for a in atoms if a.radix > 1]
        if moves != sorted(moves, reverse=True):
            return True
    return False


def _claim(about: str, equal: Sequence[tuple[Value | str, Value | str]]) -> Claim:
    """Digit by digit, what the box takes is what the result's layout puts there."""
    names = [(_spell(a), _spell(b)) for a, b in equal]
    bounds = {_spell(v): v.radix for pair in equal for v in pair if isinstance(v, Value)}
    bounds |= {name: 1 for pair in names for name in pair if name not in bounds}
    return Claim(about, tuple(bounds.items()), tuple(names))


def _spell(value: Value | str) -> str:
    if isinstance(value, str):
        return value
    return f"c:{value.stride}" if value.turned is None else f"share of {value.turned}"


def _bijection(about: str, atoms: Sequence[Any], sender: Position, share: Sequence[Value]) -> Rounds:
    """In a round each device sends once, and over the rounds each share arrives."""
    radices = {s: a.radix for a in atoms for s in (a.src, a.dst) if s is not None}
    coordinates = tuple(sorted(radices.items()))
    found: list[tuple[int, str | None]] = []
    for stride, _ in coordinates:
        value = sender.replaced.get(stride, Value(stride, radices[stride]))
        found.append((value.stride, value.turned))
    turns = tuple((v.turned or "", v.stride, v.radix) for v in share)
    return Rounds(about, coordinates, tuple(found), turns)
