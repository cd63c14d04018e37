"""The splits that take the least time within a budget: bounds first, then a linear program of what they leave.

    bounds     what every choice takes at least, and how much more with each split (`label_bounds`)
    program    among the splits that add little, the best choice is a mixed-integer program's
    again      with more splits, until what the others add is more than the best choice exceeds the bound by

A choice with any split that was left out takes at least the bound and what that split adds. So the best choice of the
program, or that sum, whichever is less, is a bound on every choice.

Memory enters where a solution exceeds the budget, position by position: most positions of most programs never bind. A
solution of a relaxation that keeps to the budget everywhere is the best of all. Where rows bind, the program without
whole variables says what a byte is worth at each position; with these prices the bounds know of the budget, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reshard.errors import BudgetError, PlanError
from reshard.synth.choice.assess import assess_splits, is_made_early, list_moves, measure_memory
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.flows import restrict_splits, tabulate_problem
from reshard.synth.choice.label_bounds import LabelBounds
from reshard.synth.choice.layout_model import LayoutModel, MemoryRow, scale_seconds
from reshard.synth.choice.linear_program import Solution
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Problem
from reshard.types.units import bytes_text

ROWS_AT_ONCE = 8
"""So many positions are added after a solution that exceeds the budget, the worst ones."""

WIDTHS = (0.002, 0.02, 0.1, 0.4, 1.5, np.inf)
"""By which part of the bound splits may exceed it to be among those of the program, at first and then."""


def choose_splits(
    problem: Problem,
    prices: MovePrices,
    speed: DeviceSpeed,
    budget: int | None = None,
    extra_bytes: int = 0,
    time_limit: float = 60.0,
    gap: float = 1e-3,
) -> Assignment:
    """The assignment that takes the fewest seconds, within a relative `gap`, and holds at most `budget` bytes.

    A device holds `extra_bytes` beside what the problem knows of. After `time_limit` seconds the best assignment so far
    is returned; its `gap` says how far from the best one it can be.
    Raises `BudgetError` if no assignment meets the budget, and `PlanError` if none was found in time.
    """
    search = _SplitSearch(problem, prices, speed, gap, time_limit)
    most = None if budget is None else max(0, budget - extra_bytes)
    chosen = search.find_fastest(most)
    if chosen is None and search.impossible:
        smallest = search.find_smallest().peak_bytes + extra_bytes
        raise BudgetError(
            f"no choice of layouts keeps to {bytes_text(budget or 0)} on each device; give {bytes_text(smallest)}, the "
            f"least that any choice holds, or more",
            smallest,
        )
    if chosen is None:
        raise PlanError("no choice of layouts was found in time: give a longer time_limit or a larger budget")
    return chosen


def smallest_budget(
    problem: Problem, prices: MovePrices, speed: DeviceSpeed, time_limit: float = 60.0, gap: float = 1e-3
) -> Assignment:
    """The assignment that holds the fewest bytes at its peak, within a relative `gap`, however long it takes."""
    return _SplitSearch(problem, prices, speed, gap, time_limit).find_smallest()


class _SplitSearch:
    def __init__(self, problem: Problem, prices: MovePrices, speed: DeviceSpeed, gap: float, time_limit: float) -> None:
        self.problem, self.prices, self.speed, self.gap = problem, prices, speed, gap
        self.until = time.monotonic() + time_limit
        self.tables = tabulate_problem(problem, prices, speed)
        self.scale = scale_seconds(self.tables)
        self.rows: dict[MemoryRow, float] = {}
        self.impossible = False
        """Whether it was shown that no assignment meets the budget."""

    def find_fastest(self, budget: int | None) -> Assignment | None:
        bounds = LabelBounds(self.problem, self.tables, self.scale)
        least = self._raise_bound(bounds)
        best: Assignment | None = None
        lower = -np.inf
        for width in WIDTHS:
            # Typical choices cost about a thousand; where the bound is nothing, so is every part of it.
            reach = least + width * max(least, 1.0)
            kept = [np.flatnonzero(excess <= reach - least + 1e-9) for excess in bounds.excess]
            everything = all(len(k) == len(e) for k, e in zip(kept, bounds.excess, strict=True))
            found, chosen = self._solve(kept, budget)
            reach = np.inf if everything else reach
            if found.impossible:
                self.impossible = everything
                lower = max(lower, reach)
            else:
                lower = max(lower, min(found.bound, reach))
            if chosen is not None and (best is None or chosen.seconds < best.seconds):
                best = chosen
            bound = max(lower, least) / self.scale
            # Sums of the bound and of the choice differ in the last places.
            if best is not None and best.seconds <= bound * (1 + self.gap) + 1e-12 * best.seconds:
                return replace(best, bound_seconds=min(bound, best.seconds))
            if everything or time.monotonic() > self.until:
                break
        return None if best is None else replace(best, bound_seconds=min(max(lower, least) / self.scale, best.seconds))

    def _raise_bound(self, bounds: LabelBounds) -> float:
        """Passes costs on until the bound rises no more; returns what it was before the last pass, which `excess` adds
        to."""
        before = stalled = 0.0
        for _ in range(400):
            bounds.pass_costs(backward=False)
            least = bounds.bound()
            bounds.pass_costs(backward=True)
            # The sum of what groups and pairs cost rises in fits and starts, so that a few idle passes are allowed.
            stalled = stalled + 1 if least < before + 1e-6 * abs(before) else 0
            before = max(before, least)
            if stalled > 12 or time.monotonic() > self.until:
                return least
            bounds.share_prices()
        return bounds.bound()

    def _solve(self, kept: Sequence[np.ndarray], budget: int | None) -> tuple[Solution, Assignment | None]:
        """The best choice among some splits, with rows for memory added until it keeps to the budget."""
        tables = restrict_splits(self.tables, kept)
        while True:
            model = LayoutModel(
                self.problem,
                tables,
                self.rows if budget is not None else {},
                budget,
                self.scale,
                _round_unit(budget or 1),
            )
            found = model.program.solve(self.gap / 2, self.until - time.monotonic())
            if found.values is None:
                return found, None
            splits, anew = model.read_splits(found.values)
            chosen = assess_splits(self.problem, splits, anew, self.prices, self.speed)
            # The figures are counted again, apart from the program: its rows can err only by costing a round.
            if budget is None or chosen.peak_bytes <= budget:
                return found, chosen
            if time.monotonic() > self.until:
                return found, None
            self._add_rows(chosen, budget)

    def find_smallest(self) -> Assignment:
        self.rows = {}
        every = [np.arange(len(group.splits)) for group in self.tables.groups]
        # The fastest choice is as good a start as any.
        _, best = self._solve(every, None)
        chosen, least = best, 0.0
        while chosen is not None and best is not None:
            # The bound is one on peaks at some positions, hence on all.
            if best.peak_bytes <= least * (1 + self.gap) + 0.5 or time.monotonic() > self.until:
                break
            self._add_rows(chosen, int(least))
            unit = _round_unit(best.peak_bytes)
            model = LayoutModel(self.problem, self.tables, self.rows, None, self.scale, unit)
            found = model.program.solve(self.gap / 2, self.until - time.monotonic())
            if found.values is None:
                break
            splits, anew = model.read_splits(found.values)
            chosen = assess_splits(self.problem, splits, anew, self.prices, self.speed)
            best = chosen if chosen.peak_bytes < best.peak_bytes else best
            least = max(least, found.bound * unit)
        if best is None:
            raise PlanError("no choice of layouts was found in time: give a longer time_limit")
        return best

    def _add_rows(self, chosen: Assignment, budget: int) -> None:
        """Adds rows for the positions where an assignment exceeds a budget most; a row that it should have kept, more
        strictly."""
        moves = list_moves(self.problem, chosen.splits, chosen.anew)
        priced = self.prices.price_pairs([(move.source, move.target) for move in moves])
        live, beside = measure_memory(self.problem, chosen.splits, moves, priced)
        numbers = {layout: number for number, layout in enumerate(self.tables.layouts)}
        worst: dict[int, tuple[int, MemoryRow]] = {
            int(position): (int(live[position]), MemoryRow(int(position))) for position in np.flatnonzero(live > budget)
        }
        for move, more in zip(moves, beside.tolist(), strict=True):
            total = int(live[move.at]) + more
            if total <= max(budget, worst[move.at][0] if move.at in worst else 0):
                continue
            use = self.tables.uses[move.tensor]
            assert use is not None  # what moves was written
            if move.kept and is_made_early(use, move.source, move.target):
                row = MemoryRow(move.at, move.tensor, "early", numbers[move.target])
            else:
                which = min(i for i, (node, index, _) in enumerate(use.reads) if (node, index) in move.reads)
                row = MemoryRow(move.at, move.tensor, "late" if move.kept else "anew", which)
            worst[move.at] = (total, row)
        ranked = sorted(worst.values(), reverse=True)
        # Positions beside each other often hold the same: the worst of all, and those that stand out among neighbours.
        peaks = [
            (total, row)
            for total, row in ranked
            if all(total >= worst[p][0] for p in (row.position - 1, row.position + 1) if p in worst)
        ]
        for total, row in peaks[:ROWS_AT_ONCE]:
            # A row that was there is exceeded by the solver's tolerance alone: twice that is left free then.
            self.rows[row] = 0.0 if row not in self.rows else self.rows[row] + 2 * (total - budget)


def _round_unit(nbytes: int) -> int:
    """A power of two near so many bytes: coefficients stay exact. With others, HiGHS has cut off the best solution."""
    return 1 << max(0, nbytes.bit_length() - 1)
