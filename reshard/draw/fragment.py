"""A plan in a notebook: HTML with inline styles only, in the colours of the page around it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from reshard.show.headings import meshes_text
from reshard.show.tree_live_bytes import tree_timeline
from reshard.types.plan import Plan, Step
from reshard.types.plan_tree import TreePlan
from reshard.types.units import bytes_text, counted, seconds_text

_CELL = "padding:.15em .8em;vertical-align:middle;background:none;border:0;"
_LEFT, _RIGHT = f"{_CELL}text-align:left;", f"{_CELL}text-align:right;white-space:nowrap;"
_WHOLE = f"{_LEFT}white-space:nowrap;"
_TABLE = "border-collapse:collapse;margin:.4em 0;color:inherit;font-variant-numeric:tabular-nums"
_LIVE = "live, up to the peak; | is the floor"
_RULE = "border-bottom:1px solid currentColor;"
_CODE = "font-family:monospace;color:inherit;background:none;overflow-wrap:anywhere;"


def fragment(plan: Plan) -> str:
    """A plan as HTML: layouts, steps, a bar of live bytes for each step, and totals; no scripts, nothing to load.

    >>> from reshard.types import Layout, Mesh
    >>> same = Layout.parse("f32[{x}4]", Mesh(x=2))
    >>> print(fragment(Plan(same, same, ())).count("nothing to do"))
    1
    """
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
    rows = "".join(f'<tr style="background:none">{_row(plan, step, timed)}</tr>' for step in plan.steps)
    return f'<table style="{_TABLE}"><tr style="background:none">{_heads(names)}</tr>{rows}</table>'


def _heads(names: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<th style="{style}{_RULE}font-weight:600">{name}</th>' for name, style in names)


def _row(plan: Plan, step: Step, timed: bool) -> str:
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
