"""The report as one self-contained HTML page: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from reshard.doctor.places import RESHARD, Place, array_text
from reshard.doctor.report import phrases
from reshard.doctor.report.accounts import LineSum
from reshard.doctor.report.data import ReportData
from reshard.doctor.report.phrases import Row
from reshard.hlo import Collective
from reshard.show.html import bar, cards, document, table
from reshard.types.units import bytes_text, counted

_STYLE = """
article { padding: .9rem 1rem; margin: 0 0 .75rem; }
article header { display: flex; flex-wrap: wrap; gap: .25rem .6rem; align-items: baseline; }
article header b { overflow-wrap: anywhere; }
.tag { font-size: .75rem; border: 1px solid currentColor; border-radius: 99px; padding: 0 .5rem; color: var(--faint);
  white-space: nowrap; margin-left: .3rem; }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--faint); font-size: .86rem; }
"""


def page(report: ReportData) -> str:
    """The report as an HTML document."""
    shown = phrases.shown(report)
    wasteful = phrases.rows(place for place in shown if _is_wasteful(place))
    good = phrases.rows(place for place in shown if not _is_wasteful(place))
    summed = report.accounts()
    rest = [*summed.reductions, *summed.others]
    body = f"<h1>{escape(phrases.title(report))}</h1>{_totals(report)}"
    if not shown:
        body += "<p>No data is resharded between devices.</p>"
    if wasteful:
        body += "<h2>Resharded at a loss</h2>" + "".join(_article(at, row) for at, row in enumerate(wasteful, 1))
    if good:
        body += f"<h2>Resharded with nothing to save</h2>{_table(good)}"
    if rest:
        body += f"<h2>Other collectives, summed by line</h2>{_sums(rest)}"
    return document(f"reshard doctor: {report.program}", body + _FOOTER, _STYLE)


def _is_wasteful(place: Place) -> bool:
    return bool(place.wasted_bytes or place.rebuilds)


_FOOTER = (
    "<footer>Bytes are those of one device. <i>Needed</i> is what some device must receive in any case, or, after a "
    "&le;, an upper bound of that. A layout such as <code>f32[{y}8, 16]</code> has one dim of 2 &times; 8 elements in "
    "pieces of 8, split along mesh axis y, and one of 16 that is not split.</footer>"
)


def _totals(report: ReportData) -> str:
    """The totals as a row of cards."""
    totals = [
        (bytes_text(report.received_bytes), f"received, {counted(report.traffic.launches, 'collective')}", ""),
        (bytes_text(report.wasted_bytes), "of it not needed", "bad" if report.wasted_bytes else ""),
        (str(len(report.rebuilt)), _rebuilt_text(len(report.rebuilt)), "bad" if report.rebuilt else ""),
        (bytes_text(report.saved_bytes), "saved by reshard", "good" if report.saved_bytes else ""),
    ]
    if report.compiled is not None:
        memory = report.compiled
        totals.append((bytes_text(memory.peak_bytes), f"memory, {bytes_text(memory.temp_bytes)} temporary", ""))
    return cards(totals)


def _rebuilt_text(number: int) -> str:
    return f"{'array' if number == 1 else 'arrays'} rebuilt whole on every device"


def _article(at: int, row: Row) -> str:
    """All about a wasteful place."""
    place = row.place
    plan, rebuilt = phrases.plan_text(place), phrases.rebuilt(place)
    css = "bad" if place.rebuilds_whole else ""
    parts = [
        f"<header><span class='faint'>{at}</span><b class='mono'>{escape(row.where)}</b>{_tags(row)}</header>",
        f"<p class='faint mono'>{escape(phrases.origin(place.where))}</p>",
        *(f"<p class='mono'>{_move(move)}</p>" for move in map(phrases.move_text, place.moves)),
        f"<p>XLA: <b>{escape(phrases.does(place))}</b></p>",
        "" if place.counted else f"<p class='faint'>{escape(phrases.OTHER_BRANCH)}</p>",
        f"<p class='{css}'>{escape(rebuilt[:1].upper() + rebuilt[1:])}</p>" if rebuilt else "",
        _bars(place),
        f"<p class='good'>reshard: {escape(plan)}</p>" if plan else "",
        _collectives(place),
    ]
    return f"<article>{''.join(parts)}</article>"


def _tags(row: Row) -> str:
    tags = [f"{counted(row.places, 'place')} alike"] if row.places > 1 else []
    tags += [] if row.place.kind == RESHARD else [row.place.kind]
    return "".join(f'<span class="tag">{escape(tag)}</span>' for tag in tags)


def _move(texts: tuple[str, str]) -> str:
    before, after = texts
    return f"{escape(before)} <span class='mark'>&rarr;</span> {escape(after)}"


def _bars(place: Place) -> str:
    """Bars for the bytes received, planned and needed in a run of the program, on one scale."""
    rows = [("received", place.received_bytes, "bad", "")]
    if place.planned_bytes is not None:
        rows.append(("reshard", place.planned_bytes, "good", ""))
    rows.append(("needed", place.needed_bytes, "faint", "" if place.exact else "&le; "))
    longest = max(1, *(count for _, count, _, _ in rows))
    lines = (
        f"<span>{name}</span>{bar(count / longest, colour)}"
        f"<span class='end'>{mark}{bytes_text(place.runs * count)}</span>"
        for name, count, colour, mark in rows
    )
    temp = f"<span>temporary</span><span></span><span class='end'>{bytes_text(place.temp_bytes)}</span>"
    return f'<div class="bars">{"".join(lines)}{temp}</div>'


def _collectives(place: Place) -> str:
    """The collectives of a place, in a table that opens on a click."""
    heads = [("collective", False), ("result", False), ("devices", True), ("received", True)]
    return (
        f"<details><summary>{counted(len(place.collectives), 'collective')} in {escape(place.computation)}</summary>"
        f"{table(heads, map(_collective, place.collectives))}</details>"
    )


def _collective(collective: Collective) -> list[str]:
    results = ", ".join(array_text(array) for array in collective.results[:4])
    more = " ..." if len(collective.results) > 4 else ""
    return [
        f"{escape(collective.kind)}<br><code class='faint'>{escape(collective.name)}</code>",
        f"<code>{escape(results)}{more}</code>",
        str(collective.group_size),
        bytes_text(collective.received_bytes),
    ]


def _table(rows: Sequence[Row]) -> str:
    return table([("where", False), ("XLA does", False), ("what", False), ("received", True)], map(_row, rows))


def _sums(lines: Sequence[LineSum]) -> str:
    heads = [("where", False), ("XLA does", False), ("why", False), ("launches", True), ("received", True)]
    return table(heads, map(_sum, lines))


def _sum(line: LineSum) -> list[str]:
    return [
        f"<code>{escape(phrases.short_where(line.where))}</code>",
        escape(line.does),
        phrases.why_summed(line),
        str(line.launches),
        bytes_text(line.received_bytes),
    ]


def _row(row: Row) -> list[str]:
    return [
        f"<code>{escape(row.where)}</code> {_tags(row)}",
        escape(phrases.does(row.place)),
        "<br>".join(f"<code>{_move(phrases.move_text(move))}</code>" for move in row.place.moves),
        phrases.received(row.place),
    ]
