"""Who sends to whom in each round of an even exchange, in closed form.

    f32[{x}2, 6] -> f32[6, {x}2] on <x=3>      a share is what one tile of the source has for one of the target

    round  device 0 gets  device 1 gets  device 2 gets
        0    share 0, 0     share 1, 1     share 2, 2      from itself: it crosses no wire
        1    share 1, 0     share 2, 1     share 0, 2      share a, b: device a's, for device b
        2    share 2, 0     share 0, 1     share 1, 2

The formulas take any position that supports `//`, `%`, `*` and `+`: the prover runs them on a symbolic one.

Where digits change holders as well, few devices keep a share, and rounds are numbered so that they do so in different
ones:

    f32[{x}{y}2, 6] -> f32[{y}6, {x}2] on <x=3, y=3>     from (x, y) to those at (any, x); device (i, i) keeps a share

    round j, receiver (a, b)      gets the share of (b, a + j)         round 0: all three keep theirs, 1 and 2: none
    ... with the shift by -b      gets the share of (b, a + j - b)     round j: device (j, j) keeps its own

That is for libtpu's sake: where each of up to 256 devices sends to another one, it spells their addresses as a tree of
selects, which takes ten times as long to compile as the table that it reads if one device does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.lower.groups import coordinate
from reshard.types.pair.refine import RefinedDigit, Refinement

SPREAD = 256
"""The most devices among which the rounds of an exchange are numbered in that way."""


class RoundShift(NamedTuple):
    """What a device adds to the number of a round: a multiple of its coordinate along a factor of the positions."""

    times: int
    stride: int
    size: int


class EvenRounds:
    """The rounds of an exchange between layouts with a common refinement.

    A *turn* numbers a round: one digit for each refined digit that becomes local (held before, local after). The
    receiver's position and the turn fix the sender's coordinate along every stride:

    - The stride held a digit that another stride holds after: the receiver's coordinate along the new holder.
    - It held a digit that becomes local: the number of the share, counted from the receiver's own coordinate at the
      head of the chain, so that every round is a bijection of the devices.
    - It held nothing: the coordinate that is left over at the head of the chain.

    The *chain* of a stride leads from the stride to the one that held, before, the digit that the stride holds after,
    and so on; its head is the last. With `spread`, the number of the share is counted on by a shift, so that devices
    that keep a share do so in as many different rounds as possible.
    """

    def __init__(self, r: Refinement, *, spread: bool = False) -> None:
        self._after = {digit.dst: digit for digit in r.digits if digit.dst is not None}
        self.shares = [(digit, self._head(digit.src or 0)) for digit in r.gathered]
        self._sources = [(d.src, d.dst, d.radix) for d in r.digits if d.src is not None and d.dst is not None]
        unused = [(stride, digit) for stride, digit in self._after.items() if stride not in r.used_before]
        self._sources += [(stride, self._head(stride), digit.radix) for stride, digit in unused]
        self._shifts = _shifts(self.shares) if spread else {}

    @classmethod
    def of_exchange(cls, r: Refinement, devices: int) -> EvenRounds:
        """The rounds of an exchange among this number of devices, not in place."""
        return cls(r, spread=devices <= SPREAD)

    def _head(self, stride: int) -> int:
        """The end of the chain that starts at a stride."""
        while (digit := self._after.get(stride)) is not None and digit.src is not None:
            stride = digit.src
        return stride

    def share(self, position: int, turn: Sequence[int]) -> list[int]:
        """Which share of each digit that becomes local the device at a position gets in a turn."""
        return [self._share(position, d, head, j) for (d, head), j in zip(self.shares, turn, strict=True)]

    def _share(self, position: int, digit: RefinedDigit, head: int, turned: int) -> int:
        number = coordinate(position, head, digit.radix) + turned
        for times, stride, size in self._shifts.get(digit.src, ()):
            number = number + coordinate(position, stride, size) * times
        return number % digit.radix

    def sender(self, position: int, turn: Sequence[int]) -> int:
        """The position of the device that sends to the one at `position` in a turn."""
        sender = position
        for stride, origin, radix in self._sources:
            sender += (coordinate(position, origin, radix) - coordinate(position, stride, radix)) * stride
        for (digit, _), value in zip(self.shares, self.share(position, turn), strict=True):
            stride = digit.src or 0
            sender += (value - coordinate(position, stride, digit.radix)) * stride
        return sender

    def receiver(self, position: int, turn: Sequence[int]) -> int:
        """The position of the device that the one at `position` sends to in a turn: the inverse of `sender`."""
        receiver = position
        for stride, origin, radix in self._sources:
            receiver += (coordinate(position, stride, radix) - coordinate(position, origin, radix)) * origin
        # A shift depends on coordinates that digits left on their way, and on one that is its own head.
        shares = zip(self.shares, turn, strict=True)
        for (digit, head), turned in sorted(shares, key=lambda each: each[0][1] != each[0][0].src):
            back = turned + sum(t * coordinate(receiver, *factor) for t, *factor in self._shifts.get(digit.src, ()))
            value = (coordinate(position, digit.src or 0, digit.radix) - back) % digit.radix
            receiver += (value - coordinate(position, head, digit.radix)) * head
        return receiver


def _shifts(shares: Sequence[tuple[RefinedDigit, int]]) -> dict[int | None, list[RoundShift]]:
    """The shifts of shares, by the stride that held their digit: none unless some digit is not its own head.

    A device keeps a share where its coordinates are equal along a chain, to c: shifted by -c, in round c. Of a digit
    that is its own head it keeps one whatever its coordinate x, in round 0. So the two numbers trade places as far as
    they have common factors: with n of them, c = c' + (p / n) c'' and x = x' + n x'', the chain's digit of radix p is
    shifted by -(c' + (p / n) x'), the other by -c''.
    """
    own = {digit.src or 0: digit.radix for digit, head in shares if head == digit.src}
    chained = {digit.src or 0: digit.radix for digit, head in shares if head != digit.src}
    shifts: dict[int | None, list[RoundShift]] = {}
    traded = dict.fromkeys(own, 1)
    for stride, radix in chained.items():
        left = radix
        for other, size in own.items():
            place = traded[other]
            n = math.gcd(left, size // place)
            if n > 1:
                left //= n
                shifts.setdefault(stride, []).append(RoundShift(radix - left, other * place, n))
                shifts.setdefault(other, []).append(RoundShift(size - place, stride * left, n))
                traded[other] *= n
        if left > 1:
            shifts.setdefault(stride, []).append(RoundShift(radix - 1, stride, left))
    return shifts
