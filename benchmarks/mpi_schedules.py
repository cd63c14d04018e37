"""What schedules take to work out: single ranks of large jobs, without them, and the first call of a real one.

    python benchmarks/mpi_schedules.py                      # 1,024 to 16,384 ranks, in one process
    python benchmarks/mpi_schedules.py floor [SEED]         # 10^7 elements on 4 ranks, at the least budgets
    reshard run -n 4 benchmarks/mpi_schedules.py first      # ScaLAPACK's 2x2 -> 4x1: the first call, and later ones

Times are of processors, the medians of five cold runs for ranks that differ; memory is what is allocated at most.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time

import numpy as np

import reshard as rs
from reshard.types import Layout, Mesh

LINE, GRID, CYCLIC, SMALL = Mesh(x=4096), Mesh(x=64, y=64), Mesh(a=64, b=2, c=32), Mesh(x=1024)
HALF = Mesh({"y": 64, "z": 8}, device_ids=range(1024, 1536))
SUBSET, COPIES, FEWER = Mesh(y=64, z=8), Mesh(x=512, r=8), Mesh(y=2048)
MOST, SQUARE, DEALT = Mesh(x=16384), Mesh(x=128, y=128), Mesh(a=128, b=2, c=64)
APART, HALVED = Mesh({"y": 8192}, device_ids=range(16384, 24576)), Mesh(y=8192)


def ends(mesh: Mesh, before: str, after: str, other: Mesh | None = None) -> tuple[Layout, Layout]:
    return Layout.parse(before, mesh), Layout.parse(after, other or mesh)


SLAB = ends(LINE, "f32[{x}1, 4096, 64]", "f32[4096, {x}1, 64]")
BOXES = ends(GRID, "f32[{x}157/10007, {y}65/4099]", "f32[{x}{y}3/10007, 4099]")
PAIRS: dict[str, tuple[tuple[Layout, Layout], int | None]] = {
    "slab, 1,024 ranks": (ends(SMALL, "f32[{x}1, 1024, 64]", "f32[1024, {x}1, 64]"), None),
    "slab": (SLAB, None),
    "slab, packed": (ends(LINE, "f32[4096, {x}2, 16]", "f32[{x}1, 8192, 16]"), None),
    "slab, cut": (SLAB, 2 * SLAB[0].tile_bytes + (256 << 10)),
    "pencil": (ends(GRID, "f32[{x}64, {y}64, 4096]", "f32[{x}64, 4096, {y}64]"), None),
    "64 x 64 -> 4096 x 1": (ends(GRID, "f32[{x}1024, {y}1024]", "f32[{x}{y}16, 65536]"), None),
    "the same, 10007 x 4099": (BOXES, None),
    "the same, cut": (BOXES, BOXES[0].tile_bytes + BOXES[1].tile_bytes + 256),
    "cyclic 64 -> 96": (
        ends(CYCLIC, "f32[16{a}64/65536, 16{b}{c}64/65536]", "f32[6{a}{b}96/65536, 22{c}96/65536]"),
        None,
    ),
    "1,024 -> 512, rows": (ends(SMALL, "f32[{x}4, 512]", "f32[{y}64, {z}64]", HALF), None),
    "1,024 -> 512, rows to columns": (ends(SMALL, "f32[{x}4, 4096]", "f32[4096, {y}{z}8]", HALF), None),
    "1,024 -> 512, 8 copies": (ends(SMALL, "f32[{x}4, 4096]", "f32[{y}64, 4096]", HALF), None),
    "1,024 -> 512 of them, 8 copies": (ends(SMALL, "f32[{x}4, 4096]", "f32[{y}64, 4096]", SUBSET), None),
    "8 copies, 4,096 -> columns, 2,048 of them": (
        ends(COPIES, "f32[{x}8, 4096]", "f32[4096, {y}2]", FEWER),
        None,
    ),
    "the same, 4091 x 4093": (ends(COPIES, "f32[{x}8/4091, 4093]", "f32[4091, {y}2/4093]", FEWER), None),
    "16,384: slab": (ends(MOST, "f32[{x}1, 16384, 64]", "f32[16384, {x}1, 64]"), None),
    "16,384: smaller slab, joined": (ends(MOST, "f32[{x}1, 16384, 16]", "f32[16384, {x}1, 16]"), None),
    "16,384: slab of prime sizes, joined": (ends(MOST, "f32[{x}2/20011, 16381]", "f32[20011, {x}1/16381]"), None),
    "16,384: pencil": (ends(SQUARE, "f32[{x}32, {y}32, 4096]", "f32[{x}32, 4096, {y}32]"), None),
    "16,384: 128 x 128 -> 16384 x 1": (ends(SQUARE, "f32[{x}1024, {y}1024]", "f32[{x}{y}8, 131072]"), None),
    "16,384: cyclic 64 -> 96": (
        ends(DEALT, "f32[16{a}64/131072, 16{b}{c}64/131072]", "f32[6{a}{b}96/131072, 22{c}96/131072]"),
        None,
    ),
    "16,384 -> 8,192 others, rows": (ends(MOST, "f32[{x}4, 512]", "f32[{y}8, 512]", APART), None),
    "16,384 -> 8,192 others, columns, joined": (ends(MOST, "f32[{x}1, 16384]", "f32[16384, {y}2]", APART), None),
    "16,384 -> 8,192 of them, columns, joined": (ends(MOST, "f32[{x}1, 16384]", "f32[16384, {y}2]", HALVED), None),
    "8 copies on 16,384 -> 8,192 of them, joined": (
        ends(Mesh(x=2048, r=8), "f32[{x}8, 16384]", "f32[16384, {y}2]", HALVED),
        None,
    ),
}


def large() -> None:
    from reshard.mpi import schedule_figures

    print("| move | plan, ms | a rank, ms | MiB | sends | receives |\n|---|---|---|---|---|---|")
    for name, (pair, budget) in PAIRS.items():
        start = time.process_time()
        rs.plan(*pair, budget)
        planned = time.process_time() - start
        size = 1 + max(*pair[0].mesh.devices, *pair[1].mesh.devices)
        some = {0, 1, 321, 700, size - 1}
        runs = [schedule_figures(*pair, rank=rank, nodes=size // 64, budget=budget) for rank in some]
        seconds, nbytes = (statistics.median(getattr(run, of) for run in runs) for of in ("seconds", "bytes"))
        print(
            f"| {name} | {planned * 1e3:.0f} | {seconds * 1e3:.0f} | {nbytes / 2**20:.1f} "
            f"| {max(run.sends for run in runs)} | {max(run.receives for run in runs)} |"
        )


def draw_dim(choose: random.Random, size: int, axes: list[str], mesh: Mesh) -> str:
    """A dim held by some axes: in blocks, even or not, or block-cyclic."""
    if not axes:
        return str(size)
    pieces, held = math.prod(mesh.axes[axis] for axis in axes), "".join(f"{{{axis}}}" for axis in axes)
    if choose.random() < 0.5:
        return f"{held}{-(-size // pieces)}/{size}"
    block = choose.choice([1, 3, 7, 32, 33, 50, 64, 75, 96, 100])
    return f"{-(-size // (pieces * block))}{held}{block}/{size}"


def draw_layout(choose: random.Random, shape: list[int], mesh: Mesh, dtype: str) -> Layout:
    where: list[list[str]] = [[] for _ in shape]
    for axis in choose.sample(list(mesh.axes), len(mesh.axes)):
        choose.choice(where).append(axis)
    dims = [draw_dim(choose, size, axes, mesh) for size, axes in zip(shape, where, strict=True)]
    return Layout.parse(f"{dtype}[{', '.join(dims)}]", mesh)


def floor(seed: int, count: int = 60) -> None:
    """Random pairs, some of which cast or donate: to find the least budget, to plan with it or little more, and what a
    rank works out.
    """
    from reshard.runtime.on_mpi.prepare import Request, clear_caches, plan_uncached, read_options
    from reshard.runtime.on_mpi.run_plan import rank_plan
    from reshard.runtime.on_mpi.team import Facts

    choose, found = random.Random(seed), list[tuple[float, str]]()
    for _ in range(count):
        rank = choose.choice([1, 2, 2, 3])
        shape = [round(1e7 ** (1 / rank) * choose.uniform(0.8, 1.2)) for _ in range(rank)]
        here, there = (choose.choice([Mesh(x=4), Mesh(x=2, y=2)]) for _ in range(2))
        casts, donates, more = choose.random() < 0.2, choose.random() < 0.3, choose.choice([0, 0, 8, 64, 1000, 16384])
        nodes = choose.choice([(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)])
        pair = draw_layout(choose, shape, here, "f32"), draw_layout(choose, shape, there, "bf16" if casts else "f32")
        asked = (rs.Move(*pair, cast=True),) if casts else pair
        start, least = time.thread_time(), 1
        try:
            plan = rs.plan(*asked, budget=1, donate=donates)
        except rs.errors.BudgetError as error:
            least = error.smallest
            plan = rs.plan(*asked, budget=least + more, donate=donates)
        planned = time.thread_time() - start
        clear_caches()
        start = time.thread_time()
        if casts:
            rank_plan(plan, 0, 4, 4)
        else:
            plan_uncached(Request.of_tile(*pair, read_options(least + more, None, donates)), 0, Facts(nodes, True), 4)
        found.append((max(planned, time.thread_time() - start), f"{pair[0]} -> {pair[1]}, {more} B more, {nodes}"))
    found.sort(reverse=True)
    above = sum(seconds > 1 for seconds, _ in found)
    print(
        f"seed {seed}: {count} pairs, {above} above 1 s, median {statistics.median(s for s, _ in found) * 1e3:.1f} ms"
    )
    for seconds, name in found[:3]:
        print(f"  {seconds * 1e3:.0f} ms: {name}")


def first() -> None:
    from mpi4py import MPI

    from reshard.mpi import redistribute

    comm, n = MPI.COMM_WORLD, 16384

    def seconds(source: Layout, target: Layout, out: np.ndarray) -> float:
        tile = np.zeros(source.tile_shape, np.uint8)
        comm.Barrier()
        start = time.perf_counter()
        redistribute(tile, source, target, comm, out=out)
        return comm.allreduce(time.perf_counter() - start, MPI.MAX)

    line, mesh = Mesh(x=4), Mesh(r=2, c=2)
    result = np.ones((-(-n // 192) * 48, n), np.uint8)
    halves = Layout.parse(f"u8[{{x}}{n // 4}, {n}]", line), Layout.parse(f"u8[{n}, {{x}}{n // 4}]", line)
    other = [seconds(*halves, np.ones((n, n // 4), np.uint8)) for _ in range(2)]
    blocks = f"{n // 64}{{r}}32, {n // 64}{{c}}32"
    pair = Layout.parse(f"u8[{blocks}]", mesh), Layout.parse(f"u8[{-(-n // 192)}{{r}}{{c}}48/{n}, {n}]", mesh)
    times = [seconds(*pair, result) for _ in range(8)]
    later = statistics.median(times[1:])
    if comm.rank == 0:
        print(f"slabs before: {other[0] * 1e3:.0f} ms, then {other[1] * 1e3:.0f} ms")
        print(f"2x2 -> 4x1: {times[0] * 1e3:.0f} ms, then {later * 1e3:.0f} ms: {times[0] / later:.1f} times")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["first"]:
            first()
        case ["floor", *seeds]:
            floor(int(seeds[0]) if seeds else random.SystemRandom().randrange(10**6))
        case _:
            large()
