"""Searches of a fixed length, on pairs whose plans are known, and what a search learns."""

from __future__ import annotations

import itertools

import pytest

from reshard.plans.plan import Plan
from reshard.proofs.launches import Chosen, Goal, Search, Space, space_of
from reshard.types import Layout, Mesh
from tests.proofs.launches.small import FOUR, SIX

z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")

ENOUGH = 10_000


def searched(
    source: str,
    target: str,
    mesh: Mesh,
    length: int,
    *,
    received: int = ENOUGH,
    live: int = ENOUGH,
    launches: int = ENOUGH,
    donate: bool = False,
) -> tuple[Space, Search]:
    ends = [Layout.parse(text, mesh) for text in (source, target)]
    space = space_of(Plan(ends[0], ends[0], ()))
    return space, Search(space, Goal(*map(space.state, ends), received, live, launches, donate), length)


def kinds(choices: list[Chosen]) -> list[str]:
    return [chosen.kind for chosen in choices]


def test_a_gather_is_found_at_its_price_and_not_below():
    """Of a tile of 4 on 3 devices, 8 elements are received; live are the tile of 4 and the result of 12."""
    pair = "f32[{y}4]", "f32[12]", SIX
    space, search = searched(*pair, 1, received=8, live=16, launches=1)
    choices = search.find(60)
    assert len(choices) == 1 and kinds(choices)[0] in ("all_gather", "exchange")
    assert space.layout(choices[-1].after) == Layout.parse("f32[12]", SIX)
    for less in ({"received": 7}, {"live": 15}, {"launches": 0}):
        assert searched(*pair, 1, **{"received": 8, "live": 16, "launches": 1} | less)[1].find(60) is None


def test_a_slice_needs_no_launch():
    _, search = searched("f32[12]", "f32[{x}{y}2]", SIX, 0, received=0, launches=0)
    assert kinds(search.find(60)) == ["slice"]


def test_a_chain_is_joined():
    """Each step starts from the layout in which the one before it ends."""
    space, search = searched("f32[{x}{y}, 6]", "f32[6, {x}{y}]", SIX, 2)
    choices = search.find(60)
    assert choices[0].before == space.state(Layout.parse("f32[{x}{y}, 6]", SIX))
    assert choices[-1].after == space.state(Layout.parse("f32[6, {x}{y}]", SIX))
    assert all(one.after == other.before for one, other in itertools.pairwise(choices))


def test_a_kept_source_counts_from_the_second_step_on():
    """16 elements of 4 summands: a reduce_scatter has 16 + 4 live, then an all_gather 4 + 16, and a kept source 16."""
    pair = "f32[4, 4] + sum{x}{y}", "f32[4, 4]", FOUR
    _, donated = searched(*pair, 2, live=20, launches=2, donate=True)
    assert [(chosen.kind, chosen.retained) for chosen in donated.find(60)] == [
        ("reduce_scatter", False),
        ("all_gather", False),
    ]
    assert searched(*pair, 2, live=19, launches=2, donate=True)[1].find(60) is None
    assert kinds(searched(*pair, 2, live=32, launches=2)[1].find(60)) == ["all_reduce"]
    assert searched(*pair, 2, live=31, launches=2)[1].find(60) is None
    for live in (35, 36):
        _, search = searched(*pair, 2, live=live, launches=2)
        while (choices := search.find(60)) is not None and "all_reduce" in kinds(choices):
            search.learn(next(chosen for chosen in choices if chosen.kind == "all_reduce"), None)
        assert (choices is not None) == (live == 36)
    assert [(chosen.kind, chosen.retained) for chosen in choices] == [("reduce_scatter", False), ("all_gather", True)]


def test_what_is_learnt_excludes_a_step_everywhere():
    """Learning that each step that is found cannot be done leaves nothing in the end."""
    _, search = searched("f32[{x}2, 4]", "f32[4, {x}2]", FOUR, 1, launches=1)
    seen = set()
    while (choices := search.find(60)) is not None:
        step = next(chosen for chosen in choices if chosen.kind != "slice")
        key = (step.kind, step.before, step.after, step.retained)
        assert key not in seen
        seen.add(key)
        search.learn(step, None)
    assert {"all_to_all", "exchange"} <= {kind for kind, *_ in seen}


def test_a_learnt_price_counts():
    """A gather that costs 9 is not found again within 8; one that costs 8 is."""
    pair = "f32[{y}4]", "f32[12]", SIX
    for price, remains in ((8, True), (9, False)):
        _, search = searched(*pair, 1, received=8, launches=1)
        while (choices := search.find(60)) is not None:
            gather = next((chosen for chosen in choices if chosen.kind == "all_gather"), None)
            if gather is not None:
                search.learn(gather, (price, 1))
                if price == 8:
                    break
            else:
                search.learn(choices[-1], None)
        assert (choices is not None) == remains


def test_what_is_learnt_beside_a_kept_source_holds_only_there():
    """An all_reduce that cannot be done as a later step can still be done as the first."""
    source, target = "f32[4, 4] + sum{x}{y}", "f32[4, 4]"
    space, search = searched(source, target, FOUR, 2, live=32, launches=2)
    ends = [space.state(Layout.parse(text, FOUR)) for text in (source, target)]
    search.learn(Chosen(1, "all_reduce", *ends, retained=True), None)
    assert kinds(search.find(60)) == ["all_reduce"]
    search.learn(Chosen(1, "all_reduce", *ends, retained=False), None)
    assert search.find(60) is None


def test_time_runs_out():
    _, search = searched("f32[{x}{y}, 6]", "f32[6, {x}{y}]", SIX, 4)
    search.solver.set("rlimit", 1)
    with pytest.raises(TimeoutError):
        search.find(60)
