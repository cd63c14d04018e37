"""What a GPU does beside its collectives, according to XLA's own schedule, ahead of time: no GPU is needed.

    python benchmarks/gpu_overlap.py                                  # 20 pairs of 4 GiB on 8 H100s
    python benchmarks/gpu_overlap.py --shape 32768,65536 --pairs 12

A compiled module for GPUs is a schedule: kernels run one after another, collectives and some copies from their start
to their done.
Times are modelled: received bytes over 450 GB/s, one collective after another, and what kernels read and write in
memory over 3.35 TB/s, one kernel after another. A done waits for what was started. Beside the time stand what it would
be with nothing at the same time, local bytes and peaks over source and target, and the collectives during which kernels
run.
Needs what `aot.py` says for GPUs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks import aot
from benchmarks.schedule import Fabric, clock
from benchmarks.tpu_traffic import instruction_bytes
from reshard import hlo
from reshard.runtime import on_jax
from reshard.synth.network import Network

HBM = 3.35e12
"""Bytes a second of an H100's memory."""


# ---- a pair ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A move: seconds by the schedule and with nothing at the same time, and bytes over those of source and target."""

    name: str
    steps: str
    seconds: float
    in_turn: float
    wire: float
    local: float
    peak: float
    promise: float
    launches: int
    overlapped: int
    compile_s: float
    text: int


def row(pair: aot.Pair, on: Sequence[Any]) -> Row:
    """Compiles a move and runs its schedule."""
    compilation = aot.Compilation.of(pair, on)
    plan, start = compilation.plan, time.perf_counter()
    compiled = compilation.ours()
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    module = hlo.parse(text)
    fabric = Fabric.of(on, Network.preset("h100"))
    ran = clock(module, fabric, lambda *instruction: instruction_bytes(*instruction) / HBM)
    tiles = plan.source.tile_bytes + plan.target.tile_bytes
    return Row(
        f"{pair[0]} -> {pair[1]}",
        " ".join(f"{step.kind}/{step.mode.parts}" for step in plan.steps),
        ran.now,
        ran.local + ran.sent,
        ran.sent,
        ran.local * HBM / tiles,
        aot.Memory.of(compiled).peak / tiles,
        on_jax.peak_bytes(plan) / tiles,
        hlo.traffic(module).launches,
        ran.overlapped,
        seconds,
        len(text),
    )


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means, of local bytes the mean, since some moves copy nothing, and the most of what has a limit."""
    moved = [row for row in rows if row.launches]
    return {
        "pairs": len(rows),
        "with collectives": len(moved),
        "ms": geometric_mean(row.seconds for row in moved) * 1e3,
        "ms, nothing at the same time": geometric_mean(row.in_turn for row in moved) * 1e3,
        "ms, wires alone": geometric_mean(row.wire for row in moved) * 1e3,
        "local / (in + out)": sum(row.local for row in moved) / len(moved),
        "peak / (in + out)": geometric_mean(row.peak for row in moved),
        "  most": max(row.peak for row in moved),
        "peak / promise, most": max(row.peak / row.promise for row in moved),
        "collectives": sum(row.launches for row in moved),
        "  beside kernels": sum(row.overlapped for row in moved),
        "compile s": geometric_mean(row.compile_s for row in moved),
        "HLO kB": geometric_mean(row.text for row in moved) / 1e3,
    }


def table(rows: Sequence[Row]) -> Table:
    """A line for each move."""
    shown = Table()
    for column in ("move", "plan", "ms", "in turn", "wires", "local", "peak", "/ promise", "collectives", "beside"):
        shown.add_column(column, justify="left" if column in ("move", "plan") else "right")
    for one in rows:
        times = (f"{seconds * 1e3:.2f}" for seconds in (one.seconds, one.in_turn, one.wire))
        sizes = (f"{one.local:.2f}", f"{one.peak:.3f}", f"{one.peak / one.promise:.2f}")
        shown.add_row(one.name, one.steps, *times, *sizes, str(one.launches), str(one.overlapped))
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="1x1x8", help="slices x hosts x GPUs of a host")
    parser.add_argument("--shape", default="2048,1024,1024", help="of the bfloat16 array")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    on = aot.devices(options.topology, gpu=True)
    shape = tuple(int(size) for size in options.shape.split(","))
    rows: list[Row] = []
    for pair in aot.pairs(aot.MESHES[len(on)], options.pairs, options.seed, (shape, "bfloat16")):
        rows.append(row(pair, on))
        print(len(rows), end=" ", file=sys.stderr, flush=True)
    console = Console(highlight=False, width=200)
    console.print(table(rows))
    for label, figure in summary(rows).items():
        console.print(f"{label:30}{figure:10.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
