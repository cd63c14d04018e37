"""Stripes: what every rank puts is what its peer finds, and every element is carried once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.lower.to_mpi import (
    lay_stripes,
    most_stripes,
    number_of_groups,
    ranks_of_nodes,
    stripes_received,
    stripes_sent,
)

SPLITS = [(0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 2, 2), (3, 3, 3, 1, 1, 0, 0, 0, 0), (5, 5, 5)]


@pytest.mark.parametrize("nodes", SPLITS)
def test_each_rank_finds_what_others_put(nodes: tuple[int, ...]):
    choose, size, every = random.Random(len(nodes)), len(nodes), ranks_of_nodes(nodes)
    given = np.array([[choose.choice([0, 1, 2, 5]) * (a != b) for b in range(size)] for a in range(size)])
    taken = np.array([[given[list(ranks), to].sum() for ranks in every] for to in range(size)])
    mine = [
        lay_stripes(nodes, rank, given[list(here)], taken[list(here)], given[:, rank])
        for here in every
        for rank in here
    ]
    mine = [mine[[rank for ranks in every for rank in ranks].index(rank)] for rank in range(size)]
    here_of = {rank: ranks for ranks in every for rank in ranks}
    memory = [[(-1, -1)] * max(each.elements) for each in mine]
    for rank, each in enumerate(mine):
        for to in range(size):
            for at in range(given[rank, to]):
                member, start = each.puts.members[to], each.puts.starts[to]
                assert memory[here_of[rank][member]][start + at] == (-1, -1)
                memory[here_of[rank][member]][start + at] = (rank, to)
    sent = {(a, b): memory[a][start : start + n] for a, each in enumerate(mine) for b, start, n in each.sends}
    for rank, each in enumerate(mine):
        assert len(each.sends) <= most_stripes(nodes) and len(each.receives) <= most_stripes(nodes)
        for peer, start, elements in each.receives:
            stripe = sent.pop((peer, rank))
            assert len(stripe) == elements and memory[rank][start : start + elements] == [(-1, -1)] * elements
            memory[rank][start : start + elements] = stripe
    assert not sent
    for rank, each in enumerate(mine):
        for giver in range(size):
            member, start = each.finds.members[giver], each.finds.starts[giver]
            parts = memory[here_of[rank][member]][start : start + given[giver, rank]]
            assert parts == [(giver, rank)] * given[giver, rank]


@pytest.mark.parametrize("nodes", SPLITS)
def test_both_nodes_name_the_same_carriers(nodes: tuple[int, ...]):
    sent = [stripe[:4] for ranks in ranks_of_nodes(nodes) for stripe in stripes_sent(nodes, ranks[0])]
    received = [stripe[:4] for ranks in ranks_of_nodes(nodes) for stripe in stripes_received(nodes, ranks[0])]
    assert sorted(sent) == sorted(received)
    assert len(sent) == len(ranks_of_nodes(nodes)) * (len(ranks_of_nodes(nodes)) - 1) * number_of_groups(nodes)


def test_sixteen_nodes_of_64_ranks_send_one_message_a_rank():
    nodes = tuple(rank // 64 for rank in range(1024))
    assert (number_of_groups(nodes), most_stripes(nodes)) == (4, 1)
