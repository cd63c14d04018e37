"""Shardings that `reshard.jax.autoshard` chooses, beside those of experts and the user's own, all compiled.

    python benchmarks/autoshard.py                             # 17 steps on 8 CPU devices: compiled, run, compared
    python benchmarks/autoshard.py --steps held-back           # 15 others, that the choice was not developed on
    python benchmarks/autoshard.py --steps later               # 13 more, written after it was
    python benchmarks/autoshard.py --steps newest              # 6 more, written last before those of:
    python benchmarks/autoshard.py --steps unseen              # 8 libraries that no other step uses
    python benchmarks/autoshard.py --target v5p                # 8 chips of TPU v5p, ahead of time, in large arrays
    python benchmarks/autoshard.py --target v5p --experts none --budget 0.8   # the choice alone, and with less memory
    python benchmarks/autoshard.py --only fsdp_muon --json rows.jsonl --experts all
    python benchmarks/autoshard.py --table rows.jsonl
    python benchmarks/autoshard.py --scenario fsdp             # Llama where of the experts only FSDP fits; on v5p, too
    python benchmarks/autoshard.py --scenario tensor           # where a batch of one is too long for a device
    python benchmarks/autoshard.py --scenario everything       # where all experts fit

Every step is compiled as its user wrote it, constraints and all; then without any constraint for `autoshard`, and for
each expert, who adds constraints of its own. Bytes are what a device receives in one run, by `reshard.hlo` and by a
count of `real_programs/counting.py` that shares no code with it. Seconds are modelled: collectives by the network, work
by the speed of a device. Peaks are the compiler's. On CPU the chosen program runs, and the function on one device.

Devices and wires are those of TPU v5p. On CPU, where arrays are small enough to run, wires do not wait, and devices
compute `NARROW` times slower: a product of n x n matrices needs n times as many operations as its operands have
elements, and those of the steps are about so many times narrower than on TPUs.

The best of the others is the one of the least modelled seconds. The exit code is 1 if what is returned receives more
bytes or takes longer in its collectives than that one; if its results differ, or what was chosen receives over 5% more
than planned. Beside it is told how it compares with the least bytes of any: those of whoever computes all on every
device are 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the folder above is the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HERE = Path(__file__).resolve().parent
NARROW = 32
_SECONDS = 900
_SAME = 1e-4
"""How far results may differ, over the largest element of each array: sums are added up in another order."""
_NOTHING = 1e-4
"""Of the largest element of all results."""
_PLANNED = 1.05
_EQUAL = 1.001
STEPS = ("seen", "held-back", "later", "newest", "unseen")
TRADED = ", for less work"
SCENARIOS = {
    # Width, layers, vocabulary, batch, length; and the expert that the budget is for, if any.
    "fsdp": ((1024, 2, 8192, 64, 256), "FSDP"),
    "tensor": ((1024, 2, 8192, 1, 4096), "data and tensor parallel over model"),
    "everything": ((1024, 2, 8192, 16, 512), None),
}
_ROOM = 1.02
"""The budget of a scenario over the peak of its expert."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=("cpu", "v5p"), default="cpu")
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument("--steps", choices=STEPS, default="seen", help="which of the steps")
    parser.add_argument("--experts", choices=("none", "few", "all"), default="few", help="few: one axis for tensors")
    parser.add_argument("--budget", type=float, help="choose also within so much of the peak of what was chosen")
    parser.add_argument("--compare", choices=("none", "best", "all"), default="best", help="as of autoshard")
    parser.add_argument("--json", type=Path, help="append one line for each program to this file")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of such files, and compile nothing")
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), help="Llama under a budget")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    alone = options.experts == "none"
    head, spell, summed = (HEAD_ALONE, line_alone, summary_alone) if alone else (HEAD, line_of, summary)
    if options.table:
        rows = [json.loads(line) for path in options.table for line in path.read_text().splitlines()]
        print(head, *map(spell, rows), summed(rows), sep="\n")
        return 0
    if options.scenario:
        row = _in_child(options.scenario, options, lambda row: "\n".join(row["lines"]))
        return int(row is None or not row["held"])
    if options.child:
        _set_environment(options.target)
        measured = measure_scenario if options.child in SCENARIOS else measure
        print(json.dumps(measured(options.child, options)))
        return 0
    from benchmarks.real_programs.later_steps import LATER
    from benchmarks.real_programs.newest_steps import NEWEST
    from benchmarks.real_programs.training_steps import HELD_BACK, SEEN
    from benchmarks.real_programs.unseen_steps import UNSEEN

    print(head, flush=True)
    steps = dict(zip(STEPS, (SEEN, HELD_BACK, LATER, NEWEST, UNSEEN), strict=True))[options.steps]
    names = options.only.split(",") if options.only else steps
    rows = [row for name in names if (row := _in_child(name, options, spell))]
    print(summed(rows))
    return 0 if len(rows) == len(names) and not any(row["violations"] for row in rows) else 1


