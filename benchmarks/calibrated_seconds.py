"""Seconds of a step under several shardings, as modelled for the devices that were calibrated, and as measured.

    python benchmarks/calibrated_seconds.py [--seed N] [--layouts 10] [--assumed]

The step is two dense layers with their gradients, on 8 devices; of what is chosen for it, some operations are split in
another way, drawn by the seed. Prints the seconds of each by the model, of what was planned and of what was compiled,
and measured (the median of seven runs, all in turns), then rank correlations, and the ratios measured / modelled.
`--assumed` takes the figures that stand for devices that nobody has calibrated.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def compare_layouts(seed: int, layouts: int, assumed: bool) -> None:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from scipy.stats import spearmanr

    import reshard.jax
    from reshard.jax.layout_choice.autoshard import ASSUMED
    from reshard.synth.choice.assess import assess_splits
    from reshard.synth.choice.device_speed import DeviceSpeed
    from reshard.synth.choice.splits import list_splits

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean((jax.nn.relu(batch @ weights[0]) @ weights[1] - batch) ** 2)

        return jax.tree.map(lambda weight, grad: weight - 0.1 * grad, weights, jax.grad(loss)(weights))

    rng = random.Random(seed)
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))
    measured = ASSUMED, DeviceSpeed.preset("cpu")
    network, speed = measured if assumed else reshard.jax.calibrate(mesh, store=False)
    links = {name: f"{link.latency * 1e6:.0f} us, {link.bandwidth / 1e9:.2f} GB/s" for name, link in network.axes}
    rates = {dtype: f"{rate / 1e9:.1f} G/s" for dtype, rate in speed.flops.items()}
    print(f"seed {seed}, links {links}, products {rates}, memory {speed.memory_bytes_per_second / 1e9:.1f} GB/s")
    shapes = [jnp.ones((512, 2048)), jnp.ones((2048, 512))], jnp.ones((1024, 512))
    chosen = reshard.jax.autoshard(step, mesh, *shapes, network=network, speed=speed, compare="none")
    search, planned = chosen.search, chosen.tried[0].planned
    assert planned is not None
    problem = search.graph.problem
    rows: list[tuple[Any, Any, list[float]]] = []
    while len(rows) < layouts:
        share = rng.random() * 0.5
        splits = [
            rng.choice(list(list_splits(node, problem.mesh))) if rng.random() < share else split
            for node, split in zip(problem.nodes, planned.splits, strict=True)
        ]
        assignment = assess_splits(problem, splits, frozenset(), search.prices, speed)
        if assignment.seconds == float("inf"):  # A move that no plan makes.
            continue
        tried = search.compile_assignment(assignment)
        choice = replace(chosen, tried=(tried,), best=tried)
        rows.append((choice, jax.device_put(shapes, choice.in_shardings), []))
    programs = [choice.jit() for choice, *_ in rows]
    for _ in range(8):
        for program, (_, arrays, times) in zip(programs, rows, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            times.append(time.perf_counter() - started)
    columns = [
        [choice.best.planned.seconds for choice, *_ in rows],
        [choice.seconds for choice, *_ in rows],
        [statistics.median(times[1:]) for *_, times in rows],
    ]
    print("planned ms  compiled ms  measured ms  of it moves")
    for at, (choice, *_) in enumerate(rows):
        cells = "  ".join(f"{1e3 * column[at]:11.2f}" for column in columns)
        print(f"{cells}  {choice.best.compiled.move_seconds / columns[1][at]:8.2f}")
    for name, modelled in zip(("planned", "compiled"), columns, strict=False):
        ratios = [real / said for real, said in zip(columns[2], modelled, strict=True)]
        print(
            f"{name}: rank correlation {spearmanr(modelled, columns[2]).statistic:.2f}, measured / modelled "
            f"{min(ratios):.2f} .. {statistics.median(ratios):.2f} .. {max(ratios):.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--layouts", type=int, default=10)
    parser.add_argument("--assumed", action="store_true")
    given = parser.parse_args()
    compare_layouts(given.seed, given.layouts, given.assumed)


if __name__ == "__main__":
    main()
