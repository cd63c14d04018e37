"""What a device fetches where the messages of all devices are listed: in the turns of a relay, and through a view.

form       the move                                 blocks lie in
FIRST      to the devices that pass elements on     a tile of the source, and one of the target
SECOND     from these to the others                 two tiles of the target
a `View`   through the view, whole or in part       two flat tiles
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from reshard.geometry.messages import Message, exchange_messages
from reshard.geometry.relay import relay_messages
from reshard.lower.to_mpi.blocks import Block, blocks_of_products
from reshard.lower.to_mpi.direct import Fetch
from reshard.lower.to_mpi.schedule import strided_block
from reshard.types.layout import Layout
from reshard.types.view import View
from reshard.types.whole import check_deadline

FIRST, SECOND = 1, 2

Form = int | View
"""`FIRST` or `SECOND`, a turn of a relay, or the view of a move."""

Shape = tuple[int, ...]


class _ListedMessage(NamedTuple):
    """Who sends to whom, and a function that makes the blocks of a message."""

    sender: int
    receiver: int
    blocks: Callable[[], Iterable[Block]]


def fetched_as(source: Layout, target: Layout, form: Form, device: int) -> list[Fetch]:
    """What a device copies from the tiles of others, and of its own; `Fetch.rank` is a device.

    >>> from reshard.types.mesh import Mesh
    >>> source, target = Layout.parse("f32[12]", Mesh(x=1)), Layout.parse("f32[12]", Mesh(d=3))
    >>> [[(fetch.rank, fetch.blocks[0].extents) for fetch in fetched_as(source, target, turn, 1)] for turn in (1, 2)]
    [[(0, (6,))], [(2, (6,))]]
    """
    listed = (each for each in _list_messages(source, target, form) if each.receiver == device)
    return [Fetch(each.sender, blocks) for each in listed if (blocks := tuple(each.blocks()))]


def served_as(source: Layout, target: Layout, form: Form, device: int) -> list[Fetch]:
    """What devices copy from the tile of one, itself included: the fetches of all, as far as they name it."""
    listed = (each for each in _list_messages(source, target, form) if each.sender == device)
    return [Fetch(each.receiver, blocks) for each in listed if (blocks := tuple(each.blocks()))]


def tile_shapes(source: Layout, target: Layout, form: Form | None) -> tuple[Shape, Shape]:
    """The shapes of the tiles in which the blocks of a form lie; None is a move as it is."""
    if isinstance(form, View):
        return (math.prod(source.tile_shape),), (math.prod(target.tile_shape),)
    return (target if form == SECOND else source).tile_shape, target.tile_shape


def _list_messages(source: Layout, target: Layout, form: Form) -> Iterator[_ListedMessage]:
    if isinstance(form, View):
        for viewed in exchange_messages(source, target, form):
            check_deadline()
            yield _ListedMessage(viewed.sender, viewed.receiver, _Boxes(viewed))
        return
    shapes = tile_shapes(source, target, form)
    for message in relay_messages(source, target)[form - FIRST]:
        check_deadline()
        yield _ListedMessage(message.sender, message.receiver, _Runs(message, *shapes))


class _Boxes(NamedTuple):
    message: Message

    def __call__(self) -> Iterator[Block]:
        return (strided_block(block) for block in self.message.blocks)


class _Runs(NamedTuple):
    message: Message
    send: Shape
    receive: Shape

    def __call__(self) -> Iterator[Block]:
        return blocks_of_products(self.message.products, self.send, self.receive)
