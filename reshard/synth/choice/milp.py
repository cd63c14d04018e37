"""The splits that take the least time within a budget: bounds first, then a linear program of what they leave.

    bounds     what every choice takes at least, and how much more with each split (`label_bounds`)
    program    among the splits that add little, the best choice is a mixed-integer program's
    again      with more splits, until what the others add is more than the best choice exceeds the bound by

A choice with any split that was left out takes at least the bound and what that split adds. So the best choice of the
program, or that sum, whichever is less, is a bound on every choice.

Memory enters where a solution exceeds the budget, position by position: most positions of most programs never bind. A
solution of a relaxation that keeps to the budget everywhere is the best of all. Where rows bind, the program without
whole variables says what a byte is worth at each position; with these prices the bounds know of the budget, too. The
splits that it took, whole or in part, are the first program: few, and nearly always with a choice near the best.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from reshard.errors import BudgetError, PlanError
from reshard.synth.choice.assess import assess_splits, is_made_early, list_placed_moves, measure_memory
from reshard.synth.choice.device_speed import DeviceSpeed
from reshard.synth.choice.flows import end_of_move, restrict_splits, tabulate_problem
from reshard.synth.choice.label_bounds import LabelBounds
from reshard.synth.choice.layout_model import LayoutModel, MemoryRow, scale_seconds
from reshard.synth.choice.linear_program import Solution
from reshard.synth.choice.prices import MovePrices
from reshard.synth.choice.problem import Assignment, Problem, Split
from reshard.types.units import bytes_text

ROWS_AT_ONCE = 8
"""So many positions are added after a solution that exceeds the budget, the worst ones."""

WIDTHS = (0.002, 0.03, 0.3, np.inf)
"""By which part of the bound splits may exceed it to be among those of the program, at first and then."""

PROVED_SPLITS = 100
"""With more splits than these, the smallest budget is the least that was found among the good ones."""

MOST_SPLITS = 2_000
"""A program has no more splits than these, but of as many groups as there are."""

DEARER = 16
"""So often bytes grow twice as dear where a budget is exceeded, until some choice keeps to it."""

PRICED_SPLITS = 400
"""Bytes are priced among so many splits at first; a program of all of them is solved in seconds."""

FASTER_SECONDS = 2.0
"""Of choices that hold the fewest bytes the fastest is looked for in so many seconds."""

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

    A device holds `extra_bytes` beside what the problem knows of. After `time_limit` seconds of this process, not
    counting those of the prices, the best assignment so far is returned; its `gap` says how far off it can be.
    Raises `BudgetError` if no assignment meets the budget, and `PlanError` if none was found in time.
    """
    return SplitSearch(problem, prices, speed, time_limit, gap).choose(budget, extra_bytes)


