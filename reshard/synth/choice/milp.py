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
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from reshard.errors import BudgetError, PlanError
from reshard.synth.choice.assess import assess_splits, is_made_early, list_placed_moves, measure_memory
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.flows import restrict_splits, tabulate_problem
from reshard.synth.choice.label_bounds import LabelBounds
from reshard.synth.choice.layout_model import LayoutModel, MemoryRow, scale_seconds
from reshard.synth.choice.linear_program import Solution
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Problem, Split
from reshard.types.units import bytes_text

ROWS_AT_ONCE = 8
"""So many positions are added after a solution that exceeds the budget, the worst ones."""

WIDTHS = (0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, np.inf)
"""By which part of the bound splits may exceed it to be among those of the program, at first and then."""

PROVED_SPLITS = 100
"""With more splits than these, the smallest budget is the least that was found among the good ones."""

PRICED_SPLITS = 400
"""Bytes are priced among so many splits at first."""

PRICINGS = 10
"""Bytes are priced so many times before whole choices are looked for."""


def choose_splits(
    problem: Problem,
    prices: MovePrices,
    speed: DeviceSpeed,
    budget: int | None = None,
    extra_bytes: int = 0,
    time_limit: float = 60.0,
    gap: float = 1e-2,
) -> Assignment:
    """The assignment that takes the fewest seconds, within a relative `gap`, and holds at most `budget` bytes.

    A device holds `extra_bytes` beside what the problem knows of. After `time_limit` seconds, not
    counting those of the prices, the best assignment so far is returned; its `gap` says how far off it can be.
    Raises `BudgetError` if no assignment meets the budget, and `PlanError` if none was found in time.
    """
    search = _SplitSearch(problem, prices, speed, gap, time_limit)
    chosen = search.find_best(None)
    most = None if budget is None else max(0, budget - extra_bytes)
    if most is None or (chosen is not None and chosen.peak_bytes <= most):
        if chosen is None:
            raise PlanError("no choice of layouts was found in time: give a longer time_limit")
        return chosen
    if chosen is not None:
        search.add_rows(chosen, most)
    # Some of the time is for the fewest bytes, should nothing fit.
    until = search.until
    search.until -= 0.3 * (until - time.monotonic())
    # What no choice can keep to at a single position need not be looked for.
    found = None if search.rows and search.bound_bytes() * (1 - 1e-6) > most else search.find_best(most)
    if found is not None:
        return found
    search.until = until
    # Neither found nor shown to be impossible in time: the fewest bytes settle which.
    least = search.find_smallest()
    if least.peak_bytes <= most:
        return least
    smallest = least.peak_bytes + extra_bytes
    raise BudgetError(
        f"no choice of layouts keeps to {bytes_text(budget or 0)} on each device; give {bytes_text(smallest)}, the "
        "least that was found, or more",
        smallest,
    )


def smallest_budget(
    problem: Problem, prices: MovePrices, speed: DeviceSpeed, time_limit: float = 60.0, gap: float = 1e-2
) -> Assignment:
    """The assignment that holds the fewest bytes at its peak, within a relative `gap`, however long it takes."""
    return _SplitSearch(problem, prices, speed, gap, time_limit).find_smallest()


