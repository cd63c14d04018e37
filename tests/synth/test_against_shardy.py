"""On every pair that Shardy's own pass can do: never more bytes than it, never more launches for the same
bytes, and on every network preset never more predicted seconds than its steps. `benchmarks/against_shardy.py`
prints the same comparison of many more pairs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("jax.extend.mlir", reason="the peer planner runs inside jaxlib; install jax")

from benchmarks.against_shardy import MESHES, RANKS, Data, compared, explained, failures, named, scaled, summed
from reshard.plans.plan import StepSpec, chain
from reshard.synth.network import PRESETS
from reshard.types.layout import Layout
from tests.layouts import sample_pairs

KINDS = ("one fabric", "slow outer axis", "sums")
FAST = ("3x5",)
"""The meshes of the fast tier."""

MEASURES = ("refused", "more bytes", "more launches", "more seconds")
LARGE = 64
"""Times the dims of the large arrays are those of the small ones: seconds there are bytes, not messages."""


def data(sizes: str, kind: str) -> tuple[Data, ...]:
    """Small and large arrays of every rank: plain moves, moves with a slow outer axis, or sums to finish."""
    mesh = named(sizes, slow=kind == "slow outer axis")
    comparisons: list[Data] = []
    for rank in RANKS:
        small, large = sample_pairs(mesh, rank, 12, seed=rank), sample_pairs(mesh, rank, 6, seed=10 + rank)
        if kind == "sums":
            small, large = summed(small), summed(large)
        comparisons.append(compared(mesh, [*small, *scaled(large, LARGE)]))
    return tuple(comparisons)


def worse(measure: str, *data: Data) -> str:
    """The pairs on which we are worse in this, with both plans; empty if there are none."""
    worse_pairs = [explained(m, preset, c) for d in data for m, preset, c in failures(d) if m == measure]
    return "\n".join([f"{len(worse_pairs)} pairs have {measure}:", *worse_pairs[:5]]) if worse_pairs else ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in MESHES])
def test_never_worse(sizes: str, kind: str) -> None:
    """Our rules derive all its steps, and our plans are in no measure worse."""
    comparisons = data(sizes, kind)
    assert all(d.pairs and d.presets for d in comparisons)
    assert [text for measure in MEASURES if (text := worse(measure, *comparisons))] == []


def test_a_worse_plan_is_seen() -> None:
    """The comparison itself: gathers one by one for one gather, and all of an array for a slice of it."""
    mesh = named("2x4")
    held, whole, half = (Layout.parse(text, mesh) for text in ("f32[{x}{y}2]", "f32[16]", "f32[{x}8]"))
    (once,) = compared(mesh, [(held, whole)]).pairs
    staged = chain(held, whole, [StepSpec("all_gather", half), StepSpec("all_gather", whole)])
    assert not list(failures(Data(mesh, 1, (once,))))
    assert worse("more launches", Data(mesh, 1, (replace(once, ours=staged),)))
    wasted = chain(held, whole, [StepSpec("permute", Layout.parse("f32[{y}{x}2]", mesh)), StepSpec("exchange", whole)])
    assert worse("more bytes", Data(mesh, 1, (replace(once, ours=wasted),)))
    slow = {preset: (replace(ours, seconds=theirs * 1.001), theirs) for preset, (ours, theirs) in once.timed.items()}
    assert len(list(failures(Data(mesh, 1, (replace(once, timed=slow),))))) == len(PRESETS)
    assert worse("refused", Data(mesh, 1, (replace(once, theirs=None, refusal="no such step", timed={}),)))