def _set_environment(target: str) -> None:
    """What jax reads when it is imported."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a server that only a TPU machine has
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if target == "cpu":
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


def _in_child(name: str, options: argparse.Namespace, spell: Any) -> dict[str, Any] | None:
    """The row of a program, measured in a process of its own; prints it, or why there is none."""
    command = [sys.executable, str(HERE / "autoshard.py"), "--child", name, "--target", options.target]
    command += ["--experts", options.experts, "--compare", options.compare]
    command += ["--budget", str(options.budget)] if options.budget else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: it took more than {_SECONDS} s", flush=True)
        return None
    if done.returncode or not done.stdout.strip():
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no message"]
        print(f"{name}: exit code {done.returncode}: {lines[-1][:300]}", flush=True)
        return None
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(spell(row), flush=True)
    if options.json:
        with options.json.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    return row


# ---- one program -----------------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a program; raises what building, choosing or compiling raises."""
    import jax

    import reshard.jax
    from benchmarks.real_programs import PROGRAMS
    from benchmarks.real_programs.base import Scale, without_constraints
    from benchmarks.real_programs.measuring import devices

    chips, on_cpu = devices(options.target), options.target == "cpu"
    case = PROGRAMS[name].build(Scale(chips, not on_cpu))
    mesh = next(leaf.sharding.mesh for leaf in jax.tree.leaves(case.args) if hasattr(leaf, "sharding"))
    donate = case.options.get("donate_argnums", ())
    network, speed = pick_devices(options.target, mesh)
    alone = options.experts == "none"
    started, cpu = time.perf_counter(), time.process_time()

    def choose(budget: int | None = None) -> Any:
        with without_constraints():
            return reshard.jax.autoshard(
                case.f, mesh, *case.args, donate=donate, network=network, speed=speed, fixed=case.fixed, budget=budget,
                compare="none" if alone else options.compare,
            )  # fmt: skip

    choice = choose()
    row: dict[str, Any] = {
        "program": name, "library": PROGRAMS[name].library, "target": options.target,
        "operations": len(choice.search.step.ops),
        "seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
        "spent": {stage: round(spent, 2) for stage, spent in choice.search.spent.items()},
    }  # fmt: skip
    described = choice.to_dict()
    row |= {key: described[key] for key in ("returned", "gap")}
    chosen = described["programs"][0]
    row["planned"], row["chosen"] = chosen["planned"], chosen["compiled"]
    if options.budget:
        row["kept"] = _keep_budget(choose, choice, options.budget)
    if alone:
        return row | {"violations": violations(row)}
    row["result"] = _compile(choice.search, choice.module())
    jitted: Any = jax.jit(lambda *args: case.f(*args), **case.options)
    plain = jitted.lower(*case.args).compile()
    row["others"] = {"as written": _figures(choice.search, plain.runtime_executable())}
    row["others"] |= compile_experts(choice.search, options.experts == "all")
    if on_cpu:
        with without_constraints():
            row["difference"] = _difference(case, choice)
    return row | {"violations": violations(row)}


def _keep_budget(choose: Any, free: Any, share: float) -> dict[str, Any]:
    """The choice within a share of the peak of the free one; of a refusal the smallest budget that it names."""
    from reshard.errors import BudgetError

    budget = int(share * free.peak_bytes)
    try:
        kept = choose(budget)
    except BudgetError as error:
        return {"budget": budget, "refused": error.smallest}
    return {"budget": budget, "peak": kept.peak_bytes, "slower": kept.seconds / free.seconds}


