"""The splits that take the least time within a budget: a linear program, solved again until its solution fits.

Memory enters where a solution exceeds the budget, position by position: most positions of most programs never bind. A
solution of a relaxation that keeps to the budget everywhere is the best of all, and the solver's bound is one on every
assignment.
"""

from __future__ import annotations

import time

import numpy as np

from reshard.errors import BudgetError, PlanError
from reshard.synth.choice.assess import assess_splits, is_made_early, list_moves, measure_memory
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.flows import ChoiceTables, tabulate_problem
from reshard.synth.choice.layout_model import LayoutModel, MemoryRow
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Problem
from reshard.types.units import bytes_text

ROWS_AT_ONCE = 8
"""So many positions are added after a solution that exceeds the budget, the worst ones."""


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
    until = time.monotonic() + time_limit
    tables = tabulate_problem(problem, prices, speed)
    most = None if budget is None else max(0, budget - extra_bytes)
    rows: dict[MemoryRow, float] = {}
    while True:
        model = LayoutModel(problem, tables, rows, most, unit=_round_unit(most or 1))
        found = model.program.solve(gap, until - time.monotonic())
        # A relaxation without solutions: then there are none that meet all rows either.
        if found.values is None and found.impossible:
            least = _minimize_memory(problem, tables, prices, speed, until, gap)
            smallest = least.peak_bytes + extra_bytes
            raise BudgetError(
                f"no choice of layouts keeps to {bytes_text(budget or 0)} on each device; give {bytes_text(smallest)}, "
                f"the least that any choice holds, or more",
                smallest,
            )
        if found.values is None:
            raise PlanError("no choice of layouts was found in time: give a longer time_limit or a larger budget")
        splits, anew = model.read_splits(found.values)
        chosen = assess_splits(problem, splits, anew, prices, speed, found.bound / model.scale)
        # The figures are counted again, apart from the program: its rows can err only by costing a round.
        if most is None or chosen.peak_bytes <= most:
            return chosen
        _add_rows(rows, problem, tables, prices, chosen, most)


def smallest_budget(
    problem: Problem, prices: MovePrices, speed: DeviceSpeed, time_limit: float = 60.0, gap: float = 1e-3
) -> Assignment:
    """The assignment that holds the fewest bytes at its peak, within a relative `gap`, however long it takes."""
    tables = tabulate_problem(problem, prices, speed)
    return _minimize_memory(problem, tables, prices, speed, time.monotonic() + time_limit, gap)


def _minimize_memory(
    problem: Problem, tables: ChoiceTables, prices: MovePrices, speed: DeviceSpeed, until: float, gap: float
) -> Assignment:
    # The fastest choice is as good a start as any.
    model = LayoutModel(problem, tables, {}, None)
    found = model.program.solve(0.1, until - time.monotonic())
    rows: dict[MemoryRow, float] = {}
    best: Assignment | None = None
    least = 0.0
    while found.values is not None:
        splits, anew = model.read_splits(found.values)
        chosen = assess_splits(problem, splits, anew, prices, speed)
        best = chosen if best is None or chosen.peak_bytes < best.peak_bytes else best
        # The bound is one on peaks at some positions, hence on all.
        if best.peak_bytes <= least * (1 + gap) + 0.5 or time.monotonic() > until:
            break
        _add_rows(rows, problem, tables, prices, chosen, int(least))
        unit = _round_unit(best.peak_bytes)
        model = LayoutModel(problem, tables, rows, None, unit)
        found = model.program.solve(gap / 2, until - time.monotonic())
        least = max(least, found.bound * unit)
    if best is None:
        raise PlanError("no choice of layouts was found in time: give a longer time_limit")
    return best


def _round_unit(nbytes: int) -> int:
    """A power of two near so many bytes: coefficients stay exact. With others, HiGHS has cut off the best solution."""
    return 1 << max(0, nbytes.bit_length() - 1)


def _add_rows(
    rows: dict[MemoryRow, float],
    problem: Problem,
    tables: ChoiceTables,
    prices: MovePrices,
    chosen: Assignment,
    budget: int,
) -> None:
    """Adds rows for the positions where an assignment exceeds a budget most; a row that it should have kept, more
    strictly."""
    moves = list_moves(problem, chosen.splits, chosen.anew)
    priced = prices.price_pairs([(move.source, move.target) for move in moves])
    live, beside = measure_memory(problem, chosen.splits, moves, priced)
    numbers = {layout: number for number, layout in enumerate(tables.layouts)}
    worst: dict[int, tuple[int, MemoryRow]] = {
        int(position): (int(live[position]), MemoryRow(int(position))) for position in np.flatnonzero(live > budget)
    }
    for move, more in zip(moves, beside.tolist(), strict=True):
        total = int(live[move.at]) + more
        if total <= max(budget, worst[move.at][0] if move.at in worst else 0):
            continue
        use = tables.uses[move.tensor]
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
        rows[row] = 0.0 if row not in rows else rows[row] + 2 * (total - budget)
