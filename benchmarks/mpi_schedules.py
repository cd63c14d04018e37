"""What schedules take to work out: single ranks of large jobs, without them, and the first call of a real one.

    python benchmarks/mpi_schedules.py                      # 1,024 and 4,096 ranks, in one process
    reshard run -n 4 benchmarks/mpi_schedules.py first      # ScaLAPACK's 2x2 -> 4x1: the first call, and later ones

Times are of processors, the medians of five cold runs for ranks that differ; memory is what is allocated at most.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

import reshard as rs
from reshard.types import Layout, Mesh

LINE, GRID, CYCLIC, SMALL = Mesh(x=4096), Mesh(x=64, y=64), Mesh(a=64, b=2, c=32), Mesh(x=1024)
HALF = Mesh({"y": 64, "z": 8}, device_ids=range(1024, 1536))
SUBSET, COPIES, FEWER = Mesh(y=64, z=8), Mesh(x=512, r=8), Mesh(y=2048)


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
    first() if sys.argv[1:] == ["first"] else large()