def pick_devices(target: str, mesh: Any) -> tuple[Any, Any]:
    """The network and the speed of the target's devices."""
    from reshard.synth import Network
    from reshard.synth.choice.device_speed import DeviceSpeed

    speed = DeviceSpeed.preset("tpu-v5p")
    if target != "cpu":
        return Network.preset("tpu-v5p"), speed
    slower = {dtype: rate / NARROW for dtype, rate in speed.flops.items()}
    links = dict.fromkeys(mesh.axis_names, (1e-9, 9e10))
    return Network.of(links), DeviceSpeed("narrow", slower, speed.memory_bytes_per_second)


def compile_experts(search: Any, every: bool) -> dict[str, dict[str, Any]]:
    """The figures of each expert's program, or what the compiler says against it."""
    from reshard.jax.layout_choice.experts import OWN, list_experts, write_expert

    rows: dict[str, dict[str, Any]] = {}
    last = [name for name, size in search.mesh.axes.items() if size > 1][-1]
    for one in list_experts(search.step, search.rules, search.mesh, search.fixed.arguments, search.fixed.results):
        # With the last axis for tensors there are nine, those of each other axis besides.
        if not every and " over " in one.name and not one.name.endswith((f" over {last}", "dims")):
            continue
        name = f"{one.name}, unconstrained" if one.name == OWN else one.name
        try:
            rows[name] = _compile(search, write_expert(search.step, one, search.mesh))
        except Exception as error:  # XLA's errors have no class of their own.
            rows[name] = {"error": str(error)[:200]}
    return rows


def _compile(search: Any, module: Any) -> dict[str, Any]:
    """The figures of a module of the step."""
    from reshard.jax.program_report import compile_module

    return _figures(search, compile_module(list(search.jax_mesh.devices.flat), module, fast=True))


def _figures(search: Any, executable: Any) -> dict[str, Any]:
    """The figures of a compiled program, with bytes counted twice."""
    from benchmarks.real_programs.counting import received_bytes
    from reshard.jax.layout_choice.compiled_figures import measure_executable
    from reshard.jax.xla_pass.fragments import print_module

    figures = measure_executable(executable, search.mesh, search.links, search.speed)
    counted = received_bytes(print_module(executable.hlo_modules()[0]))
    return asdict(figures) | {"counted": counted, "seconds": figures.seconds}


