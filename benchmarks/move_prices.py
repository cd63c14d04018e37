"""What the prices of many moves take, as a choice of layouts asks for them, and whether they are those of plans.

    python benchmarks/move_prices.py                                     # 3,000 pairs on each mesh, by a new seed
    python benchmarks/move_prices.py --seed 7 --pairs 1000 --check 200   # the same pairs again

Arrays have the shapes of a transformer's weights and activations, up to five dims. Each axis of the mesh splits a dim,
or is summed over, or neither; pairs are distinct. `ms` is CPU time for each pair;
of `--check` pairs, seconds, bytes and peaks are compared with those of `reshard.plan`, which takes `plan ms`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import reshard as rs
from reshard.synth.choice.prices import MovePrices
from reshard.types.mesh import SubAxis

MESHES = (rs.Mesh(x=4, y=2), rs.Mesh(x=2, y=2, z=2), rs.Mesh(dcn=2, x=4, y=4))
SHAPES = ((4096, 512), (512, 512), (512, 1536), (512,), (16, 256, 512), (16, 256, 4096), (16, 256, 1536),
          (16, 256, 8, 64), (16, 4, 256, 64), (16, 256, 4, 2, 64), (16, 4, 2, 256, 256))  # fmt: skip


def draw_layout(rng: random.Random, mesh: rs.Mesh, shape: tuple[int, ...], dtype: str, sums: float) -> rs.Layout:
    """A layout that divides evenly, which is a sum with a probability."""
    dims: list[list[SubAxis]] = [[] for _ in shape]
    partial: list[SubAxis] = []
    for name in rng.sample(list(mesh.axes), len(mesh.axes)):
        axis, at = SubAxis(name, 1, mesh.axes[name]), rng.randrange(len(shape) + 1)
        if rng.random() < sums:
            partial.append(axis)
        elif at < len(shape) and shape[at] % math.prod(each.size for each in (*dims[at], axis)) == 0:
            dims[at].append(axis)
    return rs.Layout.tiled(mesh, shape, dtype, dims, partial, "sum" if partial else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--check", type=int, default=100)
    parser.add_argument("--network", default="tpu-v5p")
    options = parser.parse_args()
    print(f"seed {options.seed}, network {options.network}")
    differ = 0
    for mesh in MESHES:
        rng = random.Random(f"{options.seed} {mesh}")
        pairs: dict[tuple[rs.Layout, rs.Layout], None] = {}
        while len(pairs) < options.pairs:
            shape, dtype = rng.choice(SHAPES), rng.choice(("f32", "bf16"))
            pairs[draw_layout(rng, mesh, shape, dtype, 0.15), draw_layout(rng, mesh, shape, dtype, 0.02)] = None
        prices, start = MovePrices(mesh, options.network), time.process_time()
        found = prices.price_pairs((*pair, 1) for pair in pairs)
        took, start = time.process_time() - start, time.process_time()
        wrong = 0
        for at in rng.sample(range(len(pairs)), min(options.check, len(pairs))):
            price, plan = found[at], prices.plan(*list(pairs)[at])
            same = math.isclose(price.seconds, plan.seconds or 0.0, rel_tol=1e-9)
            wrong += not (same and (price.received_bytes, price.peak_bytes) == (plan.received_bytes, plan.peak_bytes))
        each = (time.process_time() - start) / max(1, min(options.check, len(pairs)))
        print(f"{mesh}: {len(pairs)} pairs in {took:.1f} s, {took / len(pairs) * 1e3:.2f} ms each; "
              f"plan {each * 1e3:.2f} ms; {wrong} of {options.check} differ")  # fmt: skip
        differ += wrong
    return min(differ, 1)


if __name__ == "__main__":
    raise SystemExit(main())
