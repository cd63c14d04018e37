"""Exchanges between pieces of any size on a TPU, as one ragged all-to-all and as rounds of permutes, by libtpu's clock.

    python benchmarks/ragged_tpu.py [--seed N] [--pairs 4] [--rounds 2]     needs libtpu, and no TPU

Random pairs of intervals, and even rows to intervals, of 8 chips of v5p, in tiles of a few MiB: `reshard.jax.move_tile`
in a `shard_map`, compiled ahead of time. Kernels are libtpu's `estimated_cycles`, collectives aside; wires what the
busiest chip sends or receives of one collective, or the longest message of each round, at 180 GB/s. `--rounds` says for
how many pairs the rounds are compiled as well, which takes up to a minute each. The last lines are means over pairs.
"""

from __future__ import annotations

import argparse
import random
import time
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reshard as rs
from reshard import hlo
from reshard.hlo.compiled_cycles import count_cycles
from reshard.jax import move_tile
from reshard.lower import lower_plan
from reshard.runtime import xla
from reshard.runtime.form_costs import TPU_COSTS

CHIPS = 8
ROWS = 8 * 4096


def draw_intervals(choose: random.Random, mesh: rs.Mesh, columns: int, dtype: str) -> rs.Layout:
    cuts = sorted(choose.randint(0, ROWS) for _ in range(CHIPS - 1))
    return rs.Layout.from_sizes(np.diff([0, *cuts, ROWS]), mesh, (ROWS, columns), dtype)


def compile_move(source: rs.Layout, target: rs.Layout, mesh: jax.sharding.Mesh) -> tuple[int, float, float, str]:
    """Cycles of kernels, temporaries over both tiles, seconds of the compiler, and what there is of collectives."""
    spec = P("x")
    move = jax.shard_map(
        lambda tile: move_tile(tile, source, target), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    shape = (CHIPS * source.tile_shape[0], *source.tile_shape[1:])
    given = jax.ShapeDtypeStruct(shape, source.dtype, sharding=NamedSharding(mesh, spec))
    start = time.process_time()
    compiled = jax.jit(move).lower(given).compile()
    seconds = time.process_time() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    kinds = "sliced" if " ragged-all-to-all" in text else f"{text.count(' collective-permute-start(')} permutes"
    ends = source.tile_bytes + target.tile_bytes
    return count_cycles(hlo.parse(text)), memory.temp_size_in_bytes / ends, seconds, kinds


def count_wire_bytes(plan: rs.Plan) -> tuple[int, int]:
    """What the busiest chip sends or receives, and the longest messages of all rounds."""
    (step,) = lower_plan(plan).instructions
    longest = sum(max(t.elements for t in one) for one in step.rounds)
    return max(plan.received_bytes, plan.sent_bytes), plan.source.nbytes(longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    from jax.experimental import topologies

    chips = topologies.get_topology_desc("v5p:2x2x2", platform="tpu").devices
    devices, mesh = jax.sharding.Mesh(np.array(chips), ("x",)), rs.Mesh(x=CHIPS)
    choose = random.Random(options.seed)
    costs = TPU_COSTS
    ratios: list[float] = []
    for number in range(options.pairs):
        dtype, columns = choose.choice(["bf16", "f32"]), choose.choice([256, 1024, 2048])
        even = rs.Layout.parse(f"{dtype}[{{x}}{ROWS // CHIPS}, {columns}]", mesh)
        target = draw_intervals(choose, mesh, columns, dtype)
        source = draw_intervals(choose, mesh, columns, dtype) if number % 2 else even
        plan = rs.plan(source, target)
        moved, longest = count_wire_bytes(plan)
        print(f"{plan.source} -> {plan.target}")
        each: list[float] = []
        for name, nbytes in (("as chosen", moved), ("in rounds", longest)):
            if name == "in rounds" and number >= options.rounds:
                break
            with mock.patch.object(xla, "find_rows", (lambda step: None) if name == "in rounds" else xla.find_rows):
                cycles, temporary, seconds, kinds = compile_move(source, target, devices)
            wires = nbytes / costs.wire
            each.append(cycles / costs.hertz + wires)
            copies = (source.tile_bytes + target.tile_bytes) / costs.copy
            print(
                f"  {name}: {kinds}, kernels {cycles / costs.hertz * 1e6:.0f} us ({cycles / copies:.1f} copies of both "
                f"tiles), wires {wires * 1e6:.0f} us, temporaries {temporary:.2f} of both tiles, compiled in "
                f"{seconds:.1f} s"
            )
        if len(each) == 2:
            ratios.append(each[1] / each[0])
            print(f"  rounds take {ratios[-1]:.2f} times as long")
    if ratios:
        print(f"mean of {len(ratios)}: {float(np.exp(np.mean(np.log(ratios)))):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
