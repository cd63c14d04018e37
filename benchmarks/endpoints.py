"""What the busiest device of a move to other devices sends or receives, beside linear programs.

    python -m benchmarks.endpoints [PAIRS [DEVICES]]

Takes seeded random pairs of layouts on two sets of 1 to DEVICES devices, 2,000 pairs and 48 by default, disjoint or
overlapping, of arrays of rank 2. Prints, every hundred pairs, how often an exchange alone (a pull) loads its busiest
device with more whole elements than the optimum of a linear program in which only holders send; and the largest ratios
of the chosen plan's to the optimum of one in which devices may pass on what they receive, to the same in whole
elements, and to the pull's; and of a relay's, where the target replicates.

In whole elements, an optimum is that of its linear program, rounded up: both are flows, whose capacities may as well be
whole, and the copies of an element that devices pass on always make up a tree.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import reshard as rs
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import PLAIN, StepMode
from tests.endpoint_lp import forwarded, pulled
from tests.layouts import random_crossing, random_layout

RELAY = StepMode(relay=True)
SIZES = (24, 32, 48, 60, 64, 96)


def pair(seed: int, devices: int) -> tuple[rs.Layout, rs.Layout]:
    """A random pair on two sets of devices; the same for the same seed."""
    choose = random.Random(seed)
    meshes = [layout.mesh for layout in random_crossing(choose, counts=range(1, devices + 1))]
    shape = [choose.choice(SIZES) for _ in range(2)]
    source, target = (random_layout(choose, mesh, shape) for mesh in meshes)
    return source, target


def busiest(plan: rs.Plan) -> float:
    """What its busiest device sends or receives, in elements."""
    return max(plan.sent_bytes, plan.received_bytes) / plan.source.nbytes(1)


class Figures(NamedTuple):
    """A pair's busiest device, in elements: of the pull, of the relay if the target replicates, of the chosen plan, and
    of the two linear programs."""

    seed: int
    pull: float
    relay: float | None
    chosen: float
    pulled: float
    forwarded: float

    @property
    def above_pulled(self) -> bool:
        """Whether the pull is above its optimum in whole elements."""
        return self.pull > _rounded_up(self.pulled)

    @property
    def to_forwarded(self) -> float:
        """The chosen plan's over the optimum where devices pass elements on."""
        return self.chosen / max(self.forwarded, 1)

    @property
    def to_whole(self) -> float:
        """The same over the optimum in whole elements."""
        return self.chosen / max(_rounded_up(self.forwarded), 1)

    @property
    def relay_to_whole(self) -> float:
        """The relay's over the optimum in whole elements."""
        return 1.0 if self.relay is None else self.relay / max(_rounded_up(self.forwarded), 1)

    @property
    def to_pull(self) -> float:
        """The chosen plan's over the pull's."""
        return self.chosen / max(self.pull, 1)


def figures(seed: int, devices: int) -> Figures:
    """The figures of one pair."""
    source, target = pair(seed, devices)
    pull, relay = (busiest(chain(source, target, [StepSpec("exchange", target, mode)])) for mode in (PLAIN, RELAY))
    replicated = math.prod(axis.size for axis in target.held) < target.mesh.size
    chosen = busiest(rs.plan(source, target))
    optima = pulled(source, target), forwarded(source, target)
    return Figures(seed, pull, relay if replicated else None, chosen, *optima)


def _rounded_up(optimum: float) -> int:
    return math.ceil(optimum - 1e-6)


def summary(rows: Sequence[Figures]) -> str:
    """How far the figures are from the optima."""
    ratios = {
        "the linear program that forwards": [row.to_forwarded for row in rows],
        "it in whole elements": [row.to_whole for row in rows],
    }
    relays = [row.relay_to_whole for row in rows if row.relay is not None]
    texts = [f"to {of} at most {max(r):.3f}, above 1.1 in {sum(x > 1.1 for x in r)}" for of, r in ratios.items()]
    pulls = [row.to_pull for row in rows]
    return (
        f"{len(rows):5} pairs: pulls above their linear program {sum(row.above_pulled for row in rows)}; "
        f"{len(relays)} relays to the one that forwards, in whole elements, at most {max(relays, default=1.0):.3f}; "
        f"plans "
        f"{', '.join(texts)}; to pulls at most {max(pulls):.3f}, above 1 in {sum(x > 1 for x in pulls)}"
    )


def main(pairs: int, devices: int) -> None:
    """Prints a row for every hundred pairs, and the pairs that are furthest off."""
    rows: list[Figures] = []
    for seed in range(pairs):
        rows.append(figures(seed, devices))
        if (seed + 1) % 100 == 0 or seed + 1 == pairs:
            print(summary(rows), flush=True)
    for what, ratios in (
        ("the optimum in whole elements", [(row.to_whole, row.seed) for row in rows]),
        ("pulls", [(row.to_pull, row.seed) for row in rows]),
    ):
        print(f"furthest above {what}:", [(round(ratio, 3), seed) for ratio, seed in sorted(ratios)[-10:]])


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*given, *(2000, 48)[len(given) :])
