"""What a call costs with the pass on, and one of `reshard.jax.jit`, beside `jax.jit`: one array and 300.

The calls take turns in many short rounds, and the best round of each counts: a busy machine interrupts the others.

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
from reshard.jax.xla_pass import xla_hook

ROUNDS = 300


def best_times(calls: Sequence[Callable[[], Any]], repetitions: int) -> list[float]:
    """The best mean time of each call in microseconds; the calls take turns, so that all meet the same machine."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(ROUNDS):
        for at, call in enumerate(calls):
            start = time.perf_counter()
            results = [call() for _ in range(repetitions)]
            best[at] = min(best[at], (time.perf_counter() - start) / repetitions * 1e6)
            jax.block_until_ready(results)  # The next call would be late where these still run.
    return best


def main() -> None:
    """Prints a line for each number of arrays."""
    for count, repetitions in ((1, 50), (300, 4)):
        arrays = [jax.device_put(np.ones(64, np.float32)) for _ in range(count)]

        def step(arrays: list[jax.Array]) -> list[jax.Array]:
            return [array + 1 for array in arrays]

        plain, ours = jax.jit(step), reshard.jax.jit(step)
        calls = [lambda: plain(arrays), lambda: ours(arrays), _with_the_pass(step, arrays)]  # noqa: B023
        before, *after = best_times(calls, repetitions)
        names = ("reshard.jax.jit", "jax.jit with the pass on")
        texts = [f"{name} {one:.1f} us, {one / before:.2f}x" for name, one in zip(names, after, strict=True)]
        print(f"{count} arrays: jax.jit {before:.1f} us, {', '.join(texts)}")


def _with_the_pass(step: Callable[..., Any], arrays: list[jax.Array]) -> Callable[[], Any]:
    """A call of a function of `jax.jit` inside `enabled`, as the switch of a whole process makes it."""
    improved = jax.jit(step)
    on, back = xla_hook.switch_functions()
    switched = xla_hook.prepare_pass(None, None)

    def call() -> Any:
        before = on(switched)
        result = improved(arrays)
        back(before)
        return result

    return call


if __name__ == "__main__":
    main()
