"""A plan as one self-contained page of HTML: its steps, why they are there, and its pictures.

The standard library is enough. The playground shows the same parts, so that a plan looks the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from reshard.draw.paint_svg import paint_svg
from reshard.draw.pictures import draw_scene
from reshard.errors import ReshardError
from reshard.plans.plan import AnyPlan, Plan, Step, TreePlan
from reshard.show.explain import assessed, why
from reshard.show.html import cards, document, table
from reshard.show.plan_table import meshes_text, size_text, tree_timeline
from reshard.types.units import bytes_text, counted, seconds_text

STYLE = """
h1 code, h1 .mark { display: inline-block; margin-right: .25em; }
figure svg[role=img] { display: block; margin: 0 auto; max-width: 100%; height: auto; }
.narrow-screen { display: none; } .narrow-screen svg { width: 26rem; } .traffic svg { width: 26rem; }
@media (max-width: 44rem) { .wide-screen { display: none; } .narrow-screen { display: block; } }
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
        f"<h2>Who holds what</h2><figure>{picture_of('tiles', plan)}</figure>",
        f"<h2>Who sends how much to whom</h2><figure>{picture_of('traffic', plan)}</figure>",
        f"<h2>Live bytes on a device</h2><figure>{picture_of('memory', plan)}</figure>",
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


def picture_of(name: str, plan: Plan, budget: int | None = None) -> str:
    """A picture with its caption, drawn for a wide and for a narrow screen (the page shows one of them), or why there
    is none.

    >>> from reshard.synth import plan
    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=4)
    >>> shown = picture_of("memory", plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh)), 96)
    >>> shown.count("<svg"), "budget 96 B" in shown
    (2, True)
    """
    try:
        wide, narrow = (draw_scene(name, plan, budget, narrow) for narrow in (False, True))
    except ReshardError as error:
        return f"<p class='faint'>{escape(str(error))}</p>"
    caption = f"<figcaption>{escape(wide.caption)}</figcaption>" if wide.caption else ""
    if wide == narrow:
        return f'<div class="{name}">{paint_svg(wide)}</div>{caption}'
    return (
        f'<div class="wide-screen">{paint_svg(wide)}</div><div class="narrow-screen">{paint_svg(narrow)}</div>{caption}'
    )


# A plan in a notebook: HTML with inline styles only, in the colours of the page around it.


_CELL = "padding:.15em .8em;vertical-align:middle;background:none;border:0;"
_LEFT, _RIGHT = f"{_CELL}text-align:left;", f"{_CELL}text-align:right;white-space:nowrap;"
_WHOLE = f"{_LEFT}white-space:nowrap;"
_TABLE = "border-collapse:collapse;margin:.4em 0;color:inherit;font-variant-numeric:tabular-nums"
_LIVE = "live, up to the peak; | is the floor"
_RULE = "border-bottom:1px solid currentColor;"
_CODE = "font-family:monospace;color:inherit;background:none;overflow-wrap:anywhere;"


def fragment(plan: AnyPlan) -> str:
    """A plan as HTML: layouts, steps, a bar of live bytes for each step, and totals; no scripts, nothing to load.

    >>> from reshard.types import Layout, Mesh
    >>> same = Layout.parse("f32[{x}4]", Mesh(x=2))
    >>> print(fragment(Plan(same, same, ())).count("nothing to do"))
    1
    """
    if isinstance(plan, TreePlan):
        return tree_fragment(plan)
    source, target = plan.source, plan.target
    head = f"{_code(source)} &rarr; {_code(target)} on {escape(meshes_text(source, target))}"
    body = _table(plan) if plan.steps else "<div>nothing to do: the two are the same layout</div>"
    return (
        f'<div style="color:inherit;font-size:.92em;max-width:100%;overflow-x:auto"><div>{head}</div>'
        f"{body}<div>{_totals(plan)}</div></div>"
    )


def tree_fragment(tree: TreePlan) -> str:
    """A tree as HTML: its table of batches, and a bar of what is live before, while and after they run.

    >>> tree_fragment(TreePlan((), ())).count("<tr")
    3
    """
    shown = tree_timeline(tree)
    rows = "".join(
        f'<tr style="background:none"><td style="{_WHOLE}">{escape(moment.name)}</td>'
        f'<td style="{_RIGHT}">{bytes_text(moment.live_bytes)}</td>'
        f'<td style="{_LEFT}">{_bar(moment.live_bytes, shown.floor_bytes, shown.peak_bytes)}</td></tr>'
        for moment in shown.moments
    )
    return (
        f'<div style="color:inherit;max-width:100%;overflow-x:auto"><pre style="{_CODE}">{escape(str(tree))}</pre>'
        f'<table style="{_TABLE}"><tr style="background:none">{_heads([("", _LEFT), ("live", _RIGHT), (_LIVE, _LEFT)])}'
        f"</tr>{rows}</table></div>"
    )


def _code(what: object) -> str:
    return f'<code style="{_CODE}">{escape(str(what))}</code>'


def _table(plan: Plan) -> str:
    timed = plan.seconds is not None
    names = [("step", _LEFT), ("type after it", _LEFT), ("received", _RIGHT), ("live", _RIGHT)]
    names += [("seconds", _RIGHT)] if timed else []
    names.append((_LIVE, _LEFT))
    rows = "".join(f'<tr style="background:none">{_fragment_row(plan, step, timed)}</tr>' for step in plan.steps)
    return f'<table style="{_TABLE}"><tr style="background:none">{_heads(names)}</tr>{rows}</table>'


def _heads(names: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<th style="{style}{_RULE}font-weight:600">{name}</th>' for name, style in names)


def _fragment_row(plan: Plan, step: Step, timed: bool) -> str:
    launches = f" ({counted(step.launches, 'launch')})" if step.launches > 1 else ""
    cells = [(f"{step.kind}{launches}", _WHOLE), (_code(step.result), _WHOLE)]
    cells += [(bytes_text(step.received_bytes), _RIGHT), (bytes_text(step.live_bytes), _RIGHT)]
    cells += [(seconds_text(step.seconds or 0.0), _RIGHT)] if timed else []
    cells.append((_bar(step.live_bytes, plan.floor_bytes, plan.peak_bytes), _LEFT))
    return "".join(f'<td style="{style}">{cell}</td>' for cell, style in cells)


def _bar(live: int, floor: int, peak: int) -> str:
    """A bar of the live bytes as a share of the peak, with a mark at the floor."""
    of = max(1, peak)
    return (
        '<div style="position:relative;width:14em;height:.8em;border:1px solid currentColor;border-radius:2px">'
        f'<div style="width:{100 * live / of:.2f}%;height:100%;background:currentColor;opacity:.35"></div>'
        f'<div style="position:absolute;left:{100 * floor / of:.2f}%;top:-.25em;height:1.3em;margin-left:-1px;'
        'border-left:2px solid currentColor"></div></div>'
    )


def _totals(plan: Plan) -> str:
    bound = plan.lower_bound_bytes
    against = "the lower bound" if plan.received_bytes == bound else f"lower bound {bytes_text(bound)}"
    words = [
        f"received {bytes_text(plan.received_bytes)} ({against})",
        counted(plan.launches, "launch"),
        f"peak {bytes_text(plan.peak_bytes)} a device (floor {bytes_text(plan.floor_bytes)})",
    ]
    words += [] if plan.seconds is None else [f"{seconds_text(plan.seconds)} predicted"]
    return ", ".join(words)
