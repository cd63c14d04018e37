"""What a call of `reshard.jax.jit` costs beside one of `jax.jit`: one array and 300, in turns, the best of 15 rounds.

python benchmarks/dispatch.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import reshard.jax

ROUNDS = 15


def best_times(calls: Sequence[Callable[[], Any]], repetitions: int) -> list[float]:
    """The best mean time of each call in microseconds; the calls take turns, so that all meet the same machine."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(ROUNDS):
        for at, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(repetitions):
                call()
            best[at] = min(best[at], (time.perf_counter() - start) / repetitions * 1e6)
    return best


def main() -> None:
    """Prints a line for each number of arrays."""
    for count, repetitions in ((1, 2000), (300, 50)):
        arrays = [jax.device_put(np.ones(64, np.float32)) for _ in range(count)]

        def step(arrays: list[jax.Array]) -> list[jax.Array]:
            return [array + 1 for array in arrays]

        plain, ours = jax.jit(step), reshard.jax.jit(step)
        before, after = best_times([lambda: plain(arrays), lambda: ours(arrays)], repetitions)  # noqa: B023
        print(f"{count} arrays: jax.jit {before:.1f} us, reshard.jax.jit {after:.1f} us, {after / before:.2f}x")


if __name__ == "__main__":
    main()
