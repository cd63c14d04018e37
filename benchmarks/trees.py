"""Trees of small arrays: `redistribute` against `jax.device_put` and a jitted identity of the tree, 8 CPU devices.

    python benchmarks/trees.py                    500 arrays of 64 x 64 floats; 1, 10 and 56 different moves
    python benchmarks/trees.py --arrays 1000

For each number of different moves there are two lines: the CPU time of the first call, in a process of its own, and the
time of warm calls, in milliseconds. Of each, the least counts, and all ways take turns: a busy machine adds to some.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

DEVICES = 8
REPEATS, PROCESSES = 15, 3
WAYS = ("device_put", "identity", "redistribute")


def tree_of(kinds: int, arrays: int) -> tuple[list[Any], list[Any]]:
    """Arrays, and their targets, of so many different moves."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    names: list[Any] = [None, "x", "y", ("x", "y"), ("y", "x")]
    pairs = [(a, b) for a, b in itertools.product(names, names) if not set(_axes(a)) & set(_axes(b))]
    specs = [P(*pair) for pair in pairs]
    moves = list(itertools.permutations(specs, 2))
    random.Random(1).shuffle(moves)
    values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    sources = [jax.device_put(values + n, NamedSharding(mesh, moves[n % kinds][0])) for n in range(arrays)]
    targets = [NamedSharding(mesh, moves[n % kinds][1]) for n in range(arrays)]
    return jax.block_until_ready(sources), targets


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def ways(targets: list[Any]) -> dict[str, Callable[[list[Any]], list[Any]]]:
    """What is compared, each from arrays to arrays."""
    import jax

    import reshard.jax

    identity = jax.jit(lambda xs: xs, out_shardings=targets)
    return {
        "device_put": lambda xs: jax.device_put(xs, targets),
        "identity": identity,
        "redistribute": lambda xs: reshard.jax.redistribute(xs, targets),
    }


def first(way: str, kinds: int, arrays: int) -> float:
    """Milliseconds of the CPUs in the first call."""
    sources, targets = tree_of(kinds, arrays)
    import jax

    call = ways(targets)[way]
    start = time.process_time()
    jax.block_until_ready(call(sources))
    return 1e3 * (time.process_time() - start)


def warm(kinds: int, arrays: int) -> dict[str, float]:
    """The least milliseconds of later calls; the ways take turns."""
    import jax

    sources, targets = tree_of(kinds, arrays)
    calls = ways(targets)
    for call in calls.values():
        jax.block_until_ready(call(sources))
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(REPEATS):
        for way, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(sources))
            times[way].append(1e3 * (time.perf_counter() - start))
    return {way: min(each) for way, each in times.items()}


def main() -> None:
    """Prints both lines for each number of different moves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", type=int, default=500)
    parser.add_argument("--kinds", type=int, nargs="*", default=[1, 10, 56])
    parser.add_argument("--first", choices=WAYS, help="only the first call of this way, in this process")
    options = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.first is not None:
        print(first(options.first, options.kinds[0], options.arrays))
        return
    for kinds in options.kinds:
        runs = [{way: _first_in_child(way, kinds, options.arrays) for way in WAYS} for _ in range(PROCESSES)]
        cold = {way: min(run[way] for run in runs) for way in WAYS}
        _show(f"{options.arrays} arrays, {kinds} moves, first call", cold, "identity")
        _show(f"{options.arrays} arrays, {kinds} moves, warm", warm(kinds, options.arrays), "device_put")


def _first_in_child(way: str, kinds: int, arrays: int) -> float:
    command = [sys.executable, __file__, "--first", way, "--kinds", str(kinds), "--arrays", str(arrays)]
    return float(
        subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        ).stdout.split()[-1]
    )


def _show(what: str, times: dict[str, float], against: str) -> None:
    figures = ", ".join(f"{way} {ms:.1f}" for way, ms in times.items())
    print(f"{what}: {figures} ms; redistribute / {against} = {times['redistribute'] / times[against]:.2f}", flush=True)


if __name__ == "__main__":
    main()
