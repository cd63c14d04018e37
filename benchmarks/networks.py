"""How near predicted seconds are to what wires need, and what wires and idle axes change.

    python benchmarks/networks.py                       # plans over the cut bound, on pairs that a new seed draws
    python benchmarks/networks.py --seed 7 --pairs 50   # the same pairs again
    python benchmarks/networks.py --changes

Pairs of layouts of contiguous tiles, ranks 1 to 3, are drawn by a seed, which is printed. Latencies are 0. The cut
bound knows no plans: sets of devices (planes and boxes of a torus, single devices, domains of a switch, ...) take in
what they lack over the wires into them, and elements take up as many wires as their nearest holder is away
(`tests/synth/wire_bounds.py`). It is found for small arrays; those that are planned have `SCALE` times as many elements
along every dim, in the same tiles.

With `--changes`, pairs are planned twice: as before, on switches of the same bandwidth and without idle axes, and as
now. Both plans are priced on the wires. `changed` counts the pairs whose steps differ; `old says` is the old prediction
over what the old plan takes on wires; `gain` is the old plan's time over that of the new one. Means are geometric, over
pairs that move at all.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reshard.plans.plan import StepSpec
from reshard.synth import Link, Network, cost, plan
from reshard.synth.network import Links
from reshard.synth.routes import Pair, list_routes
from reshard.synth.wires import Torus
from reshard.types import Layout, Mesh
from tests.layouts import sample_pairs
from tests.synth.wire_bounds import Graph, least_seconds

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


SCALE = 1 << 6
"""Elements along every dim of arrays that are planned, for one of those whose elements are counted."""


class Fabric(NamedTuple):
    """A mesh on a network, and what it is made of: a torus, and switches (devices of a domain, bytes a second)."""

    mesh: str
    preset: str = ""
    sizes: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    bandwidth: float = 1.0
    switches: tuple[tuple[int, float], ...] = ()


FABRICS = (
    Fabric("x=8,y=8", "tpu-v5p", (4, 4, 4), (True,) * 3, 180e9),
    Fabric("x=4,y=4,z=4", "tpu-v5p", (4, 4, 4), (True,) * 3, 180e9),
    Fabric("x=16,y=4", "tpu-v5p", (4, 4, 4), (True,) * 3, 180e9),
    Fabric("x=2,y=4", "tpu-v5p", (2, 2, 2), (False,) * 3, 180e9),
    Fabric("dcn=2,x=8,y=8", "tpu-v5p", (4, 4, 4), (True,) * 3, 180e9, ((128, 6.25e9),)),
    Fabric("x=4,y=4", "tpu-v5e", (4, 4), (False,) * 2, 90e9),
    Fabric("x=2,y=8", "tpu-v5e", (4, 4), (False,) * 2, 90e9),
    Fabric("x=16,y=16", "tpu-v5e", (16, 16), (True, True), 90e9),
    Fabric("dp=8,tp=8", "h100", switches=((8, 450e9), (64, 50e9))),
    Fabric("pp=2,dp=4,tp=8", "h100", switches=((8, 450e9), (64, 50e9))),
    Fabric("node=2,x=4,y=2", "h100", switches=((8, 450e9), (16, 50e9))),
    Fabric("x=2,y=8", sizes=(16,), wraps=(True,)),
    Fabric("x=4,y=4", sizes=(16,), wraps=(True,)),
    Fabric("x=2,y=2,z=2", sizes=(8,), wraps=(True,)),
    Fabric("x=2,y=4", sizes=(8,), wraps=(False,)),
    Fabric("x=4,y=4", sizes=(16,), wraps=(False,)),
)
"""Rings and lines of unit bandwidth have no preset."""


class Bounds(NamedTuple):
    """Predicted seconds over the cut bound, pair by pair."""

    what: str
    ratios: tuple[float, ...]
    misses: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        within, below = sum(r <= 1.5 + 1e-9 for r in self.ratios), sum(r < 1 - 1e-6 for r in self.ratios)
        share = f"{within / len(self.ratios):.2f}"
        return (
            self.what,
            str(len(self.ratios)),
            share,
            str(below),
            f"{_mean(self.ratios):.2f}",
            f"{max(self.ratios):.2f}",
        )


def over_bounds(fabric: Fabric, count: int, choose: random.Random) -> Bounds:
    """Plans of random pairs on a fabric over what its wires need."""
    mesh, sizes = Mesh.parse(fabric.mesh), fabric.sizes
    if fabric.preset:
        name, network = fabric.preset, Network.preset(fabric.preset)
        inner, outer = (
            None if link is None else replace(link, latency=0, issue=0) for link in (network.inner, network.outer)
        )
        network = Network(name, inner, outer, network.domain, torus=network.torus)
    else:
        name, torus = "ring" if fabric.wraps[0] else "line", Torus(len(sizes), int(fabric.wraps[0]), shape=sizes)
        network = Network(name, Link(0, fabric.bandwidth), domain=mesh.size, torus=torus)
    graph = Graph(sizes, fabric.wraps, fabric.bandwidth, fabric.switches, mesh.size)
    ranks = (1, 2, 3) if mesh.size <= 16 else (1, 2)
    sampled = [pair for rank in ranks for pair in sample_pairs(mesh, rank, count, choose.randrange(1 << 30))]
    ratios, misses = list[float](), list[str]()
    for pair in choose.sample(sampled, len(sampled)):
        source, target = (_enlarged(layout, 1) for layout in pair)
        least = least_seconds(graph, source, target) * SCALE ** len(source.shape) if len(ratios) < count else 0.0
        if least:
            made = plan(_enlarged(source, SCALE), _enlarged(target, SCALE), network=network)
            ratios.append((made.seconds or 0.0) / least)
            if ratios[-1] > 1.5 + 1e-9:
                misses.append(f"{ratios[-1]:.2f}  {source} -> {target}  {'+'.join(s.kind for s in made.steps)}")
    return Bounds(
        f"{' '.join(filter(None, (name, 'x'.join(map(str, sizes)))))} on {mesh}", tuple(ratios), tuple(misses)
    )


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
    return [(_enlarged(source, SIZE), _enlarged(target, SIZE)) for source, target in small]


def _enlarged(layout: Layout, times: int) -> Layout:
    shape = tuple(size * times for size in layout.shape)
    return Layout.tiled(layout.mesh, shape, "bfloat16", [[a for _, a in dim.digits if a] for dim in layout.dims])


def _fastest(source: Layout, target: Layout, links: Links) -> Sequence[StepSpec]:
    """The route that was chosen before: every axis a switch, and no idle ones."""
    pair = Pair(source, target)
    return cost.keep_fastest(list_routes(pair, links), source, links)[0]


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows as a table in Markdown."""
    lines = (f"| {' | '.join(map(str, line))} |" for line in (head, *rows))
    return "\n".join((next(lines), "|---" * len(head) + "|", *lines))


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help="pairs of each fabric (default 50), or of each rank and mesh (20)")
    parser.add_argument("--seed", type=int, help="of the pairs; a new one unless given")
    parser.add_argument("--only", default="", help="fabrics whose name has this text")
    parser.add_argument("--misses", action="store_true", help="lists the pairs above 1.5")
    parser.add_argument("--changes", action="store_true", help="what wires and idle axes change")
    options = parser.parse_args()
    if options.changes:
        rows = [row(preset, Mesh.parse(mesh), options.pairs or 20) for preset, mesh in CASES]
        head = "network, mesh", "pairs", "changed", "over idle axes", "old says", "gain, mean", "gain, most"
        print(table(head, [(*r[:4], f"{r.old_says:.2f}", f"{r.gain:.2f}", f"{r.best:.1f}") for r in rows]))
        return
    seed = random.SystemRandom().randrange(1 << 20) if options.seed is None else options.seed
    choose = random.Random(seed)
    chosen = [fabric for fabric in FABRICS if options.only in f"{fabric.preset} {fabric.sizes} {fabric.mesh}"]
    found = [over_bounds(fabric, options.pairs or 50, choose) for fabric in chosen]
    for each in found if options.misses else ():
        print("\n".join((each.what, *sorted(each.misses, reverse=True))))
    found.append(Bounds("all", tuple(ratio for each in found for ratio in each.ratios)))
    head = "fabric, mesh", "pairs", "within 1.5", "below", "geomean", "most"
    print(f"seed {seed}\n{table(head, [each.cells for each in found])}")


if __name__ == "__main__":
    main()
