"""A plan as one self-contained page of HTML: its steps, why they are there, and its pictures."""

from __future__ import annotations

from html import escape

from reshard.draw.pictures import NAMES, draw, load_canvas
from reshard.errors import ReshardError
from reshard.show.explain import assessed, why
from reshard.show.headings import size_text
from reshard.show.html import cards, document, table
from reshard.types.plan import Plan, Step
from reshard.types.units import bytes_text, seconds_text

_STYLE = "figure svg { margin: 0 auto; }"

_TITLES = {
    "tiles": "Who holds what",
    "memory": "Memory",
    "traffic": "Traffic",
}
_LABELS = {
    "tiles": "The array before, between and after the steps, coloured by device",
    "memory": "Live bytes on a device in each step, against the peak and the floor",
    "traffic": "The bytes that each device sends to each other one",
}
_FOOTER = (
    "<footer>Bytes are those of one device, the worst one. The <i>bound</i> is what some device must receive in any "
    "plan, the <i>floor</i> what any plan must hold: source and target. A layout such as <code>f32[{y}8, 16]</code> "
    "has a dim of 2 &times; 8 elements in pieces of 8, held along mesh axis y, and one of 16 that is not split."
    "</footer>"
)


def page(plan: Plan, network: str | None = None) -> str:
    """A plan as a page of HTML; `network` is the name of the network that its seconds are predicted for.

    Raises `ReshardError` if matplotlib is not installed.
    """
    load_canvas()
    source, target = plan.source, plan.target
    title = f"{source} to {target}"
    parts = [
        f"<h1><code>{escape(str(source))}</code> <span class='mark'>&rarr;</span> "
        f"<code>{escape(str(target))}</code></h1>",
        f"<p class='faint'>{escape(size_text(source, target))}</p>",
        sums_of(plan, network),
        f"<h2>Steps</h2>{steps_of(plan, network)}",
        *(f"<h2>{_TITLES[name]}</h2><figure>{_figure(plan, name)}</figure>" for name in NAMES),
        _FOOTER,
    ]
    return document(f"reshard plan: {title}", "".join(parts), _STYLE)


def sums_of(plan: Plan, network: str | None) -> str:
    """Cards of what a plan costs, each beside its bound."""
    bound, floor = plan.lower_bound_bytes, plan.floor_bytes
    least = plan.received_bytes == bound
    sums = [
        (
            bytes_text(plan.received_bytes),
            "received, the lower bound" if least else f"received, bound {bytes_text(bound)}",
            "good" if least else "",
        ),
        (str(plan.launches), "launch" if plan.launches == 1 else "launches", ""),
        (bytes_text(plan.peak_bytes), f"peak, floor {bytes_text(floor)}", ""),
    ]
    if plan.seconds is not None:
        sums.append((seconds_text(plan.seconds), f"predicted on {escape(network)}" if network else "predicted", ""))
    return cards(sums)


def steps_of(plan: Plan, network: str | None) -> str:
    """A table of the steps, why each is there, and how good they are."""
    if not plan.steps:
        return "<p>Nothing to do: the two are the same layout.</p>"
    timed = [] if plan.seconds is None else [("seconds", True)]
    heads = [("", False), ("step", False), ("type after it", False), ("launches", True), ("received", True)]
    rows = [[str(number), *_row(step, bool(timed))] for number, step in enumerate(plan.steps, 1)]
    reasons = (
        f"<li><b>{step.kind}</b>: {escape(why(step, number == len(plan.steps)))}</li>"
        for number, step in enumerate(plan.steps, 1)
    )
    good = "".join(f"<li>{escape(words)}</li>" for words in assessed(plan, network))
    return (
        f"{table([*heads, ('live', True), *timed], rows)}<h2>Why these steps</h2><ol>{''.join(reasons)}</ol>"
        f"<h2>How good they are</h2><ul>{good}</ul>"
    )


def _row(step: Step, timed: bool) -> list[str]:
    cells = [f"<b>{step.kind}</b>", f"<code>{escape(str(step.result))}</code>", str(step.launches)]
    cells += [bytes_text(step.received_bytes), bytes_text(step.live_bytes)]
    return [*cells, *([seconds_text(step.seconds or 0.0)] if timed else [])]


def _figure(plan: Plan, name: str) -> str:
    """A picture, or a line that says why there is none, so that a plan for a million devices has a page, too."""
    from reshard.draw import svg  # It draws on the canvas: only with matplotlib.

    try:
        return svg.inline(draw(plan, name, svg.ink()), name, _LABELS[name])
    except ReshardError as error:
        return f"<p class='faint'>{escape(str(error))}</p>"
