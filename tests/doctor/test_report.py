"""The report as a table, as JSON and as a page."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from reshard import hlo
from reshard.doctor import Compiled, examine
from reshard.doctor.report import table as terminal
from reshard.doctor.report.phrases import hidden, rows, shown
from tests.doctor.test_places import GATHER, OFFSET, SLICE, ZERO, text
from tests.markup import Read, check_self_contained

DATA = Path(__file__).parent / "data"
TRAIN = (DATA / "train_cpu_0.12.0.1.hlo").read_text()
GOLDEN = """\
jit_step on 8 devices
  received    224.1 MiB a device, 3 collectives
  not needed  196.0 MiB, 196.0 MiB of it saved by reshard
  rebuilt     1 array, whole on every device
  memory      29 B a device: arguments 8 B, outputs 4 B, temporary 20 B

      where         XLA does        received     needed        temp   reshard would       saves
  ─────────────────────────────────────────────────────────────────────────────────────────────
  1   train.py:17   2 all_gather   224.0 MiB   28.0 MiB   352.0 MiB   all_to_all      196.0 MiB

  1  train.py:17, program.<locals>.step, jit(step)/add
     f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256] on <x=4, y=2>
     rebuilds the whole array on every device: f32[512,512,256], 256.0 MiB
     reshard: all_to_all, 28.0 MiB received, 32.0 MiB of temporary memory; saves 196.0 MiB and
     320.0 MiB of memory

not shown: 1 place that receives little"""
REDUCTION = """%sum {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}
"""


def report_of_all_kinds():
    """A gather that is cut twice in the same way, a user's own gather, a reduction, and a permute of little."""
    named = 'metadata={op_name="jit(<lambda>)/shard_map/all_gather" source_file="a<b>.py" source_line=3}'
    again = [line.replace("%g", "%h").replace("%d", "%e") for line in (GATHER, SLICE)]
    lines = [
        *OFFSET, ZERO, GATHER, SLICE, *(line.replace("channel_id=1", "channel_id=9") for line in again),
        f"%u = f32[8,8]{{1,0}} all-gather(%p), channel_id=2, replica_groups=[1,4]<=[4], dimensions={{0}}, {named}",
        "%s = f32[2,8]{1,0} all-reduce(%p), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%sum",
        "%one = f32[1,1]{1,0} slice(%p), slice={[0:1], [0:1]}",
        "%m = f32[1,1]{1,0} collective-permute(%one), source_target_pairs={{0,1}}",
        "ROOT %r = f32[8,8]{1,0} custom-call(%d, %e, %u, %s, %m)",
    ]  # fmt: skip
    return examine(text(*lines, before=REDUCTION))


def test_the_table():
    assert str(examine(TRAIN, compiled=Compiled(8, 4, 20, 3))) == GOLDEN


def test_what_is_not_shown_is_counted():
    report = report_of_all_kinds()
    main = shown(report)
    assert [place.kind for place in main] == ["reshard", "reshard"]
    assert hidden(report, main) == "1 reduction, 1 place of the program's own shard_map, 1 place that receives little"
    assert [(row.place.kind, row.places) for row in rows(main)] == [("reshard", 2)]
    assert "not shown: 1 reduction, 1 place" in str(report)


def test_all_shows_all():
    report = report_of_all_kinds()
    out = Console(width=100, file=io.StringIO(), markup=False)
    terminal.show(out, report, every=True)
    printed = out.file.getvalue()
    assert "not shown" not in printed
    assert "all_reduce" in printed and "permute" in printed and "a<b>.py:3" in printed


def test_json_is_plain_data_and_round_trips():
    report = examine(TRAIN, compiled=Compiled(8, 4, 20, 3))
    data = json.loads(report.to_json(indent=2))
    assert data == report.to_dict() == json.loads(report.to_json())
    assert (data["program"], data["devices"], data["rebuilt"], data["launches"]) == ("jit_step", 8, 1, 3)
    assert data["compiled"] == {"argument_bytes": 8, "output_bytes": 4, "temp_bytes": 20, "alias_bytes": 3}
    first = data["places"][0]
    assert first["where"]["file"] == "train.py" and first["where"]["line"] == 17
    assert (first["received_bytes"], first["needed_bytes"], first["planned_bytes"]) == (7 << 25, 7 << 22, 7 << 22)
    assert first["moves"][0]["plan"]["steps"][0]["kind"] == "all_to_all"
    found = [one["name"] for place in data["places"] for one in place["collectives"]]
    assert sorted(found) == sorted(one.name for one in hlo.collectives(hlo.parse(TRAIN)))


NOTHING = text("ROOT %r = f32[2,8]{1,0} add(%p, %p)")


@pytest.mark.parametrize("report", [examine(TRAIN), report_of_all_kinds(), examine(NOTHING)])
def test_the_page_is_html_that_needs_nothing_else(report):
    html = report.to_html()
    check_self_contained(Read(html))
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|url\(|@import|//", html)
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html


def test_the_page_says_what_the_table_says():
    text = Read(examine(TRAIN).to_html()).text
    for said in (
        "jit_step on 8 devices",
        "f32[{y}256, 512, {x}64] → f32[512, {x}{y}64, 256]",
        "Rebuilds the whole array on every device: f32[512,512,256], 256.0 MiB",
        "reshard: all_to_all, 28.0 MiB received",
        "train.py:17",
    ):
        assert said in text


def test_the_page_has_every_place_and_quotes_names():
    words = "".join(Read(report_of_all_kinds().to_html()).words)
    assert "2 places alike" in words and "reduction" in words and "manual" in words
    assert "a<b>.py:3" in words  # as text: in the page it is escaped


def test_the_bars_are_to_scale():
    html = examine(TRAIN).to_html()
    widths = [float(width) for width in re.findall(r'<rect width="([\d.]+)"', html)]
    assert widths == [100.0, 12.5, 12.5]


def test_a_program_in_which_nothing_moves():
    report = examine(NOTHING)
    assert (report.places, report.received_bytes, report.rebuilt) == ((), 0, ())
    assert str(report) == "m on 4 devices: no data moves between devices"
