"""Shares of two pieces of a dim, against the meaning of both layouts, element by element."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings

from reshard.geometry.overlap import (
    Run,
    ascending,
    fullest,
    piece,
    piece_sizes,
    shared_elements,
    shares,
    shares_from,
    shares_of,
)
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import MESHES, layouts, random_layout


def one_dim(choose: random.Random, size: int) -> Layout:
    return random_layout(choose, choose.choice(MESHES), [size])


def by_piece(layout: Layout, dim: int = 0) -> dict[int, tuple[int, ...]]:
    """Piece -> the global indices of its local ones, padding included."""
    tables: dict[int, tuple[int, ...]] = {}
    for device in layout.mesh.devices:
        number = piece(layout.dims[dim], layout.mesh, layout.mesh.position(device))
        assert tables.setdefault(number, meaning(layout, device)[dim]) == meaning(layout, device)[dim]
    return tables


@settings(max_examples=200)
@given(layouts())
def test_devices_with_one_piece_hold_the_same_and_pieces_are_numbered_in_a_row(layout: Layout):
    for at, dim in enumerate(layout.dims):
        tables = by_piece(layout, at)
        assert sorted(tables) == list(range(len(tables)))
        assert all(len(indices) == dim.tile for indices in tables.values())


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_the_common_elements_at_their_local_places(seed: int):
    choose = random.Random(seed)
    for size in (0, 1, 2, 3, 5, 7, 11, 12, 13, 24, 29, 60):
        for _ in range(12):
            source, target = one_dim(choose, size), one_dim(choose, size)
            before, after = by_piece(source), by_piece(target)
            common = shares(source.dims[0], target.dims[0])
            assert len(common) == len(after)
            assert [shares_of(source.dims[0], target.dims[0], q) for q in after] == [common[q] for q in after]
            for p in before:
                served = {q: runs[p] for q, runs in enumerate(common) if p in runs}
                assert shares_from(source.dims[0], target.dims[0], p) == served
            for q, wanted in after.items():
                received = []
                for p, runs in common[q].items():
                    assert runs, "a source piece without common elements"
                    for src, dst, length in ascending(runs):
                        assert before[p][src : src + length] == wanted[dst : dst + length]
                        received += range(dst, dst + length)
                # Each true element exactly once, and no padding.
                assert sorted(received) == [at for at, index in enumerate(wanted) if index < size]


@pytest.mark.parametrize("seed", range(3))
def test_runs_ascend_and_are_as_long_as_can_be(seed: int):
    choose = random.Random(seed)
    for _ in range(100):
        size = choose.randint(1, 40)
        for by_source in shares(one_dim(choose, size).dims[0], one_dim(choose, size).dims[0]):
            for runs in by_source.values():
                for run, following in pairwise(ascending(runs)):
                    assert run.src + run.length <= following.src or run.dst + run.length <= following.dst
                    assert (run.src + run.length, run.dst + run.length) != (following.src, following.dst)


@pytest.mark.parametrize("seed", range(3))
def test_long_dims_of_many_periods_against_their_meaning(seed: int):
    """Sizes of dozens of periods, primes among them, so that heads, periods and tails all occur; nested repeats too."""
    choose, repeats = random.Random(seed), 0
    for _ in range(25):
        size = choose.choice([211, 360, 420, 509, 720])
        source, target = one_dim(choose, size), one_dim(choose, size)
        before, after = by_piece(source), by_piece(target)
        for q, by_source in enumerate(shares(source.dims[0], target.dims[0])):
            received = []
            for p, runs in by_source.items():
                repeats += sum(len(each.repeats) for each in runs)
                for src, dst, length in ascending(runs):
                    assert before[p][src : src + length] == after[q][dst : dst + length]
                    received += range(dst, dst + length)
            assert sorted(received) == [at for at, index in enumerate(after[q]) if index < size]
    assert repeats > 100


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f64[{m}{{y}}{{x}}5/{n}]", "f64[{k}{{x}}4{{y}}/{n}]", Mesh(x=2, y=2)),  # periods of 20 and of 16
        ("f64[{b}{{x}}{{y}}1/{n}]", "f64[{{y}}{{x}}{b}/{n}]", Mesh(x=2, y=2)),  # cyclic against blocks: no period
        ("f64[2{{x}}{h}/{n}]", "f64[{b}{{y}}{{x}}/{n}]", Mesh(x=2, y=2)),  # two long rounds against cyclic
    ],
)
def test_a_long_array_has_no_more_progressions_than_a_short_one(source: str, target: str, mesh: Mesh):
    counts = []
    for n in (1_613, 1_024_021, 10**15 + 37):
        sizes = {"n": n, "m": -(-n // 20), "k": -(-n // 16), "b": -(-n // 4), "h": -(-n // 4)}
        (s,), (t,) = (Layout.parse(text.format(**sizes), mesh).dims for text in (source, target))
        counts.append(sum(len(runs) for by_source in shares(s, t) for runs in by_source.values()))
        assert sum(sum(by_source.values()) for by_source in shared_elements(s, t)) == n
    assert max(counts) <= 200


@settings(max_examples=200)
@given(layouts())
def test_the_sizes_of_pieces(layout: Layout):
    for at, dim in enumerate(layout.dims):
        held = [sum(index < dim.size for index in indices) for indices in by_piece(layout, at).values()]
        assert piece_sizes(dim) == Counter(held)
        assert fullest(dim) == max(held)


def test_the_sizes_of_a_million_pieces():
    mesh = Mesh(x=1_000_003, y=2)
    cyclic = Layout.parse("f32[3{x}{y}2/8000030]", mesh).dims[0]  # Two rounds of 4000012, and 6 elements.
    assert piece_sizes(cyclic) == {4: 2_000_003, 6: 3}
    assert piece_sizes(Layout.parse("f32[{x}1/1000000]", mesh).dims[0]) == {1: 1_000_000, 0: 3}


@pytest.mark.parametrize(
    ("source", "target", "mesh", "expected"),
    [
        (
            "f32[{x}3]",
            "f32[{y}2]",
            Mesh(x=2, y=3),
            [{0: [(0, 0, 2)]}, {0: [(2, 0, 1)], 1: [(0, 1, 1)]}, {1: [(1, 0, 2)]}],
        ),
        # Blocks of two dealt in two rounds, against halves: each half has one block of each device.
        ("f32[2{x}2]", "f32[{x}4]", Mesh(x=2), [{0: [(0, 0, 2)], 1: [(0, 2, 2)]}, {0: [(2, 0, 2)], 1: [(2, 2, 2)]}]),
        # Equal layouts: one run, though the numeral has two local digits.
        ("f32[3{x}2]", "f32[3{x}2]", Mesh(x=2), [{0: [(0, 0, 6)]}, {1: [(0, 0, 6)]}]),
        # Padding is in no run: device 3 has one element.
        ("f32[{x}3/10]", "f32[10]", Mesh(x=4), [{0: [(0, 0, 3)], 1: [(0, 3, 3)], 2: [(0, 6, 3)], 3: [(0, 9, 1)]}]),
        ("f32[0]", "f32[0]", Mesh(x=2), [{}]),
    ],
)
def test_by_hand(source: str, target: str, mesh: Mesh, expected: list[dict[int, list[tuple[int, int, int]]]]):
    (before,), (after,) = (Layout.parse(text, mesh).dims for text in (source, target))
    assert [{p: ascending(runs) for p, runs in by.items()} for by in shares(before, after)] == [
        {p: [Run(*run) for run in runs] for p, runs in by.items()} for by in expected
    ]


def test_a_piece_is_the_number_that_the_held_digits_write():
    mesh = Mesh(x=3, y=5, z=2)
    layout = Layout.parse("f32[2{z}{x}3, {y}7]", mesh)
    numbers: dict[int, set[int]] = defaultdict(set)
    for position in range(mesh.size):
        x, y, z = position // 10, position // 2 % 5, position % 2
        assert piece(layout.dims[0], mesh, position) == z * 3 + x
        assert piece(layout.dims[1], mesh, position) == y
        numbers[y].add(piece(layout.dims[0], mesh, position))
    assert all(pieces == set(range(6)) for pieces in numbers.values())
