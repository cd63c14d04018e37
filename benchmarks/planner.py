"""How long planning takes: cold, on a network, on 2^20 devices, of trees of weights, and repeated.

    python benchmarks/planner.py              # the tables (make bench)
    python benchmarks/planner.py --profile    # and where the time goes
    python benchmarks/planner.py --json
    python benchmarks/planner.py --against main~5   # ratios to another commit (make bench AGAINST=main~5)

Cold means that nothing is remembered: before every plan all caches of `reshard` are emptied, and the
layouts are made anew. A pair's time is the median of a few runs; a row's columns are over its pairs.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import planner_against
from reshard.errors import ReshardError
from reshard.plans.plan import TreePlan
from reshard.synth.network import Network
from reshard.synth.planner import plan, plan_tree
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.move import Move
from tests.layouts import sample_pairs

MESHES = ("2x4", "4x4x4", "8x8x8", "16x16x2", "512", "3x5", "8x10")
RANKS = (1, 2, 3, 4)
HUGE = Mesh(dcn=64, x=16, y=32, z=32)
NETWORK = "tpu-v5p"
DEVICE_SETS = (
    ("even, 1,024 to 512 others", "f32[{fsdp}8, 1024]", "fsdp=1024", "f32[8192, {tp}128]", "tp=8,rep=64@1024"),
    ("even, 1,024 to 512 of these", "f32[{x}8, 1024]", "x=1024", "f32[{d}16, 1024]", "d=512"),
    ("uneven, 128 to 120, overlapping", "f32[{x}10/1275]", "x=128", "f32[1275]", "d=120@64"),
    ("uneven, 64 to 128, overlapping", "f32[{x}80/1275, {y}9/33]", "x=16,y=4", "f32[{e}160/1275, 33]", "d=16,e=8@20"),
    (
        "uneven, 8 copies, 4,096 to 2,048 of these",
        "f32[{x}8/4091, 4093]",
        "x=512,r=8",
        "f32[4091, {y}2/4093]",
        "y=2048",
    ),
    ("uneven, 100,000 to 50,000 others", "f32[{x}3/299990]", "x=100000", "f32[{d}6/299990]", "d=50000@100000"),
    ("uneven, 100,000 to 50,000 of these", "f32[{x}3/299990]", "x=100000", "f32[{d}6/299990]", "d=50000"),
)
TARGETS = {
    "even": 1e-3,
    "2^20 devices, even": 20e-3,
    "trees": 1.0,
    "trees, read": 1.0,
    "trees, 4,096 devices": 5.0,
    "repeated": 20e-6,
}
"""Seconds that the median of a row of this kind (the maximum on 2^20 devices) stays below."""

Pair = tuple[Layout, Layout]
Tree = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Planning times over some pairs, in seconds; `late` pairs took longer than the limit."""

    kind: str
    what: str
    pairs: int
    median: float
    p90: float
    most: float
    late: int = 0
    failed: int = 0

    @classmethod
    def of(cls, kind: str, what: str, times: Sequence[float], late: int = 0, failed: int = 0) -> Row:
        """The row of these times; late pairs count in `late` only."""
        if not times:
            return cls(kind, what, late + failed, 0.0, 0.0, 0.0, late, failed)
        p90 = quantiles(times, n=10)[-1] if len(times) > 1 else times[0]
        return cls(
            kind, what, len(times) + late + failed, median(times), min(p90, max(times)), max(times), late, failed
        )

    @property
    def judged(self) -> float:
        """The figure that has a target: the maximum on 2^20 devices, else the median."""
        return self.most if "2^20" in self.kind else self.median


class _Late(Exception):
    """A plan took longer than the limit."""


def clear_caches() -> int:
    """Empties every `functools` cache of the package, of its modules and classes; returns how many."""
    caches: dict[int, Callable[[], None]] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "reshard":
            continue
        for value in list(vars(module).values()):
            owners = [value, *vars(value).values()] if isinstance(value, type) else [value]
            for owner in owners:
                owner = getattr(owner, "__func__", owner)
                if hasattr(owner, "cache_clear") and hasattr(owner, "cache_info"):
                    caches[id(owner)] = owner.cache_clear
    for clear in caches.values():
        clear()
    return len(caches)


def fresh(pair: Pair) -> Pair:
    """Equal layouts that have computed nothing yet, on meshes that have not either."""
    meshes = {mesh: Mesh(dict(mesh.axes), device_ids=mesh.device_ids) for mesh in (p.mesh for p in pair)}
    source, target = (Layout(meshes[p.mesh], p.dims, p.dtype, p.reduction, p.partial) for p in pair)
    return source, target


