"""Transfers by the form of their boxes; that boxes end up in their places is tested with exchanges and messages."""

from __future__ import annotations

from reshard.lower.exchange import Box, SlicedTransfer
from reshard.lower.to_shard_map.exchange import group_by_form


def transfer(sender: int, receiver: int, *boxes: tuple[int, int, int]) -> SlicedTransfer:
    return SlicedTransfer(sender, receiver, tuple(Box(((src, size),), ((dst, size),)) for src, dst, size in boxes))


def test_a_form_is_the_extents_of_boxes_not_their_places() -> None:
    assert transfer(0, 1, (0, 4, 2)).form == transfer(3, 2, (7, 0, 2)).form == (((2,), (2,)),)


def test_kinds_have_one_transfer_a_device() -> None:
    """Two equal messages to one device, as local copies may be, are two kinds."""
    one, same, other = transfer(0, 0, (0, 0, 2)), transfer(0, 0, (2, 4, 2)), transfer(1, 1, (0, 0, 3))
    assert group_by_form([one, other, same]) == [[one], [other], [same]]
    assert group_by_form([one, transfer(1, 1, (5, 5, 2))]) == [[one, transfer(1, 1, (5, 5, 2))]]
