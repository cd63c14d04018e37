"""The quickstarts by copy and paste, in an interpreter of their own that nobody has set up for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import blocks

ROOT = Path(__file__).resolve().parent.parent
UNSET = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")


def environment() -> dict[str, str]:
    """This environment without what the tests have set for jax."""
    own = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**own, "PYTHONPATH": str(ROOT), "TPU_SKIP_MDS_QUERY": "1", "PYTHON_BASIC_REPL": "1"}


def text(name: str) -> str:
    return (ROOT / "docs" / f"quickstart-{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["plans", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "weights"))]
)
def test_pasted_blocks_print_what_the_next_block_says(name: str):
    pasted = "\n".join(block.text for block in blocks(text(name), "python"))
    line = [sys.executable, "-i", "-q"]
    ran = subprocess.run(
        line, cwd=ROOT, env=environment(), input=pasted, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.stdout == "".join(block.text for block in blocks(text(name), "text")), ran.stderr
    assert "Traceback" not in ran.stderr and "Error" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("name", ["jax", "plans", "weights", "mpi"])
def test_no_prompt_is_pasted_and_what_is_printed_follows_its_block(name: str):
    assert ">>>" not in text(name)
    if name != "mpi":
        languages = re.findall(r"^```(python|text)", text(name), re.MULTILINE)
        assert languages == ["python", "text"] * (len(languages) // 2)


@pytest.mark.slow
def test_the_script_for_ranks(tmp_path: Path):
    pytest.importorskip("mpi4py")
    (script,) = blocks(text("mpi"), "python")
    (tmp_path / "pencils.py").write_text(script.text, encoding="utf-8")
    line = [sys.executable, "-m", "reshard", "run", "-n", "4", "pencils.py"]
    ran = subprocess.run(
        line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
