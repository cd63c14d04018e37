"""Memory and collectives by real compilers, without their hardware: TPUs ahead of time, and GPUs.

    python benchmarks/aot.py                              # 120 pairs on TPU v5p 2x2x2
    python benchmarks/aot.py --budget 1.25                # the same under a budget, in times source and target
    python benchmarks/aot.py --budgets 100 --seed 7       # random moves, each under a random budget: is it kept?
    python benchmarks/aot.py --budgets 100 --cpu          # the same on 8 CPU devices; or with --gpu 1x1x8
    python benchmarks/aot.py --topology v5p:4x8x8 --pairs 60 --no-xla          # 256 chips
    python benchmarks/aot.py --cases                      # the moves that users reported
    python benchmarks/aot.py --gpu 1x1x8                  # 8 H100s; 1x8x8 is 64 of them (slices x hosts x GPUs)

Memory is what the compiler itself says: the peak of a device for `redistribute`, and for XLA's own identity, over
source and target together, and over what the plan promised. The collectives are those of the compiled module, which
must be the plan's: kind, count and bytes. Nothing is allocated, so the arrays have their full size.

TPUs need libtpu: pip install 'jax[tpu]'. GPUs need large wheels, hence no extra of this package brings them:
pip install jax==0.12.0.1 jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm, on Python 3.12. `h100.txtpb`, beside this
file, describes the device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a server that only a TPU machine has
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table

from benchmarks.against_shardy import named
from reshard import hlo
from reshard.errors import BudgetError
from reshard.jax import placement, redistribute
from reshard.jax.compiled_forms import compile_form
from reshard.jax.request import ReshardRequest, plan_request
from reshard.plans.plan import Plan
from reshard.runtime import on_jax
from reshard.synth.options import PlanOptions
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import contiguous_layouts

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "tests" / "data" / "user_cases.json"
MESHES = {
    8: ("2x2x2", "4x2", "8"),
    16: ("2x2x4", "4x4"),
    64: ("4x4x4", "8x8"),
    256: ("4x8x8", "16x16"),
}
TPU_OF = {4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 64: "v5p:4x4x4", 80: "v5p:4x4x5"}
"""A topology with so many chips, for the users' cases."""
CASE_TILE = 4 << 20
TARGETS = {"geomean": 1.3, "most": 2.0, "case": 1.5}
"""Peak over source and target: its geometric mean and maximum; temporary bytes over the larger tile in a case."""
SLACK, CASE_SLACK = 1.06, 1.2
"""What a compiler may need over the promise: tables of a few bytes a device, and tiles padded in memory, in a user's
case with a minor dim of 8 or 48 too.
"""

Pair = tuple[Layout, Layout]
Array = tuple[tuple[int, ...], str]
"""Global shape and dtype."""


@dataclass(frozen=True)
class Memory:
    """The compiler's own figures, in bytes on a device: arguments, outputs, temporaries, and the peak.

    XLA:CPU leaves the temporaries out of its peak.
    """

    argument: int
    output: int
    temp: int
    peak: int

    @classmethod
    def of(cls, compiled: Any) -> Memory:
        """The memory analysis of a `jax.stages.Compiled`."""
        analysis = compiled.memory_analysis()
        sizes = (
            int(analysis.argument_size_in_bytes),
            int(analysis.output_size_in_bytes),
            int(analysis.temp_size_in_bytes),
        )
        cpu = next(iter(compiled.input_shardings[0][0].device_set)).platform == "cpu"
        peak = sum(sizes) - analysis.alias_size_in_bytes if cpu else analysis.peak_memory_in_bytes
        return cls(*sizes, int(peak))


Collectives = dict[str, tuple[int, int]]
"""Kind to how often it runs, and the bytes that a device receives in all."""


