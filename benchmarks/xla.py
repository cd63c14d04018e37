"""Time against XLA's own partitioner, on 8 virtual CPU devices: the same moves by `jax.jit` and by `redistribute`.

    python benchmarks/xla.py                          # 100 random pairs on 4x2, by a seed that is printed
    python benchmarks/xla.py --mesh 2x2x2 --mesh 8 --pairs 20 --seed 3
    python benchmarks/xla.py --network shm-mpi        # and the plans for a network
    python benchmarks/xla.py --pass                   # and `reshard.jax.jit` of the identity
    python benchmarks/xla.py --json

Every pair is a float32 array of rank 2 or 3 whose dims are powers of two, one of them times three in half of the pairs,
and whose tiles have 4 to 16 MiB on both sides. All ways to move all pairs are
compiled first. Then come sweeps: in each, all pairs in a random order, the ways of a pair in turns. So no pair is timed
more often than another, or in a busier moment only. A ratio is XLA's least time over ours, above 1 where ours is
faster; one of the time on the wall, and one of the CPU time of all threads, which other programs disturb less. The way
"again" is XLA's own program once more: its ratios are what the machine's noise does to equal programs. A pair counts as
below a ratio where both times say so. XLA "rebuilds" where it gathers a larger array than either tile (after
"Involuntary full rematerialization" it does).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if "device_count" not in os.environ.get("XLA_FLAGS", ""):  # XLA reads it once, when jax makes its devices
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

import reshard.jax as rj
from benchmarks.against_shardy import named
from reshard import hlo
from reshard.jax.request import ReshardRequest, plan_request
from reshard.synth.network import Network
from reshard.synth.options import PlanOptions
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import contiguous_layouts

TILES = (4 << 20, 16 << 20)
RANKS = (2, 3)
TARGETS = {"rebuilt": 2.0, "least": 0.95}
"""What the geometric mean over the pairs that XLA rebuilds, and the least ratio of all, should reach."""

Pair = tuple[Layout, Layout]
XLA, CONTROL = "xla", "again"


class Seconds(NamedTuple):
    """Seconds of one run, or the least of several: on the wall, and of all threads."""

    wall: float
    cpu: float

    def least(self, other: Seconds) -> Seconds:
        """The smaller of each."""
        return Seconds(min(self.wall, other.wall), min(self.cpu, other.cpu))


@dataclass(frozen=True)
class Row:
    """One pair: how long each way takes at least, what the plan is, and XLA's collectives."""

    mesh: str
    source: str
    target: str
    seconds: dict[str, Seconds]
    steps: tuple[str, ...]
    launches: int
    xla: tuple[str, ...]
    rebuilt: bool

    def ratio(self, way: str) -> float:
        """XLA's time over that of another way."""
        return self.seconds[XLA].wall / self.seconds[way].wall

    def cpu_ratio(self, way: str) -> float:
        """XLA's CPU time over that of another way."""
        return self.seconds[XLA].cpu / self.seconds[way].cpu

    @property
    def ways(self) -> list[str]:
        """The ways but XLA's own."""
        return [way for way in self.seconds if way != XLA]


# ---- the pairs -------------------------------------------------------------------------------------


def pairs(mesh: Mesh, count: int, seed: int, tiles: tuple[int, int] = TILES) -> list[Pair]:
    """Random pairs of different contiguous layouts whose tiles both have so many bytes; the same for the same seed."""
    choose = random.Random(seed)
    chosen: dict[Pair, None] = {}
    while len(chosen) < count:
        pair = _pair(choose, mesh, tiles)
        if pair is not None:
            chosen[pair] = None
    return list(chosen)


def _pair(choose: random.Random, mesh: Mesh, tiles: tuple[int, int]) -> Pair | None:
    """Two layouts of an array, None if a tile is too small or large."""
    whole = choose.choice(range(tiles[0].bit_length() - 1, (tiles[1] * mesh.size).bit_length()))
    shape = draw_shape(choose, whole - 2)
    source, target = choose.sample(_layouts(mesh, shape), 2)
    fits = all(layout.even and tiles[0] <= layout.tile_bytes <= tiles[1] for layout in (source, target))
    return (source, target) if fits else None


