"""The quickstarts by copy and paste, in an interpreter of their own that nobody has set up for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import blocks

ROOT = Path(__file__).resolve().parent.parent
RUN = """
import sys
from tests.test_examples import python_problems
sys.exit("\\n".join(python_problems(open(sys.argv[1]).read())) or None)
"""
UNSET = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")


def environment() -> dict[str, str]:
    """This environment without what the tests have set for jax."""
    own = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**own, "PYTHONPATH": str(ROOT), "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax", "weights"])
def test_a_page_in_a_new_interpreter(name: str):
    page = ROOT / "docs" / f"quickstart-{name}.md"
    line = [sys.executable, "-c", RUN, str(page)]
    ran = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_the_script_for_ranks(tmp_path: Path):
    pytest.importorskip("mpi4py")
    (script,) = blocks((ROOT / "docs" / "quickstart-mpi.md").read_text(encoding="utf-8"), "python")
    (tmp_path / "pencils.py").write_text(script.text, encoding="utf-8")
    line = [sys.executable, "-m", "reshard", "run", "-n", "4", "pencils.py"]
    ran = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
