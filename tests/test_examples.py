"""The examples run as they are printed, what they post is right, and their pages show what they are.

An example whose first lines say `reshard run -n N examples/NAME.py` checks its own number, and ends with an error where
it is wrong. Its page, docs/examples/NAME.md, has that command with what it prints, `...` for what differs from one run
to the next, and parts of the script in `python` blocks.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import reshard as rs
from examples import nixl_reads
from tests.layouts import random_crossing
from tests.run_examples import HEAD
from tests.test_docs import blocks, broken_links, commands

FOLDER = Path(__file__).resolve().parent.parent / "examples"
PAGES = FOLDER.parent / "docs" / "examples"
MATCHED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def ranks_of(script: Path) -> int:
    """The ranks that the first lines of a script say; 0 if it is for one process."""
    first = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    said = re.search(rf"^ *reshard run -n (\d+) examples/{script.name}$", first, re.MULTILINE)
    return int(said[1]) if said else 0


ON_RANKS = [script.stem for script in sorted(FOLDER.glob("*.py")) if ranks_of(script)]


def read_page(name: str) -> str:
    page = PAGES / f"{name}.md"
    assert page.exists(), f"{page} is missing: it has the command with what it prints, and the lines that matter"
    return page.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted({ranks_of(FOLDER / f"{name}.py") for name in ON_RANKS}))
def test_examples_print_what_their_pages_show(ranks: int) -> None:
    names = [name for name in ON_RANKS if ranks_of(FOLDER / f"{name}.py") == ranks]
    line = [sys.executable, "-m", "reshard", "run", "-n", str(ranks), "-m", "tests.run_examples", *names]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=FOLDER.parent, env=env, capture_output=True, text=True, timeout=480, check=False)
    assert not done.returncode, done.stdout + done.stderr
    printed = dict(part.split("\n", 1) for part in done.stdout.split(HEAD)[1:])
    assert list(printed) == names
    for name in names:
        listed = [command for block in blocks(read_page(name), "console") for command in commands(block)]
        shown = [each.output for each in listed if each.command == f"reshard run -n {ranks} examples/{name}.py"]
        assert len(shown) == 1, f"the page shows {[each.command for each in listed]}"
        assert doctest.OutputChecker().check_output(shown[0], printed[name], MATCHED), f"{name} prints\n{printed[name]}"


@pytest.mark.parametrize("name", ON_RANKS)
def test_the_code_on_a_page_is_the_scripts(name: str) -> None:
    script = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(script.splitlines()) <= 130
    for line in read_page(name).splitlines():
        assert not line.startswith("```") or line in ("```python", "```console", "```text", "```"), line
    for block in blocks(read_page(name), "python"):
        shown = block.text.strip("\n")
        places = [textwrap.indent(shown, " " * 4 * depth) for depth in range(5)]
        assert any(f"\n{place}\n" in script for place in places), f"not in the script:\n{shown}"


def test_every_example_on_ranks_has_a_page_in_the_index() -> None:
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    assert {path.stem for path in PAGES.glob("*.md")} == {*ON_RANKS, "index"}
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == {*ON_RANKS}
    assert [link for page in PAGES.glob("*.md") for link in broken_links(page)] == []


def run_example(name: str) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / name], cwd=FOLDER.parent, capture_output=True, text=True, timeout=240, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_carries_a_plan_on_four_processes() -> None:
    assert sorted(run_example("torch_gloo.py").splitlines()) == [
        f"rank {rank} has its 16 rows of qkv" for rank in (2, 3)
    ]


def test_reads_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    nixl_reads.main()
    assert "read 6 B at 0x1006 of device 0 into 0x4000" in capsys.readouterr().out
    proved = 0
    for seed in range(40):
        source, target = random_crossing(random.Random(seed))
        plan = rs.plan(source, target)
        if (
            source.partial
            or not set(source.mesh.devices).isdisjoint(target.mesh.devices)
            or len(plan.schedule_for(source.mesh.devices[0])) > 1
        ):
            continue
        size = source.nbytes(1)
        bases = {device: 1 << 20 for device in (*source.mesh.devices, *target.mesh.devices)}
        reads = [
            (peer, device, (there - bases[peer]) // size, (here - bases[device]) // size, length // size)
            for device in target.mesh.devices
            for peer, there, here, length in nixl_reads.list_reads(plan, device, bases)
        ]
        assert rs.verify(reads, source, target).transfers == len(reads)
        proved += 1
    assert proved > 5
