"""Progressions: appending, repeating and listing runs, against runs that are merged one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.geometry.overlap import Progression, Repeat, Run, append, ascending, repeated

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


def progressions(runs: list[Run]) -> list[Progression]:
    one: list[Progression] = []
    for run in runs:
        append(one, Progression(*run))
    return one


def copies(runs: list[Run], repeat: Repeat) -> list[Run]:
    return [
        Run(run.src + n * repeat.src, run.dst + n * repeat.dst, run.length) for n in range(repeat.times) for run in runs
    ]


@settings(max_examples=300)
@given(gaps, st.integers(1, 4), extras, st.integers(1, 3), extras)
def test_repeats_of_repeats_are_the_runs_merged_one_by_one(
    of: Gaps, inner: int, inner_extra: tuple[int, int], outer: int, outer_extra: tuple[int, int]
):
    runs = listed(of)
    many = progressions(runs)
    assert ascending(many) == merged(runs)
    for count, extra in ((inner, inner_extra), (outer, outer_extra)):
        end = runs[-1]
        repeat = Repeat(count, end.src + end.length + extra[0], end.dst + end.length + extra[1])
        many, runs = repeated(many, repeat) if count > 1 else many, copies(runs, repeat)
        assert ascending(many) == merged(runs)
    # What follows continues the last run, and repeats, too.
    end = runs[-1]
    more = Progression(end.src + end.length, end.dst + end.length, 1, (Repeat(3, 4, 5),))
    append(many, more)
    assert ascending(many) == merged([*runs, *more.runs])


def test_equal_distances_make_one_progression():
    once = repeated([Progression(0, 0, 2)], Repeat(3, 5, 7))
    assert once == [Progression(0, 0, 2, (Repeat(3, 5, 7),))]
    assert repeated(once, Repeat(4, 15, 21)) == [Progression(0, 0, 2, (Repeat(12, 5, 7),))]
    assert repeated([Progression(3, 1, 5)], Repeat(1000, 5, 5)) == [Progression(3, 1, 5000)]
    assert Progression(0, 0, 2, (Repeat(12, 5, 7),)).elements == 24
    assert Progression(0, 0, 2, (Repeat(12, 5, 7),)).times == 12
