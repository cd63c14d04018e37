"""The report as a page: self-contained, true to scale, with the words of the table and the user's lines."""

import re
import shutil
import subprocess

import pytest

from reshard.doctor import examine
from reshard.doctor.live_bytes import InstructionMemory
from reshard.doctor.report.page import draw_live_bytes, quote_lines
from reshard.hlo import Source
from reshard.show.html import SORT
from tests.doctor.fragments import DATA, HLO_DATA
from tests.doctor.reports import NOTHING, TRAIN, report_of_all_kinds
from tests.markup import Read, check_self_contained

STAND_INS = """
const cell = (value, text) => ({ textContent: text, querySelector: () => value === null ? null : { value } });
const parent = { append(row) { table.rows.splice(table.rows.indexOf(row), 1); table.rows.push(row); } };
const row = (...cells) => ({ cells, parentNode: parent });
const kept = {};
const head = { cellIndex: 1, closest: () => table, getAttribute: key => kept[key] ?? null,
  setAttribute: (key, value) => { kept[key] = value; }, removeAttribute: key => { delete kept[key]; } };
const table = { rows: [{ cells: [head] }, row(cell(null, "a"), cell("9", "9 B")),
  row(cell(null, "b"), cell("1024", "1 KiB")), row(cell(null, "c"), cell("100", "100 B"))] };
const document = { querySelectorAll: () => [head] };
SORT
for (let click = 0; click < 2; click++) {
  head.onclick();
  console.log(table.rows.slice(1).map(row => row.cells[0].textContent).join(""), kept["aria-sort"]);
}
"""


@pytest.mark.parametrize("report", [examine(TRAIN), report_of_all_kinds(), examine(NOTHING)])
def test_the_page_is_self_contained(report):
    html = report.to_html()
    check_self_contained(Read(html), script=True)
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|url\(|@import|//|fetch\(|XMLHttp", html)
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html


def test_the_page_has_the_words_of_the_table():
    shown = Read(examine(TRAIN).to_html()).text
    for phrase in (
        "jit_step on 8 devices",
        "f32[{y}256, 512, {x}64] → f32[512, {x}{y}64, 256]",
        "Rebuilds the whole array on every device: f32[512,512,256], 256.0 MiB",
        "reshard: all_to_all, 28.0 MiB received",
        "train.py:17",
    ):
        assert phrase in shown


def test_the_page_has_every_place_and_escapes_names():
    words = "".join(Read(report_of_all_kinds().to_html()).words)
    assert "2 places alike" in words and "reduction" in words and "your shard_map" in words
    assert "a<b>.py:3" in words  # as text: in the page it is escaped


def test_tables_sort_by_their_numbers():
    """A click sorts by the bytes, not by their text; run by node, on a table of stand-ins, if there is one."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the script of the page needs node to run outside of a browser, and it is not installed")
    ran = subprocess.run([node, "-e", STAND_INS.replace("SORT", SORT)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["bca", "descending", "acb", "ascending"]


def test_the_memory_at_the_peak():
    html = examine(TRAIN).to_html()
    words = Read(html).text
    assert "448.2 MiB live at the peak, 384.0 MiB of it made by moves" in words
    assert "256.0 MiB train.py:17 all_gather f32[512,512,256]".replace(" ", "") in words.replace(" ", "")
    heights = [float(height) for height in re.findall(r'<rect class="\w+"[^>]* height="([\d.]+)"', html)]
    assert max(heights) == 100 and len(heights) == len(examine(TRAIN).memory.timeline)


def test_the_line_stands_in_its_program(monkeypatch):
    monkeypatch.chdir(DATA)  # the recorded program names train.py
    words = Read(examine(TRAIN).to_html()).text
    assert "17 total = a + b" in words and "19 return jnp.einsum" in words


def test_headings_of_what_there_is():
    """A program with nothing to save, and one in which nothing moves."""
    good = Read(examine((HLO_DATA / "gather_cpu_0.10.2.hlo").read_text()).to_html()).text
    assert "Resharded with nothing to save" in good and "at a loss" not in good
    assert "No data is resharded between devices." in Read(examine(NOTHING).to_html()).text


@pytest.mark.parametrize(("line", "numbers"), [(1, [1, 2, 3]), (2, [1, 2, 3, 4]), (4, [2, 3, 4, 5, 6]), (7, [5, 6, 7])])
def test_two_lines_before_and_after(tmp_path, line, numbers):
    file = tmp_path / "train.py"
    file.write_text("".join(f"x{at} = <{at}>\n" for at in range(1, 8)))
    lines = quote_lines(Source("f", str(file), line))
    assert [one.number for one in lines] == numbers
    assert [one.text for one in lines] == [f"x{at} = <{at}>" for at in numbers]
    assert [one.number for one in lines if one.here] == [line]


def test_a_line_that_is_not_there_has_no_snippet(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("x = 1\n")
    sources = [Source("f", str(file), 2), Source("f", str(file), 0), Source("f", str(tmp_path), 1), Source("f")]
    sources += [Source("f", "bad\0name", 1), Source("f", "<stdin>", 1)]
    assert [quote_lines(source) for source in sources] == [()] * 6


def bars(svg):
    return [(css, float(height)) for css, height in re.findall(r'<rect class="(\w+)".*? height="([\d.]+)"', svg)]


def test_bars_are_to_scale_and_moves_are_marked():
    moments = [InstructionMemory("a", 50, False), InstructionMemory("b", 200, True), InstructionMemory("c", 0, False)]
    assert bars(draw_live_bytes(moments)) == [("live", 25.0), ("moves", 100.0), ("live", 0.0)]


def test_long_programs_share_bars_and_keep_the_peak():
    moments = [InstructionMemory(str(at), 1000 if at == 501 else at % 7, at == 500) for at in range(1000)]
    drawn = bars(draw_live_bytes(moments))
    assert len(drawn) == 250 and drawn[125] == ("moves", 100.0)
    assert [css for css, _ in drawn].count("moves") == 1
