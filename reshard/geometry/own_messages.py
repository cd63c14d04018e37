"""The messages of an exchange of boxes in which one device has a part, without those of the others.

The same messages as `messages.all_messages`, each in closed form from both numerals: who holds a piece (`holders`), and
what a piece shares with others (`overlap`). The time grows with the messages of the device, not with the mesh.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from reshard.geometry.holders import holders, home
from reshard.geometry.message import Message, Runs, Tile
from reshard.geometry.messages import spans_apart
from reshard.geometry.overlap import shares_from, shares_of
from reshard.types.layout import Layout
from reshard.types.whole import check_deadline


def messages_of(operand: Layout, result: Layout, device: int) -> Iterator[Message]:
    """What a device copies, sends and receives in an exchange between layouts on the same devices.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=3)
    >>> before, after = Layout.parse("f32[{x}2/5]", mesh), Layout.parse("f32[5]", mesh)
    >>> [(each.sender, each.receiver, each.elements) for each in messages_of(before, after, 2)]
    [(0, 2, 2), (1, 2, 2), (2, 2, 1), (2, 0, 1), (2, 1, 1)]
    """
    exchange = _Exchange(operand, result, operand.mesh.position(device))
    yield from exchange.received()
    yield from exchange.sent()


class _Exchange:
    """An exchange as the device at a position of the operand's mesh sees it.

    Devices exchange among those that are `near`: equal in all coordinates that the exchange does not involve.
    """

    def __init__(self, operand: Layout, result: Layout, me: int) -> None:
        self._operand, self._result, self._me = operand, result, me
        self._rank = len(operand.dims)
        self._home = home(operand, me)
        self._apart = [(low, high // low) for low, high in spans_apart(operand, result)]
        self._places = [me // stride % size for stride, size in self._apart]
        self._wanted = lru_cache(maxsize=None)(self._wanted_of)

    def received(self) -> Iterator[Message]:
        """What the device receives, its own copies included."""
        dims = zip(self._operand.dims, self._result.dims, self._wanted_tile(), strict=False)
        for owners in itertools.product(*(shares_of(s, t, q).items() for s, t, q in dims)):
            check_deadline()
            tile = (*(p for p, _ in owners), *self._home[self._rank :])
            runs = tuple(runs for _, runs in owners)
            yield self._message(self._giver(tile, self._me), self._me, runs)

    def sent(self) -> Iterator[Message]:
        """What the device sends to others."""
        mine = self._holders(self._home)
        for receiver, runs in self._wishes(self._home):
            check_deadline()
            if receiver not in mine and (len(mine) == 1 or self._giver(self._home, receiver) == self._me):
                yield self._message(self._me, receiver, runs)

    def _message(self, sender: int, receiver: int, runs: Runs) -> Message:
        ids = self._operand.mesh.devices
        return Message(ids[sender], ids[receiver], (runs,))

    def _wanted_tile(self) -> Tile:
        mesh = self._result.mesh
        return home(self._result, mesh.position(self._operand.mesh.devices[self._me]))

    def _giver(self, tile: Tile, receiver: int) -> int:
        """Who gives of a tile to a receiver: itself, else the holders deal the others among themselves."""
        held = self._holders(tile)
        if receiver in held:
            return receiver
        if len(held) == 1:
            return held[0]
        wanted = self._wanted(tile)
        return held[wanted[receiver] * len(held) // len(wanted)]

    def _wanted_of(self, tile: Tile) -> dict[int, int]:
        """The number of each receiver that lacks part of a tile."""
        held = set(self._holders(tile))
        lacking = (receiver for receiver, _ in self._wishes(tile) if receiver not in held)
        return {receiver: number for number, receiver in enumerate(sorted(lacking))}

    def _wishes(self, tile: Tile) -> Iterator[tuple[int, Runs]]:
        """The receivers of parts of a tile, each with what it needs."""
        dims = zip(self._operand.dims, self._result.dims, tile, strict=False)
        takers = holders(self._result, any_summand=True)
        summand = tile[self._rank :]
        for wishes in itertools.product(*(shares_from(s, t, p).items() for s, t, p in dims)):
            runs = tuple(runs for _, runs in wishes)
            for receiver in self._near(self._translated(takers.of([q for q, _ in wishes]))):
                if not summand or home(self._operand, receiver)[self._rank :] == summand:
                    yield receiver, runs

    def _holders(self, tile: Tile) -> Sequence[int]:
        return self._near(holders(self._operand).of(tile))

    @property
    def _translated(self) -> Callable[[tuple[int, ...]], Sequence[int]]:
        """Positions of the result's mesh as positions of the operand's."""
        one, other = self._operand.mesh, self._result.mesh
        if one == other:
            return lambda positions: positions
        return lambda positions: [one.position(other.devices[at]) for at in positions]

    def _near(self, positions: Sequence[int]) -> Sequence[int]:
        if not self._apart:
            return positions
        places = zip(self._apart, self._places, strict=True)
        for (stride, size), place in places:
            positions = [at for at in positions if at // stride % size == place]
        return positions