class SplitSearch:
    """Looks for choices for one problem by bounds and programs; what is found for one budget is known to the next.

    `rows` is where memory has been seen to bind.
    """

    def __init__(
        self, problem: Problem, prices: MovePrices, speed: DeviceSpeed, time_limit: float = 60.0, gap: float = 1e-2
    ) -> None:
        self.problem, self.prices, self.speed, self.gap = problem, prices, speed, gap
        self.tables = tabulate_problem(problem, prices, speed)
        self.scale = scale_seconds(self.tables)
        self.rows: dict[MemoryRow, float] = {}
        # Splits that some relaxation within a budget took a part of: good candidates, whatever the bounds say.
        self.used = [np.zeros(len(group.splits), bool) for group in self.tables.groups]
        self._bounds = LabelBounds(problem, self.tables, self.scale)
        self._seen: list[Assignment] = []
        self._free: Assignment | None = None
        self._limit = time_limit
        self._set_clock()

    def _set_clock(self, seconds: float | None = None) -> None:
        # Seconds of this process: on a machine that has more to do, the same choice is made, only later.
        self._started = time.process_time(), time.monotonic()
        self.until = self._started[0] + (self._limit if seconds is None else seconds)

    def offer(self, splits: Sequence[Split], anew: Iterable[tuple[int, int]] = ()) -> Assignment:
        """Makes a choice known, such as an expert's: none that is slower and holds as much is returned from now on."""
        offered = assess_splits(self.problem, splits, anew, self.prices, self.speed)
        # A move that no plan makes makes it no choice at all.
        if offered.seconds < np.inf:
            self._seen.append(offered)
        return offered

    def fastest_within(self, budget: int | None) -> Assignment | None:
        """The fastest choice seen that keeps to a budget."""
        fitting = (each for each in self._seen if budget is None or each.peak_bytes <= budget)
        return min(fitting, key=lambda each: each.seconds, default=None)

    def list_smallest(self, most: int) -> list[Assignment]:
        """Of the choices seen at most so many that differ in their figures, those that hold the fewest bytes; of equal
        ones the faster first."""
        distinct = {(each.peak_bytes, each.seconds): each for each in self._seen}
        return [distinct[figures] for figures in sorted(distinct)[:most]]

    def choose(self, budget: int | None = None, extra_bytes: int = 0) -> Assignment:
        """What `choose_splits` returns."""
        found = self.find_within(budget, extra_bytes)
        if found is not None:
            return found
        if budget is None:
            raise PlanError("no choice of layouts was found in time: give a longer time_limit")
        # Neither found nor shown to be impossible in time: the fewest bytes settle which.
        self.until += 0.3 * self._limit
        least = self.find_smallest()
        if least.peak_bytes + extra_bytes <= budget:
            return least
        smallest = least.peak_bytes + extra_bytes
        raise BudgetError(
            f"no choice of layouts keeps to {bytes_text(budget)} on each device; give {bytes_text(smallest)}, "
            "the least that was found, or more",
            smallest,
        )

    def find_within(
        self, budget: int | None, extra_bytes: int = 0, *, seconds: float | None = None
    ) -> Assignment | None:
        """What `choose_splits` returns, in so many seconds if they are given; None if nothing was found."""
        # Some of the time is for the fewest bytes, should nothing fit.
        self._set_clock(0.7 * self._limit if seconds is None else seconds)
        if self._free is None:
            self._free = self.find_best(None)
        most = None if budget is None else max(0, budget - extra_bytes)
        if most is None or (self._free is not None and self._free.peak_bytes <= most):
            return self._free
        # Without a budget nothing is faster than this, so that with one nothing is.
        seen, bound = self.fastest_within(most), 0.0 if self._free is None else self._free.bound_seconds
        if seen is not None and seen.seconds <= bound * (1 + self.gap):
            return replace(seen, bound_seconds=min(bound, seen.seconds))
        self.rows = {}
        if self._free is not None:
            self.add_rows(self._free, most)
        # What no choice can keep to at a single position need not be looked for.
        return None if self.rows and self.bound_bytes() * (1 - 1e-6) > most else self.find_best(most)

    def find_best(self, budget: int | None) -> Assignment | None:
        """The fastest choice within a budget, with a bound; None if there is none, or none was found in time."""
        bounds = self._bounds
        bounds.price_bytes({})
        least = self._raise_bound(bounds)
        unit = _round_unit(budget or 1)
        for splits in (self._decode(bounds), [self.tables.groups[group].splits[0] for group in self.tables.group_of]):
            self._repair(splits, (), budget)
        # What every choice with each split takes at least.
        floors = [least + more for more in bounds.excess]
        if budget is not None:
            # Ten times the time of the whole program for all bytes of the budget again: more than memory is worth.
            priced = self._price_memory(bounds, least, budget, self.scale, unit, 10 * max(least, 1.0))
            # Not all bytes are counted where they have a price, so that one bound is above the other here and there.
            floors = [np.maximum(floor, priced + more) for floor, more in zip(floors, bounds.excess, strict=True)]
            self._find_any(bounds, budget)
        lower = least = max((float(floor.min()) for floor in floors), default=least)
        # Within a budget, first those alone that relaxations took: they nearly always have a choice near the best.
        for width in WIDTHS if budget is None or self._is_small() else (0.0, *WIDTHS):
            # Typical choices cost about a thousand; where the bound is nothing, so is every part of it.
            reach = least + width * max(least, 1.0) if width else -np.inf
            best = self.fastest_within(budget)
            # Within a budget a program takes most of the time, for less than the gap.
            near = self.gap / 50 if budget is None else self.gap
            if best is not None and best.seconds * self.scale <= lower * (1 + near) + 1e-9:
                break
            if budget is not None and self._is_small() and width == WIDTHS[0]:
                # A small program of all splits is solved as soon as one of some, which would be followed by another.
                reach = np.inf
            elif best is not None and width > (WIDTHS[0] if budget is None else 0.0):
                # Who takes a split that adds more than this cannot be better than the best by more than the gap.
                enough = best.seconds * self.scale / (1 + self.gap)
                reach = min(reach, enough) if budget is None else enough
            # On three axes thousands of splits cost nearly the same: programs of all of them are not solved in time.
            reach = min([reach, *np.sort(np.concatenate(floors))[MOST_SPLITS:][:1]]) if floors else reach
            reach = max(least, reach) if width else reach
            kept = [
                np.flatnonzero((floor <= max(reach, floor.min()) + 1e-9) | used)
                for floor, used in zip(floors, self.used, strict=True)
            ]
            everything = all(len(k) == len(f) for k, f in zip(kept, floors, strict=True))
            # Where nothing was left out the program's own bound holds.
            reach = np.inf if everything or not width else reach
            found = self._solve(kept, budget, unit, reach, self.gap if width else self.gap / 5)
            if not width:
                continue
            bound = min(found.bound, reach)
            lower = max(lower, bound)
            best = self.fastest_within(budget)
            # Sums of the bound and of the choice differ in the last places.
            if best is not None and best.seconds <= lower / self.scale * (1 + self.gap) + 1e-12 * best.seconds:
                break
            # A program with more splits bounds no better than this one, which was not solved in time.
            if everything or time.process_time() > self.until or (best is not None and bound < reach):
                break
        best = self.fastest_within(budget)
        if best is None:
            return None
        best = self._split_ties(best, floors, budget)
        return replace(best, bound_seconds=min(lower / self.scale, best.seconds))

    def _split_ties(self, chosen: Assignment, floors: Sequence[np.ndarray], budget: int | None) -> Assignment:
        """The choice with what does no work in smaller tiles where that costs nothing else: solvers do not see it."""
        for group, least in zip(self.tables.groups, floors, strict=True):
            if not any(self.problem.nodes[node].held_bytes for node in group.nodes):
                continue
            now = group.splits.index(chosen.splits[group.nodes[0]])
            # Few are as good by the bounds, and of these the first ones are as a rule as good in this choice.
            alike = (group.seconds < group.seconds[now]) & (least <= least[now] + 1e-3)
            for other in sorted(np.flatnonzero(alike).tolist(), key=group.seconds.__getitem__)[:4]:
                changed = dict.fromkeys(group.nodes, group.splits[other])
                splits = [changed.get(node, split) for node, split in enumerate(chosen.splits)]
                tried = assess_splits(self.problem, splits, chosen.anew, self.prices, self.speed)
                if tried.seconds < chosen.seconds and (budget is None or tried.peak_bytes <= budget):
                    chosen = tried
                    break
        return chosen

    def _decode(self, bounds: LabelBounds) -> list[Split]:
        """A choice that takes no program: the splits that bounds lead to, group after group."""
        chosen = [group.splits[at] for group, at in zip(self.tables.groups, bounds.decode_labels(), strict=True)]
        return [chosen[group] for group in self.tables.group_of]

    def find_smallest(self, *, seconds: float | None = None) -> Assignment:
        """The choice that holds the fewest bytes, or the least that was found in time, in so many seconds if given."""
        if seconds is not None:
            self._set_clock(seconds)
        self.rows = {}
        best = self._free or self.find_best(None)
        if best is None:
            raise PlanError("no choice of layouts was found in time: give a longer time_limit")
        if best.peak_bytes == 0:  # A step of scalars: no position has anything to count.
            return best
        unit = _round_unit(best.peak_bytes)
        self.add_rows(best, 0)
        # What is fastest is often split as far as can be, so that only copies made anew are left to save.
        self._repair(best.splits, best.anew, 0)
        best = self.list_smallest(1)[0]
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
            best = self.list_smallest(1)[0]
        # With the seconds taken out again, what is left bounds the bytes: a weighted mean of peaks is at most the peak.
        alone = LabelBounds(self.problem, self.tables, 0.0)
        alone.price_bytes(prices)
        least = self._raise_bound(alone) * unit / max(1.0, unit * sum(prices.values()))
        # Less and less is asked for, as long as it is found.
        while best.peak_bytes > least * (1 + self.gap):
            self._find_any(self._bounds, target := int(0.97 * best.peak_bytes))
            best = self.list_smallest(1)[0]
            if best.peak_bytes > target:
                break
        for width in (1e-4, 1e-2, np.inf):
            if time.process_time() > self.until:
                break
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
                chosen = self.offer(*model.read_splits(found.values))
                best = self.list_smallest(1)[0]
                # The bound is one on peaks at some positions, hence on all.
                lower = found.bound * unit
                if best.peak_bytes <= lower * (1 + self.gap) + 0.5 or time.process_time() > self.until:
                    least = max(least, lower) if everything else least
                    break
                self.add_rows(chosen, int(lower))
            # With splits left out, only the bound without any program says that nothing holds less.
            if best.peak_bytes <= least * (1 + self.gap) + 0.5 or everything or time.process_time() > self.until:
                break
        # Others that are as small, or smaller, may be faster.
        self.until = min(self.until, time.process_time() + FASTER_SECONDS)
        return self.find_best(best.peak_bytes) or best

    def bound_bytes(self) -> float:
        """What every choice holds for certain at the first position that has a row, the worst of the choice seen."""
        position = next(iter(self.rows)).position
        bounds = LabelBounds(self.problem, self.tables, 0.0)
        # Costs of about a thousand, as those of seconds are.
        unit = max(1.0, 1e-3 * float(self.tables.tile_bytes.max()))
        bounds.price_bytes({position: 1.0 / unit})
        return self._raise_bound(bounds) * unit

    def _is_small(self) -> bool:
        """Whether a program of all splits takes seconds."""
        return sum(len(group.splits) for group in self.tables.groups) <= PRICED_SPLITS

    def _slice(self) -> float:
        """Seconds by the clock for one program: a third of what is left, so that others follow."""
        now = time.process_time()
        busy = max(1.0, (time.monotonic() - self._started[1]) / max(1.0, now - self._started[0]))
        left = self.until - now
        return busy * min(left, max(10.0, left / 3))

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
            if stalled > 12 or time.process_time() > self.until:
                break
            bounds.share_prices()
        return least

    def _price_memory(
        self, bounds: LabelBounds, least: float, budget: int, scale: float, unit: int, overshoot: float
    ) -> float:
        """Prices bytes where they bind, by programs without whole variables; returns the bound that follows."""
        paid, before = 0.0, -1.0
        for _ in range(PRICINGS):
            best = self.fastest_within(budget)
            near = best is not None and best.seconds * scale <= (least - paid) * (1 + self.gap)
            if near or time.process_time() > self.until:
                break
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
        return least - paid

    def _find_any(self, bounds: LabelBounds, budget: int) -> None:
        """Looks for some choice that keeps to the budget, while bytes grow dearer wherever a choice exceeds it."""
        prices = dict(bounds.byte_prices)
        least = 0.01 * max(1.0, bounds.bound()) / max(1, budget)
        for _ in range(DEARER):
            tried = self._repair(self._decode(bounds), (), budget)
            if self.fastest_within(budget) is not None or time.process_time() > self.until:
                return
            for position in self.add_rows(tried, budget, tighten=False):
                prices[position] = 2 * prices.get(position, least)
            bounds.price_bytes(prices)
            self._raise_bound(bounds)

    def _repair(self, splits: Sequence[Split], anew: Iterable[tuple[int, int]], budget: int | None) -> Assignment:
        """The choice with those splits, in which copies are made anew until it fits, most bytes a second first."""
        apart = set(anew)
        group_of = self.tables.group_of
        while True:
            moves = list_placed_moves(self.problem, splits, apart)
            priced = self.prices.price_pairs(move.ends for move in moves)
            chosen = self.offer(splits, apart)
            if budget is None or chosen.peak_bytes <= budget:
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

    def _solve(self, kept: Sequence[np.ndarray], budget: int | None, unit: int, reach: float, gap: float) -> Solution:
        """Looks for the best choice among some splits, with rows for memory added until it keeps to the budget; once
        some choice is known, for a proof at most that none costs less than `reach`."""
        tables = restrict_splits(self.tables, kept)
        while True:
            rows = {} if budget is None else self.rows
            model = LayoutModel(self.problem, tables, rows, budget or 0, self.scale, unit)
            # Where memory binds, the last half of a percent takes most of the time.
            program, near, most = model.program, gap / (5 if budget is None else 2), np.inf
            relaxed = program.relax(self._slice()) if rows else Solution(None, -np.inf, False)
            chosen, best = None, self.fastest_within(budget)
            # No program says more than what the splits left out add: better choices are looked for among all, if few.
            enough = np.inf if best is None else reach if self._is_small() else best.seconds * self.scale / (1 + gap)
            if relaxed.impossible or relaxed.bound >= enough:
                return relaxed
            if relaxed.values is not None and not self._is_small() and (best is None or reach == np.inf):
                # Whether copies are kept is what relaxations leave open: first only those that this one makes anew may
                # be. A whole choice near it is found soon; of few splits, the program below takes less time to find it.
                found = program.solve(near, self._slice(), model.list_kept(relaxed.values))
                chosen = None if found.values is None else self.offer(*model.read_splits(found.values))
            if chosen is None or chosen.peak_bytes <= (budget or np.inf):
                best = self.fastest_within(budget)
                if gap and best is not None and relaxed.values is not None:
                    # Solvers are not told of a choice that is known: with a row for it they look for better ones alone.
                    most = best.seconds * self.scale / (1 + gap)
                    if relaxed.bound >= min(most, reach):
                        return relaxed
                    program.cut_off(most, relaxed)
                found = program.solve(near, self._slice())
                if found.values is None:
                    return replace(found, bound=most if found.impossible else max(found.bound, relaxed.bound))
                chosen = self.offer(*model.read_splits(found.values))
                # The figures are counted again, apart from the program: its rows can err only by costing a round.
                if budget is None or chosen.peak_bytes <= budget or time.process_time() > self.until:
                    return found
            assert budget is not None  # it is exceeded
            self._repair(chosen.splits, chosen.anew, budget)
            self.add_rows(chosen, budget)

    def add_rows(self, chosen: Assignment, budget: int, tighten: bool = True) -> list[int]:
        """Adds rows for the positions where an assignment exceeds a budget most, which are returned; a row that it
        should have kept, more strictly."""
        moves = list_placed_moves(self.problem, chosen.splits, chosen.anew)
        priced = self.prices.price_pairs(move.ends for move in moves)
        live, beside = measure_memory(self.problem, chosen.splits, moves, priced)
        numbers = {each: number for number, each in enumerate(self.tables.ends)}
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
                row = MemoryRow(move.at, move.tensor, "early", numbers[end_of_move(move.target, move.joined)])
            else:
                which = min(i for i, (node, index, _) in enumerate(use.reads) if (node, index) in move.reads)
                anew = not move.kept and use.reads[which][2].first != move.at
                row = MemoryRow(move.at, move.tensor, "anew" if anew else "late", which)
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
        return [row.position for _, row in peaks[:ROWS_AT_ONCE]]


def _round_unit(nbytes: int) -> int:
    """A power of two near so many bytes: coefficients stay exact. With others, HiGHS has cut off the best solution."""
    return 1 << max(0, nbytes.bit_length() - 1)