def _difference(case: Any, choice: Any) -> float:
    """How far the results of what is returned and of the function on one device are apart, over each array's largest
    element. XLA's own program of what the user wrote is no measure: some are wrong."""
    import jax
    import numpy as np

    placed = jax.tree.map(
        lambda x, sharding: x if sharding is None else jax.device_put(x, sharding), case.data(), choice.in_shardings
    )
    alone = jax.jit(lambda *args: case.f(*args))(*jax.device_put(case.data(), jax.devices()[0]))
    results = [jax.tree.leaves(one) for one in (alone, choice.jit()(*placed))]
    apart: list[tuple[float, float]] = []
    for one, other in zip(*results, strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        wide = complex if np.iscomplexobj(one) else float
        left, right = (np.asarray(each).astype(wide) for each in (one, other))
        apart.append((float(np.nanmax(np.abs(left - right), initial=0.0)), float(np.nanmax(np.abs(left), initial=0.0))))
    # Some gradients are 0 but for rounding, as those of the biases of keys: beside others they are nothing.
    least = _NOTHING * max((largest for _, largest in apart), default=0.0) or 1.0
    return max((difference / max(largest, least) for difference, largest in apart), default=0.0)


def find_best(row: dict[str, Any], key: str = "seconds") -> str:
    """The name of the best of the others."""
    others = {name: one[key] for name, one in row["others"].items() if "error" not in one}
    return min(others, key=lambda name: others[name])


def divide(one: float, other: float) -> str:
    """A ratio as text; of nothing and nothing it is 1."""
    return f"{one / other:.3f}" if other else "inf" if one else "1.000"


def violations(row: dict[str, Any]) -> list[str]:
    """What must hold and does not."""
    broken: list[str] = []
    best = row["others"][find_best(row)] if "others" in row else row["chosen"]
    result = row.get("result", best)
    # More is moved where that saves work: then all of it takes less time, and the ratio of that is told.
    traded = result["seconds"] < best["seconds"]
    for key, what in (("received_bytes", "receives more than"), ("move_seconds", "moves for longer than")):
        if result[key] > _EQUAL * best[key]:
            broken.append(f"{what} the best other{TRADED * traded}: {divide(result[key], best[key])}")
    if row["chosen"] and row["chosen"]["received_bytes"] > _PLANNED * row["planned"]["received_bytes"]:
        broken.append(f"compiled / planned {row['chosen']['received_bytes'] / row['planned']['received_bytes']:.2f}")
    if "kept" in row and row["kept"].get("peak", 0) > row["kept"]["budget"]:
        broken.append("exceeds the budget")
    if row.get("difference", 0.0) > _SAME:
        broken.append(f"other results, by {row['difference']:.1e}")
    return broken


# ---- tables ----------------------------------------------------------------------------------------------

HEAD = (
    f"{'step':22} {'planned':>9} {'chosen':>9} {'returned':>9} {'written':>9} {'best':>9} {'fewest':>9}  {'peak':>8} "
    f"{'best':>8} {'bytes':>7} {'moves':>7} {'all':>7} {'/fewest':>7} {'CPU s':>6}  returned; the best other; that of "
    f"fewest bytes; what is broken"
)


HEAD_ALONE = (
    f"{'step':22} {'planned':>9} {'compiled':>9} {'ratio':>6}  {'model':>9} {'peak':>9} {'ratio':>6}  {'budget':>9} "
    f"{'peak':>9} {'time':>6} {'CPU s':>6}  what is broken"
)


def line_alone(row: dict[str, Any]) -> str:
    """The row of a choice that is compared with nothing, in thousands of bytes: what it receives, its peak, and what it
    takes within a budget beside the free choice."""
    planned, chosen, kept = row["planned"], row["chosen"], row.get("kept", {})
    cells = [f"{row['program']:22}"]
    for key in ("received_bytes", "peak_bytes"):
        cells.append(f"{planned[key] / 1e3:>9.1f} {chosen[key] / 1e3:>9.1f} {divide(chosen[key], planned[key]):>6} ")
    if kept:
        within = f"{kept['peak'] / 1e3:.1f}" if "peak" in kept else f">{kept['refused'] / 1e3:.1f}"
        cells.append(f"{kept['budget'] / 1e3:>9.1f} {within:>9} {kept.get('slower', float('nan')):>6.3f}")
    else:
        cells.append(" " * 26)
    return f"{' '.join(cells)} {row['cpu_seconds']:>6.0f}  {'; '.join(row['violations'])}".rstrip()


def line_of(row: dict[str, Any]) -> str:
    """A row as a line; bytes in thousands, and ratios to the best other."""

    def kilo(value: float) -> str:
        return f"{value / 1e3:.1f}"

    result, best, fewest = row["result"], find_best(row), find_best(row, "received_bytes")
    other = row["others"][best]
    ratios = [divide(result[key], other[key]) for key in ("received_bytes", "move_seconds", "seconds")]
    ratios.append(divide(result["received_bytes"], row["others"][fewest]["received_bytes"]))
    figures = [row["planned"], row["chosen"], result, row["others"]["as written"], other, row["others"][fewest]]
    received = [kilo(one["received_bytes"]) if one else "-" for one in figures]
    return (
        f"{row['program']:22} {' '.join(f'{one:>9}' for one in received)}  {kilo(result['peak_bytes']):>8} "
        f"{kilo(other['peak_bytes']):>8} {' '.join(f'{one:>7}' for one in ratios)} {row['cpu_seconds']:>6.0f}  "
        f"{'; '.join([row['returned'], best, fewest, *row['violations']])}"
    )


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What all rows say together."""
    keys = ("received_bytes", "move_seconds", "seconds")
    better = [sum(row["result"][key] * _EQUAL < row["others"][find_best(row)][key] for row in rows) for key in keys]
    said = ", ".join(f"{count} in {key.replace('_', ' ')}" for key, count in zip(keys, better, strict=True))
    fewer = sum(row["result"][keys[0]] <= _EQUAL * row["others"][find_best(row, keys[0])][keys[0]] for row in rows)
    own = sum(row["returned"] == "chosen" for row in rows)
    broken = [row["violations"] for row in rows if row["violations"]]
    traded = sum(all(TRADED in one for one in each) for each in broken)
    return (
        f"{len(rows)} steps: better than the best other by more than 0.1% in {said}; no more bytes than any other in "
        f"{fewer}; {own} return what was chosen; {len(broken)} violate, {traded} of these only for less work"
    )


def summary_alone(rows: Sequence[dict[str, Any]]) -> str:
    """What all rows of choices alone say together."""
    within = sum(row["chosen"]["received_bytes"] <= _PLANNED * row["planned"]["received_bytes"] for row in rows)
    kept = [row["kept"] for row in rows if "kept" in row]
    fits = sum("peak" in one and one["peak"] <= one["budget"] for one in kept)
    refused = sum("refused" in one for one in kept)
    budgets = f"; of {len(kept)} budgets {fits} are kept and {refused} refused" if kept else ""
    return f"{len(rows)} steps: compiled / planned at most {_PLANNED} in {within}{budgets}"


# ---- scenarios -------------------------------------------------------------------------------------------


def measure_scenario(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Two layers of Llama with AdamW, bf16 on TPUs, under the budget that one expert just meets."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import reshard.jax
    from benchmarks.real_programs.measuring import devices
    from benchmarks.real_programs.training_steps import LlamaSizes, llama_shapes, llama_step
    from reshard.errors import BudgetError

    sizes, wanted = SCENARIOS[name]
    llama, chips = LlamaSizes(*sizes), devices(options.target)
    mesh = jax.sharding.Mesh(np.array(chips).reshape(2, 4), ("data", "model"))
    network, speed = pick_devices(options.target, mesh)
    shapes = llama_shapes(llama, False, jnp.float32 if options.target == "cpu" else jnp.bfloat16)
    asked = {"donate": (0, 1), "network": network, "speed": speed}
    free = reshard.jax.autoshard(llama_step(llama, False), mesh, *shapes, **asked, compare="none")
    experts = compile_experts(free.search, options.experts == "all")
    budget = int(_ROOM * experts[wanted]["peak_bytes"]) if wanted else None
    lines = [f"Llama {dict(zip(('width', 'layers', 'vocabulary', 'batch', 'length'), sizes, strict=True))} on "
             f"{options.target}, budget {f'{budget / 1e6:.1f} MB' if budget else 'none'}"]  # fmt: skip

    def add_line(name: str, one: dict[str, Any]) -> None:
        fits = "error" not in one and (budget is None or one["peak_bytes"] <= budget)
        said = one.get("error") or (
            f"received {one['received_bytes'] / 1e6:8.2f} MB  peak {one['peak_bytes'] / 1e6:8.2f} MB  moves "
            f"{one['move_seconds'] * 1e6:8.1f} us  all {one['seconds'] * 1e6:8.1f} us  {'fits' if fits else ''}"
        )
        lines.append(f"  {name:46} {said}")

    for each, figures in experts.items():
        add_line(each, figures)
    started = time.process_time()
    try:
        choice = free
        if budget:
            choice = reshard.jax.autoshard(
                llama_step(llama, False), mesh, *shapes, **asked, budget=budget, compare=options.compare
            )
    except BudgetError as error:
        lines.append(f"  autoshard refuses: {error}")
        return {"scenario": name, "target": options.target, "held": False, "lines": lines}
    result = _compile(choice.search, choice.module())
    add_line(f"autoshard returns: {choice.best.name}", result)
    planned = choice.tried[0].planned
    lines.append(f"  planned {planned.received_bytes / 1e6:.2f} MB, peak {planned.peak_bytes / 1e6:.2f} MB; "
                 f"{time.process_time() - started:.0f} s of CPU, {choice.search.spent}")  # fmt: skip
    fitting = [one for one in experts.values() if "error" not in one and (not budget or one["peak_bytes"] <= budget)]
    held = (not budget or result["peak_bytes"] <= budget) and all(
        result["seconds"] <= _EQUAL * one["seconds"] for one in fitting
    )
    return {"scenario": name, "target": options.target, "held": held, "lines": lines, "experts": experts}


if __name__ == "__main__":
    sys.exit(main())