def _layouts(mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    return list(contiguous_layouts(mesh, shape))


def draw_shape(choose: random.Random, exponent: int) -> tuple[int, ...]:
    """2^exponent elements, or three quarters of that, in dims that differ by at most a factor of six."""
    rank = choose.choice(RANKS)
    parts = [exponent // rank] * rank
    for _ in range(exponent % rank):
        parts[choose.randrange(rank)] += 1
    up, down = choose.randrange(rank), choose.randrange(rank)
    parts[up] += 1
    parts[down] -= 1
    three = choose.randrange(2 * rank)
    return tuple((1 << part) * 3 // 4 if at == three and part > 1 else 1 << part for at, part in enumerate(parts))


# ---- the measurement -------------------------------------------------------------------------------

Run = Callable[[jax.Array], Any]


class Timing:
    """All ways to move a pair, compiled, and how long they took so far."""

    def __init__(
        self, pair: Pair, jax_mesh: jax.sharding.Mesh, network: str | None = None, with_pass: bool = False
    ) -> None:
        self.pair = pair
        source, target = pair
        self.before, after = source.to_jax(jax_mesh), target.to_jax(jax_mesh)
        argument = jax.ShapeDtypeStruct(source.shape, source.dtype, sharding=self.before)
        self.ways = {name: jax.jit(f).lower(argument).compile() for name, f in _ways(self.before, after, network)}
        if with_pass:
            self.ways["pass"] = rj.jit(lambda v: v, out_shardings=after).lower(argument).compile()
        for name in (CONTROL, XLA):
            self.ways[name] = jax.jit(lambda v: v, out_shardings=after).lower(argument).compile()
        self.plan = plan_request(
            ReshardRequest(after, self.before, PlanOptions.read(network=network)), source.shape, source.dtype
        )
        self.least = dict.fromkeys(self.ways, Seconds(math.inf, math.inf))

    def sweep(self, repeat: int) -> None:
        """Runs each way so often more, in turns on one array."""
        source, _ = self.pair
        whole = np.arange(math.prod(source.shape), dtype=source.dtype).reshape(source.shape)
        times = in_turns(self.ways, jax.device_put(whole, self.before), repeat)
        self.least = {way: reduce(Seconds.least, times[way], least) for way, least in self.least.items()}

    @property
    def row(self) -> Row:
        """What was measured."""
        source, target = self.pair
        done = hlo.collectives(hlo.parse(self.ways[XLA].as_text()))
        return Row(
            str(source.mesh),
            str(source),
            str(target),
            self.least,
            tuple(step.kind for step in self.plan.steps),
            self.plan.launches,
            tuple(one.kind for one in done),
            rebuilds(done, self.pair),
        )


def _ways(before: NamedSharding, after: NamedSharding, network: str | None) -> Iterator[tuple[str, Run]]:
    yield "default", lambda v: rj.redistribute(v, after, source=before)
    if network is not None:
        yield "network", lambda v: rj.redistribute(v, after, source=before, network=network)


def in_turns(ways: Mapping[str, Run], array: jax.Array, repeat: int) -> dict[str, list[Seconds]]:
    """How long so many runs of each way take, after one that is not counted; who is first changes in every round."""
    times: dict[str, list[Seconds]] = {way: [] for way in ways}
    order = list(ways)
    for turn in range(repeat + 1):
        for way in (*order[turn % len(order) :], *order[: turn % len(order)]):
            start, before = time.perf_counter(), time.process_time()
            jax.block_until_ready(ways[way](array))
            if turn:
                times[way].append(Seconds(time.perf_counter() - start, time.process_time() - before))
    return times


def rebuilds(done: Sequence[hlo.Collective], pair: Pair) -> bool:
    """Whether some gather makes an array that is larger than both tiles."""
    most = max(layout.tile_bytes for layout in pair)
    return any(one.kind == "all_gather" and sum(a.nbytes for a in one.results) > most for one in done)


# ---- on the screen ---------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Per way: geometric means of the ratios over all pairs and over those that XLA rebuilds, and the least."""
    by_way: dict[str, dict[str, float]] = {}
    for way in rows[0].ways if rows else ():
        ratios, of_cpu = [row.ratio(way) for row in rows], [row.cpu_ratio(way) for row in rows]
        rebuilt = [row.ratio(way) for row in rows if row.rebuilt]
        by_way[way] = {
            "pairs": len(ratios),
            "geomean": geometric_mean(ratios),
            "rebuilt pairs": len(rebuilt),
            "rebuilt geomean": geometric_mean(rebuilt) if rebuilt else math.nan,
            "least": min(ratios),
            "least of CPU time": min(of_cpu),
            f"below {TARGETS['least']}": sum(max(both) < TARGETS["least"] for both in zip(ratios, of_cpu, strict=True)),
        }
    return by_way


def table(rows: Sequence[Row]) -> Table:
    """A line for each pair, the slowest against XLA first."""
    shown = Table(title="milliseconds, and XLA's over each (above 1: faster than XLA)")
    shown.add_column("from, to")
    ways = rows[0].ways
    for name in ("XLA", *(column for way in ways for column in (way, "ratio", "CPU"))):
        shown.add_column(name, justify="right")
    shown.add_column("plan, and XLA's collectives")
    for row in sorted(rows, key=lambda row: row.ratio(ways[0])):
        cells = [f"{row.seconds[XLA].wall * 1e3:.1f}"]
        for way in ways:
            cells += [f"{row.seconds[way].wall * 1e3:.1f}", f"{row.ratio(way):.2f}", f"{row.cpu_ratio(way):.2f}"]
        ours = f"{' '.join(row.steps)} ({row.launches})"
        theirs = f"{' '.join(row.xla) or 'none'}{', rebuilt' if row.rebuilt else ''}"
        shown.add_row(f"{row.source}\n{row.target} {row.mesh}", *cells, f"{ours}\n{theirs}")
    return shown


def summary_table(by_way: dict[str, dict[str, float]]) -> Table:
    """A line for each way."""
    shown = Table(title="XLA's time over ours")
    shown.add_column("way")
    for name in next(iter(by_way.values()), {}):
        shown.add_column(name, justify="right")
    for way, figures in by_way.items():
        shown.add_row(way, *(f"{f:.2f}" if isinstance(f, float) else str(f) for f in figures.values()))
    return shown


def timings(
    meshes: Sequence[str], count: int, seed: int, network: str | None, with_pass: bool = False
) -> Iterator[Timing]:
    """The pairs of all meshes, compiled one by one."""
    for name in meshes:
        mesh = named(name)
        jax_mesh = jax.sharding.Mesh(
            np.array(jax.devices()[: mesh.size]).reshape(tuple(mesh.axes.values())), tuple(mesh.axes)
        )
        for pair in pairs(mesh, count, seed):
            yield Timing(pair, jax_mesh, network, with_pass)


def run(every: Sequence[Timing], sweeps: int, repeat: int, seed: int) -> list[Row]:
    """The rows of all pairs after so many sweeps, each in another order."""
    order = random.Random(seed)
    for _ in range(sweeps):
        for timing in order.sample(every, len(every)):
            timing.sweep(repeat)
    return [timing.row for timing in every]


def main(arguments: list[str] | None = None) -> int:
    """Prints the comparison; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help="axis sizes, 8 devices in all, e.g. 2x2x2; repeatable")
    parser.add_argument("--pairs", type=int, default=100, help="random pairs on each mesh")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--sweeps", type=int, default=5, help="times that every pair's turn comes, in a random order")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each way in a turn, after the first")
    parser.add_argument("--network", help="also measure the plans for this network: a preset, or a JSON file")
    parser.add_argument("--pass", action="store_true", dest="with_pass", help="also measure reshard.jax.jit")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args(arguments)
    if options.network:
        Network.load(options.network)
    every = list(timings(options.mesh or ["4x2"], options.pairs, options.seed, options.network, options.with_pass))
    rows = run(every, options.sweeps, options.repeat, options.seed)
    by_way = summary(rows)
    if options.json:
        print(
            json.dumps(
                {
                    "jax": jax.__version__,
                    "seed": options.seed,
                    "summary": by_way,
                    "rows": [asdict(row) for row in rows],
                },
                indent=2,
            )
        )
    else:
        console = Console(highlight=False)
        console.print(table(rows), summary_table(by_way), f"seed {options.seed}")
    ours = by_way["default"]
    return int(ours[f"below {TARGETS['least']}"] > 0 or ours["rebuilt geomean"] < TARGETS["rebuilt"])


if __name__ == "__main__":
    sys.exit(main())
