"""`make demo`: the redistribution of jax-ml/jax#21562, planned, checked and run, beside what XLA does with it.

First at the size of the report, small enough to run: every element of every device is compared with what the
target layout means, and bytes, launches and memory with what the plan promised. Then at a size that people
have, planned and compiled but not run. Last, where jax has a hook for it, the issue's program under plain `jax.jit`
before and after `reshard.jax.enable()`. Exits with 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks is a folder of scripts, not installed

import reshard as rs
from benchmarks import demo_devices, demo_pass
from benchmarks.xla_identity import Identity, XlaError, xla_identities
from reshard.runtime import Account
from reshard.types.meaning import meaning

ISSUE = "https://github.com/jax-ml/jax/issues/21562"
MESH = rs.Mesh(x=4, y=2)
SMALL = ("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]")
LARGE = ("f32[{y}512, 1024, {x}256]", "f32[1024, {x}{y}128, 1024]")
INSTALL = "pip install jax"


@dataclass(frozen=True)
class Run:
    """What the reference runtime needed for a plan, and how many elements of all devices were right."""

    received: int
    launches: int
    peak: int
    right: int
    elements: int


@dataclass(frozen=True)
class Case:
    """A plan, the plan of the same move under a tight budget, the first one's run, and what XLA compiles."""

    plan: rs.Plan
    tight: rs.Plan
    budget: int
    run: Run | None
    xla: Identity | None


def execute(plan: rs.Plan) -> Run:
    """Runs the plan on the embedded runtime, on an array that numbers its elements."""
    whole = np.arange(np.prod(plan.source.shape), dtype=plan.source.dtype).reshape(plan.source.shape)
    memory = Account(plan.source.dtype)
    moved = rs.simulate(plan, dict(tiles(whole, plan.source)), memory)
    pairs = [(moved[device], tile) for device, tile in tiles(whole, plan.target)]
    return Run(
        memory.received_bytes,
        memory.launches,
        memory.peak_bytes,
        sum(int(np.sum(got == wanted)) for got, wanted in pairs),
        sum(wanted.size for _, wanted in pairs),
    )


def tiles(whole: np.ndarray, layout: rs.Layout) -> Iterator[tuple[int, np.ndarray]]:
    """Each device's tile of an array, by the meaning of its layout alone."""
    for device in layout.mesh.devices:
        yield device, whole[np.ix_(*meaning(layout, device))]


def disagreements(case: Case) -> list[str]:
    """Everything in a case that does not fit together."""
    plan, run, xla = case.plan, case.run, case.xla
    problems: list[str] = []
    if plan.received_bytes != plan.lower_bound_bytes:
        problems.append(f"the plan receives {plan.received_bytes} B, the bound is {plan.lower_bound_bytes} B")
    if case.tight.peak_bytes > case.budget:
        problems.append(f"{case.tight.peak_bytes} B live under a budget of {case.budget} B")
    if case.tight.received_bytes != plan.received_bytes:
        problems.append(f"under a budget {case.tight.received_bytes} B are received, without {plan.received_bytes} B")
    if run is not None:
        if run.right != run.elements:
            problems.append(f"{run.elements - run.right} of {run.elements} elements are wrong")
        if run.received != plan.received_bytes:
            problems.append(f"{run.received} B were received, {plan.received_bytes} B were promised")
        if run.launches != plan.launches:
            problems.append(f"{run.launches} collectives ran, {plan.launches} were promised")
        if run.peak > plan.peak_bytes:
            problems.append(f"{run.peak} B were live, at most {plan.peak_bytes} B were promised")
    if xla is not None and xla.received < plan.lower_bound_bytes:
        problems.append(f"XLA receives {xla.received} B, less than the bound of {plan.lower_bound_bytes} B")
    return problems


