"""Every operation of StableHLO beside reshards that the pass takes: no abort, and what plain JAX computes.

On the host the programs run; for TPUs they are compiled ahead of time. Each child process compiles some groups of the
corpus, so that a compiler that ends its process ends no other test.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jax.extend.mlir.dialects import stablehlo

from tests.jax.stablehlo import BY_TITLE, CASES, groups
from tests.jax.stablehlo.base import ABORTS, OpCase

ROOT = Path(__file__).parents[2]
SAMPLE = ("fft-two-dims", "while-scan-of-fft", "case-nested", "reduce-of-two")
Group = Sequence[OpCase]
tpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="install jax[tpu] to compile for TPUs")
PLATFORMS = ("cpu", pytest.param("tpu", marks=tpu))


def test_every_operation_has_a_case() -> None:
    operations = {value.OPERATION_NAME for value in vars(stablehlo).values() if hasattr(value, "OPERATION_NAME")}
    assert len(operations) > 110
    assert operations - {case.operation for case in CASES} == set()


def test_the_titles_of_cases_are_their_own() -> None:
    assert len(BY_TITLE) == len(CASES)


def test_the_documentation_lists_the_exceptions() -> None:
    page = (ROOT / "docs" / "developers" / "jax-engine.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page.partition("## What XLA is given")[2], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed == {case.name for case in CASES if case.refused or case.left} - {"custom_call"}


def chunks() -> list[list[Group]]:
    """The groups of each child process: four programs of many cases, or the cases that stand alone."""
    many = [group for group in groups() if len(group) > 1]
    ending = [group for group in groups() if group[0].refused and ABORTS in map(group[0].refused_on, ("cpu", "tpu"))]
    single = [group for group in groups() if len(group) == 1 and group not in ending]
    parts = [
        [*several[at : at + size]] for several, size in ((many, 4), (single, 8)) for at in range(0, len(several), size)
    ]
    return [*parts, *([group] for group in ending)]


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", chunks(), ids=lambda chunk: chunk[0][0].title)
@pytest.mark.parametrize("context", ["inline", "nested"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_chunk(platform: str, context: str, chunk: list[Group]) -> None:
    assert list(faults(platform, context, chunk)) == []


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=[tpu, pytest.mark.sweep])])
def test_a_sample(platform: str) -> None:
    assert list(faults(platform, "inline", [[BY_TITLE[title] for title in SAMPLE]])) == []


def faults(platform: str, context: str, chunk: list[Group]) -> Iterator[str]:
    """What is wrong with the programs of some groups: nothing, or a line for each."""
    names = ["+".join(case.title for case in group) for group in chunk]
    command = [sys.executable, "-m", "tests.jax.stablehlo.worker", platform, context, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    stages = {(line["group"], line["stage"]): line for line in lines}  # The last line of a stage is its end.
    for name, group in zip(names, chunk, strict=True):
        fault = _fault(platform, group, stages.get((name, "plain"), {}), stages.get((name, "ours"), {}))
        if fault:
            yield f"{name}: {fault}; {run.stderr[-2000:]}"


def _fault(platform: str, group: Group, plain: dict[str, Any], ours: dict[str, Any]) -> str:
    """What is wrong with one program, from what its two stages said; empty if nothing is."""
    refused = group[0].refused_on(platform)
    if refused == ABORTS:
        return "" if plain.get("outcome") == "begun" else f"plain JAX is expected to abort: {plain}"
    if refused is not None:
        outcome = plain.get("outcome", "")
        return (
            ""
            if outcome not in ("ok", "begun") and re.search(refused, outcome)
            else f"plain JAX is expected to refuse: {plain}"
        )
    if plain.get("outcome") != "ok" or plain["lacks"]:
        return f"plain JAX: {plain}"
    if ours.get("outcome") != "ok" or ours["new"]:
        return f"after the pass: {ours}"
    if group[0].left:
        return "" if re.search(group[0].left, ours["why"]) else f"it is expected to be left: {ours}"
    return "" if ours["taken"] else f"nothing is taken: {ours}"


@pytest.mark.parametrize(
    ("case", "plain", "ours", "fault"),
    [
        ("sine", {"outcome": "ok", "lacks": []}, {"outcome": "ok", "new": [], "taken": 2, "why": ""}, ""),
        ("sine", {"outcome": "begun"}, {}, "plain JAX: "),
        ("sine", {"outcome": "ok", "lacks": ["sine"]}, {}, "plain JAX: "),
        ("sine", {"outcome": "ok", "lacks": []}, {"outcome": "begun"}, "after the pass"),
        ("sine", {"outcome": "ok", "lacks": []}, {"outcome": "ok", "new": ["stablehlo.sine"]}, "after the pass"),
        (
            "sine",
            {"outcome": "ok", "lacks": []},
            {"outcome": "ok", "new": [], "taken": 0, "why": ""},
            "nothing is taken",
        ),
        ("unary_einsum", {"outcome": "ok", "lacks": []}, {}, "expected to refuse"),
        ("unary_einsum", {"outcome": "begun"}, {}, "expected to refuse"),
        ("unary_einsum", {"outcome": "op can't be translated to XLA HLO"}, {}, ""),
        ("tuple-kept", {"outcome": "ok", "lacks": []}, {}, "expected to abort"),
        ("tuple", {"outcome": "ok", "lacks": []}, {"outcome": "ok", "new": [], "taken": 2, "why": ""}, "to be left"),
    ],
)
def test_faults_are_seen(case: str, plain: dict[str, Any], ours: dict[str, Any], fault: str) -> None:
    seen = _fault("cpu", [BY_TITLE[case]], plain, ours)
    assert bool(seen) == bool(fault) and fault in seen
