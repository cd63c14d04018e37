"""A plan as one self-contained page of HTML: its steps, why they are there, and its pictures.

The standard library is enough. The playground shows the same parts, so that a plan looks the same in both.
"""

from __future__ import annotations

from html import escape

from reshard.draw.paint_svg import paint_svg
from reshard.draw.pictures import draw_scene
from reshard.errors import ReshardError
from reshard.plans.plan import AnyPlan, Plan, TreePlan
from reshard.show.explain import assess_plan, explain_step
from reshard.show.html import write_cards, write_document, write_table
from reshard.show.plan_table import build_timeline, meshes_text, size_text, tabulate_plan
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


def write_page(plan: Plan, network: str | None = None) -> str:
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
    return write_document(f"reshard plan: {title}", "".join(parts), STYLE)


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
    return write_cards(sums)


def steps_of(plan: Plan, network: str | None) -> str:
    """A table of the steps, why each is there, and how good they are."""
    if not plan.steps:
        return "<p>Nothing to do: the two are the same layout.</p>"
    shown = tabulate_plan(plan)
    heads = [("#", False), *((name, name in shown.numbers) for name in shown.heads[1:])]
    rows = ([at, f"<b>{kind}</b>", f"<code>{escape(to)}</code>", *figures] for at, kind, to, *figures in shown.rows)
    reasons = (
        f"<li><b>{step.kind}</b>: {escape(explain_step(step, number == len(plan.steps)))}</li>"
        for number, step in enumerate(plan.steps, 1)
    )
    good = "".join(f"<li>{escape(words)}</li>" for words in assess_plan(plan, network))
    return (
        f"{write_table(heads, rows)}<h2>Why these steps</h2><ol>{''.join(reasons)}</ol>"
        f"<h2>How good they are</h2><ul>{good}</ul>"
    )


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
_LEFT, _RIGHT = f"{_CELL}text-align:left;white-space:nowrap;", f"{_CELL}text-align:right;white-space:nowrap;"
_TABLE = "border-collapse:collapse;margin:.4em 0;color:inherit;font-variant-numeric:tabular-nums"
_LIVE = "live, up to the peak; | is the floor"
_RULE = "border-bottom:1px solid currentColor;"
_CODE = "font-family:monospace;color:inherit;background:none;overflow-wrap:anywhere;"


def fragment(plan: AnyPlan) -> str:
    """A plan of one or many arrays as HTML: a row for each step or batch with a bar of its live bytes, and totals.

    It has no scripts, and nothing to load.

    >>> from reshard.types import Layout, Mesh
    >>> same = Layout.parse("f32[{x}4]", Mesh(x=2))
    >>> fragment(Plan(same, same, ())).count("nothing to do"), fragment(TreePlan((), ())).count("<tr")
    (1, 1)
    """
    if isinstance(plan, TreePlan):
        head = f"{counted(len(plan.names), 'array')} in {counted(len(plan.batches), 'batch')}"
        nothing = ""
    else:
        ends = (f'<code style="{_CODE}">{escape(str(end))}</code>' for end in (plan.source, plan.target))
        head = f"{' &rarr; '.join(ends)} on {escape(meshes_text(plan.source, plan.target))}"
        nothing = "<div>nothing to do: the two are the same layout</div>"
    floor, peak = build_timeline(plan).floor_bytes, plan.peak_bytes
    shown = tabulate_plan(plan)
    columns = [(name, _RIGHT if name in shown.numbers else _LEFT) for name in shown.heads[1:]] + [(_LIVE, _LEFT)]
    heads = "".join(f'<th style="{style}{_RULE}font-weight:600">{name}</th>' for name, style in columns)
    rows: list[str] = []
    for row, live in zip(shown.rows, shown.live, strict=True):
        _, kind, what, *figures = map(escape, row)
        # A bar of the live bytes as a share of the peak, with a mark at the floor.
        filled, mark = 100 * live / max(1, peak), 100 * floor / max(1, peak)
        bar = (
            '<div style="position:relative;width:14em;height:.8em;border:1px solid currentColor;border-radius:2px">'
            f'<div style="width:{filled:.2f}%;height:100%;background:currentColor;opacity:.35"></div>'
            f'<div style="position:absolute;left:{mark:.2f}%;top:-.25em;height:1.3em;margin-left:-1px;'
            'border-left:2px solid currentColor"></div></div>'
        )
        cells = [kind, f'<code style="{_CODE}">{what}</code>', *figures, bar]
        styled = (f'<td style="{style}">{cell}</td>' for (_, style), cell in zip(columns, cells, strict=True))
        rows.append(f'<tr style="background:none">{"".join(styled)}</tr>')
    body = f'<table style="{_TABLE}"><tr style="background:none">{heads}</tr>{"".join(rows)}</table>'
    bound = plan.lower_bound_bytes
    beside = "the lower bound" if plan.received_bytes == bound else f"lower bound {bytes_text(bound)}"
    totals = [
        f"received {bytes_text(plan.received_bytes)} ({beside})",
        counted(plan.launches, "launch"),
        f"peak {bytes_text(peak)} a device (floor {bytes_text(floor)})",
    ]
    totals += [] if plan.seconds is None else [f"{seconds_text(plan.seconds)} predicted"]
    return (
        f'<div style="color:inherit;font-size:.92em;max-width:100%;overflow-x:auto"><div>{head}</div>'
        f"{body if rows or not nothing else nothing}<div>{', '.join(totals)}</div></div>"
    )