def cases() -> tuple[list[Case], str | None]:
    """Both cases, and why the XLA column is missing, if it is."""
    pairs = [tuple(rs.Layout.parse(text, MESH) for text in pair) for pair in (SMALL, LARGE)]
    plans = [rs.plan(*pair) for pair in pairs]
    budgets = [plan.floor_bytes * 33 // 32 for plan in plans]
    tight = [rs.plan(*pair, budget=budget) for pair, budget in zip(pairs, budgets, strict=True)]
    runs = [execute(plans[0]), None]
    xla, missing = _xla(plans)
    return [Case(*parts) for parts in zip(plans, tight, budgets, runs, xla, strict=True)], missing


def _xla(plans: list[rs.Plan]) -> tuple[list[Identity | None], str | None]:
    if importlib.util.find_spec("jax") is None:
        return [None] * len(plans), f"The XLA column is missing: jax is not installed.\nInstall it with: {INSTALL}"
    try:
        return [*xla_identities((plan.source, plan.target) for plan in plans)], None
    except XlaError as error:
        return [None] * len(plans), f"The XLA column is missing: {error}"


# ---- on the screen ---------------------------------------------------------------------------------


def table(case: Case) -> Table:
    """The figures of one case."""
    run, xla = case.run, case.xla
    shown = Table()
    shown.add_column("on the worst device")
    shown.add_column("reshard\npromises", justify="right")
    if run is not None:
        shown.add_column("reshard\nmeasured", justify="right")
    if xla is not None:
        shown.add_column(f"XLA\n(jax {xla.jax})", justify="right")
    for label, promised, measured, compiled in _rows(case):
        cells = [promised, *([measured] if run is not None else []), *([compiled] if xla is not None else [])]
        shown.add_row(label, *cells)
    return shown


def _rows(case: Case) -> list[tuple[str, str, str, str]]:
    """Per row its label, what the plan promises, what its run measured, and what XLA compiled."""
    plan, run, xla = case.plan, case.run, case.xla
    both = plan.source.tile_bytes + plan.target.tile_bytes
    whole = any(np.prod(step.result.tile_shape) >= np.prod(plan.source.shape) for step in plan.steps)

    def row(
        label: str, promised: int, measured: int | None = None, compiled: int | None = None
    ) -> tuple[str, str, str, str]:
        cells = ["" if count is None else _bytes(count) for count in (promised, measured, compiled)]
        return label, cells[0], cells[1], cells[2]

    kinds = ", ".join(step.kind for step in plan.steps if step.launches)
    theirs = ", ".join(f"{count} {kind}" for kind, count in xla.collectives.items()) if xla else ""
    return [
        ("collectives", kinds, f"{run.launches} run" if run else "", theirs),
        row("received (bound)", plan.lower_bound_bytes),
        row("received", plan.received_bytes, run and run.received, xla and xla.received),
        row("source and target", both),
        row("temporary", plan.peak_bytes - both, run and run.peak - both, xla and xla.temp),
        row("peak, all together", plan.peak_bytes, run and run.peak, xla and xla.peak),
        ("holds the whole array", _yes(whole), "", _yes(xla.holds_whole_array) if xla else ""),
    ]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _bytes(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB" if count >= 1 << 20 else f"{count:,} B"


def _head(case: Case) -> str:
    plan = case.plan
    return f"{plan.source} -> {plan.target}\n{_bytes(plan.source.nbytes(int(np.prod(plan.source.shape))))} in all"


def enabled_figures() -> tuple[demo_pass.Enabled | None, list[str]]:
    """The program before and after `enable()`, None without jax; and what is wrong with it."""
    if importlib.util.find_spec("jax") is None:
        return None, []
    try:
        figures = demo_pass.enabled()
    except XlaError as error:
        return None, [str(error)]
    return figures, demo_pass.disagreements(figures)


def served_figures() -> tuple[demo_devices.Served | None, list[str]]:
    """The move of a model's weights to other devices, None without jax; and what is wrong with it."""
    if importlib.util.find_spec("jax") is None:
        return None, []
    try:
        figures = demo_devices.served()
    except XlaError as error:
        return None, [str(error)]
    return figures, demo_devices.disagreements(figures)


def show_served(console: Console, figures: demo_devices.Served) -> None:
    """Two tables: what was promised for a server's device, and the call beside that of `jax.device_put`."""
    console.print("\nA small Llama's weights, from a trainer <fsdp=4, tp=2> to a server <rep=2, tp=4>", markup=False)
    size = f"{figures.leaves} arrays, {_bytes(figures.array_bytes)} of bfloat16"
    console.print(f"{size}, 8 devices to 8 others, one call.\n", markup=False)
    promises = Table()
    for name in ("on a device of the server", "bound", "promised", "measured"):
        promises.add_column(name, justify="right" if name != "on a device of the server" else "left")
    promises.add_row("received", *(f"{size:,} B" for size in (figures.bound, figures.promised, figures.received)))
    promises.add_row("peak", "", f"{figures.promised_peak:,} B", f"{figures.peak:,} B")
    console.print(promises)
    calls = Table()
    for name in ("of the call", "redistribute", "jax.device_put"):
        calls.add_column(name, justify="right" if name != "of the call" else "left")
    both = (figures.ours, figures.theirs)
    calls.add_row("time", *(f"{1e3 * seconds:.0f} ms" for seconds, _ in both))
    calls.add_row("new memory of the process", *(_bytes(memory) for _, memory in both))
    console.print(calls)
    verdict = "right" if figures.right == figures.elements else "WRONG"
    console.print(
        f"{figures.right:,} of {figures.elements:,} elements on the server's devices {verdict}.", markup=False
    )


def pass_table(figures: demo_pass.Enabled) -> Table:
    """The figures of the issue's program under plain `jax.jit`."""
    shown = Table()
    shown.add_column("on a device")
    for name in ("jax.jit", "after enable()"):
        shown.add_column(name, justify="right")
    programs = (figures.before, figures.after)
    kinds = [", ".join(f"{count} {kind}" for kind, count in one.collectives.items()) for one in programs]
    shown.add_row("collectives", *kinds)
    shown.add_row("received", *(_bytes(one.received) for one in programs))
    shown.add_row("temporary", *(_bytes(one.temp) for one in programs))
    return shown


def show_pass(console: Console, figures: demo_pass.Enabled, problems: list[str]) -> None:
    """The table of the pass, with what it says in words."""
    size = f"{demo_pass.LARGE}^3"
    console.print(f"\nThe issue's program, f32 of {size}, under plain jax.jit:\n", markup=False)
    console.print(pass_table(figures))
    less, temp = figures.before.received / figures.after.received, figures.before.temp / max(1, figures.after.temp)
    if not problems:
        words = f"{less:.1f} times fewer bytes and {temp:.1f} times less temporary memory; equal results."
        console.print(words, markup=False)


def show(console: Console, both: list[Case], missing: str | None) -> None:
    """Both tables, with what they say in words."""
    small, large = both

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False)

    say(f"The redistribution of {ISSUE},\non the 8 devices of mesh {MESH}.\n")
    say(_head(small), "bold")
    console.print(table(small))
    if small.run is not None:
        verdict = "right" if small.run.right == small.run.elements else "WRONG"
        say(f"Run on the embedded runtime: {small.run.right:,} of {small.run.elements:,} elements {verdict}.")
    say("\nThe same at a size that people have, planned and compiled, not run:\n")
    say(_head(large), "bold")
    console.print(table(large))
    if large.xla is not None:
        more, peak = large.xla.received / large.plan.received_bytes, large.xla.peak / large.plan.peak_bytes
        say(f"XLA receives {more:.1f} times the bytes and needs {peak:.1f} times the memory.")
    if any(case.xla is not None and case.xla.warned for case in both):
        say('It warned of an "Involuntary full rematerialization".')
    tight = large.tight
    say(
        f"With a budget of {_bytes(large.budget)} the plan receives the same {_bytes(tight.received_bytes)}, "
        f"in {tight.launches} launches,\nand needs {_bytes(tight.peak_bytes)}: source, target, and "
        f"{_bytes(tight.peak_bytes - tight.floor_bytes)}."
    )
    if missing:
        say(missing, "yellow")
    for problem in (problem for case in both for problem in disagreements(case)):
        say(f"DISAGREES: {problem}", "bold red")


def as_json(
    both: list[Case],
    missing: str | None,
    figures: demo_pass.Enabled | None,
    problems: list[str],
    moved: demo_devices.Served | None = None,
) -> str:
    """All figures as one JSON object."""
    listed = [
        {
            "plan": case.plan.to_dict(),
            "budget": case.budget,
            "tight": case.tight.to_dict(),
            "run": None if case.run is None else asdict(case.run),
            "xla": None if case.xla is None else asdict(case.xla),
            "disagreements": disagreements(case),
        }
        for case in both
    ]
    passed = None if figures is None else asdict(figures)
    served = None if moved is None else asdict(moved)
    shown = {"cases": listed, "missing": missing, "pass": passed, "served": served, "problems": problems}
    return json.dumps(shown, indent=2)


def main(arguments: list[str] | None = None) -> int:
    """Prints the comparison; 1 if anything disagrees, or if jax is installed but fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    both, missing = cases()
    figures, problems = enabled_figures()
    moved, wrong = served_figures()
    problems += wrong
    if options.json:
        print(as_json(both, missing, figures, problems, moved))
    else:
        console = Console(highlight=False)
        show(console, both, missing)
        if figures is not None:
            show_pass(console, figures, problems)
        if moved is not None:
            show_served(console, moved)
        for problem in problems:
            console.print(f"DISAGREES: {problem}", style="bold red", markup=False)
        console.print(f"\n{time.perf_counter() - start:.1f} s")
    broken = missing is not None and importlib.util.find_spec("jax") is not None
    return int(broken or bool(problems) or any(disagreements(case) for case in both))


if __name__ == "__main__":
    sys.exit(main())
