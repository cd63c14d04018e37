"""Moves to other devices beside `jax.device_put`, on 16 virtual CPU devices: `python benchmarks/across.py`.

Medians in microseconds, and their ratio, of calls that alternate in one process; every call has an array of its own,
since `jax.device_put` keeps a copy of what it has moved once. `copy` is numpy's copy of the whole array.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16".strip()

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from reshard.jax import redistribute

SIZES = (64, 256, 1024, 4096, 16384, 65536, 262144)
"""KiB of the array."""


def moves() -> dict[str, tuple[NamedSharding, NamedSharding]]:
    """Source and target by name."""
    devices = np.array(jax.devices())
    eight = Mesh(devices[:8].reshape(4, 2), ("a", "b"))
    first, last = Mesh(devices[:4], ("t",)), Mesh(devices[8:12], ("t",))
    two = Mesh(devices[14:], ("t",))
    rows = NamedSharding(eight, P(("a", "b")))
    return {
        "8 rows to 4 columns": (rows, NamedSharding(last, P(None, "t"))),
        "8 rows to 4 rows": (rows, NamedSharding(last, P("t"))),
        "4 rows to other 4": (NamedSharding(first, P("t")), NamedSharding(last, P("t"))),
        "4 columns to 8 tiles": (NamedSharding(last, P(None, "t")), NamedSharding(eight, P("a", "b"))),
        "8 rows to 2 replicas": (rows, NamedSharding(two, P())),
    }


def compared(source: NamedSharding, target: NamedSharding, kib: int, repeats: int) -> dict[str, float]:
    """The median seconds of each way."""
    columns = 64 * max(1, round((kib * 256) ** 0.5 / 64))
    shape = (kib * 256 // columns, columns)
    base = jax.device_put(np.zeros(shape, "float32"), source)
    anew = jax.jit(lambda x: x + 1, out_shardings=source)
    whole = np.zeros(shape, "float32")
    ways: dict[str, Callable[[jax.Array], Any]] = {
        "device_put": lambda x: jax.block_until_ready(jax.device_put(x, target)),
        "redistribute": lambda x: jax.block_until_ready(redistribute(x, target)),
        "copy": lambda x: whole.copy(),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            x = anew(base).block_until_ready()
            start = time.perf_counter()
            moved = way(x)
            if turn:  # The first call compiles.
                times[name].append(time.perf_counter() - start)
            del moved
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Prints a line a move and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="*", default=SIZES, help="sizes of the array (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help="calls of each way (default: fewer for larger arrays)")
    options = parser.parse_args()
    print(f"{'KiB':>7}  {'move':22}{'device_put':>12}{'redistribute':>14}{'copy':>9}  ratio   (jax {jax.__version__})")
    for kib in options.kib:
        repeats = options.repeats or max(5, min(40, 400_000 // kib))
        for name, ends in moves().items():
            took = compared(*ends, kib, repeats)
            cells = [1e6 * took[way] for way in ("device_put", "redistribute", "copy")]
            ratio = cells[1] / cells[0]
            print(
                f"{kib:>7}  {name:22}{cells[0]:>12,.0f}{cells[1]:>14,.0f}{cells[2]:>9,.0f}  {ratio:>5.2f}", flush=True
            )


if __name__ == "__main__":
    main()
