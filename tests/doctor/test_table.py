"""The report in a terminal."""

import io

import pytest
from rich.console import Console

from reshard.doctor import CompiledMemory, examine
from reshard.doctor.advice import Advice, Change, Figures
from reshard.doctor.report import table
from tests.doctor.fragments import GATHER, OFFSET, SLICE, ZERO, text
from tests.doctor.reports import TRAIN

GOLDEN = """\
jit_step on 8 devices
  received    224.1 MiB a device, 3 collectives
  needed      28.1 MiB by the same operations in the same layouts
  reached     28.1 MiB with reshard
  not needed  196.0 MiB, 196.0 MiB of it saved by reshard
  rebuilt     1 array, whole on every device
  live        448.2 MiB a device at the peak: 384.0 MiB made by moves, 320.0 MiB saved by reshard in
              this order
  memory      29 B a device: arguments 8 B, outputs 4 B, temporary 20 B

      where         XLA does        received     needed        temp   reshard would       saves
  ─────────────────────────────────────────────────────────────────────────────────────────────
  1   train.py:17   2 all_gather   224.0 MiB   28.0 MiB   352.0 MiB   all_to_all      196.0 MiB

  1  train.py:17, program.<locals>.step, jit(step)/add
     f32[{y}256, 512, {x}64] -> f32[512, {x}{y}64, 256] on <x=4, y=2>
     rebuilds the whole array on every device: f32[512,512,256], 256.0 MiB
     reshard: all_to_all, 28.0 MiB received, 32.0 MiB of temporary memory; saves 196.0 MiB and
     320.0 MiB of memory

  summed by line     XLA does     launches   received   why
  ─────────────────────────────────────────────────────────────────────
  near train.py:19   all_gather          1   64.0 KiB   receives little

  live at peak   array              made by      where
  ───────────────────────────────────────────────────────────────
     256.0 MiB   f32[512,512,256]   all_gather   train.py:17
     128.0 MiB   f32[256,512,256]   all_gather   train.py:17
      32.0 MiB   f32[256,512,64]    argument     near train.py:17
      32.0 MiB   f32[256,512,64]    argument     near train.py:17
     192.0 KiB   2 more arrays"""


def test_the_table():
    assert str(examine(TRAIN, compiled=CompiledMemory(8, 4, 20, 3))) == GOLDEN


def test_where_most_of_what_is_received_is_needed_advice_is_the_next_step(monkeypatch):
    assert examine(TRAIN).hint == ""
    report = examine(TRAIN)
    for figure in ("wasted_bytes", "saved_bytes"):
        monkeypatch.setattr(type(report), figure, 64 << 20)
    assert report.hint.startswith("Most of what is received is needed in these layouts: `report.advise()`")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_narrow_terminals_keep_the_columns_that_matter(width):
    """No line is wider than the terminal, and the line of the program and the bytes are whole."""
    out = Console(width=width, file=io.StringIO(), markup=False)
    table.show_report(out, examine(TRAIN))
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    row = next(line.split() for line in lines if line.startswith("  1   train.py:17"))
    assert row[-2:] == ["196.0", "MiB"] and "224.0" in row
    assert any(line.split()[:2] == ["256.0", "MiB"] and line.endswith("train.py:17") for line in lines)


def test_the_whole_stack_on_request():
    """Lines of frameworks are only in the stack, never the line of a place."""
    tables = """
FileNames
1 "/env/site-packages/flax/linen/module.py"
2 "/home/me/train.py"

FunctionNames
1 "__call__"
2 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=70}
2 {file_name_id=2 function_name_id=2 line=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
"""
    gather = GATHER + ', metadata={op_name="f" stack_frame_id=2}'
    module = text(*OFFSET, ZERO, gather, SLICE, "ROOT %r = f32[8,2]{1,0} add(%d, %d)").replace(
        "\n\n", "\n" + tables + "\n", 1
    )
    report = examine(module)
    out = Console(width=100, file=io.StringIO(), markup=False)
    table.show_report(out, report, frames=True)
    assert [line.strip() for line in out.file.getvalue().splitlines() if "module.py" in line or "step" in line] == [
        "1  me/train.py:9, step, f",
        "linen/module.py:70, __call__",
        "me/train.py:9, step",
    ]
    assert "module.py" not in str(report) and "train.py:9" in str(report)


