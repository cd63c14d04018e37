"""XLA's warnings in logs: real ones of two jaxlibs, the older wording, ones that cannot be read; their report."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from reshard.doctor import examine
from reshard.doctor.xla_log import MARK, LogReport, read_warnings, show_log
from tests.doctor.fragments import DATA
from tests.oracle import tiles_of

OLDER = (
    "2024-03-01 10:00:00.1: E external/xla/xla/service/spmd/spmd_partitioner.cc:613] [spmd] Involuntary full "
    "rematerialization. The compiler was not able to go from sharding {source} to {target} without doing a full "
    "rematerialization of the tensor for HLO operation: %add.0 = {tile} add(%a, %b), sharding={source}, "
    'metadata={{op_name="jit(f)/add" source_file="/jobs/my train.py" source_line=7}}. You probably want to enrich'
)


def warning(source="{devices=[4,2]<=[8]}", target="{devices=[2,4]<=[8]}", tile="bf16[25,64]{1,0}"):
    return OLDER.format(source=source, target=target, tile=tile)


def arriving(move):
    """The bytes that some device has in the target and not in the source, counted element by element."""
    before, after = tiles_of(move.source), tiles_of(move.target)
    return max(len(np.setdiff1d(after[device], before[device])) for device in after) * move.source.nbytes(1)


@pytest.mark.parametrize(("version", "axes"), [("0.10.2", "<d0=4, d1=2>"), ("0.12.0.1", "<x=4, y=2>")])
def test_the_warning_means_what_the_compiled_program_does(version, axes):
    """The figures of a real warning are those of the chain in the HLO that the same compiler made."""
    (move,) = read_warnings((DATA / f"train_{version}.log").read_text())
    (place, *_) = examine((DATA / f"train_cpu_{version}.hlo").read_text()).places
    assert (move.received_bytes, move.whole_bytes) == (place.received_bytes, place.largest.nbytes)
    assert (move.planned_bytes, move.saved_bytes) == (place.planned_bytes, place.saved_bytes)
    assert (move.times, move.where.op_name, str(move.source.mesh)) == (1, "jit(step)/add", axes)
    assert move.source.shape == (512, 512, 256)


def test_the_older_wording_has_the_line():
    (move,) = read_warnings(warning())
    assert (move.where.file, move.where.line, move.where.op_name) == ("/jobs/my train.py", 7, "jit(f)/add")
    assert (move.source.shape, str(move.source)) == ((100, 128), "bf16[{d0:(1)4}25, {d0:(4)2}64]")
    assert move.received_bytes == 2 * (100 * 128 - 25 * 64)
    assert move.planned_bytes == arriving(move)


@pytest.mark.parametrize(
    ("source", "target", "tile", "shape"),
    [
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", "{devices=[1,8]<=[8]}", "f32[4,16]", (16, 16)),
        ("{devices=[2,4]<=[4,2]T(1,0)}", "{replicated}", "f32[8,4]{1,0}", (16, 16)),
        ("{replicated}", "{devices=[8,1]<=[8]}", "s8[16,16]", (16, 16)),
        ("{mesh['a'=2,'b'=4], [{'b'}, {'a'}]}", "{mesh['a'=2,'b'=4], [{'a', 'b'}, {}]}", "f32[4,8]", (16, 16)),
        ("{mesh['a'=2,'b'=4], [{'b':(1)2}, {}]}", "{mesh['a'=2,'b'=4], [{}, {'b':(1)2}]}", "f32[8,8]", (16, 8)),
        ("{devices=[3,1]<=[3]}", "{devices=[1,3]<=[3]}", "f32[4,10]", (12, 10)),
    ],
)
def test_shardings_in_both_notations(source, target, tile, shape):
    (move,) = read_warnings(warning(source, target, tile))
    assert (move.problem, move.source.shape, move.target.shape) == ("", shape, shape)
    assert list(move.source.tile_shape) == [int(size) for size in tile.partition("]")[0].partition("[")[2].split(",")]
    assert move.received_bytes == (math.prod(shape) * move.source.nbytes(1)) - move.source.tile_bytes
    assert move.planned_bytes == arriving(move)


def test_equal_warnings_are_one_move_and_the_costliest_comes_first():
    small = warning(tile="bf16[2,4]")
    moves = read_warnings("\n".join(["step 1", small, warning(), small, "step 2", small]))
    assert [(move.times, move.source.shape) for move in moves] == [(1, (100, 128)), (3, (8, 8))]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (MARK, "the warning is cut off"),
        (warning()[:250], "the warning is cut off"),
        (warning(source="{devices=[4,2]<=[8] lost}"), "cannot read"),
        (warning(tile="bf16[25,64,3]"), "dim"),
    ],
    ids=["only the mark", "cut off", "no sharding", "another rank"],
)
def test_a_warning_that_cannot_be_read_says_why(line, problem):
    (move,) = read_warnings(line)
    assert problem in move.problem
    assert (move.source, move.plan, move.received_bytes, move.saved_bytes) == (None, None, 0, 0)


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
