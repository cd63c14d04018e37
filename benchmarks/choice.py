"""The choice of layouts of random small programs against every choice there is, with budgets and ties that bind.

    python benchmarks/choice.py [--seed N] [--graphs 1000]

Prints how many choices differ from the best of all, in how many the budget binds, and the seconds that choosing took.
The oracle, tests/synth/choice_oracle.py, counts seconds and bytes by itself; prices are made up from the seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reshard.errors import BudgetError
from reshard.synth.choice.milp import choose_splits
from tests.synth.choice_oracle import INFINITE, SPEED, Enumeration, TablePrices, random_problem


def compare_graph(seed: int) -> tuple[int, int, int, float]:
    """Choices that were made, that differ, and in which the budget binds; seconds of choosing."""
    rng = random.Random(seed)
    while True:
        problem = random_problem(rng)
        every = Enumeration(problem, seed, most=1500)
        peaks = sorted({peak for seconds, peak, *_ in every.found if seconds < INFINITE})
        if peaks and peaks[0]:
            break
    prices = TablePrices(problem.mesh, seed)
    below = [peak for peak in peaks if every.best(peak) > every.best()]
    budgets = [None, rng.choice(peaks), *rng.sample(below, min(1, len(below)))]
    started = time.perf_counter()
    differ = 0
    for budget in budgets:
        best = every.best(INFINITE if budget is None else budget)
        chosen = choose_splits(problem, prices, SPEED, budget, gap=0.0)
        fits = budget is None or chosen.peak_bytes <= budget
        near = choose_splits(problem, prices, SPEED, budget, gap=0.05)
        wrong = abs(chosen.seconds - best) > 1e-6 * max(1.0, best) or near.bound_seconds > best + 1e-6 * max(1.0, best)
        differ += not fits or wrong or near.gap > 0.05 + 1e-6
    try:
        choose_splits(problem, prices, SPEED, peaks[0] - 1, gap=0.0)
        differ += 1
    except BudgetError as refused:
        differ += refused.smallest != peaks[0]
    binding = sum(budget is not None and every.best(budget) > every.best() for budget in budgets)
    return len(budgets) + 1, differ, binding, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--graphs", type=int, default=1000)
    options = parser.parse_args()
    rows = [compare_graph(options.seed * 10_000 + number) for number in range(options.graphs)]
    choices, differ, binding, seconds = (sum(column) for column in zip(*rows, strict=True))
    print(f"seed {options.seed}: {choices} choices on {options.graphs} graphs, budget binding in {binding}")
    print(f"differ from the best: {differ}; {1e3 * seconds / choices:.0f} ms a choice")


if __name__ == "__main__":
    main()
