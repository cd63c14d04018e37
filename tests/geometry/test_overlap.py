"""What two pieces of a dim share, against the meaning of both layouts, and the blocks that say it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.geometry import exchange_stats, overlap
from reshard.geometry.blocks import Axis, Block
from reshard.geometry.overlap import (
    append_block,
    fullest_piece,
    list_runs,
    piece_sizes,
    repeat_blocks,
    shared_elements,
    shares,
    shares_from,
    shares_of,
    shortest_shared,
)
from reshard.types.dims import number_piece
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import MESHES, layouts, random_layout
from tests.owners import Owned


class Run(NamedTuple):
    """Neighbouring elements, at a local index of one tile and of the other."""

    src: int
    dst: int
    length: int


def runs_of(blocks: Iterable[Block]) -> list[Run]:
    """The runs of some blocks, in the order of both tiles."""
    return [Run(run.src, run.dst, run.elements) for run in list_runs(blocks)]


def one_dim(choose: random.Random, size: int) -> Layout:
    """Most are numerals; some are in pieces of any size."""
    if choose.random() < 0.25:
        return Owned.random(choose, choose.choice(MESHES), (size,)).layout
    return random_layout(choose, choose.choice(MESHES), [size])


def by_piece(layout: Layout, dim: int = 0) -> dict[int, tuple[int, ...]]:
    """Piece -> the global indices of its local ones, padding included."""
    tables: dict[int, tuple[int, ...]] = {}
    for device in layout.mesh.devices:
        number = number_piece(layout.dims[dim], layout.mesh, layout.mesh.position(device))
        assert tables.setdefault(number, meaning(layout, device)[dim]) == meaning(layout, device)[dim]
    return tables


@settings(max_examples=120)
@given(layouts())
def test_devices_with_one_piece_hold_the_same_and_pieces_are_numbered_in_a_row(layout: Layout):
    for at, dim in enumerate(layout.dims):
        tables = by_piece(layout, at)
        assert sorted(tables) == list(range(len(tables)))
        assert all(len(indices) == dim.tile for indices in tables.values())


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_the_common_elements_at_their_local_places(seed: int):
    """The long sizes have dozens of periods, so that heads, periods and tails all occur; nested repeats too."""
    choose, repeats = random.Random(seed), 0
    for size in (0, 1, 2, 3, 5, 7, 11, 12, 13, 24, 29, 60, 211, 360, 509, 720):
        for _ in range(12 if size < 100 else 5):
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
                    repeats += sum(len(each.axes) - 1 for each in runs)
                    for src, dst, length in runs_of(runs):
                        assert before[p][src : src + length] == wanted[dst : dst + length]
                        received += range(dst, dst + length)
                # Each true element exactly once, and no padding.
                assert sorted(received) == [at for at, index in enumerate(wanted) if index < size]
    assert repeats > 100


@pytest.mark.parametrize("seed", range(3))
def test_runs_ascend_and_are_as_long_as_can_be(seed: int):
    choose = random.Random(seed)
    for _ in range(100):
        size = choose.randint(1, 40)
        for by_source in shares(one_dim(choose, size).dims[0], one_dim(choose, size).dims[0]):
            for runs in by_source.values():
                for run, following in pairwise(runs_of(runs)):
                    assert run.src + run.length <= following.src or run.dst + run.length <= following.dst
                    assert (run.src + run.length, run.dst + run.length) != (following.src, following.dst)


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        ("f64[{m}{{y}}{{x}}5/{n}]", "f64[{k}{{x}}4{{y}}/{n}]", Mesh(x=2, y=2)),  # periods of 20 and of 16
        ("f64[{b}{{x}}{{y}}1/{n}]", "f64[{{y}}{{x}}{b}/{n}]", Mesh(x=2, y=2)),  # cyclic against blocks: no period
        ("f64[2{{x}}{h}/{n}]", "f64[{b}{{y}}{{x}}/{n}]", Mesh(x=2, y=2)),  # two long rounds against cyclic
    ],
)
def test_a_long_array_has_no_more_blocks_than_a_short_one(source: str, target: str, mesh: Mesh):
    counts = []
    for n in (1_613, 1_024_021, 10**15 + 37):
        sizes = {"n": n, "m": -(-n // 20), "k": -(-n // 16), "b": -(-n // 4), "h": -(-n // 4)}
        (s,), (t,) = (Layout.parse(text.format(**sizes), mesh).dims for text in (source, target))
        counts.append(sum(len(runs) for by_source in shares(s, t) for runs in by_source.values()))
        assert sum(sum(by_source.values()) for by_source in shared_elements(s, t)) == n
    assert max(counts) <= 200


@settings(max_examples=120)
@given(layouts())
def test_the_sizes_of_pieces(layout: Layout):
    for at, dim in enumerate(layout.dims):
        held = [sum(index < dim.size for index in indices) for indices in by_piece(layout, at).values()]
        assert piece_sizes(dim) == Counter(held)
        assert fullest_piece(dim) == max(held)


# ---- counted, and the shortest -----------------------------------------------------------------------


def owners(layout: Layout) -> dict[int, int]:
    """Global index -> the number of the piece that has it."""
    at = {d: number_piece(layout.dims[0], layout.mesh, layout.mesh.position(d)) for d in layout.mesh.devices}
    return {index: at[d] for d in layout.mesh.devices for index in meaning(layout, d)[0]}


def assert_shared(source: Layout, target: Layout) -> None:
    before, after = owners(source), owners(target)
    expected = Counter((after[index], before[index]) for index in range(source.shape[0]))
    counts = shared_elements(source.dims[0], target.dims[0])
    assert {(q, p): n for q, by in enumerate(counts) for p, n in by.items()} == expected, f"{source} -> {target}"


@pytest.mark.parametrize("faster", [0, 1 << 40], ids=["counted", "walked"])
def test_both_ways_to_count_against_the_meaning(faster: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "_FASTER", faster)
    choose = random.Random(3)
    shared_elements.cache_clear()
    for size in (0, 1, 2, 3, 5, 7, 12, 13, 24, 29, 60, 97, 211):
        for _ in range(12):
            assert_shared(*(random_layout(choose, choose.choice(MESHES), [size]) for _ in range(2)))
    shared_elements.cache_clear()


def test_tables_against_the_meaning_and_against_their_runs(monkeypatch: pytest.MonkeyPatch):
    """Through numpy, in windows of a few runs, and with keys that are sorted; the figures as they are without it."""
    choose = random.Random(31)
    for number in range(300):
        mesh = rs.Mesh(x=3, y=2)
        source, target = (Owned.random(choose, mesh, (choose.choice([0, 1, 7, 40]),)).layout for _ in range(2))
        if source.shape != target.shape:
            continue
        figures: list[object] = []
        for long, window in (1 << 60, 1), (1, choose.choice([1, 3, 100])):
            monkeypatch.setattr("reshard.types.pieces._LONG", long)
            monkeypatch.setattr(overlap, "_WINDOW", window)
            for cache in overlap.tally_meetings, overlap._count_meetings, exchange_stats._group_stats:
                cache.cache_clear()
            exchange_stats._closed_stats.cache_clear()
            assert_shared(source, target)
            figures.append([exchange_stats._group_stats(group) for group in exchange_stats.dim_groups(source, target)])
        assert figures[0] == figures[1], f"{number}: {source} -> {target}"


def shortest_listed(source: Layout, target: Layout) -> int:
    every = shares(source.dims[0], target.dims[0])
    return min((run.length for by in every for runs in by.values() for run in runs_of(runs)), default=1)


@pytest.mark.parametrize("seed", range(3))
def test_the_shortest_shared_run_of_random_pairs(seed: int):
    choose = random.Random(seed)
    for _ in range(300):
        size = choose.randint(0, 90)
        pair = [random_layout(choose, choose.choice(MESHES), [size]) for _ in range(2)]
        assert shortest_shared(*(layout.dims[0] for layout in pair)) == shortest_listed(*pair), pair


# ---- runs that repeat -------------------------------------------------------------------------------


Gaps = list[tuple[int, int, int]]
"""(gap before in the source, gap before in the target, length) of ascending runs."""

gaps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4)
extras = st.tuples(st.integers(0, 2), st.integers(0, 2))


def listed(of: Gaps) -> list[Run]:
    """The runs that these gaps leave."""
    runs, src, dst = [], 0, 0
    for before, behind, length in of:
        src, dst = src + before, dst + behind
        runs.append(Run(src, dst, length))
        src, dst = src + length, dst + length
    return runs


def merged(runs: list[Run]) -> list[Run]:
    """Ascending runs, each merged with the one before if it continues that in both tiles."""
    kept: list[Run] = []
    for run in runs:
        if kept and (kept[-1].src + kept[-1].length, kept[-1].dst + kept[-1].length) == (run.src, run.dst):
            run = Run(kept[-1].src, kept[-1].dst, kept.pop().length + run.length)
        kept.append(run)
    return kept


def appended(runs: list[Run]) -> list[Block]:
    one: list[Block] = []
    for run in runs:
        append_block(one, straight(*run))
    return one


def straight(src: int, dst: int, length: int, *repeats: Axis) -> Block:
    return Block(src, dst, (*repeats, Axis(length, 1, 1)))


def copies(runs: list[Run], repeat: Axis) -> list[Run]:
    return [
        Run(run.src + n * repeat.src, run.dst + n * repeat.dst, run.length)
        for n in range(repeat.extent)
        for run in runs
    ]


@settings(max_examples=150)
@given(gaps, st.integers(1, 4), extras, st.integers(1, 3), extras)
def test_repeats_of_repeats_are_the_runs_merged_one_by_one(
    of: Gaps, inner: int, inner_extra: tuple[int, int], outer: int, outer_extra: tuple[int, int]
):
    runs = listed(of)
    many = appended(runs)
    assert runs_of(many) == merged(runs)
    for count, extra in ((inner, inner_extra), (outer, outer_extra)):
        end = runs[-1]
        repeat = Axis(count, end.src + end.length + extra[0], end.dst + end.length + extra[1])
        many, runs = repeat_blocks(many, repeat) if count > 1 else many, copies(runs, repeat)
        assert runs_of(many) == merged(runs)
    # What follows continues the last run, and repeats, too.
    end = runs[-1]
    more = straight(end.src + end.length, end.dst + end.length, 1, Axis(3, 4, 5))
    append_block(many, more)
    assert runs_of(many) == merged([*runs, *runs_of([more])])


def test_equal_distances_make_one_block():
    once = repeat_blocks([straight(0, 0, 2)], Axis(3, 5, 7))
    assert once == [straight(0, 0, 2, Axis(3, 5, 7))]
    assert repeat_blocks(once, Axis(4, 15, 21)) == [straight(0, 0, 2, Axis(12, 5, 7))]
    assert repeat_blocks([straight(3, 1, 5)], Axis(1000, 5, 5)) == [straight(3, 1, 5000)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("by_digits", [None, "source", "target"])
def test_what_a_piece_of_very_many_runs_shares(seed: int, by_digits: str | None):
    """By numpy: every index of the piece, in order, at its place on both sides, in runs that cannot be longer."""
    choose = np.random.default_rng(seed)
    size, count = int(choose.integers(3_000, 6_000)), int(choose.integers(2, 6))
    run = int(choose.integers(1, 4))
    owners = [np.repeat(choose.integers(0, count, size), choose.integers(1, run + 1, size))[:size] for _ in range(2)]
    dims = [Layout.from_owners(owner, Mesh(x=count), (size,), "f32").dims[0] for owner in owners]
    if by_digits is not None:
        at = by_digits == "target"
        dims[at] = Layout.parse(f"f32[{-(-size // (2 * count))}{{x}}2/{size}]", Mesh(x=count)).dims[0]
        owners[at] = np.arange(size) // 2 % count
    places = []
    for owner in owners:
        local = np.empty(size, np.int64)
        for peer in range(count):
            local[owner == peer] = np.arange(np.count_nonzero(owner == peer))
        places.append(local)
    for number in range(count):
        for gives, shared in ((False, shares_of), (True, shares_from)):
            found = shared(*dims, number)
            mine, other = owners if gives else owners[::-1]
            assert set(found) == set(other[mine == number].tolist())
            for peer, blocks in found.items():
                both = np.flatnonzero((mine == number) & (other == peer))
                listed = [(np.arange(b.elements) + b.src, np.arange(b.elements) + b.dst) for b in blocks]
                assert all(len(block.axes) == 1 for block in blocks)
                for column, place in zip(
                    (np.concatenate(each) for each in zip(*listed, strict=True)), places, strict=True
                ):
                    assert np.array_equal(column, place[both])
                ends = [(b.src + b.elements, b.dst + b.elements) for b in blocks[:-1]]
                assert all(end != block[:2] for end, block in zip(ends, blocks[1:], strict=True))