def cold(pair: Pair, network: Network | None, runs: int, limit: float) -> float:
    """The median seconds of some cold plans of a pair."""
    times: list[float] = []
    for _ in range(runs):
        source, target = fresh(pair)
        clear_caches()
        with_limit = _Alarm(limit)
        start = time.perf_counter()
        with with_limit:
            plan(source, target, network=network)
        times.append(time.perf_counter() - start)
    return median(times)


class _Alarm:
    """Raises `_Late` in the block after some seconds, where the platform can."""

    def __init__(self, limit: float) -> None:
        self.limit = limit if hasattr(signal, "setitimer") else 0.0

    def __enter__(self) -> None:
        if self.limit:
            signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, self.limit)

    def __exit__(self, *_: object) -> None:
        if self.limit:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, _signal: int, _frame: FrameType | None) -> None:
        raise _Late


def measured(
    kind: str, what: str, pairs: Sequence[Pair], network: Network | None = None, runs: int = 3, limit: float = 10.0
) -> Row:
    """Cold planning times of these pairs."""
    times: list[float] = []
    late = failed = 0
    for pair in pairs:
        try:
            times.append(cold(pair, network, runs, limit))
        except _Late:
            late += 1
        except ReshardError as error:
            failed += 1
            if failed == 1:
                print(f"{what}: {pair[0]} -> {pair[1]}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return Row.of(kind, what, times, late, failed)


def repeated(pairs: Sequence[Pair], network: Network | None, calls: int = 2000) -> Iterator[Row]:
    """Plans that are in the cache: of the very layouts, and of equal ones made anew."""
    same, equal = list[float](), list[float]()
    for pair in pairs:
        plan(*pair, network=network)
        start = time.perf_counter()
        for _ in range(calls):
            plan(*pair, network=network)
        same.append((time.perf_counter() - start) / calls)
        others = [fresh(pair) for _ in range(20)]
        start = time.perf_counter()
        for source, target in others:
            plan(source, target, network=network)
        equal.append((time.perf_counter() - start) / len(others))
    on = "no network" if network is None else network.name
    yield Row.of("repeated", f"the same layouts, {on}", same)
    yield Row.of("repeated", f"equal layouts, {on}", equal)


def uneven(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """The same shardings of arrays whose sizes they do not divide."""
    choose = random.Random(seed)
    reshaped: list[Pair] = []
    for source, target in pairs:
        shape = [choose.randint(size, 4 * size) | 1 for size in source.shape]
        reshaped.append((_reshaped(source, shape), _reshaped(target, shape)))
    return reshaped


def _reshaped(layout: Layout, shape: Sequence[int]) -> Layout:
    axes = [[d.axis for d in dim.digits if d.axis is not None] for dim in layout.dims]
    return Layout.tiled(layout.mesh, shape, layout.dtype, axes, layout.partial, layout.reduction)


def named(sizes: str) -> Mesh:
    """A mesh from `2x4`: axes x, y, ..."""
    return Mesh(zip("xyzwuv", map(int, sizes.split("x")), strict=False))


def sampled(mesh: Mesh, count: int, seed: int) -> list[Pair]:
    """Pairs of contiguous layouts of every rank, as many of each."""
    return [pair for rank in RANKS for pair in sample_pairs(mesh, rank, count, seed)]


def rows(count: int, seed: int, runs: int, limit: float) -> Iterator[Row]:
    """Everything that is measured; `count` pairs a mesh and rank, a fifth of them where it is slower."""
    network, few = Network.load(NETWORK), max(1, count // 5)
    for sizes in MESHES:
        mesh = named(sizes)
        yield measured("even", f"{mesh}, ranks 1-4", sampled(mesh, count, seed), None, runs, limit)
    for sizes in MESHES:
        mesh = named(sizes)
        yield measured(f"even, {NETWORK}", f"{mesh}, ranks 1-4", sampled(mesh, few, seed), network, runs, limit)
    for sizes in MESHES:
        mesh = named(sizes)
        pairs = uneven(sampled(mesh, few, seed), seed)
        yield measured("uneven", f"{mesh}, ranks 1-4", pairs, None, runs, limit)
    huge = sampled(HUGE, few, seed)
    yield measured("2^20 devices, even", str(HUGE), huge, None, runs, limit)
    yield measured(f"2^20 devices, even, {NETWORK}", str(HUGE), huge, network, runs, limit)
    yield measured("2^20 devices, uneven", str(HUGE), uneven(huge[::2], seed), None, 1, limit)
    for what, source, near, target, far in DEVICE_SETS:
        two = Layout.parse(source, Mesh.parse(near)), Layout.parse(target, Mesh.parse(far))
        yield measured("two device sets", what, [two], None, runs, limit)
    yield from tree_rows(runs)
    for net in (None, network):
        yield from repeated([p for sizes in MESHES for p in sample_pairs(named(sizes), 3, few, seed)], net)


# Trees of weights: rows over the trainer's fsdp and columns over its t, or the other way round, to a server's tp.


def tile(mesh: Mesh, shape: Sequence[int], *axes: Sequence[str], dtype: str = "bfloat16") -> Layout:
    """The layout of an array whose dims are split over these axes."""
    held = [[mesh.sub_axis(name) for name in dim] for dim in (*axes, *[()] * (len(shape) - len(axes)))]
    return Layout.tiled(mesh, shape, dtype, held)


def llama_moves(trainer: Mesh, server: Mesh, layers: int = 80) -> Tree:
    """The weights of a Llama-70B: 9 arrays a layer, the embedding, the head and the last norm."""
    h, ffn, kv, vocab = 8192, 28672, 1024, 128256
    across, along = ((("t",), ("fsdp",)), (("fsdp",), ("t",))) if "t" in trainer.axes else ((("fsdp",),), (("fsdp",),))

    def columns(size: int) -> Pair:
        return tile(trainer, (size, h), *across), tile(server, (size, h), ("tp",))

    def rows(size: int) -> Pair:
        return tile(trainer, (h, size), *along), tile(server, (h, size), (), ("tp",))

    norm = tile(trainer, (h,), ("fsdp",)), tile(server, (h,))
    layer = {"q": columns(h), "k": columns(kv), "v": columns(kv), "o": rows(h), "gate": columns(ffn)}
    layer |= {"up": columns(ffn), "down": rows(ffn), "norm1": norm, "norm2": norm}
    return {"embed": columns(vocab), "head": columns(vocab), "norm": norm, "layers": [layer] * layers}


def deepseek_moves(trainer: Mesh, server: Mesh) -> Tree:
    """The weights of DeepSeek-V3: 3 dense layers, 58 whose 256 experts are stacked, over all devices of the server."""
    h, moe, ffn, vocab, experts = 7168, 2048, 18432, 129280, 256

    def columns(size: int, of: int = h) -> Pair:
        return tile(trainer, (size, of), ("t",), ("fsdp",)), tile(server, (size, of), ("tp",))

    def rows(size: int) -> Pair:
        return tile(trainer, (h, size), ("fsdp",), ("t",)), tile(server, (h, size), (), ("tp",))

    def whole(*shape: int) -> Pair:
        return tile(trainer, shape, ("fsdp",)), tile(server, shape)

    def stacked(*shape: int) -> Pair:
        near = tile(trainer, (experts, *shape), ("t",), ("fsdp",))
        return near, tile(server, (experts, *shape), tuple(server.axes))

    attention = {"q_a": whole(1536, h), "q_norm": whole(1536), "q_b": columns(128 * 192, 1536), "kv_a": whole(576, h)}
    attention |= {"kv_norm": whole(512), "kv_b": columns(128 * 256, 512), "o": rows(128 * 128)}
    dense = {**attention, "norms": [whole(h)] * 2, "gate": columns(ffn), "up": columns(ffn), "down": rows(ffn)}
    sparse = {**attention, "norms": [whole(h)] * 2, "router": whole(experts, h), "bias": whole(experts)}
    sparse |= {"gate": columns(moe), "up": columns(moe), "down": rows(moe)}
    sparse |= {"experts": [stacked(moe, h), stacked(moe, h), stacked(h, moe)]}
    ends = {"embed": columns(vocab), "head": columns(vocab), "norm": whole(h)}
    return {**ends, "layers": [dense] * 3 + [sparse] * 58}


def fused_moves(trainer: Mesh, server: Mesh, layers: int = 80) -> Tree:
    """A Llama-70B in float32, cast, to a server's fused qkv, and from a fused gate and up to a server's two arrays."""
    h, ffn, kv = 8192, 28672, 1024
    across, along = (("t",), ("fsdp",)), (("fsdp",), ("t",))
    qkv, layer = tile(server, (h + 2 * kv, h), ("tp",)), dict[str, Move | Pair]()
    for name, low, high in ("q", 0, h), ("k", h, h + kv), ("v", h + kv, h + 2 * kv):
        near = tile(trainer, (high - low, h), *across, dtype="float32")
        layer[name] = Move(near, qkv, into={0: slice(low, high)}, cast=True)
    fused, one = tile(trainer, (2 * ffn, h), *across), tile(server, (ffn, h), ("tp",))
    for at, name in enumerate(("gate", "up")):
        layer[name] = Move(fused, one, take={0: slice(at * ffn, at * ffn + ffn)})
    near = tile(trainer, (h, h), *along, dtype="float32")
    layer["o"] = Move(near, tile(server, (h, h), (), ("tp",)), cast=True)
    layer["down"] = tile(trainer, (h, ffn), *along), tile(server, (h, ffn), (), ("tp",))
    layer["norm1"] = layer["norm2"] = tile(trainer, (h,), ("fsdp",)), tile(server, (h,))
    return {"layers": [layer] * layers}


def tree_rows(runs: int) -> Iterator[Row]:
    """Trees from a trainer to half as many devices, the last of its own: planned, and read from JSON."""
    for what, moves in (
        ("Llama-70B", llama_moves),
        ("DeepSeek-V3", deepseek_moves),
        ("fused weights, views and casts", fused_moves),
    ):
        for size in (1024, 4096):
            planned, read = list[float](), list[float]()
            for _ in range(runs):
                ids = range(3 * size // 4, 5 * size // 4)
                tree = moves(Mesh(fsdp=size // 8, t=8), Mesh({"rep": size // 16, "tp": 8}, device_ids=ids))
                clear_caches()
                start = time.perf_counter()
                made = plan_tree(tree)
                planned.append(time.perf_counter() - start)
                text = made.to_json()
                clear_caches()
                start = time.perf_counter()
                TreePlan.from_json(text)
                read.append(time.perf_counter() - start)
            kinds = ("trees", "trees, read") if size == 1024 else ("trees, 4,096 devices",) * 2
            yield Row.of(kinds[0], f"{what}, {size:,} to {size // 2:,}", planned)
            yield Row.of(kinds[1], f"{what}, {size:,} to {size // 2:,}, from JSON", read)


def table(rows: Sequence[Row]) -> Table:
    """The rows, with those that miss their target in red."""
    shown = Table(title="planning time", title_justify="left")
    for column in ("kind", "pairs of", "pairs", "median", "p90", "max", "late", "target"):
        shown.add_column(column, justify="left" if column in ("kind", "pairs of") else "right")
    before = ""
    for row in rows:
        target = TARGETS.get(row.kind)
        missed = target is not None and row.judged >= target
        cells = [_seconds(row.median), _seconds(row.p90), _seconds(row.most)]
        at = 2 if "2^20" in row.kind else 0
        cells[at] = f"[red]{cells[at]}[/red]" if missed else cells[at]
        if row.kind != before and before:
            shown.add_section()
        name = row.kind if row.kind != before else ""
        counts = f"{row.late or '-'}" + (f", {row.failed} failed" if row.failed else "")
        goal = "" if target is None else f"{'max' if at else 'median'} < {_seconds(target)}"
        shown.add_row(name, row.what, str(row.pairs), *cells, counts, goal)
        before = row.kind
    return shown


def _seconds(value: float) -> str:
    """Seconds as a person reads them.

    >>> _seconds(1.5e-5), _seconds(2.5e-3), _seconds(3.0)
    ('15.0 us', '2.50 ms', '3.00 s')
    """
    if value < 1e-3:
        return f"{value * 1e6:.1f} us"
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"


def profile(pairs: Sequence[Pair], network: Network | None, lines: int) -> str:
    """cProfile's hottest functions over cold plans of these pairs, by their own time."""
    profiler = cProfile.Profile()
    for pair in pairs:
        source, target = fresh(pair)
        clear_caches()
        profiler.enable()
        plan(source, target, network=network)
        profiler.disable()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).strip_dirs().sort_stats("tottime").print_stats(lines)
    return "\n".join(line for line in out.getvalue().splitlines() if line.strip())


def _against(given: argparse.Namespace) -> Table:
    options = ("pairs", "runs", "seed", "limit")
    arguments = [f"--{name}={getattr(given, name)}" for name in options]
    ratios = planner_against.measure_against(given.against, given.rounds, arguments)
    return planner_against.table(given.against, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs per mesh and rank")
    parser.add_argument("--runs", type=int, default=3, help="runs per pair, of which the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds after which a plan counts as late")
    parser.add_argument("--json", action="store_true", help="one JSON array of rows, times in seconds")
    parser.add_argument("--profile", action="store_true", help="the hottest functions as well")
    parser.add_argument("--against", metavar="COMMIT", help="run this tree and that commit in turns, and show ratios")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each of the two, with --against")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    if given.against is not None:
        console.print(_against(given))
        return
    measurements = list(rows(given.pairs, given.seed, given.runs, given.limit))
    if given.json:
        print(json.dumps([asdict(row) for row in measurements], indent=2))
    else:
        shown = table(measurements)
        if not sys.stdout.isatty():  # For a record: a table in Markdown has no sections.
            shown.box, shown.title = box.MARKDOWN, None
            for each in shown.rows:
                each.end_section = False
        console.print(shown)
    if given.profile:
        every = [pair for sizes in MESHES for pair in sampled(named(sizes), 10, given.seed)]
        for title, pairs, network in (
            ("no network", every, None),
            (NETWORK, every, Network.load(NETWORK)),
            ("uneven, no network", uneven(every[::5], given.seed), None),
        ):
            console.print(f"\n{title}\n{profile(pairs, network, 20)}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
