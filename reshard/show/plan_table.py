"""A plan on a terminal: what is moved, a table with a row for each step, and the totals beside their bounds."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from reshard.show import terminal
from reshard.show.headings import size_text
from reshard.show.live_bytes import live_parts
from reshard.types import Layout
from reshard.types.idle import idle_text
from reshard.types.plan import Plan, Step
from reshard.types.units import bytes_text, seconds_text


def show_heading(out: Console, source: Layout, target: Layout) -> None:
    """Prints the two layouts, the array's size, and the mesh."""
    terminal.paragraph(out, str(source), style=terminal.NAME)
    terminal.paragraph(out, str(target), "-> ", style=terminal.NAME)
    terminal.paragraph(out, size_text(source, target), "   ", terminal.FAINT)
    out.print()


def show_steps(out: Console, plan: Plan) -> None:
    """Prints one row per step, with launches where a step has several and seconds where the plan has a network.

    A terminal that is narrower than the table gets a paragraph for each step.
    """
    if not plan.steps:
        terminal.paragraph(out, "nothing to do: the two are the same layout", "  ")
        out.print()
        return
    timed = [] if plan.seconds is None else ["seconds"]
    rounds = ["launches"] if any(step.launches > 1 for step in plan.steps) else []
    sent = ["sent"] if plan.crosses else []
    numbers = [*rounds, *sent, "received", "live", *timed]
    table = terminal.table("", "step", "type after it", *numbers, right=["", "step", *numbers])
    table.columns[1].justify = "left"
    for number, step in enumerate(plan.steps, 1):
        figures = _figures(step)
        cells = [str(number), step.kind, str(step.result), *(figures[name] for name in numbers)]
        table.add_row(*(Text(cell, terminal.STEP if cell == step.kind else "") for cell in cells))
    if terminal.fits(out, table, indent=2):
        terminal.show(out, table, indent=2)
    else:
        _show_as_paragraphs(out, plan, numbers)
    out.print()


def _show_as_paragraphs(out: Console, plan: Plan, numbers: list[str]) -> None:
    """Prints two short paragraphs per step, for a terminal on which the table's rows would be broken."""
    for number, step in enumerate(plan.steps, 1):
        figures = _figures(step)
        terminal.paragraph(out, f"{step.kind} -> {step.result}", f"  {number}  ", terminal.STEP)
        terminal.paragraph(out, ", ".join(f"{name} {figures[name]}" for name in numbers), "     ")


def _figures(step: Step) -> dict[str, str]:
    """A step's numbers as text, by the heads of their columns."""
    return {
        "launches": str(step.launches),
        "sent": bytes_text(step.sent_bytes),
        "received": bytes_text(step.received_bytes),
        "live": bytes_text(step.live_bytes),
        "seconds": seconds_text(step.seconds or 0.0),
    }


def show_totals(out: Console, plan: Plan, network: str | None) -> None:
    """Prints the totals; the received bytes are green where they equal the lower bound."""
    good = ["received"] if plan.received_bytes == plan.lower_bound_bytes else []
    terminal.facts(out, totals(plan, network), good)


def totals(plan: Plan, network: str | None) -> list[tuple[str, str]]:
    """The sums over the steps, each beside its bound; `network` is the name that the seconds are predicted for.

    >>> from reshard.synth import plan
    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> for name, words in totals(plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)), None):
    ...     print(f"{name}: {words}")
    received: 48 B on the worst device, the lower bound
    launches: 1
    peak: 80 B live on a device: operand 16 B + result 64 B; floor 80 B
    """
    rows = [
        ("received", f"{bytes_text(plan.received_bytes)} on the worst device, {_against_bound(plan)}"),
        *_sent(plan),
        ("launches", str(plan.launches)),
        ("peak", f"{bytes_text(plan.peak_bytes)} live on a device{_peak(plan)}"),
    ]
    if plan.seconds is not None:
        rows.append(("predicted", f"{seconds_text(plan.seconds)} on {network}"))
    return rows


def _sent(plan: Plan) -> list[tuple[str, str]]:
    """What the busiest sender sends, for a plan to other devices; among the same ones it is what devices receive."""
    if not plan.crosses:
        return []
    bound = f"no plan's busiest device sends or receives less than {bytes_text(plan.endpoint_bound_bytes)}"
    return [("sent", f"{bytes_text(plan.sent_bytes)} by the worst device; {bound}")]


def _against_bound(plan: Plan) -> str:
    bound = plan.lower_bound_bytes
    if plan.received_bytes == bound:
        return "the lower bound"
    over = f"{plan.received_bytes / bound:.2f} times " if bound else ""
    idle = idle_text(plan.idle_axes, ", to take less time over ")
    return f"{over}the lower bound of {bytes_text(bound)}{idle}"


def _peak(plan: Plan) -> str:
    """What the live bytes consist of in the step that reaches the peak."""
    worst = max(plan.steps, key=lambda step: step.live_bytes, default=None)
    if worst is None:
        return ""
    number = plan.steps.index(worst) + 1
    made_of = " + ".join(f"{name} {bytes_text(size)}" for name, size in live_parts(worst) if size)
    return f": {made_of}{f' in step {number}' if len(plan.steps) > 1 else ''}; floor {bytes_text(plan.floor_bytes)}"
