"""The report as one self-contained HTML page: no network, light and dark; a small script sorts its tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reshard.doctor.live_bytes import InstructionMemory, ProgramMemory
from reshard.doctor.places import RESHARD, Place, format_array
from reshard.doctor.report.findings import OTHER_BRANCH, Finding, Findings, LineSum, format_origin, format_short_line
from reshard.hlo import Source
from reshard.show.html import SORT, write_bar, write_cards, write_document, write_number, write_table
from reshard.types.units import bytes_text, counted

if TYPE_CHECKING:
    from reshard.doctor.advice import Advice

_BUFFERS = 20  # more than anyone reads
_STYLE = """
article header { display: flex; flex-wrap: wrap; gap: .25rem .6rem; align-items: baseline; }
article header b { overflow-wrap: anywhere; }
.tag { font-size: .75rem; border: 1px solid currentColor; border-radius: 99px; padding: 0 .5rem; color: var(--faint);
  white-space: nowrap; margin-left: .3rem; }
.code { margin: .5rem 0; padding: .4rem .6rem; overflow-x: auto; background: var(--track); border-radius: 3px; }
.code span { display: block; width: max-content; min-width: 100%; }
.code .faint { font-size: inherit; } .code .here { background: color-mix(in srgb, var(--mark) 18%, transparent); }
.legend dt { float: left; clear: left; min-width: 12rem; padding-right: 1rem; } .legend dd { margin: 0 0 .3rem 12rem; }
@media (max-width: 40rem) { .legend dt { float: none; } .legend dd { margin-left: 1rem; } }
details { margin-top: .5rem; } summary { cursor: pointer; color: var(--faint); font-size: .86rem; }
"""


def write_report_page(report: Findings, advice: Advice | None = None) -> str:
    """The report as an HTML document, with `advice` above all else if there is any."""
    shown = report.shown()
    wasteful = [one for one in shown if one.is_wasteful]
    good = [one for one in shown if not one.is_wasteful]
    summed = report.accounts()
    rest = [*summed.reductions, *summed.others]
    body = f"<h1>{escape(report.title)}</h1>{_write_totals(report)}{_LEGEND}"
    body += "" if advice is None else _write_advice(advice)
    longest = max((one.place.total_bytes for one in shown), default=0)
    if advice is None and report.hint:
        body += f"<p>{escape(report.hint)}</p>"
    if not shown:
        body += "<p>No data is resharded between devices.</p>"
    if wasteful:
        articles = (_write_article(at, one, longest) for at, one in enumerate(wasteful, 1))
        body += "<h2>Resharded at a loss</h2>" + "".join(articles)
    if good:
        heads = [("where", False), ("received", True), ("XLA does", False), ("what", False)]
        rows = (
            [
                f"<code>{escape(one.where)}</code> {_write_tags(one)}",
                write_number(one.place.total_bytes, one.received),
                escape(one.does),
                "<br>".join(f"<code>{_write_move(move)}</code>" for move in one.moves),
            ]
            for one in good
        )
        body += f"<h2>Resharded with nothing to save</h2>{write_table(heads, rows, sortable=True)}"
    if rest:
        body += f"<h2>Other collectives, summed by line</h2>{_write_sums(rest)}"
    body += _write_memory(report.memory)
    return write_document(f"reshard doctor: {report.program}", body + _FOOTER, _STYLE + STYLE, SORT)


_FOOTER = "<footer>Bytes are those of one device. A click on the head of a column, or Enter, sorts its table.</footer>"
_LEGEND = """<details><summary>How to read this</summary><dl class="legend">
<dt><code>&lt;x=4, y=2&gt;</code></dt><dd>a mesh of 8 devices, with axes x and y</dd>
<dt><code>f32[{y}8, 16]</code></dt><dd>a dim of 2 &times; 8 elements in pieces of 8, split along y, and one of 16 that
is not split</dd>
<dt><code>{x}{y}2</code></dt><dd>a dim split along x, then y, in pieces of 2</dd>
<dt><code>f32[8] + sum{x}</code></dt><dd>partial sums, which are to be added along x</dd>
<dt><code>5 &times; all_gather</code></dt><dd>a loop runs it five times; n &times;: as often as the data says</dd>
<dt>received</dt><dd>what a device receives in a run of the program</dd>
<dt>needed</dt><dd>what some device must receive in any case; after a &le;, an upper bound of that</dd>
<dt>reshard</dt><dd>what a device would receive in the plan of reshard</dd>
<dt>near train.py:3</dt><dd>the nearest line that the compiler kept; the instruction itself has none</dd>
</dl></details>"""


def _write_totals(report: Findings) -> str:
    """The totals as a row of cards."""
    arrays = "array" if len(report.rebuilt) == 1 else "arrays"
    totals = [
        (bytes_text(report.received_bytes), f"received, {counted(report.traffic.launches, 'collective')}", ""),
        (bytes_text(report.needed_bytes), "needed by the same operations in the same layouts", ""),
        (bytes_text(report.reached_bytes), "reached with reshard", ""),
        (bytes_text(report.wasted_bytes), "of it not needed", "bad" if report.wasted_bytes else ""),
        (str(len(report.rebuilt)), f"{arrays} rebuilt whole on every device", "bad" if report.rebuilt else ""),
        (bytes_text(report.saved_bytes), "saved by reshard", "good" if report.saved_bytes else ""),
    ]
    if report.reorder_bytes:
        totals.append((bytes_text(report.reorder_bytes), "more with sums in any order", ""))
    if report.compiled is not None:
        memory = report.compiled
        totals.append((bytes_text(memory.peak_bytes), f"memory, {bytes_text(memory.temp_bytes)} temporary", ""))
    return write_cards(totals)


def _write_advice(advice: Advice) -> str:
    """The changes with what each saves, measured one after another."""
    heads = [("where", False), ("change", False), ("with those above", False)]
    rows = (
        [f"<code>{escape(where)}</code>", f"<code>{escape(edit)}</code>", escape(gain)]
        for where, edit, gain in advice.rows
    )
    facts = "".join(f"<br>{name}: <span class='mono'>{escape(text)}</span>" for name, text in advice.facts)
    table = write_table(heads, rows) if advice.changes else ""
    return f"<h2>Shardings to change</h2><p>{escape(advice.summary)}{facts}</p>{table}"


def _write_memory(memory: ProgramMemory) -> str:
    """The live bytes over time, and the buffers at the peak; nothing if nothing is stored."""
    if not memory.buffers:
        return ""
    shown = memory.buffers[:_BUFFERS]
    rest = sum(buffer.array.nbytes for buffer in memory.buffers[_BUFFERS:])
    more = f"<p class='faint'>{len(memory.buffers) - len(shown)} more of {bytes_text(rest)} in all</p>" if rest else ""
    heads = [("bytes", True), ("where", False), ("made by", False), ("array", False)]
    saved = (
        f", <span class='good'>{bytes_text(memory.saved_bytes)} saved by reshard</span>" if memory.saved_bytes else ""
    )
    rows = (
        [
            write_number(buffer.array.nbytes, bytes_text(buffer.array.nbytes)),
            f"<code>{escape(format_short_line(buffer.where))}</code>",
            f"<span class='{'bad' if buffer.moved else ''}'>{escape(buffer.does)}</span>",
            f"<code>{format_array(buffer.array)}</code>",
        ]
        for buffer in shown
    )
    return (
        f"<h2>Memory: {bytes_text(memory.peak_bytes)} live at the peak, {bytes_text(memory.moved_bytes)} of it made by "
        f"moves{saved}</h2><figure>{draw_live_bytes(memory.timeline)}<figcaption>Live bytes at each instruction, in "
        f"the order of the compiled program; <span class='bad'>red</span> where a move between devices runs."
        f"</figcaption></figure><h2>Live at the peak</h2>{write_table(heads, rows, sortable=True)}{more}"
    )


def _write_article(at: int, one: Finding, longest: int) -> str:
    """Everything about a wasteful place."""
    place = one.place
    css = "bad" if place.rebuilds_whole else ""
    code = "".join(
        f"<span class='{'here' if line.here else 'faint'}'>{line.number:5} {escape(line.text)}</span>"
        for line in quote_lines(place.where)
    )
    # Bars on the scale of the largest place.
    rows = [("received", place.received_bytes, "bad", "")]
    if place.planned_bytes is not None:
        rows.append(("reshard", place.planned_bytes, "good", ""))
    rows.append(("needed", place.needed_bytes, "faint", "" if place.exact else "&le; "))
    lines = (
        f"<span>{name}</span>{write_bar(place.runs * count / max(1, longest), colour)}"
        f"<span class='end'>{mark}{bytes_text(place.runs * count)}</span>"
        for name, count, colour, mark in rows
    )
    temp = f"<span>temporary</span><span></span><span class='end'>{bytes_text(place.temp_bytes)}</span>"
    parts = [
        f"<header><span class='faint'>{at}</span><b class='mono'>{escape(one.where)}</b>{_write_tags(one)}</header>",
        f"<p class='faint mono'>{escape(format_origin(place.where))}</p>",
        f"<pre class='code mono'>{code}</pre>" if code else "",
        *(f"<p class='mono'>{_write_move(move)}</p>" for move in one.moves),
        f"<p>XLA: <b>{escape(one.does)}</b></p>",
        "" if place.counted else f"<p class='faint'>{escape(OTHER_BRANCH)}</p>",
        f"<p class='{css}'>{escape(one.rebuilt[0].upper() + one.rebuilt[1:])}</p>" if one.rebuilt else "",
        f'<div class="bars">{"".join(lines)}{temp}</div>',
        f"<p class='good'>reshard: {escape(one.plan)}</p>" if one.plan else "",
        f"<p class='faint'>{escape(one.causes[0].upper() + one.causes[1:])}</p>" if one.causes else "",
        f"<p class='faint'>{escape(one.left[0].upper() + one.left[1:])}</p>" if one.left else "",
        _write_collectives(place),
    ]
    return f"<article>{''.join(parts)}</article>"


def _write_tags(one: Finding) -> str:
    tags = [f"{counted(one.alike, 'place')} alike"] if one.alike > 1 else []
    tags += [] if one.place.kind == RESHARD else [one.place.kind]
    return "".join(f'<span class="tag">{escape(tag)}</span>' for tag in tags)


def _write_move(texts: tuple[str, str]) -> str:
    before, after = texts
    return f"{escape(before)} <span class='mark'>&rarr;</span> {escape(after)}"


def _write_collectives(place: Place) -> str:
    """The collectives of a place, in a table that opens on a click."""
    heads = [("collective", False), ("result", False), ("devices", True), ("received", True)]
    rows: list[list[str]] = []
    for one in place.collectives:
        results = ", ".join(format_array(array) for array in one.results[:4]) + (" ..." if len(one.results) > 4 else "")
        name = f"{escape(one.kind)}<br><code class='faint'>{escape(one.name)}</code>"
        rows.append([name, f"<code>{escape(results)}</code>", str(one.group_size), bytes_text(one.received_bytes)])
    return (
        f"<details><summary>{counted(len(place.collectives), 'collective')} in {escape(place.computation)}</summary>"
        f"{write_table(heads, rows)}</details>"
    )


def _write_sums(lines: Sequence[LineSum]) -> str:
    heads = [("where", False), ("received", True), ("launches", True), ("XLA does", False), ("why", False)]
    rows = (
        [
            f"<code>{escape(format_short_line(line.where))}</code>",
            write_number(line.received_bytes, bytes_text(line.received_bytes)),
            str(line.launches),
            escape(line.does),
            line.why,
        ]
        for line in lines
    )
    return write_table(heads, rows, sortable=True)


# The lines of the user's program around the origin of a place, if its file is on this machine.


_AROUND = 2
_LARGEST = 1 << 20  # bytes of a file: no program is larger


class SnippetLine(NamedTuple):
    """A line of a file; `here` is whether it is the one that is meant."""

    number: int
    text: str
    here: bool


def quote_lines(where: Source) -> tuple[SnippetLine, ...]:
    """The line of an origin with two lines before and after; empty if the file cannot be read or has no such line.

    >>> quote_lines(Source("f", "no/such/file.py", 3))
    ()
    """
    if where.file is None or where.line is None:
        return ()
    try:
        path = Path(where.file)
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return ()
    if not 0 < where.line <= len(lines):
        return ()
    first = max(1, where.line - _AROUND)
    shown = lines[first - 1 : where.line + _AROUND]
    return tuple(SnippetLine(number, text, number == where.line) for number, text in enumerate(shown, first))


# A picture of the bytes live on a device while a program runs, instruction by instruction, as inline SVG.


STYLE = """
.timeline { display: block; width: 100%; height: 9rem; background: var(--track); border-radius: 3px; }
.ends { display: flex; justify-content: space-between; color: var(--faint); font-size: .78rem; }
.timeline .live { fill: var(--mark); opacity: .55; } .timeline .moves { fill: var(--bad); }
"""
_POINTS = 300  # bars that a page has room for


def draw_live_bytes(moments: Sequence[InstructionMemory]) -> str:
    """An area for the bytes live at each instruction, on a scale up to the peak; red where a move makes data.

    >>> draw_live_bytes([InstructionMemory("p", 64, False), InstructionMemory("g", 320, True)]).count("<rect")
    2
    """
    each = -(-len(moments) // _POINTS) or 1
    bars: list[InstructionMemory] = []
    for start in range(0, len(moments), each):  # Neighbouring moments share a bar, which shows the highest of them.
        group = moments[start : start + each]
        most = max(group, key=lambda moment: moment.live_bytes)
        bars.append(most._replace(moves=any(moment.moves for moment in group)))
    peak = max((bar.live_bytes for bar in bars), default=0)
    if not peak:
        return ""
    rects = (
        f'<rect class="{"moves" if bar.moves else "live"}" x="{at}" y="{100 - 100 * bar.live_bytes / peak:.2f}" '
        f'width="1.02" height="{100 * bar.live_bytes / peak:.2f}"><title>{bytes_text(bar.live_bytes)}</title></rect>'
        for at, bar in enumerate(bars)
    )
    return (
        f'<svg class="timeline" viewBox="0 0 {len(bars)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="live bytes, at most {bytes_text(peak)}">{"".join(rects)}</svg>'
        f'<div class="ends"><span>start</span><span>top: {bytes_text(peak)}</span><span>end</span></div>'
    )
