"""Rounds: edge colourings of any bipartite multigraph, and the closed form of even exchanges."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.refine import Refinement, refine
from reshard.lower.colouring import Edge, EvenRounds, colour_edges
from reshard.types import Layout, Mesh
from reshard.types.meaning import meaning
from tests.layouts import random_pair


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


# ---- the closed form: every round is a bijection, and every share arrives once, from a holder of it ---


def turns(r: Refinement, rounds: EvenRounds) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(digit.radix) for digit, _ in rounds.shares)))


def held(layout: Layout, position: int) -> list[set[int]]:
    return [set(dim) for dim in meaning(layout, layout.mesh.devices[position])]


def sound(source: Layout, target: Layout) -> None:
    r = refine(source, target)
    assert r is not None
    for spread in (False, True):
        sound_rounds(source, target, r, EvenRounds(r, spread=spread))


def sound_rounds(source: Layout, target: Layout, r: Refinement, rounds: EvenRounds) -> None:
    size = source.mesh.size
    for turn in turns(r, rounds):
        assert sorted(rounds.sender(at, turn) for at in range(size)) == list(range(size))
        assert all(rounds.receiver(rounds.sender(at, turn), turn) == at for at in range(size))
    for receiver in range(size):
        needed = {tuple(index) for index in itertools.product(*map(sorted, held(target, receiver)))}
        for turn in turns(r, rounds):
            sender = held(source, rounds.sender(receiver, turn))
            share = {index for index in needed if all(i in dim for i, dim in zip(index, sender, strict=True))}
            assert len(share) == r.common
            needed -= share
        assert not needed
        shares = {tuple(rounds.share(receiver, turn)) for turn in turns(r, rounds)}
        assert shares == set(turns(r, rounds))


def test_random_even_pairs():
    choose, done = random.Random(5), 0
    while done < 60:
        source, target = random_pair(choose, most_rank=2)
        r = refine(source, target)
        if r is None or not r.exact or not r.common or source == target or r.pieces * r.common > 200:
            continue
        sound(source, target)
        done += 1


def test_a_device_sends_to_itself_first():
    """Shares are counted from the receiver's own: in round 0 of a transposition everybody keeps its share."""
    mesh = Mesh(x=3)
    r = refine(Layout.parse("f32[{x}2, 6]", mesh), Layout.parse("f32[6, {x}2]", mesh))
    assert r is not None
    rounds = EvenRounds(r)
    assert [[rounds.sender(at, (turn,)) for at in range(3)] for turn in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


@pytest.mark.parametrize(
    ("mesh", "source", "target", "quiet"),
    [
        (Mesh(x=3, y=3), "f32[{x}{y}2, 6]", "f32[{y}6, {x}2]", 3),  # all rounds
        (Mesh(x=4, y=8, z=8), "f32[{z}1, {y}{x}1, 32]", "f32[8, {z}4, {y}{x}1]", 32),
        (Mesh(x=2, y=6, z=6), "f32[{z}1, {y}{x}1, 12]", "f32[6, {z}2, {y}{x}1]", 12),
        (Mesh(x=8, y=4, z=4), "f32[{z}1, {y}{x}1, 32]", "f32[4, {z}8, {y}{x}1]", 16),  # of 32
        (Mesh(x=4, y=8, z=8), "f32[{x}{y}1, {z}1, 32]", "f32[{y}4, 8, {z}{x}1]", 16),
    ],
)
def test_devices_keep_shares_in_rounds_of_their_own(mesh: Mesh, source: str, target: str, quiet: int):
    """So that in as many rounds as can be some device does not send; else all that keep a share do so in round 0."""
    r = refine(Layout.parse(source, mesh), Layout.parse(target, mesh))
    assert r is not None
    rounds, first = EvenRounds(r, spread=True), EvenRounds(r)
    assert [sum(keeps(each, turn, mesh.size) for turn in turns(r, each)) for each in (rounds, first)] == [quiet, 1]


def keeps(rounds: EvenRounds, turn: tuple[int, ...], size: int) -> bool:
    return any(rounds.sender(at, turn) == at for at in range(size))
