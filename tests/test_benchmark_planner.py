"""Planning times of two commits beside each other: which rows are compared, and that the other commit is what runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import planner_against
from benchmarks.planner_against import Ratio, compared, measure_against, table

ROW, NEW, ZERO = ("even", "<x=4>"), ("even", "<x=8>"), ("uneven", "<x=4>")
PLANNER = "import json, sys; print(json.dumps([dict(kind='even', what=' '.join(sys.argv[2:]), median={seconds})]))\n"


def test_rows_that_all_runs_have_are_compared_round_by_round():
    rounds = [({ROW: 2.0, ZERO: 0.0}, {ROW: 1.0, ZERO: 1.0}), ({ROW: 4.0}, {ROW: 3.0}), ({ROW: 4.0}, {ROW: 2.0})]
    assert compared([(before, {**now, NEW: 1.0}) for before, now in rounds]) == [Ratio(*ROW, 4.0, 2.0, 0.5, 0.5, 0.75)]


def test_a_row_has_a_colour_where_all_rounds_agree():
    ratios = [
        Ratio("even", name, 1.0, 1.0, 1.0, *ends) for name, *ends in (("a", 0.5, 0.9), ("b", 1.1, 2.0), ("c", 0.9, 1.1))
    ]
    assert [row.style for row in table("main~1", ratios).rows] == ["green", "red", None]


def test_each_commit_runs_its_own_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def git(*arguments: str) -> None:
        as_someone = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *as_someone, *arguments], cwd=tmp_path, check=True, capture_output=True)

    script = tmp_path / "benchmarks" / "planner.py"
    script.parent.mkdir()
    git("init")
    for seconds in (2.0, 1.0):
        script.write_text(PLANNER.format(seconds=seconds), encoding="utf-8")
        git("add", ".")
        git("commit", "-m", f"{seconds} s")
    monkeypatch.setattr(planner_against, "ROOT", tmp_path)
    assert measure_against("HEAD~1", 2, ["--pairs=3"]) == [Ratio("even", "--pairs=3", 2.0, 1.0, 0.5, 0.5, 0.5)]
    with pytest.raises(SystemExit, match="git worktree add"):
        measure_against("no such commit", 2, [])