@dataclass(frozen=True)
class Row:
    """One move: the plan's promises, and what was compiled for it and for XLA's own identity.

    `tiles` are the bytes of source and target on a device, `larger` those of the larger one. `promise` is the plan's
    peak, with the target there from the start: XLA is given the memory for its result before it runs. A TPU's is that
    of padded tiles.
    """

    name: str
    mesh: str
    source: str
    target: str
    steps: tuple[str, ...]
    tiles: int
    larger: int
    promise: int
    promised: Collectives
    compiled: Collectives
    ours: Memory
    xla: Memory | None

    @property
    def peak(self) -> float:
        """Our peak over source and target."""
        return self.ours.peak / self.tiles

    @property
    def over_promise(self) -> float:
        """Our peak over the promise."""
        return self.ours.peak / self.promise

    @property
    def temp(self) -> float:
        """Our temporary bytes over the larger tile, as the compiler lays it out."""
        return self.ours.temp / max(self.larger, self.ours.argument, self.ours.output)

    @property
    def agrees(self) -> bool:
        """Whether the collectives are the plan's."""
        return self.promised == self.compiled


# ---- devices and pairs -----------------------------------------------------------------------------


@lru_cache
def devices(topology: str, gpu: bool = False) -> tuple[Any, ...]:
    """The devices of a topology that need not be there, e.g. `v5p:2x2x2`, or with `gpu` H100s as `1x8x8`."""
    if not gpu:
        return tuple(topologies.get_topology_desc(topology, platform="tpu").devices)
    target = (HERE / "h100.txtpb").read_text("utf-8")
    description = topologies.get_topology_desc("h100", platform="cuda", target_config=target, topology=topology)
    return tuple(description.devices)


def jax_mesh(mesh: Mesh, on: Sequence[Any]) -> jax.sharding.Mesh:
    """The jax mesh of some devices, in order."""
    return jax.sharding.Mesh(np.array(on).reshape(tuple(mesh.axes.values())), tuple(mesh.axes))


