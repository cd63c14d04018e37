"""A slice of `benchmarks/fuzz.py`, and what it reports where the package is broken on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard as rs
from benchmarks import fuzz, fuzz_layouts, fuzz_moves
from reshard.errors import UndecidedError
from reshard.types import Layout


@pytest.mark.parametrize(
    ("seed", "moves"),
    [
        pytest.param(11, 200, marks=pytest.mark.slow),
        *(pytest.param(seed, 5000, marks=pytest.mark.sweep) for seed in range(20, 25)),
    ],
)
def test_random_moves_are_right(seed: int, moves: int) -> None:
    wrong = [kind for _, kind in fuzz.fuzz(seed, moves=moves) if kind.startswith("wrong")]
    assert not wrong, "\n".join(wrong)


def test_a_move_is_the_same_whatever_comes_before_it() -> None:
    kinds = dict(fuzz.fuzz(5, moves=12))
    assert dict(fuzz.fuzz(5, start=8, moves=4)) == {number: kinds[number] for number in range(8, 12)}
    assert str(fuzz.case(random.Random("5/9"))) == str(fuzz.case(random.Random("5/9")))


def _launch_again(plan: Any, tiles: Any, account: Any, **options: Any) -> Any:
    """A runtime that needs one more launch than the plan has."""
    moved = _simulate(plan, tiles, account, **options)
    account.launches += 1
    return moved


def _forget_view(view: Any, source: np.ndarray, held: np.ndarray) -> np.ndarray:
    """A meaning of views that leaves out the part and the order."""
    return np.resize(source, held.shape)


@pytest.mark.parametrize(
    ("kind", "place", "broken", "message"),
    [
        ("moves", (fuzz_moves.RandomView, "apply"), _forget_view, "has"),
        ("trees", (fuzz_moves.RandomView, "apply"), _forget_view, "has"),
        ("moves", (rs, "simulate"), _launch_again, "promised"),
        ("trees", (rs, "simulate"), _launch_again, "promised"),
    ],
)
def test_a_broken_move_or_tree_is_reported(kind: str, place: Any, broken: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(*place, broken)
    wrong = [text for _, text in fuzz.fuzz(4, moves=20, kinds=[kind]) if text.startswith("wrong")]
    assert wrong and any(message in text for text in wrong), wrong


def _swapped(program: Any, tiles: Any, memory: Any = None) -> Any:
    """A runtime that gives the first two devices each other's result."""
    moved = _run(program, tiles, memory)
    first, second, *_ = [*moved, *moved]
    return {**moved, first: moved[second], second: moved[first]}


def _greedy(program: Any, tiles: Any, memory: Any = None) -> Any:
    """A runtime that has one more tile live than it says."""
    moved = _run(program, tiles, memory)
    if memory is not None:
        memory.take(program.devices[0], memory.peak_bytes)
    return moved


def _detour(source: Layout, target: Layout, **options: Any) -> Any:
    """A planner that gathers everything first."""
    from reshard.plans.plan import StepSpec, chain

    whole = Layout.tiled(source.mesh, source.shape, source.dtype, [[] for _ in source.shape])
    if source.partial or target.partial or options:
        return _plan(source, target, **options)
    return chain(source, target, [StepSpec("exchange", whole), StepSpec("exchange", target)])


def _spread(layout: Layout, device: int) -> Any:
    return tuple(tuple(at + 1 for at in along) for along in _meaning(layout, device))


def _proved(plan: Any, program: Any = None) -> Any:
    """A prover that has no objection."""


def _undecided(plan: Any, program: Any = None) -> Any:
    raise UndecidedError("too hard")


def _read(text: str, mesh: Any) -> Layout:
    if text.count("[") != 1:
        raise KeyError(text)
    return _parse(text, mesh)


_run, _plan, _meaning, _parse = fuzz.run, rs.plan, fuzz.meaning, Layout.parse
_simulate = rs.simulate


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("place", "broken", "message"),
    [
        ((fuzz, "run"), _swapped, "has"),
        ((fuzz, "run"), _greedy, "B are live"),
        ((fuzz, "meaning"), _spread, "means"),
        ((fuzz, "needed"), lambda source, target: 0, "the bound is 0 B"),
        ((fuzz, "wire"), lambda program: {0: 1}, "listed {0: 1}"),
        ((rs, "plan"), _detour, "would do"),
        ((rs, "prove"), _proved, "a wrong program is proved"),
        ((rs, "prove"), _undecided, "too hard"),
        ((Layout, "parse"), staticmethod(_read), "KeyError"),
    ],
)
def test_what_is_broken_is_reported(place: tuple[Any, str], broken: Callable[..., Any], message: str, monkeypatch: Any):
    monkeypatch.setitem(fuzz.RATES, "proof", 0.5 if place[1] == "prove" else 0.0)
    monkeypatch.setattr(*place, broken)
    wrong = [kind for _, kind in fuzz.fuzz(2, moves=60, kinds=["layouts"]) if kind.startswith("wrong")]
    assert wrong
    assert any(message in kind for kind in wrong), wrong[0]


def test_the_definitions_of_the_notations() -> None:
    """Layouts whose meaning is worked out by hand."""
    choose = random.Random(0)
    by_number: dict[str, Any] = {}
    for _ in range(300):
        given = fuzz_layouts.by_scalapack(choose, 2, (5, 3), "int32")
        by_number[given.text] = given
    desc = next(g for text, g in by_number.items() if ", 5, 3, 2, " in text and ", 0, 0, 1048576], (2, 1)" in text)
    assert desc.indices[0][0].tolist() == [0, 1, 4, -1] and desc.indices[1][0].tolist() == [2, 3, -1, -1]
    grid = fuzz_layouts.Grid({"x": 4, "y": 2}, tuple(range(8)))
    assert [grid.coordinate(5, fuzz_layouts.Factor("x", 2, 2)), grid.coordinate(5, fuzz_layouts.Factor("x", 1, 2))] == [
        0,
        1,
    ]
    digits: fuzz_layouts.Digits = [(2, None), (2, fuzz_layouts.Factor("x", 2, 2)), (2, None)]
    index = fuzz_layouts.indices_of(digits, 7, lambda factor: 1)
    assert np.array_equal(index, [2, 3, 6, -1])
