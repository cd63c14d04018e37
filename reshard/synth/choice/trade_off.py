"""The least time of a step against the memory that it may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reshard.errors import BudgetError
from reshard.synth.choice.milp import SplitSearch
from reshard.synth.choice.problem import Assignment
from reshard.types.units import bytes_text, seconds_text

_BUDGETS = 5  # Between the least peak and that of the fastest choice, if none are given.


@dataclass(frozen=True)
class TradeOff:
    """What is chosen under each budget, and `others` by name, such as experts' choices.

    A notebook shows it as a picture; `to_svg` writes one.
    """

    points: tuple[tuple[int, Assignment], ...]
    others: Mapping[str, Assignment] = field(default_factory=dict[str, Assignment])
    budget: int | None = None

    def to_svg(self) -> str:
        """The picture: seconds against bytes at the peak, legible on light and on dark pages."""
        from reshard.draw.paint_svg import STANDALONE, paint_svg
        from reshard.draw.trade_off import draw_trade_off

        # A choice may need less than the budget that it was made for: its own peak is where the stair steps.
        chosen = [(each.peak_bytes, each.seconds) for _, each in self.points]
        others = {name: (other.peak_bytes, other.seconds) for name, other in self.others.items()}
        scene = draw_trade_off(chosen, others, self.budget, max((each.gap for _, each in self.points), default=0.0))
        return paint_svg(scene, STANDALONE)

    def _repr_html_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        # An assignment has a split for each of hundreds of nodes: the points are what people read.
        steps = ", ".join(f"{seconds_text(each.seconds)} in {bytes_text(each.peak_bytes)}" for _, each in self.points)
        return f"TradeOff({steps})"


def solve_trade_off(
    search: SplitSearch,
    budgets: Iterable[int] = (),
    others: Mapping[str, Assignment] | None = None,
    budget: int | None = None,
) -> TradeOff:
    """Chooses under each budget that something fits; by default from the least possible one to where more is of no use.

    `budget` is the one to mark in the picture.
    """
    given = sorted(budgets)
    points: list[tuple[int, Assignment]] = []
    if not given:
        free = search.choose()
        least = search.find_smallest().peak_bytes
        ratio = max(1.0, free.peak_bytes / max(1, least))
        # In equal factors, since halving memory again and again is what a machine's size asks for.
        given = sorted({round(least * ratio ** (step / _BUDGETS)) for step in range(_BUDGETS)} | {least})
        points.append((free.peak_bytes, free))
    for bytes_each in given:
        try:
            points.append((bytes_each, search.choose(bytes_each)))
        except BudgetError:
            # Smaller ones may be too small; that none fits is the caller's mistake.
            if bytes_each == given[-1] and not points:
                raise
    return TradeOff(tuple(sorted(points, key=lambda point: point[0])), others or {}, budget)
