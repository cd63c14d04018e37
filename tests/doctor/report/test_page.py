"""The report as a page: self-contained, true to scale, and with the words of the table."""

import re

import pytest

from reshard.doctor import CompiledMemory, examine
from tests.doctor.fragments import HLO_DATA
from tests.doctor.report.reports import NOTHING, TRAIN, report_of_all_kinds
from tests.markup import Read, check_self_contained


@pytest.mark.parametrize("report", [examine(TRAIN), report_of_all_kinds(), examine(NOTHING)])
def test_the_page_is_self_contained(report):
    html = report.to_html()
    check_self_contained(Read(html))
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|url\(|@import|//", html)
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html


def test_the_page_has_the_words_of_the_table():
    text = Read(examine(TRAIN).to_html()).text
    for phrase in (
        "jit_step on 8 devices",
        "f32[{y}256, 512, {x}64] → f32[512, {x}{y}64, 256]",
        "Rebuilds the whole array on every device: f32[512,512,256], 256.0 MiB",
        "reshard: all_to_all, 28.0 MiB received",
        "train.py:17",
    ):
        assert phrase in text


def test_the_page_has_every_place_and_escapes_names():
    words = "".join(Read(report_of_all_kinds().to_html()).words)
    assert "2 places alike" in words and "reduction" in words and "your shard_map" in words
    assert "a<b>.py:3" in words  # as text: in the page it is escaped


def test_the_bars_are_to_scale():
    html = examine(TRAIN).to_html()
    widths = [float(width) for width in re.findall(r'<rect width="([\d.]+)"', html)]
    assert widths == [100.0, 12.5, 12.5]


def test_the_memory_of_the_program():
    text = Read(examine(TRAIN, compiled=CompiledMemory(8, 4, 20, 3)).to_html()).text
    assert "29 B" in text and "memory, 20 B temporary" in text


def test_headings_of_what_there_is():
    """A program with nothing to save, and one in which nothing moves."""
    good = Read(examine((HLO_DATA / "gather_cpu_0.10.2.hlo").read_text()).to_html()).text
    assert "Resharded with nothing to save" in good and "at a loss" not in good
    assert "No data is resharded between devices." in Read(examine(NOTHING).to_html()).text