class _SplitSearch:
    """Looks for choices by bounds and programs; `rows` is where memory has been seen to bind."""

    def __init__(self, problem: Problem, prices: MovePrices, speed: DeviceSpeed, gap: float, time_limit: float) -> None:
        self.problem, self.prices, self.speed, self.gap = problem, prices, speed, gap
        self.tables = tabulate_problem(problem, prices, speed)
        # Prices are needed whatever they take: a limit that they used up would leave the first choice that comes.
        self.until = time.monotonic() + time_limit
        self.scale = scale_seconds(self.tables)
        self.rows: dict[MemoryRow, float] = {}
        # Splits that some relaxation within the budget took a part of: good candidates, whatever the bounds say.
        self.used = [np.zeros(len(group.splits), bool) for group in self.tables.groups]
        self.best: Assignment | None = None
        """The fastest choice seen that keeps to the budget, and the one that holds the fewest bytes."""
        self.smallest: Assignment | None = None

    def find_best(self, budget: int | None) -> Assignment | None:
        """The fastest choice within a budget, with a bound; None if there is none, or none was found in time."""
        bounds = LabelBounds(self.problem, self.tables, self.scale)
        least = self._raise_bound(bounds)
        unit = _round_unit(budget or 1)
        if budget is not None:
            # Ten times the time of the whole program for all bytes of the budget again: more than memory is worth.
            least = self._price_memory(bounds, least, budget, self.scale, unit, 10 * max(least, 1.0))
            self._find_any(bounds, budget, unit)
        best = None if budget is None else self.best
        lower = -np.inf
        for width in WIDTHS:
            # Typical choices cost about a thousand; where the bound is nothing, so is every part of it.
            reach = least + width * max(least, 1.0)
            kept = [
                np.flatnonzero((e <= reach - least + 1e-9) | u) for e, u in zip(bounds.excess, self.used, strict=True)
            ]
            everything = all(len(k) == len(e) for k, e in zip(kept, bounds.excess, strict=True))
            found, chosen = self._solve(kept, budget, unit)
            # Nothing was left out, so that the program's own bound holds.
            reach = np.inf if everything else reach
            lower = max(lower, reach if found.impossible else min(found.bound, reach))
            for other in (chosen, None if budget is None else self.best):
                if other is not None and (best is None or other.seconds < best.seconds):
                    best = other
            bound = max(lower, least) / self.scale
            # Sums of the bound and of the choice differ in the last places.
            if best is not None and best.seconds <= bound * (1 + self.gap) + 1e-12 * best.seconds:
                break
            if everything or time.monotonic() > self.until:
                break
        if budget is None:
            # Where no program was solved in time, or none well.
            rounded = self._round_bounds(bounds)
            best = rounded if best is None or rounded.seconds < best.seconds else best
        if best is None:
            return None
        best = self._split_ties(best, bounds, budget)
        return replace(best, bound_seconds=min(max(lower, least) / self.scale, best.seconds))

    def _split_ties(self, chosen: Assignment, bounds: LabelBounds, budget: int | None) -> Assignment:
        """The choice with what does no work in smaller tiles where that costs nothing else: solvers do not see it."""
        for group, excess in zip(self.tables.groups, bounds.excess, strict=True):
            if not any(self.problem.nodes[node].held_bytes for node in group.nodes):
                continue
            now = group.splits.index(chosen.splits[group.nodes[0]])
            # Few are as good by the bounds, and of these the first ones are as a rule as good in this choice.
            alike = (group.seconds < group.seconds[now]) & (excess <= excess[now] + 1e-3)
            for other in sorted(np.flatnonzero(alike).tolist(), key=group.seconds.__getitem__)[:4]:
                changed = dict.fromkeys(group.nodes, group.splits[other])
                splits = [changed.get(node, split) for node, split in enumerate(chosen.splits)]
                tried = assess_splits(self.problem, splits, chosen.anew, self.prices, self.speed)
                if tried.seconds < chosen.seconds and (budget is None or tried.peak_bytes <= budget):
                    chosen = tried
                    break
        return chosen

    def _round_bounds(self, bounds: LabelBounds) -> Assignment:
        """A choice that takes no program: of each group the split that adds the least, or the first, which as a rule is
        none; whichever is faster."""
        rounded = [group.splits[int(e.argmin())] for group, e in zip(self.tables.groups, bounds.excess, strict=True)]
        tried = [
            assess_splits(self.problem, [splits[g] for g in self.tables.group_of], (), self.prices, self.speed)
            for splits in (rounded, [group.splits[0] for group in self.tables.groups])
        ]
        return min(tried, key=lambda chosen: chosen.seconds)

    def find_smallest(self) -> Assignment:
        """The choice that holds the fewest bytes, or the least that was found in time."""
        self.rows, self.best = {}, None
        best = self.find_best(None)
        if best is None:
            raise PlanError("no choice of layouts was found in time: give a longer time_limit")
        if best.peak_bytes == 0:  # A step of scalars: no position has anything to count.
            return best
        unit = _round_unit(best.peak_bytes)
        self.add_rows(best, 0)
        # What is fastest is often split as far as can be, so that only copies made anew are left to save.
        best = min(best, self._repair(best.splits, best.anew, 0), key=lambda chosen: chosen.peak_bytes)
        if best.peak_bytes <= self.bound_bytes() * (1 + self.gap):
            return best
        # Where memory alone counts nearly all splits are as good as others: some of the seconds tell them apart.
        prices = {next(iter(self.rows)).position: 1.0 / unit}
        bounds = LabelBounds(self.problem, self.tables, 0.0)
        for part in (0.3, 0.03):
            scale = part / best.seconds if best.seconds > 0 else 0.0
            bounds = LabelBounds(self.problem, self.tables, scale)
            bounds.price_bytes(prices)
            self._price_memory(bounds, self._raise_bound(bounds), 0, scale, unit, 1.0)
            prices = bounds.byte_prices
            if self.smallest is not None and self.smallest.peak_bytes < best.peak_bytes:
                best = self.smallest
        # With the seconds taken out again, what is left bounds the bytes: a weighted mean of peaks is at most the peak.
        alone = LabelBounds(self.problem, self.tables, 0.0)
        alone.price_bytes(prices)
        least = self._raise_bound(alone) * unit / max(1.0, unit * sum(prices.values()))
        for width in (1e-4, 1e-2, np.inf):
            kept = [np.flatnonzero((e <= width) | u) for e, u in zip(bounds.excess, self.used, strict=True)]
            everything = all(len(k) == len(e) for k, e in zip(kept, bounds.excess, strict=True))
            if width == np.inf and sum(map(len, kept)) > PROVED_SPLITS:
                break
            tables = restrict_splits(self.tables, kept)
            while True:
                model = LayoutModel(self.problem, tables, self.rows, 0, 0.0, unit, 1.0)
                found = model.program.solve(self.gap, self._slice())
                if found.values is None:
                    break
                splits, anew = model.read_splits(found.values)
                chosen = assess_splits(self.problem, splits, anew, self.prices, self.speed)
                best = chosen if chosen.peak_bytes < best.peak_bytes else best
                # The bound is one on peaks at some positions, hence on all.
                lower = found.bound * unit
                if best.peak_bytes <= lower * (1 + self.gap) + 0.5 or time.monotonic() > self.until:
                    least = max(least, lower) if everything else least
                    break
                self.add_rows(chosen, int(lower))
            # With splits left out, only the bound without any program says that nothing holds less.
            if best.peak_bytes <= least * (1 + self.gap) + 0.5 or everything or time.monotonic() > self.until:
                break
        return best

    def bound_bytes(self) -> float:
        """What every choice holds for certain at the first position that has a row, the worst of the choice seen."""
        position = next(iter(self.rows)).position
        bounds = LabelBounds(self.problem, self.tables, 0.0)
        # Costs of about a thousand, as those of seconds are.
        unit = max(1.0, 1e-3 * float(self.tables.tile_bytes.max()))
        bounds.price_bytes({position: 1.0 / unit})
        return self._raise_bound(bounds) * unit

    def _slice(self) -> float:
        """Seconds for one program: a third of what is left, so that others follow it."""
        left = self.until - time.monotonic()
        return min(left, max(10.0, left / 3))

    def _raise_bound(self, bounds: LabelBounds) -> float:
        """Passes costs on until the bound rises no more; returns what it was before the last pass, which `excess` adds
        to."""
        before = -np.inf
        stalled = 0
        least = 0.0
        for _ in range(400):
            bounds.pass_costs(backward=False)
            least = bounds.bound()
            bounds.pass_costs(backward=True)
            # The sum of what groups and pairs cost rises in fits and starts, so that a few idle passes are allowed.
            stalled = stalled + 1 if least < before + 1e-6 * abs(before) else 0
            before = max(before, least)
            if stalled > 12 or time.monotonic() > self.until:
                break
            bounds.share_prices()
        return least

    def _price_memory(
        self, bounds: LabelBounds, least: float, budget: int, scale: float, unit: int, overshoot: float
    ) -> float:
        """Prices bytes where they bind, by programs without whole variables; returns the bound that follows."""
        paid, before = 0.0, -1.0
        for _ in range(PRICINGS):
            # So few that the program is solved in a second, those with the least to add.
            every = np.sort(np.concatenate(bounds.excess))
            width = min(WIDTHS[0] * max(least - paid, 1e-3), every[min(PRICED_SPLITS, len(every) - 1)]) + 1e-9
            kept = [np.flatnonzero((e <= width) | u) for e, u in zip(bounds.excess, self.used, strict=True)]
            tables = restrict_splits(self.tables, kept)
            model = LayoutModel(self.problem, tables, self.rows, budget, scale, unit, overshoot)
            found = model.program.relax(self._slice())
            if found.values is None or found.prices is None:
                break
            for mask, numbers, columns in zip(self.used, kept, model.columns, strict=True):
                mask[numbers] |= found.values[columns] > 1e-6
            chosen = self._repair(*model.read_splits(found.values), budget)
            known = len(self.rows)
            prices: dict[int, float] = {}
            for row, number in zip(self.rows, model.row_numbers, strict=True):
                prices[row.position] = prices.get(row.position, 0.0) + float(found.prices[number]) / unit
            self.add_rows(chosen, budget or int(0.95 * found.bound * unit), tighten=False)
            bounds.price_bytes({position: price for position, price in prices.items() if price > 0})
            paid = sum(prices.values()) * budget
            least = self._raise_bound(bounds)
            # Splits that come in and change nothing are those that cost as little as others.
            if len(self.rows) == known and abs(found.bound - before) <= 1e-4 * abs(before):
                break
            before = found.bound
            if time.monotonic() > self.until:
                break
        return least - paid

    def _find_any(self, bounds: LabelBounds, budget: int, unit: int) -> None:
        """Looks for some choice that keeps to the budget, rounding relaxations within less and less of it."""
        for part in (1.0, 0.9, 0.8, 0.65, 0.5, 0.35):
            if self.best is not None or time.monotonic() > self.until:
                return
            every = np.sort(np.concatenate(bounds.excess))
            width = every[min(PRICED_SPLITS, len(every) - 1)]
            kept = [np.flatnonzero((e <= width) | u) for e, u in zip(bounds.excess, self.used, strict=True)]
            tables = restrict_splits(self.tables, kept)
            model = LayoutModel(self.problem, tables, self.rows, int(part * budget), self.scale, unit, 1e5)
            found = model.program.relax(self._slice())
            if found.values is not None:
                self.add_rows(self._repair(*model.read_splits(found.values), budget), budget, tighten=False)

    def _repair(self, splits: Sequence[Split], anew: Iterable[tuple[int, int]], budget: int) -> Assignment:
        """The choice with those splits, in which copies are made anew until it fits, most bytes a second first."""
        apart = set(anew)
        group_of = self.tables.group_of
        while True:
            moves = list_placed_moves(self.problem, splits, apart)
            priced = self.prices.price_pairs([(move.source, move.target) for move in moves])
            chosen = assess_splits(self.problem, splits, apart, self.prices, self.speed)
            # Splits that are rounded from parts may need a move that no plan makes: then this is no choice at all.
            possible = chosen.seconds < np.inf
            if possible and (self.smallest is None or chosen.peak_bytes < self.smallest.peak_bytes):
                self.smallest = chosen
            if chosen.peak_bytes <= budget:
                if possible and (self.best is None or chosen.seconds < self.best.seconds):
                    self.best = chosen
                return chosen
            live, _ = measure_memory(self.problem, splits, moves, priced)
            worst = int(live.argmax())
            gains: list[tuple[float, int]] = []
            for number, (move, price) in enumerate(zip(moves, priced, strict=True)):
                reads = [self.problem.nodes[node].reads[index] for node, index in move.reads]
                use = self.tables.uses[move.tensor]
                idle = move.at <= worst <= move.until and all(access.at != worst for access in reads)
                if move.kept and idle and use is not None and use.asks_what_to_keep:
                    more = price.seconds * (sum(access.times for access in reads) - move.times)
                    gains.append((move.target.tile_bytes / (more + 1e-12), number))
            if not gains:
                return chosen
            keys = {(group_of[node], index) for node, index in moves[max(gains)[1]].reads}
            # Tied nodes keep their copies alike.
            apart |= {
                (node, index)
                for use in self.tables.uses
                if use is not None
                for node, index, _ in use.reads
                if (group_of[node], index) in keys
            }

    def _solve(self, kept: Sequence[np.ndarray], budget: int | None, unit: int) -> tuple[Solution, Assignment | None]:
        """The best choice among some splits, with rows for memory added until it keeps to the budget."""
        tables = restrict_splits(self.tables, kept)
        while True:
            rows = {} if budget is None else self.rows
            model = LayoutModel(self.problem, tables, rows, budget or 0, self.scale, unit)
            found = model.program.solve(self.gap / 5, self._slice())
            if found.values is None:
                return found, None
            splits, anew = model.read_splits(found.values)
            chosen = assess_splits(self.problem, splits, anew, self.prices, self.speed)
            # The figures are counted again, apart from the program: its rows can err only by costing a round.
            if budget is None or chosen.peak_bytes <= budget:
                return found, chosen
            if time.monotonic() > self.until:
                return found, None
            self.add_rows(chosen, budget)

    def add_rows(self, chosen: Assignment, budget: int, tighten: bool = True) -> None:
        """Adds rows for the positions where an assignment exceeds a budget most; a row that it should have kept, more
        strictly."""
        moves = list_placed_moves(self.problem, chosen.splits, chosen.anew)
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
            if row not in self.rows:
                self.rows[row] = 0.0
            elif tighten:
                self.rows[row] += 2 * (total - budget)


def _round_unit(nbytes: int) -> int:
    """A power of two near so many bytes: coefficients stay exact. With others, HiGHS has cut off the best solution."""
    return 1 << max(0, nbytes.bit_length() - 1)
