"""The report on a log: its table, its JSON, and moves that cannot be planned."""

import io
import json

import pytest
from rich.console import Console

from reshard.doctor.report.table import LogReport, show_log
from reshard.doctor.xla_log import MARK
from tests.doctor.fragments import DATA

REAL = (DATA / "train_0.12.0.1.log").read_text()

GOLDEN = """\
2 arrays that XLA rebuilds whole on every device
  received    224.0 MiB a device
  not needed  196.0 MiB

      where     times       array    received   reshard would    receive       saves
  ──────────────────────────────────────────────────────────────────────────────────
  1   add           1   256.0 MiB   224.0 MiB   all_to_all      28.0 MiB   196.0 MiB
  2   unknown       1           -           -   -                      -           -

  1  add, jit(step)/add
     f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256] on <x=4, y=2>

  2  unknown
     not planned: the warning is cut off"""


def test_the_table():
    assert str(LogReport.of(f"{REAL}\nW0 {MARK}. The comp")) == GOLDEN


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_terminals_keep_the_columns_that_matter(width):
    out = io.StringIO()
    show_log(Console(width=width, file=out, markup=False), LogReport.of(REAL))
    lines = out.getvalue().splitlines()
    (row,) = (line for line in lines if line.startswith("  1   add"))
    assert max(map(len, lines)) <= width and "224.0 MiB" in row and "196.0 MiB" in row
    assert not any("…" in line for line in lines)


def test_json_is_plain_data_and_adds_up():
    report = LogReport.of(f"{REAL}\nW0 {MARK}. The comp")
    data = json.loads(report.to_json(indent=2))
    assert data == report.to_dict() == json.loads(report.to_json())
    assert data["received_bytes"] == sum(move["received_bytes"] for move in data["moves"]) == 7 << 25
    assert data["saved_bytes"] == sum(move["saved_bytes"] for move in data["moves"]) == 49 << 22
    first, second = data["moves"]
    assert (first["source"], first["mesh"]) == ("f32[{y}256, 512, {x}64]", "<x=4, y=2>")
    assert first["shardings"][1] == "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]}"
    assert (second["plan"], second["problem"]) == (None, "the warning is cut off")


def test_two_meshes_are_both_named():
    line = "Involuntary full rematerialization. The compiler cannot go from sharding {devices=[2,3]<=[3,2]T(1,0)} to "
    line += "{devices=[3,2]<=[2,3]T(1,0)} efficiently for HLO operation %a = f32[3,2]{1,0} add(%b, %c), metadata={}. As"
    assert "f32[{d1}3, {d0}2] -> f32[{d1}2, {d0}3] on <d0=3, d1=2> and <d0=2, d1=3>" in str(LogReport.of(line))
