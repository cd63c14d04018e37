"""`reshard prove`: the proof, its queries, and the place where a wrong program goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import reshard as rs
from reshard.cli import main
from reshard.lower import lower_plan
from reshard.proofs import plan_proof

PAIR = ["--mesh", "x=4,y=2", "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"]


z3 = pytest.importorskip("z3", reason="proofs need reshard[prove]")


def test_it_prints_the_proof_and_writes_queries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each query asks for a counterexample to one claim, so another solver must find it unsatisfiable."""
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["prove", *PAIR, "-o", str(tmp_path / "q.smt2")]) == 0
    mesh = rs.Mesh(x=4, y=2)
    plan = rs.plan(*(rs.Layout.parse(text, mesh) for text in PAIR[2:]))
    assert capsys.readouterr().out == f"{rs.prove(plan).explain(90)}\n"
    queries = (tmp_path / "q.smt2").read_text().split("(reset)\n")
    assert len(queries) > 1
    for query in queries:
        solver = z3.Solver()
        solver.from_string(query)
        assert solver.check() == z3.unsat


def test_a_budget_is_part_of_the_plan(capsys: pytest.CaptureFixture[str]):
    assert main(["prove", *PAIR, "--budget", "4200"]) == 0
    assert "step 1, exchange" in capsys.readouterr().out


def test_a_wrong_program_exits_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def wrong(plan: rs.Plan):
        program = lower_plan(plan)
        (step,) = program.instructions
        swapped = tuple(tuple(reversed(group)) for group in step.groups)
        return replace(program, instructions=(replace(step, groups=swapped),))

    monkeypatch.setattr(plan_proof, "lower_plan", wrong)
    assert main(["prove", *PAIR]) == 1
    printed = capsys.readouterr()
    assert not printed.out and "device" in printed.err and "f32[{y}8, 16, {x}4]" in printed.err


FOUR = ["--mesh", "x=2,y=2,z=2", "f32[{x}4, {y}4]", "f32[{y}4, 8]"]


def test_a_shorter_plan_is_sought_on_request(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["prove", *FOUR]) == 0
    assert "launches:" not in capsys.readouterr().out
    assert main(["prove", *FOUR, "--launches", "-o", str(tmp_path / "q.smt2")]) == 0
    assert "launches: no plan with fewer than 2 launches receives at most 128 bytes" in capsys.readouterr().out
    assert "no choice meets all conditions" in (tmp_path / "q.smt2").read_text()


def test_a_bad_limit_is_refused(capsys: pytest.CaptureFixture[str]):
    for limit in ("-1", "nan"):
        assert main(["prove", *FOUR, "--launches", f"--limit={limit}"]) == 2
        assert "--limit" in capsys.readouterr().err
