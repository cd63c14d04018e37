"""`reshard plan --batch`: JSON lines in, JSON lines or one tree out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import reshard as rs

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
        ('{"source": "f32[4]", "target": "f32[4]", "to": 1}', "line 1: "),
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
    ],
)
def test_what_does_not_go_together_is_refused(call, moves, arguments):
    ran = call("plan", "--mesh", "x=4,y=2", *(each.replace("{moves}", moves) for each in arguments))
    assert ran.code != 0 and ran.err


def test_two_lines_of_one_name_are_refused(call, tmp_path):
    path = tmp_path / "moves.jsonl"
    path.write_text(f"{json.dumps(LINES[0])}\n{json.dumps(LINES[0])}\n")
    assert "two lines are called 'w'" in call("plan", "--batch", str(path), "--tree").err
