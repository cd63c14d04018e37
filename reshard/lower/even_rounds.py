"""Who sends to whom in each round of an even exchange, in closed form.

    f32[{x}2, 6] -> f32[6, {x}2] on <x=3>      a share is what one tile of the source has for one of the target

    round  device 0 gets  device 1 gets  device 2 gets
        0    share 0, 0     share 1, 1     share 2, 2      from itself: it crosses no wire
        1    share 1, 0     share 2, 1     share 0, 2      share a, b: device a's, for device b
        2    share 2, 0     share 0, 1     share 1, 2

The formulas take any position that supports `//`, `%`, `*` and `+`: the prover runs them on a symbolic one.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.lower.groups import coordinate
from reshard.types.pair.refine import Refinement


class EvenRounds:
    """The rounds of an exchange between layouts with a common refinement.

    A *turn* numbers a round: one digit for each refined digit that becomes local (held before, local after). The
    receiver's position and the turn fix the sender's coordinate along every stride:

    - The stride held a digit that another stride holds after: the receiver's coordinate along the new holder.
    - It held a digit that becomes local: the number of the share, counted from the receiver's own coordinate at the
      head of the chain, so that every round is a bijection of the devices.
    - It held nothing: the coordinate that is left over at the head of the chain.

    The *chain* of a stride leads from the stride to the one that held, before, the digit that the stride holds after,
    and so on; its head is the last.
    """

    def __init__(self, r: Refinement) -> None:
        self._after = {digit.dst: digit for digit in r.digits if digit.dst is not None}
        self.shares = [(digit, self._head(digit.src or 0)) for digit in r.gathered]
        self._sources = [(d.src, d.dst, d.radix) for d in r.digits if d.src is not None and d.dst is not None]
        unused = [(stride, digit) for stride, digit in self._after.items() if stride not in r.used_before]
        self._sources += [(stride, self._head(stride), digit.radix) for stride, digit in unused]

    def _head(self, stride: int) -> int:
        """The end of the chain that starts at a stride."""
        while (digit := self._after.get(stride)) is not None and digit.src is not None:
            stride = digit.src
        return stride

    def share(self, position: int, turn: Sequence[int]) -> list[int]:
        """Which share of each digit that becomes local the device at a position gets in a turn."""
        return [
            (coordinate(position, head, d.radix) + j) % d.radix for (d, head), j in zip(self.shares, turn, strict=True)
        ]

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
        for (digit, head), turned in zip(self.shares, turn, strict=True):
            value = (coordinate(position, digit.src or 0, digit.radix) - turned) % digit.radix
            receiver += (value - coordinate(position, head, digit.radix)) * head
        return receiver
