"""The parts of every HTML page: one style sheet for light and dark, cards, bars and tables; no network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

LIGHT = """--back: #fbfbfa; --card: #fff; --text: #1c1e21; --faint: #62676d; --line: #e2e4e6;
  --bad: #c0362c; --good: #1f7a4d; --mark: #2563a8; --track: #eef0f1;"""
DARK = """--back: #15171a; --card: #1d2024; --text: #e6e8ea; --faint: #9aa1a8; --line: #31363b;
  --bad: #f08a80; --good: #6fce9f; --mark: #82b4ea; --track: #2a2e33;"""
"""What each colour of a page means, on a light and on a dark one: paper and words, "bad" for errors and what is lost,
"good" for bounds that are met, "mark" for what can be pressed or is pointed at. The site and the playground have them
from here; those of devices and of memory are in `draw/scene.py`.
"""

_ROOT = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
"""

SHEET = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.35rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .6rem; }
code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: .86em; overflow-wrap: anywhere; }
.sums { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; }
.sum, article, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.sum { padding: .7rem .9rem; } article, figure { margin: 0 0 .75rem; padding: .9rem 1rem; }
figure { overflow-x: auto; } figcaption { margin-top: .5rem; color: var(--faint); font-size: .86rem; }
ol, ul { margin: 0; padding-left: 1.3rem; } li { margin: 0 0 .45rem; }
.sum b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.sum span, .faint { color: var(--faint); font-size: .86rem; }
.bad { color: var(--bad); } .good { color: var(--good); } .mark { color: var(--mark); }
p { margin: .45rem 0; }
.bars { display: grid; grid-template-columns: minmax(4.6rem, max-content) minmax(4rem, 1fr) minmax(6rem, max-content);
  gap: .2rem .7rem; align-items: center; margin: .7rem 0; font-size: .86rem; font-variant-numeric: tabular-nums; }
.bars svg { display: block; width: 100%; height: .7rem; border-radius: 3px; background: var(--track); }
.bars .end { text-align: right; }
.scroll { overflow-x: auto; margin: 0 0 .75rem; padding: .3rem 1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
article .scroll { margin: 0; padding: 0; border: 0; border-radius: 0; }
table { border-collapse: collapse; width: 100%; min-width: 34rem; margin: .2rem 0; font-size: .86rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--faint); font-weight: 500; } th, td { padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } .num { text-align: right; white-space: nowrap; }
tr:last-child td { border-bottom: 0; } td code { overflow-wrap: normal; }
.sortable th { cursor: pointer; white-space: nowrap; } .sortable th::after { content: " \\2195"; opacity: .45; }
.sortable th[aria-sort]::after { content: " \\2193"; opacity: 1; }
.sortable th[aria-sort=ascending]::after { content: " \\2191"; }
@media (max-width: 44rem) { table { min-width: 0; } table, tbody, tr { display: block; }
  tr { padding: .4rem 0; border-bottom: 1px solid var(--line); } tr:last-child { border-bottom: 0; }
  td { display: grid; grid-template-columns: 6.5rem minmax(0, 1fr); padding: .1rem 0; border: 0;
    overflow-wrap: anywhere; }
  td::before { content: attr(data-head); color: var(--faint); } td[data-head=""], .heads { display: none; }
  td code { overflow-wrap: anywhere; } .num { text-align: left; white-space: normal; } th { border: 0; padding: 0; }
  .sortable .heads { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } }
:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
footer { margin-top: 2rem; color: var(--faint); font-size: .86rem; }
"""


SORT = """
for (const head of document.querySelectorAll("table.sortable th")) {
  head.tabIndex = 0;
  const sort = () => {
    const table = head.closest("table"), at = head.cellIndex;
    const up = head.getAttribute("aria-sort") === "descending";
    const key = row => row.cells[at].querySelector("data")?.value ?? row.cells[at].textContent;
    const rows = [...table.rows].slice(1).sort((a, b) => key(a).localeCompare(key(b), "en", { numeric: true }));
    for (const other of table.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    (up ? rows : rows.reverse()).forEach(row => row.parentNode.append(row));
  };
  head.onclick = sort;
  head.onkeydown = event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    sort();
  };
}
"""
"""A script with which a click on a column's head, or Enter or Space, sorts a `sortable` table.

Without it, the table stays as it is.
"""


def write_document(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page; `style` is CSS to add to the common sheet, `script` runs when the page is there.

    >>> print(write_document("plan", "<p>nothing to do</p>")[-48:-1])
    <main><p>nothing to do</p></main></body></html>
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_ROOT}{SHEET}{style}</style></head>"
        f"<body><main>{body}</main>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def write_cards(sums: Iterable[tuple[str, str, str]]) -> str:
    """A row of cards: each a figure, what it is, and "good", "bad" or "" for its colour; figures and words are HTML.

    >>> print(write_cards([("1792 B", "received, the lower bound", "good")]))
    <div class="sums"><div class="sum"><b class="good">1792 B</b><span>received, the lower bound</span></div></div>
    """
    shown = (f'<div class="sum"><b class="{css}">{value}</b><span>{what}</span></div>' for value, what, css in sums)
    return f'<div class="sums">{"".join(shown)}</div>'


def write_bar(share: float, colour: str) -> str:
    """A bar as wide as `share` of its place, in one of the sheet's colours: "good", "bad", "mark"."""
    return (
        '<svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.2f}" height="1" style="fill: var(--{colour})"/></svg>'
    )


def write_number(value: int, text: str) -> str:
    """A number with its text, for a cell that is sorted by the number.

    >>> write_number(2048, "2 KiB")
    '<data value="2048">2 KiB</data>'
    """
    return f'<data value="{value}">{text}</data>'


def write_table(heads: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]], sortable: bool = False) -> str:
    """A table; on a narrow screen, a block for each row. A head is a name and whether its column holds numbers.

    Cells are HTML. Where the page has the script `SORT`, a `sortable` table is sorted by a click on a head.
    """
    columns = list(heads)
    css = [" class='num'" if number else "" for _, number in columns]
    top = "".join(f"<th{c}>{escape(name)}</th>" for c, (name, _) in zip(css, columns, strict=True))
    starts = [f'<td{c} data-head="{escape(name)}">' for c, (name, _) in zip(css, columns, strict=True)]
    lines = (
        "<tr>" + "".join(f"{start}{cell}</td>" for start, cell in zip(starts, row, strict=True)) + "</tr>"
        for row in rows
    )
    kind = ' class="sortable"' if sortable else ""
    return f'<div class="scroll"><table{kind}><tr class="heads">{top}</tr>{"".join(lines)}</table></div>'
