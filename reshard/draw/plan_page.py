"""A plan as one self-contained page of HTML: its steps, why they are there, and its pictures.

The standard library is enough. The playground shows the same parts, so that a plan looks the same in both.
"""

from __future__ import annotations

from html import escape

from reshard.draw.vector_memory import memory_bars
from reshard.draw.vector_tiles import tiles_notes, tiles_svg
from reshard.draw.vector_traffic import traffic_svg
from reshard.errors import ReshardError
from reshard.show.explain import assessed, why
from reshard.show.headings import size_text
from reshard.show.html import cards, document, table
from reshard.types.plan import Plan, Step
from reshard.types.units import bytes_text, seconds_text

STYLE = """
h1 code, h1 .mark { display: inline-block; margin-right: .25em; }
figure svg[role=img] { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.narrow-screen { display: none; } .narrow-screen svg { width: 26rem; } .traffic svg { width: 26rem; }
@media (max-width: 44rem) { .wide-screen { display: none; } .narrow-screen { display: block; } }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .86rem; color: var(--faint); }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -.08rem; }
"""
"""What the pictures of a plan need beside the common sheet."""

_FOOTER = (
    "<footer>Bytes are those of one device, the worst one. The <i>bound</i> is what some device must receive in any "
    "plan, the <i>floor</i> what any plan must hold: source and target. A layout such as <code>f32[{y}8, 16]</code> "
    "has a dim of 2 &times; 8 elements in pieces of 8, held along mesh axis y, and one of 16 that is not split."
    "</footer>"
)


def page(plan: Plan, network: str | None = None) -> str:
    """A plan as a page of HTML; `network` is the name of the network that its seconds are predicted for."""
    source, target = plan.source, plan.target
    title = f"{source} to {target}"
    parts = [
        f"<h1><code>{escape(str(source))}</code> <span class='mark'>&rarr;</span> "
        f"<code>{escape(str(target))}</code></h1>",
        f"<p class='faint'>{escape(size_text(source, target))}</p>",
        sums_of(plan, network),
        f"<h2>Steps</h2>{steps_of(plan, network)}",
        f"<h2>Who holds what</h2><figure>{tiles_of(plan)}</figure>",
        f"<h2>Who sends how much to whom</h2><figure>{traffic_in(plan)}</figure>",
        f"<h2>Live bytes on a device</h2><figure>{memory_bars(plan)}</figure>",
        _FOOTER,
    ]
    return document(f"reshard plan: {title}", "".join(parts), STYLE)


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
    heads = [("#", False), ("step", False), ("type after it", False), ("launches", True), ("received", True)]
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


def tiles_of(plan: Plan) -> str:
    """The tiles, drawn for a wide and for a narrow screen (the page shows one of them), or why there is no picture."""
    try:
        wide, narrow, notes = tiles_svg(plan), tiles_svg(plan, columns=1), tiles_notes(plan)
    except ReshardError as error:
        return _without(error)
    return (
        f'<div class="wide-screen">{wide}</div><div class="narrow-screen">{narrow}</div>'
        f"<figcaption>{escape(notes)}</figcaption>"
    )


def traffic_in(plan: Plan) -> str:
    """The matrix of senders and receivers, or why there is none."""
    try:
        svg, notes = traffic_svg(plan)
    except ReshardError as error:
        return _without(error)
    return f'<div class="traffic">{svg}</div><figcaption>{escape(notes)}</figcaption>'


def _without(error: ReshardError) -> str:
    return f"<p class='faint'>{escape(str(error))}</p>"
