"""The report as one HTML page that needs nothing else: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from reshard.cli.units import bytes_text, counted
from reshard.doctor import words
from reshard.doctor.model import RESHARD, Place, Report, array_text
from reshard.doctor.words import Row
from reshard.hlo import Collective

_STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --text: #1c1e21; --faint: #62676d; --line: #e2e4e6;
  --bad: #c0362c; --good: #1f7a4d; --mark: #2563a8; --track: #eef0f1; }
@media (prefers-color-scheme: dark) { :root { --back: #15171a; --card: #1d2024; --text: #e6e8ea; --faint: #9aa1a8;
  --line: #31363b; --bad: #f08a80; --good: #6fce9f; --mark: #82b4ea; --track: #2a2e33; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.35rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: .86em; overflow-wrap: anywhere; }
.sums { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; }
.sum, article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.sum { padding: .7rem .9rem; }
.sum b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.sum span, .faint { color: var(--faint); font-size: .86rem; }
article { padding: .9rem 1rem; margin: 0 0 .75rem; }
article header { display: flex; flex-wrap: wrap; gap: .25rem .6rem; align-items: baseline; }
article header b { overflow-wrap: anywhere; }
.tag { font-size: .75rem; border: 1px solid currentColor; border-radius: 99px; padding: 0 .5rem; color: var(--faint);
  white-space: nowrap; margin-left: .3rem; }
.bad { color: var(--bad); } .good { color: var(--good); } .mark { color: var(--mark); }
p { margin: .45rem 0; }
.bars { display: grid; grid-template-columns: max-content minmax(4rem, 1fr) max-content; gap: .2rem .7rem;
  align-items: center; margin: .7rem 0; font-size: .86rem; font-variant-numeric: tabular-nums; }
.bars svg { display: block; width: 100%; height: .7rem; border-radius: 3px; background: var(--track); }
.bars .end { text-align: right; }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--faint); font-size: .86rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 34rem; font-size: .86rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--faint); font-weight: 500; } th, td { padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } .num { text-align: right; white-space: nowrap; }
footer { margin-top: 2rem; color: var(--faint); font-size: .86rem; }
"""


def page(report: Report) -> str:
    """The page."""
    shown = words.shown(report)
    wasteful = words.rows(place for place in shown if place.wasted_bytes or place.rebuilds)
    good = words.rows(place for place in shown if not (place.wasted_bytes or place.rebuilds))
    rest = words.rows(place for place in report.places if place not in shown)
    body = f"<h1>{escape(words.title(report))}</h1>{_sums(report)}"
    if not shown:
        body += "<p>No data is resharded between devices.</p>"
    if wasteful:
        body += "<h2>Resharded at a loss</h2>" + "".join(_article(at, row) for at, row in enumerate(wasteful, 1))
    if good:
        body += f"<h2>Resharded with nothing to save</h2>{_table(good)}"
    if rest:
        body += f"<h2>Other collectives</h2>{_table(rest)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>reshard doctor: {escape(report.program)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}{_FOOTER}</main></body></html>\n"
    )


_FOOTER = (
    "<footer>Bytes are those of one device. <i>Needed</i> is what some device must receive, whatever is done, or, "
    "behind a &le;, at most that. A layout such as <code>f32[{y}8, 16]</code> is a dim of 2 &times; 8 elements in "
    "pieces of 8, held along mesh axis y, and one of 16 that is not split.</footer>"
)


def _sums(report: Report) -> str:
    cards = [
        (bytes_text(report.received_bytes), f"received, {counted(report.traffic.launches, 'collective')}", ""),
        (bytes_text(report.wasted_bytes), "of it not needed", "bad" if report.wasted_bytes else ""),
        (str(len(report.rebuilt)), _rebuilt_sum(len(report.rebuilt)), "bad" if report.rebuilt else ""),
        (bytes_text(report.saved_bytes), "saved by reshard", "good" if report.saved_bytes else ""),
    ]
    if report.compiled is not None:
        found = report.compiled
        cards.append((bytes_text(found.peak_bytes), f"memory, {bytes_text(found.temp_bytes)} temporary", ""))
    shown = (f'<div class="sum"><b class="{css}">{value}</b><span>{what}</span></div>' for value, what, css in cards)
    return f'<div class="sums">{"".join(shown)}</div>'


def _rebuilt_sum(number: int) -> str:
    return f"{'array' if number == 1 else 'arrays'} rebuilt whole on every device"


def _article(at: int, row: Row) -> str:
    place = row.place
    plan, rebuilt = words.plan_text(place), words.rebuilt(place)
    css = "bad" if place.rebuilds_whole else ""
    parts = [
        f"<header><span class='faint'>{at}</span><b class='mono'>{escape(row.where)}</b>{_tags(row)}</header>",
        f"<p class='faint mono'>{escape(words.origin(place.where))}</p>",
        *(f"<p class='mono'>{_move(move)}</p>" for move in map(words.move_text, place.moves)),
        f"<p>XLA: <b>{escape(words.does(place))}</b></p>",
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
    """What is received, planned and needed in a run of the program, drawn over the same length."""
    rows = [("received", place.received_bytes, "bad", "")]
    if place.planned_bytes is not None:
        rows.append(("reshard", place.planned_bytes, "good", ""))
    rows.append(("needed", place.needed_bytes, "faint", "" if place.exact else "&le; "))
    longest = max(1, *(count for _, count, _, _ in rows))
    lines = (
        f"<span>{name}</span>{_bar(count / longest, colour)}"
        f"<span class='end'>{mark}{bytes_text(place.runs * count)}</span>"
        for name, count, colour, mark in rows
    )
    temp = f"<span>temporary</span><span></span><span class='end'>{bytes_text(place.temp_bytes)}</span>"
    return f'<div class="bars">{"".join(lines)}{temp}</div>'


def _bar(share: float, colour: str) -> str:
    return (
        '<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.2f}" height="1" style="fill: var(--{colour})"/></svg>'
    )


def _collectives(place: Place) -> str:
    rows = "".join(_collective(collective) for collective in place.collectives)
    return (
        f"<details><summary>{counted(len(place.collectives), 'collective')} in {escape(place.computation)}</summary>"
        '<div class="scroll"><table><tr><th>collective</th><th>result</th><th class="num">devices</th>'
        f'<th class="num">received</th></tr>{rows}</table></div></details>'
    )


def _collective(collective: Collective) -> str:
    results = ", ".join(array_text(array) for array in collective.results[:4])
    more = " ..." if len(collective.results) > 4 else ""
    return (
        f"<tr><td>{escape(collective.kind)}<br><code class='faint'>{escape(collective.name)}</code></td>"
        f"<td><code>{escape(results)}{more}</code></td><td class='num'>{collective.group_size}</td>"
        f"<td class='num'>{bytes_text(collective.received_bytes)}</td></tr>"
    )


def _table(rows: Sequence[Row]) -> str:
    lines = "".join(
        f"<tr><td><code>{escape(row.where)}</code> {_tags(row)}</td><td>{escape(words.does(row.place))}</td>"
        f"<td>{'<br>'.join(f'<code>{_move(words.move_text(move))}</code>' for move in row.place.moves)}</td>"
        f"<td class='num'>{words.received(row.place)}</td></tr>"
        for row in rows
    )
    head = "<th>where</th><th>XLA does</th><th>what</th><th class='num'>received</th>"
    return f'<div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'
