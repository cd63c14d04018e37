"""On every pair that Shardy's own pass can do: never more bytes than it, never more launches for the same
bytes, and on every network preset never more predicted seconds than its steps. `benchmarks/against_shardy.py`
prints the same comparison of many more pairs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

pytest.importorskip("jax.extend.mlir", reason="the peer planner runs inside jaxlib; install jax")

from benchmarks.against_shardy import MESHES, RANKS, Data, compared, explained, failures, named, scaled, summed
from reshard.synth.network import PRESETS
from reshard.types.layout import Layout
from reshard.types.plan import Move, chain
from tests.layouts import sample_pairs

LARGE = 64
"""Times the dims of the large arrays are those of the small ones: seconds there are bytes, not messages."""


@lru_cache
def data(sizes: str, slow: bool = False) -> tuple[Data, ...]:
    """Small and large arrays, and sums to finish, of every rank; with `slow` on an axis named dcn."""
    mesh = named(sizes, slow)
    found: list[Data] = []
    for rank in RANKS:
        small, large = sample_pairs(mesh, rank, 40, seed=rank), sample_pairs(mesh, rank, 20, seed=10 + rank)
        found.append(
            compared(mesh, [*small, *scaled(large, LARGE), *summed(large), *scaled(summed(small[:20]), LARGE)])
        )
    return tuple(found)


def worse(measure: str, *data: Data) -> str:
    """The pairs on which we are worse in this, with both plans; empty if there are none."""
    found = [explained(m, preset, c) for d in data for m, preset, c in failures(d) if m == measure]
    return "\n".join([f"{len(found)} pairs have {measure}:", *found[:5]]) if found else ""


@pytest.mark.parametrize("sizes", MESHES)
def test_our_rules_derive_every_step_of_shardy(sizes: str) -> None:
    assert all(d.pairs for d in data(sizes))
    assert not worse("refused", *data(sizes))


@pytest.mark.parametrize("sizes", MESHES)
def test_never_more_bytes(sizes: str) -> None:
    assert not worse("more bytes", *data(sizes))


@pytest.mark.parametrize("sizes", MESHES)
def test_never_more_launches_for_the_same_bytes(sizes: str) -> None:
    assert not worse("more launches", *data(sizes))


@pytest.mark.parametrize("slow", [False, True], ids=["one fabric", "slow outer axis"])
@pytest.mark.parametrize("sizes", MESHES)
def test_never_more_seconds_on_any_preset(sizes: str, slow: bool) -> None:
    assert all(d.presets for d in data(sizes, slow))
    assert not worse("more seconds", *data(sizes, slow))


def test_a_worse_plan_is_seen() -> None:
    """The comparison itself: gathers one by one for one gather, and all of an array for a slice of it."""
    mesh = named("2x4")
    held, whole, half = (Layout.parse(text, mesh) for text in ("f32[{x}{y}2]", "f32[16]", "f32[{x}8]"))
    (once,) = compared(mesh, [(held, whole)]).pairs
    staged = chain(held, whole, [Move("all_gather", half), Move("all_gather", whole)])
    assert not list(failures(Data(mesh, 1, (once,))))
    assert worse("more launches", Data(mesh, 1, (replace(once, ours=staged),)))
    wasted = chain(held, whole, [Move("permute", Layout.parse("f32[{y}{x}2]", mesh)), Move("exchange", whole)])
    assert worse("more bytes", Data(mesh, 1, (replace(once, ours=wasted),)))
    slow = {preset: (replace(ours, seconds=theirs * 1.001), theirs) for preset, (ours, theirs) in once.timed.items()}
    assert len(list(failures(Data(mesh, 1, (replace(once, timed=slow),))))) == len(PRESETS)
    assert worse("refused", Data(mesh, 1, (replace(once, theirs=None, refusal="no such step", timed={}),)))
