"""The parts of pages: well-formed, escaped where they take text, and to scale."""

import re

from reshard.show.html import bar, cards, document, table
from tests.markup import Read, check_self_contained


def test_a_document_is_a_page_that_needs_nothing_else():
    text = document("a < b & c", "<p>body</p>", ".own { color: red; }")
    read = Read(text)
    check_self_contained(read)
    assert "<title>a &lt; b &amp; c</title>" in text and ".own { color: red; }</style>" in text
    assert read.tags[:2] == ["html", "head"] and "body" in read.words


def test_every_colour_has_a_light_and_a_dark_value():
    style = document("", "").partition("<style>")[2].partition("</style>")[0]
    light, dark = (re.findall(r"(--\w+): #", part) for part in style.split("@media", 1))
    assert light == dark
    assert set(re.findall(r"var\((--\w+)\)", style)) <= set(light)


def test_cards_and_their_colours():
    read = Read(cards([("1", "first", "good"), ("<i>2</i>", "second", "")]))
    assert not read.wrong and read.text == "1first2second"
    assert read.all("class") == ["sums", "sum", "good", "sum", ""]


def test_a_bar_is_as_wide_as_its_share():
    for share in (0, 0.125, 1):
        assert Read(bar(share, "mark")).all("width") == [f"{100 * share:.2f}"]
    assert "var(--mark)" in bar(0.5, "mark")


def test_a_table_has_heads_and_cells_in_order():
    read = Read(table([("name <1>", False), ("size", True)], [["<b>a</b>", "1"], ["c", "2"]]))
    assert not read.wrong and [tag for tag in read.tags if tag in ("th", "td")] == ["th", "th", *["td"] * 4]
    assert [word for word in read.words if word] == ["name <1>", "size", "a", "1", "c", "2"]
    assert (
        read.all("class") == ["scroll", "heads", "num", "num", "num"]
        and read.all("data-head") == ["name <1>", "size"] * 2
    )
