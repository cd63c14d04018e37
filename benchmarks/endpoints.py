"""What the busiest device of a move to other devices sends or receives, beside linear programs.

    python -m benchmarks.endpoints [PAIRS [DEVICES]]

Takes seeded random pairs of layouts on two sets of 1 to DEVICES devices, 2,000 pairs and 48 by default, disjoint or
overlapping, of arrays of rank 2. Prints, every hundred pairs, how often an exchange alone (a pull) loads its busiest
device with more whole elements than the optimum of a linear program in which only holders send; and the largest ratios
of the chosen plan's to the optimum of one in which devices may pass on what they receive, and to the pull's.
"""

from __future__ import annotations

import math
import random
import sys

import reshard as rs
from reshard.types.plan import StepSpec, chain
from tests.endpoint_lp import forwarded, pulled
from tests.layouts import random_crossing, random_layout

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


def main(pairs: int, devices: int) -> None:
    """Prints a row for every hundred pairs, and the pairs that are furthest off."""
    above = 0
    forwards: list[tuple[float, int]] = []
    pulls: list[tuple[float, int]] = []
    for seed in range(pairs):
        source, target = pair(seed, devices)
        pull, chosen = chain(source, target, [StepSpec("exchange", target)]), rs.plan(source, target)
        above += busiest(pull) > math.ceil(pulled(source, target) - 1e-6)
        forwards.append((busiest(chosen) / max(forwarded(source, target), 1), seed))
        pulls.append((busiest(chosen) / max(busiest(pull), 1), seed))
        if (seed + 1) % 100 == 0 or seed + 1 == pairs:
            further = sum(ratio > 1.1 for ratio, _ in forwards)
            print(
                f"{seed + 1:5} pairs: pulls above their linear program {above}; plans to the one that forwards at most "
                f"{max(forwards)[0]:.3f}, above 1.1 in {further}; plans to pulls at most {max(pulls)[0]:.3f}, above 1 "
                f"in {sum(ratio > 1 for ratio, _ in pulls)}",
                flush=True,
            )
    print("furthest from the one that forwards:", [(round(r, 3), seed) for r, seed in sorted(forwards)[-10:]])
    print("furthest above pulls:", [(round(r, 3), seed) for r, seed in sorted(pulls)[-5:]])


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*given, *(2000, 48)[len(given) :])
