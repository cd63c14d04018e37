"""What wires and idle axes change: the plans of pairs, priced as if every axis were a switch, and on wires.

    python benchmarks/networks.py              # the table of docs/networks.md

For each mesh and preset, seeded pairs of layouts of contiguous tiles are planned twice: as before, on switches of the
same bandwidth and without idle axes, and as now. Both plans are priced on the wires. `changed` counts the pairs whose
steps differ; `old says` is the old prediction over what the old plan takes on wires; `gain` is the old plan's time over
that of the new one. Means are geometric, over pairs that move at all.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reshard.plans.plan import StepSpec
from reshard.synth import Link, Network, cost, plan
from reshard.synth.network import Links
from reshard.synth.routes import Pair, list_routes
from reshard.types import Layout, Mesh
from tests.layouts import sample_pairs

CASES = (
    ("tpu-v5p", "x=8,y=8"),
    ("tpu-v5p", "x=4,y=4,z=4"),
    ("tpu-v5p", "dcn=2,x=8,y=8"),
    ("tpu-v5e", "x=16,y=16"),
    ("h100", "dp=8,tp=8"),
    ("h100", "pp=2,dp=4,tp=8"),
)
"""Presets and meshes."""

SIZE = 1 << 9
"""Elements that a device holds along every dim when all axes cut it."""


class Row(NamedTuple):
    """What changed for the pairs of a mesh."""

    what: str
    pairs: int
    changed: int
    idle: int
    old_says: float
    gain: float
    best: float


def row(preset: str, mesh: Mesh, count: int) -> Row:
    """The figures of seeded pairs of layouts on a mesh."""
    network = Network.preset(preset)
    wires = network.links(mesh)
    flat = {axis: Link(link.latency, link.bandwidth) for axis, link in wires.items()}
    changed = idle = 0
    says: list[float] = []
    gains: list[float] = []
    for source, target in pairs(mesh, count):
        old = _fastest(source, target, flat)
        new = plan(source, target, network=network)
        taken, said = (cost.route_seconds(old, source, links, {}) for links in (wires, flat))
        if not taken:
            continue
        changed += tuple(old) != tuple(step.spec for step in new.steps)
        idle += bool(new.idle_axes)
        says.append(said / taken)
        gains.append(taken / (new.seconds or taken))
    return Row(f"{preset} on {mesh}", len(gains), changed, idle, _mean(says), _mean(gains), max(gains, default=1.0))


def pairs(mesh: Mesh, count: int) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts of large arrays, ranks 1 and 2."""
    small = [pair for rank in (1, 2) for pair in sample_pairs(mesh, rank, count, rank)]
    return [(_enlarged(source), _enlarged(target)) for source, target in small]


def _enlarged(layout: Layout) -> Layout:
    shape = tuple(size * SIZE for size in layout.shape)
    return Layout.tiled(layout.mesh, shape, "bfloat16", [[a for _, a in dim.digits if a] for dim in layout.dims])


def _fastest(source: Layout, target: Layout, links: Links) -> Sequence[StepSpec]:
    """The route that was chosen before: every axis a switch, and no idle ones."""
    pair = Pair(source, target)
    return cost.keep_fastest(list_routes(pair, links), source, links)[0]


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| network, mesh | pairs | changed | over idle axes | old says | gain, mean | gain, most |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| {r.what} | {r.pairs} | {r.changed} | {r.idle} | {r.old_says:.2f} | {r.gain:.2f} | {r.best:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of each rank and mesh (default 20)")
    options = parser.parse_args()
    print(table([row(preset, Mesh.parse(mesh), options.pairs) for preset, mesh in CASES]))


if __name__ == "__main__":
    main()
