"""Messages of several arrays as one: every element arrives, both ends agree, and no message is above the cap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

from reshard.runtime.on_mpi.copies.stream_copy import copy_all
from reshard.runtime.on_mpi.direct import direct
from reshard.runtime.on_mpi.wire.messages import joint, message_cap
from reshard.types import Layout, Mesh
from tests.oracle import PADDING, tiles_of

MESH = Mesh(x=3)
PAIRS = [
    tuple(Layout.parse(text, MESH) for text in pair)
    for pair in (("s64[{x}2, 6]", "s64[6, {x}2]"), ("s64[{x}3/7]", "s64[7]"), ("s64[5{x}1]", "s64[{x}2/5]"))[:2]
]
NODES = (0, 1, 2)


@pytest.mark.parametrize("staging", [2, 8, 1000])
def test_every_element_arrives_in_as_few_messages_as_fit(staging: int) -> None:
    each = [[direct(*pair, rank, NODES, 8, 8 * staging) for pair in PAIRS] for rank in NODES]
    together = [joint([move.messages for move in moves], staging, 8, rank, 3) for rank, moves in enumerate(each)]
    before, after = ([tiles_of(pair[end]) for pair in PAIRS] for end in (0, 1))
    results = [[np.full_like(of[rank], PADDING) for of in after] for rank in NODES]
    wire: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, mine in enumerate(together):
        for number, chunk in enumerate(mine.sends.chunks):
            buffer = np.zeros(chunk.elements, np.int64)
            copy_all(list(mine.sends.packing(number, [of[rank] for of in before], buffer)))
            wire.setdefault((rank, chunk.peer), []).append(buffer)
    for rank, mine in enumerate(together):
        for move, result, of in zip(each[rank], results[rank], before, strict=True):
            for source, into in move.own:
                into.of(result)[...] = source.of(of[rank])
        for number, chunk in enumerate(mine.receives.chunks):
            buffer = wire[chunk.peer, rank].pop(0)
            assert buffer.size == chunk.elements <= message_cap(staging, 8)
            copy_all(list(mine.receives.unpacking(number, results[rank], buffer)))
    assert not any(wire.values())
    for rank, at in itertools.product(NODES, range(len(PAIRS))):
        wanted = after[at][rank]
        assert np.array_equal(results[rank][at][wanted != PADDING], wanted[wanted != PADDING])
    if staging == 1000:
        assert all(len(mine.sends.chunks) == 2 for mine in together)


def test_without_room_nothing_is_joined() -> None:
    moves = [direct(*PAIRS[0], 0, NODES, 8, 0).messages] * 2
    assert all(len(chunk.parts) == 1 for chunk in joint(moves, 0, 8, 0, 3).sends.chunks)
