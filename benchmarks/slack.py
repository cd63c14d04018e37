"""Launches of plans between uneven layouts, with the planner's default slack and with none.

    python -m benchmarks.slack [PAIRS]

Takes seeded random pairs of contiguous layouts per mesh, 100 by default, of arrays of rank 1 or 2 with sizes that
pieces seldom divide. Prints mean, median and maximum of the launches, and the bytes beside the fewest.
"""

from __future__ import annotations

import random
import statistics
import sys

import reshard as rs
from tests.layouts import contiguous_layouts

MESHES = {
    "8x8": {"x": 8, "y": 8},
    "7x9": {"x": 7, "y": 9},
    "61": {"x": 61},
    "12x12": {"x": 12, "y": 12},
    "8x8x8": {"x": 8, "y": 8, "z": 8},
    "64x32": {"x": 64, "y": 32},
}
SIZES = (513, 997, 1000, 1021, 2049, 5003, 12289, 50257)


def pairs(name: str, count: int) -> list[tuple[rs.Layout, rs.Layout]]:
    """`count` random pairs of different layouts on a mesh, at least one of them uneven."""
    choose, mesh = random.Random(name), rs.Mesh(MESHES[name])
    sample: list[tuple[rs.Layout, rs.Layout]] = []
    while len(sample) < count:
        shape = tuple(choose.choice(SIZES) for _ in range(choose.randint(1, 2)))
        every = list(contiguous_layouts(mesh, shape))
        source, target = choose.choice(every), choose.choice(every)
        if source != target and not (source.even and target.even):
            sample.append((source, target))
    return sample


def main(count: int) -> None:
    """Prints a row per mesh and slack."""
    for name in MESHES:
        sample = pairs(name, count)
        fewest = [rs.plan(source, target, slack=0).received_bytes for source, target in sample]
        for slack in (0, 0.05):
            plans = [rs.plan(source, target, slack=slack) for source, target in sample]
            launches = [plan.launches for plan in plans]
            more = [plan.received_bytes / least for plan, least in zip(plans, fewest, strict=True) if least]
            mean, median, above = statistics.mean(launches), statistics.median(launches), sum(n > 8 for n in launches)
            print(
                f"{name:6} slack {slack:4}: launches mean {mean:6.1f}, median {median:4.1f}, most {max(launches):4}, "
                f"above 8 in {above}; bytes mean {statistics.mean(more):.4f}, most {max(more):.4f}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
