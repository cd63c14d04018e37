"""`reshard plan`: the steps as a table, JSON or a page, and why they are there."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from reshard.cli import files
from reshard.cli.arguments import Options
from reshard.cli.request import Request, planned
from reshard.draw.live import parts
from reshard.show import terminal
from reshard.show.explain import explain
from reshard.types.plan import Plan
from reshard.types.units import bytes_text, counted, seconds_text


def run(options: Options) -> int:
    """Prints the plan of a call."""
    request = planned(options)
    plan = request.plan
    if options.html is not None:
        _write_page(options.html, plan, options.network)
    if options.json:
        print(plan.to_json(indent=2))
    if options.json or options.html is not None:
        return 0
    out = terminal.console()
    head(out, request)
    steps(out, plan)
    good = ["received"] if plan.received_bytes == plan.lower_bound_bytes else []
    terminal.facts(out, totals(plan, options.network), good)
    if options.explain:
        out.print()
        explain(out, plan, options.network)
    return 0


def _write_page(path: str, plan: Plan, network: str | None) -> None:
    from reshard.draw.page import page  # With matplotlib, which only a page needs.

    files.write(path, page(plan, network))


def head(out: Console, request: Request) -> None:
    """What is moved from where to where."""
    source, target, _ = request
    terminal.paragraph(out, str(source), style=terminal.NAME)
    terminal.paragraph(out, str(target), "-> ", style=terminal.NAME)
    size = bytes_text(source.nbytes(math.prod(source.shape)))
    meshes = str(source.mesh) if source.mesh == target.mesh else f"{source.mesh} and {target.mesh}"
    terminal.paragraph(out, f"{size} on {counted(source.mesh.size, 'device')}, mesh {meshes}", "   ", terminal.FAINT)
    out.print()


def steps(out: Console, plan: Plan) -> None:
    """One row per step; a column of seconds where a network is known."""
    if not plan.steps:
        terminal.paragraph(out, "nothing to do: the two are the same layout", "  ")
        out.print()
        return
    timed = [] if plan.seconds is None else ["seconds"]
    rounds = ["launches"] if any(step.launches > 1 for step in plan.steps) else []
    numbers = [*rounds, "received", "live", *timed]
    table = terminal.table("", "step", "type after it", *numbers, right=["", "step", *numbers])
    table.columns[1].justify = "left"
    for at, step in enumerate(plan.steps, 1):
        extra = {"launches": str(step.launches), "seconds": seconds_text(step.seconds or 0.0)}
        extra |= {"received": bytes_text(step.received_bytes), "live": bytes_text(step.live_bytes)}
        cells = [str(at), step.kind, str(step.result), *(extra[name] for name in numbers)]
        table.add_row(*(Text(cell, terminal.STEP if cell == step.kind else "") for cell in cells))
    terminal.show(out, table, indent=2)
    out.print()


def totals(plan: Plan, network: str | None) -> list[tuple[str, str]]:
    """The sums over the steps, each beside what it is to be compared with."""
    rows = [
        ("received", f"{bytes_text(plan.received_bytes)} on the worst device, {_against_bound(plan)}"),
        ("launches", str(plan.launches)),
        ("peak", f"{bytes_text(plan.peak_bytes)} live on a device{_peak(plan)}"),
    ]
    if plan.seconds is not None:
        rows.append(("predicted", f"{seconds_text(plan.seconds)} on {network}"))
    return rows


def _against_bound(plan: Plan) -> str:
    bound = plan.lower_bound_bytes
    if plan.received_bytes == bound:
        return "the lower bound"
    over = f"{plan.received_bytes / bound:.2f} times " if bound else ""
    return f"{over}the lower bound of {bytes_text(bound)}"


def _peak(plan: Plan) -> str:
    """What the peak is made of, in the step that reaches it."""
    worst = max(plan.steps, key=lambda step: step.live_bytes, default=None)
    if worst is None:
        return ""
    number = plan.steps.index(worst) + 1
    made_of = " + ".join(f"{name} {bytes_text(size)}" for name, size in parts(worst) if size)
    return f": {made_of}{f' in step {number}' if len(plan.steps) > 1 else ''}; floor {bytes_text(plan.floor_bytes)}"
