"""What a rank has in common with many peers, as columns: rows that are joined copy what they copy one by one."""

from __future__ import annotations

import random

import numpy as np

from reshard.geometry.blocks import Axis, Block
from reshard.lower.to_mpi import PeerTable
from tests.lower.to_mpi.elements import places
from tests.sampling import for_each

SHAPES = [[Block(0, 0, (Axis(2, 1, 3),))], [Block(0, 0, (Axis(2, 5, 4), Axis(3, 1, 1))), Block(13, 20, ())]]


def random_table(choose: random.Random) -> PeerTable:
    """Rows at equal distances, for a while, in either tile."""
    src = dst = 0
    rows: list[tuple[int, list[Block]]] = []
    while len(rows) < 40:
        steps, shape = (choose.choice([0, 1, 7, 7]), choose.choice([2, 5])), choose.choice(SHAPES)
        for _ in range(choose.randint(1, 5)):
            rows.append((len(rows), [Block(b.src + src, b.dst + dst, b.axes) for b in shape]))
            src, dst = src + steps[0], dst + steps[1]
    return PeerTable.of_blocks(rows)


@for_each(range(20))
def test_joined_rows_copy_what_single_rows_do(seed: int):
    choose = random.Random(seed)
    table, end = random_table(choose), choose.choice(["src", "dst"])
    members = np.array([choose.randrange(2) if choose.random() < 0.3 else 0 for _ in table])
    order = np.lexsort((np.array([choose.random() for _ in table]) * choose.choice([0, 1]), members))
    starts = np.zeros(len(table), int)
    starts[order] = np.cumsum(table.elements[order]) - table.elements[order]  # Some members pack in another order.
    copied: list[list[tuple[int, int, int]]] = []
    for joins in (False, True):
        blocks = [*table.place_packed(end, members, starts, joins=joins)]
        pairs = [(m, *at) for m, b in blocks for at in zip(places(b, "src"), places(b, "dst"), strict=True)]
        copied.append(sorted(pairs))
        assert joins == (len(blocks) < sum(len(of) for of in table.values()))
    assert copied[0] == copied[1]
    packed = [to for _, _, to in copied[0]]
    assert sorted(packed) == list(range(int(table.elements.sum())))
    tile = [at for _, at, _ in copied[0]]
    assert sorted(tile) == sorted(at for of in table.values() for block in of for at in places(block, end))
