"""Fits the constants of `runtime.form_costs` to what libtpu estimates of compiled programs: no TPU is needed.

    python benchmarks/fit_forms.py                    # 24 random pairs on v5p 2x2x2, every form of each
    python benchmarks/fit_forms.py --topology v5e:2x4 --pairs 12 --seed 5

Each form of a plan is compiled, and its cycles are set against its passes: bytes at each rate, and kernels. The
constants are those of the least squares of relative errors. Printed are the constants, the errors with those that the
package has, and the forms that it is most wrong about.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import median

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from rich.console import Console
from scipy.optimize import nnls

from benchmarks import aot, tpu_traffic
from reshard import hlo
from reshard.hlo.compiled_cycles import count_cycles
from reshard.plans.plan import Plan
from reshard.runtime import on_jax, xla
from reshard.runtime.form_costs import TPU_COSTS, estimate_local_seconds, list_passes
from reshard.synth import plan

RATES = ("copy", "load", "turn", "turn_part", "join")


def compile_cycles(form: Plan, compilation: aot.Compilation) -> tuple[int, float]:
    """The cycles of a form, and its peak over source and target."""
    shape, dtype = compilation.array
    argument = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=compilation.before)

    def move(v: jax.Array) -> jax.Array:
        return on_jax.apply_plan(form, compilation.before.mesh, v)

    compiled = jax.jit(move, out_shardings=compilation.after).lower(argument).compile()
    tiles = form.source.tile_bytes + form.target.tile_bytes
    return count_cycles(hlo.parse(compiled.as_text())), aot.Memory.of(compiled).peak / tiles


def main(arguments: list[str] | None = None) -> int:
    """Prints constants and errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--seed", type=int, help="of the pairs; by default another in every run")
    parser.add_argument("--least", type=float, default=8, help="MiB of the tiles of an array at least")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 20) if options.seed is None else options.seed
    console = Console(highlight=False, width=200)
    on = tpu_traffic.order_devices(aot.devices(options.topology))
    console.print(f"{on[0].device_kind}, {options.topology}, seed {seed}")
    costs = TPU_COSTS
    rows: list[tuple[list[float], int, float, str]] = []
    compiled = 0
    for source, target in tpu_traffic.draw_pairs(aot.MESHES[len(on)], [2, 3, 4], 1 << 20, seed):
        move = plan(source, target)
        kinds = {step.kind for step in move.steps}
        large = min(source.tile_bytes, target.tile_bytes) >= options.least * (1 << 20)
        if not large or not kinds & {"all_to_all", "exchange"} or "all_gather" in kinds:
            continue
        compilation = aot.Compilation.of((source, target), on)
        for form in xla.list_forms(move, least=0):
            passes = list_passes(form)
            cycles, peak = compile_cycles(form, compilation)
            at = [sum(one.nbytes for one in passes if one.rate == rate) for rate in RATES]
            steps = " ".join(f"{s.kind}/{s.mode.parts}{f'/{s.mode.chunk}' if s.mode.chunk else ''}" for s in form.steps)
            promise = xla.peak_bytes(form, padded=True) / (source.tile_bytes + target.tile_bytes)
            name = f"{source} -> {target} {source.mesh} {steps}, peak {peak:.2f} promised {promise:.2f}"
            rows.append(([*at, sum(one.kernels for one in passes)], cycles, estimate_local_seconds(form), name))
            print(len(rows), end=" ", file=sys.stderr, flush=True)
        compiled += 1
        if compiled == options.pairs:
            break
    matrix = np.array([row[0] for row in rows]) / np.array([row[1] for row in rows])[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1
    fitted = nnls(matrix / scale, np.ones(len(rows)))[0] / scale
    for rate, of in zip(RATES, fitted, strict=False):
        console.print(f"{rate:8}{1 / of if of else float('nan'):10.0f} bytes a cycle, now {getattr(costs, rate):g}")
    console.print(f"kernel  {fitted[-1]:10.0f} cycles, now {costs.kernel:g}")
    errors = sorted((seconds * costs.hertz / cycles, name, cycles) for _, cycles, seconds, name in rows)
    ratios = [error for error, _, _ in errors]
    console.print(f"estimated over compiled: least {ratios[0]:.2f}, median {median(ratios):.2f}, most {ratios[-1]:.2f}")
    for error, name, cycles in [*errors[:12], *errors[-12:]]:
        console.print(f"{error:6.2f} {cycles / costs.hertz * 1e6:6.0f} us {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
