"""Linear programs with whole variables, grown variable by variable and row by row, and solved by SciPy's HiGHS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from reshard.errors import PlanError

MOST_WORK = 4_000_000
"""Variables times nodes of a search, some ten seconds: what is found then depends on no clock."""


@dataclass(frozen=True)
class Solution:
    """Values of the variables, None where none were found, and a lower bound on the objective.

    `impossible` says that there are none. Of a program whose variables need not be whole, `prices` are by how much the
    cost falls with the upper bound of each row, and `more` by how much it rises at least with each variable.
    """

    values: np.ndarray | None
    bound: float
    impossible: bool
    prices: np.ndarray | None = None
    more: np.ndarray | None = None


class LinearProgram:
    """Variables from 0 to an upper bound, some of them whole numbers, and sums of them with bounds of their own."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.upper: list[float] = []
        self._whole: list[int] = []
        # Entries of the matrix of all rows, and the bounds of the rows.
        self._row_numbers: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add_column(self, cost: float = 0.0, upper: float = 1.0, whole: bool = False) -> int:
        """A new variable."""
        self.costs.append(cost)
        self.upper.append(upper)
        self._whole.append(int(whole))
        return len(self.costs) - 1

    def add_row(self, weights: Mapping[int, float], low: float = -np.inf, high: float = np.inf) -> int:
        """A sum of variables with coefficients, which must lie between `low` and `high`; its number."""
        self._row_numbers.extend([len(self._low)] * len(weights))
        self._columns.extend(weights.keys())
        self._values.extend(weights.values())
        self._low.append(low)
        self._high.append(high)
        return len(self._low) - 1

    def solve(self, gap: float, time_limit: float, without: Sequence[int] = ()) -> Solution:
        """The least cost within a relative `gap`, `without` some variables, or the least that is found by `MOST_WORK`;
        or in so many seconds, on machines that are slow."""
        if not self.costs:
            return self._solve_nothing()
        optimize, matrix = self._load_solver()
        upper = np.array(self.upper)
        upper[list(without)] = 0.0
        found = optimize.milp(
            self.costs,
            integrality=self._whole,
            bounds=optimize.Bounds(0.0, upper),
            constraints=[optimize.LinearConstraint(matrix, self._low, self._high)],
            options={
                "mip_rel_gap": gap,
                "time_limit": max(time_limit, 0.1),
                "node_limit": max(MOST_WORK // len(self.costs), 1),
            },
        )
        # Status 2 is infeasible; 4 is "unbounded or infeasible", and what is chosen here is bounded, or too many nodes.
        impossible = found.status == 2 or "unbounded or infeasible" in found.message
        bound = np.inf if impossible else -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
        return Solution(found.x, bound, impossible)

    def relax(self, time_limit: float) -> Solution:
        """The least cost if no variable need be whole, with the prices of the rows."""
        if not self.costs:
            return self._solve_nothing()
        optimize, matrix = self._load_solver()
        low, high = np.array(self._low), np.array(self._high)
        equal, above, below = low == high, (low != high) & (low > -np.inf), (low != high) & (high < np.inf)
        sparse: Any = import_module("scipy.sparse")
        found = optimize.linprog(
            self.costs,
            A_ub=sparse.vstack([matrix[below], -matrix[above]]),
            b_ub=np.concatenate([high[below], -low[above]]),
            A_eq=matrix[equal],
            b_eq=low[equal],
            bounds=np.stack([np.zeros(len(self.upper)), self.upper], axis=1),
            method="highs",
            options={"time_limit": max(time_limit, 0.1)},
        )
        if found.status != 0:
            return Solution(None, np.inf if found.status == 2 else -np.inf, found.status == 2)
        prices = np.zeros(len(low))
        prices[below] = -found.ineqlin.marginals[: int(below.sum())]
        return Solution(found.x, float(found.fun), False, prices, found.lower.marginals)

    def cut_off(self, most: float, relaxed: Solution) -> None:
        """Asks for at most that cost, and leaves out each variable that is 0, or 1 and costs more by a relaxation."""
        if relaxed.more is not None:
            for column in np.flatnonzero(relaxed.bound + relaxed.more > most).tolist():
                self.upper[column] = 0.0
        self.add_row({column: cost for column, cost in enumerate(self.costs) if cost}, high=most)

    def _solve_nothing(self) -> Solution:
        """Of a step without a choice, such as one of scalars: the solver takes no program without variables."""
        impossible = any(low > 0 or high < 0 for low, high in zip(self._low, self._high, strict=True))
        return Solution(None if impossible else np.zeros(0), 0.0, impossible, np.zeros(len(self._low)))

    def _load_solver(self) -> tuple[Any, Any]:
        try:
            optimize: Any = import_module("scipy.optimize")
            sparse: Any = import_module("scipy.sparse")
        except ImportError:
            raise PlanError("choosing layouts needs scipy: pip install scipy") from None
        entries = (self._values, (self._row_numbers, self._columns))
        return optimize, sparse.coo_array(entries, shape=(len(self._low), len(self.costs))).tocsr()
