"""`make demo` runs, fits a terminal, and its figures are consistent; an inconsistent figure is reported."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard as rs
from benchmarks import demo, xla_identity
from benchmarks.xla_identity import XlaError, collectives, xla_identities

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "benchmarks" / "demo.py"
WITHOUT_JAX = f"import sys, runpy; sys.modules['jax'] = None; runpy.run_path({str(DEMO)!r}, run_name='__main__')"
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="asks XLA; install jax")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        # XLA compiles as for its users: results are compared by bits.
        env={**xla_identity._environment(1), "PYTHONUTF8": "1", "XLA_FLAGS": "", **env},
        capture_output=True,
        encoding="utf-8",
        timeout=600,  # Of a machine that does much else.
        check=False,
    )


TWICE = """from functools import cache
from benchmarks import demo
for name in ("cases", "enabled_figures", "served_figures"):
    setattr(demo, name, cache(getattr(demo, name)))
assert demo.main(["--json"]) == demo.main([]) == 0
"""
"""The figures as JSON, then as `make demo` shows them."""


@pytest.fixture(scope="module")
def printed() -> tuple[str, str]:
    done = run("-c", TWICE, COLUMNS="80", TERM="xterm")
    assert done.returncode == 0, done.stdout + done.stderr
    _, end = json.JSONDecoder().raw_decode(done.stdout)
    return done.stdout[:end], done.stdout[end:]


@pytest.fixture(scope="module")
def figures(printed: tuple[str, str]) -> dict[str, Any]:
    return json.loads(printed[0])


@pytest.fixture(scope="module")
def small() -> demo.Case:
    pair = [rs.Layout.parse(text, demo.MESH) for text in demo.SMALL]
    plan = rs.plan(*pair)
    return demo.Case(plan, plan, plan.peak_bytes, demo.execute(plan), None)


@pytest.mark.slow
def test_the_plan_is_at_the_bound_and_keeps_its_promises(figures: dict[str, Any]):
    for case in figures["cases"]:
        plan, tight = case["plan"], case["tight"]
        assert case["disagreements"] == []
        assert plan["received_bytes"] == plan["lower_bound_bytes"] == tight["received_bytes"]
        assert tight["peak_bytes"] <= case["budget"] < plan["peak_bytes"]
        assert rs.Plan.from_json(json.dumps(plan)).to_dict() == plan
    done = figures["cases"][0]["run"]
    assert done["right"] == done["elements"] == 16**3
    assert done["received"] == figures["cases"][0]["plan"]["received_bytes"]
    assert done["peak"] <= figures["cases"][0]["plan"]["peak_bytes"]


@pytest.mark.slow
@needs_jax
def test_xla_needs_more(figures: dict[str, Any]):
    assert figures["missing"] is None
    for case in figures["cases"]:
        plan, xla = case["plan"], case["xla"]
        assert xla["received"] > plan["received_bytes"]
        assert xla["peak"] > plan["peak_bytes"]
        assert sum(xla["collectives"].values()) >= 1


@pytest.mark.slow
def test_what_it_prints_fits_a_terminal(printed: tuple[str, str]):
    _, shown = printed
    assert max(map(len, shown.splitlines())) <= 80
    assert "4,096 of 4,096 elements right" in shown
    assert "…" not in shown
    assert ("The XLA column is missing" in shown) == (importlib.util.find_spec("jax") is None)


def test_without_jax_it_says_so_and_how_to_install_it():
    done = run("-c", WITHOUT_JAX, COLUMNS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The XLA column is missing: jax is not installed" in done.stdout
    assert demo.INSTALL in " ".join(done.stdout.split())
    assert "XLA receives" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ({"right": 4095}, "1 of 4096 elements are wrong"),
        ({"received": 1791}, "1791 B were received, 1792 B were promised"),
        ({"launches": 2}, "2 collectives ran, 1 were promised"),
        ({"peak": 6145}, "6145 B were live, at most 6144 B were promised"),
    ],
)
def test_a_planted_disagreement_is_found(small: demo.Case, planted: dict[str, int], message: str):
    assert demo.disagreements(small) == []
    assert small.run is not None
    assert demo.disagreements(replace(small, run=replace(small.run, **planted))) == [message]


def test_a_disagreement_fails_the_command(
    small: demo.Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert small.run is not None
    wrong = replace(small, run=replace(small.run, right=0))
    monkeypatch.setattr(demo, "cases", lambda: ([wrong, small], None))
    monkeypatch.setattr(demo, "enabled_figures", lambda: (None, ["the results differ"]))
    monkeypatch.setattr(demo, "served_figures", lambda: (None, []))
    assert demo.main([]) == 1
    printed = capsys.readouterr().out
    assert "DISAGREES: 4096 of 4096 elements are wrong" in printed and "DISAGREES: the results differ" in printed


@pytest.mark.slow
@needs_jax
def test_the_pass_is_shown(figures: dict[str, Any]):
    assert figures["problems"] == []
    before, after = figures["pass"]["before"], figures["pass"]["after"]
    assert before["received"] == 8 * after["received"] and before["temp"] > 2 * after["temp"]
    assert set(after["collectives"]) == {"all_to_all"} and figures["pass"]["equal"]


@pytest.mark.slow
@needs_jax
def test_weights_arrive_at_the_bound_on_other_devices(figures: dict[str, Any]):
    served = figures["served"]
    assert served["right"] == served["elements"] > served["array_bytes"] // 2
    assert served["received"] == served["promised"] == served["bound"]
    assert served["peak"] <= served["promised_peak"]


@pytest.mark.slow
@needs_jax
def test_collectives_of_the_compiled_identity():
    mesh = rs.Mesh(x=4, y=2)
    expected = [
        ("f32[16, 16]", "f32[{x}4, 16]", {}, 0),
        ("f32[{x}4, 16]", "f32[16, 16]", {"all-gather": 1}, 768),
        ("f32[{x}4, 16]", "f32[16, {x}4]", {"all-to-all": 1}, 192),
        ("f32[{x}{y}2, 16]", "f32[{y}{x}2, 16]", {"collective-permute": 1}, 128),
        ("f32[{x:(1)2}8, 16]", "f32[16, {x:(1)2}8]", {"all-to-all": 1}, 256),
    ]
    pairs = [(rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh)) for source, target, _, _ in expected]
    identities = xla_identities(pairs)
    assert [(identity.collectives, identity.received) for identity in identities] == [(c, r) for _, _, c, r in expected]
    assert [identity.warned for identity in identities] == [False] * len(expected)
    assert xla_identities([]) == []


@pytest.mark.parametrize(
    ("groups", "received"),
    [
        ("replica_groups={{0,1},{2,3}}", 16),
        ("replica_groups=[2,4]<=[8]", 24),
        ("replica_groups=mesh['x'=4,'y'=2] {'x'}", 24),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 24),
        ("replica_groups=mesh['x'=4,'y'=2] {'x':(1)2, 'y'}", 24),
    ],
)
def test_every_spelling_of_replica_groups_is_read(groups: str, received: int):
    assert collectives(f"  ROOT %a.1 = f32[8]{{0}} all-gather(%b), {groups}, dimensions={{0}}") == [
        ("all-gather", received)
    ]


@pytest.mark.parametrize(
    ("line", "received"),
    [
        ("%r = f32[2]{0} reduce-scatter(%b), replica_groups={{0,1,2,3}}", 24),
        ("%r = f32[8]{0} all-reduce(%b), replica_groups={{0,1,2,3}}", 48),
        ("%r = bf16[8]{0} collective-permute(%b), source_target_pairs={{0,1}}", 16),
        ("%r = (f32[4]{0}, /*index=1*/f32[4]{0}) all-to-all(%b, %c), replica_groups={{0,1}}", 16),
    ],
)
def test_every_collective_is_priced(line: str, received: int):
    assert [r for _, r in collectives(line)] == [received]


@pytest.mark.parametrize(
    "line",
    ["%r = f32[8] all-gather(%b), replica_groups={{0,x}}", "%r = f32[8] all-gather(%b), replica_groups=[2,x]<=[4]"],
)
def test_hlo_that_cannot_be_read_is_an_error(line: str):
    with pytest.raises(XlaError):
        collectives(line)
