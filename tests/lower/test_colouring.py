"""Edge colourings of any bipartite multigraph: matchings, as many as the largest degree."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.lower.colouring import Edge, colour_edges


def assert_coloured(edges: list[Edge]) -> None:
    turns = colour_edges(edges)
    for turn in turns:
        assert len({edges[at][0] for at in turn}) == len({edges[at][1] for at in turn}) == len(turn) > 0
    assert sorted(at for turn in turns for at in turn) == list(range(len(edges)))
    degrees = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    assert len(turns) == max((n for degree in degrees for n in degree.values()), default=0)


@pytest.mark.slow
@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_as_many_rounds_as_the_largest_degree(edges: list[Edge]):
    assert_coloured(edges)


@pytest.mark.parametrize("seed", range(5))
def test_dense_random_graphs(seed: int):
    choose = random.Random(seed)
    assert_coloured([(choose.randrange(40), choose.randrange(40)) for _ in range(1500)])


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 7, 8, 15, 16, 17, 31])
def test_regular_graphs_of_odd_and_even_degrees(degree: int):
    """All devices are busiest: no round has room to spare."""
    choose, devices, edges = random.Random(degree), list(range(23)), list[Edge]()
    for _ in range(degree):
        choose.shuffle(devices)
        edges += enumerate(devices)
    choose.shuffle(edges)
    assert_coloured(edges)
    assert_coloured(edges[degree // 2 :])


def test_a_few_devices_with_thousands_of_messages_each():
    """Ten devices and 20,000 messages: a search for a free round, round by round, would take 20 million looks."""
    choose = random.Random(3)
    assert_coloured([(choose.randrange(10), choose.randrange(10)) for _ in range(20_000)])
