"""A sample of benchmarks/programs.py: programs that need jax alone, each in a process of its own; and its own count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real_programs import PROGRAMS
from benchmarks.real_programs.base import BY_HAND
from benchmarks.real_programs.counting import received_bytes
from reshard import hlo
from tests.doctor.fragments import RECORDED

UNKNOWN = ("gather_v5p-2slices", "kinds_v5p-2slices", "overlap")
"""Receives between slices, and collectives that TPU splits into fusions: the count does not know these."""
COUNTED = [path for path in RECORDED if not path.stem.startswith(UNKNOWN)]
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "saves"),
    [
        ("issue_21562", "jax", True),
        pytest.param("moe_layer", "jax", False, marks=pytest.mark.sweep),
        ("lineax_gradient_descent", "lineax", True),
        pytest.param("penzai_llama", "penzai", True, marks=pytest.mark.sweep),
    ],
)
def test_a_program_is_never_worse_with_the_pass(name, needs, saves, tmp_path):
    pytest.importorskip(needs)
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "programs.py"), "--only", name, "--json", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads(rows.read_text())
    assert row["same_bits"] and not row["violations"]
    assert (row["pass"]["received"] < row["plain"]["received"]) == saves
    assert row["still_not_needed"] <= 0.2 * row["not_needed"]
    shown = subprocess.run([*command[:2], "--table", str(rows)], capture_output=True, text=True, check=True).stdout
    assert f"| {name} |" in shown


def test_the_corpus_is_of_many_libraries():
    written = [one for one in PROGRAMS.values() if BY_HAND not in one.tags]
    assert len(written) >= 60 and len({one.library for one in written}) >= 25


@pytest.mark.slow
def test_a_program_written_by_hand_yields_the_same():
    command = [sys.executable, str(ROOT / "benchmarks" / "programs.py"), "--by-hand", "--only", "stencil_9_point"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by hand 1,600 B; plain 4,608 B (2.88)" in done.stdout


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.name)
def test_the_two_counts_agree(path):
    text = path.read_text()
    assert received_bytes(text) == hlo.traffic(hlo.parse(text)).received_bytes


@pytest.mark.parametrize(
    ("line", "received"),
    [
        ("((f32[64]), f32[8]) reduce-scatter-start(%p), replica_groups=[1,8]<=[8], dimensions={0}", 7 * 32),
        ("(f32[8], f32[64]) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}", 7 * 32),
        ("f32[64] all-reduce-start(%p), replica_groups=[1,8]<=[8]", 2 * 7 * 32),
    ],
)
def test_what_is_started_counts_what_it_yields(line, received):
    """GPUs start collectives, whose shapes have their operands too."""
    assert received_bytes(f"HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %g = {line}\n}}\n") == received