def pairs(meshes: Sequence[str], count: int, seed: int, array: Array) -> list[Pair]:
    """Random pairs of different contiguous layouts, evenly over the meshes as far as they have so many."""
    choose = random.Random(seed)
    every = sorted((list(contiguous_layouts(named(name), *array)) for name in meshes), key=len)
    chosen: list[Pair] = []
    for left, layouts in zip(range(len(every), 0, -1), every, strict=True):
        total = len(layouts) * (len(layouts) - 1)
        picked = choose.sample(range(total), min(total, (count - len(chosen)) // left))
        chosen += [(layouts[n // (len(layouts) - 1)], _other(layouts, n)) for n in picked]
    return chosen


def _other(layouts: Sequence[Layout], number: int) -> Layout:
    first, rest = divmod(number, len(layouts) - 1)
    return layouts[rest + (rest >= first)]


# ---- one compile -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """A move to compile, by XLA and by us."""

    before: NamedSharding
    after: NamedSharding
    array: Array
    budget: int | None = None

    @classmethod
    def of(cls, pair: Pair, on: Sequence[Any], budget: float | None = None) -> Compilation:
        """The move of a pair of layouts on these devices, with a budget of so many times source and target."""
        source, target = pair
        mesh = jax_mesh(source.mesh, on)
        limit = budget and math.ceil(budget * (source.tile_bytes + target.tile_bytes))
        return cls(source.to_jax(mesh), target.to_jax(mesh), (source.shape, source.dtype), limit)

    @property
    def plan(self) -> Plan:
        """What `redistribute` does for it."""
        return plan_request(ReshardRequest(self.after, self.before, PlanOptions(self.budget)), *self.array)

    def ours(self) -> Any:
        """The compiled `redistribute`."""
        return self._compiled(lambda v: redistribute(v, self.after, source=self.before, budget=self.budget))

    def xla(self) -> Any:
        """The compiled identity."""
        return self._compiled(lambda v: v)

    def _compiled(self, f: Callable[[jax.Array], Any]) -> Any:
        shape, dtype = self.array
        argument = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype), sharding=self.before)
        return jax.jit(f, out_shardings=self.after).lower(argument).compile()


def row(compilation: Compilation, name: str = "", xla: bool = True) -> Row:
    """What the compilers make of a move; with `xla` of the identity too."""
    plan, compiled = compilation.plan, compilation.ours()
    traffic = hlo.traffic(hlo.parse(compiled.as_text()))
    return Row(
        name,
        str(plan.source.mesh),
        str(plan.source),
        str(plan.target),
        tuple(f"{step.kind}/{step.mode.parts}" if step.mode.parts > 1 else step.kind for step in plan.steps),
        plan.source.tile_bytes + plan.target.tile_bytes,
        max(plan.source.tile_bytes, plan.target.tile_bytes),
        on_jax.peak_bytes(plan, padded=placement.platform_of(compilation.after.mesh) == "tpu"),
        promised(plan),
        {kind: (total.launches, total.received_bytes) for kind, total in sorted(traffic.by_kind.items())},
        Memory.of(compiled),
        Memory.of(compilation.xla()) if xla else None,
    )


def promised(plan: Plan) -> Collectives:
    """The collectives of a plan; an exchange is so many permutes."""
    by_kind: Collectives = {}
    for step in plan.steps:
        if step.launches:
            kind = "permute" if step.kind == "exchange" else step.kind
            launches, received = by_kind.get(kind, (0, 0))
            by_kind[kind] = (launches + step.launches, received + step.received_bytes)
    return dict(sorted(by_kind.items()))


def rows(on: Sequence[Any], moves: Sequence[Pair], budget: float | None = None, xla: bool = True) -> Iterator[Row]:
    """The rows of pairs of layouts, one by one."""
    for pair in moves:
        yield row(Compilation.of(pair, on, budget), xla=xla)


# ---- what users reported ---------------------------------------------------------------------------


def cases(gpu: bool, least: float = 2.0) -> Iterator[Row]:
    """The reported moves for which XLA needed more than `least` times the larger tile beside the tiles."""
    for case in json.loads(CASES.read_text("utf-8")):
        if (case.get("xla_temp_over_largest_tile") or 0) > least:
            name, compilation = _case(case, gpu)
            yield row(compilation, name)


def _case(case: dict[str, Any], gpu: bool) -> tuple[str, Compilation]:
    """A reported move, with its name.

    TPUs have no complex128: the same bytes in float32, the last dim four times as long. A small array is doubled in
    every dim until its tiles have 4 MiB, for on a TPU the padding of a tile would outweigh it.
    """
    shape, dtype = tuple(case["shape"]), case["dtype"]
    if dtype == "complex128":
        shape, dtype = (*shape[:-1], 4 * shape[-1]), "float32"
    mesh, scale = Mesh(case["mesh"]), 1
    while True:
        sizes = [scale * size for size in shape]
        source, target = (Layout.from_spec(mesh, sizes, dtype, case[side]) for side in ("src", "dst"))
        if min(source.tile_bytes, target.tile_bytes) >= CASE_TILE:
            break
        scale *= 2
    on = devices(f"1x{-(-mesh.size // 8)}x{min(mesh.size, 8)}" if gpu else TPU_OF[mesh.size], gpu)
    return f"{case['id']}{f', dims x {scale}' if scale > 1 else ''}", Compilation.of((source, target), on)


# ---- promises --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """A move under a budget, which the compiler says is kept, or is not, or which was refused.

    `smallest` is the budget that the refusal says works, `peak` what is compiled for the budget, or for that one, and
    `compilations` and `seconds` what choosing it took: one form is compiled at least.
    """

    pair: Pair
    budget: int
    smallest: int | None
    peak: int
    steps: tuple[str, ...]
    compilations: int
    seconds: float

    @property
    def kept(self) -> bool:
        """Whether the compiled program keeps to its budget; after a refusal, to the budget that the error names."""
        return self.peak <= (self.budget if self.smallest is None else self.smallest)

    def __str__(self) -> str:
        source, target = self.pair
        ends = source.tile_bytes + target.tile_bytes
        refused = "" if self.smallest is None else f", refused, {self.smallest / ends:.3f} works"
        return (
            f"{'kept' if self.kept else 'BROKEN'}: {source} to {target} {source.mesh}, budget {self.budget / ends:.3f}"
            f"{refused}, compiled {self.peak / ends:.3f}, {self.compilations} forms in {self.seconds:.1f} s: "
            f"{' '.join(self.steps)}"
        )


def random_promises(on: Sequence[Any], count: int, seed: int) -> Iterator[Promise]:
    """Moves of random arrays between random layouts, on random meshes of 8 devices, under random budgets.

    Dims have 192 to 768 elements, but for two of a rank of 4, of 8 to 64; budgets are 1.1 to 2.0 times source and
    target.
    """
    choose = random.Random(seed)
    for _ in range(count):
        rank, mesh = choose.choice((2, 3, 4)), named(choose.choice(("2x4", "2x2x2", "8")))
        shape = [choose.choice((192, 256, 384, 512, 768)) for _ in range(min(rank, 3 if rank == 3 else 2))]
        shape += [choose.choice((8, 16, 32, 64)) for _ in range(rank - len(shape))]
        choose.shuffle(shape)
        dtype = choose.choice(("bfloat16", "float32"))
        source, target = choose.sample(list(contiguous_layouts(mesh, tuple(shape), dtype)), 2)
        yield check_promise((source, target), on, choose.uniform(1.1, 2.0))


def check_promise(pair: Pair, on: Sequence[Any], times: float) -> Promise:
    """What a budget of so many times source and target comes to."""
    compilation, smallest, began = Compilation.of(pair, on, times), None, time.perf_counter()
    budget, known = compilation.budget or 0, compile_form.cache_info().misses
    try:
        plan = compilation.plan
    except BudgetError as error:
        smallest = error.smallest
        compilation = replace(compilation, budget=smallest)
        plan = compilation.plan
    seconds = time.perf_counter() - began
    steps = tuple(f"{step.kind}/{step.mode.parts}" if step.mode.parts > 1 else step.kind for step in plan.steps)
    count = compile_form.cache_info().misses - known
    return Promise(pair, budget, smallest, Memory.of(compilation.ours()).peak, steps, count, seconds)


# ---- on the screen ---------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that have targets: peaks over source and target, over the promise, and collectives that differ."""
    theirs = [row.xla.peak / row.tiles for row in rows if row.xla]
    return {
        "moves": len(rows),
        "peak geomean": geometric_mean(row.peak for row in rows),
        "peak most": max(row.peak for row in rows),
        "over promise": max(row.over_promise for row in rows),
        "temp over larger tile": max(row.temp for row in rows),
        "XLA geomean": geometric_mean(theirs) if theirs else math.nan,
        "XLA most": max(theirs, default=math.nan),
        "collectives differ": sum(not row.agrees for row in rows),
    }


def table(rows: Sequence[Row]) -> Table:
    """A line for each move, the largest peak first."""
    shown = Table(title="peak over source and target, peak over the promise, temporaries over the larger tile")
    shown.add_column("from, to")
    for column in ("peak", "/ promise", "temp", "XLA peak", "XLA temp"):
        shown.add_column(column, justify="right")
    shown.add_column("plan, /parts")
    for row in sorted(rows, key=lambda row: -row.peak):
        head = f"{row.name}\n" if row.name else ""
        theirs = (f"{row.xla.peak / row.tiles:.2f}", f"{row.xla.temp / row.larger:.2f}") if row.xla else ("", "")
        wrong = "" if row.agrees else f"\n[bold red]compiled {row.compiled}, promised {row.promised}[/]"
        shown.add_row(
            f"{head}{row.source}\n{row.target} {row.mesh}",
            *(f"{figure:.2f}" for figure in (row.peak, row.over_promise, row.temp)),
            *theirs,
            f"{' '.join(row.steps)}{wrong}",
        )
    return shown


def missed(figures: dict[str, float], of_cases: bool) -> list[str]:
    """The targets that are missed, in words."""
    slack = CASE_SLACK if of_cases else SLACK
    differ = figures["collectives differ"]
    wrong = {
        f"{differ} modules have other collectives than planned": differ > 0,
        f"a peak is {figures['over promise']:.2f} of the promise": figures["over promise"] > slack,
    }
    if of_cases:
        wrong[f"temporaries of {figures['temp over larger tile']:.2f} tiles"] = (
            figures["temp over larger tile"] > TARGETS["case"]
        )
    else:
        wrong[f"the mean peak is {figures['peak geomean']:.2f}"] = figures["peak geomean"] > TARGETS["geomean"]
        wrong[f"the largest peak is {figures['peak most']:.2f}"] = figures["peak most"] > TARGETS["most"]
    return [text for text, is_so in wrong.items() if is_so]


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x2", help=f"TPUs, of {', '.join(map(str, MESHES))} chips")
    parser.add_argument("--gpu", metavar="SxHxG", help="H100s instead: slices x hosts x GPUs of a host")
    parser.add_argument("--pairs", type=int, default=120, help="random pairs")
    parser.add_argument("--size", type=int, default=512, help="of each of the three dims")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budget", type=float, help="a limit, as so many times source and target; from 1 up")
    parser.add_argument("--budgets", type=int, metavar="N", help="so many random moves under random budgets instead")
    parser.add_argument("--cpu", action="store_true", help="8 CPU devices instead, for --budgets")
    parser.add_argument("--seed", type=int, help="repeats the run that printed it")
    parser.add_argument("--no-xla", action="store_true", help="leave XLA's own identity out")
    parser.add_argument("--cases", action="store_true", help="the moves that users reported, instead of random ones")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args(arguments)
    gpu = options.gpu is not None
    if options.budgets:
        seed = random.randrange(1 << 32) if options.seed is None else options.seed
        on = jax.devices("cpu")[:8] if options.cpu else devices(options.gpu or options.topology, gpu)
        return show_promises(random_promises(on, options.budgets, seed), seed)
    measured = cases(gpu) if options.cases else _random(options, gpu)
    error = Console(stderr=True, highlight=False)
    rows: list[Row] = []
    for one in measured:
        rows.append(one)
        error.print(f"{len(rows)}: {one.peak:.2f}{'' if one.agrees else ' DIFFERS'}", end=" ")
    total = summary(rows)
    problems = missed(total, options.cases)
    if options.json:
        listed = [asdict(one) for one in rows]
        print(json.dumps({"jax": jax.__version__, "summary": total, "missed": problems, "rows": listed}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(table(rows))
        for name, figure in total.items():
            console.print(f"{name:24}{figure:10.4g}")
        console.print(*problems or ["All targets are met."], sep="\n")
    return int(bool(problems))


def show_promises(promises: Iterator[Promise], seed: int) -> int:
    """Prints what became of each budget; 1 if one is broken."""
    console, made = Console(highlight=False, soft_wrap=True), list[Promise]()
    for promise in promises:
        made.append(promise)
        console.print(f"{len(made)} {promise}", markup=False)
    refused, broken = [one for one in made if one.smallest is not None], [one for one in made if not one.kept]
    taken = [sorted(each) for each in ((one.seconds for one in made), (one.compilations for one in made))]
    median, count = (each[len(each) // 2] for each in taken)
    console.print(
        f"seed {seed}: {len(made)} budgets, {len(broken)} broken, {len(refused)} refused; "
        f"a choice compiles {count} forms, at most {taken[1][-1]}, in {median:.2f} s, at most {taken[0][-1]:.2f}"
    )
    return int(bool(broken))


def _random(options: argparse.Namespace, gpu: bool) -> Iterator[Row]:
    """The rows of random pairs."""
    on = devices(options.gpu or options.topology, gpu)
    array = ((options.size,) * 3, options.dtype)
    moves = pairs(MESHES[len(on)], options.pairs, options.seed or 0, array)
    return rows(on, moves, options.budget, not options.no_xla)


if __name__ == "__main__":
    sys.exit(main())