def test_more_rows_than_anyone_reads():
    """30 gathers that are sliced, each on another line: 25 rows, and a count of the others."""
    lines = [*OFFSET, ZERO]
    for at in range(30):
        gather = GATHER.replace("%g =", f"%g{at} =").replace("channel_id=1", f"channel_id={at + 1}")
        line = f'metadata={{op_name="f" source_file="a.py" source_line={at + 1}}}'
        lines += [f"{gather}, {line}", SLICE.replace("%d =", f"%d{at} =").replace("%g", f"%g{at}")]
    used = ", ".join(f"%d{at}" for at in range(30))
    report = examine(text(*lines, f"ROOT %r = f32[] custom-call({used})"))
    assert len(report.places) == 30
    printed = str(report)
    assert "  25   a.py:" in printed and "  26   a.py:" not in printed
    assert "\nnot shown: 5 more rows, 960 B received\n" in printed


def test_lines_beyond_the_twelfth_share_a_row():
    """A large gather, and 20 small permutes on lines of their own: all launches and bytes are in the table."""
    lines = [*OFFSET, ZERO, GATHER.replace("8,8", "800,8").replace("%p)", "%q)"), "%q = f32[200,8]{1,0} parameter(1)"]
    lines = [lines[-1], *lines[:-1]]
    for at in range(20):
        line = f'metadata={{op_name="f" source_file="a.py" source_line={at + 1}}}'
        lines.append(f"%one{at} = f32[1,1]{{1,0}} slice(%q), slice={{[{at}:{at + 1}], [0:1]}}")
        lines.append(f"%m{at} = f32[1,1]{{1,0}} collective-permute(%one{at}), source_target_pairs={{{{0,1}}}}, {line}")
    used = ", ".join(f"%m{at}" for at in range(20))
    printed = str(examine(text(*lines, f"ROOT %r = f32[] custom-call(%g, {used})"))).splitlines()
    start = next(at for at, line in enumerate(printed) if "summed by line" in line) + 2
    assert [line.split() for line in printed[start : start + 13]] == [
        *([f"a.py:{at}", "permute", "1", "4", "B", "receives", "little"] for at in range(1, 13)),
        ["8", "more", "8", "32", "B"],
    ]


def test_gains_of_several_changes_are_of_each_with_those_above_it():
    first, second = (
        Change(f"a.py:{at}", "with_sharding_constraint", "constraint", "P('x')", "removed", received, 8, 9)
        for at, received in ((1, 60), (2, 10))
    )
    lines = str(Advice((first, second), Figures(100, 8, 9), compiles=3)).splitlines()
    assert lines[0] == "2 changes, each measured with those above it, found in 3 compiles"
    assert [line.strip() for line in lines if "saves" in line] == ["saves 40 B received", "saves 50 B received"]


def test_what_is_little_beside_the_first_gain_is_not_said():
    figures = [(100_000, 500, 500), (90_000, 499, 700), (50_000, 600, 9_000)]
    changes = [Change(f"a.py:{at}", "put", "constraint", "P('x')", "removed", *each) for at, each in enumerate(figures)]
    gains = Advice(tuple(changes), Figures(200_000, 1_000, 501)).gains
    assert gains == (
        "saves 97.7 KiB received",
        "saves 10000 B received",
        "saves 39.1 KiB received; adds 8300 B at the peak",
    )


def test_long_names_have_lines_of_their_own():
    names = ", ".join(f"params['layers'][{at}]['attention']['query']" for at in range(6))
    change = Change(names, "in_sharding", "in_sharding", "P('x')", "P('y')", 10, 8, 9)
    lines = str(Advice((change,), Figures(100, 8, 9), compiles=3)).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-2:] == ["      in_sharding(P('x')) -> P('y')", "      saves 90 B received"]
