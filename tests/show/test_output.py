"""Paragraphs and tables on a terminal or in a pipe, and the parts of pages."""

import re

import pytest
from rich.text import Text

from reshard.show import terminal
from reshard.show.html import write_document, write_table
from tests.markup import Read, check_self_contained
from tests.show.printing import printed


@pytest.mark.parametrize(
    ("columns", "width"), [("120", 120), ("7", 40), ("0", terminal.PIPED), ("wide", terminal.PIPED)]
)
def test_the_width_of_a_pipe(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.open_console().width == width


def test_brackets_are_not_markup(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    terminal.print_paragraph(terminal.open_console(), "f32[bold] [red]16[/red] :smile:")
    assert capsys.readouterr().out == "f32[bold] [red]16[/red] :smile:\n"


def test_a_paragraph_is_indented_as_far_as_its_mark():
    lines = printed(terminal.print_paragraph, "word " * 40, "  -  ", width=60).splitlines()
    assert lines[0].startswith("  -  word") and len(lines) > 3
    assert all(line.startswith("     word") for line in lines[1:]) and max(map(len, lines)) <= 60


@pytest.mark.parametrize("quantity", ["1792 B", "64.0 MiB", "12.5 us", "72.0 s"])
def test_a_number_stays_with_its_unit(quantity):
    for padding in range(20, 60):
        text = printed(terminal.print_paragraph, f"{'x' * padding} {quantity} is received", width=60)
        assert quantity in text


def test_facts_are_aligned():
    lines = printed(terminal.print_facts, [("a", "1"), ("longer", "2")]).splitlines()
    assert lines == ["  a       1", "  longer  2"]


def test_a_table_has_no_trailing_spaces_and_keeps_its_numbers():
    table = terminal.make_table("step", "bytes", right=["bytes"])
    for step, size in (("all_to_all " * 12, "1792 B"), ("slice", "0 B")):
        table.add_row(Text(step), Text(size))
    for width in (40, 72, 300):
        lines = printed(terminal.print_table, table, width=width, indent=2).splitlines()
        assert all(line == line.rstrip() and line.startswith("  ") for line in lines)
        assert sum(line.endswith("1792 B") for line in lines) == 1
        assert max(map(len, lines)) <= width
    assert lines[-1].endswith("   0 B")


def test_a_document_is_a_page_that_needs_nothing_else():
    text = write_document("a < b & c", "<p>body</p>", ".own { color: red; }")
    read = Read(text)
    check_self_contained(read)
    assert "<title>a &lt; b &amp; c</title>" in text and ".own { color: red; }</style>" in text
    assert read.tags[:2] == ["html", "head"] and "body" in read.words


def test_every_colour_has_a_light_and_a_dark_value():
    style = write_document("", "").partition("<style>")[2].partition("</style>")[0]
    light, dark = (re.findall(r"(--\w+): #", part) for part in style.split("@media", 1))
    assert light == dark
    assert set(re.findall(r"var\((--\w+)\)", style)) <= set(light)


def test_a_table_has_heads_and_cells_in_order():
    read = Read(write_table([("name <1>", False), ("size", True)], [["<b>a</b>", "1"], ["c", "2"]]))
    assert not read.wrong and [tag for tag in read.tags if tag in ("th", "td")] == ["th", "th", *["td"] * 4]
    assert [word for word in read.words if word] == ["name <1>", "size", "a", "1", "c", "2"]
    assert (
        read.all("class") == ["scroll", "heads", "num", "num", "num"]
        and read.all("data-head") == ["name <1>", "size"] * 2
    )
