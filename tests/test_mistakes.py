"""Thirty mistakes on the command line: each message names the thing and the cure (in Python: test_rejections)."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.cli import main

PAIR = ("f32[{x}4]", "f32[16]")
ON_X = ("--mesh", "x=4")
VIEW = ("f32[{x}24, 5]", "f32[3, {x}8, 5]", "--view")

COMMANDS = [  # what is typed, the thing that is wrong, and the cure
    (("pln", *PAIR), "'pln'", "did you mean 'plan'?"),
    (("--verson",), "'--verson'", "did you mean '--version'?"),
    (("plan", "--mseh", "x=4", *PAIR), "'--mseh'", "did you mean '--mesh'?"),
    (("plan", *ON_X, *PAIR, "--bugdet=1MiB"), "'--bugdet'", "did you mean '--budget'?"),
    (("plan", *ON_X, "f32[{x}4,", "16]", "f32[16]"), "f32[16]", "put quotes around a layout"),
    (("plan", *ON_X, PAIR[0]), "SOURCE and TARGET", "--batch FILE"),
    (("plan", *PAIR), "'f32[{x}4]'", "give the mesh: --mesh x=4,y=2"),
    (("plan", "--mesh", "data=4", "f32[{dta}4]", "f32[16]"), "unknown axis 'dta'", "did you mean 'data'?"),
    (("plan", "--mesh", "x=four", *PAIR), "'x=four'", "write axes as name=size"),
    (("plan", "--mesh", "x=0", *PAIR), "axis 'x' has size 0", "at least 1"),
    (("plan", "--mesh", "x=4,x=2", *PAIR), "occurs twice", "give every axis its own name"),
    (("plan", *ON_X, "f32[{x}4", "f32[16]"), "'f32[{x}4'", "write dtype[dims]"),
    (("plan", *ON_X, "f3[{x}4]", "f32[16]"), "dtype 'f3'", "use a numpy name (float32)"),
    (("plan", *ON_X, PAIR[0], "f32[17]"), "(17,)", "give both the same global shape"),
    (("plan", *ON_X, PAIR[0], "bf16[16]"), "bfloat16", "cast=True"),
    (("plan", *ON_X, "f32[{x}{x}4]", "f32[64]"), "axis 'x'", "use every part of an axis once"),
    (("plan", *ON_X, "f32[4] + som{x}", "f32[4]"), "'som'", "use one of sum"),
    (("plan", *ON_X, *PAIR, "--budget", "lots"), "'lots'", "e.g. 64MiB"),
    (("plan", *ON_X, *PAIR, "--budget", "1"), "budget 1 B", "the smallest that works is 80 B"),
    (("plan", *ON_X, *PAIR, "--network", "tpu-v5"), "'tpu-v5'", "did you mean 'tpu-v5p'?"),
    (("plan", *ON_X, *PAIR, "--slack", "lots"), "slack 'lots'", "e.g. 0.05"),
    (("plan", *ON_X, "P('x')", "P()", "--shape", "16"), "without dtype", "--dtype f32"),
    (("plan", *ON_X, "P('x'", "P()", "--shape", "16", "--dtype", "f32"), "\"P('x'\"", "write P('x', None)"),
    (("plan", *ON_X, *PAIR, "--html", "/nowhere/a.html"), "/nowhere/a.html", "give a file in a folder that is there"),
    (("plan", "--batch", "none.jsonl"), "'none.jsonl'", "give a file of JSON lines"),
    (("plan", *ON_X, *VIEW, "(three h d -> three h d"), "'(three h d -> three h d'", "as in (a b)"),
    (("plan", *ON_X, *VIEW, "(three h) d -> three h d", "--size", "thre=3"), "'thre'", "its atoms are three, h, d"),
    (("show", *ON_X, PAIR[0], "--limit", "0"), "--limit 0", "at least 1 row"),
    (("run", "-n", "2", "none.py"), "'none.py'", "give the path of one"),
    (("doctor", "none.mlir"), "none.mlir", "give optimized HLO"),
]


@pytest.mark.parametrize(("words", "thing", "cure"), COMMANDS, ids=[" ".join(words) for words, _, _ in COMMANDS])
def test_on_the_command_line(
    words: tuple[str, ...],
    thing: str,
    cure: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code
    shown = capsys.readouterr()
    assert code == 2 and not shown.out
    assert shown.err.startswith("reshard: error: ") and shown.err.count("\n") == 1
    assert thing in shown.err and cure in shown.err
