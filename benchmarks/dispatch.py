"""What a call costs: of `reshard.jax.jit` and with the pass on, beside `jax.jit`; and `redistribute` of concrete
arrays, beside `jax.device_put`, on 8 virtual CPU devices.

    python benchmarks/dispatch.py                          # jit, and 20 pairs of each size on each mesh, a new seed
    python benchmarks/dispatch.py --seed 7 --pairs 5       # the same pairs again

The calls take turns in many short rounds, and the best round of each counts: a busy machine interrupts the others. A
ratio is the time of `device_put` over that of `redistribute`; "again" is `device_put` once more, so that its ratios are
what the machine's noise does to equal calls. "New" arrays are moved for the first time; of those that were moved before
("same"), `device_put` has kept a copy on the host, which it reads again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):  # XLA reads it once, when jax makes its devices
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from jax.sharding import NamedSharding

import reshard.jax
from benchmarks import xla
from benchmarks.against_shardy import named
from reshard.jax.xla_pass import xla_hook
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import contiguous_layouts

ROUNDS = 300
LEAST = 0.9
"""What no ratio should be below."""
SIZES = {"64 B to 256 KiB": (64, 256 << 10, 40), "4 to 16 MiB a tile": (4 << 20, 16 << 20, 6)}
"""The bytes of arrays, or of tiles, and the rounds."""


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


def time_moves(moves: Sequence[tuple[jax.Array, NamedSharding]], new: bool, rounds: int) -> tuple[float, float]:
    """The least time of `device_put` over that of `redistribute`, and over its own; of new arrays, or the same ones.

    Several moves are a tree, in one call.
    """
    arrays, targets = [x for x, _ in moves], [target for _, target in moves]
    put = jax.device_put
    ways: dict[str, Callable[..., Any]] = {"put": put, "again": put, "ours": reshard.jax.redistribute}
    best = dict.fromkeys(ways, math.inf)
    orders = list(itertools.permutations(ways))
    for turn in range(-1, rounds):
        for way in orders[turn % len(orders)]:
            given = [_rename_array(x) for x in arrays] if new else arrays
            start = time.perf_counter()
            moved = ways[way](given, targets) if len(given) > 1 else ways[way](given[0], targets[0])
            jax.block_until_ready(moved)
            if turn >= 0:
                best[way] = min(best[way], time.perf_counter() - start)
            del moved
    return best["put"] / best["ours"], best["put"] / best["again"]


def _rename_array(x: jax.Array) -> jax.Array:
    """Another array with the same shards, of which JAX keeps no copy yet."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [shard.data for shard in x.addressable_shards])


def draw_moves(mesh: Mesh, size: str, count: int, choose: random.Random) -> list[tuple[Layout, Layout]]:
    """Random pairs of layouts of arrays of this size."""
    low, high, _ = SIZES[size]
    if low >= 1 << 20:
        return xla.pairs(mesh, count, choose.randrange(1 << 30), (low, high))
    pairs: list[tuple[Layout, Layout]] = []
    for _ in range(count):
        exponent = choose.randrange((low // 4).bit_length() - 1, (high // 4).bit_length())
        even = [layout for layout in contiguous_layouts(mesh, xla.draw_shape(choose, exponent)) if layout.even]
        pairs.append((even[choose.randrange(len(even))], even[choose.randrange(len(even))]))
    return pairs


def compare_with_device_put(meshes: Sequence[str], count: int, seed: int) -> None:
    """Prints a line for each mesh and size, and one for each move below `LEAST`."""
    choose = random.Random(seed)
    print(f"redistribute beside device_put, seed {seed}: geometric mean, least, how many are below {LEAST}")
    for name, (size, (_, _, rounds)) in itertools.product(meshes, SIZES.items()):
        mesh = named(name)
        devices = np.array(jax.devices()[: mesh.size]).reshape(tuple(mesh.axes.values()))
        jax_mesh = jax.sharding.Mesh(devices, tuple(mesh.axes))
        moves: dict[str, list[tuple[jax.Array, NamedSharding]]] = {}
        for source, target in draw_moves(mesh, size, count, choose):
            values = np.arange(math.prod(source.shape), dtype=source.dtype).reshape(source.shape)
            x = jax.device_put(values, source.to_jax(jax_mesh))
            moves[f"{source} -> {target}"] = [(x, target.to_jax(jax_mesh))]
            if size.startswith("64"):
                moves["the sharding that it has"] = [(x, source.to_jax(jax_mesh))]
                moves["all of them, a tree"] = [move for each in moves.values() for move in each]
        for kind in ("new", "same"):
            times = {move: time_moves(each, kind == "new", rounds) for move, each in moves.items()}
            for what, ratios in zip(("redistribute", "again"), zip(*times.values(), strict=True), strict=True):
                below = sum(ratio < LEAST for ratio in ratios)
                figures = f"{geometric_mean(ratios):.2f}, {min(ratios):.2f}, {below} of {len(ratios)}"
                print(f"{name}, {size}, {kind} arrays, {what}: {figures}")
            for move, (ours, again) in times.items():
                if ours < LEAST:
                    print(f"    {ours:.2f} (again {again:.2f})  {move}")


def main() -> None:
    """Prints a line for each number of arrays, and those of moves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--pairs", type=int, default=20, help="moves of each size on each mesh")
    parser.add_argument("--mesh", action="append", help="axis sizes, 8 devices in all, e.g. 2x2x2; repeatable")
    parser.add_argument("--moves", action="store_true", help="only the moves")
    options = parser.parse_args()
    if not options.moves:
        compare_with_jit()
    compare_with_device_put(options.mesh or ["4x2", "2x2x2", "8"], options.pairs, options.seed)


def compare_with_jit() -> None:
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
