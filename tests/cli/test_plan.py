"""`reshard plan`: its table, JSON, page and reasons; layouts in every notation; files of moves."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import reshard as rs
from reshard.cli.option_groups import ArrayOptions
from reshard.cli.requests import read_only_layout
from reshard.errors import ReshardError
from tests.cli.cases import ARRAY, MESH, SOURCE, TARGET
from tests.markup import Read, check_self_contained

GOLDEN = """\
f32[{y}8, 16, {x}4]
-> f32[16, {x}{y}2, 16]
   16.0 KiB on 8 devices, mesh <x=4, y=2>

      step         type after it          received     live
  ─────────────────────────────────────────────────────────
  1   all_to_all   f32[16, {x}{y}2, 16]     1792 B   6144 B

  received  1792 B on the worst device, the lower bound
  launches  1
  peak      6144 B live on a device: operand 2048 B + result 2048 B + scratch 2048 B; floor 4096 B
"""


def test_it_prints_a_table(call):
    ran = call("plan", *MESH, SOURCE, TARGET)
    assert (ran.code, ran.out, ran.err) == (0, GOLDEN, "")


def test_json_is_one_object_that_reads_back(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", "tpu-v5p", "--json")
    data = json.loads(ran.out)
    totals = {"source", "target", "steps", "received_bytes", "lower_bound_bytes", "launches", "peak_bytes", "seconds"}
    assert totals <= data.keys()
    for step in data["steps"]:
        assert {"kind", "operand", "result", "received_bytes", "live_bytes"} <= step.keys()
    assert (data["source"], data["target"]) == (SOURCE, TARGET)
    assert data["received_bytes"] >= data["lower_bound_bytes"] == 1792
    assert rs.Plan.from_json(ran.out).seconds == data["seconds"] > 0


def test_a_network_adds_seconds(call):
    ran = call("plan", *MESH, SOURCE, TARGET, "--network", "h100")
    assert "seconds" in ran.out
    assert re.search(r"predicted +[0-9.]+ us on h100", ran.out)


@pytest.mark.parametrize("size", ["4096", "4 KiB", "0.00390625MiB"])
def test_a_budget_is_met_however_it_is_written(call, size):
    ran = call("plan", *MESH, SOURCE, TARGET, "--budget", size, "--json")
    assert json.loads(ran.out)["peak_bytes"] == 4096


def test_donate_is_passed_on(call):
    assert json.loads(call("plan", *MESH, SOURCE, TARGET, "--donate", "--json").out)["donate"] is True


def test_slack_trades_bytes_for_launches(call):
    pair = ("--mesh", "x=8,y=8", "f32[{x}{y}16/997, 4]", "f32[997, 4]")
    plans = [
        json.loads(call("plan", *pair, *slack, "--json").out) for slack in ((), ("--slack", "0.05"), ("--slack", "0"))
    ]
    assert plans[0] == plans[1]
    assert plans[0]["launches"] == 1 < plans[2]["launches"]
    assert plans[0]["received_bytes"] > plans[2]["received_bytes"] == plans[2]["lower_bound_bytes"]
    assert f"With --slack 0 it would receive {plans[2]['received_bytes'] / 1024:.1f} KiB" in call(
        "plan", *pair, "--explain"
    ).out.replace("\n     ", " ")


@pytest.mark.parametrize(
    ("slack", "why"),
    [("5 percent", "cannot read the slack '5 percent'"), ("-1", "slack -1.0: give"), ("nan", "slack nan: give")],
)
def test_slack_that_cannot_be_used(call, slack, why):
    ran = call("plan", *MESH, SOURCE, TARGET, f"--slack={slack}")
    assert ran.code != 0 and why in ran.err


EXPLAINED = [
    (SOURCE, TARGET, "dim 0 is no longer split over y and dim 2 is no longer split over x"),
    (SOURCE, TARGET, "in its place, dim 1 becomes split over x and y"),
    ("f32[16]", "f32[{x}4]", "no dim was split over x before"),
    ("f32[{x}4, 16]", "f32[{y}8, {x}4]", "no single collective does that"),
    ("f32[{x}3/10]", "f32[{y}5]", "dim 0 (pieces of 3 before, pieces of 5 after) are uneven"),
    (SOURCE, TARGET, "Every --budget from 4096 B up can be met; the smallest takes 112 launches (exchange)"),
]


@pytest.mark.parametrize(("source", "target", "reason"), EXPLAINED, ids=[reason for *_, reason in EXPLAINED])
def test_explain_gives_the_reasons(call, source, target, reason):
    ran = call("plan", *MESH, source, target, "--explain")
    assert ran.code == 0
    assert reason in " ".join(ran.out.split())


def test_it_writes_a_page_and_prints_nothing(call, tmp_path):
    path = tmp_path / "plan.html"
    assert call("plan", *MESH, SOURCE, TARGET, "--html", path, "--network", "tpu-v5p") == (0, "", "")
    read = Read(path.read_text(encoding="utf-8"))
    check_self_contained(read)
    assert "predicted on tpu-v5p" in read.text and "no longer split over y" in read.text


def test_a_page_that_cannot_be_written_is_an_error(call, tmp_path):
    path = tmp_path / "none" / "plan.html"
    message = f"reshard: error: cannot write {path}: No such file or directory; "
    message += "give a file in a folder that is there and may be written\n"
    assert call("plan", *MESH, SOURCE, TARGET, "--html", path) == (2, "", message)


WRITTEN = [
    (SOURCE, TARGET, MESH),
    (SOURCE, "P(None, ('x', 'y'))", MESH),
    ("P('y', None, 'x')", TARGET, MESH),
    ("P('y', None, 'x')", "PartitionSpec(None, ('x', 'y'), None)", (*MESH, *ARRAY)),
    ('[{"y"}, {}, {"x"}]', '[{}, {"x", "y"}, {}]', (*MESH, *ARRAY)),
    ('[{"y"}, {}, {"x"}]', TARGET, MESH),
    ('<mesh<["x"=4, "y"=2]>, [{"y"}, {}, {"x"}]>', '[{}, {"x", "y"}, {}]', ARRAY),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}", ARRAY),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", TARGET, MESH),
    (SOURCE, "{devices=[1,8,1]<=[8]}", MESH),
    (SOURCE, "{devices=[1,8,1]<=[8]}", (*MESH, *ARRAY)),
    ("{devices=[2,1,4]<=[4,2]T(1,0)}", "P(None, ('d0', 'd1'))", ARRAY),
    ("P('d1', None, 'd0')", "{devices=[1,8,1]0,1,2,3,4,5,6,7}", ("--mesh", "d0=4,d1=2", *ARRAY)),
    (SOURCE, "f32[16, {z}2, 16]", (*MESH, "--target-mesh", "z=8")),
]


@pytest.mark.parametrize(("source", "target", "given"), WRITTEN)
def test_every_notation_means_the_same(call, source, target, given):
    ran = call("plan", source, target, *given, "--json")
    assert ran.err == ""
    data = json.loads(ran.out)
    assert [step["kind"] for step in data["steps"]] == ["all_to_all"]
    assert data["received_bytes"] == 1792


@pytest.mark.parametrize("pair", list(itertools.permutations(["{replicated}", "{devices=[8,1,1]<=[8]}"])))
def test_hlo_replicated_is_over_the_devices_of_the_other(call, pair):
    ran = call("plan", *pair, *ARRAY, "--json")
    kinds = [step["kind"] for step in json.loads(ran.out)["steps"]]
    assert kinds == (["slice"] if pair[0] == "{replicated}" else ["all_gather"])


NOTHING_GIVEN = ArrayOptions(mesh=None, shape=None, dtype=None)


def test_the_missing_options_are_named():
    for text, mesh, message in [
        ("P('x')", "x=4,y=2", "--shape 16,16 --dtype f32"),
        (SOURCE, None, "--mesh x=4,y=2"),
    ]:
        with pytest.raises(ReshardError, match=f": {message}$"):
            read_only_layout(text, replace(NOTHING_GIVEN, mesh=mesh))


LINES = [
    {"name": "w", "mesh": "x=4,y=2", "source": "f32[{x}4, 8]", "target": "f32[16, 8]"},
    {"name": "v", "mesh": {"x": 4, "y": 2}, "source": "P('x')", "target": "P()", "shape": [8], "dtype": "f32"},
    {"source": "f32[{x}2]", "target": "f32[8]"},
]


@pytest.fixture
def moves(tmp_path):
    path = tmp_path / "moves.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    return str(path)


def test_lines_make_a_table(call, moves, tmp_path):
    ran = call("plan", "--mesh", "x=4,y=2", "--batch", moves, "--csv", "--budget", "100B")
    assert (ran.code, ran.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert [(row["name"], row["received_bytes"], row["error"][:10]) for row in rows] == [
        ("w", "", "budget 100"),
        ("v", "24", ""),
        ("3", "24", ""),
    ]
    assert "give --batch FILE" in call("plan", "--csv", *MESH, SOURCE, TARGET).err
    assert "leave out --tree" in call("plan", "--batch", moves, "--csv", "--json").err


def test_each_line_is_planned(call, moves):
    ran = call("plan", "--mesh", "x=4,y=2", "--batch", moves)
    assert (ran.code, ran.err) == (0, "")
    plans = [json.loads(line) for line in ran.out.splitlines()]
    assert [each["name"] for each in plans] == ["w", "v", "3"]
    assert [rs.Plan.from_json(json.dumps(each)).received_bytes for each in plans] == [384, 24, 24]


def test_a_tree_is_one_plan(call, moves):
    ran = call("plan", "--mesh", "x=4,y=2", "--batch", moves, "--tree", "--json", "--network", "tpu-v5p")
    tree = rs.TreePlan.from_json(ran.out)
    assert (tree.names, tree.launches, tree.received_bytes) == (("w", "v", "3"), 1, 432)
    assert tree.seconds is not None
    shown = call("plan", "--mesh", "x=4,y=2", "--batch", moves, "--tree")
    assert shown.out.startswith("3 arrays in 1 batch\n")


def test_a_budget_is_for_the_tree(call, moves):
    ran = call("plan", "--mesh", "x=4,y=2", "--batch", moves, "--tree", "--budget", "700")
    assert ran.code != 0 and "the smallest that works is 720 B" in ran.err


def test_standard_input(call, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(LINES[0])))
    assert json.loads(call("plan", "--batch", "-").out)["name"] == "w"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: '{' is not JSON"),
        ("[]", "line 1: '[]' is not a move"),
        ('{"source": "f32[4]"}', "line 1: {'source': 'f32[4]'} is not a move"),
        (
            '{"source": "P()", "target": "P()", "mesh": "x=1", "dtype": "f4", "shape": [true]}',
            "line 1: the shape [True]",
        ),
        ('{"source": "f32[4]", "target": "f32[4]", "mesh": "x=1", "name": null}', "line 1: the name None: give text"),
        ('{"source": "f32[4]", "target": "f32[4]", "to": 1}', "line 1: unknown key 'to'"),
        ('{"source": "f32[4]", "target": "f32[4]", "network": "h100"}', "unknown key 'network'; give --network"),
        ('{"source": "f32[4]", "target": "f32[4]", "mesh": 4}', "line 1: the mesh 4"),
        ('{"source": "f32[4]", "target": "f32[4]", "shape": 4}', "line 1: the shape 4"),
        ('{"source": "f32[{z}4]", "target": "f32[4]", "mesh": "x=2"}', "line 1: unknown axis 'z'"),
        ("[" * 100000, "line 1: "),
        ('{"source": "f32[4]", "target": "f32[5]", "mesh": "x=2"}', "line 1: source f32[4] has global shape (4,)"),
        ('{"source": "f32[4]", "target": "f32[4]", "mesh": {"x=2,y": 2}}', "line 1: bad axis name 'x=2,y'"),
    ],
)
def test_a_line_that_is_not_a_move_is_named(call, tmp_path, line, message):
    path = tmp_path / "moves.jsonl"
    path.write_text(line)
    ran = call("plan", "--batch", str(path))
    assert ran.code != 0 and message in ran.err


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="only Unix has /dev/zero")
def test_a_file_without_lines_is_not_read_to_its_end(call):
    ran = call("plan", "--batch", "/dev/zero")
    assert ran.code == 2 and "has a line above 1048576 characters" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--tree"],
        ["f32[4]"],
        ["--batch", "/nowhere/moves.jsonl"],
        ["--batch", "{moves}", "f32[4]", "f32[4]"],
        ["--batch", "{moves}", "--explain"],
        ["--batch", "{moves}", "--slack", "much"],
        ["--batch", "{moves}", "--view", "a b -> b a"],
        ["--batch", "{moves}", "--size", "a=2"],
        ["--batch", "{moves}", "--take", "0=1"],
        ["--batch", "{moves}", "--into", "0=1"],
        ["--batch", "{moves}", "--cast"],
    ],
)
def test_what_does_not_go_together_is_refused(call, moves, arguments):
    ran = call("plan", "--mesh", "x=4,y=2", *(each.replace("{moves}", moves) for each in arguments))
    assert ran.code != 0 and ran.err


def test_two_lines_of_one_name_are_refused(call, tmp_path):
    path = tmp_path / "moves.jsonl"
    path.write_text(f"{json.dumps(LINES[0])}\n{json.dumps(LINES[0])}\n")
    assert "two lines are called 'w'" in call("plan", "--batch", str(path), "--tree").err
